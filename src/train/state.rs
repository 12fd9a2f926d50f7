//! What a checkpoint holds: trained tensors and moments as logical tensors, the step, and what must not change.
//!
//! Random numbers and the position in the data are functions of the seed and the step, so there is nothing
//! else to save.

use super::identity::is_place;
use super::{Error, LossScale};
use ft_engine::adapt::Params;
use ft_engine::adapt::buffer::common;
use ft_engine::adapt::moments::Of;
use ft_engine::adapt::projected::Projected;
use ft_kernels::optimizer::BLOCK;
use ft_base::store::{self};
use ft_engine::files::{SharedFile, TensorFiles};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// `state.json` of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of this layout.
    pub version: u32,
    /// Version of `ft` that wrote it.
    pub ft: String,
    /// Optimizer steps that are done.
    pub step: u64,
    /// What decides the mathematics: recipe keys, and hashes under `hash.*`.
    pub identity: BTreeMap<String, String>,
    /// The factor on the loss, in f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
}

/// The file of a checkpoint's trained tensors.
pub const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// A tensor of moments in a checkpoint.
struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    /// Elements of what trains that one of it stands for.
    block: usize,
}

/// The tensors of a trained tensor's moments: both, in 8 bits codes and then the scales of their blocks.
fn entries(params: &Params, index: usize) -> Vec<Entry> {
    let t = &params.tensors[index];
    let projected = params.projected(index);
    let (shape, coded) = match projected {
        Some(p) => {
            let (rows, cols) = p.low();
            (vec![rows, cols], p.moments.is_coded())
        }
        None => (t.shape.clone(), params.is_coded(index)),
    };
    let entry = |what: &str, dtype, shape, block| {
        MOMENTS.map(|m| Entry {
            name: format!("{}.{m}{what}", t.name),
            dtype,
            shape: Vec::clone(shape),
            block,
        })
    };
    let mut out: Vec<Entry> = match coded {
        false => entry("", DType::F32, &shape, 1).into(),
        true => {
            let scales = vec![shape.iter().product::<usize>().div_ceil(BLOCK)];
            let codes = entry("", DType::U8, &shape, 1);
            codes.into_iter().chain(entry(".absmax", DType::F32, &scales, BLOCK)).collect()
        }
    };
    if let Some(p) = projected {
        let name = format!("{}.projector", t.name);
        out.push(Entry { name, dtype: DType::F32, shape: p.basis.dims().to_vec(), block: 1 });
    }
    out
}

/// The values of [`entries`] of a tensor whose gradient is projected.
fn projected_views(p: &Projected) -> candle_core::Result<Vec<ft_kernels::Tensor>> {
    let (rows, cols) = p.low();
    let mut out = Vec::new();
    for range in p.moments.parts(&(0..rows * cols)).into_iter().filter(|r| !r.is_empty()) {
        out.extend(views(p.moments.of(range)?));
    }
    out.push(p.basis.flatten_all()?);
    Ok(out)
}

/// The values of [`entries`] for a range of a unit's buffer.
fn views(of: Of) -> Vec<ft_kernels::Tensor> {
    match of {
        Of::Wide(all) => all.into(),
        Of::Coded(all) => all.codes.into_iter().chain(all.scales).collect(),
    }
}

/// The files of a checkpoint's tensors in `dir`: weights, and moments.
fn files(dir: &Path, params: &Params) -> ft_base::Result<[SharedFile; 2]> {
    let (mut weights, mut moments) = (Vec::new(), Vec::new());
    for (i, t) in params.tensors.iter().enumerate() {
        weights.push((t.name.clone(), params.stored(i)?, t.shape.clone()));
        moments.extend(entries(params, i).into_iter().map(|e| (e.name, e.dtype, e.shape)));
    }
    let file = |name: &str, tensors: &[_]| SharedFile::new(&dir.join(name), tensors, &[("format", "pt")]);
    Ok([file(WEIGHTS, &weights)?, file(OPTIMIZER, &moments)?])
}

/// Begins a checkpoint in `dir`: its files as they will be, without values.
///
/// # Errors
/// Of the disk.
pub fn begin(dir: &Path, state: &State, params: &Params) -> ft_base::Result<()> {
    files(dir, params)?.iter().try_for_each(SharedFile::create)?;
    let text = serde_json::to_string_pretty(state).unwrap_or_default() + "\n";
    Ok(store::write_atomic(&dir.join(STATE), text.as_bytes())?)
}

/// Writes this rank's part of what trains into a checkpoint that one rank has begun.
///
/// # Errors
/// Of the disk.
pub fn write(dir: &Path, params: &Params) -> ft_base::Result<()> {
    let [weights, optimizer] = files(dir, params)?;
    let (mut values, mut moments) = (Vec::new(), Vec::new());
    let listed: Vec<Vec<Entry>> = (0..params.tensors.len()).map(|i| entries(params, i)).collect();
    for ((t, slot), listed) in params.tensors.iter().zip(&params.slots).zip(&listed) {
        let unit = params.unit(slot)?;
        // what several ranks hold is written once
        let mine = common(&unit.part, &slot.range());
        if mine.is_empty() {
            continue;
        }
        let first = mine.start - slot.offset;
        // views: values come to the host when they are written
        values.push((t.name.as_str(), first, unit.values(mine.clone())?.real()?.clone()));
        if let Some(p) = params.projected(slot.index) {
            // whole, by the rank whose part has its beginning
            if first == 0 {
                for (entry, held) in listed.iter().zip(projected_views(p)?) {
                    moments.push((entry.name.as_str(), 0, held.real()?.flatten_all()?));
                }
            }
            continue;
        }
        let held = unit.moments.as_ref().map(|m| m.of(mine).map(views)).transpose()?;
        for (entry, held) in listed.iter().zip(held.into_iter().flatten()) {
            moments.push((entry.name.as_str(), first / entry.block, held.real()?.clone()));
        }
    }
    weights.write(values)?;
    Ok(optimizer.write(moments)?)
}

/// Reads a checkpoint's `state.json`.
pub fn read(dir: &Path) -> ft_base::Result<State> {
    let path = dir.join(STATE);
    let text = store::read_plain_text(&path, store::LARGEST).map_err(|e| store::Error::run(&path, e))?;
    let state: State = serde_json::from_str(&text)
        .map_err(|e| Error::Checkpoint { path: path.display().to_string(), why: e.to_string() })?;
    if state.version != 1 {
        let why = format!("layout {}, this ft reads 1", state.version);
        return Err(Error::Checkpoint { path: path.display().to_string(), why }.into());
    }
    if state.loss_scale.is_some_and(|s| !s.is_sound()) {
        let why = "loss_scale is none that a run can have".into();
        return Err(Error::Checkpoint { path: path.display().to_string(), why }.into());
    }
    Ok(state)
}

/// A value of a checkpoint's tensor that cannot be used.
fn unusable(dir: &Path, why: String) -> Error {
    Error::Checkpoint { path: dir.display().to_string(), why }
}

/// Some elements of a tensor of a checkpoint, which must have the shape that this run has.
fn part(dir: &Path, files: &TensorFiles, e: &Entry, r: Range<usize>) -> ft_base::Result<Tensor> {
    let (name, shape) = (e.name.as_str(), e.shape.as_slice());
    let found = files.get(name)?.shape.as_slice();
    if found != shape {
        return Err(unusable(dir, format!("{name}: {found:?}, this run has {shape:?}")).into());
    }
    files.part(name, r, e.dtype, &Device::Cpu).map_err(|e| match e {
        // a checkpoint is no model file
        store::Error::NotFinite { .. } => {
            unusable(dir, format!("{name} has a value that is not finite")).into()
        }
        e => e.into(),
    })
}

/// The trained tensors of a checkpoint, one by one, as far as they are this rank's: index, first element, values.
fn each_weight(
    dir: &Path,
    files: &TensorFiles,
    params: &Params,
    f: &mut dyn FnMut(usize, usize, &Tensor) -> ft_base::Result<()>,
) -> ft_base::Result<()> {
    let (have, want) = (files.len(), params.tensors.len());
    if have != want {
        return Err(unusable(dir, format!("holds {have} trained tensors, this run has {want}")).into());
    }
    for (i, t) in params.tensors.iter().enumerate() {
        // what of it is here, and nothing else, is read
        let mine = params.mine(i)?;
        let values = Entry { name: t.name.clone(), dtype: DType::F32, shape: t.shape.clone(), block: 1 };
        f(i, mine.start, &part(dir, files, &values, mine)?)?;
    }
    Ok(())
}

/// Loads the trained tensors of a checkpoint, without moments. Nothing is set before all of them were read.
///
/// # Errors
/// A tensor that is missing, of another shape, or one too many.
pub fn load_weights(dir: &Path, params: &Params) -> ft_base::Result<()> {
    let files = weights(dir)?;
    each_weight(dir, &files, params, &mut |_, _, _| Ok(()))?;
    each_weight(dir, &files, params, &mut |i, first, values| Ok(params.set_from(i, first, values)?))
}

/// Loads a checkpoint's tensors into the buffers.
///
/// # Errors
/// A tensor that is missing, of another shape, or one too many.
pub fn load(dir: &Path, params: &Params) -> ft_base::Result<()> {
    let moments = TensorFiles::open_file(&dir.join(OPTIMIZER))?;
    each_weight(dir, &weights(dir)?, params, &mut |i, first, values| Ok(params.set_from(i, first, values)?))?;
    for (i, _) in params.tensors.iter().enumerate() {
        let slot = &params.slots[i];
        if let Some(p) = params.projected(i) {
            for (entry, to) in entries(params, i).iter().zip(projected_views(p)?) {
                let from = part(dir, &moments, entry, 0..to.elem_count())?;
                let to = to.real()?;
                to.slice_set(&from.to_device(to.device())?, 0, 0)?;
            }
            continue;
        }
        let Some(held) = &params.unit(slot)?.moments else { continue };
        for here in held.parts(&slot.range()).into_iter().filter(|r| !r.is_empty()) {
            let range = here.start - slot.offset..here.end - slot.offset;
            for (entry, to) in entries(params, i).iter().zip(views(held.of(here)?)) {
                let first = range.start / entry.block;
                let from = part(dir, &moments, entry, first..first + to.elem_count())?;
                let to = to.real()?;
                to.slice_set(&from.to_device(to.device())?, 0, 0)?;
            }
        }
    }
    Ok(())
}

/// Whether every accepted key is one that two identities have: another would accept nothing.
///
/// # Errors
/// The first that is not, with the nearest that is.
pub fn check_accepted(
    old: &BTreeMap<String, String>,
    new: &BTreeMap<String, String>,
    accepted: &[String],
) -> Result<(), Error> {
    let known = || old.keys().chain(new.keys()).map(String::as_str);
    let Some(unknown) = accepted.iter().find(|k| !known().any(|n| n == *k)) else { return Ok(()) };
    let hint = match ft_recipe::nearest(unknown, known()) {
        Some(near) => format!("did you mean {near}?"),
        None => "give a key as the refusal to go on names it: train.0.rank, data.train.0.source".into(),
    };
    Err(Error::Usage(format!(
        "--accept-change {unknown}: a run is not told from others by this key\n  hint: {hint}"
    )))
}

/// Lines that name what differs between two identities, leaving out accepted keys.
pub fn changes(
    old: &BTreeMap<String, String>,
    new: &BTreeMap<String, String>,
    accepted: &[String],
) -> Vec<String> {
    let keys: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    keys.into_iter()
        .filter(|k| !accepted.contains(k) && !is_place(k) && old.get(*k) != new.get(*k))
        .map(|k| {
            let show = |m: &BTreeMap<String, String>| m.get(k).map_or("(not set)".into(), |v| v.to_string());
            format!("  {k}: was {}, is {}", show(old), show(new))
        })
        .collect()
}

/// The trained values of a checkpoint, tensor by tensor.
pub fn weights(dir: &Path) -> ft_base::Result<TensorFiles> {
    Ok(TensorFiles::open_file(&dir.join(WEIGHTS))?)
}
