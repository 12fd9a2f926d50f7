//! Adapter files: read to go on from or to use, and written as PEFT reads them.

use super::Error;
use super::params::Params;
use super::peft::{self, PREFIX, PeftConfig};
use super::selection::{Choice, Part, Selection, Trained};
use crate::model::Decoder;
use crate::store::{self, TensorFiles};
use candle_core::{DType, Device, Tensor};
use std::path::{Path, PathBuf};

/// An adapter folder that was opened.
#[derive(Debug)]
pub struct Adapter {
    /// The folder.
    pub dir: PathBuf,
    /// Its config.
    pub config: PeftConfig,
    files: TensorFiles,
}

impl Adapter {
    /// Opens `adapter_config.json` and `adapter_model.safetensors` of a folder.
    pub fn open(dir: &Path) -> crate::Result<Self> {
        let config = PeftConfig::load(dir)?;
        let files = TensorFiles::open_file(&dir.join("adapter_model.safetensors"))?;
        Ok(Self { dir: dir.to_path_buf(), config, files })
    }

    fn fail(&self, why: String) -> Error {
        Error::Peft { file: self.dir.join("adapter_model.safetensors").display().to_string(), why }
    }

    /// Names under which PEFT files may hold a trained tensor.
    fn keys(t: &Trained) -> Vec<String> {
        let mut keys = vec![format!("{PREFIX}{}", t.name)];
        if t.part == Part::Magnitude {
            keys.push(format!("{PREFIX}{}.weight", t.name));
        }
        if matches!(t.part, Part::Weight | Part::Bias) {
            let last = if t.part == Part::Weight { "weight" } else { "bias" };
            keys.push(format!("{PREFIX}{}.modules_to_save.{last}", t.module));
        }
        keys
    }

    /// The adapter's values of a trained tensor, f32 on the CPU, if it holds them.
    pub fn get(&self, t: &Trained) -> crate::Result<Option<Tensor>> {
        for key in Self::keys(t) {
            if let Some(info) = self.files.info(&key) {
                if info.shape != t.shape {
                    return Err(self
                        .fail(format!("{key}: {:?} in the adapter, {:?} by the recipe", info.shape, t.shape))
                        .into());
                }
                return Ok(Some(self.files.tensor(&key, DType::F32, &Device::Cpu)?));
            }
        }
        Ok(None)
    }

    /// Refuses adapter tensors that nothing trains, half an adapter, and a base that is not this one.
    pub fn check_against(&self, selection: &Selection, params: &Params) -> crate::Result<()> {
        let mut known: Vec<String> = Vec::new();
        for t in &params.tensors {
            known.extend(Self::keys(t));
        }
        if selection.tied_in_full() {
            self.check_tied(params)?;
            known.push(format!("{PREFIX}lm_head.weight"));
        }
        let mut extra: Vec<&str> = self
            .files
            .names()
            .filter(|n| !known.iter().any(|k| k == n) && !n.contains(".base_layer."))
            .collect();
        extra.sort_unstable();
        if let Some(first) = extra.first() {
            return Err(self
                .fail(format!(
                    "{first}: {} in the adapter that nothing trains\n  hint: add a [[train]] rule that chooses \
                     it, or take it out of the adapter",
                    if extra.len() == 1 { "a tensor".to_string() } else { format!("{} tensors", extra.len()) }
                ))
                .into());
        }
        for (m, c) in &selection.modules {
            let Choice::Lora { .. } = c else { continue };
            let held: Vec<bool> = params
                .tensors
                .iter()
                .filter(|t| t.module == m.name && matches!(t.part, Part::A | Part::B))
                .map(|t| Self::keys(t).iter().any(|k| self.files.info(k).is_some()))
                .collect();
            if held.iter().any(|h| *h) && !held.iter().all(|h| *h) {
                return Err(self.fail(format!("{}: has one of lora_A and lora_B", m.name)).into());
            }
        }
        Ok(())
    }

    /// A tied head's copy must be the embedding.
    fn check_tied(&self, params: &Params) -> crate::Result<()> {
        let head = format!("{PREFIX}lm_head.weight");
        let Some(i) = params.find("model.embed_tokens.weight") else { return Ok(()) };
        let (Some(embedding), Some(_)) = (self.get(&params.tensors[i])?, self.files.info(&head)) else {
            return Ok(());
        };
        let head_values = self.files.tensor(&head, DType::F32, &Device::Cpu)?;
        let same = head_values.dims() == embedding.dims()
            && (head_values - embedding)?.abs()?.max_all()?.to_scalar::<f32>()? == 0.0;
        if same {
            return Ok(());
        }
        let why = format!("{head} is not the embedding, but the model's head and embedding are one tensor");
        Err(self.fail(why).into())
    }

    /// Compares `*.base_layer.*` tensors, which PEFT saves under a tied head's adapter, with the base's.
    pub fn check_base(&self, base: &TensorFiles, tied: bool) -> crate::Result<()> {
        for name in self.files.names().filter(|n| n.contains(".base_layer.")) {
            let own = name.trim_start_matches(PREFIX).replace(".base_layer.", ".");
            let own = if tied && own == "lm_head.weight" && base.info(&own).is_none() {
                "model.embed_tokens.weight".to_string()
            } else {
                own
            };
            if base.info(&own).is_none() {
                return Err(self.fail(format!("{name}: the base has no {own}")).into());
            }
            let (a, b) = (
                self.files.tensor(name, DType::F32, &Device::Cpu)?,
                base.tensor(&own, DType::F32, &Device::Cpu)?,
            );
            let same = a.dims() == b.dims() && {
                let worst = (a - b)?.abs()?.max_all()?.to_scalar::<f32>()?;
                // one rounding to bf16 or f16 apart
                worst <= 0.01
            };
            if !same {
                return Err(self
                    .fail(format!("{name}: differs from the base's {own}: the adapter is of another model"))
                    .into());
            }
        }
        Ok(())
    }
}

/// Writes `adapter/`: PEFT's config and tensors in f32. `base` and `revision` go into the config.
pub fn save(
    dir: &Path,
    selection: &Selection,
    params: &Params,
    decoder: &Decoder,
    base: &str,
    revision: Option<&str>,
) -> crate::Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| store::Error::write("make the folder", dir, None, e))?;
    let mut tensors = Vec::new();
    for (i, t) in params.tensors.iter().enumerate() {
        let value = params.master(i)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        if selection.tied_in_full() && t.name == "model.embed_tokens.weight" {
            // PEFT gives each its own copy
            tensors.push((format!("{PREFIX}lm_head.weight"), value.clone()));
        }
        tensors.push((format!("{PREFIX}{}", t.name), value));
    }
    // PEFT has one switch for DoRA: beside it, plain LoRA gets the magnitudes at which DoRA changes nothing
    if params.tensors.iter().any(|t| t.part == Part::Magnitude) {
        for m in plain_lora(selection) {
            let Some((linear, lora)) = decoder.linear(m).and_then(|l| Some((l, l.lora.as_ref()?))) else {
                return Err(Error::Peft {
                    file: dir.display().to_string(),
                    why: format!("{m}: PEFT's DoRA has no neutral magnitude for LoRA on an embedding"),
                }
                .into());
            };
            let norms = lora.norms(&linear.weight, &linear.weight.row_squares()?)?;
            let name = format!("{PREFIX}{m}.lora_magnitude_vector");
            tensors.push((name, norms.to_device(&Device::Cpu)?.to_dtype(DType::F32)?));
        }
    }
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    store::write_file(&dir.join("adapter_model.safetensors"), &tensors, &[("format", "pt")])?;
    let json = peft::config_json(selection, base, revision);
    let text = serde_json::to_string_pretty(&json).unwrap_or_default() + "\n";
    store::write_atomic(&dir.join("adapter_config.json"), text.as_bytes())?;
    Ok(())
}

/// Modules with LoRA and without DoRA.
fn plain_lora(selection: &Selection) -> impl Iterator<Item = &str> {
    selection
        .modules
        .iter()
        .filter(|(_, c)| matches!(c, Choice::Lora { spec, .. } if !spec.dora))
        .map(|(m, _)| m.name.as_str())
}
