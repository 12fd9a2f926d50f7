//! What a model takes that only reads and answers: its weights, and a cache that grows with what it has read.

use super::report::bytes;
use super::statics::{self, Statics};
use super::{Component, Error, Machine, Room, Workload};
use ft_engine::adapt::Selection;
use ft_kernels::attention::Cache;
use ft_engine::model::Config;
use ft_recipe::{Dtype, OneDevice, Quantize, Recipe};
use candle_core::DType;
use std::fmt::Write;

/// Tokens of a cache that a model is loaded for at the least, and that its bytes are told by.
const TOKENS: u64 = 1000;

/// A recipe that asks for nothing: what it says of training is not looked at.
const NOTHING: &str = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"/.*/\"]\n[[data.train]]\nsource = \"d.jsonl\"\n\
    format = \"text\"\n";

/// How a model is to be loaded.
#[derive(Clone, Copy, Debug)]
pub struct Loaded<'a> {
    /// The model.
    pub config: &'a Config,
    /// Its modules, and the adapters on them.
    pub selection: &'a Selection,
    /// Of the linears.
    pub quantize: Quantize,
    /// Compute dtype, where it is not the device's own.
    pub dtype: Option<Dtype>,
    /// Bytes of a value of its matrices as they are stored.
    pub stored: u64,
}

/// What it takes to read with it.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Where.
    pub machine: Machine,
    /// Bytes of all weights.
    pub weights: u64,
    /// The driver's context and the libraries' workspaces, and what the allocator holds beside all else.
    pub context: u64,
    /// What loading takes beside them for a while.
    pub loading: u64,
    /// Bytes of the cache of a token.
    pub token: u64,
    /// Bytes of the device that may be used, if known.
    pub budget: Option<u64>,
}

impl Reading {
    /// On the CPU or on CUDA.
    ///
    /// # Errors
    /// Keys that do not go together.
    pub fn new(of: Loaded<'_>, cuda: bool) -> ft_base::Result<Self> {
        let quantize = if of.config.four_bit { Quantize::Nf4 } else { of.quantize };
        let mut keys = vec![format!("model.quantize={}", quantize.word())];
        keys.extend(of.dtype.map(|d| format!("model.dtype={}", d.word())));
        let recipe = Recipe::parse(NOTHING, "what a model takes", &keys)?;
        let machine = Machine { stored: of.stored, ..super::machine(&recipe, cuda) };
        let s = Statics::new(&recipe, of.selection, machine, 0);
        let dtype = if machine.computes_in_f32() { DType::F32 } else { DType::BF16 };
        let c = of.config;
        let token = Cache::bytes_of_a_token(c.kv_heads * c.head_dim, dtype) * c.layers;
        let weights = s.weights();
        let context = s.device.get(Component::Context) + statics::overhead(machine, weights);
        let host = Room::of(machine).host;
        let budget = super::budget(&recipe, machine, &Workload::default(), (host, 0));
        Ok(Self { machine, weights, context, loading: s.load_transient, token: token as u64, budget })
    }

    /// Bytes of the device with a cache of so many tokens.
    pub fn total(&self, tokens: u64) -> u64 {
        self.weights + self.context + self.loading.max(self.token.saturating_mul(tokens))
    }

    /// Whether it can be loaded, and read a little.
    pub fn fits(&self) -> bool {
        self.budget.is_none_or(|b| self.total(TOKENS) <= b)
    }

    /// Tokens that there is room for beside the weights.
    pub fn tokens(&self) -> Option<u64> {
        Some(self.budget?.saturating_sub(self.weights + self.context) / self.token.max(1))
    }

    /// What it takes, in words.
    pub fn text(&self) -> String {
        let cache = bytes(self.token * TOKENS);
        let (weights, context) = (bytes(self.weights), bytes(self.context));
        format!("{weights} of weights, {context} of {}, {cache} of cache for 1,000 tokens", self.beside())
    }

    fn beside(&self) -> &'static str {
        if self.machine.cuda { "context, libraries and allocator" } else { "workspace and allocator" }
    }

    /// Why it does not fit, with what would: an option, and what it takes with that.
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

/// What the server of `serve.devices` takes: a process of its own, which reads with copies of what a run trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Where its copies are.
    pub devices: Vec<OneDevice>,
    /// Bytes of each CUDA device; those of the CPU's copy are the host's.
    pub on_device: u64,
    /// Bytes of host memory.
    pub on_host: u64,
    /// Bytes of a CUDA device that may be used, where the recipe says it.
    pub budget: Option<u64>,
}

impl Server {
    /// That of a recipe, if it asks for one.
    ///
    /// # Errors
    /// Keys that do not go together.
    pub fn of(
        r: &Recipe,
        config: &Config,
        selection: &Selection,
        stored: u64,
    ) -> ft_base::Result<Option<Self>> {
        if r.serve.devices.is_empty() {
            return Ok(None);
        }
        let of = Loaded { config, selection, quantize: r.model.quantize, dtype: r.model.dtype, stored };
        let (mut on_device, mut on_host) = (0, statics::PROCESS);
        for device in &r.serve.devices {
            let cuda = *device != OneDevice::Cpu;
            let bytes = Reading::new(of, cuda)?.total(TOKENS);
            on_host += if cuda { statics::CUDA_HOST } else { bytes };
            on_device = if cuda { bytes } else { on_device };
        }
        let budget = r.memory.budget.filter(|_| on_device > 0);
        Ok(Some(Self { devices: r.serve.devices.clone(), on_device, on_host, budget }))
    }

    /// Whether each of its devices has room, as far as that is known.
    pub fn fits(&self) -> bool {
        self.budget.is_none_or(|b| self.on_device <= b)
    }

    /// What it takes, in words.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(id: &str, quantize: Quantize, dtype: Option<Dtype>, cuda: bool) -> ft_base::Result<Reading> {
        let (file, text) = super::super::source::builtin(id).unwrap_or_default();
        let raw = serde_json::from_str(text).unwrap_or_default();
        let config = Config::parse(file, raw)?;
        let selection = Selection::frozen(&config);
        Reading::new(
            Loaded { config: &config, selection: &selection, quantize, dtype, stored: config.stored_width() },
            cuda,
        )
    }

    /// Of Qwen3-30B-A3B: 30.5 billion weights in bf16, and 48 layers of 4 heads of 128 channels.
    #[test]
    fn weights_and_cache_are_those_of_the_config() -> ft_base::Result<()> {
        let r = of("Qwen/Qwen3-30B-A3B", Quantize::None, None, true)?;
        assert!((r.weights as f64 / 61.06e9 - 1.0).abs() < 0.001, "{}", r.weights);
        assert_eq!(r.token, 48 * 2 * 4 * 128 * 2);
        let four = of("Qwen/Qwen3-30B-A3B", Quantize::Nf4, None, true)?;
        assert!((0.26..0.29).contains(&(four.weights as f64 / r.weights as f64)), "{}", four.weights);
        let wide = of("Qwen/Qwen3-30B-A3B", Quantize::None, None, false)?;
        assert_eq!((wide.token, wide.machine.width), (2 * r.token, 4));
        // but for norms they stay as they are stored
        assert!((wide.weights as f64 / r.weights as f64 - 1.0).abs() < 0.001, "{}", wide.weights);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_told_with_what_would() -> ft_base::Result<()> {
        let within = |r: Reading| Reading { budget: Some(24 << 30), ..r };
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
        // what is left of the budget, in tokens
        let left = (24u64 << 30) - four.weights - four.context;
        assert_eq!(four.tokens(), Some(left / four.token));
        Ok(())
    }
}
