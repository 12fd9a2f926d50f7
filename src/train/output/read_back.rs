//! Loads a result from disk over the compute weights of the layers, for a comparison. Training can go on afterwards: a
//! model's file has them rounded, and the master weights stay.

use crate::train::job::Job;
use candle_core::{DType, Device};
use ft_engine::adapters::Adapter;
use ft_engine::adapters::Choice;
use ft_engine::adapters::{self, Selection, peft};
use ft_engine::load::layout;
use ft_engine::params::Params;
use std::path::Path;

/// Loads a result from `dir` over the compute weights.
pub fn read_back(job: &Job, params: &Params, dir: &Path) -> ft_base::Result<()> {
    if job.selection.everything_full() {
        let files = layout::open(&job.config, dir)?;
        for (i, t) in params.tensors.iter().enumerate().filter(|(i, _)| params.is_here(*i)) {
            let read = |r| Ok(files.part(&t.name, r, DType::F32, &Device::Cpu)?);
            let (first, values) = params.read_mine(i, read)?;
            params.set_compute(i, first, &values)?;
        }
        return Ok(());
    }
    let read = Adapter::open(dir)?;
    for (i, t) in params.tensors.iter().enumerate().filter(|(i, _)| params.is_here(*i)) {
        let fail = |why: &str| wrong(dir, format!("{} is not {why}", t.name));
        let held = read.get(&params.exported_tensor(i))?.ok_or_else(|| fail("in it"))?;
        let value = params.trained_of(i, &held)?.ok_or_else(|| fail("what was written"))?;
        params.set(i, &value)?;
    }
    Ok(())
}

/// Error for an unusable result.
pub fn wrong(dir: &Path, why: String) -> adapters::Error {
    adapters::Error::Peft { file: dir.display().to_string(), why: format!("read back: {why}") }
}

/// Checks that the PEFT config on disk makes the same choices as the selection.
pub fn same_choices(dir: &Path, ours: &Selection, read: &Selection) -> Result<(), adapters::Error> {
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
