//! Products of bf16, shared out among threads.

use super::{COLUMNS, Cut, Onto, PANELS, ROWS, Right, SHORT_BLOCK, Sizes, panels};
use crate::gemm::cpu::{Mat, threads};
use half::bf16;
use half::vec::HalfBitsVecExt;
use rayon::prelude::*;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

const _: () = assert!(ROWS == panels::ROWS && COLUMNS == panels::COLUMNS && SHORT_BLOCK.is_multiple_of(2));

/// Memory whose values are written before they are read.
struct Buffer<T>(Vec<MaybeUninit<T>>);

impl<T: Copy> Buffer<T> {
    fn new(len: usize) -> Self {
        let mut values = Vec::with_capacity(len);
        // SAFETY: values that may be uninitialised are valid without having been written.
        unsafe { values.set_len(len) };
        Self(values)
    }

    fn start(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }

    /// The values.
    ///
    /// # Safety
    /// All were written.
    unsafe fn written(self) -> Vec<T> {
        let mut values = ManuallyDrop::new(self.0);
        // SAFETY: the same memory, whose values are there, by the caller's promise.
        unsafe { Vec::from_raw_parts(values.as_mut_ptr().cast(), values.len(), values.capacity()) }
    }
}

/// A place that threads share, each writing where no other reads or writes.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: see above: the functions here share it out by panels and strips.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn from(self, i: usize) -> *mut T {
        self.0.wrapping_add(i)
    }
}

/// Runs `f` for the numbers below `count` on so many threads.
fn each(threads: usize, count: usize, f: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                i if i < count => f(i),
                _ => return,
            }
        }
    };
    match threads.min(count) {
        0 => {}
        1 => (0..count).for_each(f),
        n => (0..n).into_par_iter().with_max_len(1).for_each(|_| work()),
    }
}

/// See [`super::rounded`].
pub fn rounded(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<bf16> {
    let mut out = Buffer::new(a.rows * columns(a, b));
    let place = Place { half: Some(Shared(out.start())), wide: None, stride: columns(a, b) };
    product(place, false, a, b, alpha);
    // SAFETY: the product wrote all of them.
    unsafe { out.written() }
}

/// See [`super::wide`].
pub fn wide(a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Vec<f32> {
    let mut out = Buffer::new(a.rows * columns(a, b));
    let place = Place { half: None, wide: Some(Shared(out.start())), stride: columns(a, b) };
    product(place, false, a, b, alpha);
    // SAFETY: the product wrote all of them.
    unsafe { out.written() }
}

/// See [`super::product_onto`].
pub fn product_onto(c: Onto<'_>, stride: usize, add: bool, a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) {
    let (len, place) = match c {
        Onto::Half(c) => (c.len(), Place { half: Some(Shared(c.as_mut_ptr())), wide: None, stride }),
        Onto::Wide(c) => (c.len(), Place { half: None, wide: Some(Shared(c.as_mut_ptr())), stride }),
    };
    let (m, n) = (a.rows, columns(a, b));
    assert!(m == 0 || stride >= n && len >= (m - 1) * stride + n, "product outside its destination");
    product(place, add, a, b, alpha);
}

/// Columns of a product.
fn columns(a: Mat<'_, bf16>, b: Right<'_>) -> usize {
    match b {
        Right::Of(b) => {
            assert_eq!(a.cols, b.rows, "inner sizes of a product");
            b.cols
        }
        Right::Made { columns, .. } => columns,
    }
}

/// Where a product goes, one or the other, with so many values from row to row.
#[derive(Clone, Copy)]
struct Place {
    half: Option<Shared<bf16>>,
    wide: Option<Shared<f32>>,
    stride: usize,
}

/// `out = alpha a b`, or `out += alpha a b`, for an `out` of as many rows and columns, which nothing else reads or writes.
fn product(out: Place, add: bool, a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) {
    assert!(panels::are_here(), "dot products that this processor does not have");
    let (m, k, n) = (a.rows, a.cols, columns(a, b));
    if m == 0 || n == 0 || k == 0 {
        if !add {
            for row in 0..m {
                // SAFETY: zeros are values of both types, and there are so many.
                unsafe {
                    out.half.inspect(|o| o.from(row * out.stride).write_bytes(0, n));
                    out.wide.inspect(|o| o.from(row * out.stride).write_bytes(0, n));
                }
            }
        }
        return;
    }
    let cut = Cut::new((m, k, n), threads(), (a.cs != 1, matches!(b, Right::Made { .. })));
    let sizes = cut.sizes(out.half.is_some());
    let (mut left, mut right) = (Buffer::<u32>::new(sizes.left), Buffer::<u32>::new(sizes.right));
    let panels = cut.packed.then(|| Shared(left.start()));
    let work = Work { cut, sizes, out, add, alpha, rows: a, panels, b: Shared(right.start()) };
    if let Some(to) = panels {
        work.pack_left(to);
    }
    match cut.strip {
        Some(width) => work.by_strips(width, b),
        None => work.by_rows(b),
    }
}

/// A product that is under way.
struct Work<'a> {
    cut: Cut,
    sizes: Sizes,
    out: Place,
    add: bool,
    alpha: f32,
    /// The left operand.
    rows: Mat<'a, bf16>,
    /// Its panels, block by block of the inner dimension, where it is packed.
    panels: Option<Shared<u32>>,
    /// The same of the right one, where threads take rows.
    b: Shared<u32>,
}

impl Work<'_> {
    /// Where the panels of rows from `row` on lie in a block.
    fn panel(&self, panels: Shared<u32>, block: &Range<usize>, row: usize) -> *mut u32 {
        panels.from(block.start / 2 * self.cut.m + row * block.len().div_ceil(2))
    }

    /// So many rows from `row` on in a block.
    fn left(&self, block: &Range<usize>, row: usize, rows: usize) -> panels::Left {
        match self.panels {
            Some(p) => panels::Left { at: self.panel(p, block, row).cast_const(), rows, stride: None },
            None => {
                let at = self.rows.data[row * self.rows.rs + block.start..].as_ptr().cast();
                panels::Left { at, rows, stride: Some(self.rows.rs) }
            }
        }
    }

    /// Where the panels of columns from `column` on lie in a block.
    fn right(&self, block: &Range<usize>, column: usize) -> *mut u32 {
        self.b.from(block.start / 2 * panels::width(self.cut.n) + column * block.len().div_ceil(2))
    }

    fn pack_left(&self, to: Shared<u32>) {
        /// Panels that a thread packs at a time.
        const MANY: usize = 16;
        let m = self.cut.m;
        each(self.cut.threads, m.div_ceil(MANY * ROWS), |task| {
            let rows = task * MANY * ROWS..m.min((task + 1) * MANY * ROWS);
            for block in self.cut.blocks() {
                // SAFETY: the path is here; panels have their own words of the buffer, which has as many as all of them,
                // and these are this thread's alone.
                unsafe {
                    let to = self.panel(to, &block, rows.start);
                    panels::pack(to, panels::Shape::LEFT, self.rows, rows.clone(), block);
                }
            }
        });
    }

    fn by_strips(&self, width: usize, b: Right<'_>) {
        let next = AtomicUsize::new(0);
        let work = |_| {
            let mut packed = Buffer::<u32>::new(self.sizes.strip);
            let mut sums = Buffer::<f32>::new(self.sizes.sums);
            let mut tile = vec![0u16; self.sizes.tile].reinterpret_into::<bf16>();
            let (packed, sums) = (Shared(packed.start()), Shared(sums.start()));
            loop {
                let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(width);
                if start >= self.cut.n {
                    return;
                }
                let own = start..(start + width).min(self.cut.n);
                for block in self.cut.blocks() {
                    pack_right(packed, b, own.clone(), block.clone(), &mut tile);
                    let right = |c: usize| packed.from(c * block.len().div_ceil(2)).cast_const();
                    self.multiply(0..self.cut.m, own.clone(), &block, &right, sums);
                }
            }
        };
        match self.cut.workers() {
            1 => work(0),
            n => (0..n).into_par_iter().with_max_len(1).for_each(work),
        }
    }

    fn by_rows(&self, b: Right<'_>) {
        let Cut { m, n, threads, .. } = self.cut;
        each(threads, n.div_ceil(COLUMNS), |p| {
            let own = p * COLUMNS..n.min((p + 1) * COLUMNS);
            for block in self.cut.blocks() {
                let to = Shared(self.right(&block, own.start));
                pack_right(to, b, own.clone(), block, &mut []);
            }
        });
        let next = AtomicUsize::new(0);
        let work = |_| {
            let mut sums = Buffer::<f32>::new(self.sizes.sums);
            let sums = Shared(sums.start());
            loop {
                let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(PANELS * ROWS);
                if start >= m {
                    return;
                }
                let rows = start..(start + PANELS * ROWS).min(m);
                for block in self.cut.blocks() {
                    let right = |c: usize| self.right(&block, c).cast_const();
                    self.multiply(rows.clone(), 0..n, &block, &right, sums);
                }
            }
        };
        match self.cut.workers() {
            1 => work(0),
            n => (0..n).into_par_iter().with_max_len(1).for_each(work),
        }
    }

    /// Multiplies some rows and columns in a block; `right(c)` has the panel from the c-th of these columns on, and `sums`
    /// room for what is not complete, if there is more than one block.
    fn multiply(
        &self,
        rows: Range<usize>,
        own: Range<usize>,
        block: &Range<usize>,
        right: &dyn Fn(usize) -> *const u32,
        sums: Shared<f32>,
    ) {
        let (stride, pairs) = (self.out.stride, block.len().div_ceil(2));
        let (first, last) = (block.start == 0, block.end == self.cut.k);
        for (c, width) in panels::Shape::RIGHT.panels(own.len()) {
            let count = width.min(own.len() - c);
            for row in rows.clone().step_by(ROWS) {
                let height = ROWS.min(rows.end - row);
                let at = row * stride + own.start + c;
                let out = match self.out {
                    Place { wide: Some(wide), .. } => panels::Out {
                        wide: wide.from(at),
                        wide_stride: stride,
                        half: std::ptr::null_mut(),
                        half_stride: 0,
                        alpha: self.alpha,
                        add_wide: self.add || !first,
                        add_half: false,
                        to_half: false,
                    },
                    Place { half, .. } => panels::Out {
                        wide: sums.from((row - rows.start) * own.len() + c),
                        wide_stride: own.len(),
                        half: half.map_or(std::ptr::null_mut(), |h| h.from(at)),
                        half_stride: stride,
                        alpha: self.alpha,
                        add_wide: !first,
                        add_half: self.add && last,
                        to_half: last,
                    },
                };
                let left = self.left(block, row, height);
                // SAFETY: the path is here; panels were packed for this block by this thread, or by all before, and rows that
                // were not have these values; of the
                // destination these rows and columns are this thread's alone, and the room for sums is its own.
                unsafe { panels::multiply(pairs, left, (right(c), width, count), &out) };
            }
        }
    }
}

/// Packs some columns and inner values of the right operand, panel after panel; `tile` has room for them if they are made.
fn pack_right(to: Shared<u32>, b: Right<'_>, own: Range<usize>, block: Range<usize>, tile: &mut [bf16]) {
    // the columns and inner values of the matrix that has them
    let (lines, first, inner) = match b {
        Right::Of(b) => (b.t(), own.start, block),
        Right::Made { make, transposed, .. } => {
            let tile = &mut tile[..own.len() * block.len()];
            make(own.clone(), block.clone(), tile);
            let lines = match transposed {
                true => Mat::new(&*tile, own.len(), block.len(), block.len()),
                false => Mat::new(&*tile, block.len(), own.len(), own.len()).t(),
            };
            (lines, 0, 0..block.len())
        }
    };
    let columns = first..first + own.len();
    // SAFETY: the path is here; `to` has a strip's words, which are this thread's.
    unsafe { panels::pack(to.0, panels::Shape::RIGHT, lines, columns, inner) };
}
