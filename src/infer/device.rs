//! Values of `--device`: `auto`, `cpu`, `cuda`, `cuda:1`.

use super::usage;
use crate::train::{self, job};
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
    let opened = match OneDevice::from_word(word).filter(|_| word != DeviceName::Cuda.word()) {
        Some(device) => job::one_device(device),
        None => job::device(DeviceName::from_word(word).unwrap_or(DeviceName::Auto)),
    };
    opened.map_err(|e| of_option(word, e))
}

/// The error of a device, for a verb with `--device` and without recipe keys.
fn of_option(word: &str, e: train::Error) -> ft_base::Error {
    match e {
        train::Error::Device(why) => usage(format!("--device {word}: {why}\n  hint: --device cpu")),
        e => e.into(),
    }
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
    named.into_iter().map(|d| job::one_device(d).map_err(|e| of_option(&d.word(), e))).collect()
}

/// The name of a device, as in `--device`.
pub fn name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => OneDevice::Cuda(gpu_id).word(),
        _ => OneDevice::Cpu.word(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The option is named, and no recipe key.
    #[test]
    fn an_error_of_an_option_names_the_option() {
        let e = of_option("cuda", train::Error::Device("none is here".into()));
        assert_eq!(e.to_string(), "--device cuda: none is here\n  hint: --device cpu");
    }
}
