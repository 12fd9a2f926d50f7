//! The recurrence on CUDA: two launches forward, four backward.

use super::{Gradients, Heads, Inputs, State};
use crate::Tensor;
use crate::attention::{CHUNK, Sequences};
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::{Ghost, ghost_products, started};
use candle_core::{DType, Result, Shape, bail};

/// Same as in delta_rule.cu: threads per block, value channels of a slice, most channels of a key.
const CHUNK_THREADS: u32 = 128;
const WALK_THREADS: u32 = 128;
const GRADIENT_THREADS: u32 = 512;
pub(super) const SLICE: usize = 32;
const MOST: usize = 128;

/// Floats of [L, L] in shared memory, with padded rows.
const PADDED: usize = CHUNK * (CHUNK + 4);
const VECTORS: usize = 7 * CHUNK;
/// Floats of the products of tokens of a chunk and value head.
pub(super) const FLOATS: usize = 3 * CHUNK * CHUNK + VECTORS;

/// Bytes in shared memory of `rows` rows of `columns` values of `width` bytes.
fn of_rows(rows: usize, columns: usize, width: usize) -> usize {
    rows * (columns * width + 16)
}

/// Bytes of `count` matrices [L, L] of f32, in two planes of 16-bit values or in one.
fn of_matrices(count: usize, width: usize) -> usize {
    let planes = if width == 2 { 2 } else { 1 };
    of_rows(count * planes * CHUNK, CHUNK, width)
}

/// Bytes of shared memory of the products of tokens; `width` bytes a value.
pub(super) fn of_chunks(width: usize) -> usize {
    let warps = CHUNK_THREADS as usize / 32;
    4 * (2 * PADDED + 2 * CHUNK) + of_rows(2 * CHUNK, MOST, width).max(4 * warps * PADDED)
}

/// Bytes of shared memory of the walks over the chunks.
pub(super) fn of_walk(width: usize) -> usize {
    let stages = if width == 2 { 2 } else { 1 };
    stages * (of_rows(2 * CHUNK, MOST, width) + of_matrices(2, width) + 4 * VECTORS)
}

/// Bytes of shared memory of the gradients of a chunk.
pub(super) fn of_gradients(width: usize) -> usize {
    let slices = of_rows(2 * SLICE, MOST, width) + of_rows(3 * CHUNK, SLICE, width);
    let pairs = 4 * 2 * PADDED + of_matrices(3, width);
    of_rows(2 * CHUNK, MOST, width) + slices.max(pairs) + 4 * (3 * MOST / 16 * CHUNK + VECTORS + CHUNK)
}

/// Values of all states of a chunk in memory.
pub(super) fn of_states(heads: Heads) -> usize {
    heads.values * heads.value_dim * heads.key_dim.next_multiple_of(8)
}

/// Shared memory at launch of the kernel `kernel`.
#[cfg(test)]
pub fn shared_memory(kernel: &str) -> usize {
    let width = if kernel.ends_with("_f32") { 4 } else { 2 };
    match kernel.strip_prefix("delta_rule_") {
        Some(rest) if rest.starts_with("gradients") => of_gradients(width),
        Some(rest) if rest.starts_with("chunks") => of_chunks(width),
        Some(_) => of_walk(width),
        None => 0,
    }
}

fn check(x: &Inputs<'_>) -> Result<()> {
    let alike = [x.a, x.b].iter().all(|t| t.dtype() == x.qkv.dtype());
    if x.heads.key_dim > MOST || !alike {
        bail!("delta rule: {:?} on CUDA; up to {MOST} channels of a key are built", x.heads);
    }
    Ok(())
}

/// Inputs in the layout of the kernels, and the documents.
struct Rows<'a> {
    heads: Heads,
    tensors: [Tensor; 5],
    documents: Option<&'a Tensor>,
    count: usize,
    tokens: usize,
    chunks: usize,
}

impl<'a> Rows<'a> {
    /// `continued`: of a single document.
    fn of(x: &Inputs<'_>, seqs: &'a Sequences, continued: bool) -> Result<Self> {
        let wide = |t: &Tensor| t.to_dtype(DType::F32)?.contiguous();
        let (a_log, bias) = (wide(x.a_log)?, wide(x.bias)?);
        let tensors = [x.qkv.contiguous()?, x.a.contiguous()?, x.b.contiguous()?, a_log, bias];
        let (documents, count) = if continued { (None, 1) } else { seqs.documents()? };
        let tokens = x.qkv.dims()[0];
        let chunks = if continued { tokens.div_ceil(CHUNK) } else { seqs.chunks() };
        Ok(Self { heads: x.heads, tensors, documents, count, tokens, chunks })
    }

    fn width(&self) -> usize {
        self.tensors[0].dtype().size_in_bytes()
    }

    fn launch<'l>(&'l self, name: &str) -> Result<Launch<'l>> {
        Launch::of(&self.tensors[0], compiled!(DELTA_RULE), name)?.with(args![&self.tensors[0]])
    }

    fn counts<'l>(&self, launch: Launch<'l>) -> Result<Launch<'l>> {
        let Heads { keys, values, key_dim, value_dim } = self.heads;
        launch.with(args![keys, values, key_dim, value_dim])
    }

    /// Grid of a block per chunk and key head.
    fn by_chunk(&self, threads: u32, shared: usize) -> Grid {
        Grid::new(self.chunks, threads).by(self.heads.keys).shared(shared)
    }

    /// Grid of a walk: documents, value heads, slices of value channels.
    fn walk(&self) -> Grid {
        let slices = self.heads.value_dim.div_ceil(SLICE);
        let blocks = [self.count, self.heads.values, slices];
        Grid { blocks, threads: WALK_THREADS, shared: of_walk(self.width()) as u32 }
    }

    /// Products of the tokens of every chunk.
    fn products(&self) -> Result<Tensor> {
        let [qkv, a, b, a_log, bias] = &self.tensors;
        let products = empty(qkv, of_products(self.chunks, self.heads), DType::F32)?;
        let launch = self.launch("delta_rule_chunks")?.with(args![a, b, a_log, bias, self.documents])?;
        let launch = self.counts(launch.with(args![self.count, &products, self.tokens])?)?;
        // SAFETY: shapes are checked by `Inputs::check`; the documents cover the tokens, and the blocks are their
        // chunks and key heads; `products` has a row for each chunk and value head.
        unsafe { launch.run(self.by_chunk(CHUNK_THREADS, of_chunks(self.width()))) }?;
        Ok(products)
    }
}

fn of_products(chunks: usize, heads: Heads) -> Shape {
    Shape::from((chunks, heads.values, FLOATS))
}

/// See [`super::forward`].
pub fn forward(x: &Inputs<'_>, seqs: &Sequences, state: Option<&mut State>) -> Result<Tensor> {
    check(x)?;
    let (heads, (t, _), dtype) = (x.heads, x.qkv.dims2()?, x.qkv.dtype());
    let shape = Shape::from((t, heads.value_width()));
    let chunks = if state.is_some() { t.div_ceil(CHUNK) } else { seqs.chunks() };
    let ghost = ghost_products(&[x.qkv, x.a, x.b], [(shape.clone(), dtype)], |l| {
        let _products = Ghost::new(l, of_products(chunks, heads), DType::F32);
        started(l);
    });
    if let Some([o]) = ghost {
        return Ok(o);
    }
    let rows = Rows::of(x, seqs, state.is_some())?;
    let o = empty(x.qkv, shape, dtype)?;
    let products = rows.products()?;
    let of_state = (heads.values, heads.key_dim, heads.value_dim);
    let after = if state.is_some() { Some(empty(x.qkv, of_state, DType::F32)?) } else { None };
    let before = state.as_ref().and_then(|s| s.heads.clone());
    let none = None::<&Tensor>;
    let launch = rows.launch("delta_rule_forward")?.with(args![rows.documents, &products])?;
    let launch = launch.with(args![before.as_ref(), after.as_ref(), none, none, &o, t])?;
    // SAFETY: as in `Rows::products`, whose results are read; a state has `of_state` values, outputs are `[t, h v]`.
    unsafe { rows.counts(launch)?.run(rows.walk()) }?;
    if let Some(state) = state {
        state.heads = after;
    }
    Ok(o)
}

/// See [`super::backward`].
pub fn backward(x: &Inputs<'_>, d_o: &Tensor, seqs: &Sequences) -> Result<Gradients> {
    check(x)?;
    let (heads, (t, _), dtype) = (x.heads, x.qkv.dims2()?, x.qkv.dtype());
    if d_o.dtype() != dtype {
        bail!("delta rule: a gradient in {:?} of {dtype:?}", d_o.dtype());
    }
    let (chunks, of_head) = (seqs.chunks(), Shape::from((t, heads.values)));
    let partial = (Shape::from((chunks, heads.values)), DType::F32);
    let out = [
        (x.qkv.shape().clone(), dtype),
        (of_head.clone(), dtype),
        (of_head.clone(), dtype),
        partial.clone(),
        partial.clone(),
    ];
    let (states, values) = (Shape::from((chunks, of_states(heads))), Shape::from((t, heads.value_width())));
    let ghost = ghost_products(&[x.qkv, x.a, x.b, d_o], out, |l| {
        let of = |shape: &Shape| Ghost::new(l, shape.clone(), dtype);
        let _products = Ghost::new(l, of_products(chunks, heads), DType::F32);
        let _both = [of(&states), of(&states), of(&values), of(&values)];
        (0..3).for_each(|_| started(l));
    });
    if let Some([qkv, a, b, a_log, bias]) = ghost {
        return Ok(Gradients { qkv, a, b, a_log, bias });
    }
    let (rows, d_o) = (Rows::of(x, seqs, false)?, d_o.contiguous()?);
    let make = |shape: &Shape| empty(x.qkv, shape.clone(), dtype);
    let products = rows.products()?;
    let (before, after, u, d_rows) = (make(&states)?, make(&states)?, make(&values)?, make(&values)?);
    let (qkv, a, b) = (make(x.qkv.shape())?, make(&of_head)?, make(&of_head)?);
    let none = None::<&Tensor>;
    let launch = rows.launch("delta_rule_forward")?.with(args![rows.documents, &products])?;
    let launch = launch.with(args![none, none, &before, &u, none, t])?;
    // SAFETY: as in `forward`; `before` has a state for every chunk of the documents, `u` is `[t, h v]`.
    unsafe { rows.counts(launch)?.run(rows.walk()) }?;
    let launch = rows.launch("delta_rule_states")?.with(args![rows.documents, &products, &d_o])?;
    let launch = launch.with(args![&after, &d_rows, &qkv, t])?;
    // SAFETY: as above; `d_o` has t rows, checked by the caller, and `qkv` the shape of the inputs.
    unsafe { rows.counts(launch)?.run(rows.walk()) }?;
    let [_, own_a, _, a_log, bias] = &rows.tensors;
    let launch = rows.launch("delta_rule_gradients")?.with(args![own_a, a_log, bias, rows.documents])?;
    let launch = launch.with(args![rows.count, &products, &d_o, &before, &after, &u, &d_rows])?;
    let sums = || empty(x.qkv, partial.0.clone(), DType::F32);
    let (a_log, bias) = (sums()?, sums()?);
    let launch = rows.counts(launch.with(args![&qkv, &a, &b, &a_log, &bias])?)?;
    // SAFETY: outputs have the shapes of the inputs, and a row of partial sums a chunk; the blocks are the chunks of
    // the documents and the key heads.
    unsafe { launch.run(rows.by_chunk(GRADIENT_THREADS, of_gradients(rows.width()))) }?;
    Ok(Gradients { qkv, a, b, a_log, bias })
}
