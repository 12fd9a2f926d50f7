//! What the launches of our own kernels share.
//!
//! ```text
//! let y = empty(x, shape, dtype)?;
//! let launch = Launch::of(x, compiled!(NORM), "norm_forward")?.tensor(x)?.tensor(&y)?.number(rows as u32);
//! unsafe { launch.run(Grid::new(rows, 256)) }
//! ```
//!
//! The launch code of a kernel is Rust that compiles in every build: plans run it on ghosts ([`ghosts`]), and only a build
//! with the `cuda` feature has something to launch. A kernel's name is the file's, what it does and the type that it
//! works in: `norm_forward_bf16`.
//!
//! All work of a device is in the order of one stream: what is launched sees what was launched before, and memory that is
//! freed is used again only behind what was launched before that.

use crate::Tensor;
use crate::gemm::row_stride;
use crate::ledger::{Allocation, Cost, Ledger};
use crate::tensor::{Ghost, Real};
use candle_core::{DType, Result, Shape};

/// A source that build.rs compiled, by the name of its file in capitals: what [`Launch::of`] takes.
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

/// A source that this build did not compile: its name.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy, Debug)]
pub struct Source(pub &'static str);

/// What a kernel on CUDA takes for ghosts; `None` for tensors.
///
/// Of what it `reads`, copies where that is not in row-major order; its results `out`; and what `during` takes while it
/// works. It counts as one launch, which moves what it reads and gives: `during` writes down the others.
pub fn ghosts<const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let out = ghost_products(reads, out, during)?;
    moves(reads.iter().copied().chain(&out));
    Some(out)
}

/// Writes down that an operation reads or writes these, if they are ghosts.
pub fn moves<'a>(all: impl IntoIterator<Item = &'a Tensor>) {
    all.into_iter().filter_map(Tensor::ghost).for_each(Ghost::is_moved);
}

/// As [`ghosts`], of a kernel that moves what it reads and gives while it multiplies.
pub fn ghost_products<const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let ledger = reads.first()?.ghost()?.ledger();
    let _copies = hold_copies(ledger, reads);
    let out = out.map(|(shape, dtype)| Ghost::new(ledger, shape, dtype).into());
    during(ledger);
    ledger.work(Cost { started: 1.0, ..Cost::default() });
    Some(out)
}

/// The copies of what is not in row-major order.
pub fn hold_copies(ledger: &Ledger, reads: &[&Tensor]) -> Allocation {
    let bytes = |t: &&Tensor| (t.dtype().size_in_bytes() * t.elem_count()) as u64;
    ledger.hold(reads.iter().filter(|t| !t.is_contiguous()).map(bytes).sum())
}

/// A launch more than the one that [`ghosts`] counts.
pub fn started(ledger: &Ledger) {
    ledger.work(Cost { started: 1.0, ..Cost::default() });
}

/// A tensor on the device of `on` whose values are not set: a kernel writes all of them.
///
/// # Errors
/// No memory; a ghost.
pub fn empty(on: &Tensor, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    device::empty(on.real()?.device(), shape.into(), dtype).map(Tensor::Real)
}

/// As [`empty`], on a device.
#[cfg(feature = "cuda")]
pub(super) fn empty_on(device: &candle_core::Device, n: usize, dtype: DType) -> Result<Real> {
    device::empty(device, n.into(), dtype)
}

/// Where a tensor's values begin on its device. What reads them there has to be launched while the tensor lives, in the order of
/// the device's one stream.
///
/// # Errors
/// A tensor that is not on a CUDA device, or a view with gaps; a ghost.
pub fn address_of(t: &Tensor) -> Result<u64> {
    if !t.is_contiguous() {
        candle_core::bail!("the address of a tensor that is not contiguous: {:?}", t.shape());
    }
    device::at(t.real()?)
}

/// Blocks, threads of a block, and bytes of shared memory that a block asks for when it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks by dimension; none in one of them launches nothing.
    pub blocks: [usize; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Grid {
    /// One dimension, no dynamic shared memory.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared: 0 }
    }

    /// The same with `y` times as many blocks, in the second dimension.
    pub fn by(self, y: usize) -> Self {
        Self { blocks: [self.blocks[0], y, self.blocks[2]], ..self }
    }

    /// The same with dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Self {
        Self { shared: u32::try_from(bytes).unwrap_or(u32::MAX), ..self }
    }
}

/// A number as a kernel's parameter.
pub trait Number {
    /// Its bits, the low ones first.
    fn bits(self) -> u64;
}

macro_rules! numbers {
    ($($t:ty: $x:ident => $bits:expr;)*) => { $(
        impl Number for $t {
            fn bits(self) -> u64 {
                let $x = self;
                $bits
            }
        }
    )* };
}

numbers! {
    u32: x => x.into();
    i32: x => x.cast_unsigned().into();
    u64: x => x;
    f32: x => x.to_bits().into();
}

/// A parameter of a launch.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is launched"))]
enum Argument<'a> {
    Tensor(&'a Real),
    /// No tensor: a null pointer.
    Null,
    Number(u64),
}

/// A launch that is being put together.
#[derive(Debug)]
pub struct Launch<'a> {
    on: &'a Real,
    source: Source,
    name: String,
    arguments: Vec<Argument<'a>>,
}

impl<'a> Launch<'a> {
    /// The kernel `name` of a source (see `compiled`) for values of the type of `on`, on its device.
    ///
    /// # Errors
    /// A type that has no kernels; a ghost.
    pub fn of(on: &'a Tensor, source: Source, name: &str) -> Result<Self> {
        let suffix = match on.dtype() {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            other => candle_core::bail!("{name}: no CUDA kernel for {other:?}"),
        };
        Self::named(on, source, format!("{name}_{suffix}"))
    }

    /// The kernel with this whole name, on the device of `on`.
    ///
    /// # Errors
    /// A ghost.
    pub fn named(on: &'a Tensor, source: Source, name: impl Into<String>) -> Result<Self> {
        Ok(Self { on: on.real()?, source, name: name.into(), arguments: Vec::new() })
    }

    /// A tensor that the kernel reads or writes, in row-major order.
    ///
    /// # Errors
    /// Another order; a ghost.
    pub fn tensor(mut self, t: &'a Tensor) -> Result<Self> {
        if !t.is_contiguous() {
            candle_core::bail!("{}: a tensor that is not contiguous: {:?}", self.name, t.shape());
        }
        self.arguments.push(Argument::Tensor(t.real()?));
        Ok(self)
    }

    /// A matrix that the kernel reads, whose rows may stand apart: it is told how far.
    ///
    /// # Errors
    /// Rows that are not contiguous; a ghost.
    pub fn rows(mut self, t: &'a Tensor) -> Result<Self> {
        if row_stride(t.layout()).is_none() {
            candle_core::bail!("{}: a matrix whose rows are not contiguous: {:?}", self.name, t.shape());
        }
        self.arguments.push(Argument::Tensor(t.real()?));
        Ok(self)
    }

    /// A tensor, or a null pointer.
    ///
    /// # Errors
    /// As [`Launch::tensor`].
    pub fn maybe(mut self, t: Option<&'a Tensor>) -> Result<Self> {
        match t {
            Some(t) => self.tensor(t),
            None => {
                self.arguments.push(Argument::Null);
                Ok(self)
            }
        }
    }

    /// A number.
    pub fn number(mut self, x: impl Number) -> Self {
        self.arguments.push(Argument::Number(x.bits()));
        self
    }

    /// A count, as the 32-bit number that kernels take.
    ///
    /// # Errors
    /// It does not fit.
    pub fn count(self, n: usize) -> Result<Self> {
        match u32::try_from(n) {
            Ok(n) => Ok(self.number(n)),
            Err(_) => candle_core::bail!("{}: a size of {n} does not fit 32 bits", self.name),
        }
    }

    /// Launches it; a grid without blocks launches nothing.
    ///
    /// # Errors
    /// What the driver says; a build without CUDA.
    ///
    /// # Safety
    /// The arguments are the kernel's parameters in order and type, and for them it stays inside of its tensors.
    pub unsafe fn run(self, grid: Grid) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { device::run(&self, grid) }
    }
}

#[cfg(feature = "cuda")]
pub(super) use device::at;

#[cfg(feature = "cuda")]
mod device {
    use super::{Argument, Grid, Launch};
    use candle_core::backend::BackendDevice;
    use candle_core::cuda_backend::cudarc::driver::{
        CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, sys::CUfunction_attribute,
    };
    use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
    use candle_core::op::BackpropOp;
    use candle_core::{DType, Device, Result, Shape, Storage, Tensor};

    /// Bytes of dynamic shared memory that a kernel gets without asking.
    const SHARED: u32 = 48 << 10;

    pub fn empty(device: &Device, shape: Shape, dtype: DType) -> Result<Tensor> {
        // no bytes are no address: the driver refuses
        let some = if shape.elem_count() == 0 { Shape::from(1) } else { shape.clone() };
        // SAFETY: whoever asks writes every value before anything reads it.
        let storage = unsafe { device.as_cuda_device()?.alloc_uninit(&some, dtype) }?;
        Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    /// Where a tensor's values begin.
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

    /// Where a tensor's values begin on its own device.
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
        let cell = |a: &Argument<'_>| match a {
            Argument::Tensor(t) => address(t, device, &stream),
            Argument::Null => Ok(0),
            Argument::Number(bits) => Ok(*bits),
        };
        // the driver reads as many bytes of each as the parameter has, the low ones
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
        // SAFETY: the caller's; the tensors live as long as the launch, and their memory is freed in the stream's order.
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
