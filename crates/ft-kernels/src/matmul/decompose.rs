//! Low-rank factorizations on the host in f64: truncated SVD and the leading columns of a QR decomposition.
//!
//! The bits depend neither on the number of threads nor on the processor's instructions, so ranks with the same matrix
//! get the same factors.

use crate::cpu::each;
use ft_base::rng::Stream;
use nalgebra::{DMatrix, SVD};

/// Length of the shorter side up to which the SVD is exact.
pub const EXACT: usize = 256;
/// Oversampling and number of power iterations of the randomized SVD for larger matrices (Halko, Martinsson,
/// Tropp, 2011: algorithm 4.4).
const MORE: usize = 16;
const PASSES: usize = 8;
/// Columns of a matrix per task.
const PIECE: usize = 64;
/// Maximum number of QR sweeps per singular value.
const SWEEPS: usize = 100;

/// Truncated SVD, `left diag(values) right^T`.
#[derive(Clone, Debug)]
pub struct LowRank {
    /// Left singular vectors as columns, `[o, r]`.
    pub left: DMatrix<f64>,
    /// Singular values in descending order.
    pub values: Vec<f64>,
    /// Right singular vectors as columns, `[i, r]`.
    pub right: DMatrix<f64>,
}

/// A matrix `[o, i]` in row-major order.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a> {
    /// Wraps `rows * cols` values; `None` if the length differs or the matrix is empty.
    pub fn new(values: &'a [f32], (rows, cols): (usize, usize)) -> Option<Self> {
        (values.len() == rows * cols && rows > 0 && cols > 0).then_some(Self { values, rows, cols })
    }

    /// `W X`: `[i, k]` -> `[o, k]`.
    fn times(&self, x: &DMatrix<f64>) -> DMatrix<f64> {
        let k = x.ncols();
        let x: Vec<f64> = x.transpose().as_slice().to_vec();
        let mut out = vec![0f64; self.rows * k];
        each(out.chunks_mut(k).zip(self.values.chunks(self.cols)), |(out, row)| {
            for (w, x) in row.iter().zip(x.chunks_exact(k)) {
                add(out, f64::from(*w), x);
            }
        });
        DMatrix::from_row_slice(self.rows, k, &out)
    }

    /// `W^T Y`: `[o, k]` -> `[i, k]`.
    fn transposed_times(&self, y: &DMatrix<f64>) -> DMatrix<f64> {
        let k = y.ncols();
        let y: Vec<f64> = y.transpose().as_slice().to_vec();
        let mut out = vec![0f64; self.cols * k];
        each(out.chunks_mut(PIECE * k).enumerate(), |(piece, out)| {
            let (first, n) = (piece * PIECE, out.len() / k);
            for (row, y) in self.values.chunks_exact(self.cols).zip(y.chunks_exact(k)) {
                for (w, out) in row[first..first + n].iter().zip(out.chunks_exact_mut(k)) {
                    add(out, f64::from(*w), y);
                }
            }
        });
        DMatrix::from_row_slice(self.cols, k, &out)
    }

    /// The `rank` largest singular values with their vectors, at most the length of the shorter side. Exact
    /// up to [`EXACT`]; larger matrices use a random projection drawn from `stream`.
    ///
    /// `None` if a value is not finite or the SVD does not converge.
    pub fn largest(&self, rank: usize, stream: Stream) -> Option<LowRank> {
        let short = self.rows.min(self.cols);
        let (rank, wide) = (rank.min(short), (rank + MORE).min(short));
        if !self.values.iter().all(|x| x.is_finite()) {
            return None;
        }
        if self.values.iter().all(|x| *x == 0.0) {
            // any orthonormal vectors will do
            let unit = |n| DMatrix::identity(n, rank);
            return Some(LowRank { left: unit(self.rows), values: vec![0.0; rank], right: unit(self.cols) });
        }
        if short <= EXACT || 2 * wide >= short {
            let all = DMatrix::from_iterator(self.cols, self.rows, self.values.iter().map(|x| f64::from(*x)));
            // nalgebra is column-major, so `all` is the transpose
            let (right, values, left) = svd(all)?;
            return Some(first(left, values, right, rank));
        }
        let normal =
            DMatrix::from_fn(self.cols, wide, |r, c| f64::from(stream.normal((r * wide + c) as u64)));
        let mut basis = self.times(&normal).qr().q();
        for _ in 0..PASSES {
            let back = self.transposed_times(&basis).qr().q();
            basis = self.times(&back).qr().q();
        }
        // W ~ basis (basis^T W), with (basis^T W)^T = q r and a small square r
        let (q, r) = self.transposed_times(&basis).qr().unpack();
        let (u, values, v) = svd(r)?;
        Some(first(product(&basis, &v), values, product(&q, &u), rank))
    }

    /// Leading columns of Q and rows of R of a QR decomposition: Q `[o, r]`, and R transposed, `[i, r]`.
    pub fn orthogonal(&self, rank: usize) -> (DMatrix<f64>, DMatrix<f64>) {
        let rank = rank.min(self.rows).min(self.cols);
        // the leading columns of Q depend only on the leading columns of W
        let head = DMatrix::from_fn(self.rows, rank, |r, c| f64::from(self.values[r * self.cols + c]));
        let q = head.qr().q();
        let r = self.transposed_times(&q);
        (q, r)
    }
}

/// Upper bound on the memory of [`Matrix::largest`] and [`Matrix::orthogonal`] in bytes, without the matrix.
pub fn bytes((rows, cols): (usize, usize), rank: usize) -> u64 {
    let short = rows.min(cols);
    let wide = (rank + MORE).min(short);
    let values = if short <= EXACT || 2 * wide >= short {
        rows * cols + 2 * short * (rows + cols)
    } else {
        4 * wide * (rows + cols)
    };
    8 * values as u64
}

fn add(out: &mut [f64], w: f64, x: &[f64]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += w * x;
    }
}

/// `A B`. The product of nalgebra takes other instructions, and rounds otherwise, on other processors.
fn product(a: &DMatrix<f64>, b: &DMatrix<f64>) -> DMatrix<f64> {
    let (rows, inner, cols) = (a.nrows(), a.ncols(), b.ncols());
    let mut out = vec![0f64; rows * cols];
    each(out.chunks_mut(rows).zip(b.as_slice().chunks(inner)), |(out, b)| {
        for (w, a) in b.iter().zip(a.as_slice().chunks_exact(rows)) {
            add(out, *w, a);
        }
    });
    DMatrix::from_vec(rows, cols, out)
}

/// SVD `u diag(values) v^T`, with v as columns.
fn svd(m: DMatrix<f64>) -> Option<(DMatrix<f64>, Vec<f64>, DMatrix<f64>)> {
    let sweeps = SWEEPS * m.nrows().min(m.ncols());
    let all = SVD::try_new(m, true, true, f64::EPSILON, sweeps)?;
    let values: Vec<f64> = all.singular_values.iter().copied().collect();
    let (u, v) = (all.u?, all.v_t?.transpose());
    let sound = values.iter().chain(u.iter()).chain(v.iter()).all(|x| x.is_finite());
    sound.then_some((u, values, v))
}

fn first(left: DMatrix<f64>, mut values: Vec<f64>, right: DMatrix<f64>, rank: usize) -> LowRank {
    values.truncate(rank);
    LowRank { left: left.columns(0, rank).into_owned(), values, right: right.columns(0, rank).into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::on;
    use ft_base::rng::Purpose;

    /// A matrix with random singular vectors and the singular values 1, 1/2, 1/4, ...
    fn decaying(rows: usize, cols: usize, count: usize) -> Vec<f32> {
        let random = |n: usize, stream: u64| {
            let s = Stream::new(3, Purpose::Test, 0, stream);
            DMatrix::from_fn(n, count, |r, c| f64::from(s.normal((r * count + c) as u64))).qr().q()
        };
        let (u, v) = (random(rows, 1), random(cols, 2));
        let sizes = DMatrix::from_fn(count, count, |r, c| if r == c { 0.5f64.powi(r as i32) } else { 0.0 });
        let m = u * sizes * v.transpose();
        (0..rows * cols).map(|i| m[(i / cols, i % cols)] as f32).collect()
    }

    #[test]
    fn exact_and_random_factors_are_the_largest() {
        for (rows, cols) in [(40, 24), (24, 40), (600, 320), (320, 600)] {
            let values = decaying(rows, cols, 12);
            let m = Matrix::new(&values, (rows, cols)).expect("a matrix");
            let got = m.largest(4, Stream::new(0, Purpose::Test, 0, 9)).expect("factors");
            for (k, s) in got.values.iter().enumerate() {
                assert!((s - 0.5f64.powi(k as i32)).abs() < 1e-6, "{rows} x {cols}: {k}: {s}");
            }
            let s = DMatrix::from_fn(4, 4, |r, c| if r == c { got.values[r] } else { 0.0 });
            let near = &got.left * s * got.right.transpose();
            let off = (0..rows * cols)
                .map(|i| (f64::from(values[i]) - near[(i / cols, i % cols)]).powi(2))
                .sum::<f64>();
            // the squared error of the best rank-4 approximation
            let best = (4..12).map(|k| 0.25f64.powi(k)).sum::<f64>();
            assert!((off / best - 1.0).abs() < 1e-4, "{rows} x {cols}: {off} and {best}");
        }
    }

    /// Beyond the rank of the matrix, vectors are still orthonormal.
    #[test]
    fn singular_vectors_beyond_the_rank_are_orthonormal() {
        for (values, none) in [(vec![0f32; 30 * 20], 20), (decaying(30, 20, 3), 17)] {
            let m = Matrix::new(&values, (30, 20)).expect("a matrix");
            let got = m.largest(64, Stream::new(0, Purpose::Test, 0, 9)).expect("factors");
            assert_eq!(got.values.iter().filter(|s| **s < 1e-6).count(), none);
            for v in [&got.left, &got.right] {
                assert!((v.transpose() * v - DMatrix::identity(20, 20)).norm() < 1e-9);
            }
        }
    }

    #[test]
    fn an_orthogonal_start_is_of_the_first_columns() {
        let values = decaying(30, 50, 20);
        let m = Matrix::new(&values, (30, 50)).expect("a matrix");
        let (q, r) = m.orthogonal(5);
        let near = &q * r.transpose();
        for i in 0..30 {
            for j in 0..5 {
                assert!((near[(i, j)] - f64::from(values[i * 50 + j])).abs() < 1e-7);
            }
        }
        assert!((q.transpose() * &q - DMatrix::identity(5, 5)).norm() < 1e-12);
        // a rank above the number of rows
        assert_eq!(m.orthogonal(64).0.ncols(), 30);
    }

    /// The number of threads does not change the bits.
    #[test]
    fn threads_change_no_bit() {
        let values = decaying(600, 320, 30);
        let m = Matrix::new(&values, (600, 320)).expect("a matrix");
        let run = || m.largest(4, Stream::new(0, Purpose::Test, 0, 9)).expect("factors");
        let (a, b) = (on(1, run), on(3, run));
        assert!(a.left == b.left && a.right == b.right && a.values == b.values);
    }
}
