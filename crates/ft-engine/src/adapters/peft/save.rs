//! Writes adapter folders in PEFT's format.

use super::format::{PREFIX, current, metadata};
use super::fused::FusedTensors;
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
use std::collections::HashMap;
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
    let (mut tensors, mut fused) = (Vec::new(), FusedTensors::default());
    for (i, t) in trained.iter().enumerate() {
        let value = values(i)?;
        if let Some(place) = &t.fused {
            fused.add(t, place, value);
            continue;
        }
        if selection.tied_in_full() && t.module == selection.name_of(Group::Embedding) {
            // PEFT stores a copy for both.
            let head = selection.name_of(Group::Head);
            tensors.push((format!("{PREFIX}{head}.weight"), value.clone()));
        }
        tensors.push((format!("{PREFIX}{}", t.name), value));
    }
    tensors.extend(fused.tensors()?);
    tensors.extend(neutral);
    tensors.iter_mut().for_each(|(name, _)| *name = current(name).into_owned());
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let labels = selection.scores.as_ref().map(|labels| json!(labels).to_string());
    let metadata = metadata(quantize, labels.as_deref());
    crate::files::write_file(&dir.join("adapter_model.safetensors"), &tensors, &metadata)?;
    let json = config_json(selection, base, revision);
    if let Some(other) = other_dropout(selection, &json) {
        let written = &json[DROPOUT];
        warn(&format!(
            "adapter_config.json has one {DROPOUT} for all modules: {written}, and some trained with {other}"
        ));
    }
    Ok(store::write_json(&dir.join("adapter_config.json"), &json)?)
}

/// A dropout of LoRA on linears other than the one in the config, if there is any. PEFT applies none to embeddings.
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
