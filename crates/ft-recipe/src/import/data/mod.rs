//! Data sets of the toolkits to sources of a recipe.

mod axolotl;
mod factory;
mod source;
mod torchtune;
mod trl;

use super::context::{Context, Outcome, refused};
use super::read::Entry;
use crate::syntax::quote;
use source::Source;

/// First parts of keys of configurations without training, with their purposes.
const OTHERS: [(&str, &str); 7] = [
    ("tasks", "it evaluates a model; ft eval does so on rows"),
    ("prompt", "it answers a prompt, as ft chat does"),
    ("infer_backend", "it answers prompts, as ft chat and ft serve do"),
    ("export_dir", "it exports a model, as ft merge does"),
    ("quantizer", "it quantizes a model"),
    ("compute_environment", "it is accelerate's: ranks and sharding are keys of [parallel]"),
    ("train_dataset", "it is of LLaMA-Factory's trainer v1, whose keys are not known"),
];

/// The reason against a recipe for a configuration without training data, in words.
pub(super) fn missing(ctx: &Context<'_>) -> Option<String> {
    if ctx.draft.get("data.train.0.source").is_some() {
        return None;
    }
    let has = |key: &str| ctx.entries.list.iter().any(|e| e.path.split('.').next() == Some(key));
    let key = match ctx.tool {
        "axolotl" => "datasets",
        "TRL" => "dataset_name, datasets or dataset_mixture",
        _ => "dataset",
    };
    let of_v1 = ["model", "dist_config", "peft_config", "init_config"].into_iter().any(has);
    let other = OTHERS.iter().find(|(key, _)| has(key) && (*key != "train_dataset" || of_v1));
    Some(other.map_or_else(|| format!("{key} names no training data"), |(_, why)| (*why).to_string()))
}

/// The outcome of a key of a data set, found by [`all`].
pub(super) fn outcome(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let found = ctx.of_data.get(&e.path).cloned();
    found.unwrap_or_else(|| refused("no such key of data here: ft schema lists them"))
}

/// Converts the data of the file, before the other keys.
pub(super) fn all(ctx: &mut Context<'_>) {
    let (train, eval): (Vec<Source>, Vec<Source>) = match ctx.tool {
        "axolotl" => {
            let mut train = source::each(ctx, "datasets", axolotl::source);
            train.extend(source::each(ctx, "pretraining_dataset", axolotl::source));
            (train, source::each(ctx, "test_datasets", axolotl::source))
        }
        "LLaMA-Factory" => (factory::sources(ctx, "dataset"), factory::sources(ctx, "eval_dataset")),
        "torchtune" => (
            source::each(ctx, "dataset", torchtune::source),
            source::each(ctx, "dataset_val", torchtune::source),
        ),
        _ => trl::sources(ctx),
    };
    for (list, sources) in [("train", train), ("eval", eval)] {
        for (i, mut source) in sources.into_iter().enumerate() {
            if let Some(format) = ctx.task.format() {
                source.keys.insert("format", quote(format.word()));
            }
            let path = format!("data.{list}.{i}");
            // sources of LLaMA-Factory have theirs
            let has_one = ctx.tool == "LLaMA-Factory" || source.keys.contains_key("split");
            let split = match list {
                _ if has_one || !source.is_of_hub() => None,
                "eval" if ctx.tool == "axolotl" => Some("test"),
                _ => Some("train"),
            };
            let key: String = match source.origin.as_str() {
                "dataset_name" => "dataset_train_split".into(),
                origin => format!("{origin}.split"),
            };
            source.write(ctx, &path);
            if let Some(split) = split {
                ctx.set_default(&format!("{path}.split"), quote(split), &key);
            }
        }
    }
    if ctx.tool == "torchtune" && ctx.draft.get("data.pack").is_none() {
        ctx.set_default("data.pack", "false".into(), "dataset.packed");
    }
}
