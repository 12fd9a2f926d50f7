//! The recurrence on the CPU: one task per document and key head.

use super::chunk::{self, Chunk, Room, Sizes};
use super::gates::{Gate, normalize, normalize_back};
use super::{Gradients, Heads, Inputs, State};
use crate::Tensor;
use crate::attention::Sequences;
use crate::cpu::blocks::written;
use crate::cpu::{self, Float, ROWS, View, ghost_products, tensor, view};
use crate::gemm::{Mat, gemm};
use crate::ledger::Ledger;
use candle_core::{DType, Result, Shape};

/// Values of the inputs.
struct Values<'a, T> {
    heads: Heads,
    qkv: View<'a, T>,
    a: View<'a, T>,
    b: View<'a, T>,
    gates: Vec<Gate<T>>,
}

impl<'a, T: Float> Values<'a, T> {
    fn of(x: &Inputs<'a>) -> Result<Self> {
        let (a_log, bias) = (view::<T>(x.a_log)?, view::<T>(x.bias)?);
        let gates =
            a_log.iter().zip(&*bias).map(|(a, bias)| Gate { factor: -a.exp(), bias: *bias }).collect();
        Ok(Self { heads: x.heads, qkv: view(x.qkv)?, a: view(x.a)?, b: view(x.b)?, gates })
    }

    /// Query, key, or value row of a token; `head` is a key head, or a value head for `part` 2.
    fn row(&self, token: usize, part: usize, head: usize) -> &[T] {
        let Heads { key_dim, value_dim, .. } = self.heads;
        let width = if part == 2 { value_dim } else { key_dim };
        &self.qkv[token * self.heads.channels() + part * self.heads.key_width() + head * width..][..width]
    }
}

/// A task: a document's tokens and a key head.
#[derive(Clone, Copy)]
struct Task {
    start: usize,
    tokens: usize,
    head: usize,
}

/// All tasks; outputs of a task are adjacent.
fn tasks(docs: &[usize], heads: Heads) -> Vec<Task> {
    let starts = docs.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n)));
    let of_doc = |(start, tokens)| (0..heads.keys).map(move |head| Task { start, tokens, head });
    starts.zip(docs.iter().copied()).flat_map(of_doc).collect()
}

/// Splits a buffer into one slice a task, of `width` values a token.
fn split<'a, T>(mut all: &'a mut [T], tasks: &[Task], width: usize) -> Vec<&'a mut [T]> {
    let part = |t: &Task| {
        let (own, rest) = std::mem::take(&mut all).split_at_mut(t.tokens * width);
        all = rest;
        own
    };
    tasks.iter().map(part).collect()
}

/// Finds a token's values in a buffer of [`split`].
struct Blocks<'a, T> {
    all: &'a [T],
    starts: Vec<usize>,
    docs: &'a [usize],
    keys: usize,
    width: usize,
}

impl<'a, T> Blocks<'a, T> {
    fn new(all: &'a [T], docs: &'a [usize], keys: usize, width: usize) -> Self {
        let starts = docs.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
        Self { all, starts, docs, keys, width }
    }

    fn of(&self, token: usize, head: usize) -> &'a [T] {
        let doc = self.starts.partition_point(|s| *s <= token) - 1;
        let (start, n) = (self.starts[doc], self.docs[doc]);
        &self.all[((start * self.keys + head * n) + token - start) * self.width..][..self.width]
    }
}

/// Normalized queries and keys of a chunk, with their products, for the value heads of a key head; and the gates.
struct Common<T> {
    q: Vec<T>,
    k: Vec<T>,
    /// Inverse lengths of queries and keys.
    inverse: [Vec<T>; 2],
    qk: Vec<T>,
    kk: Vec<T>,
    rate: Vec<T>,
    cum: Vec<T>,
}

impl<T: Float> Common<T> {
    fn new(l: usize, k: usize) -> Self {
        let of = |n: usize| vec![T::zero(); n];
        let inverse = [of(l), of(l)];
        Self { q: of(l * k), k: of(l * k), inverse, qk: of(l * l), kk: of(l * l), rate: of(l), cum: of(l) }
    }

    fn values(l: usize, k: usize) -> usize {
        2 * l * k + 2 * l * l + 4 * l
    }

    /// Loads the chunk of `l` tokens from `token` on.
    fn load(&mut self, x: &Values<'_, T>, token: usize, l: usize, head: usize) {
        let k = x.heads.key_dim;
        let scale = T::of((k as f64).powf(-0.5));
        for i in 0..l {
            let own = i * k..(i + 1) * k;
            self.inverse[0][i] = normalize(x.row(token + i, 0, head), scale, &mut self.q[own.clone()]);
            self.inverse[1][i] = normalize(x.row(token + i, 1, head), T::one(), &mut self.k[own]);
        }
        let keys = Mat::new(&self.k, l, k, k);
        gemm(&mut self.qk, l, false, Mat::new(&self.q, l, k, k), keys.t(), T::one(), false);
        gemm(&mut self.kk, l, false, keys, keys.t(), T::one(), false);
    }

    /// Rates and log-decays of a value head.
    fn gate(&mut self, x: &Values<'_, T>, token: usize, l: usize, head: usize) {
        let mut sum = T::zero();
        for i in 0..l {
            let at = (token + i) * x.heads.values + head;
            let (rate, log) = x.gates[head].of(x.a[at], x.b[at]);
            sum += log;
            (self.rate[i], self.cum[i]) = (rate, sum);
        }
    }

    fn chunk<'c>(&'c self, x: &'c Values<'_, T>, token: usize, l: usize, head: usize) -> Chunk<'c, T> {
        let Heads { key_dim: k, value_dim: v, .. } = x.heads;
        let values = &x.qkv[token * x.heads.channels() + 2 * x.heads.key_width() + head * v..];
        Chunk {
            sizes: Sizes { l, k, v },
            q: &self.q[..l * k],
            k: &self.k[..l * k],
            qk: &self.qk[..l * l],
            kk: &self.kk[..l * l],
            v: (values, x.heads.channels()),
            rate: &self.rate[..l],
            cum: &self.cum[..l],
        }
    }
}

/// Tasks of `docs` documents at the same time in a plan.
fn at_once(docs: usize, heads: Heads, l: &Ledger) -> usize {
    (docs * heads.keys).min(l.machine().threads.max(1) as usize)
}

/// See [`super::forward`].
pub fn forward<T: Float>(x: &Inputs<'_>, seqs: &Sequences, state: Option<&mut State>) -> Result<Tensor> {
    let (heads, (t, _)) = (x.heads, x.qkv.dims2()?);
    let (l, dtype) = (super::chunk(heads), x.qkv.dtype());
    let Heads { key_dim: k, value_dim: v, .. } = heads;
    let sizes = Sizes { l, k, v };
    let (width, of_state) = (heads.each() * v, heads.each() * k * v);
    let shape = Shape::from((t, heads.value_width()));
    // a state that continues has all heads throughout; other states live as long as their task
    let (count, held, own) =
        if state.is_some() { (1, heads.state(), 0) } else { (seqs.count(), 0, of_state) };
    let rooms = |ledger: &Ledger| {
        let each = own + Room::<T>::values(sizes, false) + Common::<T>::values(l, k) + l * v;
        let all = held + at_once(count, heads, ledger) * each + t * heads.value_width();
        ledger.touch((all * T::DTYPE.size_in_bytes()) as u64);
    };
    let reads = [x.qkv, x.a, x.b, x.a_log, x.bias];
    if let Some([o]) = ghost_products::<T, 1>(&reads, [(shape.clone(), dtype)], rooms) {
        return Ok(o);
    }
    let (values, whole) = (Values::<T>::of(x)?, [t]);
    // documents of the row, or the single document of the state
    let docs: &[usize] = if state.is_some() { &whole } else { &seqs.docs };
    let tasks = tasks(docs, heads);
    let mut o = vec![T::zero(); t * heads.value_width()];
    let mut given = match state.as_deref() {
        Some(State { heads: Some(s), .. }) => view::<T>(s)?.to_vec(),
        Some(_) => vec![T::zero(); tasks.len() * of_state],
        None => Vec::new(),
    };
    let mut given_of = given.chunks_mut(of_state);
    let work: Vec<_> =
        split(&mut o, &tasks, width).into_iter().zip(&tasks).map(|(o, t)| (o, t, given_of.next())).collect();
    cpu::each(work.into_iter(), |(o, task, given)| {
        let l = l.min(task.tokens).max(1);
        let (mut room, mut common) = (Room::new(Sizes { l, k, v }, false), Common::new(l, k));
        let (mut u, mut own) = (vec![T::zero(); l * v], vec![T::zero(); own]);
        let states = given.unwrap_or(&mut own);
        for from in (0..task.tokens).step_by(l) {
            let (token, l) = (task.start + from, l.min(task.tokens - from));
            common.load(&values, token, l, task.head);
            for (i, s) in states.chunks_mut(k * v).enumerate() {
                let head = task.head * heads.each() + i;
                common.gate(&values, token, l, head);
                let o = &mut o[from * width + i * v..];
                common.chunk(&values, token, l, head).forward(s, &mut u, Some((o, width)), &mut room);
            }
        }
    });
    if let Some(state) = state {
        state.heads = Some(tensor(given, (heads.values, k, v), DType::F32)?);
    }
    let blocks = Blocks::new(&o, docs, heads.keys, width);
    let ([y], _) = written::<T, _, 1>((&shape, dtype), ROWS * heads.value_width(), |from, out| {
        out.each(heads.value_width(), |at, [y]| {
            let token = (from + at) / heads.value_width();
            for (head, y) in y.chunks_mut(width).enumerate() {
                y.copy_from_slice(blocks.of(token, head));
            }
        });
    })?;
    Ok(y)
}

/// Gradients of a task's tokens, side by side: queries, keys, values, a, b.
fn widths(heads: Heads) -> [usize; 5] {
    [heads.key_dim, heads.key_dim, heads.each() * heads.value_dim, heads.each(), heads.each()]
}

/// See [`super::backward`].
pub fn backward<T: Float>(x: &Inputs<'_>, d_o: &Tensor, seqs: &Sequences) -> Result<Gradients> {
    let (heads, (t, _)) = (x.heads, x.qkv.dims2()?);
    let (dtype, of_head) = (x.qkv.dtype(), Shape::from((t, heads.values)));
    let width: usize = widths(heads).iter().sum();
    let vector = || (Shape::from((1, heads.values)), T::DTYPE);
    let out = [
        (x.qkv.shape().clone(), dtype),
        (of_head.clone(), dtype),
        (of_head.clone(), dtype),
        vector(),
        vector(),
    ];
    let reads = [x.qkv, x.a, x.b, x.a_log, x.bias, d_o];
    let rooms = |ledger: &Ledger| {
        let each = Back::<T>::values(heads, seqs.longest());
        let all = at_once(seqs.count(), heads, ledger) * each + t * heads.keys * width;
        ledger.touch((all * T::DTYPE.size_in_bytes()) as u64);
    };
    if let Some([qkv, a, b, a_log, bias]) = ghost_products::<T, 5>(&reads, out, rooms) {
        return Ok(Gradients { qkv, a, b, a_log, bias });
    }
    let (values, d_o) = (Values::<T>::of(x)?, view::<T>(d_o)?);
    let tasks = tasks(&seqs.docs, heads);
    let mut all = vec![T::zero(); t * heads.keys * width];
    let work = split(&mut all, &tasks, width).into_iter().zip(&tasks);
    let parts: Vec<Vec<[T; 2]>> =
        cpu::map(work, |(out, task)| Back::new(heads, task.tokens).run(&values, &d_o, *task, out));
    let mut sums = [vec![T::zero(); heads.values], vec![T::zero(); heads.values]];
    for (task, part) in tasks.iter().zip(&parts) {
        for (i, [a_log, bias]) in part.iter().enumerate() {
            sums[0][task.head * heads.each() + i] += *a_log;
            sums[1][task.head * heads.each() + i] += *bias;
        }
    }
    let blocks = Blocks::new(&all, &seqs.docs, heads.keys, width);
    // a part of all tokens: `first` columns of a task's row, `each` of a head
    let part = |parts: &[usize], shape: &Shape| -> Result<Tensor> {
        let [of_task, row] = [widths(heads), widths(heads).map(|w| w * heads.keys)];
        let columns = parts.iter().map(|p| row[*p]).sum::<usize>();
        let ([y], _) = written::<T, _, 1>((shape, dtype), ROWS * columns, |from, out| {
            out.each(columns, |at, [y]| {
                let token = (from + at) / columns;
                let mut y = y;
                for p in parts {
                    let first: usize = of_task[..*p].iter().sum();
                    let (own, rest) = std::mem::take(&mut y).split_at_mut(row[*p]);
                    for (head, own) in own.chunks_mut(of_task[*p]).enumerate() {
                        own.copy_from_slice(&blocks.of(token, head)[first..first + own.len()]);
                    }
                    y = rest;
                }
            });
        })?;
        Ok(y)
    };
    let [a_log, bias] = sums.map(|sum| tensor(sum, (1, heads.values), T::DTYPE));
    let qkv = part(&[0, 1, 2], x.qkv.shape())?;
    Ok(Gradients { qkv, a: part(&[3], &of_head)?, b: part(&[4], &of_head)?, a_log: a_log?, bias: bias? })
}

/// Buffers of a task's backward pass.
struct Back<T> {
    heads: Heads,
    /// Tokens of a chunk.
    l: usize,
    common: Common<T>,
    room: Room<T>,
    /// State of every value head before every chunk, and U of all tokens.
    states: Vec<T>,
    u: Vec<T>,
    /// Gradients of the state of every value head; of queries, keys, rates and log-decays of a chunk.
    ds: Vec<T>,
    dq: Vec<T>,
    dk: Vec<T>,
    d_rate: Vec<T>,
    d_log: Vec<T>,
}

impl<T: Float> Back<T> {
    fn new(heads: Heads, tokens: usize) -> Self {
        let Heads { key_dim: k, value_dim: v, .. } = heads;
        let l = super::chunk(heads).min(tokens).max(1);
        let of = |n: usize| vec![T::zero(); n];
        Self {
            heads,
            l,
            common: Common::new(l, k),
            room: Room::new(Sizes { l, k, v }, true),
            states: of((tokens.div_ceil(l) + 1) * heads.each() * k * v),
            u: of(tokens * heads.each() * v),
            ds: of(heads.each() * k * v),
            dq: of(l * k),
            dk: of(l * k),
            d_rate: of(l),
            d_log: of(l),
        }
    }

    fn values(heads: Heads, tokens: usize) -> usize {
        let Heads { key_dim: k, value_dim: v, .. } = heads;
        let l = super::chunk(heads).min(tokens).max(1);
        let of_task = (tokens.div_ceil(l) + 2) * heads.each() * k * v + tokens * heads.each() * v;
        of_task + Common::<T>::values(l, k) + Room::<T>::values(Sizes { l, k, v }, true) + 2 * l * k + 2 * l
    }

    /// Chunks of a task: first token within it, and tokens.
    fn chunks(&self, tokens: usize) -> impl DoubleEndedIterator<Item = (usize, usize)> + use<T> {
        let l = self.l;
        (0..tokens.div_ceil(l)).map(move |n| (n * l, l.min(tokens - n * l)))
    }

    /// Writes the gradients of a task to `out`; returns those of `a_log` and `bias` by value head.
    fn run(mut self, x: &Values<'_, T>, d_o: &[T], task: Task, out: &mut [T]) -> Vec<[T; 2]> {
        let heads = self.heads;
        let (size, each) = (heads.key_dim * heads.value_dim, heads.each());
        for (n, (from, l)) in self.chunks(task.tokens).enumerate() {
            self.common.load(x, task.start + from, l, task.head);
            for i in 0..each {
                let head = task.head * each + i;
                self.common.gate(x, task.start + from, l, head);
                let (before, after) = self.states.split_at_mut(((n + 1) * each + i) * size);
                let next = &mut after[..size];
                next.copy_from_slice(&before[(n * each + i) * size..][..size]);
                let u = &mut self.u[(from * each + i * l) * heads.value_dim..][..l * heads.value_dim];
                self.common.chunk(x, task.start + from, l, head).forward(next, u, None, &mut self.room);
            }
        }
        let mut sums = vec![[T::zero(); 2]; each];
        let all: Vec<_> = self.chunks(task.tokens).enumerate().collect();
        for (n, (from, l)) in all.into_iter().rev() {
            self.chunk_back(x, d_o, (task, n, from, l), out, &mut sums);
        }
        sums
    }

    fn chunk_back(
        &mut self,
        x: &Values<'_, T>,
        d_o: &[T],
        (task, n, from, l): (Task, usize, usize, usize),
        out: &mut [T],
        sums: &mut [[T; 2]],
    ) {
        let heads = self.heads;
        let Heads { key_dim: k, value_dim: v, .. } = heads;
        let (each, width): (usize, usize) = (heads.each(), widths(heads).iter().sum());
        let token = task.start + from;
        self.common.load(x, token, l, task.head);
        self.dq[..l * k].fill(T::zero());
        self.dk[..l * k].fill(T::zero());
        for (i, sums) in sums.iter_mut().enumerate() {
            let head = task.head * each + i;
            self.common.gate(x, token, l, head);
            let s = &self.states[(n * each + i) * k * v..][..k * v];
            let u = &self.u[(from * each + i * l) * v..][..l * v];
            let d_o = (&d_o[token * heads.value_width() + head * v..], heads.value_width());
            let grads = chunk::Gradients {
                ds: &mut self.ds[i * k * v..][..k * v],
                dq: &mut self.dq[..l * k],
                dk: &mut self.dk[..l * k],
                dv: (&mut out[from * width + 2 * k + i * v..], width),
                d_rate: &mut self.d_rate[..l],
                d_log: &mut self.d_log[..l],
            };
            self.common.chunk(x, token, l, head).backward((s, u), d_o, grads, &mut self.room);
            // a token's log-decay is in the sums of all later tokens of the chunk
            let mut later = T::zero();
            for j in (0..l).rev() {
                later += self.d_log[j];
                let at = (token + j) * heads.values + head;
                let (_, log) = x.gates[head].of(x.a[at], x.b[at]);
                let (da, db) = x.gates[head].back((x.a[at], x.b[at]), (later, self.d_rate[j]));
                let row = &mut out[(from + j) * width + 2 * k + each * v..];
                (row[i], row[each + i]) = (da, db);
                sums[0] += later * log;
                sums[1] += da;
            }
        }
        let scale = T::of((k as f64).powf(-0.5));
        for j in 0..l {
            let (own, row) = (j * k..(j + 1) * k, &mut out[(from + j) * width..]);
            let (dq, dk) = (&mut self.dq[own.clone()], &mut self.dk[own.clone()]);
            normalize_back(&self.common.q[own.clone()], self.common.inverse[0][j], scale, dq);
            normalize_back(&self.common.k[own], self.common.inverse[1][j], T::one(), dk);
            row[..k].copy_from_slice(dq);
            row[k..2 * k].copy_from_slice(dk);
        }
    }
}
