//! Multi-threaded bf16 products.

use super::operands::{Onto, Right};
use super::panels;
use super::partition::{COLUMNS, PANELS, Partition, ROWS, SHORT_BLOCK, Sizes};
use crate::cpu::each_on;
use crate::matmul::gemm::cpu::Mat;
use crate::matmul::gemm::threads::{Shared, threads};
use half::bf16;
use half::vec::HalfBitsVecExt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;

const _: () = assert!(SHORT_BLOCK.is_multiple_of(2));

/// Uninitialized memory, written before it is read.
struct Buffer<T>(Vec<MaybeUninit<T>>);

impl<T: Copy> Buffer<T> {
    fn new(len: usize) -> Self {
        let mut values = Vec::with_capacity(len);
        // SAFETY: MaybeUninit values need no initialization.
        unsafe { values.set_len(len) };
        Self(values)
    }

    fn start(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }

    /// The initialized values.
    ///
    /// # Safety
    /// Every value was written.
    unsafe fn written(self) -> Vec<T> {
        let mut values = ManuallyDrop::new(self.0);
        // SAFETY: the same allocation, initialized by contract.
        unsafe { Vec::from_raw_parts(values.as_mut_ptr().cast(), values.len(), values.capacity()) }
    }
}

/// `alpha a b`, rounded once. Uses all threads unless inside [`serial`](crate::gemm::serial).
///
/// # Panics
/// If the shapes don't match, or [`Path::Dots`](super::Path::Dots) is not supported (caller bugs).
pub fn rounded(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<bf16> {
    let mut out = Buffer::new(a.rows * columns(a, b));
    product(Destination::Half(Shared::new(out.start())), columns(a, b), false, a, b, alpha);
    // SAFETY: the product wrote every value.
    unsafe { out.written() }
}

/// [`rounded`] without rounding.
///
/// # Panics
/// As [`rounded`].
pub fn wide(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<f32> {
    let mut out = Buffer::new(a.rows * columns(a, b));
    product(Destination::Wide(Shared::new(out.start())), columns(a, b), false, a, b, alpha);
    // SAFETY: the product wrote every value.
    unsafe { out.written() }
}

/// `c = alpha a b`, or `c += alpha a b` with `add`; `c` has row stride `stride`.
///
/// # Panics
/// As [`rounded`].
pub fn product_onto(c: Onto<'_>, stride: usize, add: bool, a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) {
    let (len, place) = match c {
        Onto::Half(c) => (c.len(), Destination::Half(Shared::new(c.as_mut_ptr()))),
        Onto::Wide(c) => (c.len(), Destination::Wide(Shared::new(c.as_mut_ptr()))),
    };
    let (m, n) = (a.rows, columns(a, b));
    assert!(m == 0 || stride >= n && len >= (m - 1) * stride + n, "product outside its destination");
    product(place, stride, add, a, b, alpha);
}

/// Number of columns of a product.
fn columns(a: Mat<'_, bf16>, b: Right<'_>) -> usize {
    match b {
        Right::Stored(b) => {
            assert_eq!(a.cols, b.rows, "inner sizes of a product");
            b.cols
        }
        Right::Generated { columns, .. } => columns,
    }
}

/// Destination of a product.
#[derive(Clone, Copy)]
enum Destination {
    Half(Shared<bf16>),
    Wide(Shared<f32>),
}

/// `out = alpha a b`, or `out += alpha a b` with `add`. `out` has the size of the product with row stride `stride`, and
/// is not accessed otherwise during the call.
fn product(out: Destination, stride: usize, add: bool, a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) {
    assert!(panels::are_here(), "dot products that this processor does not have");
    let (m, k, n) = (a.rows, a.cols, columns(a, b));
    if m == 0 || n == 0 || k == 0 {
        if !add {
            for row in 0..m {
                // SAFETY: all-zero bytes are valid for both types, and each row has n values.
                unsafe {
                    match out {
                        Destination::Half(out) => out.at(row * stride).write_bytes(0, n),
                        Destination::Wide(out) => out.at(row * stride).write_bytes(0, n),
                    }
                }
            }
        }
        return;
    }
    let partition = Partition::new((m, k, n), threads(), (a.cs != 1, matches!(b, Right::Generated { .. })));
    let sizes = partition.sizes(matches!(out, Destination::Half(_)));
    let (mut left, mut right) = (Buffer::<u32>::new(sizes.left), Buffer::<u32>::new(sizes.right));
    let panels = partition.packed.then(|| Shared::new(left.start()));
    let b_panels = Shared::new(right.start());
    let work = Work { partition, sizes, out, stride, add, alpha, rows: a, panels, b: b_panels };
    if let Some(to) = panels {
        work.pack_left(to);
    }
    match partition.strip {
        Some(width) => work.by_strips(width, b),
        None => work.by_rows(b),
    }
}

/// State of a running product.
struct Work<'a> {
    partition: Partition,
    sizes: Sizes,
    out: Destination,
    /// Row stride of `out`.
    stride: usize,
    add: bool,
    alpha: f32,
    /// Left operand.
    rows: Mat<'a, bf16>,
    /// Packed left operand, one block of the inner dimension after another.
    panels: Option<Shared<u32>>,
    /// Packed right operand, in the same order, if threads split rows.
    b: Shared<u32>,
}

impl Work<'_> {
    /// Position of the panels from `row` on within a block.
    fn panel(&self, panels: Shared<u32>, block: &Range<usize>, row: usize) -> *mut u32 {
        panels.at(block.start / 2 * self.partition.m + row * block.len().div_ceil(2))
    }

    /// `rows` rows of a block, starting at `row`.
    fn left(&self, block: &Range<usize>, row: usize, rows: usize) -> panels::Left {
        match self.panels {
            Some(p) => panels::Left { at: self.panel(p, block, row).cast_const(), rows, stride: None },
            None => {
                let at = self.rows.data[row * self.rows.rs + block.start..].as_ptr().cast();
                panels::Left { at, rows, stride: Some(self.rows.rs) }
            }
        }
    }

    /// Position of the panels from `column` on within a block.
    fn right(&self, block: &Range<usize>, column: usize) -> *mut u32 {
        self.b.at(block.start / 2 * panels::width(self.partition.n) + column * block.len().div_ceil(2))
    }

    fn pack_left(&self, to: Shared<u32>) {
        /// Panels packed per task.
        const MANY: usize = 16;
        let m = self.partition.m;
        let tasks = 0..m.div_ceil(MANY * ROWS);
        each_on(self.partition.threads, tasks, <()>::default, |(), task| {
            let rows = task * MANY * ROWS..m.min((task + 1) * MANY * ROWS);
            for block in self.partition.blocks() {
                // SAFETY: the instructions are supported (asserted in `product`); panels of different tasks
                // are disjoint and within the buffer.
                unsafe {
                    let to = self.panel(to, &block, rows.start);
                    panels::pack(to, panels::Shape::LEFT, self.rows, rows.clone(), block);
                }
            }
        });
    }

    fn by_strips(&self, width: usize, b: Right<'_>) {
        let Partition { m, n, threads, .. } = self.partition;
        let Sizes { strip, sums, tile, .. } = self.sizes;
        let buffers = || {
            let tile = vec![0u16; tile].reinterpret_into::<bf16>();
            (Buffer::<u32>::new(strip), Buffer::<f32>::new(sums), tile)
        };
        each_on(threads, 0..n.div_ceil(width), buffers, |(packed, sums, tile), i| {
            let (packed, sums) = (Shared::new(packed.start()), Shared::new(sums.start()));
            let own = i * width..((i + 1) * width).min(n);
            for block in self.partition.blocks() {
                pack_right(packed, b, own.clone(), block.clone(), tile);
                let right = |c: usize| packed.at(c * block.len().div_ceil(2)).cast_const();
                self.multiply(0..m, own.clone(), &block, &right, sums);
            }
        });
    }

    fn by_rows(&self, b: Right<'_>) {
        let Partition { m, n, threads, .. } = self.partition;
        each_on(threads, 0..n.div_ceil(COLUMNS), <()>::default, |(), p| {
            let own = p * COLUMNS..n.min((p + 1) * COLUMNS);
            for block in self.partition.blocks() {
                let to = Shared::new(self.right(&block, own.start));
                pack_right(to, b, own.clone(), block, &mut []);
            }
        });
        let height = PANELS * ROWS;
        let room = || Buffer::<f32>::new(self.sizes.sums);
        each_on(threads, 0..m.div_ceil(height), room, |sums, i| {
            let sums = Shared::new(sums.start());
            for block in self.partition.blocks() {
                let right = |c: usize| self.right(&block, c).cast_const();
                self.multiply(i * height..((i + 1) * height).min(m), 0..n, &block, &right, sums);
            }
        });
    }

    /// Multiplies rows `rows` and columns `own` over one block. `right(c)` returns the panel starting at
    /// the c-th of these columns; `sums` holds incomplete sums if there is more than one block.
    fn multiply(
        &self,
        rows: Range<usize>,
        own: Range<usize>,
        block: &Range<usize>,
        right: &dyn Fn(usize) -> *const u32,
        sums: Shared<f32>,
    ) {
        let (stride, pairs) = (self.stride, block.len().div_ceil(2));
        let (first, last) = (block.start == 0, block.end == self.partition.k);
        for (c, width) in panels::Shape::RIGHT.panels(own.len()) {
            let count = width.min(own.len() - c);
            for row in rows.clone().step_by(ROWS) {
                let height = ROWS.min(rows.end - row);
                let at = row * stride + own.start + c;
                let out = match self.out {
                    Destination::Wide(wide) => panels::Out {
                        wide: wide.at(at),
                        wide_stride: stride,
                        half: std::ptr::null_mut(),
                        half_stride: 0,
                        alpha: self.alpha,
                        add_wide: self.add || !first,
                        add_half: false,
                        to_half: false,
                    },
                    Destination::Half(half) => panels::Out {
                        wide: sums.at((row - rows.start) * own.len() + c),
                        wide_stride: own.len(),
                        half: half.at(at),
                        half_stride: stride,
                        alpha: self.alpha,
                        add_wide: !first,
                        add_half: self.add && last,
                        to_half: last,
                    },
                };
                let left = self.left(block, row, height);
                // SAFETY: the instructions are supported (asserted in `product`); panels were packed for
                // this block, unpacked rows are read in place; this thread alone writes these rows and
                // columns of the destination, and owns `sums`.
                unsafe { panels::multiply(pairs, left, (right(c), width, count), &out) };
            }
        }
    }
}

/// Packs the columns `own` of the right operand over one block, panel by panel. `tile` receives generated
/// values.
fn pack_right(to: Shared<u32>, b: Right<'_>, own: Range<usize>, block: Range<usize>, tile: &mut [bf16]) {
    // matrix to pack from, with the offset of the columns and the inner range in it
    let (lines, first, inner) = match b {
        Right::Stored(b) => (b.t(), own.start, block),
        Right::Generated { make, transposed, .. } => {
            let tile = &mut tile[..own.len() * block.len()];
            make(own.clone(), block.clone(), tile);
            let lines = if transposed {
                Mat::new(&*tile, own.len(), block.len(), block.len())
            } else {
                Mat::new(&*tile, block.len(), own.len(), own.len()).t()
            };
            (lines, 0, 0..block.len())
        }
    };
    let columns = first..first + own.len();
    // SAFETY: the instructions are supported (asserted in `product`); `to` has room for the strip, and
    // belongs to this thread.
    unsafe { panels::pack(to.at(0), panels::Shape::RIGHT, lines, columns, inner) };
}
