//! Evaluation loss, and logits of a micro-batch.

use super::history::Evaluation;
use crate::train::Error;
use crate::train::distill;
use crate::train::job::Job;
use crate::train::objective::Objective;
use crate::train::preference::{Preferences, ReferenceInputs, Scorer, reference_model};
use crate::train::step::command::{self, Command, Probed};
use crate::train::step::{Gather, LocalMicroBatch, Ranks, Stop, TrainContext, TrainedModel, check_stop};
use candle_core::{DType, Device};
use ft_data::{Dataset, Micro, Size};
use ft_engine::model::{Batch, Decoder};
use ft_engine::params::Params;
use ft_engine::ranks::{self, CollectiveId, Comm};
use ft_engine::walk::{Execution, Hooks, NoHooks, Walk};
use ft_kernels::tensor::Real;
use ft_kernels::{Tensor, loss};
use ft_recipe::Part;

/// Number of evaluation micro-batches per rank between reductions of the loss.
const REDUCE_EVERY: usize = 1 << 12;

/// As `evaluate`, of a model loaded for inference, on one rank. Computes the reference first, if the task has one.
pub fn evaluate_loaded(
    job: &Job,
    (decoder, params): (&Decoder, &Params),
    data: &Dataset,
    execution: &Execution,
) -> ft_base::Result<Evaluation> {
    let alone = ranks::alone();
    let mut preferences = Preferences::of(&job.recipe);
    if let Some(p) = &mut preferences {
        let (train, eval, identity) = (None, Some(data), None);
        let inputs = ReferenceInputs { job, train, eval, execution, comm: &alone, identity };
        reference_model::check(job)?;
        reference_model::check_trained(job)?;
        p.reference = inputs.scores(inputs.of_other()?, decoder, params)?;
    }
    let distillation = distill::settings(&job.recipe);
    let ranks = Ranks::of(&alone, &job.recipe.parallel);
    let scorer = Scorer { decoder, ranks, hooks: &NoHooks, execution, device: &job.device, distillation };
    let objective = Objective::of(&job.recipe, preferences.as_ref(), Part::Eval);
    evaluate(&scorer, data, objective, &|| 0)
}

/// Mean loss over a dataset, with micro-batches dealt to the ranks in turn. Calls `stop` before every micro-batch.
/// All ranks run a pass in every turn, because the hooks contain collectives.
///
/// # Errors
/// Device errors; [`crate::train::Error::Abandoned`]; lost rank.
pub fn evaluate(
    scorer: &Scorer<'_>,
    data: &Dataset,
    objective: Option<Objective<'_>>,
    stop: Stop<'_>,
) -> ft_base::Result<Evaluation> {
    if let Some(objective) = objective {
        return objective.evaluate(scorer, data, stop);
    }
    let Scorer { decoder, ranks, hooks, execution, device, distillation } = *scorer;
    let (comm, context) = (ranks.comm, ranks.row_groups());
    let (count, micro) = (data.rows.len(), execution.micro_rows.max(1));
    let mut micros = (0..count).step_by(micro).map(|at| (at..(at + micro).min(count)).collect::<Vec<_>>());
    let (mut sums, mut sum, mut all) = (Vec::new(), [0.0; 2], Size::default());
    let (mut passed, apart) = (0usize, ranks.turns_between_checks());
    loop {
        let turn: Vec<Vec<usize>> = micros.by_ref().take(ranks.data_parallel_size()).collect();
        if turn.is_empty() || sums.len() == REDUCE_EVERY {
            sum = add_losses(comm, &mut sums, sum)?;
        }
        if turn.is_empty() {
            let [loss, divergence] = sum.map(|sum| if all.weight > 0.0 { sum / all.weight } else { 0.0 });
            let (loss, metrics) = distill::loss(distillation, loss, divergence);
            return Ok(Evaluation { loss, targets: all.targets, metrics });
        }
        if passed.is_multiple_of(apart) {
            check_stop(comm, stop)?;
        }
        passed += 1;
        let sizes = turn.iter().map(|rows| Size::of(data, rows));
        let sizes = sizes.collect::<Result<Vec<Size>, ft_data::Error>>()?;
        for size in &sizes {
            all.targets += size.targets;
            all.weight += size.weight;
        }
        let mine = turn.get(ranks.data_parallel_rank()).zip(sizes.get(ranks.data_parallel_rank()));
        let own = match mine {
            Some((rows, size)) if size.targets > 0 => {
                Some(LocalMicroBatch::new(Micro::collate(data, rows)?, context.as_ref()))
                    .filter(|m| !m.is_empty())
            }
            _ => None,
        };
        match own {
            Some(own) => {
                let batch = own.batch(&decoder.config, ((0, 0), None), distillation, device)?;
                let mut walk = Walk::chosen(decoder, None, execution).hooks(hooks);
                let (mut losses, mut divergences) = (loss::Running::default(), loss::Running::default());
                let weights = &own.micro().weights;
                losses.keep(walk.eval(&batch).map_err(|e| comm.cause(e))?, weights)?;
                divergences.keep(walk.take_divergences(), weights)?;
                sums.push([losses.total()?, divergences.total()?].map(f64::to_bits));
            }
            None => {
                Walk::chosen(decoder, None, execution).hooks(hooks).idle_forward()?;
                sums.extend(mine.map(|_| [0f64.to_bits(); 2]));
            }
        }
    }
}

/// Adds the sums of losses and divergences of all ranks to `sum`, in the order of rows, so the result does not depend
/// on the number of ranks.
fn add_losses(comm: &dyn Comm, sums: &mut Vec<[u64; 2]>, sum: [f64; 2]) -> ft_base::Result<[f64; 2]> {
    let all = comm.all_gather_object(CollectiveId::all("the evaluation's losses"), sums)?;
    sums.clear();
    let turns = all.first().map_or(0, Vec::len);
    let each = (0..turns).flat_map(|turn| all.iter().filter_map(move |rank| rank.get(turn)));
    Ok(each.fold(sum, |[a, b], [x, y]| [a + f64::from_bits(*x), b + f64::from_bits(*y)]))
}

/// Computes the logits `[t, v]` of all tokens in a micro-batch.
pub fn probe(decoder: &Decoder, around: &dyn Hooks, m: &Micro, device: &Device) -> ft_base::Result<Real> {
    let batch = Batch::new(&decoder.config, m.into(), (0, 0), None, device)?;
    Ok(Walk::new(decoder, None, 0).hooks(around).logits(&batch)?.real()?.clone())
}

/// Computes the logits `[t, v]` of all tokens in a micro-batch of the first rank, with the weights of all ranks.
pub fn probe_of(cx: &TrainContext<'_>, m: &Micro) -> ft_base::Result<Real> {
    let TrainedModel { decoder, params, .. } = cx.model;
    if !params.split.is_of_part() {
        return probe(decoder, &Gather::leading(decoder, params, cx.comm), m, cx.device());
    }
    let of = Probed { ids: m.ids.clone(), positions: m.positions.clone(), docs: m.docs.clone() };
    command::announce(cx.comm, &Command::Probe(of.clone()))?;
    let gather = Gather::new(decoder, params, cx.comm);
    let none = || Error::Internal("the last stage sent no logits".into()).into();
    logits_of_all(cx, &gather, of)?.ok_or_else(none)
}

/// A forward pass of all ranks over a micro-batch of the first, which gets the logits.
pub fn logits_of_all(
    cx: &TrainContext<'_>,
    gather: &Gather<'_>,
    of: Probed,
) -> ft_base::Result<Option<Real>> {
    let (decoder, ranks) = (&cx.model.decoder, cx.ranks());
    let Probed { ids, positions, docs } = of;
    let whole = Micro { ids, positions, docs, ..Micro::default() };
    let (tokens, context) = (whole.ids.len(), ranks.row_groups());
    let mut walk = Walk::new(decoder, None, 0).hooks(gather);
    let own = (ranks.data_parallel_rank() == 0).then(|| LocalMicroBatch::new(whole, context.as_ref()));
    let logits = match own.as_ref().filter(|own| !own.is_empty()) {
        None => walk.idle_forward().map(|()| None)?,
        Some(own) => walk.stage_logits(&own.batch(&decoder.config, ((0, 0), None), None, cx.device())?)?,
    };
    let mine = own.map(|own| own.tokens()).filter(|_| logits.is_some()).unwrap_or_default();
    let all = cx.comm.all_gather_object(CollectiveId::all("the tokens of logits"), &mine)?;
    let members: Vec<usize> = (0..all.len()).filter(|r| *r == 0 || !all[*r].is_empty()).collect();
    if !members.contains(&cx.comm.rank()) {
        return Ok(None);
    }
    let (vocab, at) = (decoder.head.vocab, CollectiveId::all("the logits of a micro-batch"));
    let rows = |n: usize, t: &Tensor| t.narrow(0, 0, n)?.contiguous()?.flatten_all();
    let flat = logits.filter(|_| !mine.is_empty()).map(|t| rows(mine.len(), &t)).transpose()?;
    if cx.comm.rank() != 0 {
        let out: Vec<_> = flat.into_iter().map(|t| (0, t)).collect();
        cx.comm.exchange_among((&members, at), &out, &[])?.wait()?;
        return Ok(None);
    }
    let room = |r: &usize| Ok((*r, Tensor::zeros(all[*r].len() * vocab, DType::F32, cx.device())?));
    let others = members.iter().filter(|r| **r != 0 && !all[**r].is_empty());
    let into = others.map(room).collect::<candle_core::Result<Vec<_>>>()?;
    cx.comm.exchange_among((&members, at), &[], &into)?.wait()?;
    let to = Real::zeros((tokens, vocab), DType::F32, cx.device())?;
    for (rank, part) in flat.into_iter().map(|t| (0, t)).chain(into) {
        for (i, token) in all[rank].iter().enumerate() {
            let row = part.narrow(0, i * vocab, vocab)?.reshape((1, vocab))?;
            to.slice_set(row.real()?, 0, *token as usize)?;
        }
    }
    Ok(Some(to))
}
