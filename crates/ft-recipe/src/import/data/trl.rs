//! Data sets of TRL: `dataset_name` and its kin, or `datasets`; those of alignment-handbook: `dataset_mixture`,
//! `dataset_mixer`.

use super::source::{Keys, Source, each, origin, value, word};
use crate::import::context::{Context, Outcome, converted, needless, refused};
use crate::import::read::{is_off, number, text, words};
use crate::syntax::quote;
use serde_json::Value;

/// Advice on a share of the rows of one data set.
const SHARE: &str = "a share of its rows there, at random: max_samples = their number, the first ones";

/// Training and evaluation sources.
pub(super) fn sources(ctx: &mut Context<'_>) -> (Vec<Source>, Vec<Source>) {
    let mut train = each(ctx, "datasets", mixture);
    train.extend(each(ctx, "dataset_mixture.datasets", mixture));
    let mut eval = Vec::new();
    mixer(ctx, &mut train, &mut eval);
    let Some(name) = ctx.get("dataset_name").and_then(text) else {
        ctx.of_data.insert("dataset_test_split".into(), needless("it is a split of dataset_name"));
        return (train, eval);
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

/// `dataset_mixer`: data sets with shares of their rows, each read in all `dataset_splits`.
fn mixer(ctx: &mut Context<'_>, train: &mut Vec<Source>, eval: &mut Vec<Source>) {
    let splits = ctx.get("dataset_splits").map_or_else(|| vec!["train".into(), "test".into()], words);
    let told = format!("split of each source: {}", splits.join(", "));
    ctx.of_data.insert("dataset_splits".into(), converted(told));
    for e in &ctx.entries.list {
        let Some(id) = e.path.strip_prefix("dataset_mixer.") else { continue };
        for split in &splits {
            let mut source = Source::named(id, e.path.as_str());
            source.keys.insert("split", quote(split));
            if split.contains("test") { eval.push(source) } else { train.push(source) }
        }
        let outcome = match number(&e.value) {
            Some(1.0) => converted(format!("data: source = {id:?}")),
            _ => refused(format!("source = {id:?}; {SHARE}")),
        };
        ctx.of_data.insert(e.path.clone(), outcome);
    }
}

/// One of `datasets`, of TRL or of alignment-handbook.
fn mixture(ctx: &mut Context<'_>, keys: &Keys) -> Vec<Source> {
    let origin = origin(keys, "datasets");
    let path = word(keys, "path").or_else(|| word(keys, "id")).unwrap_or_default();
    let files = value(keys, "data_files").map(words).unwrap_or_default();
    let mut source = Source::named(&path, origin);
    for (at, key, value) in keys {
        let outcome = match key.as_str() {
            "path" if !files.is_empty() => needless("the kind of files: their names tell it"),
            "path" | "id" => converted(format!("data.train: source = {path:?}")),
            "data_files" if !files.is_empty() => converted(format!("a source each: {}", files.join(", "))),
            "name" | "config" => source.put("config", value),
            "split" => source.put("split", value),
            _ if is_off(value) => needless("off"),
            "columns" => needless("the format says which columns are read"),
            "weight" if number(value) == Some(1.0) => needless("all rows"),
            "weight" => refused(SHARE),
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
