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

use super::Base;
use crate::model::modules::Module;
use crate::quant::CodeBooks;
use candle_core::{DType, Device};
use ft_base::rng::{Purpose, Stream};
use ft_kernels::decompose::{LowRank, Matrix};
use ft_kernels::tensor::Real;
use ft_recipe::Decomposition;
use nalgebra::DMatrix;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Stream of [`Purpose::Adapter`] for random projections.
const STREAM: u64 = 2;

/// Initial factors by module, computed on first use and then cached. PiSSA and OLoRA adapters need them
/// again at export.
#[derive(Debug)]
pub struct Initials {
    how: Decomposition,
    seed: u64,
    of: HashMap<String, Of>,
}

/// State of one module.
#[derive(Debug)]
struct Of {
    rank: usize,
    scale: f64,
    made: Mutex<Option<Arc<Factors>>>,
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
        let of =
            modules.map(|(name, rank, scale)| (name, Of { rank, scale, made: Mutex::new(None) })).collect();
        Self { how, seed, of }
    }

    /// Method of initialization.
    pub fn how(&self) -> Decomposition {
        self.how
    }

    /// Whether a module is initialized from the base.
    pub fn has(&self, module: &str) -> bool {
        self.of.contains_key(module)
    }

    /// Bytes of the factors computed so far.
    pub fn bytes(&self) -> u64 {
        let made = |o: &Of| o.made.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let values = |f: Arc<Factors>| (f.a.elem_count() + f.b.elem_count()) as u64;
        self.of.values().filter_map(made).map(|f| 4 * values(f)).sum()
    }

    /// Factors subtracted from a module's base weight, if computed already. `None` for LoftQ.
    pub fn taken(&self, module: &str) -> Option<Arc<Factors>> {
        let of = self.of.get(module).filter(|_| self.how.changes_base())?;
        of.made.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Base {
    /// Sets the LoRA initializations; PiSSA and OLoRA subtract them from the base weights.
    pub fn beginning(self, initials: Option<Initials>) -> Self {
        Self { initials: initials.map(Arc::new), ..self }
    }

    /// LoRA initializations from this base, if any.
    pub fn initials(&self) -> Option<&Arc<Initials>> {
        self.initials.as_ref()
    }

    /// Initial factors of a module, if initialized from the base. `number` as in [`Base::part`].
    ///
    /// # Errors
    /// Unreadable files; a failed decomposition.
    pub fn factors(&self, (m, number): (&Module, u64)) -> ft_base::Result<Option<Arc<Factors>>> {
        let Some((all, of)) = self.initials.as_ref().and_then(|i| Some((i, i.of.get(&m.name)?))) else {
            return Ok(None);
        };
        // The lock is held during computation, so that ranks running as threads compute the factors once.
        let mut made = of.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.is_none() {
            *made = Some(Arc::new(self.make((m, number), all, of)?));
        }
        Ok(made.clone())
    }

    fn make(&self, (m, number): (&Module, u64), all: &Initials, of: &Of) -> ft_base::Result<Factors> {
        let fail = |why: &str| super::Error::Tensors { dir: format!("{}.weight", m.name), why: why.into() };
        let &[o, i] = m.weight_shape().as_slice() else { return Err(fail("is no matrix").into()) };
        let whole = self.original((m, number), false, true, 0..o * i, DType::F32, &Device::Cpu)?;
        let mut values: Vec<f32> = whole.to_vec1()?;
        drop(whole);
        if all.how == Decomposition::Loftq {
            let Some(how) = self.four_bit(m) else {
                return Err(fail("is not 4-bit").into());
            };
            let codes = self.codes((m, number), how, DType::F32, &mut CodeBooks::new(&Device::Cpu)?)?;
            let kept: Vec<f32> =
                codes.dequantize()?.to_dtype(DType::F32)?.real()?.flatten_all()?.to_vec1()?;
            values.par_iter_mut().zip(&kept).for_each(|(w, q)| *w -= q);
        }
        let Some(matrix) = Matrix::new(&values, (o, i)) else { return Err(fail("is empty").into()) };
        let (b, a) = match all.how {
            Decomposition::Olora => matrix.orthogonal(of.rank),
            Decomposition::Pissa | Decomposition::Loftq => {
                let stream = Stream::new(all.seed, Purpose::Adapter, STREAM, number);
                let Some(LowRank { mut left, values, mut right }) = matrix.largest(of.rank, stream) else {
                    return Err(fail("its singular values cannot be found").into());
                };
                for (k, size) in values.iter().enumerate() {
                    let root = (size / of.scale).sqrt();
                    left.column_mut(k).scale_mut(root);
                    right.column_mut(k).scale_mut(root);
                }
                (left, right)
            }
        };
        Ok(Factors { a: rows(&a, of.rank, true)?, b: rows(&b, of.rank, false)? })
    }

    /// Subtracts the initial LoRA update from a range of a module's weight (f32 on the CPU), if the module
    /// has one.
    pub(super) fn lessen(
        &self,
        (m, number): (&Module, u64),
        elements: Range<usize>,
        values: Real,
    ) -> ft_base::Result<Real> {
        let factors = self.factors((m, number))?;
        let (Some(f), Some(all)) = (factors, &self.initials) else { return Ok(values) };
        let (rank, cols) = f.a.dims2()?;
        let scale = all.of.get(&m.name).map_or(0.0, |o| o.scale) as f32;
        let (a, b) = (f.a.flatten_all()?.to_vec1::<f32>()?, f.b.flatten_all()?.to_vec1::<f32>()?);
        let mut values: Vec<f32> = values.to_vec1()?;
        // Split at row boundaries; the first and last piece may be partial rows.
        let mut pieces: Vec<(usize, &mut [f32])> = Vec::new();
        let (mut at, mut rest) = (elements.start, values.as_mut_slice());
        while !rest.is_empty() {
            let n = (cols - at % cols).min(rest.len());
            let (piece, after) = rest.split_at_mut(n);
            pieces.push((at, piece));
            (at, rest) = (at + n, after);
        }
        pieces.into_par_iter().for_each(|(at, piece)| {
            let (row, first) = (at / cols, at % cols);
            let mut sums = vec![0f32; piece.len()];
            for k in 0..rank {
                let x = b[row * rank + k];
                let a = &a[k * cols + first..][..piece.len()];
                sums.iter_mut().zip(a).for_each(|(s, a)| *s += x * a);
            }
            piece.iter_mut().zip(&sums).for_each(|(w, s)| *w -= scale * s);
        });
        let n = values.len();
        Ok(Real::from_vec(values, n, &Device::Cpu)?)
    }

    /// Whether the initial LoRA update is subtracted from a module's weight.
    pub(super) fn lacks(&self, m: &Module) -> bool {
        self.initials.as_ref().is_some_and(|i| i.how.changes_base() && i.has(&m.name))
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
