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

/// The outcome of a key of a data set, found by [`all`].
pub(super) fn outcome(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    ctx.of_data.remove(&e.path).unwrap_or_else(|| refused("no such key of data here: ft schema lists them"))
}

/// Converts the data of the file, before its other keys.
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
            source.write(ctx, &format!("data.{list}.{i}"));
        }
    }
}
