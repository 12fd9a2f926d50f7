//! Host-device transfers overlapped with compute: page-locked buffers, and one stream per direction.
//! Without page-locked memory, the driver copies through its own buffer, and the host blocks.
//!
//! Only events order the work: a fetch waits for compute queued before it, compute queued later waits for
//! uploads, and the host waits for a buffer before accessing it.

use super::launch::{at, empty_on};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, result, sys,
};
use candle_core::cuda_backend::{DeviceId, WrapErr};
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use ft_base::terminal::warn;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, Once, PoisonError};

/// `CU_MEMHOSTREGISTER_PORTABLE`: page-locked for all devices.
const PORTABLE: u32 = 1;

/// Host address of a contiguous tensor.
fn host_address(t: &Tensor) -> Result<*mut u8> {
    if !t.is_contiguous() {
        candle_core::bail!("staging: a tensor that is not contiguous: {:?}", t.shape());
    }
    let (storage, layout) = t.storage_and_layout();
    let at = match &*storage {
        Storage::Cpu(CpuStorage::U8(v)) => v.as_ptr().cast::<u8>(),
        Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr().cast(),
        Storage::Cpu(CpuStorage::F64(v)) => v.as_ptr().cast(),
        Storage::Cpu(CpuStorage::BF16(v)) => v.as_ptr().cast(),
        Storage::Cpu(CpuStorage::F16(v)) => v.as_ptr().cast(),
        Storage::Cpu(CpuStorage::U32(v)) => v.as_ptr().cast(),
        _ => candle_core::bail!("staging of {:?} of {:?}", t.dtype(), t.device()),
    };
    Ok(at.wrapping_add(layout.start_offset() * t.dtype().size_in_bytes()).cast_mut())
}

fn bytes_of(t: &Tensor) -> usize {
    t.elem_count() * t.dtype().size_in_bytes()
}

/// On an error, waits for the copies of a stream: their caller may free the memory.
fn settled<T>(outcome: std::result::Result<T, DriverError>, stream: &CudaStream) -> Result<T> {
    if outcome.is_err() {
        let _ = stream.synchronize();
    }
    outcome.w()
}

/// Marks the end of a copy.
fn mark(stream: &CudaStream) -> Result<CudaEvent> {
    settled(stream.record_event(None), stream)
}

/// Page-locks the memory of a host tensor until dropped.
#[derive(Debug)]
pub struct Locked {
    _tensor: Tensor,
    at: *mut u8,
    context: Arc<CudaContext>,
}

// SAFETY: the pointer points to the tensor's own memory, usable from any thread by the exclusive owner of
// the buffer.
unsafe impl Send for Locked {}
// SAFETY: shared references only read the pointer or pass it to the driver.
unsafe impl Sync for Locked {}

impl Locked {
    /// Page-locks a tensor for `device`. If the system refuses, the memory stays pageable: copies take
    /// longer and give the same values. The first refusal of the process is a warning.
    ///
    /// # Errors
    /// Not a CUDA device, or its driver fails.
    pub fn new(t: &Tensor, device: &Device) -> Result<Option<Self>> {
        static TOLD: Once = Once::new();
        let context = Arc::clone(device.as_cuda_device()?.cuda_stream().context());
        context.bind_to_thread().w()?;
        let (at, bytes) = (host_address(t)?, bytes_of(t));
        // SAFETY: the memory belongs to the tensor, dropped only after unlocking.
        let locked = unsafe { sys::cuMemHostRegister_v2(at.cast::<c_void>(), bytes, PORTABLE).result() };
        if let Err(e) = locked {
            TOLD.call_once(|| {
                warn(&format!(
                    "{bytes} bytes of the host cannot be page-locked ({:?}): copies from and to the device \
                     take pageable memory, slower and with the same numbers\n\
                     hint: a higher limit of locked memory (`ulimit -l`; docker: --ulimit memlock=-1)",
                    e.0
                ));
            });
            return Ok(None);
        }
        Ok(Some(Self { _tensor: t.clone(), at, context }))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Registered, the addresses would keep their old pages after the allocator maps new ones.
        let _ = self.context.bind_to_thread();
        // SAFETY: locked by `new`.
        let _ = unsafe { sys::cuMemHostUnregister(self.at.cast::<c_void>()).result() };
    }
}

/// A host buffer of `n` values, optionally page-locked.
#[derive(Debug)]
struct Pinned {
    /// Completion of the last copy from or to the buffer.
    busy: Option<CudaEvent>,
    /// Whether a page lock was requested; the system may have refused it.
    pin: bool,
    locked: Option<Locked>,
    tensor: Tensor,
    at: *mut u8,
}

// SAFETY: as for `Locked`.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(device: &Device, n: usize, dtype: DType, pin: bool) -> Result<Self> {
        let tensor = Tensor::zeros(n.max(1), dtype, &Device::Cpu)?;
        let locked = if pin { Locked::new(&tensor, device)? } else { None };
        Ok(Self { at: host_address(&tensor)?, tensor, pin, locked, busy: None })
    }

    /// The first `len` values, after waiting for pending copies.
    fn free(&mut self, len: usize) -> Result<Tensor> {
        // most copies are complete by now, so poll before blocking
        if let Some(event) = self.busy.take()
            && !event.try_is_complete().w()?
        {
            event.synchronize().w()?;
        }
        self.tensor.narrow(0, 0, len)
    }

    /// As many bytes as in `like`.
    fn bytes(&mut self, like: &Tensor) -> Result<&mut [u8]> {
        if like.dtype() != self.tensor.dtype() || like.elem_count() > self.tensor.elem_count() {
            candle_core::bail!("staging: {:?} {:?} by way of {:?}", like.shape(), like.dtype(), self.tensor);
        }
        // SAFETY: the length was checked; callers have called `free`, so nothing else accesses the
        // memory.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at, bytes_of(like)) })
    }

    /// All bytes, after waiting for pending copies.
    fn all(&mut self) -> Result<&mut [u8]> {
        self.free(0)?;
        // SAFETY: this is the tensor's whole memory; the last copy is complete, so nothing else accesses
        // it.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at, bytes_of(&self.tensor)) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.busy.take().map(|e| e.synchronize());
        drop(self.locked.take());
    }
}

/// Double buffers and one stream per direction.
#[derive(Debug)]
pub struct Staging {
    compute: Arc<CudaStream>,
    out: Arc<CudaStream>,
    into: Arc<CudaStream>,
    fetched: [Pinned; 2],
    sent: [Pinned; 2],
}

impl Staging {
    /// Creates buffers for pieces of `n` values: f32 from the device, `dtype` to the device; page-locked
    /// if `pin`.
    ///
    /// # Errors
    /// Out of memory, or not a CUDA device.
    pub fn new(device: &Device, n: usize, dtype: DType, pin: bool) -> Result<Self> {
        let compute = device.as_cuda_device()?.cuda_stream();
        let stream = || compute.context().new_stream().w();
        let one = |dtype| Pinned::new(device, n, dtype, pin);
        let pair = |dtype| Ok::<_, candle_core::Error>([one(dtype)?, one(dtype)?]);
        let (out, into) = (stream()?, stream()?);
        Ok(Self { out, into, fetched: pair(DType::F32)?, sent: pair(dtype)?, compute })
    }

    /// Makes subsequent fetches wait for all compute queued so far.
    pub fn begin(&self) -> Result<()> {
        self.out.wait(&self.compute.record_event(None).w()?).w()
    }

    /// Makes subsequent compute wait for all pieces sent so far.
    pub fn end(&self) -> Result<()> {
        self.compute.wait(&self.into.record_event(None).w()?).w()
    }

    fn address(t: &Tensor) -> Result<u64> {
        if !t.is_contiguous() {
            candle_core::bail!("staging: a tensor that is not contiguous: {:?}", t.shape());
        }
        at(t)
    }

    /// Starts copying `from` `[len]` to the host, as piece `i`.
    ///
    /// # Errors
    /// The driver fails, or the piece is larger than a buffer.
    pub fn fetch(&mut self, i: usize, from: &Tensor) -> Result<()> {
        let at = Self::address(from)?;
        let buffer = &mut self.fetched[i % 2];
        buffer.free(0)?;
        // SAFETY: the caller keeps `from` alive until the copy has completed; the buffer is free and
        // large enough.
        unsafe { result::memcpy_dtoh_async(buffer.bytes(from)?, at, self.out.cu_stream()) }.w()?;
        buffer.busy = Some(mark(&self.out)?);
        Ok(())
    }

    /// Piece `i` of `len` values, after waiting for the copy.
    pub fn fetched(&mut self, i: usize, len: usize) -> Result<Tensor> {
        self.fetched[i % 2].free(len)
    }

    /// Host buffer for piece `i` of `len` values to send.
    pub fn to_send(&mut self, i: usize, len: usize) -> Result<Tensor> {
        self.sent[i % 2].free(len)
    }

    /// Starts copying piece `i` into `to` `[len]`. The caller must have waited for all compute using
    /// `to`.
    ///
    /// # Errors
    /// The driver fails, or the piece is larger than a buffer.
    pub fn send(&mut self, i: usize, to: &Tensor) -> Result<()> {
        let at = Self::address(to)?;
        let buffer = &mut self.sent[i % 2];
        // SAFETY: `to` is a compute buffer that outlives the copy; the host does not write the buffer
        // before the event.
        unsafe { result::memcpy_htod_async(at, buffer.bytes(to)?, self.into.cu_stream()) }.w()?;
        buffer.busy = Some(mark(&self.into)?);
        Ok(())
    }
}

/// Uploads the lists of a micro-batch through double buffers on a separate stream. The host does not
/// block; compute queued later waits for the copy.
struct Upload {
    compute: Arc<CudaStream>,
    into: Arc<CudaStream>,
    buffers: [Pinned; 2],
    next: usize,
}

/// One value per device, made on first use under the map's lock. The lock is free before the value is used.
pub(crate) struct Each<T>(Mutex<Option<HashMap<DeviceId, Arc<T>>>>);

impl<T> Each<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn of(&self, device: DeviceId, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match all.get_or_insert_default().entry(device) {
            Entry::Occupied(there) => Arc::clone(there.get()),
            Entry::Vacant(new) => Arc::clone(new.insert(Arc::new(make()?))),
        })
    }
}

static UPLOADS: Each<Mutex<Upload>> = Each::new();

impl Upload {
    fn new(device: &Device) -> Result<Self> {
        let compute = device.as_cuda_device()?.cuda_stream();
        let into = compute.context().new_stream().w()?;
        let one = || Pinned::new(device, 1, DType::U32, true);
        Ok(Self { into, compute, buffers: [one()?, one()?], next: 0 })
    }

    fn send(&mut self, device: &Device, ints: &[u32], floats: &[Vec<f32>]) -> Result<[Tensor; 2]> {
        let buffer = &mut self.buffers[self.next % 2];
        self.next += 1;
        let count = floats.iter().map(Vec::len).sum();
        let n = ints.len() + count;
        if buffer.tensor.elem_count() < n {
            *buffer = Pinned::new(device, n.next_power_of_two(), DType::U32, true)?;
        }
        let bytes = buffer.all()?;
        let (of_ints, mut rest) = bytes.as_chunks_mut::<4>().0.split_at_mut(ints.len());
        of_ints.iter_mut().zip(ints).for_each(|(to, x)| *to = x.to_ne_bytes());
        for list in floats {
            let (own, others) = rest.split_at_mut(list.len());
            own.iter_mut().zip(list).for_each(|(to, x)| *to = x.to_ne_bytes());
            rest = others;
        }
        let out = [empty_on(device, ints.len(), DType::U32)?, empty_on(device, count, DType::F32)?];
        // the allocation above is ordered on the compute stream
        self.into.wait(&self.compute.record_event(None).w()?).w()?;
        let (first, second) = bytes.split_at(4 * ints.len());
        for (from, to) in [(first, &out[0]), (&second[..4 * count], &out[1])] {
            if from.is_empty() {
                continue;
            }
            // SAFETY: sizes match; `to` is freed in order of the compute stream, which waits for the
            // copy; the host does not write the buffer before its event.
            let sent = unsafe { result::memcpy_htod_async(at(to)?, from, self.into.cu_stream()) };
            settled(sent, &self.into)?;
        }
        let done = mark(&self.into)?;
        self.compute.wait(&done).w()?;
        buffer.busy = Some(done);
        Ok(out)
    }
}

/// Uploads the integers and the floats, end to end, to a CUDA device in one step, `[n]` each.
///
/// # Errors
/// The driver fails, or not a CUDA device.
pub fn upload(device: &Device, ints: &[u32], floats: &[Vec<f32>]) -> Result<[Tensor; 2]> {
    let cuda = device.as_cuda_device()?;
    let upload = UPLOADS.of(cuda.id(), || Ok(Mutex::new(Upload::new(device)?)))?;
    let mut upload = upload.lock().unwrap_or_else(PoisonError::into_inner);
    upload.send(device, ints, floats)
}

/// Streams for whole-tensor copies, next to the compute stream.
#[derive(Debug)]
struct Ways {
    compute: Arc<CudaStream>,
    out: Arc<CudaStream>,
    into: Arc<CudaStream>,
}

static WAYS: Each<Ways> = Each::new();

impl Ways {
    fn of(device: &Device) -> Result<Arc<Self>> {
        let cuda = device.as_cuda_device()?;
        WAYS.of(cuda.id(), || {
            let compute = cuda.cuda_stream();
            let stream = || compute.context().new_stream().w();
            let (out, into) = (stream()?, stream()?);
            Ok(Self { compute, out, into })
        })
    }
}

/// A pending copy.
#[derive(Debug)]
pub struct Crossing {
    ways: Arc<Ways>,
    done: CudaEvent,
}

impl Crossing {
    /// Makes the compute stream wait for the copy.
    ///
    /// # Errors
    /// The driver fails.
    pub fn wait(&self) -> Result<()> {
        self.ways.compute.wait(&self.done).w()
    }

    /// Completion event.
    pub fn event(&self) -> &CudaEvent {
        &self.done
    }
}

/// Starts copying a vector between host and device, after all compute queued so far; `None` if both are
/// on the host. The caller keeps both tensors alive until the copy has completed.
///
/// # Errors
/// The driver fails, or the vectors differ in length or dtype.
pub fn copy(from: &Tensor, to: &Tensor) -> Result<Option<Crossing>> {
    let (device, out) = match (from.device(), to.device()) {
        (Device::Cuda(_), Device::Cpu) => (from.device(), true),
        (Device::Cpu, Device::Cuda(_)) => (to.device(), false),
        _ => return Ok(None),
    };
    if from.dtype() != to.dtype() || from.elem_count() != to.elem_count() {
        candle_core::bail!("staging: {:?} {:?} into {:?}", from.shape(), from.dtype(), to.shape());
    }
    if from.elem_count() == 0 {
        return Ok(None);
    }
    let ways = Ways::of(device)?;
    let stream = if out { &ways.out } else { &ways.into };
    stream.wait(&ways.compute.record_event(None).w()?).w()?;
    let bytes = bytes_of(from);
    // SAFETY: sizes match; by contract both tensors outlive the copy, and no computation writes them
    // meanwhile.
    unsafe {
        if out {
            let host = std::slice::from_raw_parts_mut(host_address(to)?, bytes);
            result::memcpy_dtoh_async(host, Staging::address(from)?, stream.cu_stream()).w()?;
        } else {
            let host = std::slice::from_raw_parts(host_address(from)?.cast_const(), bytes);
            result::memcpy_htod_async(Staging::address(to)?, host, stream.cu_stream()).w()?;
        }
    }
    let done = mark(stream)?;
    Ok(Some(Crossing { ways, done }))
}

/// Free list of host buffers. Returned buffers stay allocated, since copies may still be pending.
static ROOMS: Each<Mutex<Vec<Pinned>>> = Each::new();

/// A host buffer borrowed from the free list, returned on drop.
#[derive(Debug)]
pub struct Lent {
    rooms: Arc<Mutex<Vec<Pinned>>>,
    room: Option<Pinned>,
}

impl Lent {
    /// Borrows a buffer with room for the values of `like`, a device tensor.
    ///
    /// # Errors
    /// Out of memory, or the driver fails.
    pub fn take(like: &Tensor, pin: bool) -> Result<Self> {
        let rooms = ROOMS.of(like.device().as_cuda_device()?.id(), || Ok(Mutex::default()))?;
        let mut free = rooms.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = |room: &Pinned| room.tensor.dtype() == like.dtype() && room.pin == pin;
        let fits = |room: &Pinned| mine(room) && room.tensor.elem_count() >= like.elem_count();
        let room = match free.iter().position(fits) {
            Some(at) => free.swap_remove(at),
            None => {
                // drop a buffer that is too small, after pending copies
                if let Some(at) = free.iter().position(mine) {
                    let ways = Ways::of(like.device())?;
                    ways.into.synchronize().w()?;
                    ways.out.synchronize().w()?;
                    drop(free.swap_remove(at));
                }
                Pinned::new(like.device(), like.elem_count(), like.dtype(), pin)?
            }
        };
        drop(free);
        Ok(Self { rooms, room: Some(room) })
    }

    /// The first `n` values.
    ///
    /// # Errors
    /// The buffer is smaller.
    pub fn vector(&self, n: usize) -> Result<Tensor> {
        match &self.room {
            Some(room) => room.tensor.narrow(0, 0, n),
            None => candle_core::bail!("memory that was given back"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner).extend(self.room.take());
    }
}
