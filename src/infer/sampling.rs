//! Sampling settings.

use super::usage;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use ft_base::store;
use serde_json::{Value, json};
use std::path::Path;

/// Temperatures below this sample greedily: dividing by them would overflow f32.
const MIN_TEMPERATURE: f64 = 1e-6;

/// Explicit sampling settings; `None` for the model's own.
pub struct SamplingOptions {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<usize>,
    pub seed: u64,
}

/// Whether settings are in range: temperature at least 0, top-p in (0, 1].
fn in_range(temperature: Option<f64>, top_p: Option<f64>) -> bool {
    temperature.is_none_or(|t| t >= 0.0 && t.is_finite()) && top_p.is_none_or(|p| p > 0.0 && p <= 1.0)
}

impl SamplingOptions {
    /// Builds a sampler.
    ///
    /// # Errors
    /// As [`Self::sampling`].
    pub fn sampler(&self, dir: &Path) -> ft_base::Result<LogitsProcessor> {
        Ok(LogitsProcessor::from_sampling(self.seed, self.sampling(dir)?))
    }

    /// The way to sample. `generation_config.json` in the model folder `dir` gives missing settings, if it
    /// has `do_sample`; greedy by default.
    ///
    /// # Errors
    /// Settings out of range.
    pub fn sampling(&self, dir: &Path) -> ft_base::Result<Sampling> {
        let name = "generation_config.json";
        let bytes = store::read_inside(dir, name, store::LARGEST).unwrap_or_default();
        let own = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let own = if own["do_sample"] == json!(true) { own } else { Value::Null };
        let default_temperature = if own.is_null() { 0.0 } else { 1.0 };
        let (own_temperature, own_p) = (own["temperature"].as_f64(), own["top_p"].as_f64());
        if !in_range(self.temperature, self.top_p) {
            return Err(usage("--temperature is 0 or more, --top-p above 0 and at most 1"));
        }
        if !in_range(own_temperature, own_p) {
            let message = "temperature is not 0 or more, or top_p not above 0 and at most 1".to_string();
            return Err(ft_data::Error::Tokenizer { path: dir.join(name), message }.into());
        }
        let temperature = self.temperature.or(own_temperature).unwrap_or(default_temperature);
        let p = self.top_p.or(own_p).filter(|p| *p < 1.0);
        let k = self.top_k.or(own["top_k"].as_u64().map(|k| k as usize)).filter(|k| *k > 0);
        Ok(match (temperature, k, p) {
            (..MIN_TEMPERATURE, _, _) => Sampling::ArgMax,
            (temperature, None, None) => Sampling::All { temperature },
            (temperature, Some(k), None) => Sampling::TopK { k, temperature },
            (temperature, None, Some(p)) => Sampling::TopP { p, temperature },
            (temperature, Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
        })
    }
}
