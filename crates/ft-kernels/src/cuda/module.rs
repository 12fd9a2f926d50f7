//! Compiled kernels: the output of build.rs for each CUDA source, loaded once per device.

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, DeviceId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A compiled source: machine code for some architectures, and PTX for all others.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Name of the source.
    pub name: &'static str,
    /// Fat binary.
    image: &'static [u8],
    /// PTX only.
    #[cfg(test)]
    pub ptx: &'static str,
}

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    functions: HashMap<&'static str, HashMap<String, CudaFunction>>,
}

/// One lock per device: loading may wait for the device, which may wait for another device's rank.
static LOADED: Mutex<Option<HashMap<DeviceId, Arc<Mutex<Loaded>>>>> = Mutex::new(None);

impl Module {
    /// Loads a kernel.
    ///
    /// # Errors
    /// No such kernel, or device and driver support neither the machine code nor the PTX.
    pub fn function(&self, device: &CudaDevice, kernel: &str) -> Result<CudaFunction> {
        let at = self.name;
        let loaded = {
            let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.get_or_insert_default().entry(device.id()).or_default())
        };
        let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(f) = loaded.functions.get(&at).and_then(|all| all.get(kernel)) {
            return Ok(f.clone());
        }
        let failed = |e| candle_core::Error::msg(format!("CUDA kernel {}/{kernel}: {e}", self.name));
        let module = match loaded.modules.get(&at) {
            Some(m) => Arc::clone(m),
            None => {
                let context = device.cuda_stream().context().clone();
                let m = context.load_module(Ptx::from_binary(self.image.to_vec())).map_err(failed)?;
                loaded.modules.insert(at, Arc::clone(&m));
                m
            }
        };
        let f = module.load_function(kernel).map_err(failed)?;
        loaded.functions.entry(at).or_default().insert(kernel.to_string(), f.clone());
        Ok(f)
    }
}
