//! Devices of a recipe.

use crate::train::Error;
use candle_core::{DType, Device};
use ft_base::terminal::warn;
use ft_kernels::cuda;
use ft_recipe::{Device as DeviceName, Dtype, Launch, OneDevice};
use std::sync::Once;

/// Opens the device of a recipe. On CUDA, this is device 0, or one device per process of a machine. `auto` is the CPU
/// if all cards are too old for ft, with a warning.
///
/// # Errors
/// CUDA is requested but missing, too old, or lacks a required library; more processes than devices.
pub fn device(name: DeviceName) -> Result<Device, Error> {
    static WARNED: Once = Once::new();
    if name == DeviceName::Auto
        && let Some(why) = cuda::all_too_old()
    {
        WARNED.call_once(|| warn(&format!("{why}: run.device = \"auto\" is the CPU")));
        return Ok(Device::Cpu);
    }
    match (name, cuda::count()) {
        (DeviceName::Cpu, _) | (DeviceName::Auto, 0) => Ok(Device::Cpu),
        (_, count) => cuda::open(ordinal(count)?).map_err(Error::Device),
    }
}

/// Opens a device given by name and index.
///
/// # Errors
/// The device does not exist, or lacks a required library.
pub fn one_device(name: OneDevice) -> Result<Device, Error> {
    match (name, cuda::count()) {
        (OneDevice::Cpu, _) => Ok(Device::Cpu),
        (OneDevice::Cuda(n), count) if n > 0 && n >= count => {
            let are = if count == 1 { "is 1" } else { &format!("are {count}") };
            Err(Error::Usage(format!("cuda:{n}: there {are} of them, counted from 0\n  hint: --device cpu")))
        }
        (OneDevice::Cuda(n), _) => cuda::open(n).map_err(Error::Device),
    }
}

/// Index of the CUDA device of this process, out of `count`.
fn ordinal(count: usize) -> Result<usize, Error> {
    let Some(launch) = Launch::of_env() else { return Ok(0) };
    match launch.local {
        // The launcher already restricts every process to one device.
        _ if count <= 1 => Ok(0),
        None => Ok(launch.rank % count),
        Some(local) if local < count => Ok(local),
        Some(local) => Err(Error::Device(format!(
            "process {local} of this machine has no CUDA device: there are {count}, one a process"
        ))),
    }
}

/// Compute dtype: the one named, else f32 on the CPU and bf16 on CUDA.
pub fn dtype(named: Option<Dtype>, device: &Device) -> DType {
    ft_plan::resolve::dtype(named, device.is_cuda())
}
