//! Loop of all ranks except the first.
//!
//! The first rank runs like a single one, and announces every joint operation: a step, an evaluation, a
//! checkpoint. All ranks then call the same functions with matching collectives. Signals, schedules and
//! files are therefore handled in one place, and ranks cannot disagree.

use super::inputs::RunInputs;
use super::shard::{load, load_checkpoint, ready, save};
use crate::train::Error;
use crate::train::eval::{evaluate, logits_of_all};
use crate::train::job::Job;
use crate::train::output;
use crate::train::step::command::{self, Command};
use crate::train::step::{Gather, StepInput, Stop, TrainContext, finite};
use ft_base::memory::place;
use ft_engine::load::Base;
use ft_engine::ranks::{self, Comm};
use ft_engine::walk::generate::Reader;
use ft_engine::walk::{Times, Walk};
use ft_recipe::Part;
use std::time::Duration;

/// Runs `f` with collectives for the tensors of the device of a job.
pub fn on_device<R>(
    job: &Job,
    comm: &dyn Comm,
    f: impl FnOnce(&dyn Comm) -> ft_base::Result<R>,
) -> ft_base::Result<R> {
    ranks::on_device(comm, &job.device, Duration::from_secs(job.recipe.parallel.timeout), f)
}

/// Runs a rank other than the first. `stop` returns signals sent to this process.
pub fn follow(inputs: &RunInputs, base: &Base, comm: &dyn Comm, stop: Stop<'_>) -> ft_base::Result<()> {
    let reference = inputs.reference(None, comm).of_other()?;
    let model = ready(inputs, load(&inputs.job, base, comm)?, (reference, None), comm)?;
    let cx = inputs.context(&model, comm);
    let gather = Gather::new(&model.decoder, &model.params, comm);
    let mut reader = Reader::new(&model.decoder, &inputs.job.device).hooks(&gather);
    loop {
        let command = command::receive(comm)?;
        match &command {
            Command::End => return Ok(()),
            Command::Read(reading) if cx.ranks().reads() => {
                reader.follow(reading)?;
                continue;
            }
            _ => reader.clear(),
        }
        match execute(command, inputs, &cx, &gather, stop) {
            // The first rank handles the signal.
            Err(e) if matches!(e.of(), Some(Error::Abandoned(_))) => {}
            outcome => outcome?,
        }
    }
}

/// Executes one operation of all ranks.
fn execute(
    command: Command,
    inputs: &RunInputs,
    cx: &TrainContext<'_>,
    gather: &Gather<'_>,
    stop: Stop<'_>,
) -> ft_base::Result<()> {
    let (job, comm, decoder, params) = (cx.job, cx.comm, &cx.model.decoder, &cx.model.params);
    match command {
        Command::Step(n) => {
            #[cfg(test)]
            broken::check(&job.recipe.run.output, comm.rank(), n)?;
            let (rows, times) = (inputs.batches.rows(n as usize), &mut Times::off());
            let lr = |peak: f64| inputs.schedule.at(n as usize, peak);
            let input = StepInput { data: &inputs.data, rows: &rows, step: n, lr: &lr };
            let output = cx.accumulate(&input, times, stop)?;
            cx.update(&input, &output, times)
        }
        Command::Evaluate => {
            let Some(eval) = &inputs.eval else { return Ok(()) };
            place::enter(place::Phase::Evaluate, 0);
            evaluate(&cx.scorer(gather), eval, cx.objective(Part::Eval), stop).map(drop)
        }
        Command::Save(step, dir) => {
            place::enter(place::Phase::Save, 0);
            finite::check_weights(params, comm, step)?;
            save(cx, dir.as_ref())
        }
        Command::Forward | Command::Read(_) => {
            Walk::chosen(decoder, None, &inputs.execution).hooks(gather).idle_forward()
        }
        Command::Probe(of) => logits_of_all(cx, gather, of).map(drop),
        Command::Collect => output::give(cx, gather),
        Command::ReadBack(dir) => output::read_back(job, params, dir.as_ref()),
        Command::Load(dir) => load_checkpoint(params, dir.as_ref(), comm),
        Command::End => Ok(()),
    }
}

/// Fault injection for tests.
#[cfg(test)]
pub mod broken {
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    /// A fault, as a function.
    pub type Breaks = fn() -> ft_base::Result<()>;

    /// Faults by run folder, rank and step.
    pub static BREAKS: Mutex<Vec<(PathBuf, usize, u64, Breaks)>> = Mutex::new(Vec::new());

    /// Triggers the fault for a step, if any.
    pub fn check(run: &Path, rank: usize, step: u64) -> ft_base::Result<()> {
        let breaks = BREAKS.lock().map(|all| {
            let found = all.iter().find(|(p, r, s, _)| p == run && (*r, *s) == (rank, step));
            found.map(|f| f.3)
        });
        breaks.ok().flatten().map_or(Ok(()), |f| f())
    }
}
