//! LoRA initialization from the base weights (`lora.init`), and the residual weights.
//!
//! With W the weight `[o, i]`, s the LoRA scale and r the LoRA rank:
//!
//! * PiSSA (Meng et al., 2024): `s B A` is the rank-r truncated SVD of W; the base is `W - s B A`;
//! * OLoRA (Büyükakyüz, 2024): B and A are the first r columns of Q and rows of R of `W = Q R`; the base is
//!   `W - s B A`;
//! * LoftQ (Li et al., 2023; one alternation): the base is W in 4 bits; `s B A` is the truncated SVD of the
//!   quantization error. PEFT ignores the scale here; with `alpha = rank` the two agree.
//!
//! If the shorter side of a matrix is below the rank, the remaining rows of A and columns of B are zero and
//! stay zero.

use super::error::Error;
use candle_core::Device;
use ft_base::rng::{Purpose, Stream};
use ft_kernels::cpu;
use ft_kernels::decompose::{LowRank, Matrix};
use ft_kernels::tensor::Real;
use ft_recipe::Decomposition;
use nalgebra::DMatrix;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Stream of [`Purpose::Adapter`] for random projections.
const STREAM: u64 = 2;

/// Initial factors by module, computed on first use and then cached. PiSSA and OLoRA adapters need them
/// again at export.
#[derive(Debug)]
pub struct Initials {
    how: Decomposition,
    seed: u64,
    modules: HashMap<String, Initial>,
}

/// State of one module.
#[derive(Debug)]
struct Initial {
    rank: usize,
    scale: f64,
    factors: Mutex<Option<Arc<Factors>>>,
}

/// Initial A and B, f32 on the CPU.
#[derive(Clone, Debug)]
pub struct Factors {
    /// `[r, i]`.
    pub a: Real,
    /// `[o, r]`.
    pub b: Real,
}

impl Initials {
    /// Initializations for modules given as name, LoRA rank and scale.
    pub fn new(how: Decomposition, seed: u64, modules: impl Iterator<Item = (String, usize, f64)>) -> Self {
        let initial = |(name, rank, scale)| (name, Initial { rank, scale, factors: Mutex::new(None) });
        Self { how, seed, modules: modules.map(initial).collect() }
    }

    /// Method of initialization.
    pub fn how(&self) -> Decomposition {
        self.how
    }

    /// Whether a module is initialized from the base.
    pub fn has(&self, module: &str) -> bool {
        self.modules.contains_key(module)
    }

    /// Bytes of the factors computed so far.
    pub fn bytes(&self) -> u64 {
        let values = |f: Arc<Factors>| (f.a.elem_count() + f.b.elem_count()) as u64;
        self.modules.values().filter_map(|m| m.lock().clone()).map(|f| 4 * values(f)).sum()
    }

    /// Sets the factors of a module, as computed on another rank.
    pub fn put(&self, module: &str, factors: Factors) {
        if let Some(initial) = self.modules.get(module) {
            *initial.lock() = Some(Arc::new(factors));
        }
    }

    /// Factors subtracted from a module's base weight, if computed already. `None` for LoftQ.
    pub fn subtracted(&self, module: &str) -> Option<Arc<Factors>> {
        self.modules.get(module).filter(|_| self.how.changes_base())?.lock().clone()
    }

    /// Initial factors of a module with weight `dims`, if initialized from the base. `number` is the module's
    /// index in the model and seeds random projections; `values` reads the matrix to decompose.
    ///
    /// # Errors
    /// Errors of `values`; a failed decomposition.
    pub(super) fn factors(
        &self,
        module: &str,
        dims: (usize, usize),
        number: u64,
        values: impl FnOnce() -> ft_base::Result<Vec<f32>>,
    ) -> ft_base::Result<Option<Arc<Factors>>> {
        let Some(initial) = self.modules.get(module) else { return Ok(None) };
        // The lock is held during computation, so that ranks running as threads compute the factors once.
        let mut factors = initial.lock();
        if factors.is_none() {
            let fail = |why: &str| Error { place: format!("{module}.weight"), why: why.into() };
            let values = values()?;
            let matrix = Matrix::new(&values, dims).ok_or_else(|| fail("is empty"))?;
            let (b, a) = match self.how {
                Decomposition::Olora => matrix.orthogonal(initial.rank),
                Decomposition::Pissa | Decomposition::Loftq => {
                    let stream = Stream::new(self.seed, Purpose::Adapter, STREAM, number);
                    let LowRank { mut left, values, mut right } = matrix
                        .largest(initial.rank, stream)
                        .ok_or_else(|| fail("its singular values cannot be found"))?;
                    for (k, size) in values.iter().enumerate() {
                        let root = (size / initial.scale).sqrt();
                        left.column_mut(k).scale_mut(root);
                        right.column_mut(k).scale_mut(root);
                    }
                    (left, right)
                }
            };
            let rank = initial.rank;
            *factors = Some(Arc::new(Factors { a: rows(&a, rank, true)?, b: rows(&b, rank, false)? }));
        }
        Ok(factors.clone())
    }

    /// LoRA scale of a module.
    pub(super) fn scale(&self, module: &str) -> f64 {
        self.modules.get(module).map_or(0.0, |m| m.scale)
    }
}

impl Initial {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<Factors>>> {
        self.factors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Factors {
    /// Subtracts `scale B A` from a range of the flattened weight.
    pub(super) fn subtract(
        &self,
        scale: f32,
        elements: Range<usize>,
        values: &mut [f32],
    ) -> candle_core::Result<()> {
        let (rank, cols) = self.a.dims2()?;
        let (a, b) = (self.a.flatten_all()?.to_vec1::<f32>()?, self.b.flatten_all()?.to_vec1::<f32>()?);
        // Split at row boundaries; the first and last piece may be partial rows.
        let mut pieces: Vec<(usize, &mut [f32])> = Vec::new();
        let (mut at, mut rest) = (elements.start, values);
        while !rest.is_empty() {
            let n = (cols - at % cols).min(rest.len());
            let (piece, after) = rest.split_at_mut(n);
            pieces.push((at, piece));
            (at, rest) = (at + n, after);
        }
        cpu::each(pieces.into_iter(), |(at, piece)| {
            let (row, first) = (at / cols, at % cols);
            let mut sums = vec![0f32; piece.len()];
            for k in 0..rank {
                let x = b[row * rank + k];
                let a = &a[k * cols + first..][..piece.len()];
                sums.iter_mut().zip(a).for_each(|(s, a)| *s += x * a);
            }
            piece.iter_mut().zip(&sums).for_each(|(w, s)| *w -= scale * s);
        });
        Ok(())
    }
}

/// Converts columns to f32 and pads with zeros to `rank` columns: as rows `[r, n]` if transposed, otherwise
/// as `[n, r]`.
fn rows(m: &DMatrix<f64>, rank: usize, transposed: bool) -> candle_core::Result<Real> {
    let (n, found) = (m.nrows(), m.ncols());
    let mut out = vec![0f32; n * rank];
    for k in 0..found {
        for r in 0..n {
            out[if transposed { k * n + r } else { r * rank + k }] = m[(r, k)] as f32;
        }
    }
    Real::from_vec(out, if transposed { (rank, n) } else { (n, rank) }, &Device::Cpu)
}
