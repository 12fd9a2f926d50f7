//! Evaluation loss, and logits of a micro-batch.

use crate::train::step::{Stop, check_stop, host};
use candle_core::Device;
use ft_data::{Dataset, Micro, Size};
use ft_engine::model::{Batch, Decoder};
use ft_engine::ranks::{self, At, Comm};
use ft_engine::walk::{Execution, Hooks, NoHooks, Outline, Walk, visit};
use ft_kernels::loss;
use ft_kernels::tensor::Real;

/// Number of evaluation micro-batches per rank between reductions of the loss.
const REDUCE_EVERY: usize = 1 << 12;

/// Mean loss over a dataset, and number of targets.
pub fn evaluate(
    decoder: &Decoder,
    data: &Dataset,
    execution: &Execution,
    device: &Device,
) -> ft_base::Result<(f64, usize)> {
    evaluate_until(decoder, (&ranks::alone(), &NoHooks), data, execution, device, &|| 0)
}

/// As [`evaluate`], with micro-batches dealt to the ranks in turn. Calls `stop` before every micro-batch.
/// All ranks run a pass in every turn, because `around` contains collectives.
///
/// # Errors
/// As [`evaluate`]; [`crate::train::Error::Abandoned`]; lost rank.
pub fn evaluate_until(
    decoder: &Decoder,
    (comm, around): (&dyn Comm, &dyn Hooks),
    data: &Dataset,
    execution: &Execution,
    device: &Device,
    stop: Stop<'_>,
) -> ft_base::Result<(f64, usize)> {
    let (count, micro) = (data.rows.len(), execution.micro_rows.max(1));
    let mut micros = (0..count).step_by(micro).map(|at| (at..(at + micro).min(count)).collect::<Vec<_>>());
    let (mut sums, mut sum, mut targets) = (Vec::new(), 0.0, 0);
    loop {
        let turn: Vec<Vec<usize>> = micros.by_ref().take(comm.world()).collect();
        if turn.is_empty() || sums.len() == REDUCE_EVERY {
            sum = add_losses(comm, &mut sums, sum)?;
        }
        if turn.is_empty() {
            return Ok((sum / targets.max(1) as f64, targets));
        }
        check_stop(comm, stop)?;
        let sizes = turn.iter().map(|rows| Ok(Size::of(data, rows)?.targets));
        let sizes = sizes.collect::<Result<Vec<usize>, ft_data::Error>>()?;
        targets += sizes.iter().sum::<usize>();
        let mine = turn.get(comm.rank()).zip(sizes.get(comm.rank()));
        match mine {
            Some((rows, n)) if *n > 0 => {
                let m = Micro::collate(data, rows)?;
                let batch = Batch::new(&decoder.config, host(&m), (0, 0), None, device)?;
                let mut walk = Walk::chosen(decoder, None, execution).hooks(around);
                sums.push(loss::total(&walk.eval(&batch)?)?.to_bits());
            }
            _ => {
                visit::pass(Outline::of(decoder).forward(), around, &mut |_| Ok(()))?;
                sums.extend(mine.map(|_| 0f64.to_bits()));
            }
        }
    }
}

/// Adds the losses of all ranks to `sum`, in the order of rows, so the result does not depend on the number
/// of ranks.
fn add_losses(comm: &dyn Comm, sums: &mut Vec<u64>, sum: f64) -> ft_base::Result<f64> {
    let all = comm.all_gather_object(At::all("the evaluation's losses"), sums)?;
    sums.clear();
    let turns = all.first().map_or(0, Vec::len);
    let each = (0..turns).flat_map(|turn| all.iter().filter_map(move |rank| rank.get(turn)));
    Ok(each.fold(sum, |sum, bits| sum + f64::from_bits(*bits)))
}

/// Computes the logits `[t, v]` of all tokens in a micro-batch.
pub fn probe(decoder: &Decoder, around: &dyn Hooks, m: &Micro, device: &Device) -> ft_base::Result<Real> {
    let batch = Batch::new(&decoder.config, host(m), (0, 0), None, device)?;
    Ok(Walk::new(decoder, None, 0).hooks(around).logits(&batch)?.real()?.clone())
}
