//! Cost of matrix products in a plan: packing buffers of the `gemm` crate, tiles, arithmetic.

use crate::Tensor;
use crate::ledger::{Cost, Ledger, Role};
use candle_core::Result;
use gemm_common::gemm::DEFAULT_RHS_PACKING_THRESHOLD;
use std::mem::MaybeUninit;

/// Records for ghosts the memory of [`crate::gemm::by_tiles`] in a product `[m, k] x [k, n]`: one tile per
/// thread if tiles are `made`, and packing buffers. `transposed` tiles occur in the forward pass.
pub fn ghost_tiles(
    (m, k, n): (usize, usize, usize),
    width: usize,
    made: bool,
    transposed: bool,
) -> impl FnOnce(&Ledger) {
    move |l| {
        let workers = (l.machine().threads as usize).min(n.div_ceil(width)).max(1);
        let _tiles =
            l.role(Role::InFlight, || l.hold(if made { 4 * workers * k * n.min(width) } else { 0 } as u64));
        l.touch(workers as u64 * packing((m, k, width.min(n)), false, transposed));
    }
}

/// Bytes of the packing buffers of the `gemm` crate in an f32 product `[m, k] x [k, n]`, with operands
/// transposed or not.
///
/// Since results are row-major, it computes the transposed product. It packs the right operand of this
/// product in cache-sized panels, unless the columns are contiguous, and a short left operand, unless the
/// rows are contiguous.
pub(super) fn packing((m, k, n): (usize, usize, usize), ta: bool, tb: bool) -> u64 {
    if m == 0 || n == 0 || k == 0 {
        return 0;
    }
    let (mr, nr, lanes) = tile();
    let p = gemm_common::cache::kernel_params(n, m, k, mr, nr, 4);
    let nc = if p.nc > 0 { p.nc } else { m.next_multiple_of(nr) };
    let right = if n > mr * if ta { 2 } else { DEFAULT_RHS_PACKING_THRESHOLD } { p.kc * nc } else { 0 };
    let short = n <= 2 * p.mc && (tb || !n.is_multiple_of(lanes));
    let left = if short { p.kc * n.next_multiple_of(mr) } else { 0 };
    4 * (right + left) as u64
}

/// Size of the inner blocks (kc) that the `gemm` crate accumulates separately in an
/// f32 product `[m, k] x [k, n]`.
pub(super) fn inner_block((m, k, n): (usize, usize, usize)) -> usize {
    if m <= SMALL && n <= SMALL {
        return k.min(SMALL_BLOCK);
    }
    let (mr, nr, _) = tile();
    gemm_common::cache::kernel_params(n, m, k, mr, nr, 4).kc
}

/// Largest side of a product blocked without regard to caches, and the inner block size for these.
const SMALL: usize = 64;
const SMALL_BLOCK: usize = 512;

/// Rows and columns of the `gemm` crate's microkernel for f32 on this CPU, and f32 values per vector.
fn tile() -> (usize, usize, usize) {
    #[cfg(target_arch = "x86_64")]
    return match (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("fma")) {
        (true, _) => (64, 6, 16),
        (_, true) => (16, 6, 8),
        _ => (2, 4, 1),
    };
    #[cfg(not(target_arch = "x86_64"))]
    if cfg!(target_arch = "aarch64") { (16, 4, 4) } else { (2, 4, 1) }
}

/// Bytes that the `gemm` crate holds for `threads` threads, one of them the caller: a buffer of the size of
/// the L2 cache each.
pub fn slabs(threads: u64) -> u64 {
    threads * gemm_common::cache::CACHE_INFO[1].cache_bytes as u64
}

/// Starts to query the CPU caches on another thread: about a hundred small files in `/sys`, a quarter of the
/// time to plan a small model.
pub fn read_caches_ahead() {
    rayon::spawn(|| {
        std::hint::black_box(*gemm_common::cache::CACHE_INFO);
    });
}

/// Allocates the `gemm` buffers of all compute threads and of the current thread, which runs small products.
/// Otherwise each thread allocates on first use, and memory would vary between runs.
pub fn make_slabs() {
    let make = || gemm_common::gemm::L2_SLAB.with_borrow_mut(|slab| slab.fill(MaybeUninit::new(0)));
    rayon::broadcast(|_| make());
    make();
}

/// Records the work of `op(a) op(b)` for ghosts; `onto` is the accumulator.
pub fn work(a: &Tensor, ta: bool, b: &Tensor, onto: Option<&Tensor>) -> Result<()> {
    let (Some(ga), Some(gb)) = (a.ghost(), b.ghost()) else { return Ok(()) };
    let (rows, inner) = a.dims2()?;
    let m = if ta { inner } else { rows };
    // an accumulator is read and written
    let onto = onto.and_then(Tensor::ghost).map_or(0.0, |c| 2.0 * c.weight_bytes());
    let flops = 2.0 * m as f64 * b.elem_count() as f64;
    let read = ga.weight_bytes() + gb.weight_bytes() + onto;
    ga.ledger().work(Cost { flops, read, ..Cost::default() });
    Ok(())
}
