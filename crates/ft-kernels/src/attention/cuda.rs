//! CUDA attention: one launch forward and two backward for any set of documents. A single query over many
//! keys takes two launches forward.
//!
//! Tensor-core kernels cover 16-bit values and selected head sizes. Plain kernels (attention_plain.cu)
//! with the same arguments cover the rest. The log-sum-exp is [h, t], contiguous per tile.

use super::cache::Cache;
use super::sequences::{Causal, Saved, Shape};
use super::split::{self, KeySplit};
use super::tiles::{ROWS, THREADS, Tiles};
use crate::Tensor;
use crate::cuda::launch::{self, Grid, Launch, Source, args, compiled, empty};
use crate::padded::{Padded, stride};
use crate::tensor::{ghost_products, started};
use candle_core::{DType, Result};

/// Sizes of tensor-core kernels; a head takes the next larger one, with zeros for the channels that it lacks.
const SIZES: [usize; 6] = [64, 96, 128, 192, 256, 512];
/// Largest head whose channels one warp of the dk/dv kernel sums; of larger ones it sums 64 or 128. Also the largest
/// with kernels for devices of [`MUCH`].
const WIDE: usize = 128;
/// Bytes of shared memory of a multiprocessor above which tensor cores are fast (8.0, 9.0, 10.0), so that reads of
/// shared memory bound a kernel; elsewhere (8.6, 8.9, 12.0) tensor cores do.
const MUCH: usize = 128 << 10;
/// Shared memory that the driver reserves for a block.
const RESERVED: usize = 1024;
/// Largest head size, limited by the shared memory of the plain kernels.
const MOST: usize = 3000;

/// The kernel variant for a call, with the shared memory per block of each kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kernels {
    /// Size of the tensor-core kernels; `None`: plain kernels.
    size: Option<usize>,
    /// Whether two warps have 32 queries each, in place of four with 16.
    pairs: bool,
    /// Whether two warps of the dk/dv kernel have 32 keys, in place of one with 16.
    pairs_kv: bool,
    forward: usize,
    backward_q: usize,
    backward_kv: usize,
    /// Groups of [`THREADS`] threads of the dk/dv kernel that share the queries of a tile of keys.
    sharers: u32,
    /// Blocks per tile of queries, each with some of its rows.
    parts_q: usize,
    /// Blocks per tile of keys, each with some of its rows or summing some of the channels.
    parts: usize,
}

impl Kernels {
    /// `room`: bytes of shared memory of a multiprocessor.
    fn of(dtype: DType, channels: usize, aligned: bool, room: usize) -> Self {
        let half = matches!(dtype, DType::BF16 | DType::F16);
        let size = SIZES.into_iter().find(|size| channels <= *size);
        if let (true, Some(size)) = (half && aligned && channels.is_multiple_of(8), size) {
            // own rows plus one step of keys and values (or queries and gradients), in bytes; step sizes
            // as in the kernels
            let (row, wide) = (2 * size, size > WIDE);
            let pairs = room > MUCH && !wide;
            // as SHARE and SHARE_KV in attention.cuh: rows of a block are as many times fewer
            let (share, share_kv) = if size > 256 { (2, 4) } else { (1, 1) };
            let tiles = |own: usize, others: usize| (own + 2 * others) * row;
            // as PARTS in attention_backward_kv.cuh
            let sharers: u32 = match size {
                64 | 96 => 3,
                128 => 2,
                _ => 1,
            };
            // as STAGES there: steps of a group in shared memory, with two statistics for each of 32 queries
            let groups = sharers as usize;
            let held = if wide { 1 } else { 2 } * groups;
            // two slots of 1 KiB where warps share rows
            let slots = if share > 1 { 2048 } else { 0 };
            let backward_kv = tiles(2 * ROWS / share_kv, 32 * held) + 4 * ROWS * held + slots;
            // twice as many queries, and two matrices [64, 64] that warps exchange; sums of other sizes exceed the
            // registers
            let of_pair = tiles(2 * ROWS, 64 * held) + 8 * ROWS * held + groups * 4 * ROWS * ROWS;
            let pairs_kv = matches!(size, 64 | 128) && of_pair + RESERVED <= room;
            let (own, keys) = (ROWS / share, if wide || (pairs && 2 * size > WIDE) { 32 } else { 64 });
            Self {
                size: Some(size),
                pairs,
                pairs_kv,
                forward: tiles(own, keys),
                backward_q: tiles(2 * own, if wide { 16 } else { 32 }) + 8 * own + slots,
                backward_kv: if pairs_kv { of_pair } else { backward_kv },
                sharers,
                parts_q: share,
                parts: if size == 192 { 3 } else { size.div_ceil(WIDE) },
            }
        } else {
            // per warp: channel sums and one weight per lane
            let one = THREADS as usize / 32 * (channels + 32) * 4;
            let (forward, backward_q, backward_kv) = (one, one, 2 * one);
            let (sharers, parts_q, parts) = (1, 1, 1);
            Self { forward, backward_q, backward_kv, sharers, parts_q, parts, ..Self::default() }
        }
    }

    fn name(self, role: &str, dtype: DType) -> String {
        let size = self.size.map_or(String::new(), |size| format!("_{size}"));
        let pairs = if role == "backward_kv" { self.pairs_kv } else { self.pairs };
        let pair = if pairs { "pair_" } else { "" };
        format!("attention_{role}_{pair}{}{size}", dtype.as_str())
    }

    fn source(self, role: &str) -> Source {
        match (self.size.is_some(), role) {
            (false, _) => compiled!(ATTENTION_PLAIN),
            (true, "forward" | "cached") => compiled!(ATTENTION_FORWARD),
            (true, _) => compiled!(ATTENTION_BACKWARD),
        }
    }

    fn launch<'a>(self, role: &str, q: &'a Tensor) -> Result<Launch<'a>> {
        Launch::named(q, self.source(role), self.name(role, q.dtype()))
    }

    /// Threads per block of the kernels that own queries.
    fn threads(self) -> u32 {
        if self.pairs { THREADS / 2 } else { THREADS }
    }

    /// Blocks of the kernels that own queries, `heads` a tile.
    fn of_queries(self, tiles: &Tiles, heads: usize, shared: usize) -> Result<Grid> {
        let blocks = [tiles.queries.dim(0)? * heads, 1, self.parts_q];
        Ok(Grid { blocks, ..Grid::new(0, self.threads()).shared(shared) })
    }
}

/// Shared memory at launch of the kernel `kernel`; for plain kernels, with 128 channels.
#[cfg(test)]
pub fn shared_memory(kernel: &str) -> usize {
    if let Some(bytes) = split::shared_memory(kernel) {
        return bytes;
    }
    let Some(rest) = kernel.strip_prefix("attention_") else { return 0 };
    let size = rest.rsplit('_').next().and_then(|c| c.parse().ok());
    let room = if rest.contains("_pair_") { usize::MAX } else { 0 };
    let k = Kernels::of(DType::BF16, size.unwrap_or(128), size.is_some(), room);
    if rest.starts_with("forward") || rest.starts_with("cached") {
        k.forward
    } else if rest.starts_with("backward_q") {
        k.backward_q
    } else {
        k.backward_kv
    }
}

/// Whether 16-byte copies can start at the first value of every tensor. Row lengths are multiples of 16 bytes for heads
/// of a multiple of 8 channels.
fn are_aligned(all: &[&Tensor]) -> bool {
    all.iter().all(|t| (t.layout().start_offset() * t.dtype().size_in_bytes()).is_multiple_of(16))
}

/// Checks the preconditions of a launch not covered by [`Shape::of`]: equal dtypes, head size, fewer than
/// 2^31 keys.
fn tiles<'a>(all: &[&Tensor], shape: Shape, how: &Causal<'a>) -> Result<&'a Tiles> {
    let keys = how.seqs.keys();
    if all.iter().any(|t| t.dtype() != all[0].dtype()) || shape.c == 0 || shape.c > MOST || keys >= 1 << 31 {
        candle_core::bail!(
            "attention on CUDA: {keys} keys, heads of {} channels (at most {MOST}), {:?}",
            shape.c,
            all.iter().map(|t| t.dtype()).collect::<Vec<_>>()
        );
    }
    match &how.seqs.tiles {
        Some(tiles) => Ok(tiles),
        None => candle_core::bail!("attention on CUDA: documents of another device"),
    }
}

impl Shape {
    /// Pushes the arguments of the `SHAPE` macro in attention.cuh.
    fn push<'a>(self, launch: Launch<'a>, how: &Causal<'_>, apart: usize) -> Result<Launch<'a>> {
        let window = how.window.map_or(i32::MAX as usize, |w| w.min(i32::MAX as usize));
        let launch = launch.with(args![self.t, self.h, self.g, self.c])?;
        launch.with(args![how.seqs.first_query, window, how.scale as f32, apart])
    }
}

/// See [`super::forward`].
pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>, rank: usize) -> Result<Saved> {
    let shape = Shape::of(q, k, v, how.seqs)?;
    let (lse_shape, rows) = ((shape.h, shape.t), (shape.t, shape.h * shape.c));
    let apart = stride(rows.1, rank);
    let out = [((shape.t, apart).into(), q.dtype()), (lse_shape.into(), DType::F32)];
    if let Some([o, lse]) = ghost_products(&[q, k, v], out, |_| ()) {
        return Ok(Saved { o: Padded::within(o, rows)?, lse });
    }
    let tiles = tiles(&[q, k, v], shape, how)?;
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let kernels = Kernels::of(q.dtype(), shape.c, are_aligned(&[&q, &k, &v]), launch::shared_memory(&q));
    let (o, lse) = (empty(&q, (shape.t, apart), q.dtype())?, empty(&q, lse_shape, DType::F32)?);
    let launch = kernels.launch("forward", &q)?.with(args![&q, &k, &v, &tiles.queries])?;
    let launch = shape.push(launch, how, apart)?.with(args![&o, &lse])?;
    let grid = kernels.of_queries(tiles, shape.h, kernels.forward)?;
    // SAFETY: `Shape::of` checked q [t, h, c] and k, v [keys, g, c]; o has t rows with stride `apart`,
    // lse is [h, t]; the tiles were built from these documents and cover every query.
    unsafe { launch.run(grid) }?;
    Ok(Saved { o: Padded::within(o, rows)?, lse })
}

/// See [`super::forward_cached`].
pub fn forward_cached(
    q: &Tensor,
    cache: &Cache,
    shape: Shape,
    how: &Causal<'_>,
    rank: usize,
) -> Result<Saved> {
    let rows = (shape.t, shape.h * shape.c);
    let apart = stride(rows.1, rank);
    let tiles = tiles(&[q, cache.first()?], shape, how)?;
    let (q, table) = (q.contiguous()?, cache.table()?);
    // blocks are separate allocations, thus aligned
    let aligned = are_aligned(&[&q]);
    let (o, lse) = (empty(&q, (shape.t, apart), q.dtype())?, empty(&q, (shape.h, shape.t), DType::F32)?);
    if let (true, Some(parts)) = (aligned, KeySplit::of(shape, how, q.dtype())) {
        split::forward(&q, table, shape, how, parts, &o, &lse)?;
        return Ok(Saved { o: Padded::within(o, rows)?, lse });
    }
    let kernels = Kernels::of(q.dtype(), shape.c, aligned, launch::shared_memory(&q));
    let launch = kernels.launch("cached", &q)?.with(args![&q, table, &tiles.queries])?;
    let launch = shape.push(launch, how, apart)?.with(args![&o, &lse])?;
    let grid = kernels.of_queries(tiles, shape.h, kernels.forward)?;
    // SAFETY: as in `forward`; the table lists all blocks of the cache, which hold every key and value of
    // the g heads.
    unsafe { launch.run(grid) }?;
    Ok(Saved { o: Padded::within(o, rows)?, lse })
}

/// See [`super::backward`].
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    how: &Causal<'_>,
    rank: usize,
) -> Result<(Tensor, Tensor, Padded)> {
    let shape = Shape::of(q, k, v, how.seqs)?;
    let (o, lse) = (saved.o.all(), &saved.lse);
    let rows = (how.seqs.keys(), shape.g * shape.c);
    let apart = stride(rows.1, rank);
    let of_v = || ((rows.0, apart).into(), v.dtype());
    let own = |t: &Tensor| (t.shape().clone(), t.dtype());
    let during = |l: &crate::Ledger| {
        l.touch((4 * shape.h * shape.t) as u64);
        started(l);
    };
    if let Some([dq, dk, dv]) = ghost_products(&[q, k, v, o, lse, d_o], [own(q), own(k), of_v()], during) {
        return Ok((dq, dk, Padded::within(dv, rows)?));
    }
    let tiles = tiles(&[q, k, v, o, d_o], shape, how)?;
    if saved.o.dims() != (shape.t, shape.h * shape.c)
        || d_o.shape() != q.shape()
        || lse.dims() != [shape.h, shape.t]
    {
        candle_core::bail!(
            "attention: q {:?}, output {:?}, its gradient {:?}, log-sum-exp {:?}",
            q.shape(),
            o.shape(),
            d_o.shape(),
            lse.shape()
        );
    }
    let (q, k, v, d_o) = (q.contiguous()?, k.contiguous()?, v.contiguous()?, d_o.contiguous()?);
    let aligned = are_aligned(&[&q, &k, &v, &d_o, o]);
    let kernels = Kernels::of(q.dtype(), shape.c, aligned, launch::shared_memory(&q));
    let delta = empty(&q, (shape.h, shape.t), DType::F32)?;
    let like = |t: &Tensor| empty(&q, t.shape(), t.dtype());
    let (dq, dk, dv) = (like(&q)?, like(&k)?, empty(&q, of_v().0, v.dtype())?);
    let of_q = kernels.launch("backward_q", &q)?.with(args![&q, &k, &v, o, &d_o])?;
    let of_q = shape.push(of_q.with(args![lse, &tiles.queries])?, how, saved.o.stride())?;
    let of_q = of_q.with(args![&delta, &dq])?;
    let grid = kernels.of_queries(tiles, shape.h, kernels.backward_q)?;
    // SAFETY: as in `forward`; o (with its stride), d_o and dq have the shape of q, delta has the shape
    // of lse.
    unsafe { of_q.run(grid) }?;
    let of_kv = kernels.launch("backward_kv", &q)?.with(args![&q, &k, &v, &d_o])?;
    let of_kv = of_kv.with(args![lse, &delta, &tiles.keys])?;
    let of_kv = shape.push(of_kv, how, apart)?.with(args![&dk, &dv])?;
    let blocks = [tiles.keys.dim(0)? * shape.g, 1, kernels.parts];
    let grid = Grid { blocks, ..Grid::new(0, THREADS * kernels.sharers).shared(kernels.backward_kv) };
    // SAFETY: as above; dk and dv have the shapes of k and v, dv with row stride `apart`.
    unsafe { of_kv.run(grid) }?;
    Ok((dq, dk, Padded::within(dv, rows)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPUs with 100 KiB of shared memory per SM (8.6, 8.9) allow 99 KiB per block; two blocks of the kernels
    /// that own queries fit up to 128 channels.
    #[test]
    fn shared_memory_fits_every_card() {
        for (c, room) in SIZES.into_iter().flat_map(|c| [100, 164, 228].map(|kib| (c, kib << 10))) {
            let k = Kernels::of(DType::BF16, c, true, room);
            let blocks = if c <= WIDE { 2 } else { 1 };
            for (blocks, bytes) in [(blocks, k.forward), (blocks, k.backward_q), (1, k.backward_kv)] {
                assert!(blocks * (bytes + RESERVED) <= room, "{c}: {bytes} of {room}");
            }
        }
        assert!(Kernels::of(DType::F32, MOST, true, 0).backward_kv <= 99 << 10);
    }

    #[test]
    fn tensor_cores_take_half_precision_of_their_sizes() {
        let name = |dtype, c, aligned| Kernels::of(dtype, c, aligned, 100 << 10).name("forward", dtype);
        assert_eq!(name(DType::BF16, 128, true), "attention_forward_bf16_128");
        assert_eq!(name(DType::F16, 96, true), "attention_forward_f16_96");
        assert_eq!(name(DType::F16, 80, true), "attention_forward_f16_96");
        assert_eq!(name(DType::BF16, 160, true), "attention_forward_bf16_192");
        assert_eq!(name(DType::F16, 84, true), "attention_forward_f16");
        assert_eq!(name(DType::F16, 264, true), "attention_forward_f16_512");
        assert_eq!(name(DType::F16, 520, true), "attention_forward_f16");
        assert_eq!(name(DType::BF16, 128, false), "attention_forward_bf16");
        assert_eq!(name(DType::F32, 128, true), "attention_forward_f32");
        let of = |kib: usize, c, role| Kernels::of(DType::BF16, c, true, kib << 10).name(role, DType::BF16);
        let much = |c, role| of(228, c, role);
        assert_eq!(much(128, "forward"), "attention_forward_pair_bf16_128");
        assert_eq!(much(256, "forward"), "attention_forward_bf16_256");
        assert_eq!(much(128, "backward_kv"), "attention_backward_kv_pair_bf16_128");
        assert_eq!(much(64, "backward_kv"), "attention_backward_kv_pair_bf16_64");
        assert_eq!(much(96, "backward_kv"), "attention_backward_kv_bf16_96");
        assert_eq!(of(164, 128, "backward_kv"), "attention_backward_kv_bf16_128");
        assert_eq!(of(164, 128, "backward_q"), "attention_backward_q_pair_bf16_128");
        assert_eq!(of(164, 64, "backward_kv"), "attention_backward_kv_pair_bf16_64");
    }

    /// Every kernel name exists in the compiled sources.
    #[cfg(feature = "cuda")]
    #[test]
    fn every_kernel_is_compiled() {
        use crate::cuda::module;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for role in ["split", "join"] {
                let name = format!("attention_{role}_{}", dtype.as_str());
                assert!(module::ATTENTION_SPLIT.ptx.contains(&format!(".entry {name}(")), "{name}");
            }
            for (c, room) in SIZES.into_iter().chain([84]).flat_map(|c| [(c, 0), (c, usize::MAX)]) {
                let k = Kernels::of(dtype, c, true, room);
                for role in ["forward", "cached", "backward_q", "backward_kv"] {
                    let name = k.name(role, dtype);
                    assert!(k.source(role).ptx.contains(&format!(".entry {name}(")), "{name}");
                }
            }
        }
    }
}
