//! The result of a run: `adapter/` or `model/`, read back and compared by logits before the folder gets the final name.

use super::collect;
use super::folder::{save_adapter, write_model};
use super::logits::logits_apart;
use super::read_back::{read_back, same_choices};
use crate::report;
use crate::train::Error;
use crate::train::eval::probe_of;
use crate::train::layout::{is_of_adapter, is_of_model, result_dir};
use crate::train::step::TrainContext;
use crate::train::step::command::{self, Command};
use candle_core::Tensor;
use ft_base::store::AtomicFolder;
use ft_data::Micro;
use ft_engine::adapters::Adapter;
use ft_engine::adapters::Selection;
use ft_engine::adapters::peft::Values;
use ft_engine::load::{check_tensors, layout};
use ft_engine::model::Config;
use ft_engine::walk;
use serde_json::Map;
use std::path::{Path, PathBuf};

/// Tolerance for the relative L2 distance of logits.
const BAR: f64 = 1e-5;

/// Writes the result of a run, checks it, then moves it into place over an older result. Returns the folder
/// of the adapter or model.
///
/// `values` returns trained tensors in f32, or in the stored dtype without master weights. A rank may hold
/// only a shard.
pub fn write(
    cx: &TrainContext<'_>,
    values: &Values<'_>,
    dir: &Path,
    sample: &Micro,
) -> ft_base::Result<PathBuf> {
    let (job, params) = (cx.job, &cx.model.params);
    let before = probe_of(cx, sample)?;
    let hint = "the checkpoint of the last step is whole, and nothing else is written\n  hint: a \
        lower optimizer.lr, or run.clip";
    walk::finite(&before, "the trained model", hint)?;
    let target = result_dir(&job.selection, dir);
    let new = AtomicFolder::begin(&target)?;
    let out = new.path();
    let full = job.selection.everything_full();
    if full {
        write_model(job, (&params.tensors, values), &out)?;
        let config = Config::load(&out, &Map::new())?;
        check_tensors(&config, &layout::open(&config, &out)?)?;
    } else {
        let selection = job.selection.exported(params.initials.as_deref());
        let neutral = collect::of_all_ranks(cx)?;
        let held = |i: usize| -> ft_base::Result<Tensor> { Ok(params.exported(i, &values(i)?)?) };
        save_adapter(job, &selection, (&params.tensors, &held, neutral), &out)?;
        let read = Adapter::open(&out)?;
        same_choices(&target, &selection, &Selection::from_peft(&job.config, &read.config)?)?;
    }
    if params.needs_others() {
        command::announce(cx.comm, &Command::ReadBack(out.as_os_str().into()))?;
    }
    read_back(job, params, &out)?;
    job.trained().save(&out, job.tokenizer.as_deref().and_then(|t| t.given_template()))?;
    report::leave_card(&out, dir, &job.recipe.name, &target)?;
    let apart = logits_apart(&probe_of(cx, sample)?, &before)?;
    if apart > BAR {
        return Err(Error::Readback { path: target.display().to_string(), apart, bar: BAR }.into());
    }
    new.replace(if full { &is_of_model } else { &is_of_adapter })?;
    Ok(target)
}
