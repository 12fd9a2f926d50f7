//! Two checkpoint layouts of mixture models: one tensor per expert linear, or all experts fused.
//!
//! transformers 5 can write `mlp.experts.gate_up_proj` `[e, 2f, d]` (per expert: gate rows, then up rows),
//! `mlp.experts.down_proj` `[e, d, f]` and the router as `mlp.gate.weight`, regardless of the family's own
//! names. [`open`] presents both layouts alike: one tensor per module, under the module's name. [`write`] writes a
//! model in the layout that it was read in.

use super::fused;
use crate::files::{Cut, TensorFiles, write_folder};
use crate::model::{Config, is_apart};
use candle_core::{DType, Tensor};
use ft_base::store::{self};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Opens a model's weights with one tensor per module.
///
/// # Errors
/// As [`TensorFiles::open_model`].
pub fn open(config: &Config, dir: &Path) -> Result<TensorFiles, store::Error> {
    let mut files = TensorFiles::open_model(dir)?;
    fused::open(config, &mut files)?;
    if let Some(block) = config.fp8 {
        const SCALE: &str = "_scale_inv";
        let scales: Vec<String> =
            files.names().filter(|n| n.ends_with(SCALE) && !is_apart(n)).map(String::from).collect();
        for scale in scales {
            // One that does not fit stays a tensor, which the check finds unexpected.
            files.scale(scale.trim_end_matches(SCALE), &scale, block);
        }
    }
    let (Some(moe), Some(names)) = (&config.moe, &config.family.experts) else { return Ok(files) };
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
                files.cut(&whole, parts)?;
            }
            let whole = format!("{block}.experts.down_proj");
            if is(&files, &whole, &[e, d, f]) {
                files.cut(&whole, (0..e).map(|i| (expert(i, down), i * d * f, vec![d, f])))?;
            }
            let router = format!("{block}.gate.weight");
            if *block != own && is(&files, &router, &[e, d]) {
                files.cut(&router, [(format!("{own}.gate.weight"), 0, vec![e, d])])?;
            }
        }
    }
    Ok(files)
}

/// Name, dtype and shape of a tensor to be written.
pub type Entry = fused::Entry;

/// Writes a model folder as [`write_folder`] does, in the layout of `files`, which the model was read from: tensors
/// that were cut are joined, and those of parts that `ft` does not compute follow unchanged. Experts are fused as the
/// family has them.
///
/// # Errors
/// As [`write_folder`].
pub fn write(
    (model, files): (&Config, Option<&TensorFiles>),
    (source, out): (&Path, &Path),
    config: Map<String, Value>,
    dtype: DType,
    mut entries: Vec<Entry>,
    get: &mut dyn FnMut(&str) -> ft_base::Result<Tensor>,
) -> ft_base::Result<()> {
    let fused = fused::join(model, &mut entries);
    let mut joined: HashMap<String, &Cut> = HashMap::new();
    for cut in files.into_iter().flat_map(TensorFiles::cuts) {
        let own = |(name, ..): &&Entry| cut.parts.contains(name);
        let Some(dtype) = entries.iter().find(own).map(|(_, dtype, _)| *dtype) else { continue };
        let parts: HashSet<&String> = cut.parts.iter().collect();
        let whole = |(name, d, _): &&Entry| parts.contains(name) && *d == dtype && dtype != DType::U8;
        if entries.iter().filter(whole).count() != parts.len() {
            continue;
        }
        entries.retain(|(name, ..)| !parts.contains(name));
        entries.push((cut.name.clone(), dtype, cut.shape.clone()));
        joined.insert(cut.name.clone(), cut);
    }
    let mut apart: HashMap<&str, &TensorFiles> = HashMap::new();
    for (files, name) in
        files.into_iter().flat_map(|f| f.names().map(move |n| (f, n))).filter(|(_, n)| is_apart(n))
    {
        entries.push((name.to_string(), files.dtype_of(name)?, files.get(name)?.shape.clone()));
        apart.insert(name, files);
    }
    write_folder(
        source,
        out,
        config,
        dtype,
        &entries,
        &mut |name| match (joined.get(name), apart.get(name)) {
            (Some(cut), _) => {
                let flat = |part: &String| Ok(get(part)?.flatten_all()?);
                let parts = cut.parts.iter().map(flat).collect::<ft_base::Result<Vec<_>>>()?;
                Ok(Tensor::cat(&parts, 0)?.reshape(cut.shape.as_slice())?)
            }
            (None, Some(files)) => Ok(files.untouched(name)?),
            (None, None) if fused.contains_key(name) => fused[name].stack(get),
            (None, None) => get(name),
        },
    )
}
