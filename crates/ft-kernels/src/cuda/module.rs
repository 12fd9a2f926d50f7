//! Compiled kernels: the output of build.rs for each CUDA source, loaded once per device.

use super::staging::Each;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// A compiled source: machine code for some compute capabilities, and PTX for all others.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Name of the source.
    pub name: &'static str,
    /// PTX of a version that every supported driver compiles.
    pub ptx: &'static str,
    /// Compute capabilities (80 for 8.0) and their cubins.
    code: &'static [(c_int, &'static [u8])],
}

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    functions: HashMap<&'static str, HashMap<String, CudaFunction>>,
}

/// One lock per device: loading may wait for the device, which may wait for another device's rank.
static LOADED: Each<Mutex<Loaded>> = Each::new();

impl Module {
    /// Loads a kernel with its module, from the machine code for the device. Without any, or if the driver is older
    /// than the assembler and refuses it (some only when they load a kernel), the driver compiles the PTX.
    fn load(
        &self,
        context: &Arc<CudaContext>,
        kernel: &str,
    ) -> Result<(Arc<CudaModule>, CudaFunction), DriverError> {
        let (major, minor) = context.compute_capability()?;
        let runs = |capability: c_int| capability / 10 == major && capability % 10 <= minor;
        let code = self.code.iter().filter(|(c, _)| runs(*c)).max_by_key(|(c, _)| *c);
        let of = |image: Ptx| {
            let module = context.load_module(image)?;
            Ok((Arc::clone(&module), module.load_function(kernel)?))
        };
        let machine = code.and_then(|(_, cubin)| of(Ptx::from_binary(cubin.to_vec())).ok());
        machine.map_or_else(|| of(Ptx::from_src(self.ptx)), Ok)
    }

    /// Names of the kernels.
    fn kernels(&self) -> impl Iterator<Item = &'static str> {
        self.ptx.split(".entry ").skip(1).filter_map(|text| text.split('(').next()).map(str::trim)
    }

    /// Loads a kernel.
    ///
    /// # Errors
    /// No such kernel, or device and driver support neither the machine code nor the PTX.
    pub fn function(&self, device: &CudaDevice, kernel: &str) -> candle_core::Result<CudaFunction> {
        let at = self.name;
        let loaded = LOADED.of(device.id(), || Ok(Mutex::default()))?;
        let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(f) = loaded.functions.get(&at).and_then(|all| all.get(kernel)) {
            return Ok(f.clone());
        }
        let failed = |e| candle_core::Error::msg(format!("CUDA kernel {}/{kernel}: {e}", self.name));
        let f = match loaded.modules.get(&at) {
            Some(module) => module.load_function(kernel).map_err(failed)?,
            None => {
                let (module, f) = self.load(device.cuda_stream().context(), kernel).map_err(failed)?;
                loaded.modules.insert(at, module);
                f
            }
        };
        loaded.functions.entry(at).or_default().insert(kernel.to_string(), f.clone());
        Ok(f)
    }
}

/// Loads every kernel. Ranks do so before their first collective: the driver may wait for the whole device when it
/// loads a kernel, and a device inside a collective waits for the other ranks.
///
/// # Errors
/// As [`Module::function`].
pub fn load_all(device: &CudaDevice) -> candle_core::Result<()> {
    let mut kernels = ALL.iter().flat_map(|module| module.kernels().map(move |kernel| (module, kernel)));
    kernels.try_for_each(|(module, kernel)| module.function(device, kernel).map(drop))
}
