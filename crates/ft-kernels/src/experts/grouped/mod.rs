//! Grouped GEMMs on CUDA: rows sorted by expert times the experts' own matrices, all experts in one
//! launch.
//!
//! ```text
//! u = low(table, x)           s x A^T     [n, ranks]    for experts with an adapter
//! y = forward(table, x, u)    x W^T + u B^T
//! du = low_back(table, dy)    s dy B
//! dx = backward(table, dy, du)            dy W + du A
//! gradients                   dW += dy^T x, dA += du^T x, dB += dy^T u
//! ```
//!
//! Products of two linears with one input, as gate and up, take one launch, which reads their input once.
//!
//! A [`Table`] on the device, built once, describes the experts: weights or 4-bit codes, adapters of
//! individual ranks, gradient offsets. `grouped_many.cu` covers 16-bit values (tensor cores), `grouped_half.cu` those
//! with few rows an expert, and gradients; `grouped_plain.cu` f32.

pub mod bias;
pub mod table;

pub use self::bias::Biases;
pub use self::table::{Adapter, Entry, Gradient, Side, Table};

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, Source, address_of, args, compiled, empty};
use crate::dispatch::Sorted;
use crate::ledger::Cost;
use crate::tensor::{Ghost, ghost_products, ghosts};
use candle_core::{DType, Result};
use ft_base::rng::{Purpose, Stream};

/// Threads per block; must match grouped.cuh, and for products of many rows grouped_many.cu.
const THREADS: u32 = 256;
const OF_MANY: u32 = 128;
/// Columns per tile: tensor cores, and f32.
const COLUMNS: usize = 128;
const PLAIN: usize = 64;
/// Adjacent column tiles per block in backward with few rows; must match grouped_half.cu.
const WIDE: usize = 6;
/// Columns per block in the single-token kernel, and the number of tiled blocks below which it is used;
/// see grouped_one.cu.
const ONE: usize = 32;
const TOO_FEW: usize = 128;
/// Maximum bytes of the token's values staged in shared memory.
const STAGED: usize = 40 << 10;
/// Shared memory per row or column of a tile: a stage of 32 16-bit values.
const STAGE: usize = 32 * 2;
/// Shared memory for the constants of two tables: expert, codebook, with few rows also the map.
const CODED: usize = 2 * (table::BYTES + 16 * 4);
const CONSTANTS: usize = CODED + 2 * 256 * 4;
/// Shared memory of a gradient block: four stages.
const OF_GRADIENT: usize = 4 * STAGE * 2 * COLUMNS;

/// LoRA rank that a block of an adapter's gradient, or of u and du, covers, and its shared memory: four stages, and
/// three of 64 values.
const LOW: usize = 32;
const OF_LOW_GRADIENT: usize = 4 * STAGE * (COLUMNS + LOW);
const OF_LOW: usize = 3 * 2 * STAGE * (COLUMNS + LOW);

/// Whether the kernels for adapters take the rows on the side of the layer's width: whole vectors, which begin on one.
fn takes_low(wide: &Tensor) -> bool {
    let whole = wide.dtype() != DType::F32 && wide.dim(1).is_ok_and(|width| width % 8 == 0);
    whole && address_of(wide).is_ok_and(|at| at % 16 == 0)
}

/// Kernel source and columns per tile for a dtype.
fn source(dtype: DType) -> (Source, usize) {
    match dtype {
        DType::F32 => (compiled!(GROUPED_PLAIN), PLAIN),
        _ => (compiled!(GROUPED_HALF), COLUMNS),
    }
}

/// Shared memory of products of 16-bit values with tiles of `rows` rows, by the beginning of the kernel's name.
fn of_products(kind: &str, rows: usize) -> usize {
    match kind {
        "" => 3 * STAGE * (rows + COLUMNS) + 2 * table::BYTES,
        "coded_" => STAGE * (4 * rows + 2 * COLUMNS) + CODED,
        // also 32 bytes of scales per column
        _ => 4 * STAGE * (rows + COLUMNS) + CONSTANTS + 32 * COLUMNS,
    }
}

/// Shared memory at launch of the kernel `kernel`.
#[cfg(test)]
pub fn shared_memory(kernel: &str) -> usize {
    match kernel.strip_prefix("grouped_") {
        Some(rest) if rest.starts_with("one") => 2 * 2048,
        Some(rest) if rest.ends_with("f32") || rest.starts_with("dropout") || rest.starts_with("bias") => 0,
        Some(rest) if rest.starts_with("gradient") => OF_GRADIENT,
        Some(rest) if rest.starts_with("low_gradient") => OF_LOW_GRADIENT,
        Some(rest) if rest.starts_with("low_") => OF_LOW,
        Some(rest) => {
            let kind = ["few_", "coded_"].into_iter().find(|kind| rest.starts_with(kind));
            of_products(kind.unwrap_or(""), if kind == Some("few_") { 32 } else { COLUMNS })
        }
        _ => 0,
    }
}

/// Table, rows [n, inner], and optionally the low-rank rows (u or du) [n, ranks].
pub type Operand<'a> = (&'a Table, &'a Tensor, Option<&'a Tensor>);

/// Products summed by a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Terms {
    /// With W and the adapter.
    Whole,
    /// With A (forward) or B (backward): [n, ranks].
    Low,
    /// With W only.
    Values,
    /// With the adapter only.
    Adapter,
}

/// Records the FLOPs and traffic of a product (ghosts only).
fn work(table: &Table, s: &Sorted, x: &Tensor, terms: Terms) {
    let Some(g) = x.ghost() else { return };
    let (n, busy) = (s.rows() as f64, s.busy());
    let (o, i) = (table.dims.0 as f64, table.dims.1 as f64);
    // exact for o = i
    let low_flops = n * table.mean_rank() * (i + o);
    let values = 2.0 * n * o * i;
    let cost = match terms {
        Terms::Low | Terms::Adapter => Cost { flops: low_flops, ..Cost::default() },
        Terms::Whole | Terms::Values => Cost {
            flops: values + if terms == Terms::Whole { low_flops } else { 0.0 },
            grouped: values,
            dequantized: busy * table.totals.coded as f64,
            read: busy * table.totals.bytes as f64,
            ..Cost::default()
        },
    };
    g.ledger().work(cost);
}

/// Source, name, columns and threads of a block and shared memory of the kernel for products by tiles; `coded` if of
/// codes.
fn tiled(name: &str, dtype: DType, coded: bool, s: &Sorted) -> (Source, String, usize, u32, usize) {
    let ((source, columns), half) = (source(dtype), dtype != DType::F32);
    // in backward with few rows, a block takes several column tiles, because codes dominate its traffic
    let (kind, beside) = match (s.few(), name) {
        (true, "backward") => ("few_", WIDE),
        (true, _) => ("few_", 1),
        (false, _) => (if half && coded { "coded_" } else { "" }, 1),
    };
    let many = half && kind != "few_";
    let (source, threads) = if many { (compiled!(GROUPED_MANY), OF_MANY) } else { (source, THREADS) };
    let bytes = if half { of_products(kind, s.side) } else { 0 };
    (source, format!("grouped_{kind}{name}"), beside * columns, threads, bytes)
}

/// Launches the kernel `name` (forward or backward). The product of `more` is added or, with `beside`, a second result.
fn products(
    name: &str,
    (table, x, u): Operand<'_>,
    more: Option<Operand<'_>>,
    beside: bool,
    terms: Terms,
    s: &Sorted,
) -> Result<(Tensor, Option<Tensor>)> {
    let (n, low) = (s.rows(), terms == Terms::Low);
    let ((o, i), ranks) = (table.dims, table.totals.ranks);
    let (inner, outer) = if name == "forward" { (i, o) } else { (o, i) };
    let width = if low { ranks } else { outer };
    let fits = |(t, x, u): &Operand<'_>| {
        t.dims == table.dims
            && t.totals.ranks == ranks
            && t.totals.experts == s.experts
            && x.dims() == [n, inner]
            && x.dtype() == t.dtype
            && (low
                || terms == Terms::Values
                || (u.is_some() == (ranks > 0) && u.is_none_or(|u| u.dims() == [n, ranks])))
    };
    if !fits(&(table, x, u)) || more.as_ref().map_or(beside, |m| !fits(m)) {
        candle_core::bail!(
            "grouped {name}: {:?}, {:?} with {:?}",
            x.shape(),
            u.map(Tensor::shape),
            table.dims
        );
    }
    work(table, s, x, terms);
    more.iter().for_each(|(t, x, _)| work(t, s, x, terms));
    let mut second: Option<Tensor> = None;
    let ghost = ghost_products(&[x], [((n, width).into(), x.dtype())], |l| {
        second = beside.then(|| Ghost::new(l, (n, width), x.dtype()).into());
    });
    if let Some([y]) = ghost {
        return Ok((y, second));
    }
    let x = x.contiguous()?;
    let more = more.map(|(t, x, u)| Ok::<_, candle_core::Error>((t, x.contiguous()?, u))).transpose()?;
    let out = empty(&x, (n, width), x.dtype())?;
    let second = if beside { Some(empty(&x, (n, width), x.dtype())?) } else { None };
    // adapters are values
    let coded = matches!(terms, Terms::Whole | Terms::Values)
        && (table.totals.coded > 0 || more.as_ref().is_some_and(|m| m.0.totals.coded > 0));
    let tiles = s.tiles.dim(0)?;
    let staged = inner * x.dtype().size_in_bytes();
    // single token: tiles would leave most SMs idle
    let one = name == "forward" && s.few() && s.tokens == 1 && staged <= STAGED;
    let one = one && tiles * width.div_ceil(source(x.dtype()).1) < TOO_FEW;
    let (source, name, columns, threads, bytes) = if one {
        (compiled!(GROUPED_ONE), "grouped_one".to_string(), ONE, THREADS, staged)
    } else if low && !s.few() && takes_low(&x) && more.as_ref().is_none_or(|m| takes_low(&m.1)) {
        (compiled!(GROUPED_MANY), format!("grouped_low_{name}"), LOW, OF_MANY, OF_LOW)
    } else {
        tiled(name, x.dtype(), coded, s)
    };
    let launch = Launch::of(&x, source, &name)?;
    let launch = launch.with(args![&table.experts_words, (terms != Terms::Adapter).then_some(&x)])?;
    let launch = launch.with(args![u.filter(|_| terms != Terms::Values)])?;
    let launch =
        launch.with(args![more.as_ref().map(|m| &m.0.experts_words), more.as_ref().map(|m| &m.1)])?;
    let launch = launch.with(args![more.as_ref().and_then(|m| m.2), inner, outer, ranks])?;
    let launch = launch.with(args![u32::from(low), &s.starts, &s.tiles, &out, second.as_ref()])?;
    // Columns vary fastest: blocks of a tile of rows run together, and find these in the cache.
    let blocks = width.div_ceil(columns) * if beside { 2 } else { 1 };
    // SAFETY: the tables hold addresses of matrices with these dimensions, and keep the tensors alive;
    // they have as many experts as the schedule; the rows of x, u and the results were checked above.
    unsafe { launch.run(Grid::new(blocks, threads).by(tiles).shared(bytes)) }?;
    Ok((out, second))
}

/// Whether one launch takes both.
fn alike(a: &Table, b: &Table) -> bool {
    (a.dims, a.totals.ranks, a.dtype) == (b.dims, b.totals.ranks, b.dtype)
}

/// The products of one or two operands, of two in one launch if their matrices and adapters have the same shapes.
fn each<const N: usize>(name: &str, of: [Operand<'_>; N], terms: Terms, s: &Sorted) -> Result<[Tensor; N]> {
    let mut all = Vec::with_capacity(N);
    match of[..] {
        [a, b] if alike(a.0, b.0) => {
            let (first, second) = products(name, a, Some(b), true, terms, s)?;
            all.extend([Some(first), second].into_iter().flatten());
        }
        _ => {
            for operand in of {
                all.push(products(name, operand, None, false, terms, s)?.0);
            }
        }
    }
    all.try_into().map_err(|_| candle_core::Error::msg(format!("grouped {name}: a result is missing")))
}

/// Products with an adapter's side, of the operands that have adapters.
fn each_low<const N: usize>(
    name: &str,
    of: [(&Table, &Tensor); N],
    s: &Sorted,
) -> Result<[Option<Tensor>; N]> {
    if of.iter().all(|(table, _)| table.totals.ranks > 0) {
        return Ok(each(name, of.map(|(table, x)| (table, x, None)), Terms::Low, s)?.map(Some));
    }
    let mut low = [const { None }; N];
    for (low, (table, x)) in low.iter_mut().zip(of).filter(|(_, (table, _))| table.totals.ranks > 0) {
        let [own] = each(name, [(table, x, None)], Terms::Low, s)?;
        *low = Some(own);
    }
    Ok(low)
}

/// `s x A^T` [n, ranks] for rows `x` [n, i], of each linear; `None` if no expert has an adapter.
pub fn low<const N: usize>(of: [(&Table, &Tensor); N], s: &Sorted) -> Result<[Option<Tensor>; N]> {
    each_low("forward", of, s)
}

/// `s dy B` [n, ranks] for rows `dy` [n, o], of each linear; `None` if no expert has an adapter.
pub fn low_back<const N: usize>(of: [(&Table, &Tensor); N], s: &Sorted) -> Result<[Option<Tensor>; N]> {
    each_low("backward", of, s)
}

/// `x W^T + u B^T` [n, o] for rows `x` [n, i], of each linear.
pub fn forward<const N: usize>(of: [Operand<'_>; N], s: &Sorted) -> Result<[Tensor; N]> {
    each("forward", of, Terms::Whole, s)
}

/// `dy W + du A` [n, i] for rows `dy` [n, o], plus the same for a second table.
pub fn backward(of: Operand<'_>, more: Option<Operand<'_>>, s: &Sorted) -> Result<Tensor> {
    match more {
        // a single launch requires equal rank strides
        Some(m) if m.0.totals.ranks != of.0.totals.ranks => backward(of, None, s)? + backward(m, None, s)?,
        more => Ok(products("backward", of, more, false, Terms::Whole, s)?.0),
    }
}

/// Only `dy W` [n, i], for rows `dy` [n, o].
pub fn values_back(of: Operand<'_>, s: &Sorted) -> Result<Tensor> {
    Ok(products("backward", of, None, false, Terms::Values, s)?.0)
}

/// Only `du A` [n, i], for rows `dy` [n, o].
pub fn adapter_back(of: Operand<'_>, s: &Sorted) -> Result<Tensor> {
    Ok(products("backward", of, None, false, Terms::Adapter, s)?.0)
}

/// Seed of dropout in a step.
#[derive(Clone, Copy, Debug)]
pub struct Drops {
    /// Seed of the run.
    pub seed: u64,
    /// Step number.
    pub step: u64,
    /// Number of the first token.
    pub first: usize,
}

/// Dropout of rows `x` [n, width] with each expert's own probability and stream, rescaled, plus `add`.
pub fn drop_out(table: &Table, x: &Tensor, add: Option<&Tensor>, key: Drops, s: &Sorted) -> Result<Tensor> {
    let (n, width) = x.dims2()?;
    if n != s.rows() || add.is_some_and(|a| a.dims() != [n, width] || a.dtype() != x.dtype()) {
        candle_core::bail!("dropout of experts: {:?} and {:?}", x.shape(), add.map(Tensor::shape));
    }
    let reads: Vec<&Tensor> = [x].into_iter().chain(add).collect();
    if let Some([y]) = ghosts(&reads, [((n, width).into(), x.dtype())], |_| ()) {
        return Ok(y);
    }
    let (x, add) = (x.contiguous()?, add.map(Tensor::contiguous).transpose()?);
    let y = empty(&x, (n, width), x.dtype())?;
    let [key0, key1, step, _] = Stream::new(key.seed, Purpose::Dropout, key.step, 0).words();
    let launch = Launch::of(&x, compiled!(GROUPED_DROPOUT), "grouped_dropout")?;
    let launch = launch.with(args![&table.experts_words, &s.chosen, &s.pair, s.top_k, &x, add.as_ref()])?;
    let launch = launch.with(args![width, key.first as u64, key0, key1, step, &y])?;
    // SAFETY: x, `add` and y have n rows of `width` values; the n pairs refer to experts of the table;
    // one block per row.
    unsafe { launch.run(Grid::new(n, THREADS)) }?;
    Ok(y)
}

/// Accumulates one kind of gradient of each linear into `grads`, the flat f32 buffer addressed by the tables' offsets,
/// from `a` (dy or du) and `b` (x or u). Those of two linears' adapters take one launch if their shapes are the same
/// and their places differ: a launch adds to a value once.
pub fn gradients<const N: usize>(
    of: [(&Table, &Tensor, &Tensor); N],
    which: Gradient,
    s: &Sorted,
    grads: &Tensor,
) -> Result<()> {
    match of[..] {
        [a, b] if which != Gradient::Weight && alike(a.0, b.0) && !a.0.shares(b.0, which) => {
            gradient(which, a, Some(b), s, grads)
        }
        _ => of.into_iter().try_for_each(|one| gradient(which, one, None, s, grads)),
    }
}

fn gradient(
    which: Gradient,
    (table, a, b): (&Table, &Tensor, &Tensor),
    more: Option<(&Table, &Tensor, &Tensor)>,
    s: &Sorted,
    grads: &Tensor,
) -> Result<()> {
    let ((o, i), ranks) = (table.dims, table.totals.ranks);
    let (rows, cols, own) = match which {
        Gradient::Weight => (o, i, (o, i)),
        Gradient::A => (ranks, i, (ranks, i)),
        Gradient::B => (o, ranks, (o, ranks)),
    };
    let n = s.rows();
    for (table, a, b) in [(table, a, b)].into_iter().chain(more) {
        if a.dims() != [n, own.0]
            || b.dims() != [n, own.1]
            || a.dtype() != b.dtype()
            || grads.dtype() != DType::F32
            || grads.elem_count() < table.totals.ends
            || table.totals.experts != s.experts
        {
            candle_core::bail!("grouped gradients: {:?} and {:?} for {:?}", a.shape(), b.shape(), table.dims);
        }
        if let Some(g) = a.ghost() {
            let flops = 2.0 * n as f64 * table.gradient_values(which) / s.experts.max(1) as f64;
            let read = 8.0 * s.busy() * table.gradient_values(which);
            g.ledger().work(Cost { flops, read, ..Cost::default() });
        }
    }
    if ghost_products(&[a, b], [], |_| ()).is_some() {
        return Ok(());
    }
    let whole = |a: &Tensor, b: &Tensor| Ok::<_, candle_core::Error>((a.contiguous()?, b.contiguous()?));
    let (a, b) = whole(a, b)?;
    let more = more.map(|(table, a, b)| Ok::<_, candle_core::Error>((table, whole(a, b)?))).transpose()?;
    let of_b = which == Gradient::B;
    let (low, wide) = if of_b { (&b, &a) } else { (&a, &b) };
    let second = more.as_ref().map(|(table, (a, b))| if of_b { (*table, b, a) } else { (*table, a, b) });
    if which != Gradient::Weight && takes_low(wide) && second.is_none_or(|(_, _, wide)| takes_low(wide)) {
        let width = wide.dim(1)?;
        let launch = Launch::of(&a, compiled!(GROUPED_HALF), "grouped_low_gradient")?;
        let launch = launch.with(args![&table.experts_words, u32::from(of_b), low, ranks, wide, width])?;
        let launch = launch.with(args![&s.starts, grads, second.map(|m| &m.0.experts_words)])?;
        let launch = launch.with(args![second.map(|m| m.1), second.map(|m| m.2)])?;
        let tables = if second.is_some() { 2 } else { 1 };
        let grid = Grid::new(width.div_ceil(COLUMNS), THREADS).by(tables * ranks.div_ceil(LOW));
        let grid = Grid { blocks: [grid.blocks[0], grid.blocks[1], s.experts], ..grid };
        // SAFETY: as below, since the places of the two tables differ; rows of `low` are whole vectors, those of
        // `wide` were asked for.
        return unsafe { launch.run(grid.shared(OF_LOW_GRADIENT)) };
    }
    if let Some((second, (c, d))) = &more {
        gradient(which, (table, &a, &b), None, s, grads)?;
        return gradient(which, (second, c, d), None, s, grads);
    }
    let (source, columns) = source(a.dtype());
    let launch = Launch::of(&a, source, "grouped_gradient")?;
    let launch = launch.with(args![&table.experts_words, which as u32, &a, own.0, &b, own.1, rows, cols])?;
    let launch = launch.with(args![&s.starts, grads])?;
    let grid = Grid::new(cols.div_ceil(columns), THREADS).by(rows.div_ceil(columns));
    let grid = Grid { blocks: [grid.blocks[0], grid.blocks[1], s.experts], ..grid };
    // SAFETY: as for products; the offsets lie inside the buffer (`ends` was checked), and each value is
    // written by one block.
    unsafe { launch.run(grid.shared(if a.dtype() == DType::F32 { 0 } else { OF_GRADIENT })) }
}
