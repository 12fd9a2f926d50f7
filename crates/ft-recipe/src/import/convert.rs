//! Conversions by name.

use super::context::{Context, Convert, Fate, Outcome, needless, refused};
use super::read::Entry;
use super::{data, optimize, prefer, run, train, tune};
use crate::keys::of_json;

/// The conversion named by a row of the table.
pub(super) fn by_name(name: &str) -> Option<Convert> {
    let others = [run::by_name, optimize::by_name, train::by_name, tune::by_name, prefer::by_name];
    Some(match name {
        "data" => data::outcome,
        "template_variable" => |ctx, e| free(ctx, "data.template", e),
        "override" => |ctx, e| free(ctx, "model.override", e),
        _ => return others.iter().find_map(|by_name| by_name(name)),
    })
}

/// Puts a value into a free table, under the last parts of the path.
fn free(ctx: &mut Context<'_>, table: &str, entry: &Entry) -> Outcome {
    let Some((_, key)) = entry.path.split_once('.') else { return refused("a table is wanted") };
    match (key.contains('.'), of_json(&entry.value)) {
        (false, Some(value)) => Outcome(Fate::Taken, ctx.set(&format!("{table}.{key}"), value, entry)),
        (true, _) => refused(format!("write it into [{table}]")),
        (_, None) => needless("not set"),
    }
}
