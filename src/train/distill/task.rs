//! Task "distill": losses of micro-batches, and checks of the rows.

use crate::train::Error;
use candle_core::Device;
use ft_base::terminal::warn;
use ft_data::{Dataset, Micro, Tokenizer};
use ft_engine::model::Batch;
use ft_engine::model::batch::Distillation;
use ft_recipe::{Part, Recipe, Task};
use serde_json::{Map, Value, json};

/// Reads `[distill]`; `None` for other tasks.
pub fn settings(r: &Recipe) -> Option<Distillation> {
    let (temperature, alpha) = (r.distill.temperature, r.distill.alpha);
    (r.task == Task::Distill).then_some(Distillation { temperature, alpha })
}

/// Adds the teacher's values of a micro-batch, in distillation.
pub fn with_teacher<'a>(
    batch: Batch<'a>,
    m: &Micro,
    by: Option<Distillation>,
    device: &Device,
) -> candle_core::Result<Batch<'a>> {
    match by {
        Some(by) if !m.targets.is_empty() => {
            batch.with_teacher((m.teacher.kept, &m.teacher.ids, &m.teacher.logits), by, device)
        }
        _ => Ok(batch),
    }
}

/// Loss and metrics, from the means of cross-entropies and divergences: the cross-entropy alone without distillation.
pub fn loss(by: Option<Distillation>, ce: f64, kd: f64) -> (f64, Map<String, Value>) {
    let Some(Distillation { alpha, .. }) = by else { return (ce, Map::new()) };
    let metrics = [("kd", kd), ("ce", ce)].map(|(name, value)| (name.to_string(), json!(value)));
    (alpha * kd + (1.0 - alpha) * ce, metrics.into_iter().collect())
}

/// Checks that the teacher of the rows has the tokenizer and the chat template of the model, in task "distill". Warns
/// about values without use.
///
/// # Errors
/// Another tokenizer or chat template, at the key of the rows.
pub fn check(
    recipe: &Recipe,
    tokenizer: Option<&Tokenizer>,
    (part, data): (Part, &Dataset),
) -> ft_base::Result<()> {
    let key = part.key(&recipe.data);
    let fail = |why: String| Err(Error::at(recipe, key, why).into());
    if recipe.task != Task::Distill {
        if data.rows.has_teacher {
            let task = recipe.task.word();
            warn(&format!("{key}: rows have values of a teacher, which task = \"{task}\" does not read"));
        }
        return Ok(());
    }
    let identity = tokenizer.filter(|_| !data.stats.teachers.is_empty()).map(Tokenizer::identity);
    for by in &data.stats.teachers {
        let by: Value = serde_json::from_str(by).unwrap_or_default();
        let teacher = by["model"].as_str().unwrap_or("a teacher");
        let differs = |what: &str, own: Option<&str>| by[what].as_str().filter(|theirs| own != Some(theirs));
        if differs("tokenizer", identity.as_ref().map(|i| i.vocabulary.as_str())).is_some() {
            return fail(format!(
                "rows with values of {teacher} have ids of another tokenizer than {}'s\n  hint: ft logits {teacher} \
                 RECIPE --out DIR, with this model in the recipe, writes them anew",
                recipe.model.source
            ));
        }
        if differs("template", identity.as_ref().and_then(|i| i.template.as_deref())).is_some() {
            return fail(format!(
                "rows with values of {teacher} were written with another chat template than the model's\n  hint: \
                 data.chat_template = the one of ft logits, or ft logits again"
            ));
        }
    }
    Ok(())
}
