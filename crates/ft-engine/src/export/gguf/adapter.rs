//! Writes an adapter as a GGUF file: A and B of every module under llama.cpp's names.
//!
//! llama.cpp has a single alpha and scales each pair by alpha / rank. Pairs with another scale have B
//! multiplied by the ratio. The experts of a layer are stacked, A `[e, r, i]` and B `[e, o, r]`: all
//! experts with a common rank, zeros for those without LoRA.

use super::changes::Change;
use super::entries::{Keys, file_type};
use super::names::{MappedTensor, architecture, map_tensors};
use super::{Error, keys, refuse};
use crate::adapters::{Adapter, Choice, Part, Selection, Trained, peft};
use crate::files::{Entry, GgufValue, write_gguf};
use crate::model::Config;
use crate::model::modules::{Group, Module};
use candle_core::{DType, Device, Tensor};
use ft_recipe::LoraSpec;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const MERGE: &str = "hint: ft merge, then ft export of the merged model";

/// Source of a pair: target tensor and rank in the file.
struct Pair<'a> {
    mapped: &'a MappedTensor,
    rank: usize,
}

/// Writes an adapter to `path`, with matrices in `dtype`.
///
/// # Errors
/// A base computed differently by llama.cpp, by key; anything unsupported by its adapters, by name; missing tensors;
/// a full disk.
pub fn write_adapter(
    config: &Config,
    adapter: &Adapter,
    selection: &Selection,
    dtype: DType,
    path: &Path,
) -> ft_base::Result<()> {
    let trained = selection.trained();
    adapter.check_against(selection, &trained)?;
    // The keys themselves are of the base's file.
    keys::of_config(config)?;
    check(config, selection)?;
    let source = Source::new(adapter, selection, &trained);
    let all = map_tensors(config)?;
    let (mut entries, mut pairs): (Vec<Entry>, _) = (Vec::new(), HashMap::new());
    for mapped in &all {
        let ranks = mapped.modules.iter().filter_map(|m| source.spec(m)).map(|s| s.rank);
        let Some(rank) = ranks.max() else { continue };
        let [first, second] = match mapped.shape(mapped.modules[0].weight_shape())[..] {
            // llama.cpp stores A of the embedding transposed, for row lookup.
            [v, d] if mapped.name == "token_embd" => [vec![v, rank], vec![d, rank]],
            [o, i] => [vec![rank, i], vec![o, rank]],
            _ => return no_matrix(&mapped.modules[0]),
        };
        let stacked = mapped.modules[0].expert.is_some();
        for (half, shape) in [("lora_a", first), ("lora_b", second)] {
            let shape = if stacked { [vec![mapped.modules.len()], shape].concat() } else { shape };
            let name = format!("{}.{half}", mapped.full_name(false));
            entries.push((name.clone(), dtype, shape));
            pairs.insert(name, Pair { mapped, rank });
        }
    }
    let keys: Keys = vec![
        ("general.architecture".into(), architecture(config)?.into()),
        ("general.type".into(), "adapter".into()),
        ("general.file_type".into(), GgufValue::U32(file_type(dtype))),
        ("general.quantization_version".into(), GgufValue::U32(2)),
        ("adapter.type".into(), "lora".into()),
        ("adapter.lora.alpha".into(), GgufValue::F32(source.alpha as f32)),
    ];
    write_gguf(path, &keys, &entries, |name| {
        let Some(pair) = pairs.get(name) else {
            return Err(candle_core::Error::Msg(format!("{name} has no source")).into());
        };
        let part = if name.ends_with("lora_a") { Part::A } else { Part::B };
        Ok(source.tensor(pair, part)?.to_dtype(dtype)?)
    })
}

/// An adapter, with the alpha of the file.
struct Source<'a> {
    adapter: &'a Adapter,
    choices: HashMap<&'a str, &'a Choice>,
    trained: HashMap<(&'a str, Part), &'a Trained>,
    /// The most common alpha: most B matrices stay unchanged.
    alpha: f64,
}

impl<'a> Source<'a> {
    fn new(adapter: &'a Adapter, selection: &'a Selection, trained: &'a [Trained]) -> Self {
        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        for (_, spec) in selection.loras() {
            *counts.entry((peft::scale(spec) * spec.rank as f64).to_bits()).or_default() += 1;
        }
        let alpha = counts.iter().max_by_key(|(_, n)| **n).map_or(0.0, |(bits, _)| f64::from_bits(*bits));
        Self {
            adapter,
            choices: selection.modules.iter().map(|(m, c)| (m.name.as_str(), c)).collect(),
            trained: trained.iter().map(|t| ((t.module.as_str(), t.part), t)).collect(),
            alpha: if alpha == 0.0 { 1.0 } else { alpha },
        }
    }

    fn spec(&self, m: &Module) -> Option<LoraSpec> {
        match self.choices.get(m.name.as_str()) {
            Some(Choice::Lora { spec, .. }) => Some(*spec),
            _ => None,
        }
    }

    /// A or B of a tensor of the file, f32.
    fn tensor(&self, pair: &Pair<'_>, part: Part) -> ft_base::Result<Tensor> {
        let module = |m: &Module| match self.spec(m) {
            Some(spec) => self.half(pair, m, &spec, part),
            None => zeros(pair, m, part),
        };
        let parts: Vec<Tensor> = pair.mapped.modules.iter().map(module).collect::<ft_base::Result<_>>()?;
        Ok(match pair.mapped.modules[0].expert {
            None => parts[0].clone(),
            Some(_) => Tensor::stack(&parts, 0)?,
        })
    }

    /// A or B of a module in the layout of the file, f32.
    fn half(&self, pair: &Pair<'_>, m: &Module, spec: &LoraSpec, part: Part) -> ft_base::Result<Tensor> {
        let of = if part == Part::A { m.a_of() } else { &m.name };
        let trained = self.trained.get(&(of, part));
        let Some(value) = trained.map(|t| self.adapter.get(t)).transpose()?.flatten() else {
            return Ok(refuse(&m.name, "half an adapter")?);
        };
        let missing = pair.rank - spec.rank;
        if part == Part::A {
            let value = changed(&value.pad_with_zeros(0, 0, missing)?, pair.mapped, part)?;
            return Ok(if m.group == Group::Embedding { value.t()?.contiguous()? } else { value });
        }
        let more = peft::scale(spec) * pair.rank as f64 / self.alpha;
        let value = if (more - 1.0).abs() < 1e-12 { value } else { (value * more)? };
        Ok(changed(&value.pad_with_zeros(1, 0, missing)?, pair.mapped, part)?)
    }
}

/// A or B with the changes of the tensor: of rows on B, of columns on A.
fn changed(t: &Tensor, mapped: &MappedTensor, part: Part) -> candle_core::Result<Tensor> {
    let mut own = mapped.changes.iter().filter(|c| match c {
        Change::Columns(_) => part == Part::A,
        _ => part == Part::B,
    });
    own.try_fold(t.clone(), |t, change| change.apply(&t))
}

/// Refuses trained parts unsupported by llama.cpp's adapters.
fn check(config: &Config, selection: &Selection) -> Result<(), Error> {
    for (m, choice) in &selection.modules {
        let why = match choice {
            Choice::Freeze => continue,
            Choice::Full { .. } => "trained in full, which llama.cpp's adapters do not hold",
            Choice::Rows { .. } => "has rows of tokens that trained, which llama.cpp's adapters do not hold",
            Choice::Lora { spec, .. } if spec.dora => "has DoRA, which llama.cpp does not compute",
            Choice::Lora { .. } if config.tied && matches!(m.group, Group::Head | Group::Embedding) => {
                "has LoRA, and head and embedding are one tensor, of which llama.cpp adapts neither alone"
            }
            Choice::Lora { .. } => continue,
        };
        return refuse(&m.name, format!("{why}\n  {MERGE}"));
    }
    Ok(())
}

/// The error of LoRA on a weight stored as a vector in the file.
fn no_matrix<T>(m: &Module) -> ft_base::Result<T> {
    Ok(refuse(&m.name, format!("has LoRA, and llama.cpp holds it as a vector\n  {MERGE}"))?)
}

fn zeros(pair: &Pair<'_>, m: &Module, part: Part) -> ft_base::Result<Tensor> {
    let [o, i] = pair.mapped.shape(m.weight_shape())[..] else {
        return no_matrix(m);
    };
    let shape = if part == Part::A { (pair.rank, i) } else { (o, pair.rank) };
    Ok(Tensor::zeros(shape, DType::F32, &Device::Cpu)?)
}
