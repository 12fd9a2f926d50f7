//! Experts with linears fused into one tensor in checkpoints, without `.weight`: `gate_up_proj` `[e, 2f, d]` and
//! `down_proj` `[e, d, f]`, or their transposes, and their biases; in MXFP4, blocks and scales instead.

use crate::files::{Entry, TensorFiles};
use crate::model::{Config, WeightFormat};
use crate::quant::{MXFP4_BLOCK, MXFP4_PARTS};
use candle_core::{DType, Tensor};
use ft_base::store;
use std::collections::{HashMap, HashSet};

/// A tensor of a checkpoint with the same tensor of all experts.
#[derive(Clone, Debug)]
pub(super) struct Fused {
    /// Name in the file.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Names of the experts' own tensors.
    pub parts: Vec<String>,
    /// Shape of a part.
    pub part: Vec<usize>,
    /// Whether the file holds the transposes of the parts.
    pub transposed: bool,
}

/// All fused tensors of a model with gate and up of an expert in one matrix.
pub(super) fn tensors(config: &Config) -> Vec<Fused> {
    let Some((moe, family)) = config.moe.as_ref().zip(config.family.experts.as_ref()) else {
        return Vec::new();
    };
    let Some(joint) = family.joint else { return Vec::new() };
    let [gate_up, _, down] = family.names;
    let mut out = Vec::new();
    for l in (0..config.layers).filter(|l| moe.sparse[*l]) {
        let block = format!("{}.layers.{l}.{}", config.body, family.within("experts"));
        for (name, o, i) in [(gate_up, 2 * moe.width, config.hidden), (down, config.hidden, moe.width)] {
            let parts = |last: &str| (0..moe.experts).map(|e| format!("{block}.{e}.{name}.{last}")).collect();
            let (rows, cols) = if joint.transposed { (i, o) } else { (o, i) };
            out.push(Fused {
                name: format!("{block}.{name}"),
                shape: vec![moe.experts, rows, cols],
                parts: parts("weight"),
                part: vec![o, i],
                transposed: joint.transposed,
            });
            if family.bias {
                out.push(Fused {
                    name: format!("{block}.{name}_bias"),
                    shape: vec![moe.experts, o],
                    parts: parts("bias"),
                    part: vec![o],
                    transposed: false,
                });
            }
        }
    }
    out
}

/// Presents fused tensors as one tensor an expert. Tensors of another shape keep their name; the check reports them.
pub(super) fn open(config: &Config, files: &mut TensorFiles) -> Result<(), store::Error> {
    for fused in tensors(config) {
        if files.info(&fused.name).is_some_and(|i| i.shape == fused.shape) {
            split(files, &fused)?;
        } else if let &[o, i] = fused.part.as_slice() {
            mxfp4(files, &fused, (o, i))?;
            if config.format == WeightFormat::Mxfp4AsValues {
                for part in &fused.parts {
                    let [codes, scales] = MXFP4_PARTS.map(|last| format!("{part}.{last}"));
                    // Unfit tensors keep their names; the check reports them.
                    files.decode(part, [&codes, &scales]);
                }
            }
        }
    }
    Ok(())
}

/// Replaces the experts' own tensors among `entries` by fused ones, except for 4-bit codes. Returns the fused ones by
/// name.
pub(super) fn join(config: &Config, entries: &mut Vec<Entry>) -> HashMap<String, Fused> {
    let dtypes: HashMap<String, DType> =
        entries.iter().map(|(name, dtype, _)| (name.clone(), *dtype)).collect();
    let mut joined = HashMap::new();
    let mut gone = HashSet::new();
    for fused in tensors(config) {
        let Some(dtype) = fused.parts.first().and_then(|p| dtypes.get(p)).copied() else { continue };
        if dtype == DType::U8 || !fused.parts.iter().all(|p| dtypes.get(p) == Some(&dtype)) {
            continue;
        }
        gone.extend(fused.parts.iter().cloned());
        entries.push((fused.name.clone(), dtype, fused.shape.clone()));
        joined.insert(fused.name.clone(), fused);
    }
    entries.retain(|(name, ..)| !gone.contains(name));
    joined
}

impl Fused {
    /// The tensor for the file, from the experts' own.
    pub(super) fn stack(
        &self,
        get: &mut dyn FnMut(&str) -> ft_base::Result<Tensor>,
    ) -> ft_base::Result<Tensor> {
        let part = |name: &String| -> ft_base::Result<Tensor> {
            let own = get(name)?;
            let own = if self.transposed { own.t()?.contiguous()? } else { own };
            Ok(own.flatten_all()?)
        };
        let parts = self.parts.iter().map(part).collect::<ft_base::Result<Vec<_>>>()?;
        Ok(Tensor::cat(&parts, 0)?.reshape(self.shape.as_slice())?)
    }
}

fn split(files: &mut TensorFiles, fused: &Fused) -> Result<(), store::Error> {
    let size: usize = fused.part.iter().product();
    let mut shape = fused.part.clone();
    if fused.transposed {
        shape.reverse();
    }
    let parts = fused.parts.iter().enumerate().map(|(e, name)| (name.clone(), e * size, shape.clone()));
    files.split(&fused.name, parts)?;
    if fused.transposed {
        fused.parts.iter().try_for_each(|part| files.transpose(part))?;
    }
    Ok(())
}

/// Blocks `[e, o, i / 32, 16]` and scales `[e, o, i / 32]` of matrices `[o, i]`, u8.
fn mxfp4(files: &mut TensorFiles, fused: &Fused, (o, i): (usize, usize)) -> Result<(), store::Error> {
    let (experts, blocks) = (fused.parts.len(), i / MXFP4_BLOCK);
    let [codes, scales] = MXFP4_PARTS;
    for (last, shape) in [(codes, vec![experts, o, blocks, 16]), (scales, vec![experts, o, blocks])] {
        let name = format!("{}_{last}", fused.name);
        if files.info(&name).is_none_or(|info| info.shape != shape) {
            continue;
        }
        let own = shape[1..].to_vec();
        let size: usize = own.iter().product();
        let part = |(e, part): (usize, &String)| (format!("{part}.{last}"), e * size, own.clone());
        files.split(&name, fused.parts.iter().enumerate().map(part))?;
    }
    Ok(())
}
