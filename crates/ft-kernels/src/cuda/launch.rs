//! Launching our own kernels.
//!
//! ```text
//! let y = empty(x, shape, dtype)?;
//! let launch = Launch::of(x, compiled!(NORM), "norm_forward")?.with(args![x, &y, rows])?;
//! unsafe { launch.run(Grid::new(rows, 256)) }
//! ```
//!
//! Launch code compiles in every build, since plans run it on ghosts ([`ghosts`](crate::tensor::ghosts));
//! only builds with the
//! `cuda` feature can launch. Kernel names consist of file, function and dtype: `norm_forward_bf16`.
//!
//! Each device has a single stream. A launch sees the results of earlier launches, and freed memory is
//! reused only after earlier launches are done.

use crate::Tensor;
use crate::tensor::{Real, row_stride};
use candle_core::{DType, Result, Shape};

/// A source compiled by build.rs, by file name in capitals; an argument of [`Launch::of`].
macro_rules! compiled {
    ($name:ident) => {{
        #[cfg(feature = "cuda")]
        let source = $crate::cuda::module::$name;
        #[cfg(not(feature = "cuda"))]
        let source = $crate::cuda::launch::Source(stringify!($name));
        source
    }};
}
pub(crate) use compiled;

#[cfg(feature = "cuda")]
pub use super::module::Module as Source;

/// Name of a source not compiled in this build.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy, Debug)]
pub struct Source(pub &'static str);

/// An uninitialized tensor on the device of `on`. The caller launches a kernel writing every value.
///
/// # Errors
/// Out of memory, or `on` is a ghost.
pub fn empty(on: &Tensor, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    device::empty(on.real()?.device(), shape.into(), dtype).map(Tensor::Real)
}

/// [`empty`], given a device.
pub(crate) fn empty_on(device: &candle_core::Device, n: usize, dtype: DType) -> Result<Real> {
    device::empty(device, n.into(), dtype)
}

/// Bytes of shared memory of a multiprocessor of the tensor's device; 0 if unknown.
pub fn shared_memory(t: &Tensor) -> usize {
    t.real().map_or(0, |t| device::shared_memory(t.device()))
}

/// Device address of a tensor's values. Kernels using the address must be launched on the device's single
/// stream while the tensor is alive.
///
/// # Errors
/// The tensor is not on a CUDA device, not contiguous, or a ghost.
pub fn address_of(t: &Tensor) -> Result<u64> {
    if !t.is_contiguous() {
        candle_core::bail!("the address of a tensor that is not contiguous: {:?}", t.shape());
    }
    device::at(t.real()?)
}

/// Launch dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks per dimension; with a zero, nothing is launched.
    pub blocks: [usize; 3],
    /// Threads per block.
    pub threads: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

impl Grid {
    /// A 1-D grid without dynamic shared memory.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared: 0 }
    }

    /// Sets the second dimension to `y` blocks.
    pub fn by(self, y: usize) -> Self {
        Self { blocks: [self.blocks[0], y, self.blocks[2]], ..self }
    }

    /// Sets the dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Self {
        Self { shared: u32::try_from(bytes).unwrap_or(u32::MAX), ..self }
    }
}

/// A kernel argument; see `args`.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// A contiguous tensor.
    Tensor(&'a Tensor),
    /// A matrix with contiguous rows.
    Rows(&'a Tensor),
    /// A null pointer.
    Null,
    /// A count, passed as u32.
    Count(usize),
    /// Bit pattern of a number, in the low bits.
    Number(u64),
}

impl<'a> From<&'a Tensor> for Argument<'a> {
    fn from(t: &'a Tensor) -> Self {
        Argument::Tensor(t)
    }
}

impl<'a> From<Option<&'a Tensor>> for Argument<'a> {
    fn from(t: Option<&'a Tensor>) -> Self {
        t.map_or(Argument::Null, Argument::Tensor)
    }
}

macro_rules! numbers {
    ($($t:ty: $x:ident => $argument:expr;)*) => { $(
        impl From<$t> for Argument<'_> {
            fn from($x: $t) -> Self {
                $argument
            }
        }
    )* };
}

numbers! {
    usize: n => Argument::Count(n);
    u32: x => Argument::Number(x.into());
    i32: x => Argument::Number(x.cast_unsigned().into());
    u64: x => Argument::Number(x);
    f32: x => Argument::Number(x.to_bits().into());
}

/// Arguments of a kernel, of any type that converts to [`Argument`].
macro_rules! args {
    ($($x:expr),* $(,)?) => {
        &[$($crate::cuda::launch::Argument::from($x)),*]
    };
}
pub(crate) use args;

/// A checked argument.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is launched"))]
enum Cell<'a> {
    Tensor(&'a Real),
    Number(u64),
}

/// Builder for a kernel launch.
#[derive(Debug)]
pub struct Launch<'a> {
    on: &'a Real,
    source: Source,
    name: String,
    arguments: Vec<Cell<'a>>,
}

impl<'a> Launch<'a> {
    /// The kernel `name` of a source (see `compiled`), for the dtype and device of `on`.
    ///
    /// # Errors
    /// No kernel for the dtype, or `on` is a ghost.
    pub fn of(on: &'a Tensor, source: Source, name: &str) -> Result<Self> {
        let suffix = match on.dtype() {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            other => candle_core::bail!("{name}: no CUDA kernel for {other:?}"),
        };
        Self::named(on, source, format!("{name}_{suffix}"))
    }

    /// The kernel with the full name `name`, on the device of `on`.
    ///
    /// # Errors
    /// `on` is a ghost.
    pub fn named(on: &'a Tensor, source: Source, name: impl Into<String>) -> Result<Self> {
        Ok(Self { on: on.real()?, source, name: name.into(), arguments: Vec::new() })
    }

    /// Pushes arguments.
    ///
    /// # Errors
    /// A tensor or its rows are not contiguous, a tensor is a ghost, or a count exceeds 32 bits.
    pub fn with(mut self, arguments: &[Argument<'a>]) -> Result<Self> {
        for a in arguments {
            self.arguments.push(match *a {
                Argument::Tensor(t) if !t.is_contiguous() => {
                    candle_core::bail!("{}: a tensor that is not contiguous: {:?}", self.name, t.shape())
                }
                Argument::Rows(t) if row_stride(t.layout()).is_none() => {
                    candle_core::bail!(
                        "{}: a matrix whose rows are not contiguous: {:?}",
                        self.name,
                        t.shape()
                    )
                }
                Argument::Tensor(t) | Argument::Rows(t) => Cell::Tensor(t.real()?),
                Argument::Null => Cell::Number(0),
                Argument::Count(n) => match u32::try_from(n) {
                    Ok(n) => Cell::Number(n.into()),
                    Err(_) => candle_core::bail!("{}: a size of {n} does not fit 32 bits", self.name),
                },
                Argument::Number(bits) => Cell::Number(bits),
            });
        }
        Ok(self)
    }

    /// Launches the kernel, unless the grid is empty.
    ///
    /// # Errors
    /// The driver fails, or this build has no CUDA.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters in order and type, and with them all accesses of the
    /// kernel are in bounds.
    pub unsafe fn run(self, grid: Grid) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        // SAFETY: the contract of this function.
        unsafe { device::run(&self, grid) }
    }
}

#[cfg(feature = "cuda")]
pub(crate) use device::at;

#[cfg(feature = "cuda")]
mod device {
    use super::{Cell, Grid, Launch};
    use candle_core::backend::BackendDevice;
    use candle_core::cuda_backend::cudarc::driver::{
        CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, sys::CUdevice_attribute,
        sys::CUfunction_attribute,
    };
    use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
    use candle_core::op::BackpropOp;
    use candle_core::{DType, Device, Result, Shape, Storage, Tensor};

    /// Dynamic shared memory available without opting in, in bytes.
    const SHARED: u32 = 48 << 10;

    pub fn empty(device: &Device, shape: Shape, dtype: DType) -> Result<Tensor> {
        // zero-sized allocations have no address; the driver rejects them
        let some = if shape.elem_count() == 0 { Shape::from(1) } else { shape.clone() };
        // SAFETY: by the contract of `empty`, a kernel writes every value before any read.
        let storage = unsafe { device.as_cuda_device()?.alloc_uninit(&some, dtype) }?;
        Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    /// Bytes of shared memory of a multiprocessor; 0 if unknown.
    pub fn shared_memory(device: &Device) -> usize {
        let at = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR;
        let cuda = device.as_cuda_device().ok();
        let bytes = cuda.and_then(|cuda| cuda.cuda_stream().context().attribute(at).ok());
        bytes.and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
    }

    /// Device address of a tensor's values, in the order of `stream`.
    pub fn address(t: &Tensor, on: &CudaDevice, stream: &CudaStream) -> Result<u64> {
        fn of<T>(s: &CudaSlice<T>, stream: &CudaStream) -> (u64, usize) {
            (s.device_ptr(stream).0, size_of::<T>())
        }
        let (storage, layout) = t.storage_and_layout();
        let Storage::Cuda(CudaStorage { slice, device }) = &*storage else {
            candle_core::bail!("a tensor of another device");
        };
        if !device.same_device(on) {
            candle_core::bail!("a tensor of another CUDA device");
        }
        let (begin, size) = match slice {
            CudaStorageSlice::U8(s) => of(s, stream),
            CudaStorageSlice::U32(s) => of(s, stream),
            CudaStorageSlice::I64(s) => of(s, stream),
            CudaStorageSlice::BF16(s) => of(s, stream),
            CudaStorageSlice::F16(s) => of(s, stream),
            CudaStorageSlice::F32(s) => of(s, stream),
            CudaStorageSlice::F64(s) => of(s, stream),
            _ => candle_core::bail!("no CUDA kernel for {:?}", storage.dtype()),
        };
        Ok(begin + (layout.start_offset() * size) as u64)
    }

    /// Address of a tensor's values on its own device.
    pub fn at(t: &Tensor) -> Result<u64> {
        let device = t.device().as_cuda_device()?;
        address(t, device, &device.cuda_stream())
    }

    /// # Safety
    /// As [`Launch::run`].
    pub unsafe fn run(launch: &Launch<'_>, grid: Grid) -> Result<()> {
        let what = |e: candle_core::Error| e.context(format!("CUDA kernel {}", launch.name));
        let device = launch.on.device().as_cuda_device()?;
        let stream = device.cuda_stream();
        let cell = |a: &Cell<'_>| match a {
            Cell::Tensor(t) => address(t, device, &stream),
            Cell::Number(bits) => Ok(*bits),
        };
        // the driver reads the parameter's size in bytes, from the low end
        let cells = launch.arguments.iter().map(cell).collect::<Result<Vec<u64>>>().map_err(what)?;
        let [x, y, z] = grid.blocks.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (grid.threads, 1, 1),
            shared_mem_bytes: grid.shared,
        };
        let f = launch.source.function(device, &launch.name).map_err(what)?;
        if grid.shared > SHARED {
            let at = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            f.set_attribute(at, i32::try_from(grid.shared).unwrap_or(i32::MAX)).w().map_err(what)?;
        }
        let mut builder = stream.launch_builder(&f);
        cells.iter().for_each(|c| {
            builder.arg(c);
        });
        // SAFETY: arguments are valid by contract; tensors outlive the launch call, and memory is freed
        // in stream order.
        unsafe { builder.launch(config) }.w().map_err(what)?;
        Ok(())
    }
}

#[cfg(not(feature = "cuda"))]
mod device {
    use super::{Grid, Launch};
    use candle_core::{DType, Device, Result, Shape, Tensor};

    pub fn empty(_: &Device, _: Shape, _: DType) -> Result<Tensor> {
        candle_core::bail!("this ft was built without CUDA")
    }

    pub fn at(_: &Tensor) -> Result<u64> {
        candle_core::bail!("this ft was built without CUDA")
    }

    pub fn shared_memory(_: &Device) -> usize {
        0
    }

    /// # Safety
    /// As [`Launch::run`].
    pub unsafe fn run(launch: &Launch<'_>, _: Grid) -> Result<()> {
        let Launch { on, source, name, arguments } = launch;
        candle_core::bail!(
            "{name} of {}: {:?}, {} arguments: this ft was built without CUDA",
            source.0,
            on.shape(),
            arguments.len()
        )
    }
}
