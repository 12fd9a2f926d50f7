//! Values that cross between the host and a device beside its computing: buffers in page-locked memory, and a stream each
//! way. A copy from or to memory that is not page-locked goes through a buffer of the driver's, and the host waits for it.
//!
//! Order is made by events alone: what is fetched waits for what the device was asked to compute before, what it is asked
//! afterwards waits for what was sent, and the host waits for a buffer before it reads or writes there.

use super::launch::at;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use std::ffi::c_void;
use std::sync::Arc;

/// A buffer on the host `[n]`, page-locked.
#[derive(Debug)]
struct Pinned {
    tensor: Tensor,
    at: *mut u8,
    /// When the last copy from or to it is done.
    busy: Option<CudaEvent>,
}

// SAFETY: the pointer is into the tensor's own memory; who holds the buffer exclusively may use it from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(n: usize, dtype: DType) -> Result<Self> {
        let tensor = Tensor::zeros(n.max(1), dtype, &Device::Cpu)?;
        let at = {
            let (storage, _) = tensor.storage_and_layout();
            match &*storage {
                Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr().cast::<u8>(),
                Storage::Cpu(CpuStorage::BF16(v)) => v.as_ptr().cast(),
                Storage::Cpu(CpuStorage::F16(v)) => v.as_ptr().cast(),
                _ => candle_core::bail!("staging of {dtype:?}"),
            }
        };
        let bytes = n.max(1) * dtype.size_in_bytes();
        // SAFETY: the memory is the tensor's, which is dropped after it is unlocked.
        unsafe { sys::cuMemHostRegister_v2(at.cast_mut().cast::<c_void>(), bytes, 0).result() }.w()?;
        Ok(Self { tensor, at: at.cast_mut(), busy: None })
    }

    /// The first `len` values, once no copy uses them.
    fn free(&mut self, len: usize) -> Result<Tensor> {
        if let Some(event) = self.busy.take() {
            event.synchronize().w()?;
        }
        self.tensor.narrow(0, 0, len)
    }

    /// As many bytes as `like` has.
    fn bytes(&mut self, like: &Tensor) -> Result<&mut [u8]> {
        if like.dtype() != self.tensor.dtype() || like.elem_count() > self.tensor.elem_count() {
            candle_core::bail!("staging: {:?} {:?} by way of {:?}", like.shape(), like.dtype(), self.tensor);
        }
        let len = like.elem_count() * like.dtype().size_in_bytes();
        // SAFETY: the tensor holds as many, and nothing else reads or writes them: `free` came before, by the callers.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at, len) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let done = self.busy.take().map(|e| e.synchronize());
        // SAFETY: it was locked by `new`. A failure leaves it locked until the process ends, which harms nobody.
        let unlocked = unsafe { sys::cuMemHostUnregister(self.at.cast::<c_void>()).result() };
        let _ = (done, unlocked);
    }
}

/// Two buffers and a stream each way.
#[derive(Debug)]
pub struct Staging {
    compute: Arc<CudaStream>,
    out: Arc<CudaStream>,
    into: Arc<CudaStream>,
    fetched: [Pinned; 2],
    sent: [Pinned; 2],
}

impl Staging {
    /// For pieces of `n` values: of f32 from the device, and of `dtype` to it.
    ///
    /// # Errors
    /// No memory; another device than CUDA.
    pub fn new(device: &Device, n: usize, dtype: DType) -> Result<Self> {
        let compute = device.as_cuda_device()?.cuda_stream();
        let stream = || compute.context().new_stream().w();
        let pair = |dtype| Ok::<_, candle_core::Error>([Pinned::new(n, dtype)?, Pinned::new(n, dtype)?]);
        let (out, into) = (stream()?, stream()?);
        Ok(Self { out, into, fetched: pair(DType::F32)?, sent: pair(dtype)?, compute })
    }

    /// What is fetched from now on is what the device was asked to compute until now.
    pub fn begin(&self) -> Result<()> {
        self.out.wait(&self.compute.record_event(None).w()?).w()
    }

    /// What the device is asked to compute from now on sees what was sent.
    pub fn end(&self) -> Result<()> {
        self.compute.wait(&self.into.record_event(None).w()?).w()
    }

    fn address(t: &Tensor) -> Result<u64> {
        if !t.is_contiguous() {
            candle_core::bail!("staging: a tensor that is not contiguous: {:?}", t.shape());
        }
        at(t)
    }

    /// Begins to copy `from` `[len]` to the host, for the `i`th piece.
    ///
    /// # Errors
    /// Of the driver; more values than a piece has.
    pub fn fetch(&mut self, i: usize, from: &Tensor) -> Result<()> {
        let at = Self::address(from)?;
        let buffer = &mut self.fetched[i % 2];
        buffer.free(0)?;
        // SAFETY: `from` lives as long as the copy, for which its owner waits; the buffer is free and large enough.
        unsafe { result::memcpy_dtoh_async(buffer.bytes(from)?, at, self.out.cu_stream()) }.w()?;
        buffer.busy = Some(self.out.record_event(None).w()?);
        Ok(())
    }

    /// The `i`th piece, of `len` values, once it is here.
    pub fn fetched(&mut self, i: usize, len: usize) -> Result<Tensor> {
        self.fetched[i % 2].free(len)
    }

    /// Where the `i`th piece that is sent, of `len` values, is to be written.
    pub fn to_send(&mut self, i: usize, len: usize) -> Result<Tensor> {
        self.sent[i % 2].free(len)
    }

    /// Begins to copy it into `to` `[len]`. Whoever asks has waited for all that the device computes with `to`.
    ///
    /// # Errors
    /// Of the driver; more values than a piece has.
    pub fn send(&mut self, i: usize, to: &Tensor) -> Result<()> {
        let at = Self::address(to)?;
        let buffer = &mut self.sent[i % 2];
        // SAFETY: `to` stays, being what the layers compute with; nobody writes the buffer before the event.
        unsafe { result::memcpy_htod_async(at, buffer.bytes(to)?, self.into.cu_stream()) }.w()?;
        buffer.busy = Some(self.into.record_event(None).w()?);
        Ok(())
    }
}
