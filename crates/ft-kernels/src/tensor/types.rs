//! The tensor type of models: a tensor with values or a ghost.

use super::ghost::Ghost;
use super::ledger::{Ledger, Role};
use candle_core::shape::Dim;
use candle_core::{DType, Layout, Result, Shape, bail};
use std::sync::Arc;

/// Tensor of candle.
pub type Real = candle_core::Tensor;

/// A tensor with values or a ghost.
#[derive(Clone, Debug)]
pub enum Tensor {
    /// Tensor with values.
    Real(Real),
    /// Shape-only tensor.
    Ghost(Arc<Ghost>),
}

/// Location of a tensor.
#[derive(Clone, Copy, Debug)]
pub enum On<'a> {
    /// Device of a tensor with values.
    Real(&'a candle_core::Device),
    /// Ledger of a ghost.
    Ghost(&'a Ledger),
}

impl<'a> From<&'a candle_core::Device> for On<'a> {
    fn from(d: &'a candle_core::Device) -> Self {
        On::Real(d)
    }
}

impl On<'_> {
    /// Whether the location is the CPU.
    pub fn is_cpu(self) -> bool {
        match self {
            On::Real(d) => d.is_cpu(),
            On::Ghost(l) => !l.machine().cuda,
        }
    }

    /// Whether operations composed on CUDA use CPU kernels here: on the CPU, except within `check::composed`,
    /// with which tests exercise the compositions.
    pub fn is_native(self) -> bool {
        self.is_cpu() && !crate::check::is_composed()
    }
}

/// The values of all results, or the first error.
pub fn all_of<T, const N: usize>(results: [Result<T>; N]) -> Result<[T; N]> {
    let all: Vec<T> = results.into_iter().collect::<Result<_>>()?;
    all.try_into().map_err(|_| candle_core::Error::msg("a part that was not made"))
}

impl From<Real> for Tensor {
    fn from(t: Real) -> Self {
        Tensor::Real(t)
    }
}

impl From<Ghost> for Tensor {
    fn from(g: Ghost) -> Self {
        Tensor::Ghost(Arc::new(g))
    }
}

impl Tensor {
    /// The tensor with values.
    ///
    /// # Errors
    /// A ghost.
    pub fn real(&self) -> Result<&Real> {
        match self {
            Tensor::Real(t) => Ok(t),
            Tensor::Ghost(_) => bail!("a ghost has no values"),
        }
    }

    /// The ghost, if this is one.
    pub fn ghost(&self) -> Option<&Ghost> {
        match self {
            Tensor::Real(_) => None,
            Tensor::Ghost(g) => Some(g),
        }
    }

    /// For ghosts, runs `f` with allocations recorded as `role`; else just runs `f`.
    pub fn role<R>(&self, role: Role, f: impl FnOnce() -> R) -> R {
        match self {
            Tensor::Real(_) => f(),
            Tensor::Ghost(g) => g.ledger().role(role, f),
        }
    }

    /// Runs `f` for each item. On ghosts, runs it for the last item only and scales
    /// the record by the total `size`.
    pub fn each<I>(
        &self,
        items: impl DoubleEndedIterator<Item = I> + Clone,
        size: impl Fn(&I) -> usize,
        mut f: impl FnMut(I) -> Result<()>,
    ) -> Result<()> {
        let Tensor::Ghost(g) = self else { return items.into_iter().try_for_each(f) };
        let all: usize = items.clone().map(|i| size(&i)).sum();
        match items.clone().next_back() {
            Some(last) => g.ledger().times(all as f64 / size(&last).max(1) as f64, 1.0, || f(last)),
            None => Ok(()),
        }
    }

    /// Location of the tensor.
    pub fn device(&self) -> On<'_> {
        match self {
            Tensor::Real(t) => On::Real(t.device()),
            Tensor::Ghost(g) => On::Ghost(g.ledger()),
        }
    }

    /// Dtype of the values.
    pub fn dtype(&self) -> DType {
        match self {
            Tensor::Real(t) => t.dtype(),
            Tensor::Ghost(g) => g.dtype,
        }
    }

    /// Memory layout.
    pub fn layout(&self) -> &Layout {
        match self {
            Tensor::Real(t) => t.layout(),
            Tensor::Ghost(g) => &g.layout,
        }
    }

    /// Shape of the tensor.
    pub fn shape(&self) -> &Shape {
        self.layout().shape()
    }

    /// Sizes of all dimensions.
    pub fn dims(&self) -> &[usize] {
        self.layout().dims()
    }

    /// Size of dimension `dim`.
    pub fn dim<I: Dim>(&self, dim: I) -> Result<usize> {
        self.layout().dim(dim)
    }

    /// Sizes of a matrix; an error for other numbers of dimensions.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        self.shape().dims2()
    }

    /// Sizes of a three-dimensional tensor; an error for other numbers of dimensions.
    pub fn dims3(&self) -> Result<(usize, usize, usize)> {
        self.shape().dims3()
    }

    /// Number of values.
    pub fn elem_count(&self) -> usize {
        self.shape().elem_count()
    }

    /// Whether the layout is row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.layout().is_contiguous()
    }
}
