//! Products of 8-bit floats by cuBLASLt.
//!
//! cuBLAS itself has none. Operands lie by rows of the inner dimension (the only layout on compute capabilities 8.9 and
//! 9.0), sums are f32, results bf16. Fast accumulation stays off: with it, Hopper adds up to 128 products in fewer
//! bits.

use super::WORKSPACE;
use crate::cuda::staging::Each;
use crate::cuda::{cublas_lt, functions};
use candle_core::cuda_backend::cudarc::cublas::sys::cublasStatus_t as Status;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Error, Result};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Oldest compute capability with 8-bit floats, as major and minor.
const OLDEST: (c_int, c_int) = (8, 9);
/// Oldest compute capability whose cuBLASLt takes a scale a row (of CUDA 12.9 and later).
const WITH_ROWS: (c_int, c_int) = (9, 0);

/// cudaDataType_t.
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
/// `CUDA_R_8F_E4M3`: 4 bits of exponent, 3 of mantissa.
pub const E4M3: c_int = 28;
/// `CUDA_R_8F_E5M2`: 5 bits of exponent, 2 of mantissa.
pub const E5M2: c_int = 29;
/// CUBLAS_COMPUTE_32F.
const COMPUTE: c_int = 68;
/// CUBLAS_OP_T.
const TRANSPOSED: c_int = 1;
/// cublasLtMatmulDescAttributes_t.
const TRANSPOSES_A: c_int = 3;
const SCALES: [c_int; 2] = [17, 18];
const SCALE_MODES: [c_int; 2] = [31, 32];
/// CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: a scale for each row of the first and each column of the second operand.
const BY_ROW: c_int = 3;
/// cublasLtMatmulPreferenceAttributes_t.
const MOST_WORKSPACE: c_int = 1;
const ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

type Handle = *mut c_void;

/// cublasLtMatmulAlgo_t.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Algorithm([u64; 8]);

/// cublasLtMatmulHeuristicResult_t.
#[repr(C)]
#[derive(Clone, Copy)]
struct Found {
    algorithm: Algorithm,
    workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

type Free = unsafe extern "C" fn(Handle) -> Status;
type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status;

functions! {
    /// cuBLASLt's functions.
    Api {
        create: "cublasLtCreate" as unsafe extern "C" fn(*mut Handle) -> Status;
        describe: "cublasLtMatmulDescCreate" as unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status;
        drop_description: "cublasLtMatmulDescDestroy" as Free;
        set: "cublasLtMatmulDescSetAttribute" as Set;
        layout: "cublasLtMatrixLayoutCreate"
            as unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status;
        drop_layout: "cublasLtMatrixLayoutDestroy" as Free;
        prefer: "cublasLtMatmulPreferenceCreate" as unsafe extern "C" fn(*mut Handle) -> Status;
        drop_preference: "cublasLtMatmulPreferenceDestroy" as Free;
        set_preference: "cublasLtMatmulPreferenceSetAttribute" as Set;
        find: "cublasLtMatmulAlgoGetHeuristic" as unsafe extern "C" fn(
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            c_int,
            *mut Found,
            *mut c_int,
        ) -> Status;
        multiply: "cublasLtMatmul" as unsafe extern "C" fn(
            Handle,
            Handle,
            *const c_void,
            *const c_void,
            Handle,
            *const c_void,
            Handle,
            *const c_void,
            *const c_void,
            Handle,
            *mut c_void,
            Handle,
            *const Algorithm,
            *mut c_void,
            usize,
            *mut c_void,
        ) -> Status;
    }
}

/// The loaded library. Repeated calls do nothing.
fn api() -> std::result::Result<&'static Api, String> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let load = || {
        let addresses = cublas_lt(Api::SYMBOLS)?;
        // SAFETY: cuBLASLt's functions of these names have signatures that have not changed since CUDA 11, and return
        // cuBLAS' statuses.
        Ok(unsafe { Api::at(addresses) })
    };
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Converts a status into an error in the format of `DeviceError`.
fn done(what: &str, status: Status) -> Result<()> {
    status.result().map_err(|e| Error::msg(format!("cuBLASLt, {what}: {e}")))
}

/// An object of the library, freed on drop.
struct Owned(Handle, Free);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the object came from the library, and nothing else frees it. Descriptions are read at the call.
        unsafe { (self.1)(self.0) };
    }
}

/// A product `[rows, inner] x [outputs, inner]^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub rows: usize,
    pub inner: usize,
    pub outputs: usize,
    /// Row stride of the result.
    pub apart: usize,
    /// Type of the rows; the weight is e4m3.
    pub kind: c_int,
    /// Whether the product is added to the result.
    pub add: bool,
    /// Whether each row of both operands has a scale, or each operand one.
    pub by_row: bool,
    /// Alignment of the result in bytes.
    pub aligned: u32,
}

/// Device addresses of a product: weight, rows, their scales (f32), result (bf16), workspace.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    pub weight: u64,
    pub weight_scales: u64,
    pub rows: u64,
    pub row_scales: u64,
    pub out: u64,
    pub workspace: u64,
}

/// cuBLASLt on a device.
struct Library {
    api: &'static Api,
    handle: usize,
    by_row: OnceLock<bool>,
    algorithms: Mutex<HashMap<Shape, Algorithm>>,
}

/// The objects that describe a product.
struct Described {
    product: Owned,
    weight: Owned,
    rows: Owned,
    out: Owned,
}

fn of(device: &CudaDevice) -> Result<Arc<Library>> {
    static ALL: Each<Library> = Each::new();
    // a handle works in the current context
    device.cuda_stream().context().bind_to_thread().w()?;
    ALL.of(device.id(), || {
        let (api, mut handle) = (api().map_err(Error::msg)?, null_mut());
        // SAFETY: the pointer points to a handle.
        done("creation", unsafe { (api.create)(&raw mut handle) })?;
        let handle = handle.expose_provenance();
        Ok(Library { api, handle, by_row: OnceLock::new(), algorithms: Mutex::default() })
    })
}

/// Compute capability of a device, as major and minor.
fn capability(device: &CudaDevice) -> Result<(c_int, c_int)> {
    device.cuda_stream().context().compute_capability().w()
}

/// Checks the compute capability of a device, and loads the library.
///
/// # Errors
/// An older card, a missing library: the reason in words.
pub fn check(device: &CudaDevice) -> std::result::Result<(), String> {
    let (major, minor) = capability(device).map_err(|e| e.to_string())?;
    if (major, minor) < OLDEST {
        let (oldest, and) = OLDEST;
        return Err(format!(
            "the card has compute capability {major}.{minor}, and products of 8-bit floats need {oldest}.{and}"
        ));
    }
    of(device).map(drop).map_err(|e| e.to_string())
}

/// Whether products of a device take a scale a row; otherwise an operand has one.
///
/// # Errors
/// The library fails.
pub fn by_row(device: &CudaDevice) -> Result<bool> {
    let library = of(device)?;
    let newer = capability(device)? >= WITH_ROWS;
    Ok(*library.by_row.get_or_init(|| {
        let (n, kind) = (256, E4M3);
        let shape =
            Shape { rows: n, inner: n, outputs: n, apart: n, kind, add: false, by_row: true, aligned: 256 };
        // any addresses: nothing is computed
        newer && library.describe(shape, 256, 256).and_then(|d| library.algorithm(shape, &d)).is_ok()
    }))
}

impl Library {
    fn handle(&self) -> Handle {
        std::ptr::with_exposed_provenance_mut(self.handle)
    }

    fn layout(&self, kind: c_int, rows: usize, cols: usize, apart: usize) -> Result<Owned> {
        let mut layout = null_mut();
        // SAFETY: the pointer points to a handle.
        let status =
            unsafe { (self.api.layout)(&raw mut layout, kind, rows as u64, cols as u64, apart as i64) };
        done("a layout", status)?;
        Ok(Owned(layout, self.api.drop_layout))
    }

    /// Describes a product by columns, as the library does: `[outputs, rows] = weight^T rows`.
    fn describe(&self, s: Shape, weight_scales: u64, row_scales: u64) -> Result<Described> {
        let mut product = null_mut();
        // SAFETY: the pointer points to a handle.
        done("a description", unsafe { (self.api.describe)(&raw mut product, COMPUTE, R_32F) })?;
        let product = Owned(product, self.api.drop_description);
        let set = |what: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: the value has as many bytes, and is copied.
            done("an attribute", unsafe { (self.api.set)(product.0, what, value, bytes) })
        };
        let (transposed, by_row) = (TRANSPOSED, BY_ROW);
        set(TRANSPOSES_A, (&raw const transposed).cast(), size_of::<c_int>())?;
        for (what, at) in SCALES.into_iter().zip([weight_scales, row_scales]) {
            set(what, (&raw const at).cast(), size_of::<u64>())?;
        }
        if s.by_row {
            for what in SCALE_MODES {
                set(what, (&raw const by_row).cast(), size_of::<c_int>())?;
            }
        }
        Ok(Described {
            product,
            weight: self.layout(E4M3, s.inner, s.outputs, s.inner)?,
            rows: self.layout(s.kind, s.inner, s.rows, s.inner)?,
            out: self.layout(R_16BF, s.outputs, s.rows, s.apart)?,
        })
    }

    /// The algorithm that the library chooses, asked once a shape.
    fn algorithm(&self, s: Shape, d: &Described) -> Result<Algorithm> {
        let known = |all: &HashMap<Shape, Algorithm>| all.get(&s).copied();
        if let Some(known) = known(&self.algorithms.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(known);
        }
        let mut preference = null_mut();
        // SAFETY: the pointer points to a handle.
        done("a preference", unsafe { (self.api.prefer)(&raw mut preference) })?;
        let preference = Owned(preference, self.api.drop_preference);
        let set = |what: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: the value has as many bytes, and is copied.
            done("a preference", unsafe { (self.api.set_preference)(preference.0, what, value, bytes) })
        };
        let workspace = WORKSPACE;
        set(MOST_WORKSPACE, (&raw const workspace).cast(), size_of::<usize>())?;
        for (what, bytes) in ALIGNMENTS.into_iter().zip([256u32, 256, s.aligned, s.aligned]) {
            set(what, (&raw const bytes).cast(), size_of::<u32>())?;
        }
        let mut count = 0;
        let mut found = Found {
            algorithm: Algorithm::default(),
            workspace: 0,
            status: Status::CUBLAS_STATUS_SUCCESS,
            waves: 0.0,
            reserved: [0; 4],
        };
        // SAFETY: all objects are alive; there is room for one result.
        let status = unsafe {
            (self.api.find)(
                self.handle(),
                d.product.0,
                d.weight.0,
                d.rows.0,
                d.out.0,
                d.out.0,
                preference.0,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        done("an algorithm", status)?;
        if count < 1 {
            candle_core::bail!("cuBLASLt has no product of 8-bit floats for {s:?}");
        }
        done("an algorithm", found.status)?;
        self.algorithms.lock().unwrap_or_else(PoisonError::into_inner).insert(s, found.algorithm);
        Ok(found.algorithm)
    }
}

/// Multiplies rows with a weight.
///
/// # Errors
/// The library has no such product, or fails.
///
/// # Safety
/// The addresses are of live memory of the device that holds operands, scales and result of this shape, 256-byte
/// aligned but for the result, and [`WORKSPACE`] bytes.
pub unsafe fn product(device: &CudaDevice, s: Shape, at: Places) -> Result<()> {
    let library = of(device)?;
    let d = library.describe(s, at.weight_scales, at.row_scales)?;
    let algorithm = library.algorithm(s, &d)?;
    let (alpha, beta) = (1f32, if s.add { 1f32 } else { 0f32 });
    let place = |at: u64| at as *mut c_void;
    // SAFETY: by contract, and freed memory is reused in the order of this stream.
    let status = unsafe {
        (library.api.multiply)(
            library.handle(),
            d.product.0,
            (&raw const alpha).cast(),
            place(at.weight),
            d.weight.0,
            place(at.rows),
            d.rows.0,
            (&raw const beta).cast(),
            place(at.out),
            d.out.0,
            place(at.out),
            d.out.0,
            &raw const algorithm,
            place(at.workspace),
            WORKSPACE,
            device.cuda_stream().cu_stream().cast(),
        )
    };
    done("a product", status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::device_error::DeviceError;

    #[test]
    fn a_failed_product_is_an_error_of_the_device() {
        for (status, meaning) in [
            (Status::CUBLAS_STATUS_EXECUTION_FAILED, "a kernel failed on the device"),
            (Status::CUBLAS_STATUS_ALLOC_FAILED, "out of memory"),
        ] {
            let e = done("a product", status).expect_err("a failure").to_string();
            let read = DeviceError::parse(&e).expect("a code").to_string();
            assert!(
                read.contains(meaning) && read.contains("(cuBLASLt, a product: CUBLAS_STATUS_"),
                "{read}"
            );
        }
    }
}
