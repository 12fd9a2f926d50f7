//! Exports adapters to the layouts of other programs: PEFT with fused experts, and vLLM.
//!
//! `ft`'s own adapters have an A, B pair per linear, as in PEFT 0.18. Since transformers 5, all experts of
//! a layer form one parameter, and PEFT 0.19 and later adapt it as a whole (`target_parameters`): with E
//! experts and LoRA rank R, A is `[E R, i]` (experts outer) and B is `[o, R E]` (experts inner). Gate and
//! up projection form one parameter with twice the rows: the LoRA rank is the sum of both, and B is
//! block-structured.
//!
//! vLLM stacks the linears of all experts in a layer: every expert needs LoRA, with a common rank.
//!
//! Both targets use a single scale (alpha / rank of the config): every B is premultiplied by its own scale,
//! and the config's scale is 1.

use crate::adapters::peft::{self, PREFIX, metadata};
use crate::adapters::{Adapter, Choice, Error, Part, Selection, part_name};
use crate::model::modules::{Group, Module};
use crate::model::{Config, Moe};
use candle_core::{DType, Device, Tensor};
use ft_base::store;
use ft_recipe::LoraSpec;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Target of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// PEFT 0.19 and later with transformers 5.
    PeftFused,
    /// vLLM.
    Vllm,
}

/// An adapter to be exported.
pub struct Export<'a> {
    /// Config of the base.
    pub config: &'a Config,
    pub adapter: &'a Adapter,
    /// Selection described by the adapter.
    pub selection: &'a Selection,
    values: HashMap<(String, Part), Tensor>,
}

/// A and B of one linear, B premultiplied by the scale.
struct Pair {
    a: Tensor,
    b: Tensor,
}

impl<'a> Export<'a> {
    /// Reads an adapter.
    ///
    /// # Errors
    /// A tensor required by the config but missing from the file.
    pub fn new(config: &'a Config, adapter: &'a Adapter, selection: &'a Selection) -> ft_base::Result<Self> {
        let mut values = HashMap::new();
        for t in selection.trained() {
            match adapter.get(&t)? {
                Some(v) => values.insert((t.module.clone(), t.part), v),
                None => return Err(fail(&adapter.dir, format!("{}: missing", t.name)).into()),
            };
        }
        Ok(Self { config, adapter, selection, values })
    }

    /// Writes the adapter for `target` into a folder.
    ///
    /// # Errors
    /// Anything the target does not support, by name; an unwritable folder.
    pub fn write(&self, target: Target, out: &Path) -> ft_base::Result<()> {
        let (mut tensors, config) = match target {
            Target::PeftFused => self.fused()?,
            Target::Vllm => self.vllm()?,
        };
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        std::fs::create_dir_all(out).map_err(|e| store::Error::write("make the folder", out, e))?;
        crate::files::write_file(
            &out.join("adapter_model.safetensors"),
            &tensors,
            &metadata(self.adapter.quantize()?, None),
        )?;
        Ok(store::write_json(&out.join("adapter_config.json"), &config)?)
    }

    fn refuse(&self, m: &Module, why: &str) -> ft_base::Error {
        fail(&self.adapter.dir, format!("{}: {why}", m.name)).into()
    }

    /// A and B of a module.
    fn pair(&self, m: &Module, spec: &LoraSpec) -> ft_base::Result<Pair> {
        let of = |part| if part == Part::A { m.a_of() } else { &m.name };
        let get = |part| match self.values.get(&(of(part).to_string(), part)) {
            Some(t) => Ok(t.clone()),
            None => Err(self.refuse(m, "half an adapter")),
        };
        Ok(Pair { a: get(Part::A)?, b: (get(Part::B)? * peft::scale(spec))? })
    }

    fn no_dora(&self, who: &str) -> ft_base::Result<()> {
        match self.selection.loras().find(|(_, s)| s.dora) {
            Some((m, _)) => {
                Err(self.refuse(m, &format!("has DoRA, which {who} does not load\n  hint: ft merge")))
            }
            None => Ok(()),
        }
    }

    /// The mixture of a model whose adapters have a tensor an expert.
    fn unfused(&self) -> ft_base::Result<&Moe> {
        let Some(moe) = &self.config.moe else {
            let why = format!("{} has no experts: the adapter loads as it is", self.config.family.model_type);
            return Err(fail(&self.adapter.dir, why).into());
        };
        if moe.fused {
            let why = "its adapters are fused as they are: nothing to export";
            return Err(fail(&self.adapter.dir, why.into()).into());
        }
        Ok(moe)
    }

    fn fused(&self) -> ft_base::Result<(Vec<(String, Tensor)>, Value)> {
        let moe = self.unfused()?;
        self.no_dora("PEFT on fused experts")?;
        let mut rest = self.selection.clone();
        let mut experts = Experts::new();
        let (mut tensors, mut ranks, mut parameters) = (Vec::new(), Map::new(), Vec::new());
        for (m, c) in &mut rest.modules {
            match (m.group, &mut *c) {
                (Group::Experts, Choice::Full { .. }) => {
                    let why =
                        "an expert that trained in full has no place in a fused adapter\n  hint: ft merge";
                    return Err(self.refuse(m, why));
                }
                (Group::Experts, Choice::Lora { spec, .. }) => {
                    let (Some(l), Some(e)) = (m.layer, m.expert) else { continue };
                    let which = number(self.config, m);
                    let none = || (0..moe.experts).map(|_| Vec::new()).collect();
                    let all = experts.entry((l, which == DOWN)).or_insert_with(none);
                    all[e].push((self.pair(m, spec)?, if which == UP { moe.width } else { 0 }));
                    *c = Choice::Freeze;
                }
                // Dense feed-forwards too: PEFT mistakes any module named gate_proj for an expert of an old
                // model and would target the fused parameter instead.
                (Group::Router | Group::Mlp, Choice::Lora { spec, .. }) => {
                    let p = self.pair(m, spec)?;
                    let name = v5(self.config, &m.name);
                    ranks.insert(pattern(&format!("{name}.weight")), json!(spec.rank));
                    parameters.push(format!("{name}.weight"));
                    tensors.push((format!("{PREFIX}{name}.lora_A.weight"), p.a));
                    tensors.push((format!("{PREFIX}{name}.lora_B.weight"), p.b));
                    *c = Choice::Freeze;
                }
                (_, Choice::Lora { spec, .. }) => {
                    let p = self.pair(m, spec)?;
                    for (part, t) in [(Part::A, p.a), (Part::B, p.b)] {
                        let name = part_name(m, part);
                        tensors.push((format!("{PREFIX}{}.{name}", m.name), t));
                    }
                    *spec = unit(spec.rank);
                }
                _ => {}
            }
        }
        self.whole(&mut tensors);
        for ((l, is_down), all) in &experts {
            let (d, f, block) = (self.config.hidden, moe.width, experts_of(self.config, *l));
            let (name, out, inp) = if *is_down { ("down_proj", d, f) } else { ("gate_up_proj", 2 * f, d) };
            let (a, b, rank) = fuse(all, out, inp)?;
            // PEFT nests two adapted parameters of one module: the first one becomes the inner.
            let is_inner = !is_down && experts.contains_key(&(*l, true));
            let nested = if is_inner { ".base_layer" } else { "" };
            ranks.insert(pattern(&format!("{block}.{name}")), json!(rank));
            tensors.push((format!("{PREFIX}{block}{nested}.lora_A.weight"), a));
            tensors.push((format!("{PREFIX}{block}{nested}.lora_B.weight"), b));
            parameters.push(format!("{block}.{name}"));
        }
        Ok((tensors, self.fused_config(&rest, &ranks, &parameters)))
    }

    /// Adds tensors trained in full, and rows of tokens; a tied table under both names, as PEFT.
    fn whole(&self, tensors: &mut Vec<(String, Tensor)>) {
        let (head, embedding) =
            (self.selection.name_of(Group::Head), self.selection.name_of(Group::Embedding));
        for t in self.selection.trained() {
            if matches!(t.part, Part::Weight | Part::Bias | Part::Rows)
                && let Some(v) = self.values.get(&(t.module.clone(), t.part))
            {
                tensors.push((v5(self.config, &format!("{PREFIX}{}", t.name)), v.clone()));
                if self.selection.tied_in_full() && t.module == embedding {
                    tensors.push((format!("{PREFIX}{head}.weight"), v.clone()));
                }
            }
        }
    }

    /// Config of a fused adapter: `parameters` as a whole, with `ranks` by pattern.
    fn fused_config(&self, rest: &Selection, ranks: &Map<String, Value>, parameters: &[String]) -> Value {
        let mut config = self.peft_config(rest);
        if let Some(Value::Array(names)) = config.get("modules_to_save") {
            let names: Vec<String> =
                names.iter().filter_map(Value::as_str).map(|n| v5(self.config, n)).collect();
            config["modules_to_save"] = json!(names);
        }
        if !parameters.is_empty() && config["target_modules"].is_string() {
            config["target_modules"] = json!([]);
        }
        for key in ["rank_pattern", "alpha_pattern"] {
            if let Value::Object(map) = &mut config[key] {
                map.extend(ranks.clone());
            }
        }
        config["target_parameters"] = json!(parameters);
        config["lora_dropout"] = json!(0.0);
        config
    }

    fn vllm(&self) -> ft_base::Result<(Vec<(String, Tensor)>, Value)> {
        self.no_dora("vLLM")?;
        for (m, c) in &self.selection.modules {
            let why = match c {
                Choice::Full { .. } => {
                    "trained in full, which vLLM does not load from an adapter (modules_to_save)\n  hint: ft merge"
                }
                Choice::Rows { .. } => {
                    "rows of tokens trained, which vLLM does not load from an adapter (trainable_token_indices)\n  \
                     hint: ft merge"
                }
                Choice::Lora { .. } if m.parameter.is_some() => {
                    "its adapter is of a parameter, which the export to vLLM cannot write (target_parameters)\n  \
                     hint: ft merge"
                }
                Choice::Freeze | Choice::Lora { .. } => continue,
            };
            return Err(self.refuse(m, why));
        }
        let rank = self.selection.loras().map(|(_, s)| s.rank).max().unwrap_or(1);
        // Layers with LoRA on some expert: all of their experts must have it.
        let layers: Vec<Option<usize>> =
            self.selection.loras().filter(|(m, _)| m.group == Group::Experts).map(|(m, _)| m.layer).collect();
        let mut all = self.selection.clone();
        let mut tensors = Vec::new();
        for (m, c) in &mut all.modules {
            let p = match &*c {
                Choice::Lora { spec, .. } => self.pair(m, spec)?,
                _ if m.group == Group::Experts && layers.contains(&m.layer) => {
                    let [o, i] = m.weight_shape()[..] else { continue };
                    let zeros = |shape| Tensor::zeros(shape, DType::F32, &Device::Cpu);
                    Pair { a: zeros((rank, i))?, b: zeros((o, rank))? }
                }
                _ => continue,
            };
            let missing = rank - p.a.dim(0)?;
            for (part, t, dim) in [(Part::A, p.a, 0), (Part::B, p.b, 1)] {
                let name = part_name(m, part);
                tensors.push((format!("{PREFIX}{}.{name}", m.name), t.pad_with_zeros(dim, 0, missing)?));
            }
            *c = Choice::Lora { spec: unit(rank), lr_scale: 1.0 };
        }
        let mut config = self.peft_config(&all);
        config["lora_dropout"] = json!(0.0);
        Ok((tensors, config))
    }

    fn peft_config(&self, selection: &Selection) -> Value {
        let (base, revision) = self.adapter.config.base().unwrap_or_default();
        peft::config_json(selection, base, revision)
    }
}

/// A spec with scale 1.
fn unit(rank: usize) -> LoraSpec {
    LoraSpec { rank, alpha: rank as f64, dropout: 0.0, rslora: false, dora: false }
}

fn pattern(name: &str) -> String {
    format!("^{}", regex::escape(name))
}

/// Module name in transformers 5, where every family's mixture is called `mlp`.
fn v5(config: &Config, name: &str) -> String {
    match &config.family.experts {
        Some(names) => name.replace(&format!(".{}.", names.block), ".mlp."),
        None => name.into(),
    }
}

fn fail(dir: &Path, why: String) -> Error {
    Error::Peft { file: dir.display().to_string(), why }
}

/// Pairs of every expert and their first output rows, by layer and projection (true: down).
type Experts = BTreeMap<(usize, bool), Vec<Vec<(Pair, usize)>>>;

/// Places of the up and down projection in an expert.
const UP: usize = 1;
const DOWN: usize = 2;

/// Place of a linear in its expert: 0 for the gate, [`UP`], [`DOWN`].
fn number(config: &Config, m: &Module) -> usize {
    let names = config.family.experts.map(|x| x.names);
    names.and_then(|names| names.iter().position(|n| *n == m.last())).unwrap_or(0)
}

/// Name of the experts of a layer in transformers 5.
fn experts_of(config: &Config, l: usize) -> String {
    format!("{}.layers.{l}.mlp.experts", config.body)
}

/// Fuses the pairs of all experts into A `[e r, i]` and B `[o, r e]` of one parameter; also returns their rank r.
fn fuse(
    experts: &[Vec<(Pair, usize)>],
    out: usize,
    inp: usize,
) -> candle_core::Result<(Tensor, Tensor, usize)> {
    let mut rank = 0;
    for pairs in experts {
        let own = pairs.iter().map(|(p, _)| p.a.dim(0)).sum::<candle_core::Result<usize>>()?;
        rank = rank.max(own);
    }
    let e = experts.len();
    let (mut a, mut b) = (vec![0f32; e * rank * inp], vec![0f32; out * rank * e]);
    for (i, pairs) in experts.iter().enumerate() {
        let mut r = 0;
        for (p, first) in pairs {
            for (j, row) in p.a.to_vec2::<f32>()?.iter().enumerate() {
                a[(i * rank + r + j) * inp..][..inp].copy_from_slice(row);
            }
            for (o, row) in p.b.to_vec2::<f32>()?.iter().enumerate() {
                for (j, x) in row.iter().enumerate() {
                    b[((first + o) * rank + r + j) * e + i] = *x;
                }
            }
            r += p.a.dim(0)?;
        }
    }
    let a = Tensor::from_vec(a, (e * rank, inp), &Device::Cpu)?;
    Ok((a, Tensor::from_vec(b, (out, rank * e), &Device::Cpu)?, rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapters::{PeftConfig, Trained};
    use crate::files::TensorFiles;
    use crate::model::tiny_qwen3_5_moe;

    /// Writes an adapter of ones with this config into `dir`.
    fn ones(config: &Config, peft: &Value, dir: &Path) -> Adapter {
        std::fs::create_dir(dir).expect("a folder");
        std::fs::write(dir.join("adapter_config.json"), peft.to_string()).expect("written");
        let selection = PeftConfig::load(dir).and_then(|peft| Selection::from_peft(config, &peft));
        let values = |t: &Trained| {
            let value = Tensor::ones(t.shape.as_slice(), DType::F32, &Device::Cpu).expect("values");
            (format!("{PREFIX}{}", t.name), value)
        };
        let tensors: Vec<_> = selection.expect("a selection").trained().iter().map(values).collect();
        crate::files::write_file(&dir.join("adapter_model.safetensors"), &tensors, &[]).expect("written");
        Adapter::open(dir).expect("an adapter")
    }

    /// vLLM has no names for the linears of a parameter.
    #[test]
    fn parameters_have_no_place_in_an_export_to_vllm() {
        let (config, dir) = (tiny_qwen3_5_moe(), tempfile::tempdir().expect("a folder"));
        let refused = |parameters: Value, name: &str| {
            let peft = json!({
                "peft_type": "LORA", "r": 2, "target_modules": ["o_proj"], "target_parameters": parameters,
            });
            let adapter = ones(&config, &peft, &dir.path().join(name));
            let selection = Selection::from_peft(&config, &adapter.config).expect("a selection");
            let export = Export::new(&config, &adapter, &selection).expect("an export");
            export.write(Target::Vllm, &dir.path().join("out")).err().map(|e| e.to_string())
        };
        assert_eq!(refused(json!([]), "linears"), None);
        for (name, parameter) in [("experts", "mlp.experts.down_proj"), ("router", "mlp.gate.weight")] {
            let e = refused(json!([parameter]), name).expect("an error");
            assert!(e.contains("target_parameters") && e.contains("hint: ft merge"), "{name}: {e}");
        }
    }

    /// PEFT loads embedding and head of a tied model from a tensor each.
    #[test]
    fn a_tied_table_in_full_has_both_names() {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 16, "tie_word_embeddings": true, "num_experts": 2,
            "num_experts_per_tok": 1, "moe_intermediate_size": 4,
        });
        let config = Config::parse("c", config.as_object().expect("an object").clone()).expect("a config");
        let peft = json!({
            "peft_type": "LORA", "r": 2, "target_modules": ["up_proj"], "modules_to_save": ["embed_tokens", "lm_head"],
        });
        let dir = tempfile::tempdir().expect("a folder");
        let (adapter, out) = (ones(&config, &peft, &dir.path().join("a")), dir.path().join("b"));
        let selection = Selection::from_peft(&config, &adapter.config).expect("a selection");
        let export = Export::new(&config, &adapter, &selection).expect("an export");
        export.write(Target::PeftFused, &out).expect("written");
        let written = TensorFiles::open_file(&out.join("adapter_model.safetensors")).expect("tensors");
        for name in ["lm_head", "model.embed_tokens"] {
            assert!(written.info(&format!("{PREFIX}{name}.weight")).is_some(), "{name}");
        }
        let read = Adapter::open(&out).expect("an adapter");
        let config = read.config_of(config).expect("a config");
        let selection = read.selection(&config).expect("a selection");
        read.check_against(&selection, &selection.trained()).expect("all of it");
    }
}
