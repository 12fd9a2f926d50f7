//! The recurrence on CUDA: one launch forward, three backward.

use super::{Gradients, Heads, Inputs, State};
use crate::Tensor;
use crate::attention::{CHUNK, Sequences};
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::{Ghost, ghost_products, started};
use candle_core::{DType, Result, Shape, bail};

/// Threads per block; value channels of a slice; most channels of a key: same as in delta_rule.cu.
const THREADS: u32 = 256;
const WIDE: usize = 32;
const NARROW: usize = 16;
const MOST: usize = 128;

/// Floats in shared memory of a chunk, and of [L, L].
fn of_chunk(k: usize) -> usize {
    2 * CHUNK * (k.next_multiple_of(4) + 4) + 3 * PAIRS + 7 * CHUNK
}
const PAIRS: usize = CHUNK * (CHUNK + 4);

/// Bytes of shared memory of the walks over the chunks.
pub(super) fn of_walk(k: usize) -> usize {
    4 * (of_chunk(k) + (k.next_multiple_of(4) + 2 * CHUNK) * WIDE)
}

/// Bytes of shared memory of the gradients of a chunk.
pub(super) fn of_gradients(k: usize) -> usize {
    let slices = 7 * CHUNK * (NARROW + 4) + 32;
    let states = 2 * k.next_multiple_of(4) * (NARROW + 1);
    4 * (of_chunk(k) + 2 * PAIRS + 2 * CHUNK + slices + states.max(3 * PAIRS).max(CHUNK * k))
}

/// Shared memory at launch of the kernel `kernel`, with heads of 128 channels.
#[cfg(test)]
pub fn shared_memory(kernel: &str) -> usize {
    match kernel.strip_prefix("delta_rule_") {
        Some(rest) if rest.starts_with("gradients") => of_gradients(MOST),
        Some(_) => of_walk(MOST),
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

/// Inputs in the layout of the kernels.
struct Rows([Tensor; 5]);

impl Rows {
    fn of(x: &Inputs<'_>) -> Result<Self> {
        let wide = |t: &Tensor| t.to_dtype(DType::F32)?.contiguous();
        let (a_log, bias) = (wide(x.a_log)?, wide(x.bias)?);
        Ok(Self([x.qkv.contiguous()?, x.a.contiguous()?, x.b.contiguous()?, a_log, bias]))
    }

    fn launch<'a>(&'a self, name: &str) -> Result<Launch<'a>> {
        let [qkv, a, b, a_log, bias] = &self.0;
        Launch::of(qkv, compiled!(DELTA_RULE), name)?.with(args![qkv, a, b, a_log, bias])
    }
}

fn counts<'a>(launch: Launch<'a>, first: usize, heads: Heads) -> Result<Launch<'a>> {
    launch.with(args![first, heads.keys, heads.values, heads.key_dim, heads.value_dim])
}

/// Grid of a walk: documents, value heads, slices of value channels.
fn walk(documents: usize, heads: Heads) -> Grid {
    let slices = heads.value_dim.div_ceil(WIDE);
    Grid {
        blocks: [documents, heads.values, slices],
        threads: THREADS,
        shared: of_walk(heads.key_dim) as u32,
    }
}

/// See [`super::forward`].
pub fn forward(x: &Inputs<'_>, seqs: &Sequences, state: Option<&mut State>) -> Result<Tensor> {
    check(x)?;
    let (heads, (t, _), dtype) = (x.heads, x.qkv.dims2()?, x.qkv.dtype());
    let shape = Shape::from((t, heads.value_width()));
    if let Some([o]) = ghost_products(&[x.qkv, x.a, x.b], [(shape.clone(), dtype)], |_| ()) {
        return Ok(o);
    }
    let rows = Rows::of(x)?;
    let o = empty(x.qkv, shape, dtype)?;
    let continued = state.is_some();
    let (documents, count) = if continued { (None, 1) } else { seqs.documents()? };
    let of_state = (heads.values, heads.key_dim, heads.value_dim);
    let after = if continued { Some(empty(x.qkv, of_state, DType::F32)?) } else { None };
    let before = state.as_ref().and_then(|s| s.heads.clone());
    let launch = rows.launch("delta_rule_forward")?;
    let launch = launch.with(args![documents, before.as_ref(), after.as_ref(), None::<&Tensor>, &o])?;
    let launch = counts(launch, t, heads)?;
    // SAFETY: shapes are checked by `Inputs::check`; the documents cover the t tokens; a state has `of_state` values.
    unsafe { launch.run(walk(count, heads)) }?;
    if let Some(state) = state {
        state.heads = after;
    }
    Ok(o)
}

/// See [`super::backward`].
pub fn backward(x: &Inputs<'_>, d_o: &Tensor, seqs: &Sequences) -> Result<Gradients> {
    check(x)?;
    let (heads, (t, _), dtype) = (x.heads, x.qkv.dims2()?, x.qkv.dtype());
    let (chunks, of_head) = (seqs.chunks(), Shape::from((t, heads.values)));
    let partial = (Shape::from((chunks, heads.values)), DType::F32);
    let out = [
        (x.qkv.shape().clone(), dtype),
        (of_head.clone(), dtype),
        (of_head.clone(), dtype),
        partial.clone(),
        partial.clone(),
    ];
    let states = Shape::from((chunks, heads.state()));
    let ghost = ghost_products(&[x.qkv, x.a, x.b, d_o], out, |l| {
        let of = || Ghost::new(l, states.clone(), DType::F32);
        let _both = [of(), of()];
        started(l);
        started(l);
    });
    if let Some([qkv, a, b, a_log, bias]) = ghost {
        return Ok(Gradients { qkv, a, b, a_log, bias });
    }
    let (rows, d_o) = (Rows::of(x)?, d_o.contiguous()?);
    let make = |shape: Shape, dtype| empty(x.qkv, shape, dtype);
    let (before, after) = (make(states.clone(), DType::F32)?, make(states, DType::F32)?);
    let (documents, count) = seqs.documents()?;
    let none = None::<&Tensor>;
    let launch = rows.launch("delta_rule_forward")?.with(args![documents, none, none, &before, none])?;
    // SAFETY: as in `forward`; `before` has a state for every chunk of the documents.
    unsafe { counts(launch, t, heads)?.run(walk(count, heads)) }?;
    let launch = rows.launch("delta_rule_states")?.with(args![documents, &d_o, &after])?;
    // SAFETY: as above; `d_o` has t rows, checked by the caller.
    unsafe { counts(launch, t, heads)?.run(walk(count, heads)) }?;
    let (qkv, a, b) =
        (make(x.qkv.shape().clone(), dtype)?, make(of_head.clone(), dtype)?, make(of_head, dtype)?);
    let (a_log, bias) = (make(partial.0.clone(), DType::F32)?, make(partial.0, DType::F32)?);
    let launch = rows.launch("delta_rule_gradients")?.with(args![documents, &d_o, &before, &after])?;
    let launch = counts(launch.with(args![&qkv, &a, &b, &a_log, &bias])?, count, heads)?;
    let grid = Grid::new(chunks, THREADS).by(heads.keys).shared(of_gradients(heads.key_dim));
    // SAFETY: outputs have the shapes of the inputs, and a row of partial sums a chunk; the blocks are the chunks of
    // the documents and the key heads.
    unsafe { launch.run(grid) }?;
    Ok(Gradients { qkv, a, b, a_log, bias })
}
