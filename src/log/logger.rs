//! Loggers of the events of `metrics.jsonl`.

use ft_base::error::ExitCode;
use ft_base::store;
use serde_json::Value;

/// Another place for the events of a run.
pub trait Logger: Send {
    /// Takes an event, in the order of the file.
    ///
    /// # Errors
    /// The disk is full or failing.
    fn write(&mut self, event: &Value) -> Result<(), store::Error>;
}

/// Metrics of tasks, in steps and evaluations; F1 by class has its own names.
const OF_TASKS: &[&str] = &[
    "accuracy",
    "f1",
    "rewards_chosen",
    "rewards_rejected",
    "margins",
    "logps_chosen",
    "logps_rejected",
    "nll",
    "kl",
    "kd",
    "ce",
];

/// Whether an exit code in an event is a signal's.
pub fn is_of_signal(code: u64) -> bool {
    use ExitCode::{HungUp, Interrupted, Requested, Terminated};
    let code = u8::try_from(code).map(ExitCode::of);
    matches!(code, Ok(HungUp | Interrupted | Requested | Terminated))
}

/// Whether an event is of a task with a loss of whole documents, without a perplexity.
pub fn is_of_documents(event: &Value) -> bool {
    ["accuracy", "margins", "kl"].iter().any(|key| event.get(*key).is_some())
}

/// Perplexity of an evaluation, in distillation of the labels; `None` if the loss is of whole documents.
pub fn perplexity(event: &Value) -> Option<f64> {
    let loss = event["ce"].as_f64().or(event["loss"].as_f64())?;
    Some(loss.exp()).filter(|p| p.is_finite() && !is_of_documents(event))
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
            let all = [("train", &train[..]), ("train", OF_TASKS), ("speed", &speed), ("memory", &memory)];
            all.into_iter().flat_map(|(group, keys)| numbers(group, keys)).collect()
        }
        Some("eval") => {
            let mut out = numbers("eval", &["loss", "exact_match", "rouge_l", "regex_match"]);
            out.extend(numbers("eval", OF_TASKS));
            let classes = event.as_object().into_iter().flatten().filter(|(key, _)| key.starts_with("f1_"));
            out.extend(classes.filter_map(|(key, f1)| Some((format!("eval/{key}"), f1.as_f64()?))));
            out.extend(perplexity(event).map(|p| ("eval/perplexity".to_string(), p)));
            out
        }
        Some("experts") => numbers("experts", &["entropy", "peak", "dead"]),
        _ => Vec::new(),
    }
}
