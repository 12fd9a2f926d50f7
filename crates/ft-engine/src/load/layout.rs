//! Two checkpoint layouts of mixture models: one tensor per expert linear, or all experts fused.
//!
//! transformers 5 can write `mlp.experts.gate_up_proj` `[e, 2f, d]` (per expert: gate rows, then up rows),
//! `mlp.experts.down_proj` `[e, d, f]` and the router as `mlp.gate.weight`, regardless of the family's own
//! names. [`open`] presents both layouts alike: one tensor per module, under the module's name. [`write()`] writes a
//! model in the layout of its source.

use super::fused;
use crate::files::{Entry, SplitTensor, TensorFiles, write_folder};
use crate::model::{Config, WeightFormat};
use candle_core::{DType, Tensor};
use ft_base::store::{self};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Opens a model's weights with one tensor per module.
pub fn open(config: &Config, dir: &Path) -> Result<TensorFiles, store::Error> {
    let mut files = config.open_weights(dir)?;
    fused::open(config, &mut files)?;
    if let WeightFormat::Fp8(block) = config.format {
        const SCALE: &str = "_scale_inv";
        let scales: Vec<String> =
            files.names().filter(|n| n.ends_with(SCALE) && !config.passes(n)).map(String::from).collect();
        for scale in scales {
            // An unfit scale stays a tensor, reported as unexpected by the check.
            files.scale(scale.trim_end_matches(SCALE), &scale, block);
        }
    }
    let apart = config.family.experts.filter(|x| x.joint.is_none());
    let (Some(moe), Some(names)) = (&config.moe, apart) else { return Ok(files) };
    let (e, f, d) = (moe.experts, moe.width, config.hidden);
    let [gate, up, down] = names.names;
    for l in (0..config.layers).filter(|l| moe.sparse[*l]) {
        let layer = format!("{}.layers.{l}", config.body);
        let own = format!("{layer}.{}", names.block);
        for block in [&own, &format!("{layer}.mlp")] {
            let expert = |e: usize, name: &str| format!("{own}.experts.{e}.{name}.weight");
            // Tensors of another shape keep their name; the check reports them as unexpected.
            let is = |files: &TensorFiles, name: &str, shape: &[usize]| {
                files.info(name).is_some_and(|i| i.shape == shape)
            };
            let whole = format!("{block}.experts.gate_up_proj");
            if is(&files, &whole, &[e, 2 * f, d]) {
                let parts = (0..e).flat_map(|i| {
                    [
                        (expert(i, gate), 2 * i * f * d, vec![f, d]),
                        (expert(i, up), (2 * i + 1) * f * d, vec![f, d]),
                    ]
                });
                files.split(&whole, parts)?;
            }
            let whole = format!("{block}.experts.down_proj");
            if is(&files, &whole, &[e, d, f]) {
                files.split(&whole, (0..e).map(|i| (expert(i, down), i * d * f, vec![d, f])))?;
            }
            let router = format!("{block}.gate.weight");
            if *block != own && is(&files, &router, &[e, d]) {
                files.split(&router, [(format!("{own}.gate.weight"), 0, vec![e, d])])?;
            }
        }
    }
    Ok(files)
}

/// Writes a model folder as [`write_folder`] does, in the layout of `files`, the model's source: split tensors are
/// joined again, and tensors of parts not computed by `ft` follow unchanged. Experts are fused as the family has them.
pub fn write(
    (model, files): (&Config, Option<&TensorFiles>),
    (source, out): (&Path, &Path),
    config: Map<String, Value>,
    dtype: DType,
    mut entries: Vec<Entry>,
    get: &mut dyn FnMut(&str) -> ft_base::Result<Tensor>,
) -> ft_base::Result<()> {
    let fused = fused::join(model, &mut entries);
    let Some(files) = files else {
        return write_folder(source, out, config, dtype, &entries, &mut |name| match fused.get(name) {
            Some(fused) => fused.stack(get),
            None => get(name),
        });
    };
    let joined = joined(files, &entries);
    let parts: HashSet<&String> = joined.values().flat_map(|(split, _)| &split.parts).collect();
    entries.retain(|(name, ..)| !parts.contains(name));
    entries.extend(joined.values().map(|(split, dtype)| (split.name.clone(), *dtype, split.shape.clone())));
    let apart: HashSet<&str> = files.names().filter(|n| model.passes(n)).collect();
    for name in &apart {
        entries.push((name.to_string(), files.dtype_of(name)?, files.get(name)?.shape.clone()));
    }
    write_folder(source, out, config, dtype, &entries, &mut |name| {
        if let Some((split, _)) = joined.get(name) {
            let flat = |part: &String| Ok(get(part)?.flatten_all()?);
            let parts = split.parts.iter().map(flat).collect::<ft_base::Result<Vec<_>>>()?;
            return Ok(Tensor::cat(&parts, 0)?.reshape(split.shape.as_slice())?);
        }
        match fused.get(name) {
            Some(fused) => fused.stack(get),
            None if apart.contains(name) => Ok(files.untouched(name)?),
            None => get(name),
        }
    })
}

/// Split tensors to be joined again, with their dtypes; none if a part has another form, such as 4 bits.
fn joined<'a>(files: &'a TensorFiles, entries: &[Entry]) -> HashMap<String, (&'a SplitTensor, DType)> {
    let dtypes: HashMap<&str, DType> =
        entries.iter().map(|(name, dtype, _)| (name.as_str(), *dtype)).collect();
    let whole = |split: &'a SplitTensor| {
        let first = dtypes.get(split.parts.first()?.as_str()).filter(|d| **d != DType::U8)?;
        let alike = split.parts.iter().all(|part| dtypes.get(part.as_str()) == Some(first));
        alike.then(|| (split.name.clone(), (split, *first)))
    };
    files.splits().iter().map(whole).collect::<Option<_>>().unwrap_or_default()
}
