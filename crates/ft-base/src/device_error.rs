//! Errors of CUDA and its libraries in words.
//!
//! candle and cudarc report a code, such as `DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, "..")`. Kernels run
//! asynchronously, so the call that reports an error is often later than the kernel that caused it.

use crate::error::{ExitCode, Failure};
use std::cell::RefCell;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

thread_local! {
    /// The device that this thread opened, unless it is the first of the process.
    static OWN: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The first device that this process opened.
static FIRST: Mutex<Option<String>> = Mutex::new(None);

/// Sets the device name for later errors of this thread. Threads without a device use the first one opened.
pub fn opened(device: &str) {
    let mut first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    match first.get_or_insert_with(|| device.into()) {
        first if device.starts_with(first.as_str()) => {
            *first = device.into();
            OWN.set(None);
        }
        _ => OWN.set(Some(device.into())),
    }
}

fn device() -> String {
    let first = || FIRST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    OWN.with_borrow(Clone::clone).or_else(first).unwrap_or_else(|| "CUDA".into())
}

/// Codes without their prefix, in the driver and the libraries; the meaning, a remedy, and the exit code.
type Meaning = (&'static [&'static str], &'static str, &'static str, ExitCode);

const MEANINGS: &[Meaning] = &[
    (
        &["OUT_OF_MEMORY", "ALLOC_FAILED", "ALLOCATION_FAILED"],
        "out of memory",
        "`nvidia-smi` lists what else takes memory of the device",
        ExitCode::DoesNotFit,
    ),
    (
        &["ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE"],
        "a kernel accessed memory that is not its own",
        "this is a bug in ft or a failing card: CUDA_LAUNCH_BLOCKING=1 names the kernel; report it with the recipe",
        ExitCode::Internal,
    ),
    (
        &[
            "ILLEGAL_INSTRUCTION",
            "INVALID_PC",
            "LAUNCH_FAILED",
            "ASSERT",
            "EXECUTION_FAILED",
            "LAUNCH_FAILURE",
        ],
        "a kernel failed on the device",
        "this is a bug in ft or a failing card: CUDA_LAUNCH_BLOCKING=1 names the kernel, and `dmesg | grep Xid` \
         has the driver's account; report it with the recipe",
        ExitCode::Internal,
    ),
    (
        &["ECC_UNCORRECTABLE", "CONTAINED"],
        "the device's memory is damaged (an error that ECC cannot correct)",
        "restart the machine, or take another card; `ft run .. --resume` goes on from the newest checkpoint",
        ExitCode::LostRank,
    ),
    (
        &["HARDWARE_STACK_ERROR", "NVLINK_UNCORRECTABLE", "EXTERNAL_DEVICE", "UNKNOWN"],
        "the device is lost: it has failed, or has fallen off the bus",
        "`dmesg | grep Xid` has the driver's account; `ft run .. --resume` goes on from the newest checkpoint, \
         after a restart or on another card",
        ExitCode::LostRank,
    ),
    (
        &["LAUNCH_TIMEOUT"],
        "a kernel ran longer than the driver allows on a card that drives a display",
        "another card (run.device = \"cuda:1\"), or no display on this one",
        ExitCode::Usage,
    ),
    (
        &["NO_DEVICE", "INVALID_DEVICE"],
        "there is no such device",
        "`nvidia-smi` lists the devices, CUDA_VISIBLE_DEVICES hides some",
        ExitCode::Usage,
    ),
    (
        &["DEVICE_UNAVAILABLE", "SYSTEM_NOT_READY", "MPS_CONNECTION_FAILED", "MPS_SERVER_NOT_READY"],
        "the device is not available",
        "another process may hold it alone, or a service of the driver does not run: `nvidia-smi`",
        ExitCode::Usage,
    ),
    (
        &[
            "UNSUPPORTED_PTX_VERSION",
            "SYSTEM_DRIVER_MISMATCH",
            "COMPAT_NOT_SUPPORTED_ON_DEVICE",
            "INSUFFICIENT_LOADER_VERSION",
            "CALL_REQUIRES_NEWER_DRIVER",
        ],
        "NVIDIA's driver is older than the CUDA that this ft was built with",
        "a newer driver, or an ft built with the driver's CUDA; `nvidia-smi` shows its version",
        ExitCode::Usage,
    ),
    (
        &["NO_BINARY_FOR_GPU", "INVALID_PTX", "ARCH_MISMATCH"],
        "this ft has no code for this card",
        "build with CUDA_COMPUTE_CAP no higher than the card's compute capability (`nvidia-smi \
         --query-gpu=compute_cap --format=csv`); the default is 80, the least",
        ExitCode::Usage,
    ),
    (
        &["NOT_INITIALIZED"],
        "a library of CUDA did not start",
        "free memory on the device (`nvidia-smi`), or libraries of the driver's CUDA version",
        ExitCode::Usage,
    ),
];

/// An error of a CUDA device or library.
#[derive(Debug)]
pub struct DeviceError {
    /// The device, such as `CUDA device 0 (NVIDIA L40S)`.
    device: String,
    /// Part of the run, if known.
    place: OnceLock<String>,
    meaning: &'static str,
    /// Kernel or operation that reported the error; may be empty.
    operation: String,
    /// The code, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
    code: String,
    hints: Vec<String>,
    exit: ExitCode,
}

impl DeviceError {
    /// Reads the text of an error on the thread of its device; `None` without a code of CUDA.
    pub fn parse(text: &str) -> Option<Self> {
        let starts = ["DriverError(", "CublasError(", "CurandError("];
        let (at, begin) = starts.iter().find_map(|s| Some((text.find(s)?, s.len())))?;
        let rest = &text[at + begin..];
        let code = &rest[..rest.find([',', ')'])?];
        let name = ["CUDA_ERROR_", "CUBLAS_STATUS_", "CURAND_STATUS_"];
        let name = name.iter().find_map(|prefix| code.strip_prefix(prefix))?;
        let found = MEANINGS.iter().find(|(codes, ..)| codes.contains(&name));
        let &(_, meaning, hint, exit) =
            found.unwrap_or(&(&[], "the driver or a library failed", "", ExitCode::Internal));
        let more = rest.lines().filter_map(|line| line.trim_start().strip_prefix("hint: "));
        let hints = [hint].into_iter().filter(|h| !h.is_empty()).chain(more).map(String::from).collect();
        let operation = text[..at].trim_end().trim_end_matches(':').replace('\n', ", ");
        let code = code.into();
        Some(Self { device: device(), place: OnceLock::new(), meaning, operation, code, hints, exit })
    }

    /// Whether a library failed, of whose allocations the plan knows no sizes.
    pub fn is_of_library(&self) -> bool {
        !self.code.starts_with("CUDA_")
    }

    /// Adds the part of the run, unless it is known.
    pub fn set_place(&self, place: String) {
        self.place.get_or_init(|| place);
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, place, meaning, operation, code, hints, .. } = self;
        write!(f, "{device}: {meaning}")?;
        if let Some(place) = place.get() {
            write!(f, ", in {place}")?;
        }
        match operation.is_empty() {
            true => write!(f, " ({code})")?,
            false => write!(f, " ({operation}: {code})")?,
        }
        hints.iter().try_for_each(|hint| write!(f, "\nhint: {hint}"))
    }
}

impl std::error::Error for DeviceError {}

impl Failure for DeviceError {
    fn exit_code(&self) -> ExitCode {
        self.exit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Said(&'static str);

    impl Failure for Said {
        fn exit_code(&self) -> ExitCode {
            ExitCode::Model
        }
    }

    #[test]
    fn a_code_becomes_words_with_the_device_and_the_kernel() {
        opened("CUDA device 3 (NVIDIA L40S)");
        let e = Error::from(Said(
            "CUDA kernel norm_forward_bf16\nDriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access\")\n\
             \x20  0: candle_core::error::Error::bt",
        ));
        assert_eq!(e.exit_code(), ExitCode::Internal);
        let text = e.to_string();
        let begin = "CUDA device 3 (NVIDIA L40S): a kernel accessed memory that is not its own (CUDA kernel \
                     norm_forward_bf16: CUDA_ERROR_ILLEGAL_ADDRESS)\nhint: ";
        assert!(text.starts_with(begin) && !text.contains("candle_core"), "{text}");
        // A message that passes a second error type is not read again.
        assert!(DeviceError::parse(&text).is_none());
        let e = DeviceError::parse("matmul: CublasError(CUBLAS_STATUS_ALLOC_FAILED)");
        for (place, e) in ["load", "step"].into_iter().zip(e.iter().cycle()) {
            e.set_place(place.into());
        }
        let text = e.map(|e| e.to_string()).unwrap_or_default();
        assert!(
            text.contains(": out of memory, in load (matmul: CUBLAS_STATUS_ALLOC_FAILED)\nhint:"),
            "{text}"
        );
    }

    #[test]
    fn the_exit_code_is_that_of_the_fault() {
        for (code, exit) in [
            ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", ExitCode::DoesNotFit),
            ("CublasError(CUBLAS_STATUS_ALLOC_FAILED)", ExitCode::DoesNotFit),
            ("DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, \"..\")", ExitCode::LostRank),
            ("DriverError(CUDA_ERROR_UNKNOWN, \"..\")", ExitCode::LostRank),
            ("DriverError(CUDA_ERROR_LAUNCH_TIMEOUT, \"..\")", ExitCode::Usage),
            ("DriverError(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, \"..\")", ExitCode::Usage),
            ("DriverError(CUDA_ERROR_INVALID_VALUE, \"..\")", ExitCode::Internal),
            ("no code", ExitCode::Model),
        ] {
            let e = Error::from(Said(code));
            assert_eq!(e.exit_code(), exit, "{code}");
            let known = exit != ExitCode::Internal && exit != ExitCode::Model;
            assert_eq!(e.to_string().contains("\nhint: "), known, "{e}");
        }
    }

    #[test]
    fn hints_of_the_message_stay() {
        let e = DeviceError::parse(
            "run.device: DriverError(CUDA_ERROR_INVALID_VALUE, \"..\")\n  hint: run.device=cpu",
        );
        assert!(
            e.is_some_and(|e| e.to_string().ends_with("CUDA_ERROR_INVALID_VALUE)\nhint: run.device=cpu"))
        );
    }
}
