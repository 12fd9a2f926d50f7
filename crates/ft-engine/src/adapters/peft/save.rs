//! Writes adapter folders in PEFT's format.

use super::format::{PREFIX, current, metadata};
use super::fused::FusedTensor;
use super::write::{DROPOUT, config_json};
use crate::adapters::{Error, Selection, Trained};
use crate::model::Decoder;
use crate::model::linear::Linear;
use crate::model::modules::{Group, Kind, Module};
use candle_core::{DType, Device, Tensor};
use ft_base::store;
use ft_base::terminal::warn;
use ft_recipe::Quantize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Returns a trained tensor by index: f32, or 16 bits for weights trained without f32 master weights.
pub type Values<'a> = dyn Fn(usize) -> ft_base::Result<Tensor> + 'a;

/// Writes `adapter/`: PEFT's config and the tensors in their current dtype. `base` and `revision` go into
/// the config; `quantize` is `model.quantize` of the run; `neutral` is the output of [`neutral`] over all
/// units.
pub fn save(
    dir: &Path,
    selection: &Selection,
    (trained, values, neutral): (&[Trained], &Values<'_>, Vec<(String, Tensor)>),
    base: &str,
    revision: Option<&str>,
    quantize: Quantize,
) -> ft_base::Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| store::Error::write("make the folder", dir, e))?;
    let (mut tensors, mut fused) = (Vec::new(), BTreeMap::new());
    for (i, t) in trained.iter().enumerate() {
        let value = values(i)?;
        if let Some(place) = t.fused.as_ref().filter(|place| place.parameter.slice.is_some()) {
            let all = fused.entry(place.name(t.part)).or_insert_with(|| FusedTensor::new(t, place));
            all.add(place, value);
            continue;
        }
        if selection.tied_in_full() && t.module == selection.name_of(Group::Embedding) {
            // PEFT stores a copy for both.
            let head = selection.name_of(Group::Head);
            tensors.push((format!("{PREFIX}{head}.weight"), Stored::Whole(value.clone())));
        }
        let name = t.fused.as_ref().map_or_else(|| t.name.clone(), |place| place.name(t.part));
        tensors.push((format!("{PREFIX}{name}"), Stored::Whole(value)));
    }
    tensors.extend(fused.into_iter().map(|(name, all)| (format!("{PREFIX}{name}"), Stored::Fused(all))));
    tensors.extend(neutral.into_iter().map(|(name, values)| (name, Stored::Whole(values))));
    let labels = selection.scores.as_ref().map(|labels| json!(labels).to_string());
    write_tensors(&dir.join("adapter_model.safetensors"), tensors, &metadata(quantize, labels.as_deref()))?;
    let json = config_json(selection, base, revision);
    if let Some(other) = other_dropout(selection, &json) {
        let written = &json[DROPOUT];
        warn(&format!(
            "adapter_config.json has one {DROPOUT} for all modules: {written}, and some trained with {other}"
        ));
    }
    Ok(store::write_json(&dir.join("adapter_config.json"), &json)?)
}

/// A tensor of the file; of all experts, in parts joined on writing.
enum Stored {
    Whole(Tensor),
    Fused(FusedTensor),
}

/// Writes tensors under the names of transformers 5.
fn write_tensors(
    path: &Path,
    tensors: Vec<(String, Stored)>,
    metadata: &[(&str, &str)],
) -> ft_base::Result<()> {
    let (mut entries, mut by_name) = (Vec::new(), BTreeMap::new());
    for (name, stored) in tensors {
        let name = current(&name).into_owned();
        let (dtype, shape) = match &stored {
            Stored::Whole(values) => (values.dtype(), values.dims().to_vec()),
            Stored::Fused(all) => all.entry().map(|(dtype, shape)| (dtype, shape.to_vec()))?,
        };
        entries.push((name.clone(), dtype, shape));
        by_name.insert(name, stored);
    }
    crate::files::write_each(path, &entries, metadata, |name| {
        Ok(match &by_name[name] {
            Stored::Whole(values) => values.clone(),
            Stored::Fused(all) => all.joined()?,
        })
    })
}

/// A dropout of LoRA on linears other than the one in the config, if any. PEFT applies none to embeddings.
fn other_dropout(selection: &Selection, config: &Value) -> Option<f64> {
    let linears = selection.loras().filter(|(m, _)| !matches!(m.kind, Kind::Embedding { .. }));
    linears.map(|(_, spec)| spec.dropout).find(|p| config[DROPOUT].as_f64() != Some(*p))
}

/// Whether [`neutral`] magnitudes are needed: PEFT's DoRA switch applies to the whole adapter, so plain
/// LoRA modules need one too.
pub fn needs_neutral(selection: &Selection) -> bool {
    selection.loras().any(|(_, spec)| spec.dora) && plain_lora(selection).next().is_some()
}

/// DoRA magnitudes without effect for the plain LoRA modules of a unit that `has` takes, by file key.
///
/// # Errors
/// LoRA on the embedding: PEFT has no neutral magnitude for it.
pub fn neutral(
    selection: &Selection,
    decoder: &Decoder,
    unit: usize,
    has: &dyn Fn(&Module) -> bool,
) -> ft_base::Result<Vec<(String, Tensor)>> {
    let layers = decoder.layers.len();
    let linears: HashMap<String, &Linear> = decoder
        .linears()
        .into_iter()
        .filter(|(m, _)| m.unit(layers) == unit)
        .map(|(m, l)| (m.name, l))
        .collect();
    let mut out = Vec::new();
    for m in plain_lora(selection).filter(|m| m.unit(layers) == unit && has(m)) {
        let Some((linear, lora)) = linears.get(&m.name).and_then(|l| Some((l, l.lora.as_ref()?))) else {
            return Err(Error::Peft {
                file: m.name.clone(),
                why: "PEFT's DoRA has no neutral magnitude for LoRA on an embedding".into(),
            }
            .into());
        };
        let norms = lora.norms(&linear.weight, &linear.weight.row_squares()?)?;
        let name = format!("{PREFIX}{}.lora_magnitude_vector", m.name);
        out.push((name, norms.real()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?));
    }
    Ok(out)
}

/// Modules with LoRA but without DoRA.
fn plain_lora(selection: &Selection) -> impl Iterator<Item = &Module> {
    selection.loras().filter(|(_, spec)| !spec.dora).map(|(m, _)| m)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tiny_qwen3_5_moe;
    use ft_recipe::Recipe;

    /// PEFT takes no dropout beside parameters.
    #[test]
    fn dropouts_other_than_the_one_written_are_told() {
        let config = tiny_qwen3_5_moe();
        for (rules, written, other) in [
            ("modules = [\"attention\"]\ndropout = 0.1", 0.1, None),
            ("modules = [\"attention\"]\ndropout = 0.1\n[[train]]\nmodules = [\"mlp\"]", 0.1, Some(0.0)),
            ("modules = [\"attention\"]\ndropout = 0.1\n[[train]]\nmodules = [\"experts\"]", 0.0, Some(0.1)),
        ] {
            let data = "[data]\ntrain = [{ source = \"x\", format = \"text\" }]\n";
            let text = format!("[model]\nsource = \"m\"\n[[train]]\n{rules}\n{data}");
            let recipe = Recipe::parse(&text, "r.toml", &[]).expect("a recipe");
            let selection = Selection::from_rules(&config, &recipe.train).expect("a selection");
            let json = config_json(&selection, "m", None);
            assert_eq!(json[DROPOUT], json!(written), "{rules}");
            assert_eq!(other_dropout(&selection, &json), other, "{rules}");
        }
    }
}
