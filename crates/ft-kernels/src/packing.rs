//! What products cost in a plan: the buffers that the `gemm` crate packs operands into, tiles, arithmetic.

use super::ledger::{Cost, Ledger, Role};
use crate::Tensor;
use candle_core::Result;
use std::mem::MaybeUninit;

/// What the threads of [`super::gemm::by_tiles`] hold for a product [m, k] x [k, n], on ghosts: a tile each if they make it, and what
/// its product packs; forward the tile is `transposed`.
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

/// Tile sizes of the `gemm` crate's AVX-512 kernel, values of its vectors, and columns from which on it packs a right
/// operand that is contiguous; others have smaller ones.
const MR: usize = 64;
const NR: usize = 6;
const LANES: usize = 16;
const MANY: usize = gemm_common::gemm::DEFAULT_RHS_PACKING_THRESHOLD * MR;

/// Bytes that the `gemm` crate takes to pack the operands of an f32 product [m, k] x [k, n], read transposed or not.
///
/// It computes the transposed product (our results are row-major). It packs what is then the right operand a cache-sized
/// block at a time, if its columns are not contiguous; and the left one where it is short, if its rows are not.
pub(super) fn packing((m, k, n): (usize, usize, usize), ta: bool, tb: bool) -> u64 {
    if m == 0 || n == 0 || k == 0 {
        return 0;
    }
    let p = gemm_common::cache::kernel_params(n, m, k, MR, NR, 4);
    let nc = if p.nc > 0 { p.nc } else { m.next_multiple_of(NR) };
    let right = if n > if ta { 2 * MR } else { MANY } { p.kc * nc } else { 0 };
    let short = n <= 2 * p.mc && (tb || !n.is_multiple_of(LANES));
    let left = if short { p.kc * n.next_multiple_of(MR) } else { 0 };
    4 * (right + left) as u64
}

/// Inner values that the `gemm` crate sums before it adds them to what is there, in an f32 product [m, k] x [k, n].
pub(super) fn inner_block((m, k, n): (usize, usize, usize)) -> usize {
    if m <= SMALL && n <= SMALL {
        return k.min(SMALL_BLOCK);
    }
    let (mr, nr) = tile();
    gemm_common::cache::kernel_params(n, m, k, mr, nr, 4).kc
}

/// Rows and columns of products that it blocks without a look at the caches, and inner values of such a block.
const SMALL: usize = 64;
const SMALL_BLOCK: usize = 512;

/// Tile sizes of the f32 kernel that it chooses here.
fn tile() -> (usize, usize) {
    #[cfg(target_arch = "x86_64")]
    return match (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("fma")) {
        (true, _) => (MR, NR),
        (_, true) => (16, 6),
        _ => (2, 4),
    };
    #[cfg(not(target_arch = "x86_64"))]
    if cfg!(target_arch = "aarch64") { (16, 4) } else { (2, 4) }
}

/// Bytes that the `gemm` crate keeps where so many threads compute, of which one asks for the products: a slab of the size of
/// the second cache for each.
pub fn slabs(threads: u64) -> u64 {
    threads * gemm_common::cache::CACHE_INFO[1].cache_bytes as u64
}

/// Begins to read what the processor's caches are, on another thread: the system has it in a hundred small files, which
/// take a plan of a small model a quarter of its time.
pub fn read_caches_ahead() {
    rayon::spawn(|| {
        std::hint::black_box(*gemm_common::cache::CACHE_INFO);
    });
}

/// Makes the slabs of the threads that compute, and of this one, which computes the small products itself. A slab is else
/// made when its thread first comes to work, and which threads come is luck: what a run holds would be too.
pub fn make_slabs() {
    let make = || gemm_common::gemm::L2_SLAB.with_borrow_mut(|slab| slab.fill(MaybeUninit::new(0)));
    rayon::broadcast(|_| make());
    make();
}

/// Writes the work of `op(a) op(b)` down, for ghosts; `onto` is what it is added to.
pub fn work(a: &Tensor, ta: bool, b: &Tensor, onto: Option<&Tensor>) -> Result<()> {
    let (Some(ga), Some(gb)) = (a.ghost(), b.ghost()) else { return Ok(()) };
    let (rows, inner) = a.dims2()?;
    let m = if ta { inner } else { rows };
    // what a product is added to is read and written
    let onto = onto.and_then(Tensor::ghost).map_or(0.0, |c| 2.0 * c.weight_bytes());
    let flops = 2.0 * m as f64 * b.elem_count() as f64;
    let read = ga.weight_bytes() + gb.weight_bytes() + onto;
    ga.ledger().work(Cost { flops, read, ..Cost::default() });
    Ok(())
}
