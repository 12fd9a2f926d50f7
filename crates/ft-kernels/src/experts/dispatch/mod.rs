//! Grouping of tokens by expert, sorted once per layer for both forward and backward pass.
//!
//! A token with `k` experts is `k` pairs. Pairs sorted by expert, then by token, are the `n = t k` input
//! rows of the experts; an expert owns a contiguous run of rows. No tensor has the size experts x
//! tokens x width.
//!
//! The CPU sorts on the host, CUDA ([`Sorted`]) on the device, with one launch for all experts and no
//! synchronization. Layers without grouped products (DoRA or dropout in experts) use host lists on CUDA
//! too: per layer, one small copy (4 bytes per pair) to the host and three back.
//!
//! | file | purpose |
//! |---|---|
//! | `mod` | host lists and operations on them: on CPU slices, and composed for other devices |
//! | `each` | experts in parallel on CPU threads |
//! | `cuda` | device lists |
//! | `exchange` | rows between ranks that own experts |

mod cuda;
mod each;
mod exchange;

pub use self::cuda::Sorted;
pub use self::each::{each, side_by_side};
pub use self::exchange::{DispatchCounts, RowExchange, ranges};

use crate::Tensor;
use crate::cpu::blocks::{Values, by_blocks, ghosts, written};
use crate::cpu::{self, Float, Halves, ROWS, dot, is_native, on_real, tensor, vectorised, view};
use crate::cpu::{narrow, wide};
use crate::ledger::{Allocation, Ledger, Role};
use crate::route;
use crate::tensor::{Ghost, On, all_of, moves};
use crate::upcast;
use candle_core::{DType, Device, Result, Shape};
use half::bf16;
use half::vec::HalfBitsVecExt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Tokens sorted by expert.
#[derive(Debug, Default)]
pub struct Groups {
    /// Number of tokens.
    pub tokens: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Expert per pair [t * k].
    pub expert: Vec<u32>,
    /// Token per row `[n]`.
    pub token: Vec<u32>,
    /// Pair per row `[n]`.
    pair: Vec<u32>,
    /// Row per pair [t * k].
    place: Vec<u32>,
    /// First row of each expert, and the end of the last [e + 1].
    starts: Vec<usize>,
    /// `token`, `pair` and `place` on a device other than the CPU.
    index: Option<[Tensor; 3]>,
    /// Planned routing (ghosts only).
    spread: Option<PlannedRouting>,
    /// Device lists; if set, the host lists are empty.
    sorted: Option<Sorted>,
    /// Exchange of the rows with the owners of their experts, if ranks split these. Set once, with the first pass.
    exchange: OnceLock<Arc<RowExchange>>,
}

/// Planned routing of tokens to experts.
#[derive(Debug)]
struct PlannedRouting {
    /// Number of experts represented per run.
    alike: Vec<f64>,
    /// Number of experts with tokens, used to choose between parallel and sequential experts. Real
    /// routing lies between an even spread and the most skewed one.
    busy: usize,
    /// Memory of the lists.
    _lists: Arc<Allocation>,
}

/// Rows of one expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRows {
    /// Expert index.
    pub expert: usize,
    /// First row.
    pub start: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of experts represented by this run: 1, except in plans.
    pub alike: f64,
}

impl Groups {
    /// Sorts the pairs of `expert` [t * k] by expert, then by token.
    ///
    /// # Errors
    /// An expert index is out of range.
    pub fn new(expert: Vec<u32>, top_k: usize, experts: usize, device: &Device) -> Result<Self> {
        let mut starts = vec![0usize; experts + 1];
        for e in &expert {
            match starts.get_mut(*e as usize + 1) {
                Some(n) => *n += 1,
                None => candle_core::bail!("routing: expert {e} of {experts}"),
            }
        }
        for e in 0..experts {
            starts[e + 1] += starts[e];
        }
        let n = expert.len();
        let (mut token, mut pair, mut place) = (vec![0u32; n], vec![0u32; n], vec![0u32; n]);
        let mut next = starts.clone();
        for (p, e) in expert.iter().enumerate() {
            let row = next[*e as usize];
            next[*e as usize] += 1;
            (token[row], pair[row], place[p]) = ((p / top_k.max(1)) as u32, p as u32, row as u32);
        }
        let lists = || all_of([&token, &pair, &place].map(|list| Tensor::from_slice(list, n, device)));
        let index = (!On::from(device).is_native()).then(lists).transpose()?;
        let tokens = n / top_k.max(1);
        Ok(Self { tokens, top_k, expert, token, pair, place, starts, index, ..Self::default() })
    }

    /// The chosen experts `[t, k]` (u32), on the device of `probs` `[t, e]`.
    ///
    /// # Errors
    /// Device errors.
    pub fn chosen(&self, probs: &Tensor) -> Result<Tensor> {
        match &self.sorted {
            Some(sorted) => Ok(sorted.chosen.clone()),
            None => route::index(&self.expert, self.top_k, probs),
        }
    }

    /// Routes tokens to their `top_k` most likely experts, given router probabilities [t, e].
    ///
    /// Ghosts spread tokens evenly over the expected number of busy experts, or (see
    /// [`crate::ledger::Ledger::route`]) send all of them to the experts with the largest saved
    /// activations per row, given by `kept`. `alike` lists the number of identical experts behind each
    /// planned one.
    pub fn choose(
        probs: &Tensor,
        top_k: usize,
        alike: &[usize],
        kept: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        let (tokens, experts) = probs.dims2()?;
        match probs.device() {
            On::Real(device) => Self::new(route::choose(probs, top_k)?, top_k, experts, device),
            On::Ghost(ledger) => {
                let n = tokens * top_k;
                // (rows per expert, number of experts), per planned expert
                let mut runs = vec![(0, 0.0); alike.len()];
                if ledger.skewed() {
                    let mut order: Vec<usize> = (0..alike.len()).collect();
                    order.sort_by_key(|e| std::cmp::Reverse(kept(*e)));
                    let mut left = n;
                    for e in order {
                        // a token never chooses an expert twice
                        let own = left.min(alike[e] * tokens);
                        left -= own;
                        runs[e] = (tokens.min(own), own as f64 / tokens.max(1) as f64);
                    }
                } else {
                    // probability of an expert without tokens
                    let idle = (1.0 - top_k as f64 / experts as f64).max(0.0).powf(tokens as f64);
                    let each = n as f64 / experts as f64;
                    let rows = (each / (1.0 - idle)).ceil() as usize;
                    let of = |a: &usize| (rows, *a as f64 * each / rows.max(1) as f64);
                    runs = alike.iter().map(of).collect();
                }
                let even = runs.iter().map(|r| r.1).sum::<f64>().round() as usize;
                let busy = if ledger.skewed() { experts } else { even };
                Ok(Self::planned(ledger, (tokens, top_k), &runs, busy))
            }
        }
    }

    /// A plan's routing: rows and number of experts of each planned one, and number of experts with tokens.
    fn planned(ledger: &Ledger, (tokens, top_k): (usize, usize), runs: &[(usize, f64)], busy: usize) -> Self {
        let n = tokens * top_k;
        let mut starts = vec![0; runs.len() + 1];
        (0..runs.len()).for_each(|i| starts[i + 1] = starts[i] + runs[i].0);
        // expert, token, pair and place: four u32 per pair
        let lists = Arc::new(ledger.role(Role::Activations, || ledger.hold(16 * n as u64)));
        let list = || Tensor::from(Ghost::new(ledger, n, DType::U32));
        let index = (!On::Ghost(ledger).is_native()).then(|| [list(), list(), list()]);
        let alike = runs.iter().map(|r| r.1).collect();
        let spread = Some(PlannedRouting { alike, busy, _lists: lists });
        Self { tokens, top_k, starts, index, spread, ..Self::default() }
    }

    /// Wraps lists sorted on a device.
    pub fn on_device(sorted: Sorted) -> Self {
        Self { tokens: sorted.tokens, top_k: sorted.top_k, sorted: Some(sorted), ..Self::default() }
    }

    /// The device lists, if any.
    pub fn sorted(&self) -> Option<&Sorted> {
        self.sorted.as_ref()
    }

    /// The exchange of the rows, or that of `make` for the first pass.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn exchange(&self, make: impl FnOnce() -> Result<RowExchange>) -> Result<Arc<RowExchange>> {
        match self.exchange.get() {
            Some(exchange) => Ok(Arc::clone(exchange)),
            None => {
                let new = Arc::new(make()?);
                Ok(Arc::clone(self.exchange.get_or_init(|| new)))
            }
        }
    }

    /// Rows of each expert, and if asked for the token of each row, on the host. Device lists are copied.
    pub fn on_host(&self, tokens: bool) -> Result<(Vec<u32>, Vec<u32>)> {
        if let Some(sorted) = &self.sorted {
            return sorted.on_host(tokens);
        }
        let counts = self.counts().map(|n| n as u32).collect();
        Ok((counts, if tokens { self.token.clone() } else { Vec::new() }))
    }

    /// In a plan: rows for the `own` experts of this rank, as many as leave it; `alike` as in [`Groups::choose`].
    pub fn arriving(
        &self,
        own: usize,
        alike: &[usize],
        ledger: &Ledger,
        dtype: Option<DType>,
    ) -> Result<Self> {
        let n = self.sorted.as_ref().map_or(self.tokens * self.top_k, Sorted::rows);
        // Uneven routing brings more rows to some ranks: half as many again.
        let n = if ledger.skewed() { n + n / 2 } else { n };
        if let Some(dtype) = dtype {
            let chosen = Tensor::from(Ghost::new(ledger, (n, 1), DType::U32));
            return Ok(Self::on_device(Sorted::new(&chosen, own, dtype)?));
        }
        let each = n as f64 / own.max(1) as f64;
        let rows = each.ceil() as usize;
        let of = |a: &usize| (rows, *a as f64 * each / rows.max(1) as f64);
        Ok(Self::planned(ledger, (n, 1), &alike.iter().map(of).collect::<Vec<_>>(), own))
    }

    /// Input rows of the experts on this rank: local rows, or the received ones after the exchange.
    pub fn computed(&self) -> &Groups {
        self.exchange.get().map_or(self, |t| &t.here)
    }

    /// Runs `f` for one expert's rows; ghosts record the cost `alike` times.
    pub fn times<R>(&self, run: &ExpertRows, on: On<'_>, f: impl FnOnce() -> R) -> R {
        match on {
            On::Real(_) => f(),
            On::Ghost(l) => {
                let at_once = if side_by_side(self.busy(), on) { l.machine().threads as f64 } else { 1.0 };
                l.times(run.alike, at_once, f)
            }
        }
    }

    /// Number of experts with tokens.
    pub fn busy(&self) -> usize {
        self.spread.as_ref().map_or_else(|| self.runs().len(), |s| s.busy)
    }

    /// Number of tokens of each expert.
    pub fn counts(&self) -> impl Iterator<Item = usize> {
        self.starts.windows(2).map(|w| w[1] - w[0])
    }

    /// Row ranges of all experts with tokens.
    pub fn runs(&self) -> Vec<ExpertRows> {
        let all = self.tokens * self.top_k;
        self.counts()
            .enumerate()
            .filter(|(_, rows)| *rows > 0)
            .map(|(expert, rows)| {
                let alike = self.spread.as_ref().map_or(1.0, |s| s.alike[expert]);
                // even spreads round up, so the last experts would start past the end
                let start = self.starts[expert].min(all.saturating_sub(rows));
                ExpertRows { expert, start, rows, alike }
            })
            .collect()
    }

    /// Token indices of one expert's rows.
    pub fn tokens_of(&self, run: &ExpertRows) -> &[u32] {
        self.token.get(run.start..run.start + run.rows).unwrap_or_default()
    }

    fn index(&self) -> Result<&[Tensor; 3]> {
        match &self.index {
            Some(i) => Ok(i),
            None => candle_core::bail!("routing: grouped for the CPU, used elsewhere"),
        }
    }

    /// Rows of `x` [t, d] in expert order: [n, d].
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        if is_native(x) {
            return on_real!(x.dtype(), self.gather_cpu(x, None, &self.whole()));
        }
        x.index_select(&self.index()?[0], 0)
    }

    /// Rows of `x` [t, d] routed to one expert, times their gates from `gates` [t, k]: [rows, d] in `x`'s
    /// dtype.
    pub fn gather_scaled(&self, x: &Tensor, gates: &Tensor, run: &ExpertRows) -> Result<Tensor> {
        if is_native(x) {
            return on_real!(x.dtype(), self.gather_cpu(x, Some(gates), run));
        }
        self.gather_composed(x, gates, run)
    }

    /// All rows, as those of one expert.
    pub fn whole(&self) -> ExpertRows {
        ExpertRows { expert: 0, start: 0, rows: self.tokens * self.top_k, alike: 1.0 }
    }

    fn gather_cpu<T: Float>(&self, x: &Tensor, gates: Option<&Tensor>, run: &ExpertRows) -> Result<Tensor> {
        let (d, x) = (self.width(x)?, x.contiguous()?);
        let reads: Vec<&Tensor> = [&x].into_iter().chain(gates).collect();
        let (shape, dtype) = (Shape::from((run.rows, d)), x.dtype());
        let out = [(shape.clone(), dtype)];
        if let Some([y]) = cpu::ghost_products_in::<T, 1>(by_blocks::<T>, &reads, out, |_| ()) {
            // count the read of this expert's rows only
            moves([&y, &y]);
            return Ok(y);
        }
        let gates = gates.map(view::<T>).transpose()?;
        let gates = gates.as_deref();
        if by_blocks::<T>(dtype) {
            let mut out = vec![0u16; run.rows * d].reinterpret_into::<bf16>();
            // a product is rounded once
            let product = |x, g: T| narrow((T::widened(wide(x)) * g).to_f64() as f32);
            self.fill(&mut out, (&Halves::of(&x)?[..], d), run, gates, product);
            return Tensor::from_vec(out, shape, &Device::Cpu);
        }
        let mut out = vec![T::zero(); run.rows * d];
        self.fill(&mut out, (&view::<T>(&x)?[..], d), run, gates, |x, g| x * g);
        tensor(out, shape, dtype)
    }

    /// Copies the rows of a run from `x` `[t, d]`, or their products with their gates.
    fn fill<B: Copy + Send + Sync, G: Copy + Sync>(
        &self,
        out: &mut [B],
        (x, d): (&[B], usize),
        run: &ExpertRows,
        gates: Option<&[G]>,
        product: impl Fn(B, G) -> B + Sync,
    ) {
        let fill = |(i, block): (usize, &mut [B])| {
            for (j, o) in block.chunks_mut(d).enumerate() {
                let row = run.start + i * ROWS + j;
                let from = &x[self.token[row] as usize * d..][..d];
                match gates.map(|g| g[self.pair[row] as usize]) {
                    None => o.copy_from_slice(from),
                    Some(g) => vectorised(|| o.iter_mut().zip(from).for_each(|(o, x)| *o = product(*x, g))),
                }
            }
        };
        // a single expert is gathered on its own thread
        match gates {
            None => cpu::each(out.chunks_mut(ROWS * d).enumerate(), fill),
            Some(_) => out.chunks_mut(ROWS * d).enumerate().for_each(fill),
        }
    }

    fn gather_composed(&self, x: &Tensor, gates: &Tensor, run: &ExpertRows) -> Result<Tensor> {
        let [token, pair, _] = self.index()?;
        let rows = x.index_select(&token.narrow(0, run.start, run.rows)?, 0)?;
        let g = gates.flatten_all()?.index_select(&pair.narrow(0, run.start, run.rows)?, 0)?.unsqueeze(1)?;
        upcast(&rows)?.broadcast_mul(&g)?.to_dtype(x.dtype())
    }

    /// `y[t] = sum over j of gates[t, j] * row(t, j)`, in the order of j; a plain sum without gates.
    ///
    /// # Shapes
    /// `parts`: the rows [rows, d] of each of [`Groups::runs`]. Result: [t, d] in `dtype`.
    pub fn combine(&self, parts: &[Tensor], gates: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
        match parts.first() {
            Some(p) if is_native(p) => on_real!(p.dtype(), self.combine_cpu(parts, gates, dtype)),
            Some(_) => self.combine_composed(parts, gates, dtype),
            None => candle_core::bail!("routing: no rows"),
        }
    }

    /// `dots[t, j] = x[t] . row(t, j)`, [t, k] in f32 (f64 in tests): the gradient of the gates.
    pub fn dots(&self, parts: &[Tensor], x: &Tensor) -> Result<Tensor> {
        if is_native(x) {
            return on_real!(x.dtype(), self.dots_cpu(parts, x));
        }
        self.dots_composed(parts, x)
    }

    /// Memory of widened copies of all rows, for ghosts not widened row by row. `part` is the output of
    /// any one expert.
    fn ghost_views<T: Float>(&self, part: &Tensor) -> Option<Allocation> {
        let g = part.ghost().filter(|_| part.dtype() != T::DTYPE && !by_blocks::<T>(part.dtype()))?;
        Some(g.ledger().hold((T::DTYPE.size_in_bytes() * self.whole().rows * part.dim(1).ok()?) as u64))
    }

    /// Values of each expert's rows.
    fn views<'a, T: Float>(&self, parts: &'a [Tensor]) -> Result<Vec<Values<'a, T>>> {
        let runs = self.runs();
        if runs.len() != parts.len()
            || runs.iter().zip(parts).any(|(r, p)| p.dims2().ok().map(|d| d.0) != Some(r.rows))
        {
            candle_core::bail!(
                "routing: {} tensors for {} experts, or of other sizes",
                parts.len(),
                runs.len()
            );
        }
        parts.iter().map(Values::of).collect()
    }

    /// Position of a pair's row: index into [`Groups::runs`], and value range within the run.
    fn row(&self, run_of: &[usize], pair: usize, d: usize) -> (usize, Range<usize>) {
        let e = self.expert[pair] as usize;
        let first = (self.place[pair] as usize - self.starts[e]) * d;
        (run_of[e], first..first + d)
    }

    /// Run index of each expert.
    fn run_of(&self) -> Vec<usize> {
        let mut out = vec![0; self.starts.len() - 1];
        self.runs().iter().enumerate().for_each(|(i, run)| out[run.expert] = i);
        out
    }

    fn combine_cpu<T: Float>(
        &self,
        parts: &[Tensor],
        gates: Option<&Tensor>,
        dtype: DType,
    ) -> Result<Tensor> {
        let d = parts[0].dim(1)?;
        let _copies = self.ghost_views::<T>(&parts[0]);
        let reads: Vec<&Tensor> = gates.into_iter().chain(&parts[..1]).collect();
        let shape = Shape::from((self.tokens, d));
        if let Some([y]) = ghosts::<T, 1>(&reads, (&shape, dtype), d, |_| ()) {
            return Ok(y);
        }
        let (views, run_of) = (self.views::<T>(parts)?, self.run_of());
        let gv = gates.map(view::<T>).transpose()?;
        let gs = gv.as_deref();
        let k = self.top_k;
        let ([y], _) = written((&shape, dtype), ROWS * d, |from, out| {
            let mut room = Vec::new();
            out.each(d, |at, [y]| {
                y.fill(T::zero());
                let t = (from + at) / d;
                for pair in t * k..(t + 1) * k {
                    let (run, own) = self.row(&run_of, pair, d);
                    let from = views[run].read(own, &mut room);
                    vectorised(|| match gs.map(|g| g[pair]) {
                        None => y.iter_mut().zip(from).for_each(|(y, x)| *y += *x),
                        Some(g) => y.iter_mut().zip(from).for_each(|(y, x)| *y += *x * g),
                    });
                }
            });
        })?;
        Ok(y)
    }

    fn combine_composed(&self, parts: &[Tensor], gates: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
        let rows = upcast(&self.by_pair(parts)?)?;
        match gates {
            None => rows.sum(1),
            Some(g) => rows.broadcast_mul(&g.unsqueeze(2)?)?.sum(1),
        }?
        .to_dtype(dtype)
    }

    /// All rows in pair order, [t, k, d].
    fn by_pair(&self, parts: &[Tensor]) -> Result<Tensor> {
        let [.., place] = self.index()?;
        let parts = if self.spread.is_some() { &parts[..1] } else { parts };
        let all = Tensor::end_to_end(parts, self.whole().rows)?;
        let all = all.index_select(place, 0)?;
        let d = all.dim(1)?;
        all.reshape((self.tokens, self.top_k, d))
    }

    fn dots_cpu<T: Float>(&self, parts: &[Tensor], x: &Tensor) -> Result<Tensor> {
        let d = self.width(x)?;
        let _copies = parts.first().and_then(|p| self.ghost_views::<T>(p));
        let shape = Shape::from((self.tokens, self.top_k));
        if let Some([y]) = ghosts::<T, 1>(&[x], (&shape, T::DTYPE), d, |_| ()) {
            return Ok(y);
        }
        let (views, run_of) = (self.views::<T>(parts)?, self.run_of());
        let (x, k) = (Values::<T>::of(x)?, self.top_k);
        let ([y], _) = written((&shape, T::DTYPE), ROWS * k, |from, out| {
            let (mut of_x, mut of_row) = (Vec::new(), Vec::new());
            out.each(k, |at, [dots]| {
                let t = (from + at) / k;
                let x = x.read(t * d..(t + 1) * d, &mut of_x);
                for (pair, o) in (t * k..).zip(dots) {
                    let (run, own) = self.row(&run_of, pair, d);
                    let row = views[run].read(own, &mut of_row);
                    *o = vectorised(|| dot(x, row));
                }
            });
        })?;
        Ok(y)
    }

    fn dots_composed(&self, parts: &[Tensor], x: &Tensor) -> Result<Tensor> {
        upcast(&self.by_pair(parts)?)?.broadcast_mul(&upcast(x)?.unsqueeze(1)?)?.sum(2)
    }

    fn width(&self, x: &Tensor) -> Result<usize> {
        let (t, d) = x.dims2()?;
        if t != self.tokens || d == 0 {
            candle_core::bail!("routing: {:?} for {} tokens", x.shape(), self.tokens);
        }
        Ok(d)
    }
}

#[cfg(test)]
mod tests;
