//! Keys of torchtune alone.

use super::context::{Context, Convert, Fate, Outcome, conversions, converted, needless, refused};
use super::read::{Entry, number, text, truth};
use crate::keys::Method;
use crate::syntax::quote;

conversions! {
    tune_model, tune_folder, tune_length, tune_checkpointer, tune_loss, tune_logger, tune_mlflow;
    "tune_mlp" => |ctx, e| target(ctx, e, "mlp"),
    "tune_head" => |ctx, e| target(ctx, e, "head")
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or_default()
}

/// Whether a model builder makes adapters.
pub(super) fn is_lora(component: &str) -> bool {
    ["lora_", "qlora_", "dora_", "qdora_"].iter().any(|p| last(component).starts_with(p))
}

fn tune_model(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let path = text(&e.value).unwrap_or_default();
    let builder = last(&path);
    if path.contains("vision") || path.contains("multimodal") || path.contains("classifier") {
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
fn target(ctx: &mut Context<'_>, e: &Entry, module: &str) -> Outcome {
    match truth(&e.value) {
        Some(true) if ctx.method == Method::Lora => {
            let (mut modules, origin) = ctx.modules.take().unwrap_or((Vec::new(), e.path.clone()));
            modules.push(module.to_string());
            ctx.modules = Some((modules, origin));
            converted(format!("{module:?} in train.0.modules"))
        }
        Some(true) => needless("every weight trains: there is no LoRA"),
        _ => needless("off"),
    }
}

fn tune_folder(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(path) = text(&e.value) else { return needless("not set") };
    let plain = path.trim_end_matches('/').trim_end_matches("/original");
    let set = ctx.set("model.source", quote(plain), e);
    if plain == path { Outcome(Fate::Taken, set) } else { converted(set) }
}

/// `tokenizer.max_seq_len`: without it nothing is cut there.
fn tune_length(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
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
        _ => refused("the loss is the cross-entropy of the targets"),
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
