//! Context parallelism: the tokens of a micro-batch over the ranks of a group, and the exchange of keys.
//!
//! A rank has the queries of its segments, and fetches the keys and values of all visible tokens. Keys travel after
//! norm and rotation. A segment attends like a chunk of a longer prompt: the last positions of the key range have the
//! queries. In the backward pass, gradients of keys go back to their ranks, to be added in rank order, in f32.

use super::{count_exchange, wide};
use crate::ranks::{CollectiveId, Comm};
use candle_core::Result;
use ft_base::memory::place;
use ft_kernels::attention::{self, Causal, Sequences};
use ft_kernels::ledger::Peers;
use ft_kernels::padded::Padded;
use ft_kernels::tensor::On;
use ft_kernels::{Tensor, gemm};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Segments of a micro-batch over a context group.
#[derive(Debug)]
pub struct ContextParallel<'a> {
    /// Ranks of the group; `None` in a plan.
    comm: Option<&'a dyn Comm>,
    /// This rank in the group.
    me: usize,
    /// Lengths of the documents of the micro-batch.
    docs: Vec<usize>,
    /// Token ranges by rank, each at most at one rank.
    segments: Vec<Vec<Range<usize>>>,
    /// Ranks with tokens. The others take no part in the exchanges of this micro-batch.
    active: Vec<usize>,
    spans: Mutex<BTreeMap<Option<usize>, Arc<Spans>>>,
    /// A fault that tests must notice.
    #[cfg(test)]
    pub fault: Option<Fault>,
}

/// Faults of context parallelism, for tests of the tests.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Keys of other ranks do not arrive.
    Keys,
    /// Gradients of keys stay where they were computed.
    Gradients,
    /// Gradients of keys are averaged over the ranks.
    Mean,
    /// Dropout and noise are drawn by the row on the rank.
    Rows,
    /// Dropout of the head is drawn by the target on the rank.
    Targets,
    /// The load-balancing loss knows the rank's tokens alone.
    Counts,
    /// The rank is lost before the keys of the second layer.
    Lost,
}

/// Keys visible to this rank's queries under a window, and their exchange.
#[derive(Debug, PartialEq)]
struct Plan {
    /// Tokens of the gathered keys, in order, own ones included.
    gathered: Vec<Range<usize>>,
    /// Rows of this rank for each peer.
    out: Vec<(usize, Range<usize>)>,
    /// Places of each peer's rows among the gathered keys.
    into: Vec<(usize, Range<usize>)>,
    /// Own rows, with their first place among the gathered keys.
    own: Vec<(Range<usize>, usize)>,
    /// Attention of each segment.
    parts: Vec<PartPlan>,
    /// Whether any rank needs keys of another.
    crosses: bool,
}

/// Attention of a segment.
#[derive(Debug, PartialEq)]
struct PartPlan {
    /// Rows of the queries.
    queries: Range<usize>,
    /// Places of the keys.
    keys: Range<usize>,
    /// Lengths of the documents of these keys.
    docs: Vec<usize>,
}

/// [`Plan`] with the documents of each segment on a device.
#[derive(Debug)]
struct Spans {
    plan: Plan,
    seqs: Vec<Sequences>,
}

/// Results of attention for the backward pass.
#[derive(Debug)]
pub struct Outputs {
    /// Output of all queries `[t, h c]`.
    pub o: Padded,
    /// By segment.
    parts: Vec<attention::Saved>,
    /// Gathered keys and values. `None` if none, or if fetched again.
    keys: Option<[Tensor; 2]>,
}

impl Outputs {
    /// Results of attention on one rank.
    pub fn one(saved: attention::Saved) -> Self {
        Self { o: saved.o.clone(), parts: vec![saved], keys: None }
    }

    /// Drops what [`ContextParallel::backward`] fetches again.
    pub fn drop_keys(&mut self) {
        self.keys = None;
    }

    /// Rows and results of each segment.
    pub fn parts(&self) -> impl Iterator<Item = (Range<usize>, &attention::Saved)> {
        let ends = self.parts.iter().scan(0, |end, part| {
            *end += part.o.dims().0;
            Some(*end)
        });
        ends.zip(&self.parts).map(|(end, part)| (end - part.o.dims().0..end, part))
    }

    /// Result of attention on one rank.
    ///
    /// # Errors
    /// Several segments.
    pub fn whole(&self) -> Result<&attention::Saved> {
        match self.parts.as_slice() {
            [one] => Ok(one),
            _ => candle_core::bail!("attention of several segments on one rank"),
        }
    }
}

/// The part of `range` inside of `other`.
fn common(range: &Range<usize>, other: &Range<usize>) -> Option<Range<usize>> {
    let both = range.start.max(other.start)..range.end.min(other.end);
    (!both.is_empty()).then_some(both)
}

/// Tokens with keys visible to the queries of a segment.
fn seen(docs: &[usize], segment: &Range<usize>, window: Option<usize>) -> Range<usize> {
    let mut start = 0;
    for n in docs {
        if segment.start < start + n {
            break;
        }
        start += n;
    }
    let first = window.map_or(0, |w| (segment.start + 1).saturating_sub(w));
    start.max(first)..segment.end
}

/// Lengths of the parts of documents in a range of tokens.
fn docs_in(docs: &[usize], range: &Range<usize>) -> Vec<usize> {
    let (mut start, mut out) = (0, Vec::new());
    for n in docs {
        out.extend(common(&(start..start + n), range).map(|part| part.len()));
        start += n;
    }
    out
}

/// Union of ranges, in order.
fn union(mut all: Vec<Range<usize>>) -> Vec<Range<usize>> {
    all.sort_by_key(|r| r.start);
    let mut out: Vec<Range<usize>> = Vec::new();
    for range in all.into_iter().filter(|r| !r.is_empty()) {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// Place of a token in a list of ranges laid end to end.
fn place_of(token: usize, ranges: &[Range<usize>]) -> usize {
    let before = ranges.iter().take_while(|r| r.end <= token).map(|r| r.len()).sum::<usize>();
    ranges.iter().find(|r| r.contains(&token)).map_or(before, |r| before + token - r.start)
}

impl Plan {
    fn new(docs: &[usize], segments: &[Vec<Range<usize>>], me: usize, window: Option<usize>) -> Self {
        let own = &segments[me];
        let gathers = |rank: usize| union(segments[rank].iter().map(|s| seen(docs, s, window)).collect());
        let gathered = gathers(me);
        let length = |ranges: &[Range<usize>]| ranges.iter().map(|r| r.len()).sum::<usize>();
        let crosses = (0..segments.len()).any(|rank| length(&gathers(rank)) > length(&segments[rank]));
        let (mut out, mut into) = (Vec::new(), Vec::new());
        for peer in (0..segments.len()).filter(|peer| *peer != me) {
            let rows = |from: &[Range<usize>], needed: &[Range<usize>], laid: &[Range<usize>]| {
                let both = from.iter().flat_map(|s| needed.iter().filter_map(|n| common(s, n)));
                let places = both.map(|tokens| {
                    let at = place_of(tokens.start, laid);
                    (peer, at..at + tokens.len())
                });
                places.collect::<Vec<_>>()
            };
            out.extend(rows(own, &gathers(peer), own));
            into.extend(rows(&segments[peer], &gathered, &gathered));
        }
        let part = |s: &Range<usize>| {
            let (tokens, at) = (seen(docs, s, window), place_of(s.start, own));
            let first = place_of(tokens.start, &gathered);
            PartPlan {
                queries: at..at + s.len(),
                keys: first..first + tokens.len(),
                docs: docs_in(docs, &tokens),
            }
        };
        let places = own.iter().map(|s| {
            let at = place_of(s.start, own);
            (at..at + s.len(), place_of(s.start, &gathered))
        });
        let (places, parts) = (places.collect(), own.iter().map(part).collect());
        Self { out, into, own: places, parts, gathered, crosses }
    }

    /// Number of gathered keys.
    fn keys(&self) -> usize {
        self.gathered.iter().map(|r| r.len()).sum()
    }
}

impl<'a> ContextParallel<'a> {
    /// Segments of a micro-batch with documents of these lengths. `comm` is the context group.
    pub fn new(comm: &'a dyn Comm, docs: &[usize], segments: Vec<Vec<Range<usize>>>) -> Self {
        Self { comm: Some(comm), ..Self::planned(docs, segments, comm.rank()) }
    }

    /// As [`ContextParallel::new`], of rank `me` in a plan.
    pub fn planned(docs: &[usize], segments: Vec<Vec<Range<usize>>>, me: usize) -> Self {
        let active = (0..segments.len()).filter(|r| !segments[*r].is_empty()).collect();
        Self {
            comm: None,
            me,
            docs: docs.to_vec(),
            segments,
            active,
            spans: Mutex::default(),
            #[cfg(test)]
            fault: None,
        }
    }

    /// Lengths of the documents of the micro-batch.
    pub fn docs(&self) -> &[usize] {
        &self.docs
    }

    /// Token ranges of this rank.
    pub fn own(&self) -> &[Range<usize>] {
        &self.segments[self.me]
    }

    /// Number of keys visible to this rank's queries.
    pub fn keys(&self, window: Option<usize>) -> usize {
        Plan::new(&self.docs, &self.segments, self.me, window).keys()
    }

    /// Device bytes of the lists for attention with these windows.
    pub fn bytes(&self, windows: impl IntoIterator<Item = Option<usize>>, cuda: bool) -> usize {
        let parts = windows.into_iter().flat_map(|w| Plan::new(&self.docs, &self.segments, self.me, w).parts);
        let sizes = parts.map(|p| attention::Sizes::of_last(&p.docs, p.keys.len() - p.queries.len()));
        sizes.map(|sizes| Sequences::bytes(sizes, cuda)).sum()
    }

    /// The spans of a window, made at its first layer.
    fn spans(&self, window: Option<usize>, on: On<'_>) -> Result<Arc<Spans>> {
        let mut all = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spans) = all.get(&window) {
            return Ok(Arc::clone(spans));
        }
        let plan = Plan::new(&self.docs, &self.segments, self.me, window);
        let seqs = |p: &PartPlan| {
            let first = p.keys.len() - p.queries.len();
            match on {
                On::Real(device) => Sequences::new(&p.docs, first, device),
                On::Ghost(_) => Ok(Sequences::planned(&p.docs, first)),
            }
        };
        let seqs = plan.parts.iter().map(seqs).collect::<Result<_>>()?;
        let spans = Arc::new(Spans { plan, seqs });
        all.insert(window, Arc::clone(&spans));
        Ok(spans)
    }

    /// Exchanges rows with peers.
    fn exchange(&self, what: &'static str, out: &[(usize, Tensor)], into: &[(usize, Tensor)]) -> Result<()> {
        let Some(comm) = self.comm else {
            count_exchange(Peers::Context, into);
            return Ok(());
        };
        #[cfg(test)]
        match self.fault {
            Some(Fault::Keys) => return Ok(()),
            Some(Fault::Lost) if place::now().1 == 2 => candle_core::bail!("a fault of a test"),
            _ => {}
        }
        let at = CollectiveId::unit(what, place::now().1);
        let sent = comm.exchange_among((&self.active, at), out, into).and_then(|arrival| Ok(arrival.wait()?));
        sent.map_err(candle_core::Error::wrap)
    }

    /// Keys and values `[keys, g, c]` of all tokens visible to this rank's queries.
    fn gather(&self, plan: &Plan, own: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        if !plan.crosses {
            return Ok(own.map(Tensor::clone));
        }
        let all = own.map(|x| -> Result<Tensor> {
            let (_, g, c) = x.dims3()?;
            let all = Tensor::zeros((plan.keys(), g, c), x.dtype(), x.device())?;
            for (rows, to) in &plan.own {
                all.narrow(0, *to, rows.len())?.slice_set(&x.narrow(0, rows.start, rows.len())?, 0, 0)?;
            }
            Ok(all)
        });
        let [k, v] = all;
        let all = [k?, v?];
        let views = |of: [&Tensor; 2], places: &[(usize, Range<usize>)]| {
            let mut views = Vec::with_capacity(2 * places.len());
            for (peer, rows) in places {
                for x in of {
                    views.push((*peer, x.narrow(0, rows.start, rows.len())?));
                }
            }
            Ok::<_, candle_core::Error>(views)
        };
        let into = views([&all[0], &all[1]], &plan.into)?;
        self.exchange("the keys and values", &views(own, &plan.out)?, &into)?;
        Ok(all)
    }

    /// Attention of this rank's queries `[t, h, c]`, with its keys and values `[t, g, c]`, masked and scaled as in
    /// `how`. Collective.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn forward(&self, [q, k, v]: [&Tensor; 3], how: &Causal<'_>, rank: usize) -> Result<Outputs> {
        let spans = self.spans(how.window, q.device())?;
        let keys = self.gather(&spans.plan, [k, v])?;
        let part = |(part, seqs): (&PartPlan, &Sequences)| {
            let [k, v] = [&keys[0], &keys[1]].map(|x| x.narrow(0, part.keys.start, part.keys.len()));
            let q = q.narrow(0, part.queries.start, part.queries.len())?;
            attention::forward(&q, &k?, &v?, &Causal { seqs, ..*how }, rank)
        };
        let parts = spans.plan.parts.iter().zip(&spans.seqs).map(part).collect::<Result<Vec<_>>>()?;
        let outputs: Vec<Padded> = parts.iter().map(|p| p.o.clone()).collect();
        let o = Padded::cat(&outputs)?;
        drop(outputs);
        // The parts become views of the whole.
        let mut whole = Vec::with_capacity(parts.len());
        for (saved, part) in parts.into_iter().zip(&spans.plan.parts) {
            let o = o.narrow(part.queries.start, part.queries.len())?;
            whole.push(attention::Saved { o, lse: saved.lse });
        }
        Ok(Outputs { o, parts: whole, keys: Some(keys) })
    }

    /// Gradients of queries `[t, h, c]`, keys `[t, g, c]` and values `[t, g c]` with room for `rank` columns, given the
    /// gradient of the output `[t, h, c]`. Collective.
    ///
    /// # Errors
    /// As [`ContextParallel::forward`].
    pub fn backward(
        &self,
        [q, k, v, d_o]: [&Tensor; 4],
        saved: Outputs,
        how: &Causal<'_>,
        rank: usize,
    ) -> Result<(Tensor, Tensor, Padded)> {
        let spans = self.spans(how.window, q.device())?;
        let plan = &spans.plan;
        let keys = match saved.keys {
            Some(keys) => keys,
            None => self.gather(plan, [k, v])?,
        };
        let mut sums: Option<[Tensor; 2]> = None;
        let mut dq = Vec::with_capacity(plan.parts.len());
        for ((part, seqs), saved) in plan.parts.iter().zip(&spans.seqs).zip(&saved.parts) {
            let of = |x: &Tensor| x.narrow(0, part.queries.start, part.queries.len());
            let [k, v] = [&keys[0], &keys[1]].map(|x| x.narrow(0, part.keys.start, part.keys.len()));
            let (k, v, how) = (k?, v?, Causal { seqs, ..*how });
            if !plan.crosses && plan.parts.len() == 1 {
                return attention::backward(&of(q)?, &k, &v, saved, &of(d_o)?, &how, rank);
            }
            let (own, dk, dv) = attention::backward(&of(q)?, &k, &v, saved, &of(d_o)?, &how, 0)?;
            dq.push(own);
            let zeros = |x: &Tensor| Tensor::zeros(x.shape(), wide(x.dtype()), x.device());
            let [to_k, to_v] = match &sums {
                Some(sums) => sums,
                None => sums.insert([zeros(&keys[0])?, zeros(&keys[1])?]),
            };
            for (to, x) in [(to_k, dk), (to_v, dv.values()?)] {
                gemm::acc(&to.narrow(0, part.keys.start, part.keys.len())?, &x)?;
            }
        }
        drop(keys);
        let Some(sums) = sums else { candle_core::bail!("attention without queries") };
        let [dk, dv] = self.give_back(plan, &sums)?;
        drop(sums);
        let (t, g, c) = dv.dims3()?;
        let dv = dv.to_dtype(v.dtype())?.reshape((t, g * c))?;
        Ok((Tensor::cat(&dq, 0)?, dk.to_dtype(k.dtype())?, Padded::beside_room(&dv, rank)?))
    }

    /// Sends the gradients of gathered keys and values to their ranks, and adds the gradients of this rank's keys and
    /// values, in rank order.
    fn give_back(&self, plan: &Plan, sums: &[Tensor; 2]) -> Result<[Tensor; 2]> {
        let rows: usize = plan.own.iter().map(|(rows, _)| rows.len()).sum();
        let (mut out, mut into) = (Vec::new(), Vec::new());
        for x in sums {
            let (_, g, c) = x.dims3()?;
            for (peer, places) in &plan.into {
                out.push((*peer, x.narrow(0, places.start, places.len())?));
            }
            for (peer, rows) in &plan.out {
                into.push((*peer, Tensor::zeros((rows.len(), g, c), x.dtype(), x.device())?));
            }
        }
        if plan.crosses {
            self.exchange("the gradients of keys and values", &out, &into)?;
        }
        let add = |(which, x): (usize, &Tensor)| -> Result<Tensor> {
            let (_, g, c) = x.dims3()?;
            let to = Tensor::zeros((rows, g, c), x.dtype(), x.device())?;
            let came = into.iter().skip(which * plan.out.len()).zip(&plan.out);
            for rank in 0..self.segments.len() {
                #[cfg(test)]
                if self.fault == Some(Fault::Gradients) && rank != self.me {
                    continue;
                }
                for ((_, part), (_, rows)) in came.clone().filter(|((peer, _), _)| *peer == rank) {
                    gemm::acc(&to.narrow(0, rows.start, rows.len())?, part)?;
                }
                for (rows, at) in plan.own.iter().filter(|_| rank == self.me) {
                    gemm::acc(&to.narrow(0, rows.start, rows.len())?, &x.narrow(0, *at, rows.len())?)?;
                }
            }
            #[cfg(test)]
            if self.fault == Some(Fault::Mean) {
                return to.affine(1.0 / self.segments.len() as f64, 0.0);
            }
            Ok(to)
        };
        let [k, v] = sums;
        Ok([add((0, k))?, add((1, v))?])
    }
}

#[cfg(test)]
#[path = "context_parallel_tests.rs"]
mod tests;
