//! Contents of a checkpoint: trained tensors and optimizer states as unsharded tensors, the step, and the
//! identity of the run.
//!
//! Random numbers and the position in the data are functions of seed and step, so nothing else is saved.

use super::identity::hash_of_place;
use crate::train::Error;
use crate::train::step::LossScale;
use candle_core::{DType, Device, Tensor};
use ft_base::store;
use ft_engine::adapters::Trained;
use ft_engine::files::{SharedFile, TensorFiles};
use ft_engine::params::Params;
use ft_engine::params::buffers::moments::MomentsView;
use ft_engine::params::buffers::projected::Projected;
use ft_engine::params::buffers::{Piece, common};
use ft_kernels::optimizer::BLOCK;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Contents of `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of the checkpoint layout.
    pub version: u32,
    /// Version of `ft` that wrote the checkpoint.
    pub ft: String,
    /// Number of completed steps.
    pub step: u64,
    /// Identity of the run: recipe keys, and hashes under `hash.*`.
    pub identity: BTreeMap<String, String>,
    /// Loss scale, for f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
}

/// File of the trained tensors.
pub const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// A tensor in the optimizer file.
struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    /// Elements of the trained tensor per element of this one.
    block: usize,
}

impl Entry {
    /// Ranges of this tensor with `count` elements of a piece of the trained tensor, from its element `first` on.
    fn ranges(&self, piece: &Piece, first: usize, count: usize) -> candle_core::Result<Vec<Range<usize>>> {
        let first = first / self.block;
        match piece.by(self.block) {
            Some(piece) => Ok(piece.ranges(first..first + count)),
            None => candle_core::bail!("{}: cut within a block of {}", self.name, self.block),
        }
    }
}

/// Optimizer tensors of a trained tensor, here or on another rank: both moments, with the scales of 8-bit codes, and
/// the GaLore projector, if any.
fn entries(params: &Params, index: usize) -> Vec<Entry> {
    let t = &params.tensors[index];
    let projected = params.projected_shapes(index);
    let (shape, coded) = match projected {
        Some(p) => (vec![p.low.0, p.low.1], p.coded),
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
    let mut out: Vec<Entry> = if coded {
        let scales = vec![shape.iter().product::<usize>().div_ceil(BLOCK)];
        let codes = entry("", DType::U8, &shape, 1);
        codes.into_iter().chain(entry(".absmax", DType::F32, &scales, BLOCK)).collect()
    } else {
        entry("", DType::F32, &shape, 1).into()
    };
    if let Some(p) = projected {
        let name = format!("{}.projector", t.name);
        out.push(Entry { name, dtype: DType::F32, shape: vec![p.basis.0, p.basis.1], block: 1 });
    }
    out
}

/// Values of [`entries`] for a tensor with projected gradients.
fn projected_views(p: &Projected) -> candle_core::Result<Vec<ft_kernels::Tensor>> {
    let (rows, cols) = p.low;
    let mut out = Vec::new();
    for range in p.moments.parts(&(0..rows * cols)).into_iter().filter(|r| !r.is_empty()) {
        out.extend(views(p.moments.of(range)?));
    }
    out.push(p.basis.flatten_all()?);
    Ok(out)
}

/// Values of [`entries`] for a range in a flat buffer.
fn views(of: MomentsView) -> Vec<ft_kernels::Tensor> {
    match of {
        MomentsView::F32(all) => all.into(),
        MomentsView::EightBit(all) => all.codes.into_iter().chain(all.scales).collect(),
    }
}

/// Files of a checkpoint in `dir`: weights, and optimizer states.
fn files(dir: &Path, params: &Params) -> ft_base::Result<[SharedFile; 2]> {
    let (mut weights, mut moments) = (Vec::new(), Vec::new());
    for (i, t) in params.tensors.iter().enumerate() {
        weights.push((t.name.clone(), params.stored(i)?, t.shape.clone()));
        moments.extend(entries(params, i).into_iter().map(|e| (e.name, e.dtype, e.shape)));
    }
    let file = |name: &str, tensors: &[_]| SharedFile::new(&dir.join(name), tensors, &[("format", "pt")]);
    Ok([file(WEIGHTS, &weights)?, file(OPTIMIZER, &moments)?])
}

/// Begins a checkpoint in `dir`: creates the files at full size, without values, and writes `state.json`.
pub fn begin(dir: &Path, state: &State, params: &Params) -> ft_base::Result<()> {
    files(dir, params)?.iter().try_for_each(SharedFile::create)?;
    Ok(store::write_json(&dir.join(STATE), state)?)
}

/// Writes this rank's shard into a checkpoint begun by the first rank.
pub fn write(dir: &Path, params: &Params) -> ft_base::Result<()> {
    let [weights, optimizer] = files(dir, params)?;
    let (mut values, mut moments) = (Vec::new(), Vec::new());
    let listed: Vec<Vec<Entry>> = (0..params.tensors.len()).map(|i| entries(params, i)).collect();
    for ((t, (slot, piece)), listed) in
        params.tensors.iter().zip(params.slots.iter().zip(&params.pieces)).zip(&listed)
    {
        // An expert of another rank.
        let Ok(flat) = params.flat(slot) else { continue };
        // Replicated values are written by one rank only.
        let mine = common(&flat.part, &slot.range());
        if mine.is_empty() {
            continue;
        }
        let own = mine.start - slot.offset..mine.end - slot.offset;
        // Views: copied to the host only during the write.
        values.push((t.name.as_str(), piece.ranges(own.clone()), flat.values(mine.clone())?.real()?.clone()));
        if let Some(p) = params.projected(slot.index) {
            // Written whole, by the rank with the first element.
            if own.start == 0 {
                for (entry, held) in listed.iter().zip(projected_views(p)?) {
                    let held = held.real()?.flatten_all()?;
                    moments.push((
                        entry.name.as_str(),
                        std::iter::once(0..held.elem_count()).collect(),
                        held,
                    ));
                }
            }
            continue;
        }
        let held = flat.moments.as_ref().map(|m| m.of(mine).map(views)).transpose()?;
        for (entry, held) in listed.iter().zip(held.into_iter().flatten()) {
            let ranges = entry.ranges(piece, own.start, held.elem_count())?;
            moments.push((entry.name.as_str(), ranges, held.real()?.clone()));
        }
    }
    weights.write(values)?;
    Ok(optimizer.write(moments)?)
}

/// Reads `state.json` of the checkpoint of a step.
///
/// # Errors
/// Another layout or step; a loss scale out of range.
pub fn read(dir: &Path, step: u64) -> ft_base::Result<State> {
    let path = dir.join(STATE);
    let text = store::read_plain_text(&path, store::LARGEST).map_err(|e| store::Error::run(&path, e))?;
    let state: State = serde_json::from_str(&text).map_err(|e| unusable(&path, e.to_string()))?;
    if state.version != 1 {
        return Err(unusable(&path, format!("layout {}, this ft reads 1", state.version)).into());
    }
    if state.step != step {
        let why = format!("step is {}, and the checkpoint is of step {step}", state.step);
        return Err(unusable(&path, why).into());
    }
    if state.loss_scale.is_some_and(|s| !s.is_sound()) {
        return Err(unusable(&path, "loss_scale is none that a run can have".into()).into());
    }
    Ok(state)
}

/// Error for unusable values in a checkpoint.
fn unusable(dir: &Path, why: String) -> Error {
    Error::Checkpoint { path: dir.display().to_string(), why }
}

/// Refuses missing and extra tensors, by their number.
fn check_count(path: &Path, have: usize, want: usize, what: &str) -> Result<(), Error> {
    if have == want {
        return Ok(());
    }
    Err(unusable(path, format!("holds {have} {what}, this run has {want}")))
}

/// Reads a range of elements of a checkpoint tensor, after a check of the shape.
fn part(dir: &Path, files: &TensorFiles, e: &Entry, r: Range<usize>) -> ft_base::Result<Tensor> {
    let (name, shape) = (e.name.as_str(), e.shape.as_slice());
    let found = files.get(name)?.shape.as_slice();
    if found != shape {
        return Err(unusable(dir, format!("{name}: {found:?}, this run has {shape:?}")).into());
    }
    files.part(name, r, e.dtype, &Device::Cpu).map_err(|e| match e {
        // This error of the store speaks of model files.
        store::Error::NotFinite { .. } => {
            unusable(dir, format!("{name} has a value that is not finite")).into()
        }
        e => e.into(),
    })
}

/// Calls `f` with index, first element and values of this rank's part of every trained tensor.
fn each_weight(
    dir: &Path,
    files: &TensorFiles,
    params: &Params,
    f: &mut dyn FnMut(usize, usize, &Tensor) -> ft_base::Result<()>,
) -> ft_base::Result<()> {
    check_count(dir, files.len(), params.tensors.len(), "trained tensors")?;
    for (i, t) in params.tensors.iter().enumerate().filter(|(i, _)| params.is_here(*i)) {
        // Only the local part is read.
        let values = Entry { name: t.name.clone(), dtype: DType::F32, shape: t.shape.clone(), block: 1 };
        let (first, mine) = params.read_mine(i, |r| part(dir, files, &values, r))?;
        f(i, first, &mine)?;
    }
    Ok(())
}

/// Loads the trained tensors of a checkpoint, without moments. Reads all tensors once before it sets any.
///
/// # Errors
/// Missing, misshaped or extra tensor.
pub fn load_weights(dir: &Path, params: &Params) -> ft_base::Result<()> {
    let files = weights(dir)?;
    each_weight(dir, &files, params, &mut |_, _, _| Ok(()))?;
    each_weight(dir, &files, params, &mut |i, first, values| Ok(params.set_from(i, first, values)?))
}

/// Loads trained tensors and optimizer states of a checkpoint.
///
/// # Errors
/// Missing, misshaped or extra tensor.
pub fn load(dir: &Path, params: &Params) -> ft_base::Result<()> {
    let moments = TensorFiles::open_file(&dir.join(OPTIMIZER))?;
    let (have, want) = (moments.len(), (0..params.tensors.len()).map(|i| entries(params, i).len()).sum());
    check_count(&dir.join(OPTIMIZER), have, want, "optimizer tensors")?;
    each_weight(dir, &weights(dir)?, params, &mut |i, first, values| Ok(params.set_from(i, first, values)?))?;
    for i in (0..params.tensors.len()).filter(|i| params.is_here(*i)) {
        let slot = &params.slots[i];
        if let Some(p) = params.projected(i) {
            for (entry, to) in entries(params, i).iter().zip(projected_views(p)?) {
                let from = part(dir, &moments, entry, 0..to.elem_count())?;
                let to = to.real()?;
                to.slice_set(&from.to_device(to.device())?, 0, 0)?;
            }
            continue;
        }
        let Some(held) = &params.flat(slot)?.moments else { continue };
        for here in held.parts(&slot.range()).into_iter().filter(|r| !r.is_empty()) {
            let range = here.start - slot.offset..here.end - slot.offset;
            for (entry, to) in entries(params, i).iter().zip(views(held.of(here)?)) {
                let ranges = entry.ranges(&params.pieces[i], range.start, to.elem_count())?;
                let from = ranges.into_iter().map(|r| part(dir, &moments, entry, r));
                let from = Tensor::cat(&from.collect::<ft_base::Result<Vec<Tensor>>>()?, 0)?;
                let to = to.real()?;
                to.slice_set(&from.to_device(to.device())?, 0, 0)?;
            }
        }
    }
    Ok(())
}

/// Checks that all keys of `--accept-change` exist in one of two identities.
///
/// # Errors
/// Unknown key, with the nearest known one.
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

/// Lists the differences of two identities, one line per key, without accepted keys, and without places with a content
/// hash in both.
pub fn changes(
    old: &BTreeMap<String, String>,
    new: &BTreeMap<String, String>,
    accepted: &[String],
) -> Vec<String> {
    let is_hashed = |k: &str| hash_of_place(k).is_some_and(|h| old.contains_key(h) && new.contains_key(h));
    let keys: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    keys.into_iter()
        .filter(|k| !accepted.contains(k) && !is_hashed(k) && old.get(*k) != new.get(*k))
        .map(|k| {
            let show = |m: &BTreeMap<String, String>| m.get(k).map_or("(not set)".into(), |v| v.to_string());
            format!("  {k}: was {}, is {}", show(old), show(new))
        })
        .collect()
}

/// Whether a checkpoint holds these trained tensors, in their shapes.
pub fn holds(dir: &Path, trained: &[Trained]) -> ft_base::Result<bool> {
    let files = weights(dir)?;
    let same = |t: &Trained| files.get(&t.name).is_ok_and(|found| found.shape == t.shape);
    Ok(files.len() == trained.len() && trained.iter().all(same))
}

/// Opens the trained tensors of a checkpoint.
pub fn weights(dir: &Path) -> ft_base::Result<TensorFiles> {
    Ok(TensorFiles::open_file(&dir.join(WEIGHTS))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_of_a_state_is_that_of_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let state =
            State { version: 1, ft: "0".into(), step: 7, identity: BTreeMap::new(), loss_scale: None };
        store::write_json(&dir.path().join(STATE), &state).unwrap();
        assert_eq!(read(dir.path(), 7).unwrap(), state);
        let refused = read(dir.path(), 8).unwrap_err().to_string();
        assert!(refused.ends_with("state.json: step is 7, and the checkpoint is of step 8"), "{refused}");
    }

    #[test]
    fn missing_and_extra_tensors_are_refused_by_number() {
        let check = |have| check_count(Path::new("o.safetensors"), have, 4, "optimizer tensors");
        assert!(check(4).is_ok() && check(3).is_err());
        let refused = check(5).unwrap_err().to_string();
        assert_eq!(refused, "o.safetensors: holds 5 optimizer tensors, this run has 4");
    }
}
