//! Two checkpoint layouts of mixture models: one tensor per expert linear, or all experts fused.
//!
//! transformers 5 can write `mlp.experts.gate_up_proj` `[e, 2f, d]` (per expert: gate rows, then up rows),
//! `mlp.experts.down_proj` `[e, d, f]` and the router as `mlp.gate.weight`, regardless of the family's own
//! names. [`open`] presents both layouts alike: one tensor per module, under the module's name.

use crate::files::TensorFiles;
use crate::model::Config;
use ft_base::store::{self};
use std::path::Path;

/// Opens a model's weights with one tensor per module.
///
/// # Errors
/// As [`TensorFiles::open_model`].
pub fn open(config: &Config, dir: &Path) -> Result<TensorFiles, store::Error> {
    let mut files = TensorFiles::open_model(dir)?;
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
