//! Values that cross between the host and a device beside its computing: buffers in page-locked memory, and a stream each
//! way. A copy from or to memory that is not page-locked goes through a buffer of the driver's, and the host waits for it.
//!
//! Order is made by events alone: what is fetched waits for what the device was asked to compute before, what it is asked
//! afterwards waits for what was sent, and the host waits for a buffer before it reads or writes there.

use super::launch::{at, empty_on};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr};
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

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
                Storage::Cpu(CpuStorage::U32(v)) => v.as_ptr().cast(),
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
        // most copies are done long before: to ask is no wait
        if let Some(event) = self.busy.take()
            && !event.try_is_complete().w()?
        {
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

    /// All of its bytes, once no copy uses them.
    fn all(&mut self) -> Result<&mut [u8]> {
        self.free(0)?;
        let len = self.tensor.elem_count() * self.tensor.dtype().size_in_bytes();
        // SAFETY: the tensor holds as many, and nothing else reads or writes them: the last copy is done.
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

/// Numbers of a micro-batch on their way to a device: two buffers and a stream. The host writes and goes on; what the device
/// is asked to compute afterwards waits for the copy.
struct Upload {
    compute: Arc<CudaStream>,
    into: Arc<CudaStream>,
    buffers: [Pinned; 2],
    next: usize,
}

/// Those of each device, made when they are first needed.
static UPLOADS: Mutex<Option<HashMap<DeviceId, Upload>>> = Mutex::new(None);

impl Upload {
    fn new(device: &CudaDevice) -> Result<Self> {
        let compute = device.cuda_stream();
        let into = compute.context().new_stream().w()?;
        Ok(Self {
            into,
            compute,
            buffers: [Pinned::new(1, DType::U32)?, Pinned::new(1, DType::U32)?],
            next: 0,
        })
    }

    fn send(&mut self, device: &Device, ints: &[u32], floats: &[f32]) -> Result<[Tensor; 2]> {
        let buffer = &mut self.buffers[self.next % 2];
        self.next += 1;
        let n = ints.len() + floats.len();
        if buffer.tensor.elem_count() < n {
            *buffer = Pinned::new(n.next_power_of_two(), DType::U32)?;
        }
        let bytes = buffer.all()?;
        let words = ints.iter().map(|x| x.to_ne_bytes()).chain(floats.iter().map(|x| x.to_ne_bytes()));
        bytes.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word));
        let out = [empty_on(device, ints.len(), DType::U32)?, empty_on(device, floats.len(), DType::F32)?];
        // memory comes in the order of the computing
        self.into.wait(&self.compute.record_event(None).w()?).w()?;
        let (first, second) = bytes.split_at(4 * ints.len());
        for (from, to) in [(first, &out[0]), (&second[..4 * floats.len()], &out[1])] {
            if from.is_empty() {
                continue;
            }
            // SAFETY: `to` has as many bytes; its memory is freed in the order of the computing, which waits for the copy;
            // nobody writes the buffer before its event.
            unsafe { result::memcpy_htod_async(at(to)?, from, self.into.cu_stream()) }.w()?;
        }
        let done = self.into.record_event(None).w()?;
        self.compute.wait(&done).w()?;
        buffer.busy = Some(done);
        Ok(out)
    }
}

/// Numbers on a CUDA device, in one go: `[n]` of each kind.
///
/// # Errors
/// Of the driver; another device.
pub fn upload(device: &Device, ints: &[u32], floats: &[f32]) -> Result<[Tensor; 2]> {
    let cuda = device.as_cuda_device()?;
    let mut all = UPLOADS.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    let upload = match all.entry(cuda.id()) {
        Entry::Occupied(there) => there.into_mut(),
        Entry::Vacant(new) => new.insert(Upload::new(cuda)?),
    };
    upload.send(device, ints, floats)
}
