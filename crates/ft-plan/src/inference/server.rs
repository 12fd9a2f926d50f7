//! Memory of the server of `serve.devices`.

use super::memory::{InferenceMemory, InferenceModel, TOKENS};
use crate::memory::overhead;
use crate::units::bytes;
use ft_engine::adapters::Selection;
use ft_engine::model::Config;
use ft_recipe::{OneDevice, Recipe};

/// Memory of the `serve.devices` server, a separate process with copies of the model for inference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Devices of the copies.
    pub devices: Vec<OneDevice>,
    /// Bytes on each CUDA device; a CPU copy counts in `on_host`.
    pub on_device: u64,
    /// Bytes of host memory.
    pub on_host: u64,
    /// Usable bytes of a CUDA device, if `memory.budget` is set.
    pub budget: Option<u64>,
}

impl Server {
    /// The server of a recipe, if it has one.
    ///
    /// # Errors
    /// Conflicting settings.
    pub fn of(
        r: &Recipe,
        config: &Config,
        selection: &Selection,
        stored: u64,
    ) -> ft_base::Result<Option<Self>> {
        if r.serve.devices.is_empty() {
            return Ok(None);
        }
        let of =
            InferenceModel { config, selection, quantize: r.model.quantize, dtype: r.model.dtype, stored };
        let (mut on_device, mut on_host) = (0, overhead::PROCESS);
        for device in &r.serve.devices {
            let cuda = *device != OneDevice::Cpu;
            let bytes = InferenceMemory::new(of, cuda)?.total(TOKENS);
            on_host += if cuda { overhead::CUDA_HOST } else { bytes };
            on_device = if cuda { bytes } else { on_device };
        }
        let budget = r.memory.budget.filter(|_| on_device > 0);
        Ok(Some(Self { devices: r.serve.devices.clone(), on_device, on_host, budget }))
    }

    /// Whether the server fits its devices; true without a budget.
    pub fn fits(&self) -> bool {
        self.budget.is_none_or(|b| self.on_device <= b)
    }

    /// The requirements in words.
    pub fn text(&self) -> String {
        let words = |d: &&OneDevice| **d != OneDevice::Cpu;
        let cuda: Vec<String> = self.devices.iter().filter(words).map(|d| d.word()).collect();
        let on = match &cuda[..] {
            [] => String::new(),
            [one] => format!("{} on {one}, ", bytes(self.on_device)),
            [others @ .., last] => {
                format!("{} on each of {} and {last}, ", bytes(self.on_device), others.join(", "))
            }
        };
        format!(
            "{on}{} of host memory, to read {TOKENS} tokens with the newest checkpoint",
            bytes(self.on_host)
        )
    }
}
