//! Memory for inference: weights, and a key-value cache growing with the context.

use crate::error::Error;
use crate::host::{Capacity, budget};
use crate::memory::{Component, ModelStates, overhead};
use crate::model::{machine, quantization};
use crate::units::bytes;
use crate::workload::Workload;
use candle_core::DType;
use ft_engine::adapters::Selection;
use ft_engine::model::{Config, Units};
use ft_kernels::Machine;
use ft_recipe::{Dtype, Quantize, Recipe};
use std::fmt::Write;

/// Smallest cache, in tokens, a model is loaded for; also the unit of reported cache sizes.
pub(super) const TOKENS: u64 = 1000;

/// Minimal recipe for memory queries; its training keys are not used.
const NOTHING: &str = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"/.*/\"]\n[[data.train]]\nsource = \"d.jsonl\"\n\
    format = \"text\"\n";

/// Model and load options.
#[derive(Clone, Copy, Debug)]
pub struct InferenceModel<'a> {
    pub config: &'a Config,
    /// Modules and their adapters.
    pub selection: &'a Selection,
    /// Quantization of the linear layers.
    pub quantize: Quantize,
    /// Compute dtype, if not the device's default.
    pub dtype: Option<Dtype>,
    /// Bytes per stored matrix value.
    pub stored: u64,
}

/// Memory requirements of inference.
#[derive(Clone, Debug)]
pub struct InferenceMemory {
    pub machine: Machine,
    /// Bytes of all weights.
    pub weights: u64,
    /// Bytes of CUDA context, library workspaces and allocator overhead.
    pub context: u64,
    /// Temporary bytes during loading, on top of the weights.
    pub loading: u64,
    /// Cache bytes per token, over all layers.
    pub token: u64,
    /// Usable device bytes, if known.
    pub budget: Option<u64>,
}

impl InferenceMemory {
    /// Computes the requirements on the CPU or on CUDA.
    ///
    /// # Errors
    /// Conflicting settings.
    pub fn new(of: InferenceModel<'_>, cuda: bool) -> ft_base::Result<Self> {
        let quantize = quantization(of.config, of.quantize);
        let keys: Vec<String> = of.dtype.iter().map(|d| format!("model.dtype={}", d.word())).collect();
        let recipe = Recipe::parse(NOTHING, "what a model takes", &keys)?;
        let machine = Machine { stored: of.stored, ..machine(&recipe, cuda) };
        let s =
            ModelStates::new(&recipe, of.selection, (machine, quantize), (0, Units::all(of.config.layers)));
        let dtype = if machine.computes_in_f32() { DType::F32 } else { DType::BF16 };
        let c = of.config;
        let token = c.cache_of_a_token(0..c.layers, dtype);
        let weights = s.weights();
        let context = s.device.get(Component::Context)
            + overhead::overhead(machine, weights)
            + c.states(0..c.layers, dtype) as u64;
        let host = Capacity::of(machine).host;
        let budget = budget(&recipe, machine, &Workload::default(), (host, 0));
        Ok(Self { machine, weights, context, loading: s.load_transient, token: token as u64, budget })
    }

    /// Device bytes with a cache of `tokens` tokens.
    pub fn total(&self, tokens: u64) -> u64 {
        self.weights + self.context + self.loading.max(self.token.saturating_mul(tokens))
    }

    /// Whether weights and a cache of 1,000 tokens fit.
    pub fn fits(&self) -> bool {
        self.budget.is_none_or(|b| self.total(TOKENS) <= b)
    }

    /// Tokens of cache the remaining budget holds.
    pub fn tokens(&self) -> Option<u64> {
        Some(self.budget?.saturating_sub(self.weights + self.context) / self.token.max(1))
    }

    /// The requirements in words.
    pub fn text(&self) -> String {
        let cache = bytes(self.token * TOKENS);
        let (weights, context) = (bytes(self.weights), bytes(self.context));
        format!("{weights} of weights, {context} of {}, {cache} of cache for 1,000 tokens", self.beside())
    }

    fn beside(&self) -> &'static str {
        if self.machine.cuda { "context, libraries and allocator" } else { "workspace and allocator" }
    }

    /// Error for a model over budget; `others` are alternatives as (option, requirements), listed
    /// if they fit.
    pub fn refusal(&self, others: &[(&str, Self)]) -> Error {
        let mut s = format!(
            "this model needs {} to read 1,000 tokens ({}), and {} is available",
            bytes(self.total(TOKENS)),
            self.text(),
            bytes(self.budget.unwrap_or(0))
        );
        let fitting: Vec<_> = others.iter().filter(|(_, r)| r.fits()).collect();
        for (option, r) in &fitting {
            let total = r.total(TOKENS);
            let _ = match self.machine.cuda == r.machine.cuda {
                true => {
                    let saved = bytes(self.total(TOKENS).saturating_sub(total));
                    write!(s, "\n  hint: {option}: fits, saves {saved}, {}", bytes(total))
                }
                false => write!(s, "\n  hint: {option}: fits, {}", bytes(total)),
            };
        }
        if fitting.is_empty() {
            s.push_str("\n  hint: a smaller model, or a machine with more memory");
        }
        Error::DoesNotFit(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(
        id: &str,
        quantize: Quantize,
        dtype: Option<Dtype>,
        cuda: bool,
    ) -> ft_base::Result<InferenceMemory> {
        let (file, text) = crate::source::builtin(id).unwrap_or_default();
        let raw = serde_json::from_str(text).unwrap_or_default();
        let config = Config::parse(file, raw)?;
        let selection = Selection::frozen(&config);
        InferenceMemory::new(
            InferenceModel {
                config: &config,
                selection: &selection,
                quantize,
                dtype,
                stored: config.stored_width(),
            },
            cuda,
        )
    }

    /// Qwen3-30B-A3B: 30.5 billion parameters in bf16; 48 layers, 4 key-value heads of 128 channels.
    #[test]
    fn weights_and_cache_are_those_of_the_config() -> ft_base::Result<()> {
        let r = of("Qwen/Qwen3-30B-A3B", Quantize::None, None, true)?;
        assert!((r.weights as f64 / 61.06e9 - 1.0).abs() < 0.001, "{}", r.weights);
        assert_eq!(r.token, 48 * 2 * 4 * 128 * 2);
        let four = of("Qwen/Qwen3-30B-A3B", Quantize::Nf4, None, true)?;
        assert!((0.26..0.29).contains(&(four.weights as f64 / r.weights as f64)), "{}", four.weights);
        let wide = of("Qwen/Qwen3-30B-A3B", Quantize::None, None, false)?;
        assert_eq!((wide.token, wide.machine.width), (2 * r.token, 4));
        // all but the norms keep their stored width
        assert!((wide.weights as f64 / r.weights as f64 - 1.0).abs() < 0.001, "{}", wide.weights);
        Ok(())
    }

    #[test]
    fn a_refusal_names_settings_that_would_fit() -> ft_base::Result<()> {
        let within = |r: InferenceMemory| InferenceMemory { budget: Some(24 << 30), ..r };
        let r = within(of("Qwen/Qwen3-30B-A3B", Quantize::None, None, true)?);
        let four = within(of("Qwen/Qwen3-30B-A3B", Quantize::Nf4, None, true)?);
        let host = within(of("Qwen/Qwen3-30B-A3B", Quantize::None, None, false)?);
        assert!(!r.fits() && four.fits() && !host.fits());
        let said = r.refusal(&[("--quantize nf4", four.clone()), ("--device cpu", host)]).to_string();
        let four_bit =
            format!("\n  hint: --quantize nf4: fits, saves {}, ", bytes(r.total(1000) - four.total(1000)));
        for part in [
            "to read 1,000 tokens (56.8",
            " of weights, ",
            ", 93.75 MiB of cache for 1,000 tokens), and 24.00 GiB is available",
        ] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
        assert!(said.contains(&four_bit) && !said.contains("--device cpu"), "{said}");
        let none = r.refusal(&[]).to_string();
        assert!(none.contains("hint: a smaller model"), "{none}");
        // tokens of cache in the remaining budget
        let left = (24u64 << 30) - four.weights - four.context;
        assert_eq!(four.tokens(), Some(left / four.token));
        Ok(())
    }
}
