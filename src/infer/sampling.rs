//! Sampling settings.

use super::usage;
use candle_core::{DType, Device};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candle_transformers::utils::apply_repeat_penalty;
use ft_base::store;
use ft_base::terminal::warn;
use ft_kernels::Real;
use serde_json::Value;
use std::path::Path;

/// Temperatures below this sample greedily: dividing by them would overflow f32.
const MIN_TEMPERATURE: f64 = 1e-6;

/// Explicit sampling settings; `None` for the model's own.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SamplingOptions {
    /// Sampling temperature; 0 is greedy. Default: the model's own, else 0, or 1 with --top-p or --top-k
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Nucleus sampling: draw from the most likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Draw from the K most likely tokens
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Penalty of tokens that have occurred in prompt or reply: divides positive logits, multiplies negative ones; 1
    /// for none. Default: the model's own
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// File of a model's own settings.
const FILE: &str = "generation_config.json";
/// Keys of the file with an effect on replies in transformers, but not here: key, value without effect (beside null and
/// an empty list), whether it matters with `do_sample` only.
const NOT_BUILT: [(&str, f64, bool); 13] = [
    ("min_p", 0.0, true),
    ("typical_p", 1.0, true),
    ("epsilon_cutoff", 0.0, true),
    ("eta_cutoff", 0.0, true),
    ("no_repeat_ngram_size", 0.0, false),
    ("min_length", 0.0, false),
    ("min_new_tokens", 0.0, false),
    ("num_beams", 1.0, false),
    ("guidance_scale", 1.0, false),
    ("bad_words_ids", 0.0, false),
    ("suppress_tokens", 0.0, false),
    ("begin_suppress_tokens", 0.0, false),
    ("sequence_bias", 0.0, false),
];

/// A model's own settings, of `generation_config.json`. Temperature, top-p and top-k are `None` unless it has
/// `do_sample`.
#[derive(Debug, Default, PartialEq)]
pub struct GenerationConfig {
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<usize>,
    repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads the file in a model folder; without it, the model has no settings. Warns of unsupported settings.
    ///
    /// # Errors
    /// An unreadable file; settings out of range.
    pub fn read(dir: &Path) -> ft_base::Result<Self> {
        let fail = |message: String| ft_data::Error::Tokenizer { path: dir.join(FILE), message };
        let Some(bytes) = store::read_if_there(dir, FILE, store::LARGEST)? else {
            return Ok(Self::default());
        };
        let file: Value = serde_json::from_slice(&bytes).map_err(|e| fail(format!("not JSON: {e}")))?;
        let ignored = not_built(&file);
        if !ignored.is_empty() {
            let path = dir.join(FILE);
            warn(&format!("{}: not built, and ignored: {}", path.display(), ignored.join(", ")));
        }
        let repetition_penalty = penalty(&file["repetition_penalty"]);
        if repetition_penalty.is_none() && file["repetition_penalty"].is_number() {
            return Err(fail("repetition_penalty is not above 0".into()).into());
        }
        if file["do_sample"] != true {
            return Ok(Self { repetition_penalty, ..Self::default() });
        }
        let (temperature, top_p) = (file["temperature"].as_f64().or(Some(1.0)), file["top_p"].as_f64());
        if !in_range(temperature, top_p) {
            let why = "temperature is not 0 or more, or top_p not above 0 and at most 1";
            return Err(fail(why.into()).into());
        }
        let top_k = file["top_k"].as_u64().and_then(|k| usize::try_from(k).ok());
        Ok(Self { temperature, top_p, top_k, repetition_penalty })
    }
}

/// Keys of a file with an unsupported effect.
fn not_built(file: &Value) -> Vec<&'static str> {
    let samples = file["do_sample"] == true;
    let has_effect = |key: &str, neutral: f64| match &file[key] {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        value => value.as_f64() != Some(neutral),
    };
    let all = NOT_BUILT.into_iter();
    all.filter(|&(key, neutral, draws)| (samples || !draws) && has_effect(key, neutral))
        .map(|row| row.0)
        .collect()
}

/// Whether settings are in range: temperature at least 0, top-p in (0, 1].
fn in_range(temperature: Option<f64>, top_p: Option<f64>) -> bool {
    temperature.is_none_or(|t| t >= 0.0 && t.is_finite()) && top_p.is_none_or(|p| p > 0.0 && p <= 1.0)
}

/// A repetition penalty; `None` unless above 0.
pub fn penalty(value: &Value) -> Option<f32> {
    value.as_f64().map(|x| x as f32).filter(|x| is_penalty(*x))
}

fn is_penalty(x: f32) -> bool {
    x > 0.0 && x.is_finite()
}

impl SamplingOptions {
    /// Builds a sampler.
    ///
    /// # Errors
    /// As [`Self::sampling`].
    pub fn sampler(&self, model: &GenerationConfig) -> ft_base::Result<Sampler> {
        let (sampling, penalty) = self.sampling(model)?;
        Ok(Sampler::new(self.seed, sampling, penalty))
    }

    /// The way to sample, and the repetition penalty. Missing settings are the model's own. By default greedy, without
    /// a penalty; with top-p or top-k alone, at temperature 1.
    ///
    /// # Errors
    /// Settings out of range.
    pub fn sampling(&self, model: &GenerationConfig) -> ft_base::Result<(Sampling, f32)> {
        if !in_range(self.temperature, self.top_p) {
            return Err(usage("--temperature is 0 or more, --top-p above 0 and at most 1"));
        }
        if self.repetition_penalty.is_some_and(|x| !is_penalty(x)) {
            return Err(usage("--repetition-penalty is above 0"));
        }
        let p = self.top_p.or(model.top_p).filter(|p| *p < 1.0);
        let k = self.top_k.or(model.top_k).filter(|k| *k > 0);
        let default_temperature = if k.is_some() || p.is_some() { 1.0 } else { 0.0 };
        let temperature = self.temperature.or(model.temperature).unwrap_or(default_temperature);
        let sampling = match (temperature, k, p) {
            (..MIN_TEMPERATURE, _, _) => Sampling::ArgMax,
            (temperature, None, None) => Sampling::All { temperature },
            (temperature, Some(k), None) => Sampling::TopK { k, temperature },
            (temperature, None, Some(p)) => Sampling::TopP { p, temperature },
            (temperature, Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
        };
        Ok((sampling, self.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0)))
    }
}

/// Draws tokens from logits.
pub struct Sampler {
    draws: LogitsProcessor,
    /// The `k` of top-k beside top-p. candle's top-p is of all tokens; that of transformers, vLLM and llama.cpp is of
    /// the `k` most likely ones.
    k: Option<usize>,
    penalty: f32,
}

impl Sampler {
    /// A sampler with a repetition penalty; 1 for none.
    pub fn new(seed: u64, sampling: Sampling, penalty: f32) -> Self {
        let (sampling, k) = match sampling {
            Sampling::TopKThenTopP { k, p, temperature } => (Sampling::TopP { p, temperature }, Some(k)),
            other => (other, None),
        };
        Self { draws: LogitsProcessor::from_sampling(seed, sampling), k, penalty }
    }

    /// Draws a token after the tokens `seen`, and appends it to them.
    ///
    /// # Errors
    /// A failed tensor operation.
    pub fn draw(&mut self, logits: &Real, seen: &mut Vec<u32>) -> candle_core::Result<u32> {
        let logits =
            if self.penalty == 1.0 { logits } else { &apply_repeat_penalty(logits, self.penalty, seen)? };
        let id = match self.k {
            None => self.draws.sample(logits)?,
            Some(k) => {
                let (ids, logits) = top_k(logits, k)?;
                ids[self.draws.sample(&logits)? as usize]
            }
        };
        seen.push(id);
        Ok(id)
    }
}

/// The tokens with the `k` highest logits, and these logits `[k]`.
fn top_k(logits: &Real, k: usize) -> candle_core::Result<(Vec<u32>, Real)> {
    let all: Vec<f32> = logits.to_dtype(DType::F32)?.to_vec1()?;
    let mut ids: Vec<u32> = (0..all.len() as u32).collect();
    if k < ids.len() {
        ids.select_nth_unstable_by(k, |a, b| all[*b as usize].total_cmp(&all[*a as usize]));
        ids.truncate(k);
    }
    let highest: Vec<f32> = ids.iter().map(|id| all[*id as usize]).collect();
    let highest = Real::new(highest, &Device::Cpu)?;
    Ok((ids, highest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    const NONE: SamplingOptions =
        SamplingOptions { temperature: None, top_p: None, top_k: None, repetition_penalty: None, seed: 0 };

    fn of_file(text: &str) -> ft_base::Result<GenerationConfig> {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join(FILE), text).expect("written");
        GenerationConfig::read(dir.path())
    }

    #[test]
    fn a_broken_generation_config_is_named_and_a_missing_one_is_none() -> anyhow::Result<()> {
        assert_eq!(GenerationConfig::read(tempfile::tempdir()?.path())?, GenerationConfig::default());
        for (text, why) in [
            ("{", "not JSON"),
            ("{\"do_sample\": true, \"temperature\": -1}", "temperature is not 0 or more"),
            ("{\"do_sample\": true, \"top_p\": 0}", "top_p not above 0"),
            ("{\"repetition_penalty\": 0}", "repetition_penalty is not above 0"),
        ] {
            let error = of_file(text).expect_err(text).to_string();
            assert!(error.contains(FILE) && error.contains(why), "{error}");
        }
        Ok(())
    }

    /// The file's penalty holds for greedy sampling too, unless another one is given.
    #[test]
    fn a_repetition_penalty_is_read_from_the_model() -> anyhow::Result<()> {
        let options = |repetition_penalty| SamplingOptions { repetition_penalty, ..NONE };
        let model = of_file("{\"repetition_penalty\": 1.5}")?;
        let penalty = |given, model: &_| options(given).sampling(model).map(|(_, penalty)| penalty);
        assert_eq!(penalty(None, &GenerationConfig::default())?, 1.0);
        assert_eq!((penalty(None, &model)?, penalty(Some(1.0), &model)?), (1.5, 1.0));
        assert!(penalty(Some(0.0), &model).is_err_and(|e| e.to_string().contains("--repetition-penalty")));
        // 3 / 1.5 is below 2.5
        let logits = Real::new(&[3f32, 2.5], &candle_core::Device::Cpu)?;
        let mut sampler = options(None).sampler(&model)?;
        assert_eq!(sampler.draw(&logits, &mut vec![0])?, 1);
        Ok(())
    }

    /// Of 0.4, 0.2 and 0.15, the first two have 0.8 of the sum.
    #[test]
    fn top_p_is_of_the_top_k() -> anyhow::Result<()> {
        let probabilities = [&[0.025f32; 10][..], &[0.2, 0.4, 0.15]].concat();
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let logits = Real::new(logits, &Device::Cpu)?;
        let options = SamplingOptions { top_k: Some(3), top_p: Some(0.75), ..NONE };
        let mut sampler = options.sampler(&GenerationConfig::default())?;
        let draw = |_| sampler.draw(&logits, &mut Vec::new());
        let drawn = (0..100).map(draw).collect::<candle_core::Result<BTreeSet<u32>>>()?;
        assert_eq!(drawn, BTreeSet::from([10, 11]));
        Ok(())
    }

    #[test]
    fn settings_that_are_not_built_are_named() {
        let mut file = json!({
            "do_sample": true, "min_p": 0.1, "typical_p": 1.0, "no_repeat_ngram_size": 3, "num_beams": 1,
            "bad_words_ids": [[1]], "suppress_tokens": [], "sequence_bias": null, "top_k": 4,
        });
        assert_eq!(not_built(&file), ["min_p", "no_repeat_ngram_size", "bad_words_ids"]);
        file["do_sample"] = json!(false);
        assert_eq!(not_built(&file), ["no_repeat_ngram_size", "bad_words_ids"]);
        assert!(not_built(&json!({})).is_empty());
    }

    /// Greedy sampling would ignore top-p and top-k.
    #[test]
    fn top_p_or_top_k_alone_sample_at_temperature_1() -> anyhow::Result<()> {
        let greedy = of_file("{\"do_sample\": false, \"temperature\": 0.5, \"top_k\": 9}")?;
        let warm = of_file("{\"do_sample\": true, \"temperature\": 0.5}")?;
        let temperature = 1.0;
        for (options, of_greedy, of_warm) in [
            (NONE, Sampling::ArgMax, Sampling::All { temperature: 0.5 }),
            (
                SamplingOptions { top_p: Some(1.0), top_k: Some(0), ..NONE },
                Sampling::ArgMax,
                Sampling::All { temperature: 0.5 },
            ),
            (
                SamplingOptions { top_p: Some(0.9), ..NONE },
                Sampling::TopP { p: 0.9, temperature },
                Sampling::TopP { p: 0.9, temperature: 0.5 },
            ),
            (
                SamplingOptions { top_k: Some(4), ..NONE },
                Sampling::TopK { k: 4, temperature },
                Sampling::TopK { k: 4, temperature: 0.5 },
            ),
            (
                SamplingOptions { top_k: Some(4), temperature: Some(0.0), ..NONE },
                Sampling::ArgMax,
                Sampling::ArgMax,
            ),
        ] {
            assert_eq!(options.sampling(&greedy)?.0, of_greedy);
            assert_eq!(options.sampling(&warm)?.0, of_warm);
        }
        Ok(())
    }
}
