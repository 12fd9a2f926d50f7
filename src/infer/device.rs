//! Values of `--device`: `auto`, `cpu`, `cuda`, `cuda:1`.

use super::usage;
use crate::train::job;
use candle_core::{Device, DeviceLocation};
use ft_recipe::{Device as DeviceName, OneDevice};

/// Validates a value of `--device`.
pub fn parse(word: &str) -> Result<String, String> {
    if word == DeviceName::Auto.word() || OneDevice::from_word(word).is_some() {
        Ok(word.into())
    } else {
        Err("auto, cpu, cuda, or cuda:1 by number".into())
    }
}

/// Opens one device.
///
/// # Errors
/// A device not present.
pub fn open(word: &str) -> ft_base::Result<Device> {
    Ok(match OneDevice::from_word(word).filter(|_| word != DeviceName::Cuda.word()) {
        Some(device) => job::one_device(device)?,
        None => job::device(DeviceName::from_word(word).unwrap_or(DeviceName::Auto))?,
    })
}

/// Opens several devices, the CPU last.
///
/// # Errors
/// `auto` among several; a repeated device; a device not present.
pub fn open_all(words: &[String]) -> ft_base::Result<Vec<Device>> {
    if let [one] = words {
        return Ok(vec![open(one)?]);
    }
    let mut named = Vec::new();
    for word in words {
        let Some(device) = OneDevice::from_word(word) else {
            return Err(usage("--device auto is one device\n  hint: by number: --device cuda:0,cuda:1"));
        };
        if named.contains(&device) {
            let twice = format!("--device has {} twice: a device has one copy of the model", device.word());
            return Err(usage(twice));
        }
        named.push(device);
    }
    named.sort_by_key(|d| *d == OneDevice::Cpu);
    named.into_iter().map(|d| Ok(job::one_device(d)?)).collect()
}

/// The name of a device, as in `--device`.
pub fn name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => OneDevice::Cuda(gpu_id).word(),
        _ => OneDevice::Cpu.word(),
    }
}
