//! Keys of torchtune alone.

use super::context::{Context, Convert, Fate, Outcome, conversions, converted, needless, refused};
use super::read::{Entries, Entry, number, text, truth};
use crate::keys::Method;
use crate::syntax::quote;

conversions! {
    tune_model, tune_folder, tune_reference, length, tune_checkpointer, tune_loss, tune_logger, tune_mlflow;
    "tune_mlp" => |ctx, e| switched(ctx, e, "mlp"),
    "tune_head" => |ctx, e| switched(ctx, e, "head")
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or_default()
}

/// Whether a model builder makes adapters.
pub(super) fn is_lora(component: &str) -> bool {
    ["lora_", "qlora_", "dora_", "qdora_"].iter().any(|p| last(component).starts_with(p))
}

/// The task, by the model, the loss and sections of reinforcement learning; an error says it in words.
pub(super) fn task_of(entries: &Entries) -> Result<String, String> {
    let word = |key: &str| entries.get(key).and_then(text).unwrap_or_default();
    let has = |section: &str| entries.list.iter().any(|e| e.path.split('.').next() == Some(section));
    let (model, loss) = (word("model._component_"), word("loss._component_"));
    let name = last(&loss).to_lowercase();
    Ok(match name.strip_suffix("loss").unwrap_or_default() {
        _ if is_of_images(&model) => return Err(format!("it trains a model of images, {}", last(&model))),
        _ if name.contains("grpo") || has("grpo_samples") => "grpo".into(),
        _ if name.contains("ppo") || has("ppo_epochs") || has("policy_model") => "ppo".into(),
        "dpo" => "dpo".into(),
        _ if loss.contains(".rlhf.") => {
            return Err(format!("it trains with a loss that has no translation, {}", last(&loss)));
        }
        _ => String::new(),
    })
}

fn is_of_images(component: &str) -> bool {
    component.contains("vision") || component.contains("multimodal")
}

fn tune_model(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let path = text(&e.value).unwrap_or_default();
    let builder = last(&path);
    if is_of_images(&path) || path.contains("classifier") {
        return refused(format!(
            "{builder}: ft trains language models, as checkpointer.checkpoint_dir has them"
        ));
    }
    let mut set = Vec::new();
    if builder.starts_with('q') && is_lora(&path) {
        set.push(ctx.set("model.quantize", quote("nf4"), e));
    }
    if builder.starts_with("dora_") || builder.starts_with("qdora_") {
        set.push(ctx.set("lora.dora", "true", e));
    }
    set.push(match ctx.method {
        Method::Lora => "a [[train]] rule with LoRA".into(),
        _ => "[[train]] with method = \"full\"".into(),
    });
    converted(format!("{}; the model is that of checkpointer.checkpoint_dir", set.join(", ")))
}

/// `apply_lora_to_mlp`, `apply_lora_to_output`
fn switched(ctx: &mut Context<'_>, e: &Entry, module: &str) -> Outcome {
    match truth(&e.value) {
        Some(true) => target(ctx, e, module),
        _ => needless("off"),
    }
}

/// Adds a target of LoRA.
pub(super) fn target(ctx: &mut Context<'_>, e: &Entry, module: &str) -> Outcome {
    if ctx.method == Method::Full {
        return needless("every weight trains: there is no LoRA");
    }
    let (mut modules, origin) = ctx.modules.take().unwrap_or((Vec::new(), e.path.clone()));
    if !modules.iter().any(|m| m == module) {
        modules.push(module.to_string());
    }
    ctx.modules = Some((modules, origin));
    converted(format!("{module:?} in train.0.modules"))
}

/// The folder of a model in Hugging Face's layout.
fn folder(path: &str) -> &str {
    path.trim_end_matches('/').trim_end_matches("/original")
}

/// `ref_checkpointer.checkpoint_dir`: the reference of training in full, mostly the model itself.
fn tune_reference(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(path) = text(&e.value) else { return needless("not set") };
    let own = ctx.get("checkpointer.checkpoint_dir").and_then(text);
    if own.is_some_and(|own| folder(&own) == folder(&path)) {
        return needless("preference.reference = \"base\", its default, is the model as the run begins");
    }
    converted(ctx.set("preference.reference", quote(folder(&path)), e))
}

fn tune_folder(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(path) = text(&e.value) else { return needless("not set") };
    let plain = folder(&path);
    let set = ctx.set("model.source", quote(plain), e);
    if plain == path { Outcome(Fate::Taken, set) } else { converted(set) }
}

/// `tokenizer.max_seq_len`, and `max_length` of TRL: without a number, no limit.
fn length(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match number(&e.value) {
        Some(n) if n > 0.0 => ctx.take("data.max_length", e),
        _ => {
            refused("no limit there; here data.max_length is one, 2048 by default, and data.over_length cuts")
        }
    }
}

fn tune_checkpointer(_: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).as_deref().map(last) {
        Some("FullModelHFCheckpointer" | "DistributedCheckpointer") => {
            needless("the folder has a model in Hugging Face's layout")
        }
        _ => refused(
            "the folder must have a model in Hugging Face's layout: config.json, safetensors, tokenizer",
        ),
    }
}

fn tune_loss(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).as_deref().map(last) {
        Some("CEWithChunkedOutputLoss" | "LinearCrossEntropyLoss" | "CrossEntropyLoss") => {
            needless("cross-entropy, in chunks of targets, is the loss")
        }
        Some("DPOLoss") => converted(ctx.set("task", quote("dpo"), e)),
        _ => refused(ctx.other_task.as_deref().unwrap_or("the loss is the cross-entropy of the targets")),
    }
}

fn tune_logger(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).as_deref().map(last) {
        Some("DiskLogger" | "StdoutLogger") => needless("each step is on the screen and in metrics.jsonl"),
        Some("TensorBoardLogger") => converted(ctx.set("log.tensorboard", "true", e)),
        Some("MLFlowLogger") => match ctx.get("metric_logger.tracking_uri").and_then(text) {
            Some(_) => needless("metric_logger.tracking_uri has the server"),
            None => refused("write log.mlflow = the address of its server"),
        },
        _ => refused("metrics.jsonl, log.csv, log.tensorboard and log.mlflow have every step"),
    }
}

/// Keys of torchtune's logger for MLflow.
fn tune_mlflow(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if !ctx.word("metric_logger._component_").ends_with("mlflowlogger") {
        return needless("each step is on the screen and in metrics.jsonl");
    }
    match e.path.rsplit('.').next() {
        Some("tracking_uri") => ctx.take("log.mlflow", e),
        Some("experiment_name") => ctx.take("log.mlflow_experiment", e),
        _ => ctx.take("name", e),
    }
}
