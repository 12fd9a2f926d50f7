//! Log-probabilities of whole documents, in forward passes dealt to the ranks.

use crate::train::step::{LocalMicroBatch, Ranks, Stop, check_stop};
use candle_core::Device;
use ft_data::{Dataset, Micro};
use ft_engine::model::Decoder;
use ft_engine::model::batch::Distillation;
use ft_engine::ranks::CollectiveId;
use ft_engine::walk::{Execution, Hooks, Walk};
use ft_kernels::loss;

/// Number of micro-batches per rank between exchanges.
const EXCHANGE_EVERY: usize = 1 << 12;

/// Model and ranks of a forward pass.
#[derive(Clone, Copy)]
pub struct Scorer<'a> {
    pub decoder: &'a Decoder,
    pub ranks: Ranks<'a>,
    pub hooks: &'a dyn Hooks,
    pub execution: &'a Execution,
    pub device: &'a Device,
    /// Settings of task "distill", for losses of an evaluation.
    pub distillation: Option<Distillation>,
}

/// Sum of the log-probabilities of a document's targets, and their number. Of a reward model: the score, and 1.
pub type DocumentScore = (f64, usize);

/// Sums losses by document, with opposite sign; outputs of a score head, if `are_scores`, stay as they are.
pub fn by_document(m: &Micro, outputs: Vec<f64>, are_scores: bool) -> Vec<DocumentScore> {
    if are_scores {
        return outputs.into_iter().map(|score| (score, 1)).collect();
    }
    let (mut out, mut losses) = (Vec::with_capacity(m.docs.len()), outputs.into_iter());
    let (mut targets, mut end) = (m.targets.iter().peekable(), 0);
    for tokens in &m.docs {
        end += tokens;
        let (mut sum, mut count) = (0.0, 0);
        while targets.next_if(|(query, _)| (*query as usize) < end).is_some() {
            sum -= losses.next().unwrap_or(f64::NAN);
            count += 1;
        }
        out.push((sum, count));
    }
    out
}

impl Scorer<'_> {
    /// Scores documents, in order, on all ranks. `micro` makes a micro-batch of some `items`. Calls `each` after every
    /// turn with the number of items.
    ///
    /// # Errors
    /// Unreadable rows; device errors; lost rank; [`crate::train::Error::Abandoned`].
    pub fn scores<T>(
        &self,
        items: &[T],
        micro: &dyn Fn(&[T]) -> Result<Micro, ft_data::Error>,
        stop: Stop<'_>,
        each: &dyn Fn(usize),
    ) -> ft_base::Result<Vec<DocumentScore>> {
        let pairs = |m: &Micro, outputs: Vec<f64>| {
            let scores = by_document(m, outputs, self.decoder.head.scores);
            scores.into_iter().flat_map(|(sum, n)| [sum.to_bits(), n as u64]).collect()
        };
        let words = self.words(items, micro, &pairs, stop, each)?;
        let pairs = words.as_chunks().0.iter();
        Ok(pairs.map(|[sum, n]: &[u64; 2]| (f64::from_bits(*sum), *n as usize)).collect())
    }

    /// Words made by `of` from every micro-batch and the losses, or outputs of a score head, in order, on all ranks.
    pub fn words<T>(
        &self,
        items: &[T],
        micro: &dyn Fn(&[T]) -> Result<Micro, ft_data::Error>,
        of: &dyn Fn(&Micro, Vec<f64>) -> Vec<u64>,
        stop: Stop<'_>,
        each: &dyn Fn(usize),
    ) -> ft_base::Result<Vec<u64>> {
        let chunks: Vec<&[T]> = items.chunks(self.execution.micro_rows.max(1)).collect();
        let (mut all, mut mine, context) = (Vec::new(), Vec::new(), self.ranks.row_groups());
        let apart = self.ranks.turns_between_checks();
        for (i, turn) in chunks.chunks(self.ranks.data_parallel_size()).enumerate() {
            if i.is_multiple_of(apart) {
                check_stop(self.ranks.comm, stop)?;
            }
            let whole = turn.get(self.ranks.data_parallel_rank()).map(|items| micro(items)).transpose()?;
            let own = LocalMicroBatch::new(whole.unwrap_or_default(), context.as_ref());
            let losses = self.one(&own)?;
            mine.push(if self.ranks.reports_loss() { of(&own.whole, losses) } else { Vec::new() });
            if mine.len() == EXCHANGE_EVERY {
                self.exchange(&mut mine, &mut all)?;
            }
            each(turn.iter().map(|items| items.len()).sum());
        }
        self.exchange(&mut mine, &mut all)?;
        Ok(all)
    }

    /// Losses of a micro-batch's targets, or the outputs of a score head. Empty on a rank without tokens or head.
    fn one(&self, own: &LocalMicroBatch<'_>) -> ft_base::Result<Vec<f64>> {
        if own.whole.targets.is_empty() || own.is_empty() {
            // all ranks make a pass in every turn
            Walk::chosen(self.decoder, None, self.execution).hooks(self.hooks).idle_forward()?;
            return Ok(Vec::new());
        }
        let batch = own.batch(&self.decoder.config, ((0, 0), None), None, self.device)?;
        let mut walk = Walk::chosen(self.decoder, None, self.execution).hooks(self.hooks);
        let losses = walk.eval(&batch).map_err(|e| self.ranks.comm.cause(e))?;
        if !self.decoder.units.has_head() {
            return Ok(Vec::new());
        }
        own.whole_losses(loss::on_host(losses)?.concat())
    }

    /// Appends the scores of all ranks in the order of micro-batches.
    fn exchange(&self, mine: &mut Vec<Vec<u64>>, all: &mut Vec<u64>) -> ft_base::Result<()> {
        let ranks = self.ranks.comm.all_gather_object(CollectiveId::all("log-probabilities"), mine)?;
        for turn in 0..mine.len() {
            for words in ranks.iter().filter_map(|rank| rank.get(turn)) {
                all.extend(words);
            }
        }
        mine.clear();
        Ok(())
    }
}

/// Samples of rows, in order.
pub fn samples_of(data: &Dataset, rows: impl IntoIterator<Item = usize>) -> Result<Vec<u32>, ft_data::Error> {
    let mut out = Vec::new();
    for row in rows {
        out.extend(data.rows.get(row)?);
    }
    Ok(out)
}

/// Scores of the samples' prompts with the completions of the samples before, in a cycle; cut at `limit` tokens.
pub fn crossed(
    scorer: &Scorer<'_>,
    data: &Dataset,
    samples: &[u32],
    limit: usize,
    stop: Stop<'_>,
) -> ft_base::Result<Vec<DocumentScore>> {
    let before = samples.iter().cycle().skip(samples.len().saturating_sub(1));
    let pairs: Vec<[u32; 2]> = samples.iter().zip(before).map(|(x, y)| [*x, *y]).collect();
    scorer.scores(&pairs, &|pairs| Micro::crossed(data, pairs, limit), stop, &|_| ())
}
