//! Two checkpoint layouts of mixture models: one tensor per expert linear, or all experts fused.
//!
//! transformers 5 can write `mlp.experts.gate_up_proj` `[e, 2f, d]` (per expert: gate rows, then up rows),
//! `mlp.experts.down_proj` `[e, d, f]` and the router as `mlp.gate.weight`, regardless of the family's own
//! names. [`open`] presents both layouts alike: one tensor per module, under the module's name.

use super::fused;
use crate::files::{TensorFiles, write_folder};
use crate::model::Config;
use candle_core::{DType, Tensor};
use ft_base::store::{self};
use serde_json::{Map, Value};
use std::path::Path;

/// Opens a model's weights with one tensor per module.
///
/// # Errors
/// As [`TensorFiles::open_model`].
pub fn open(config: &Config, dir: &Path) -> Result<TensorFiles, store::Error> {
    let mut files = TensorFiles::open_model(dir)?;
    fused::open(config, &mut files)?;
    let (Some(moe), Some(names)) = (&config.moe, &config.family.experts) else { return Ok(files) };
    let (e, f, d) = (moe.experts, moe.width, config.hidden);
    let [gate, up, down] = names.names;
    for l in (0..config.layers).filter(|l| moe.sparse[*l]) {
        let own = format!("model.layers.{l}.{}", names.block);
        for block in [&own, &format!("model.layers.{l}.mlp")] {
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

/// Writes a model folder as [`write_folder`] does, with experts fused as the family has them.
///
/// # Errors
/// As [`write_folder`].
pub fn write(
    model: &Config,
    (source, out): (&Path, &Path),
    config: Map<String, Value>,
    dtype: DType,
    mut entries: Vec<Entry>,
    get: &mut dyn FnMut(&str) -> ft_base::Result<Tensor>,
) -> ft_base::Result<()> {
    let joined = fused::join(model, &mut entries);
    write_folder(source, out, config, dtype, &entries, &mut |name| match joined.get(name) {
        Some(fused) => fused.stack(get),
        None => get(name),
    })
}
