//! Products of bf16 with sums in f32, by the processor's dot products of pairs.
//!
//! ```text
//! left operand      as it is where a row's values are side by side and even in number, else packed whole: panels of 12 rows
//! right operand     few columns: packed whole, and threads take rows;  else threads take strips of columns, and pack
//!                   (or make) each as they come to it, so that it stays in a core's cache while all rows pass by
//! inner dimension   in blocks of [`block`] values, whose sums are added in order
//! ```
//!
//! Which thread takes what changes no bit: every sum runs over the inner dimension in the same order.
//!
//! | path | where |
//! |---|---|
//! | dots | x86-64 with AVX-512 BF16 |
//! | widened | all others: operands are widened to f32, and the `gemm` crate multiplies |
//!
//! `FT_BF16=widened` or `dots` in the environment chooses one.

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

/// How products of bf16 are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// By dot products of pairs.
    Dots,
    /// Widened to f32.
    Widened,
}

/// The environment variable that chooses a path.
const VARIABLE: &str = "FT_BF16";

impl Path {
    /// The fastest first.
    const ALL: [Self; 2] = [Path::Dots, Path::Widened];

    /// The word that chooses it in the environment.
    pub fn word(self) -> &'static str {
        match self {
            Path::Dots => "dots",
            Path::Widened => "widened",
        }
    }

    /// What it is, in words.
    pub fn text(self) -> &'static str {
        match self {
            Path::Dots => "AVX-512 BF16",
            Path::Widened => "widened to f32",
        }
    }

    /// Whether this processor has it.
    pub fn is_here(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Path::Dots => panels::are_here(),
            #[cfg(not(target_arch = "x86_64"))]
            Path::Dots => false,
            Path::Widened => true,
        }
    }

    /// What the environment asks for, if this processor has it; by default the fastest that it has.
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
/// The environment asks for one that is not here.
pub fn path() -> candle_core::Result<Path> {
    static PATH: OnceLock<Result<Path, String>> = OnceLock::new();
    let chosen = PATH.get_or_init(|| Path::choose(std::env::var(VARIABLE).ok().as_deref()));
    chosen.clone().map_err(candle_core::Error::msg)
}

/// Where a product goes, row-major.
pub enum Onto<'a> {
    /// Rounded once.
    Half(&'a mut [bf16]),
    /// As it was summed.
    Wide(&'a mut [f32]),
}

/// Fills a tile with the values of some columns (first) and inner indices of the right operand.
pub type Make<'s> = dyn Fn(Range<usize>, Range<usize>, &mut [bf16]) + Sync + 's;

/// The right operand [k, n].
#[derive(Clone, Copy)]
pub enum Right<'s> {
    /// A matrix.
    Of(Mat<'s, bf16>),
    /// One that is made a tile at a time, of so many columns: row-major [inner, columns], or `transposed` [columns, inner].
    Made {
        /// What makes them.
        make: &'s Make<'s>,
        /// Columns.
        columns: usize,
        /// Whether the inner values of a column are side by side.
        transposed: bool,
    },
}

/// `alpha a b`, rounded once, on all threads unless this one is [`serial`](super::serial).
///
/// # Panics
/// If the shapes don't fit, or [`Path::Dots`] is not here: bugs of the caller.
pub fn rounded(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<bf16> {
    strips::rounded(a, b, alpha)
}

/// As [`rounded`], the sums as they are.
///
/// # Panics
/// As there.
pub fn wide(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<f32> {
    strips::wide(a, b, alpha)
}

/// `c = alpha a b`, or with `add` `c += alpha a b`, for a `c` with so many values from row to row.
///
/// # Panics
/// As there.
pub fn product_onto(c: Onto<'_>, stride: usize, add: bool, a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) {
    strips::product_onto(c, stride, add, a, b, alpha);
}

/// Bytes that a product [m, k] x [k, n] takes beside its operands and its result on so many threads, the left operand
/// `transposed` or not, the right one `made` or not, the result rounded or not.
pub fn packing(
    sizes: (usize, usize, usize),
    threads: usize,
    (transposed, made): (bool, bool),
    to_half: bool,
) -> u64 {
    Cut::new(sizes, threads, (transposed, made)).bytes(to_half)
}

/// Rows and columns of the products that are computed at once; see `panels`.
const ROWS: usize = 12;
const COLUMNS: usize = 32;
/// Inner values of a block, whose products are summed before they are added to others', and of one among many.
const BLOCK: usize = 2048;
const SHORT_BLOCK: usize = BLOCK / 2;

/// Values of a block of so many inner ones.
///
/// Short blocks have wider strips. A right operand of many rows, as a head has backward, is read a strip of all its rows at
/// a time from memory, and so in longer pieces.
fn block(k: usize) -> usize {
    if k > 2 * BLOCK { SHORT_BLOCK } else { BLOCK }
}

/// Values of the right operand that a thread packs at a time: half a megabyte, about half of a core's second cache.
const STRIP: usize = 1 << 18;
/// Columns of a strip at the most.
const WIDEST: usize = 256;
/// Panels of rows that a thread takes at a time where the right operand is packed whole.
const PANELS: usize = 4;

/// How a product is shared out.
#[derive(Clone, Copy, Debug)]
struct Cut {
    m: usize,
    k: usize,
    n: usize,
    threads: usize,
    /// Whether the left operand is packed.
    packed: bool,
    /// Whether the right operand is made.
    made: bool,
    /// Columns of a strip; `None` where threads take rows.
    strip: Option<usize>,
}

impl Cut {
    fn new((m, k, n): (usize, usize, usize), threads: usize, (transposed, made): (bool, bool)) -> Self {
        let down = |x: usize| (x / COLUMNS * COLUMNS).clamp(COLUMNS, WIDEST);
        // as wide as leaves each thread some of them
        let width = down(STRIP / k.clamp(1, block(k))).min(down(n / (3 * threads)));
        let more_rows = m.div_ceil(PANELS * ROWS) > n.div_ceil(width);
        let strip = (made || threads == 1 || n.div_ceil(width) >= 2 * threads || !more_rows).then_some(width);
        // a pair is read as one word
        let packed = transposed || !k.is_multiple_of(2);
        Self { m, k, n, threads, packed, made, strip }
    }

    /// Blocks of the inner dimension.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
        let (k, block) = (self.k, block(self.k));
        (0..k).step_by(block).map(move |from| from..(from + block).min(k))
    }

    /// Tasks that threads take, and rows and columns of the largest.
    fn tasks(&self) -> (usize, [usize; 2]) {
        match self.strip {
            Some(width) => (self.n.div_ceil(width), [self.m, width.min(self.n)]),
            None => (self.m.div_ceil(PANELS * ROWS), [self.m.min(PANELS * ROWS), self.n]),
        }
    }

    /// Threads that have something to do.
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

/// What a product takes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Words of the left operand's panels.
    left: usize,
    /// Of the right one's, where it is packed whole.
    right: usize,
    /// On each thread: of those of a strip.
    strip: usize,
    /// Values that are made of it.
    tile: usize,
    /// Sums that are not complete.
    sums: usize,
}

#[cfg(test)]
mod tests;
