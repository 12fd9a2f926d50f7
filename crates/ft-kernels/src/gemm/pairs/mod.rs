//! bf16 products with f32 sums, by the CPU's dot-product instructions on pairs of values.
//!
//! ```text
//! left operand      in place if rows are contiguous and even in length, else packed whole: panels of 12 rows
//! right operand     few columns: packed whole, parallel over rows; else parallel over strips of columns,
//!                   each packed (or generated) by its thread, to stay in the core's cache for all rows
//! inner dimension   in blocks of [`block`] values, summed in order
//! ```
//!
//! Results do not depend on the number of threads: every sum runs over the inner dimension in the same
//! order.
//!
//! | path | CPUs |
//! |---|---|
//! | dots | x86-64 with AVX-512 BF16 |
//! | widened | all others: operands are widened to f32 for the `gemm` crate |
//!
//! The environment variable `FT_BF16=widened` (or `dots`) overrides the choice.

#[cfg(target_arch = "x86_64")]
pub(super) mod panels;
#[cfg(target_arch = "x86_64")]
mod strips;
#[cfg(not(target_arch = "x86_64"))]
#[path = "absent.rs"]
mod strips;
mod tensors;

pub use self::tensors::{made, matmul, onto, takes};

use super::Mat;
use half::bf16;
use std::ops::Range;
use std::sync::OnceLock;

/// Implementation of bf16 products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Dot-product instructions.
    Dots,
    /// Operands widened to f32.
    Widened,
}

/// Environment variable selecting the path.
const VARIABLE: &str = "FT_BF16";

impl Path {
    /// Fastest first.
    const ALL: [Self; 2] = [Path::Dots, Path::Widened];

    /// Value of the environment variable.
    pub fn word(self) -> &'static str {
        match self {
            Path::Dots => "dots",
            Path::Widened => "widened",
        }
    }

    /// Description for users.
    pub fn text(self) -> &'static str {
        match self {
            Path::Dots => "AVX-512 BF16",
            Path::Widened => "widened to f32",
        }
    }

    /// Whether this CPU supports the path.
    pub fn is_here(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Path::Dots => panels::are_here(),
            #[cfg(not(target_arch = "x86_64"))]
            Path::Dots => false,
            Path::Widened => true,
        }
    }

    /// The requested path if supported; by default the fastest supported one.
    fn choose(wanted: Option<&str>) -> Result<Self, String> {
        let chosen = match wanted {
            None | Some("") => Self::ALL.into_iter().find(|p| p.is_here()),
            Some(word) => match Self::ALL.into_iter().find(|p| p.word() == word) {
                None => {
                    return Err(format!(
                        "{VARIABLE}={word}: unknown\n  hint: {VARIABLE}=dots or widened, or leave it out"
                    ));
                }
                known => known,
            },
        };
        match chosen {
            Some(p) if p.is_here() => Ok(p),
            _ => Err(format!(
                "{VARIABLE}=dots: this processor has no AVX-512 BF16\n  hint: {VARIABLE}=widened, or leave it out"
            )),
        }
    }
}

/// The path of this process.
///
/// # Errors
/// The path requested in the environment is not supported by this CPU.
pub fn path() -> candle_core::Result<Path> {
    static PATH: OnceLock<Result<Path, String>> = OnceLock::new();
    let chosen = PATH.get_or_init(|| Path::choose(std::env::var(VARIABLE).ok().as_deref()));
    chosen.clone().map_err(candle_core::Error::msg)
}

/// Row-major destination of a product.
pub enum Onto<'a> {
    /// bf16, rounded once.
    Half(&'a mut [bf16]),
    /// f32, unrounded.
    Wide(&'a mut [f32]),
}

/// Fills a tile of the right operand, given its columns and inner indices, in this order.
pub type Make<'s> = dyn Fn(Range<usize>, Range<usize>, &mut [bf16]) + Sync + 's;

/// The right operand [k, n].
#[derive(Clone, Copy)]
pub enum Right<'s> {
    /// A stored matrix.
    Of(Mat<'s, bf16>),
    /// Generated in tiles of `columns` columns: row-major [inner, columns], or [columns, inner] if
    /// `transposed`.
    Made {
        /// Generator.
        make: &'s Make<'s>,
        /// Columns per tile.
        columns: usize,
        /// Whether tiles are [columns, inner].
        transposed: bool,
    },
}

/// `alpha a b`, rounded once. Uses all threads unless inside [`serial`](super::serial).
///
/// # Panics
/// If the shapes don't match, or [`Path::Dots`] is not supported (caller bugs).
pub fn rounded(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<bf16> {
    strips::rounded(a, b, alpha)
}

/// [`rounded`] without rounding.
///
/// # Panics
/// As [`rounded`].
pub fn wide(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<f32> {
    strips::wide(a, b, alpha)
}

/// `c = alpha a b`, or `c += alpha a b` with `add`; `c` has row stride `stride`.
///
/// # Panics
/// As [`rounded`].
pub fn product_onto(c: Onto<'_>, stride: usize, add: bool, a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) {
    strips::product_onto(c, stride, add, a, b, alpha);
}

/// Bytes of scratch memory for a product [m, k] x [k, n] on `threads` threads, depending on whether the
/// left operand is `transposed`, the right one generated (`made`), and the result rounded (`to_half`).
pub fn packing(
    sizes: (usize, usize, usize),
    threads: usize,
    (transposed, made): (bool, bool),
    to_half: bool,
) -> u64 {
    Cut::new(sizes, threads, (transposed, made)).bytes(to_half)
}

/// Rows and columns of the register tile; see `panels`.
const ROWS: usize = 12;
const COLUMNS: usize = 32;
/// Values of the inner dimension per block: if the dimension fits two blocks, and if it is longer.
const BLOCK: usize = 2048;
const SHORT_BLOCK: usize = BLOCK / 2;

/// Block length for an inner dimension of `k`.
///
/// Short blocks allow wider strips. A row-major right operand with many rows, as in the head's backward
/// pass, is read strip by strip over all its rows, so wider strips mean longer reads.
fn block(k: usize) -> usize {
    if k > 2 * BLOCK { SHORT_BLOCK } else { BLOCK }
}

/// Values of the right operand packed per thread at a time: half a megabyte, about half of a core's L2
/// cache.
const STRIP: usize = 1 << 18;
/// Maximum columns per strip.
const WIDEST: usize = 256;
/// Panels of rows per task, if the right operand is packed whole.
const PANELS: usize = 4;

/// Partition of a product among threads.
#[derive(Clone, Copy, Debug)]
struct Cut {
    m: usize,
    k: usize,
    n: usize,
    threads: usize,
    /// Whether the left operand is packed.
    packed: bool,
    /// Whether the right operand is generated.
    made: bool,
    /// Columns per strip; `None` if threads split rows.
    strip: Option<usize>,
}

impl Cut {
    fn new((m, k, n): (usize, usize, usize), threads: usize, (transposed, made): (bool, bool)) -> Self {
        let down = |x: usize| (x / COLUMNS * COLUMNS).clamp(COLUMNS, WIDEST);
        // as wide as possible with about three strips per thread
        let width = down(STRIP / k.clamp(1, block(k))).min(down(n / (3 * threads)));
        let more_rows = m.div_ceil(PANELS * ROWS) > n.div_ceil(width);
        let strip = (made || threads == 1 || n.div_ceil(width) >= 2 * threads || !more_rows).then_some(width);
        // pairs are read as 32-bit words
        let packed = transposed || !k.is_multiple_of(2);
        Self { m, k, n, threads, packed, made, strip }
    }

    /// Blocks of the inner dimension.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
        let (k, block) = (self.k, block(self.k));
        (0..k).step_by(block).map(move |from| from..(from + block).min(k))
    }

    /// Number of tasks, and rows and columns of the largest.
    fn tasks(&self) -> (usize, [usize; 2]) {
        match self.strip {
            Some(width) => (self.n.div_ceil(width), [self.m, width.min(self.n)]),
            None => (self.m.div_ceil(PANELS * ROWS), [self.m.min(PANELS * ROWS), self.n]),
        }
    }

    /// Threads with work.
    fn workers(&self) -> usize {
        self.threads.min(self.tasks().0).max(1)
    }

    fn sizes(&self, to_half: bool) -> Sizes {
        let (_, [rows, columns]) = self.tasks();
        let deepest = self.k.min(block(self.k));
        let padded = columns.next_multiple_of(COLUMNS / 2);
        let only = |is: bool, size: usize| if is { size } else { 0 };
        Sizes {
            left: only(self.packed, self.m * self.k.div_ceil(2)),
            right: only(self.strip.is_none(), self.k.div_ceil(2) * padded),
            strip: only(self.strip.is_some(), deepest.div_ceil(2) * padded),
            tile: only(self.made, deepest * columns),
            sums: only(to_half && self.k > block(self.k), rows * columns),
        }
    }

    fn bytes(&self, to_half: bool) -> u64 {
        if self.m == 0 || self.k == 0 || self.n == 0 {
            return 0;
        }
        let Sizes { left, right, strip, tile, sums } = self.sizes(to_half);
        (4 * (left + right) + self.workers() * (4 * (strip + sums) + 2 * tile)) as u64
    }
}

/// Scratch sizes of a product.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Words of the left operand's panels.
    left: usize,
    /// Words of the right operand's panels, if packed whole.
    right: usize,
    /// Words of a strip's panels, per thread.
    strip: usize,
    /// Generated values, per thread.
    tile: usize,
    /// Incomplete sums, per thread.
    sums: usize,
}

#[cfg(test)]
mod tests;
