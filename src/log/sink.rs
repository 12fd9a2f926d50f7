//! Receivers of the events of `metrics.jsonl`.

use ft_base::store;
use serde_json::Value;

/// Another place for the events of a run.
pub trait Sink: Send {
    /// Takes an event, in the order of the file.
    ///
    /// # Errors
    /// The disk is full or failing.
    fn write(&mut self, event: &Value) -> Result<(), store::Error>;
}

/// Numbers of steps, evaluations and expert load, by names in groups: `train/loss`, `eval/perplexity`.
pub fn scalars(event: &Value) -> Vec<(String, f64)> {
    let numbers = |group: &str, keys: &[&str]| -> Vec<(String, f64)> {
        keys.iter().filter_map(|key| Some((format!("{group}/{key}"), event[*key].as_f64()?))).collect()
    };
    match event["event"].as_str() {
        Some("step") => {
            let train =
                ["loss", "aux_loss", "z_loss", "grad_norm", "lr", "loss_scale", "tokens", "target_tokens"];
            let speed = ["seconds", "tokens_per_second", "wire_bytes"];
            let memory = ["peak_device_bytes", "peak_host_bytes"];
            let distilled = numbers("train", &["kd", "ce"]);
            [numbers("train", &train), distilled, numbers("speed", &speed), numbers("memory", &memory)]
                .concat()
        }
        Some("eval") => {
            let mut out = numbers("eval", &["loss", "exact_match", "rouge_l", "regex_match"]);
            out.extend(numbers("eval", &["kd", "ce"]));
            // in distillation, the perplexity is of the labels
            let loss = event["ce"].as_f64().or(event["loss"].as_f64());
            let perplexity = loss.map(f64::exp).filter(|p| p.is_finite());
            out.extend(perplexity.map(|p| ("eval/perplexity".to_string(), p)));
            out
        }
        Some("experts") => numbers("experts", &["entropy", "peak", "dead"]),
        _ => Vec::new(),
    }
}
