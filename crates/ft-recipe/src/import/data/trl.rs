//! Data sets of TRL: `dataset_name` and its kin, or `datasets`.

use super::source::{Keys, Source, each, origin, value, word};
use crate::import::context::{Context, Outcome, converted, needless, refused};
use crate::import::read::{is_off, text, words};
use crate::syntax::quote;
use serde_json::Value;

/// Training and evaluation sources.
pub(super) fn sources(ctx: &mut Context<'_>) -> (Vec<Source>, Vec<Source>) {
    let mut train = each(ctx, "datasets", mixture);
    let Some(name) = ctx.get("dataset_name").and_then(text) else {
        ctx.of_data.insert("dataset_test_split".into(), needless("it is a split of dataset_name"));
        return (train, Vec::new());
    };
    let mut source = Source::named(&name, "dataset_name");
    let tell = |ctx: &mut Context<'_>, key: &str, convert: &mut dyn FnMut(&Value) -> Outcome| {
        if let Some(v) = ctx.get(key).cloned() {
            ctx.of_data.insert(key.into(), convert(&v));
        }
    };
    tell(ctx, "dataset_name", &mut |_| converted(format!("data.train: source = {name:?}")));
    tell(ctx, "dataset_config", &mut |v| source.put("config", v));
    tell(ctx, "dataset_text_field", &mut |v| match text(v).as_deref() {
        Some("text") => needless("the format's own name"),
        _ => {
            source.format("text");
            source.field("text", v)
        }
    });
    let mut eval = Vec::new();
    let by_default = ctx.is_default("dataset_test_split");
    // a file has no splits
    let off = matches!(ctx.word("eval_strategy").as_str(), "" | "no" | "false");
    let evaluates = !(off || by_default && source.is_file());
    tell(ctx, "dataset_test_split", &mut |v| match text(v).filter(|_| evaluates) {
        Some(split) => {
            let mut of_test = source.clone();
            of_test.keys.insert("split", quote(&split));
            of_test.origin = "dataset_test_split".into();
            of_test.by_default = by_default;
            eval.push(of_test);
            converted(format!("data.eval: split = {}", quote(&split)))
        }
        None => needless("eval_strategy does not evaluate"),
    });
    tell(ctx, "dataset_train_split", &mut |v| source.put("split", v));
    train.push(source);
    (train, eval)
}

/// One of `datasets`.
fn mixture(ctx: &mut Context<'_>, keys: &Keys) -> Vec<Source> {
    let origin = origin(keys, "datasets");
    let path = word(keys, "path").unwrap_or_default();
    let files = value(keys, "data_files").map(words).unwrap_or_default();
    let mut source = Source::named(&path, origin);
    for (at, key, value) in keys {
        let outcome = match key.as_str() {
            "path" if !files.is_empty() => needless("the kind of files: their names tell it"),
            "path" => converted(format!("data.train: source = {path:?}")),
            "data_files" if !files.is_empty() => converted(format!("a source each: {}", files.join(", "))),
            "name" => source.put("config", value),
            "split" => source.put("split", value),
            _ if is_off(value) => needless("off"),
            "columns" => needless("the format says which columns are read"),
            "fraction" => {
                refused("a share of the mixture there: max_samples = the rows of this source, the first ones")
            }
            "data_dir" => refused("a path to the files is wanted: source"),
            _ => refused("no such key of a source: ft schema lists them"),
        };
        ctx.of_data.insert(at.clone(), outcome);
    }
    source.of_files(&files, "")
}
