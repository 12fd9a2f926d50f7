//! NCCL: communication between the devices of ranks, on a stream separate from the compute stream.
//!
//! The library is loaded only for multi-device runs. NCCL only moves bytes; our own kernel
//! (`crate::sum`) adds values, in rank order. Communicators are non-blocking: the host polls their
//! state, so any thread can abort after the loss of a rank.

use super::launch::at;
use super::{functions, libraries};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Bytes of a unique ID.
pub const ID: usize = 128;
/// ncclSuccess, ncclInProgress.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// ncclUint8: transfers are untyped.
const BYTE: c_int = 1;
/// NCCL_API_MAGIC, and the version matching `Config`: 2.17, also accepted by later versions.
const MAGIC: c_uint = 0xcafe_beef;
const VERSION: c_int = 21_700;
/// NCCL_CONFIG_UNDEF_INT.
const UNDEFINED: c_int = c_int::MIN;
/// How long `abort` waits for a call of another thread before aborting anyway.
const CALL: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(50);
/// Least time to connect to the other ranks.
const CONNECT: Duration = Duration::from_secs(60);

type Communicator = *mut c_void;
type Stream = *mut c_void;

/// ncclUniqueId.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; ID]);

/// ncclConfig_t of NCCL 2.17.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster: c_int,
    least: c_int,
    most: c_int,
    net: *const c_char,
}

functions! {
    /// NCCL functions.
    Api {
        version: "ncclGetVersion" as unsafe extern "C" fn(*mut c_int) -> c_int;
        id: "ncclGetUniqueId" as unsafe extern "C" fn(*mut Id) -> c_int;
        init: "ncclCommInitRankConfig"
            as unsafe extern "C" fn(*mut Communicator, c_int, Id, c_int, *mut Config) -> c_int;
        abort: "ncclCommAbort" as unsafe extern "C" fn(Communicator) -> c_int;
        look: "ncclCommGetAsyncError" as unsafe extern "C" fn(Communicator, *mut c_int) -> c_int;
        begin: "ncclGroupStart" as unsafe extern "C" fn() -> c_int;
        end: "ncclGroupEnd" as unsafe extern "C" fn() -> c_int;
        send: "ncclSend"
            as unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Communicator, Stream) -> c_int;
        receive: "ncclRecv"
            as unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Communicator, Stream) -> c_int;
        gather: "ncclAllGather"
            as unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Communicator, Stream) -> c_int;
        words: "ncclGetErrorString" as unsafe extern "C" fn(c_int) -> *const c_char;
        last: "ncclGetLastError" as unsafe extern "C" fn(Communicator) -> *const c_char;
    }
}

/// The loaded library. Repeated calls do nothing.
fn api() -> std::result::Result<&'static Api, String> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let load = || {
        let addresses = libraries::nccl(Api::SYMBOLS)?;
        // SAFETY: NCCL's functions of these names have signatures stable since nccl.h 2.14.
        let api = unsafe { Api::at(addresses) };
        let mut version = 0;
        // SAFETY: the pointer points to a c_int.
        match unsafe { (api.version)(&raw mut version) } {
            SUCCESS if version >= VERSION => Ok(api),
            _ => Err(format!(
                "libnccl.so.2 says version {version}, and ft needs 2.17 or later\n\
                 hint: a newer NCCL in front of it in LD_LIBRARY_PATH"
            )),
        }
    };
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Loads the library.
///
/// # Errors
/// The library is missing or too old; the message includes a hint.
pub fn load() -> std::result::Result<(), String> {
    api().map(drop)
}

/// A unique ID for a communicator, created by one rank for all.
///
/// # Errors
/// NCCL fails.
pub fn id() -> Result<[u8; ID]> {
    let api = api().map_err(candle_core::Error::msg)?;
    let mut id = Id([0; ID]);
    // SAFETY: the pointer points to an ID of the size written by NCCL.
    match unsafe { (api.id)(&raw mut id) } {
        SUCCESS => Ok(id.0),
        e => Err(error_of(api, std::ptr::null_mut(), e)),
    }
}

fn error_of(api: &Api, c: Communicator, e: c_int) -> candle_core::Error {
    let text = |p: *const c_char| {
        if p.is_null() {
            String::new()
        } else {
            // SAFETY: a null-terminated string from NCCL; it is copied.
            unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
        }
    };
    // SAFETY: both functions return NCCL strings, and accept a null communicator.
    let (what, last) = unsafe { (text((api.words)(e)), text((api.last)(c))) };
    let last = if last.is_empty() { last } else { format!(" ({last})") };
    candle_core::Error::msg(format!("NCCL: {what}{last}"))
}

/// A pending operation on the device.
struct Pending {
    what: String,
    begun: CudaEvent,
    done: CudaEvent,
    /// When the start was first observed.
    since: Option<Instant>,
}

/// Thread-safe handle of a communicator, to poll and abort it.
pub struct Handle {
    api: &'static Api,
    communicator: AtomicPtr<c_void>,
    /// Held during every call except abort.
    calls: Mutex<()>,
    /// How long the host side of a call may take.
    timeout: Duration,
    aborted: AtomicBool,
    /// Held during the abort.
    aborting: Mutex<()>,
    open: Mutex<VecDeque<Pending>>,
    trouble: Mutex<Option<String>>,
}

impl Handle {
    /// Aborts all pending operations and releases waiting threads. Repeated calls only wait for the first: the process
    /// may end next, and with it the driver.
    pub fn abort(&self) {
        let _first = self.aborting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        // the abort below also ends calls never answered by other ranks
        let end = Instant::now() + CALL;
        let held = loop {
            match self.calls.try_lock() {
                Ok(held) => break Some(held),
                Err(TryLockError::Poisoned(held)) => break Some(held.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => break None,
            }
        };
        let communicator = self.communicator.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !communicator.is_null() {
            // SAFETY: the pointer is a live communicator; this is its last use, except for a call blocked
            // forever.
            let _ = unsafe { (self.api.abort)(communicator) };
        }
        drop(held);
    }

    /// The first error, if any. After an error, the communicator is aborted.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the communicator was aborted.
    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Polls for errors, and for operations running longer than `timeout` since their start; aborts in
    /// both cases.
    pub fn look(&self, timeout: Duration) {
        let found = self.error().or_else(|| self.late(timeout));
        if let Some(why) = found {
            self.trouble.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
            self.abort();
        }
    }

    fn error(&self) -> Option<String> {
        let _held = self.calls.try_lock().ok()?;
        let communicator = self.communicator.load(Ordering::Acquire);
        if communicator.is_null() {
            return None;
        }
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive while `calls` is held; the pointer points to a c_int.
        let e = unsafe { (self.api.look)(communicator, &raw mut state) };
        let e = if e == SUCCESS { state } else { e };
        (e != SUCCESS && e != IN_PROGRESS).then(|| error_of(self.api, communicator, e).to_string())
    }

    fn late(&self, timeout: Duration) -> Option<String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = open.front() {
            let _ = first.done.context().bind_to_thread();
        }
        while open.front().is_some_and(|o| o.done.is_complete()) {
            open.pop_front();
        }
        let first = open.front_mut()?;
        if first.since.is_none() && first.begun.is_complete() {
            first.since = Some(Instant::now());
        }
        let late = first.since.is_some_and(|since| since.elapsed() > timeout);
        let seconds = timeout.as_secs_f64();
        late.then(|| {
            let what = &first.what;
            format!(
                "what others give for {what} does not come to its device within {seconds} s\n  \
            hint: parallel.timeout gives it longer"
            )
        })
    }

    /// Runs an NCCL call and waits until the host side has completed.
    fn call(&self, f: impl FnOnce(&Api, Communicator) -> c_int) -> Result<()> {
        let held = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let communicator = self.communicator.load(Ordering::Acquire);
        if communicator.is_null() || self.is_aborted() {
            candle_core::bail!("NCCL was given up");
        }
        let e = f(self.api, communicator);
        drop(held);
        if e != SUCCESS && e != IN_PROGRESS {
            return Err(error_of(self.api, std::ptr::null_mut(), e));
        }
        self.settle(&|| false)
    }

    /// Waits until the host side of a call has completed.
    fn settle(&self, give_up: &dyn Fn() -> bool) -> Result<()> {
        let end = Instant::now() + self.timeout;
        loop {
            let held = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let communicator = self.communicator.load(Ordering::Acquire);
            if communicator.is_null() || self.is_aborted() {
                candle_core::bail!("NCCL was given up");
            }
            let mut state = SUCCESS;
            // SAFETY: as in `error`.
            let e = unsafe { (self.api.look)(communicator, &raw mut state) };
            let e = if e == SUCCESS { state } else { e };
            match e {
                SUCCESS => return Ok(()),
                IN_PROGRESS if give_up() => candle_core::bail!("NCCL: the others do not come"),
                IN_PROGRESS if Instant::now() > end => candle_core::bail!(
                    "NCCL does not connect the ranks within {} s\n  hint: NCCL_SOCKET_IFNAME names the network \
                     interface, NCCL_DEBUG=INFO tells more, parallel.timeout gives it longer",
                    self.timeout.as_secs_f64()
                ),
                IN_PROGRESS => {}
                e => return Err(error_of(self.api, communicator, e)),
            }
            drop(held);
            std::thread::sleep(PAUSE);
        }
    }
}

/// A rank's endpoint of the communicator.
pub struct Link {
    handle: Arc<Handle>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
}

/// A peer rank, and the vector to send or receive.
pub type Piece<'a> = (usize, &'a Tensor);

impl Link {
    /// Loads all kernels and joins the communicator. Waits for all ranks until `give_up` returns true, for `timeout` or
    /// 60 s, whichever is longer.
    ///
    /// # Errors
    /// NCCL fails, or waiting was given up.
    pub fn join(
        device: &Device,
        id: [u8; ID],
        (rank, world): (usize, usize),
        timeout: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Self> {
        let api = api().map_err(candle_core::Error::msg)?;
        super::module::load_all(device.as_cuda_device()?)?;
        let compute = device.as_cuda_device()?.cuda_stream();
        compute.context().bind_to_thread().w()?;
        let stream = compute.context().new_stream().w()?;
        let number = |n: usize| c_int::try_from(n).map_err(|_| candle_core::Error::msg("too many ranks"));
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: VERSION as c_uint,
            blocking: 0,
            cluster: UNDEFINED,
            least: UNDEFINED,
            most: UNDEFINED,
            net: std::ptr::null(),
        };
        let (rank, world) = (number(rank)?, number(world)?);
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the device's context is current; the pointers stay valid while NCCL accesses them.
        let e = unsafe { (api.init)(&raw mut communicator, world, Id(id), rank, &raw mut config) };
        if e != SUCCESS && e != IN_PROGRESS {
            return Err(error_of(api, std::ptr::null_mut(), e));
        }
        let handle = Arc::new(Handle {
            api,
            communicator: AtomicPtr::new(communicator),
            calls: Mutex::default(),
            timeout: timeout.max(CONNECT),
            aborted: AtomicBool::new(false),
            aborting: Mutex::default(),
            open: Mutex::default(),
            trouble: Mutex::default(),
        });
        let link = Self { handle, compute, stream };
        link.handle.settle(give_up)?;
        Ok(link)
    }

    /// Handle for other threads.
    pub fn handle(&self) -> Arc<Handle> {
        Arc::clone(&self.handle)
    }

    /// Sends and receives, after all work queued on the compute stream and the events in `after`.
    ///
    /// # Errors
    /// NCCL or the driver fails.
    pub fn exchange(
        &self,
        what: &str,
        out: &[Piece<'_>],
        into: &[Piece<'_>],
        after: Option<&CudaEvent>,
    ) -> Result<Flight> {
        let address = |(rank, t): &Piece<'_>| Ok((*rank as c_int, at(t)?, bytes(t)));
        let out = out.iter().map(address).collect::<Result<Vec<_>>>()?;
        let into = into.iter().map(address).collect::<Result<Vec<_>>>()?;
        let stream = self.stream.cu_stream().cast::<c_void>();
        self.begin(what, after, |api, communicator| {
            // SAFETY: the addresses and sizes belong to tensors on this device, alive until the flight
            // has completed; no computation writes them meanwhile.
            unsafe {
                let mut e = (api.begin)();
                for (rank, at, bytes) in &out {
                    if e == SUCCESS || e == IN_PROGRESS {
                        e = (api.send)(*at as *const c_void, *bytes, BYTE, *rank, communicator, stream);
                    }
                }
                for (rank, at, bytes) in &into {
                    if e == SUCCESS || e == IN_PROGRESS {
                        e = (api.receive)(*at as *mut c_void, *bytes, BYTE, *rank, communicator, stream);
                    }
                }
                let end = (api.end)();
                if e == SUCCESS || e == IN_PROGRESS { end } else { e }
            }
        })
    }

    /// All-gathers parts of equal length; `mine` is this rank's slice of `to`.
    ///
    /// # Errors
    /// As [`Link::exchange`].
    pub fn all_gather(
        &self,
        what: &str,
        mine: &Tensor,
        to: &Tensor,
        after: Option<&CudaEvent>,
    ) -> Result<Flight> {
        let (from, into, bytes) = (at(mine)?, at(to)?, bytes(mine));
        let stream = self.stream.cu_stream().cast::<c_void>();
        self.begin(what, after, |api, communicator| {
            // SAFETY: as in `exchange`; `to` has room for every rank's part, and `mine` is at this rank's
            // offset.
            unsafe {
                (api.gather)(from as *const c_void, into as *mut c_void, bytes, BYTE, communicator, stream)
            }
        })
    }

    fn begin(
        &self,
        what: &str,
        after: Option<&CudaEvent>,
        f: impl FnOnce(&Api, Communicator) -> c_int,
    ) -> Result<Flight> {
        self.stream.wait(&self.compute.record_event(None).w()?).w()?;
        if let Some(after) = after {
            self.stream.wait(after).w()?;
        }
        let begun = self.stream.record_event(None).w()?;
        self.handle.call(f)?;
        let [done, seen] = [self.stream.record_event(None).w()?, self.stream.record_event(None).w()?];
        let open = Pending { what: what.into(), begun, done: seen, since: None };
        self.handle.open.lock().unwrap_or_else(PoisonError::into_inner).push_back(open);
        Ok(Flight { compute: Arc::clone(&self.compute), done })
    }

    /// Waits for all pending operations.
    ///
    /// # Errors
    /// The driver fails.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().w()
    }
}

/// Aborts pending operations.
impl Drop for Link {
    fn drop(&mut self) {
        self.handle.abort();
        // memory may be freed once the stream is idle
        let _ = self.stream.synchronize();
    }
}

/// A pending operation between devices.
#[derive(Debug)]
pub struct Flight {
    compute: Arc<CudaStream>,
    done: CudaEvent,
}

impl Flight {
    /// Makes the compute stream wait for the operation.
    ///
    /// # Errors
    /// The driver fails.
    pub fn wait(&self) -> Result<()> {
        self.compute.wait(&self.done).w()
    }
}

fn bytes(t: &Tensor) -> usize {
    t.elem_count() * t.dtype().size_in_bytes()
}

/// An uninitialized f32 tensor of `n` values on a device.
///
/// # Errors
/// Out of memory.
pub fn room(device: &Device, n: usize) -> Result<Tensor> {
    super::launch::empty_on(device, n, DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    extern "C" fn in_progress(_: Communicator, state: *mut c_int) -> c_int {
        // SAFETY: `settle` passes a c_int.
        unsafe { *state = IN_PROGRESS };
        SUCCESS
    }

    static ABORT: Mutex<Option<(Sender<()>, Receiver<()>)>> = Mutex::new(None);

    /// Says that it has begun, and ends when told.
    extern "C" fn abort(_: Communicator) -> c_int {
        if let Some((begun, end)) = ABORT.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = begun.send(());
            let _ = end.recv();
        }
        SUCCESS
    }

    /// A communicator of a library that never finishes a call, and gives up at once.
    fn handle() -> Arc<Handle> {
        let address = |name: &&str| match *name {
            "ncclCommGetAsyncError" => in_progress as *mut c_void,
            _ => abort as *mut c_void,
        };
        Arc::new(Handle {
            // SAFETY: the tests call `look` and `abort` alone, which have these types.
            api: Box::leak(Box::new(unsafe { Api::at(Api::SYMBOLS.each_ref().map(address)) })),
            communicator: AtomicPtr::new(std::ptr::dangling_mut()),
            calls: Mutex::default(),
            timeout: Duration::ZERO,
            aborted: AtomicBool::new(false),
            aborting: Mutex::default(),
            open: Mutex::default(),
            trouble: Mutex::default(),
        })
    }

    #[test]
    fn ranks_that_never_connect_are_given_up() {
        let said = handle().settle(&|| false).expect_err("connected").to_string();
        assert!(said.contains("does not connect the ranks within 0 s\n  hint: NCCL_SOCKET_IFNAME"), "{said}");
        let said = handle().settle(&|| true).expect_err("connected").to_string();
        assert!(said.contains("the others do not come"), "{said}");
    }

    #[test]
    fn a_second_abort_waits_for_the_first() {
        let (handle, (begun, begins), (end, ends)) = (handle(), channel(), channel());
        *ABORT.lock().unwrap_or_else(PoisonError::into_inner) = Some((begun, ends));
        let first = std::thread::spawn({
            let handle = Arc::clone(&handle);
            move || handle.abort()
        });
        begins.recv().expect("an abort");
        assert!(handle.is_aborted() && handle.aborting.try_lock().is_err());
        end.send(()).expect("a thread");
        first.join().expect("no panic");
        handle.abort();
    }
}
