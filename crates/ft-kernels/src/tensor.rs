//! The tensor that models compute with: a real one, or its ghost.
//!
//! A ghost has a shape, a dtype and an entry in a [`Ledger`], and no values. What is composed of the operations here
//! runs on ghosts as it is, and every allocation that the composition makes is written down; a kernel of our own says
//! beside its code what it takes (see `kernel::cpu`). So a plan runs the model's own `forward` and
//! `backward`, and cannot say anything else than they do.

pub use super::ghost::Ghost;

use super::cpu::in_place;
use super::ledger::{Ledger, Role};
use super::pairwise;
use candle_core::shape::{Dim, Dims, ShapeWithOneHole};
use candle_core::{D, DType, Layout, Result, Shape, WithDType, bail};
use rayon::prelude::*;
use std::borrow::Borrow;
use std::sync::Arc;

/// candle's tensor.
pub type Real = candle_core::Tensor;

/// A tensor, or its ghost.
#[derive(Clone, Debug)]
pub enum Tensor {
    /// With values.
    Real(Real),
    /// Without.
    Ghost(Arc<Ghost>),
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug)]
pub enum On<'a> {
    /// On a device.
    Real(&'a candle_core::Device),
    /// In a ledger.
    Ghost(&'a Ledger),
}

impl<'a> From<&'a candle_core::Device> for On<'a> {
    fn from(d: &'a candle_core::Device) -> Self {
        On::Real(d)
    }
}

impl On<'_> {
    /// Whether this is the CPU.
    pub fn is_cpu(self) -> bool {
        match self {
            On::Real(d) => d.is_cpu(),
            On::Ghost(l) => !l.machine().cuda,
        }
    }

    /// Whether operations that are composed on CUDA run by our own kernels here: on the CPU, but not within
    /// `check::composed`, by which tests run the compositions.
    pub fn is_native(self) -> bool {
        #[cfg(test)]
        if super::check::is_composed() {
            return false;
        }
        self.is_cpu()
    }
}

impl From<Real> for Tensor {
    fn from(t: Real) -> Self {
        Tensor::Real(t)
    }
}

fn mixed<T>() -> Result<T> {
    bail!("a ghost met a tensor")
}

/// Operations whose result has the shape and dtype of the first operand.
macro_rules! alike {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $t:ty),*);)*) => { $(
        $(#[$doc])*
        pub fn $name(&self, $($arg: $t),*) -> Result<Self> {
            self.on(|t| t.$name($($arg),*), Ghost::like)
        }
    )* };
}

/// Operations on two tensors of one shape, or of shapes that broadcast.
macro_rules! pairwise {
    ($($(#[$doc:meta])* $name:ident = $real:expr => $dtype:expr;)*) => { $(
        $(#[$doc])*
        pub fn $name(&self, other: &Tensor) -> Result<Self> {
            let shape = |a: &Ghost, b: &Ghost| a.shape().broadcast_shape_binary_op(b.shape(), stringify!($name));
            self.with(other, $real, |a, b| {
                b.is_moved();
                a.made(shape(a, b)?, $dtype(a.dtype))
            })
        }
    )* };
}

/// Reductions over some dimensions.
macro_rules! reductions {
    ($($(#[$doc:meta])* $name:ident($dims:ident) keep $keep:literal;)*) => { $(
        $(#[$doc])*
        pub fn $name<I: $dims>(&self, dims: I) -> Result<Self> {
            match self {
                Tensor::Real(t) => t.$name(dims).map(Tensor::Real),
                Tensor::Ghost(g) => {
                    let dims = Dims::to_indexes(dims, g.shape(), stringify!($name))?;
                    g.made(g.reduced(&dims, $keep), g.dtype).map(Tensor::from)
                }
            }
        }
    )* };
}

/// What a ghost cannot give, passed on to the tensor.
macro_rules! values {
    ($($(#[$doc:meta])* $name:ident$(<$s:ident>)? -> $t:ty;)*) => { $(
        $(#[$doc])*
        pub fn $name$(<$s: WithDType>)?(&self) -> Result<$t> {
            self.real()?.$name()
        }
    )* };
}

fn same(dtype: DType) -> DType {
    dtype
}

fn flag(_: DType) -> DType {
    DType::U8
}

impl Tensor {
    alike! {
        /// e^x.
        exp();
        /// Natural logarithm.
        log();
        /// Square.
        sqr();
        /// Square root.
        sqrt();
        /// 1 / x.
        recip();
        /// -x.
        neg();
        /// |x|.
        abs();
        /// Cosine.
        cos();
        /// Sine.
        sin();
        /// x sigmoid(x).
        silu();
        /// `mul x + add`.
        affine(mul: f64, add: f64);
        /// Zeros of this shape.
        zeros_like();
        /// A copy with values of its own.
        copy();
        /// A row-major copy with values of its own.
        force_contiguous();
    }

    pairwise! {
        /// Sum.
        add = pairwise::add => same;
        /// Difference.
        sub = Real::sub => same;
        /// Product by element.
        mul = pairwise::mul => same;
        /// Quotient.
        div = Real::div => same;
        /// Sum, broadcast.
        broadcast_add = Real::broadcast_add => same;
        /// Difference, broadcast.
        broadcast_sub = Real::broadcast_sub => same;
        /// Product by element, broadcast.
        broadcast_mul = Real::broadcast_mul => same;
        /// Quotient, broadcast.
        broadcast_div = Real::broadcast_div => same;
        /// Equality, broadcast: 0 or 1.
        broadcast_eq = Real::broadcast_eq => flag;
        /// Whether it is more, broadcast: 0 or 1.
        broadcast_gt = Real::broadcast_gt => flag;
        /// Whether it is no more, broadcast: 0 or 1.
        broadcast_le = Real::broadcast_le => flag;
    }

    reductions! {
        /// Sum.
        sum(Dims) keep false;
        /// Sum, the dimensions kept with size 1.
        sum_keepdim(Dims) keep true;
        /// Largest value, the dimension kept with size 1.
        max_keepdim(Dim) keep true;
        /// Smallest value, the dimension kept with size 1.
        min_keepdim(Dim) keep true;
    }

    values! {
        /// The value of a scalar.
        to_scalar<S> -> S;
        /// The values of a vector.
        to_vec1<S> -> Vec<S>;
        /// The values of a matrix.
        to_vec2<S> -> Vec<Vec<S>>;
    }

    /// The tensor with values.
    ///
    /// # Errors
    /// This is a ghost.
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

    /// Counts what `f` makes as `role`, if this is a ghost.
    pub fn role<R>(&self, role: Role, f: impl FnOnce() -> R) -> R {
        match self {
            Tensor::Real(_) => f(),
            Tensor::Ghost(g) => g.ledger().role(role, f),
        }
    }

    /// Runs `f` for each item; on ghosts for the last one, which counts for all by its `size`.
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

    /// Where it is.
    pub fn device(&self) -> On<'_> {
        match self {
            Tensor::Real(t) => On::Real(t.device()),
            Tensor::Ghost(g) => On::Ghost(g.ledger()),
        }
    }

    /// Type of its values.
    pub fn dtype(&self) -> DType {
        match self {
            Tensor::Real(t) => t.dtype(),
            Tensor::Ghost(g) => g.dtype,
        }
    }

    /// Its layout.
    pub fn layout(&self) -> &Layout {
        match self {
            Tensor::Real(t) => t.layout(),
            Tensor::Ghost(g) => &g.layout,
        }
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        self.layout().shape()
    }

    /// Its sizes.
    pub fn dims(&self) -> &[usize] {
        self.layout().dims()
    }

    /// One of its sizes.
    pub fn dim<I: Dim>(&self, dim: I) -> Result<usize> {
        self.layout().dim(dim)
    }

    /// The sizes of a matrix.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        self.shape().dims2()
    }

    /// The sizes of a tensor of three dimensions.
    pub fn dims3(&self) -> Result<(usize, usize, usize)> {
        self.shape().dims3()
    }

    /// Number of its values.
    pub fn elem_count(&self) -> usize {
        self.shape().elem_count()
    }

    /// Whether its values stand in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout().is_contiguous()
    }

    /// An operation on this tensor, or on its ghost.
    fn on(
        &self,
        real: impl FnOnce(&Real) -> Result<Real>,
        ghost: impl FnOnce(&Ghost) -> Result<Ghost>,
    ) -> Result<Self> {
        match self {
            Tensor::Real(t) => real(t).map(Tensor::Real),
            Tensor::Ghost(g) => ghost(g).map(Tensor::from),
        }
    }

    /// An operation on two tensors, or on their ghosts.
    fn with(
        &self,
        other: &Tensor,
        real: impl FnOnce(&Real, &Real) -> Result<Real>,
        ghost: impl FnOnce(&Ghost, &Ghost) -> Result<Ghost>,
    ) -> Result<Self> {
        match (self, other) {
            (Tensor::Real(a), Tensor::Real(b)) => real(a, b).map(Tensor::Real),
            (Tensor::Ghost(a), Tensor::Ghost(b)) => ghost(a, b).map(Tensor::from),
            _ => mixed(),
        }
    }

    fn viewed(
        &self,
        real: impl FnOnce(&Real) -> Result<Real>,
        layout: impl FnOnce(&Layout) -> Result<Layout>,
    ) -> Result<Self> {
        self.on(real, |g| Ok(g.view(layout(&g.layout)?)))
    }

    /// Some of a dimension, as a view.
    pub fn narrow<I: Dim + Copy>(&self, dim: I, start: usize, len: usize) -> Result<Self> {
        let at = |l: &Layout| dim.to_index(l.shape(), "narrow");
        self.viewed(|t| t.narrow(dim, start, len), |l| l.narrow(at(l)?, start, len))
    }

    /// Two dimensions exchanged, as a view.
    pub fn transpose<I: Dim + Copy, J: Dim + Copy>(&self, a: I, b: J) -> Result<Self> {
        let at = |l: &Layout| Ok((a.to_index(l.shape(), "transpose")?, b.to_index(l.shape(), "transpose")?));
        self.viewed(|t| t.transpose(a, b), |l| at(l).and_then(|(a, b)| l.transpose(a, b)))
    }

    /// The last two dimensions exchanged, as a view.
    pub fn t(&self) -> Result<Self> {
        self.transpose(D::Minus2, D::Minus1)
    }

    /// A view that repeats dimensions of size 1.
    pub fn broadcast_as<S: Into<Shape>>(&self, shape: S) -> Result<Self> {
        let shape = shape.into();
        self.viewed(|t| t.broadcast_as(shape.clone()), |l| l.broadcast_as(shape.clone()))
    }

    /// A view with one more dimension of size 1, as dimension `dim`.
    pub fn unsqueeze(&self, dim: usize) -> Result<Self> {
        let layout = |l: &Layout| {
            let (mut dims, mut stride) = (l.dims().to_vec(), l.stride().to_vec());
            stride.insert(dim, stride.get(dim).map_or(1, |s| dims[dim] * s));
            dims.insert(dim, 1);
            Ok(Layout::new(Shape::from(dims), stride, l.start_offset()))
        };
        self.viewed(|t| t.unsqueeze(dim), layout)
    }

    /// A view without dimension `dim`, which has size 1.
    pub fn squeeze(&self, dim: usize) -> Result<Self> {
        let mut dims = self.dims().to_vec();
        dims.remove(dim);
        self.on(|t| t.squeeze(dim), |g| g.reshaped(Shape::from(dims)))
    }

    /// The same values in another shape: a view where they stand in row-major order.
    pub fn reshape<S: ShapeWithOneHole>(&self, shape: S) -> Result<Self> {
        let shape = shape.into_shape(self.elem_count())?;
        self.on(|t| t.reshape(&shape), |g| g.reshaped(shape.clone()))
    }

    /// All values in one dimension.
    pub fn flatten_all(&self) -> Result<Self> {
        self.reshape(self.elem_count())
    }

    /// In row-major order; itself where it is.
    pub fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.force_contiguous() }
    }

    /// In another type; itself where it has it.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        match self.dtype() == dtype {
            true => Ok(self.clone()),
            false => self.on(|t| super::cast::to_dtype(t, dtype), |g| g.made(g.shape().clone(), dtype)),
        }
    }

    /// Mean, the dimension kept with size 1.
    pub fn mean_keepdim(&self, dim: D) -> Result<Self> {
        // candle sums and scales
        match self {
            Tensor::Real(t) => t.mean_keepdim(dim).map(Tensor::Real),
            Tensor::Ghost(_) => self.sum_keepdim(dim)?.affine(1.0, 0.0),
        }
    }

    /// Sum of all values.
    pub fn sum_all(&self) -> Result<Self> {
        self.on(|t| t.sum_all(), |g| g.made((), g.dtype))
    }

    /// The smaller of each value and `most`.
    pub fn minimum(&self, most: f64) -> Result<Self> {
        self.on(|t| t.minimum(most), |g| g.like())
    }

    /// Product of matrices, by batch.
    pub fn matmul(&self, other: &Tensor) -> Result<Self> {
        let ghost = |a: &Ghost, b: &Ghost| {
            let (last, n) = (a.dims().len() - 1, b.dims().len() - 1);
            if a.dims()[last] != b.dims()[n - 1] || a.dtype != b.dtype {
                bail!("matmul: {:?} {:?} x {:?} {:?}", a.dims(), a.dtype, b.dims(), b.dtype);
            }
            a.made(a.with_dim(last, b.dims()[n]), a.dtype)
        };
        self.with(other, |a, b| a.matmul(b), ghost)
    }

    /// Rows (or columns ..) by index.
    pub fn index_select<I: Dim + Copy>(&self, index: &Tensor, dim: I) -> Result<Self> {
        let at = |g: &Ghost| dim.to_index(g.shape(), "index_select");
        let ghost = |g: &Ghost, i: &Ghost| g.made(g.with_dim(at(g)?, i.dims()[0]), g.dtype);
        self.with(index, |t, i| t.index_select(i, dim), ghost)
    }

    /// Values by index along a dimension, [..] as `index`.
    pub fn gather<I: Dim>(&self, index: &Tensor, dim: I) -> Result<Self> {
        self.with(index, |t, i| t.gather(i, dim), |g, i| g.made(i.shape().clone(), g.dtype))
    }

    /// A copy with `source` added by index along a dimension.
    pub fn scatter_add<I: Dim>(&self, index: &Tensor, source: &Tensor, dim: I) -> Result<Self> {
        self.with(index, |t, i| t.scatter_add(i, source.real()?, dim), |g, _| g.like())
    }

    /// A copy with the rows (or columns ..) of `source` added by index.
    pub fn index_add<I: Dim>(&self, index: &Tensor, source: &Tensor, dim: I) -> Result<Self> {
        self.with(index, |t, i| t.index_add(i, source.real()?, dim), |g, _| g.like())
    }

    /// `yes` where this is not 0, else `no`.
    pub fn where_cond(&self, yes: &Tensor, no: &Tensor) -> Result<Self> {
        self.with(yes, |t, y| t.where_cond(y, no.real()?), |_, y| y.like())
    }

    /// Sets all values to zero, in place: f32 on all threads, as there are many.
    pub fn zero_set(&self) -> Result<()> {
        match self {
            Tensor::Real(t) if t.dtype() == DType::F32 && t.device().is_cpu() && t.is_contiguous() => {
                in_place::<f32>("zeros", self, |v| {
                    v.par_chunks_mut(1 << 18).for_each(|v| v.fill(0.0));
                    Ok(())
                })
            }
            Tensor::Real(t) if t.elem_count() > 0 => t.zero_set(),
            _ => Ok(()),
        }
    }

    /// Writes `source` from `offset` of dimension `dim` on, in place.
    pub fn slice_set<I: Dim>(&self, source: &Tensor, dim: I, offset: usize) -> Result<()> {
        if let Tensor::Real(t) = self { t.slice_set(source.real()?, dim, offset) } else { Ok(()) }
    }

    /// Parts of `rows` rows in all end to end: what [`Tensor::each`] left, of which ghosts are one for all.
    pub fn end_to_end(parts: &[Tensor], rows: usize) -> Result<Self> {
        match parts {
            [Tensor::Ghost(g)] if g.dims()[0] != rows => {
                g.made(g.with_dim(0, rows), g.dtype).map(Tensor::from)
            }
            parts => Self::cat(parts, 0),
        }
    }

    /// Tensors end to end along a dimension.
    pub fn cat<T: Borrow<Tensor>>(list: &[T], dim: impl Dim) -> Result<Self> {
        match list.iter().map(Borrow::borrow).collect::<Vec<&Tensor>>().as_slice() {
            [one] => Ok((*one).clone()),
            all @ [Tensor::Ghost(g), ..] => {
                let dim = dim.to_index(g.shape(), "cat")?;
                let n = all.iter().map(|t| t.dims()[dim]).sum();
                g.made(g.with_dim(dim, n), g.dtype).map(Tensor::from)
            }
            all => {
                let all = all.iter().map(|t| t.real()).collect::<Result<Vec<_>>>()?;
                Real::cat(&all, dim).map(Tensor::Real)
            }
        }
    }
}
