//! The result of a run: `adapter/` or `model/`, read back and compared by logits before the folder gets its
//! final name.

use super::gather::Alone;
use super::ranks::{self, Next};
use super::state;
use super::step::{Setup, probe};
use super::{Error, Job};
use crate::report::{self, CARD};
use candle_core::{DType, Device, Tensor};
use ft_base::store::{self, NewFolder};
use ft_base::terminal::warn;
use ft_data::{Micro, Tokenizer};
use ft_engine::adapters::peft::{self, Values};
use ft_engine::adapters::{self, Adapter, Choice, Part, Selection, Trained};
use ft_engine::base::check_tensors;
use ft_engine::files::{COMPANIONS, TOKENIZER, TensorFiles, write_folder};
use ft_engine::model::Config;
use ft_engine::model::modules::{Group, modules};
use ft_engine::params::Params;
use ft_engine::walk::{self, Outline, visit};
use ft_kernels::to_host;
use ft_recipe::{Decomposition, Quantize};
use serde_json::Map;
use std::path::{Path, PathBuf};

/// Tolerance for the relative L2 distance of logits.
const BAR: f64 = 1e-5;

/// Relative L2 distance of two tensors of logits: infinite if either contains a non-finite value, 0 if both
/// are zero.
pub fn logits_apart(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let upcast = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all();
    let (a, b) = (upcast(a)?, upcast(b)?);
    let apart = (a - &b)?.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    let norm = b.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    Ok(match apart / norm {
        _ if apart == 0.0 => 0.0,
        relative if relative.is_finite() => relative,
        _ => f64::INFINITY,
    })
}

/// Folder of the result in a run folder.
pub fn result_dir(job: &Job, dir: &Path) -> PathBuf {
    dir.join(if job.selection.everything_full() { MODEL } else { ADAPTER })
}

/// Possible folder names of a result.
pub const RESULTS: [&str; 2] = [ADAPTER, MODEL];
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";

/// Returns true for file names that `ft` writes to a model folder.
pub fn is_of_model(name: &str) -> bool {
    let weights = name.starts_with("model")
        && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
    let own = ["config.json", ft_engine::quant::CACHE_MARKER, CARD];
    weights || own.contains(&name) || COMPANIONS.contains(&name)
}

/// Files of the tokenizer.
fn of_tokenizer() -> &'static [&'static str] {
    &COMPANIONS[2..]
}

/// Returns true for file names that `ft` writes to an adapter folder, except the record of the prompt
/// format.
pub fn is_of_adapter(name: &str) -> bool {
    ["adapter_config.json", "adapter_model.safetensors", CARD].contains(&name)
        || of_tokenizer().contains(&name)
}

/// Writes the result of a run, checks it, then moves it into place over an older result. Returns the folder
/// of the adapter or model.
///
/// `values` returns trained tensors in f32, or in the stored dtype without master weights. A rank may hold
/// only a shard.
pub fn write(
    job: &Job,
    s: &Setup<'_>,
    values: &Values<'_>,
    dir: &Path,
    sample: &Micro,
) -> ft_base::Result<PathBuf> {
    let (decoder, params) = (s.decoder, s.params);
    let alone = Alone::new(decoder, params, s.comm);
    let before = probe(decoder, &alone, sample, &job.device)?;
    let hint = "the checkpoint of the last step is whole, and nothing else is written\n  hint: a lower optimizer.lr, or run.clip";
    walk::finite(&before, "the trained model", hint)?;
    let target = result_dir(job, dir);
    let new = NewFolder::begin(&target)?;
    let out = new.path();
    let full = job.selection.everything_full();
    if full {
        write_model(job, (&params.tensors, values), &out)?;
        let files = TensorFiles::open_model(&out)?;
        let config = Config::load(&out, &Map::new())?;
        check_tensors(&config, &files)?;
    } else {
        let selection = job.selection.exported(params.initials.as_deref());
        let mut neutral = Vec::new();
        if peft::needs_neutral(&job.selection) {
            visit::pass(Outline::of(decoder).forward(), &alone, &mut |unit| {
                neutral.extend(peft::neutral(&job.selection, decoder, unit)?);
                Ok(())
            })?;
        }
        let held = |i: usize| -> ft_base::Result<Tensor> { Ok(params.exported(i, &values(i)?)?) };
        save_adapter(job, &selection, (&params.tensors, &held, neutral), &out)?;
        let read = Adapter::open(&out)?;
        same_choices(&target, &selection, &Selection::from_peft(&job.config, &read.config)?)?;
    }
    if params.is_split() {
        ranks::tell_next(s.comm, &Next::ReadBack(out.clone()))?;
    }
    read_back(job, params, &out)?;
    job.trained().save(&out, job.tokenizer.as_deref().and_then(|t| t.given_template()))?;
    report::leave_card(&out, dir, &job.recipe.name, &target)?;
    let apart = logits_apart(&probe(decoder, &alone, sample, &job.device)?, &before)?;
    if apart > BAR {
        return Err(Error::Readback { path: target.display().to_string(), apart, bar: BAR }.into());
    }
    new.replace(if full { &is_of_model } else { &is_of_adapter })?;
    Ok(target)
}

fn save_adapter(
    job: &Job,
    selection: &Selection,
    what: (&[Trained], &Values<'_>, Vec<(String, Tensor)>),
    out: &Path,
) -> ft_base::Result<()> {
    let revision = job.model.revision.as_deref();
    // No quantization is recorded if the base is 4-bit on disk, because the name of the base implies it, or
    // if the adapter took initial values from the base, because it then applies to the base as published.
    let quantize = if job.config.four_bit || lacks(job) { Quantize::None } else { job.recipe.model.quantize };
    for file in of_tokenizer() {
        match store::copy_inside(&job.model.dir, file, out) {
            // Optional here: the base folder has the tokenizer too.
            Err(e @ (store::Error::Unsafe { .. } | store::Error::Read { .. })) => {
                warn(&format!("not kept with the adapter: {e}"));
            }
            copied => copied?,
        }
    }
    if let Some((file, _)) = job.tokenizer.as_deref().and_then(Tokenizer::with_added) {
        store::write_atomic(&out.join(TOKENIZER), file)?;
    }
    peft::save(out, selection, what, &job.model.source, revision, quantize)
}

/// Returns true if the initial values of the adapter were subtracted from the base.
fn lacks(job: &Job) -> bool {
    job.recipe.lora.init.decomposition().is_some_and(Decomposition::changes_base)
}

/// Exports a checkpoint as a result, without the weights of the base.
///
/// # Errors
/// Checkpoint of another run. DoRA in combination with plain LoRA, which needs magnitudes from the base.
/// `lora.init` with a decomposition of the base, for the same reason.
pub fn of_checkpoint(job: &Job, checkpoint: &Path, out: &Path) -> ft_base::Result<()> {
    let trained = job.selection.trained();
    let files = state::weights(checkpoint)?;
    let values = |i: usize| -> ft_base::Result<Tensor> {
        let t: &Trained = &trained[i];
        // Dtype in the checkpoint.
        let held = files.info(&t.name).and_then(|i| DType::try_from(i.dtype).ok()).unwrap_or(DType::F32);
        let value = files.tensor(&t.name, held, &Device::Cpu)?;
        match value.dims() == t.shape {
            true => Ok(value),
            false => Err(wrong(checkpoint, format!("{} has the shape {:?}", t.name, value.dims())).into()),
        }
    };
    if job.selection.everything_full() {
        write_model(job, (&trained, &values), out)?;
    } else {
        if peft::needs_neutral(&job.selection) {
            let why =
                "DoRA beside plain LoRA needs the base's weights\n  hint: ft run --resume writes adapter/";
            return Err(wrong(checkpoint, why.into()).into());
        }
        if lacks(job) {
            let init = job.recipe.place("lora.init");
            let why = format!(
                "{init}: lora.init needs the base's weights\n  hint: ft run --resume writes adapter/"
            );
            return Err(wrong(checkpoint, why).into());
        }
        save_adapter(job, &job.selection, (&trained, &values, Vec::new()), out)?;
    }
    Ok(job.trained().save(out, job.tokenizer.as_deref().and_then(|t| t.given_template()))?)
}

/// Loads a result from `dir` over the trained values.
///
/// # Errors
/// Unreadable result; missing tensor.
pub fn read_back(job: &Job, params: &Params, dir: &Path) -> ft_base::Result<()> {
    if job.selection.everything_full() {
        let files = TensorFiles::open_model(dir)?;
        for (i, t) in params.tensors.iter().enumerate() {
            let mine = params.mine(i)?;
            params.set_from(i, mine.start, &files.part(&t.name, mine, DType::F32, &Device::Cpu)?)?;
        }
        return Ok(());
    }
    let read = Adapter::open(dir)?;
    for (i, t) in params.tensors.iter().enumerate() {
        match read.get(&params.exported_tensor(i))? {
            Some(held) => match params.trained_of(i, &held)? {
                Some(value) => params.set(i, &value)?,
                None => return Err(wrong(dir, format!("{} is not what was written", t.name)).into()),
            },
            None => return Err(wrong(dir, format!("{} is not in it", t.name)).into()),
        }
    }
    Ok(())
}

fn wrong(dir: &Path, why: String) -> adapters::Error {
    adapters::Error::Peft { file: dir.display().to_string(), why: format!("read back: {why}") }
}

/// Checks that the PEFT config on disk makes the same choices as the selection.
fn same_choices(dir: &Path, ours: &Selection, read: &Selection) -> Result<(), adapters::Error> {
    for ((m, a), (_, b)) in ours.modules.iter().zip(&read.modules) {
        let same = match (a, b) {
            (Choice::Freeze, Choice::Freeze) | (Choice::Full { .. }, Choice::Full { .. }) => true,
            (Choice::Lora { spec: a, .. }, Choice::Lora { spec: b, .. }) => {
                a.rank == b.rank && (peft::scale(a) - peft::scale(b)).abs() <= 1e-12 * peft::scale(a).abs()
            }
            (Choice::Rows { .. }, Choice::Rows { .. }) => ours.tokens.of(&m.name) == read.tokens.of(&m.name),
            _ => false,
        };
        if !same {
            return Err(wrong(dir, format!("its config makes {} {b:?}, trained was {a:?}", m.name)));
        }
    }
    Ok(())
}

/// Writes a whole model: config, companion files, and sharded weights in the compute dtype.
fn write_model(job: &Job, (trained, values): (&[Trained], &Values<'_>), out: &Path) -> ft_base::Result<()> {
    let find = |name: &str| trained.iter().position(|t| t.name == name);
    let mut entries = Vec::new();
    for m in modules(&job.config) {
        if job.config.tied && m.group == Group::Head {
            continue;
        }
        for part in [Part::Weight, Part::Bias] {
            let name = format!("{}.{}", m.name, adapters::part_name(&m, part));
            if let Some(i) = find(&name) {
                entries.push((name, job.dtype, trained[i].shape.clone()));
            }
        }
    }
    write_folder(&job.model.dir, out, job.config.raw.clone(), job.dtype, &entries, &mut |name| match find(
        name,
    ) {
        Some(i) => Ok(to_host(&values(i)?)?.to_dtype(job.dtype)?),
        None => Err(candle_core::Error::Msg(format!("{name} does not train")).into()),
    })
}
