//! Values that cross between the host and a device beside its computing: buffers in page-locked memory, and a stream each
//! way. A copy from or to memory that is not page-locked goes through a buffer of the driver's, and the host waits for it.
//!
//! Order is made by events alone: what is fetched waits for what the device was asked to compute before, what it is asked
//! afterwards waits for what was sent, and the host waits for a buffer before it reads or writes there.

use super::launch::{at, empty_on};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::cuda_backend::{DeviceId, WrapErr};
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// `CU_MEMHOSTREGISTER_PORTABLE`: locked for all devices.
const PORTABLE: u32 = 1;

/// Where the values of a contiguous tensor on the host begin.
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

/// Page-locked memory of a tensor on the host, while it lives.
#[derive(Debug)]
pub struct Locked {
    _tensor: Tensor,
    at: *mut u8,
}

// SAFETY: the pointer is into the tensor's own memory; who holds the buffer exclusively may use it from any thread.
unsafe impl Send for Locked {}
// SAFETY: it is read, and given to the driver, but for nothing else.
unsafe impl Sync for Locked {}

impl Locked {
    /// Locks all values of a tensor, for `device`.
    ///
    /// # Errors
    /// Memory that the system does not lock.
    pub fn new(t: &Tensor, device: &Device) -> Result<Self> {
        device.as_cuda_device()?.cuda_stream().context().bind_to_thread().w()?;
        let (at, bytes) = (host_address(t)?, bytes_of(t));
        // SAFETY: the memory is the tensor's, which is dropped after it is unlocked.
        let locked = unsafe { sys::cuMemHostRegister_v2(at.cast::<c_void>(), bytes, PORTABLE).result() };
        locked.map_err(|e| {
            let hint = "\n  hint: memory.pin = false, or a higher limit of locked memory (`ulimit -l`)";
            candle_core::Error::Msg(format!("{bytes} bytes of the host cannot be page-locked: {e}{hint}"))
        })?;
        Ok(Self { _tensor: t.clone(), at })
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: it was locked by `new`. A failure leaves it locked until the process ends, which harms nobody.
        let _ = unsafe { sys::cuMemHostUnregister(self.at.cast::<c_void>()).result() };
    }
}

/// A buffer on the host `[n]`, page-locked where that is asked for.
#[derive(Debug)]
struct Pinned {
    /// When the last copy from or to it is done.
    busy: Option<CudaEvent>,
    locked: Option<Locked>,
    tensor: Tensor,
    at: *mut u8,
}

// SAFETY: as of what locks it.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(device: &Device, n: usize, dtype: DType, pin: bool) -> Result<Self> {
        let tensor = Tensor::zeros(n.max(1), dtype, &Device::Cpu)?;
        let locked = pin.then(|| Locked::new(&tensor, device)).transpose()?;
        Ok(Self { at: host_address(&tensor)?, tensor, locked, busy: None })
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
        let _ = self.busy.take().map(|e| e.synchronize());
        drop(self.locked.take());
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
    /// For pieces of `n` values: of f32 from the device, and of `dtype` to it; page-locked or not.
    ///
    /// # Errors
    /// No memory; another device than CUDA.
    pub fn new(device: &Device, n: usize, dtype: DType, pin: bool) -> Result<Self> {
        let compute = device.as_cuda_device()?.cuda_stream();
        let stream = || compute.context().new_stream().w();
        let one = |dtype| Pinned::new(device, n, dtype, pin);
        let pair = |dtype| Ok::<_, candle_core::Error>([one(dtype)?, one(dtype)?]);
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

/// What each device has, made when it is first needed. What one of them waits for may be another's to do: it is not waited
/// for with all of them locked.
struct Each<T>(Mutex<Option<HashMap<DeviceId, Arc<T>>>>);

impl<T> Each<T> {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn of(&self, device: DeviceId, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
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

    fn send(&mut self, device: &Device, ints: &[u32], floats: &[f32]) -> Result<[Tensor; 2]> {
        let buffer = &mut self.buffers[self.next % 2];
        self.next += 1;
        let n = ints.len() + floats.len();
        if buffer.tensor.elem_count() < n {
            *buffer = Pinned::new(device, n.next_power_of_two(), DType::U32, true)?;
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
    let upload = UPLOADS.of(cuda.id(), || Ok(Mutex::new(Upload::new(device)?)))?;
    let mut upload = upload.lock().unwrap_or_else(PoisonError::into_inner);
    upload.send(device, ints, floats)
}

/// The streams that whole tensors cross by, beside that which computes.
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

/// A copy that goes on.
#[derive(Debug)]
pub struct Crossing {
    ways: Arc<Ways>,
    done: CudaEvent,
}

impl Crossing {
    /// Lets what is computed from now on wait for it.
    ///
    /// # Errors
    /// Of the driver.
    pub fn wait(&self) -> Result<()> {
        self.ways.compute.wait(&self.done).w()
    }

    /// When it is done.
    pub fn event(&self) -> &CudaEvent {
        &self.done
    }
}

/// Begins to copy a vector between the host and a device, after what the device was asked to compute; `None` where both
/// are the host. Both tensors stay until the copy was waited for.
///
/// # Errors
/// Of the driver; vectors of different kinds.
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
    // SAFETY: both tensors have as many bytes, and stay until the copy was waited for, by the callers. What is computed
    // meanwhile writes neither.
    unsafe {
        if out {
            let host = std::slice::from_raw_parts_mut(host_address(to)?, bytes);
            result::memcpy_dtoh_async(host, Staging::address(from)?, stream.cu_stream()).w()?;
        } else {
            let host = std::slice::from_raw_parts(host_address(from)?.cast_const(), bytes);
            result::memcpy_htod_async(Staging::address(to)?, host, stream.cu_stream()).w()?;
        }
    }
    let done = stream.record_event(None).w()?;
    Ok(Some(Crossing { ways, done }))
}

/// Memory of the host that nobody uses: it is not given back, for copies may still go on.
static ROOMS: Each<Mutex<Vec<Pinned>>> = Each::new();

/// Memory of the host for as long as somebody has it.
#[derive(Debug)]
pub struct Lent {
    rooms: Arc<Mutex<Vec<Pinned>>>,
    room: Option<Pinned>,
}

impl Lent {
    /// For as many values as a tensor of a device has.
    ///
    /// # Errors
    /// No memory, or none that can be locked.
    pub fn take(like: &Tensor, pin: bool) -> Result<Self> {
        let rooms = ROOMS.of(like.device().as_cuda_device()?.id(), || Ok(Mutex::default()))?;
        let mut free = rooms.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = |room: &Pinned| room.tensor.dtype() == like.dtype() && room.locked.is_some() == pin;
        let fits = |room: &Pinned| mine(room) && room.tensor.elem_count() >= like.elem_count();
        let room = match free.iter().position(fits) {
            Some(at) => free.swap_remove(at),
            None => {
                // one that is too small makes room for it, once no copy uses it
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

    /// Its first `n` values.
    ///
    /// # Errors
    /// More than there are.
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
