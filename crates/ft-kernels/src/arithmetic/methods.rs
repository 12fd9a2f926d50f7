//! Operations on tensors with values and on ghosts.

use super::cast;
use crate::cpu::{each, in_place, pairwise};
use crate::tensor::{Ghost, Real, Tensor, row_stride};
use candle_core::shape::{Dim, Dims, ShapeWithOneHole};
use candle_core::{D, DType, Layout, Result, Shape, WithDType, bail};
use std::borrow::Borrow;

fn mixed<T>() -> Result<T> {
    bail!("a ghost met a tensor")
}

/// Operations with an output of the shape and dtype of the first operand.
macro_rules! alike {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $t:ty),*);)*) => { $(
        $(#[$doc])*
        pub fn $name(&self, $($arg: $t),*) -> Result<Self> {
            self.on(|t| t.$name($($arg),*), Ghost::like)
        }
    )* };
}

/// Binary operations with broadcasting, with an output of the dtype of the first operand.
macro_rules! pairwise {
    ($($(#[$doc:meta])* $name:ident = $real:expr;)*) => { $(
        $(#[$doc])*
        pub fn $name(&self, other: &Tensor) -> Result<Self> {
            let shape = |a: &Ghost, b: &Ghost| a.shape().broadcast_shape_binary_op(b.shape(), stringify!($name));
            self.with(other, $real, |a, b| {
                b.is_moved();
                a.made(shape(a, b)?, a.dtype)
            })
        }
    )* };
}

/// Reductions.
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

/// Accessors of values; errors on ghosts.
macro_rules! values {
    ($($(#[$doc:meta])* $name:ident$(<$s:ident>)? -> $t:ty;)*) => { $(
        $(#[$doc])*
        pub fn $name$(<$s: WithDType>)?(&self) -> Result<$t> {
            self.real()?.$name()
        }
    )* };
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
        /// Hyperbolic tangent.
        tanh();
        /// `mul x + add`.
        affine(mul: f64, add: f64);
        /// Zeros of this shape.
        zeros_like();
        /// Deep copy.
        copy();
        /// Deep copy in row-major order.
        force_contiguous();
    }

    pairwise! {
        /// Sum.
        add = super::add::add;
        /// Difference.
        sub = Real::sub;
        /// Elementwise product.
        mul = pairwise::mul;
        /// Quotient.
        div = Real::div;
        /// Sum, broadcast.
        broadcast_add = Real::broadcast_add;
        /// Difference, broadcast.
        broadcast_sub = Real::broadcast_sub;
        /// Elementwise product, broadcast.
        broadcast_mul = Real::broadcast_mul;
        /// Quotient, broadcast.
        broadcast_div = Real::broadcast_div;
    }

    reductions! {
        /// Sum.
        sum(Dims) keep false;
        /// Sum; keeps the dimensions with size 1.
        sum_keepdim(Dims) keep true;
        /// Maximum; keeps the dimension with size 1.
        max_keepdim(Dim) keep true;
        /// Minimum; keeps the dimension with size 1.
        min_keepdim(Dim) keep true;
    }

    values! {
        /// Value of a scalar.
        to_scalar<S> -> S;
        /// Real of a vector.
        to_vec1<S> -> Vec<S>;
        /// Real of a matrix.
        to_vec2<S> -> Vec<Vec<S>>;
    }

    /// Equality, broadcast: 0 or 1.
    pub fn broadcast_eq(&self, other: &Tensor) -> Result<Self> {
        self.with(other, Real::broadcast_eq, |a, b| {
            b.is_moved();
            a.made(a.shape().broadcast_shape_binary_op(b.shape(), "broadcast_eq")?, DType::U8)
        })
    }

    /// Applies `real` to a tensor, or `ghost` to a ghost.
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

    /// Applies `real` to two tensors, or `ghost` to two ghosts.
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

    /// View of a range of a dimension.
    pub fn narrow<I: Dim + Copy>(&self, dim: I, start: usize, len: usize) -> Result<Self> {
        let at = |l: &Layout| dim.to_index(l.shape(), "narrow");
        self.viewed(|t| t.narrow(dim, start, len), |l| l.narrow(at(l)?, start, len))
    }

    /// View with two dimensions exchanged.
    pub fn transpose<I: Dim + Copy, J: Dim + Copy>(&self, a: I, b: J) -> Result<Self> {
        let at = |l: &Layout| Ok((a.to_index(l.shape(), "transpose")?, b.to_index(l.shape(), "transpose")?));
        self.viewed(|t| t.transpose(a, b), |l| at(l).and_then(|(a, b)| l.transpose(a, b)))
    }

    /// View with the last two dimensions exchanged.
    pub fn t(&self) -> Result<Self> {
        self.transpose(D::Minus2, D::Minus1)
    }

    /// View that repeats dimensions of size 1.
    pub fn broadcast_as<S: Into<Shape>>(&self, shape: S) -> Result<Self> {
        let shape = shape.into();
        self.viewed(|t| t.broadcast_as(shape.clone()), |l| l.broadcast_as(shape.clone()))
    }

    /// View with a new dimension `dim` of size 1.
    pub fn unsqueeze(&self, dim: usize) -> Result<Self> {
        let layout = |l: &Layout| {
            let (mut dims, mut stride) = (l.dims().to_vec(), l.stride().to_vec());
            stride.insert(dim, stride.get(dim).map_or(1, |s| dims[dim] * s));
            dims.insert(dim, 1);
            Ok(Layout::new(Shape::from(dims), stride, l.start_offset()))
        };
        self.viewed(|t| t.unsqueeze(dim), layout)
    }

    /// View without dimension `dim`, which must have size 1.
    pub fn squeeze(&self, dim: usize) -> Result<Self> {
        let mut dims = self.dims().to_vec();
        dims.remove(dim);
        self.on(|t| t.squeeze(dim), |g| g.reshaped(Shape::from(dims)))
    }

    /// Reshapes; a view if contiguous, else a copy.
    pub fn reshape<S: ShapeWithOneHole>(&self, shape: S) -> Result<Self> {
        let shape = shape.into_shape(self.elem_count())?;
        self.on(|t| t.reshape(&shape), |g| g.reshaped(shape.clone()))
    }

    /// Flattens to one dimension.
    pub fn flatten_all(&self) -> Result<Self> {
        self.reshape(self.elem_count())
    }

    /// Row-major copy, or the tensor itself if contiguous.
    pub fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.force_contiguous() }
    }

    /// The matrix itself if its rows are contiguous, else a row-major copy.
    pub fn contiguous_rows(&self) -> Result<Self> {
        if row_stride(self.layout()).is_some() { Ok(self.clone()) } else { self.contiguous() }
    }

    /// Converts to `dtype`, or returns the tensor itself.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if self.dtype() == dtype {
            Ok(self.clone())
        } else {
            self.on(|t| cast::to_dtype(t, dtype), |g| g.made(g.shape().clone(), dtype))
        }
    }

    /// Sum of all values.
    pub fn sum_all(&self) -> Result<Self> {
        self.on(|t| t.sum_all(), |g| g.made((), g.dtype))
    }

    /// Elementwise minimum with `most`.
    pub fn minimum(&self, most: f64) -> Result<Self> {
        self.on(|t| t.minimum(most), |g| g.like())
    }

    /// Batched matrix product.
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

    /// Selects rows (or slices of dimension `dim`) by index.
    pub fn index_select<I: Dim + Copy>(&self, index: &Tensor, dim: I) -> Result<Self> {
        let at = |g: &Ghost| dim.to_index(g.shape(), "index_select");
        let ghost = |g: &Ghost, i: &Ghost| g.made(g.with_dim(at(g)?, i.dims()[0]), g.dtype);
        self.with(index, |t, i| t.index_select(i, dim), ghost)
    }

    /// Selects values along a dimension; the output has the shape of `index`.
    pub fn gather<I: Dim>(&self, index: &Tensor, dim: I) -> Result<Self> {
        self.with(index, |t, i| t.gather(i, dim), |g, i| g.made(i.shape().clone(), g.dtype))
    }

    /// A copy with slices of `source` added by index.
    pub fn index_add<I: Dim>(&self, index: &Tensor, source: &Tensor, dim: I) -> Result<Self> {
        self.with(index, |t, i| t.index_add(i, source.real()?, dim), |g, _| g.like())
    }

    /// Elementwise choice: `yes` if this is nonzero, else `no`.
    pub fn where_cond(&self, yes: &Tensor, no: &Tensor) -> Result<Self> {
        self.with(yes, |t, y| t.where_cond(y, no.real()?), |_, y| y.like())
    }

    /// Zeros in place; f32 on all CPU threads.
    pub fn zero_set(&self) -> Result<()> {
        match self {
            Tensor::Real(t) if t.dtype() == DType::F32 && t.device().is_cpu() && t.is_contiguous() => {
                in_place::<f32>("zeros", self, |v| {
                    each(v.chunks_mut(1 << 18), |v| v.fill(0.0));
                    Ok(())
                })
            }
            Tensor::Real(t) if t.elem_count() > 0 => t.zero_set(),
            _ => Ok(()),
        }
    }

    /// Writes `source` in place, from `offset` of dimension `dim`.
    pub fn slice_set<I: Dim>(&self, source: &Tensor, dim: I, offset: usize) -> Result<()> {
        if let Tensor::Real(t) = self { t.slice_set(source.real()?, dim, offset) } else { Ok(()) }
    }

    /// Concatenates the parts of a loop by [`Tensor::each`] into `rows` rows; on
    /// ghosts, one part stands for all.
    pub fn end_to_end(parts: &[Tensor], rows: usize) -> Result<Self> {
        match parts {
            [Tensor::Ghost(g)] if g.dims()[0] != rows => {
                g.made(g.with_dim(0, rows), g.dtype).map(Tensor::from)
            }
            parts => Self::cat(parts, 0),
        }
    }

    /// Concatenates tensors along a dimension.
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
