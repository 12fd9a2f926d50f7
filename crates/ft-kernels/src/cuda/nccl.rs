//! NCCL: values between the devices of ranks, on a stream beside that which computes.
//!
//! It is loaded when several devices are to work together. Here it carries bytes; what is added is added by a kernel of
//! our own (`kernel::sum`), in the order of the ranks. A communicator never blocks the host: what it is in is asked for, so
//! that a rank that is lost can be given up, by another thread too.

use super::launch::at;
use super::libraries;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Bytes of what ranks find one another by.
pub const ID: usize = 128;
/// ncclSuccess, ncclInProgress.
const DONE: c_int = 0;
const GOES_ON: c_int = 7;
/// ncclUint8: what goes are bytes.
const BYTE: c_int = 1;
/// NCCL_API_MAGIC, and the version whose configuration is `Config`: 2.17, which later ones take too.
const MAGIC: c_uint = 0xcafe_beef;
const VERSION: c_int = 21_700;
/// NCCL_CONFIG_UNDEF_INT.
const UNSAID: c_int = c_int::MIN;
/// How long another thread's call is waited for before its communicator is aborted all the same.
const CALL: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(50);

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

/// NCCL's functions.
struct Api {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    id: unsafe extern "C" fn(*mut Id) -> c_int,
    init: unsafe extern "C" fn(*mut Communicator, c_int, Id, c_int, *mut Config) -> c_int,
    abort: unsafe extern "C" fn(Communicator) -> c_int,
    look: unsafe extern "C" fn(Communicator, *mut c_int) -> c_int,
    begin: unsafe extern "C" fn() -> c_int,
    end: unsafe extern "C" fn() -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Communicator, Stream) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Communicator, Stream) -> c_int,
    gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Communicator, Stream) -> c_int,
    words: unsafe extern "C" fn(c_int) -> *const c_char,
    last: unsafe extern "C" fn(Communicator) -> *const c_char,
}

const NAMES: [&str; 12] = [
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommAbort",
    "ncclCommGetAsyncError",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclSend",
    "ncclRecv",
    "ncclAllGather",
    "ncclGetErrorString",
    "ncclGetLastError",
];

/// The library; a second call does nothing.
fn api() -> std::result::Result<&'static Api, String> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let load = || {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = libraries::nccl(NAMES)?;
        // SAFETY: the addresses are of NCCL's functions of these names, whose parameters nccl.h has since 2.14.
        #[expect(clippy::missing_transmute_annotations, reason = "the fields have the types")]
        let api = unsafe {
            use std::mem::transmute as of;
            Api {
                version: of::<*mut c_void, _>(a),
                id: of::<*mut c_void, _>(b),
                init: of::<*mut c_void, _>(c),
                abort: of::<*mut c_void, _>(d),
                look: of::<*mut c_void, _>(e),
                begin: of::<*mut c_void, _>(f),
                end: of::<*mut c_void, _>(g),
                send: of::<*mut c_void, _>(h),
                receive: of::<*mut c_void, _>(i),
                gather: of::<*mut c_void, _>(j),
                words: of::<*mut c_void, _>(k),
                last: of::<*mut c_void, _>(l),
            }
        };
        let mut version = 0;
        // SAFETY: the pointer is to a number.
        match unsafe { (api.version)(&raw mut version) } {
            DONE if version >= VERSION => Ok(api),
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
/// It is not there, or too old; with what to do.
pub fn load() -> std::result::Result<(), String> {
    api().map(drop)
}

/// A number that ranks find one another by: one of them makes it for all.
///
/// # Errors
/// What NCCL says.
pub fn id() -> Result<[u8; ID]> {
    let api = api().map_err(candle_core::Error::msg)?;
    let mut id = Id([0; ID]);
    // SAFETY: the pointer is to as many bytes as NCCL writes.
    match unsafe { (api.id)(&raw mut id) } {
        DONE => Ok(id.0),
        e => Err(said(api, std::ptr::null_mut(), e)),
    }
}

fn said(api: &Api, c: Communicator, e: c_int) -> candle_core::Error {
    let text = |p: *const c_char| match p.is_null() {
        true => String::new(),
        // SAFETY: a text of NCCL's that ends with a zero; it is copied.
        false => unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned(),
    };
    // SAFETY: both give texts of NCCL's; no communicator is one too.
    let (what, last) = unsafe { (text((api.words)(e)), text((api.last)(c))) };
    let last = if last.is_empty() { last } else { format!(" ({last})") };
    candle_core::Error::msg(format!("NCCL: {what}{last}"))
}

/// What goes on on the device.
struct Open {
    what: String,
    begun: CudaEvent,
    done: CudaEvent,
    /// When it was seen to have begun.
    since: Option<Instant>,
}

/// What other threads may do with a communicator: look at it, and give it up.
pub struct Handle {
    api: &'static Api,
    communicator: AtomicPtr<c_void>,
    /// Held in every call but that which aborts.
    calls: Mutex<()>,
    aborted: AtomicBool,
    open: Mutex<VecDeque<Open>>,
    trouble: Mutex<Option<String>>,
}

impl Handle {
    /// Gives everything up that goes on; whoever waits for the device goes on. A second call does nothing.
    pub fn abort(&self) {
        if self.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        // a call that others never answer to is ended by this one
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
            // SAFETY: it is one, and this is its last use but by a call that does not come back by itself.
            let _ = unsafe { (self.api.abort)(communicator) };
        }
        drop(held);
    }

    /// What went wrong, if anything did; and then nothing goes on any more.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it was given up.
    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Looks whether something went wrong, or takes longer than `timeout` once it has begun; then all is given up.
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
        let mut state = DONE;
        // SAFETY: the communicator lives while its calls are held; the pointer is to a number.
        let e = unsafe { (self.api.look)(communicator, &raw mut state) };
        let e = if e == DONE { state } else { e };
        (e != DONE && e != GOES_ON).then(|| said(self.api, communicator, e).to_string())
    }

    fn late(&self, timeout: Duration) -> Option<String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
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
            format!("what others give for {what} does not come to its device within {seconds} s\n  hint: parallel.timeout gives it longer")
        })
    }

    /// A call of NCCL's, and all that it begins on the host.
    fn call(&self, f: impl FnOnce(&Api, Communicator) -> c_int) -> Result<()> {
        let held = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let communicator = self.communicator.load(Ordering::Acquire);
        if communicator.is_null() || self.is_aborted() {
            candle_core::bail!("NCCL was given up");
        }
        let e = f(self.api, communicator);
        drop(held);
        if e != DONE && e != GOES_ON {
            return Err(said(self.api, std::ptr::null_mut(), e));
        }
        self.settle(&|| false)
    }

    /// Waits until the host's part of a call is over.
    fn settle(&self, give_up: &dyn Fn() -> bool) -> Result<()> {
        loop {
            let held = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let communicator = self.communicator.load(Ordering::Acquire);
            if communicator.is_null() || self.is_aborted() {
                candle_core::bail!("NCCL was given up");
            }
            let mut state = DONE;
            // SAFETY: as in `error`.
            let e = unsafe { (self.api.look)(communicator, &raw mut state) };
            let e = if e == DONE { state } else { e };
            match e {
                DONE => return Ok(()),
                GOES_ON if !give_up() => {}
                GOES_ON => candle_core::bail!("NCCL: the others do not come"),
                e => return Err(said(self.api, communicator, e)),
            }
            drop(held);
            std::thread::sleep(PAUSE);
        }
    }
}

/// A rank's end of what goes between devices.
pub struct Link {
    handle: Arc<Handle>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
}

/// The bytes of a vector that go to a rank, or come from it.
pub type Piece<'a> = (usize, &'a Tensor);

impl Link {
    /// Meets the other ranks; `give_up` is asked whether to wait on.
    ///
    /// # Errors
    /// What NCCL says; it was given up.
    pub fn join(
        device: &Device,
        id: [u8; ID],
        (rank, world): (usize, usize),
        give_up: &dyn Fn() -> bool,
    ) -> Result<Self> {
        let api = api().map_err(candle_core::Error::msg)?;
        let compute = device.as_cuda_device()?.cuda_stream();
        compute.context().bind_to_thread().w()?;
        let stream = compute.context().new_stream().w()?;
        let number = |n: usize| c_int::try_from(n).map_err(|_| candle_core::Error::msg("too many ranks"));
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: VERSION as c_uint,
            blocking: 0,
            cluster: UNSAID,
            least: UNSAID,
            most: UNSAID,
            net: std::ptr::null(),
        };
        let (rank, world) = (number(rank)?, number(world)?);
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the device's context is current; the pointers are to what NCCL reads and writes meanwhile.
        let e = unsafe { (api.init)(&raw mut communicator, world, Id(id), rank, &raw mut config) };
        if e != DONE && e != GOES_ON {
            return Err(said(api, std::ptr::null_mut(), e));
        }
        let handle = Arc::new(Handle {
            api,
            communicator: AtomicPtr::new(communicator),
            calls: Mutex::default(),
            aborted: AtomicBool::new(false),
            open: Mutex::default(),
            trouble: Mutex::default(),
        });
        let link = Self { handle, compute, stream };
        link.handle.settle(give_up)?;
        Ok(link)
    }

    /// What other threads may do with it.
    pub fn handle(&self) -> Arc<Handle> {
        Arc::clone(&self.handle)
    }

    /// Sends and receives, after what was computed so far and what `after` brings.
    ///
    /// # Errors
    /// Of NCCL and the driver.
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
            // SAFETY: the addresses are of as many bytes on this device, which stay until the flight was waited for; nothing that
            // is computed meanwhile writes them.
            unsafe {
                let mut e = (api.begin)();
                for (rank, at, bytes) in &out {
                    if e == DONE || e == GOES_ON {
                        e = (api.send)(*at as *const c_void, *bytes, BYTE, *rank, communicator, stream);
                    }
                }
                for (rank, at, bytes) in &into {
                    if e == DONE || e == GOES_ON {
                        e = (api.receive)(*at as *mut c_void, *bytes, BYTE, *rank, communicator, stream);
                    }
                }
                let end = (api.end)();
                if e == DONE || e == GOES_ON { end } else { e }
            }
        })
    }

    /// Gathers parts of one length, `mine` among them where it stands in `to`.
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
            // SAFETY: as in `exchange`; `to` has as many bytes for each rank, and this one's stand where they belong.
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
        let open = Open { what: what.into(), begun, done: seen, since: None };
        self.handle.open.lock().unwrap_or_else(PoisonError::into_inner).push_back(open);
        Ok(Flight { compute: Arc::clone(&self.compute), done })
    }

    /// Waits until nothing goes on.
    ///
    /// # Errors
    /// Of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().w()
    }
}

/// A rank that goes gives up what goes on.
impl Drop for Link {
    fn drop(&mut self) {
        self.handle.abort();
        // its memory may go when the stream is done with it
        let _ = self.stream.synchronize();
    }
}

/// What goes on between devices.
#[derive(Debug)]
pub struct Flight {
    compute: Arc<CudaStream>,
    done: CudaEvent,
}

impl Flight {
    /// Lets what is computed from now on wait for it.
    ///
    /// # Errors
    /// Of the driver.
    pub fn wait(&self) -> Result<()> {
        self.compute.wait(&self.done).w()
    }
}

fn bytes(t: &Tensor) -> usize {
    t.elem_count() * t.dtype().size_in_bytes()
}

/// Room for so many values of f32 on a device, which are not set.
///
/// # Errors
/// No memory.
pub fn room(device: &Device, n: usize) -> Result<Tensor> {
    super::launch::empty_on(device, n, DType::F32)
}
