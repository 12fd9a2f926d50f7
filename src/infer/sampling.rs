//! Sampling settings.

use super::usage;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candle_transformers::utils::apply_repeat_penalty;
use ft_base::store;
use ft_kernels::Real;
use serde_json::{Value, json};
use std::path::Path;

/// Temperatures below this sample greedily: dividing by them would overflow f32.
const MIN_TEMPERATURE: f64 = 1e-6;

/// Explicit sampling settings; `None` for the model's own.
pub struct SamplingOptions {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<usize>,
    /// Divides positive logits of tokens in prompt and reply, multiplies negative ones; 1 for none.
    pub repetition_penalty: Option<f32>,
    pub seed: u64,
}

/// Whether settings are in range: temperature at least 0, top-p in (0, 1].
fn in_range(temperature: Option<f64>, top_p: Option<f64>) -> bool {
    temperature.is_none_or(|t| t >= 0.0 && t.is_finite()) && top_p.is_none_or(|p| p > 0.0 && p <= 1.0)
}

/// A repetition penalty; `None` unless above 0.
pub fn penalty(value: &Value) -> Option<f32> {
    value.as_f64().map(|x| x as f32).filter(|x| *x > 0.0 && x.is_finite())
}

impl SamplingOptions {
    /// Builds a sampler.
    ///
    /// # Errors
    /// As [`Self::sampling`].
    pub fn sampler(&self, dir: &Path) -> ft_base::Result<Sampler> {
        let (sampling, penalty) = self.sampling(dir)?;
        Ok(Sampler::new(self.seed, sampling, penalty))
    }

    /// The way to sample, and the repetition penalty. `generation_config.json` in the model folder `dir` gives missing
    /// settings: the penalty, and the others if it has `do_sample`. By default greedy, without a penalty.
    ///
    /// # Errors
    /// Settings out of range.
    pub fn sampling(&self, dir: &Path) -> ft_base::Result<(Sampling, f32)> {
        let name = "generation_config.json";
        let bytes = store::read_inside(dir, name, store::LARGEST).unwrap_or_default();
        let file = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let own = if file["do_sample"] == json!(true) { &file } else { &Value::Null };
        let default_temperature = if own.is_null() { 0.0 } else { 1.0 };
        let (own_temperature, own_p) = (own["temperature"].as_f64(), own["top_p"].as_f64());
        let own_penalty = penalty(&file["repetition_penalty"]);
        if !in_range(self.temperature, self.top_p) {
            return Err(usage("--temperature is 0 or more, --top-p above 0 and at most 1"));
        }
        let fail =
            |message: &str| ft_data::Error::Tokenizer { path: dir.join(name), message: message.into() };
        if !in_range(own_temperature, own_p) {
            return Err(fail("temperature is not 0 or more, or top_p not above 0 and at most 1").into());
        }
        if own_penalty.is_none() && file["repetition_penalty"].is_number() {
            return Err(fail("repetition_penalty is not above 0").into());
        }
        let temperature = self.temperature.or(own_temperature).unwrap_or(default_temperature);
        let p = self.top_p.or(own_p).filter(|p| *p < 1.0);
        let k = self.top_k.or(own["top_k"].as_u64().map(|k| k as usize)).filter(|k| *k > 0);
        let sampling = match (temperature, k, p) {
            (..MIN_TEMPERATURE, _, _) => Sampling::ArgMax,
            (temperature, None, None) => Sampling::All { temperature },
            (temperature, Some(k), None) => Sampling::TopK { k, temperature },
            (temperature, None, Some(p)) => Sampling::TopP { p, temperature },
            (temperature, Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
        };
        Ok((sampling, self.repetition_penalty.or(own_penalty).unwrap_or(1.0)))
    }
}

/// Draws tokens from logits.
pub struct Sampler {
    draws: LogitsProcessor,
    penalty: f32,
}

impl Sampler {
    /// A sampler with a repetition penalty; 1 for none.
    pub fn new(seed: u64, sampling: Sampling, penalty: f32) -> Self {
        Self { draws: LogitsProcessor::from_sampling(seed, sampling), penalty }
    }

    /// Draws a token after the tokens `seen`, and appends it to them.
    ///
    /// # Errors
    /// A failed tensor operation.
    pub fn draw(&mut self, logits: &Real, seen: &mut Vec<u32>) -> candle_core::Result<u32> {
        let id = if self.penalty == 1.0 {
            self.draws.sample(logits)?
        } else {
            self.draws.sample(&apply_repeat_penalty(logits, self.penalty, seen)?)?
        };
        seen.push(id);
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file's penalty holds for greedy sampling too, unless another one is given.
    #[test]
    fn a_repetition_penalty_is_read_from_the_model() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let options = |repetition_penalty| SamplingOptions {
            temperature: None,
            top_p: None,
            top_k: None,
            repetition_penalty,
            seed: 0,
        };
        let penalty = |given| options(given).sampling(dir.path()).map(|(_, penalty)| penalty);
        assert_eq!(penalty(None)?, 1.0);
        let write = |text: &str| std::fs::write(dir.path().join("generation_config.json"), text);
        write("{\"repetition_penalty\": 1.5}")?;
        assert_eq!((penalty(None)?, penalty(Some(1.0))?), (1.5, 1.0));
        // 3 / 1.5 is below 2.5
        let logits = Real::new(&[3f32, 2.5], &candle_core::Device::Cpu)?;
        let mut sampler = options(None).sampler(dir.path())?;
        assert_eq!(sampler.draw(&logits, &mut vec![0])?, 1);
        write("{\"repetition_penalty\": 0}")?;
        assert!(penalty(None).is_err_and(|e| e.to_string().contains("repetition_penalty is not above 0")));
        Ok(())
    }
}
