//! A plan as text.

use super::place;
use crate::host::sum;
use crate::memory::{Component, Theory, overhead};
use crate::plan::Plan;
use crate::time::rates::{Range, Source};
use crate::units::{bytes, count, seconds};
use ft_base::terminal::plural;
use ft_engine::params::learning_rates;
use std::fmt::{self, Write};

/// Width of the longest bar, in characters.
const BAR: usize = 36;

/// Components below this share of the peak are one line of the short table.
const SMALL: u64 = 100;

impl Plan {
    /// The plan in short: verdict with reason, components, size and time of a step, hints. `of` names recipe
    /// and model.
    pub fn text(&self, of: &str, range: Option<Range>, notes: &[String]) -> String {
        let mut s = format!("{}\n{of}\n\n", self.headline());
        let _ = self.write_components(&mut s, self.total() / SMALL);
        let _ = self.write_short(&mut s, range);
        for n in notes {
            let _ = writeln!(s, "note: {n}");
        }
        for h in &self.hints {
            let _ = writeln!(s, "hint: {}", h.text);
        }
        s
    }

    /// The whole plan, with the reasons of all choices.
    pub fn details(&self, range: Option<Range>) -> String {
        let mut s = String::new();
        let _ = self.write_data(&mut s);
        let _ = self.write_execution(&mut s, range);
        let _ = self.write_device(&mut s);
        let _ = self.write_others(&mut s);
        s
    }

    /// The verdict in one line, with the figures behind it.
    pub fn headline(&self) -> String {
        let (card, total) = (if self.machine.cuda { "CUDA card" } else { "CPU" }, bytes(self.total()));
        let device = match (self.ranks, self.machine.cuda) {
            (1, true) => format!("one {card}"),
            (1, false) => format!("the {card}"),
            (n, true) => format!("each of {n} {card}s"),
            (n, false) => format!("the {card}, each of {n} ranks"),
        };
        match self.budget {
            None => {
                format!("needs {total} on {device} ({}); how much there is, memory.budget says", self.how())
            }
            Some(b) if !self.fits_device() => {
                format!(
                    "does not fit: needs {} on {device} (most of it {})",
                    of_all(&total, &bytes(b)),
                    self.most()
                )
            }
            Some(b) if self.fits() => {
                format!("fits: {} on {device} ({})", of_all(&total, &bytes(b)), self.how())
            }
            Some(b) => {
                let lacks = self.verdict().to_string();
                let first = lacks.lines().next().unwrap_or_default();
                format!("does not fit, though {} do on {device}: {first}", of_all(&total, &bytes(b)))
            }
        }
    }

    /// The execution in words.
    pub fn how(&self) -> String {
        let c = &self.execution;
        let recomputed = match c.recompute.layers() {
            0 => "nothing recomputed".into(),
            _ => format!("recomputing {}", c.words(self.walked)),
        };
        format!("{recomputed}, micro-batches of {}", plural(c.micro_rows, "row"))
    }

    fn write_short(&self, s: &mut String, range: Option<Range>) -> fmt::Result {
        let (total, trainable) = self.parameters;
        let share = 100.0 * trainable as f64 / total.max(1) as f64;
        writeln!(s, "\ntrains      {} of {} parameters ({share:.2}%)", count(trainable), count(total))?;
        let steps = self.workload.steps.map_or("by run.epochs".into(), |n| n.to_string());
        let full = if self.workload.measured() { "" } else { ", if rows are full" };
        let tokens = count(self.tokens_per_step());
        let epoch = self.workload.epoch.map(|e| format!("; {} an epoch", e.words()));
        writeln!(s, "steps       {steps}, of {tokens} tokens{full}{}", epoch.unwrap_or_default())?;
        match range {
            Some(_) => self.write_time(s, range)?,
            None => {
                let sheets = if self.machine.cuda { "; a card's name for --gpu estimates it" } else { "" };
                writeln!(s, "time        not known: ft bench measures it on such a machine{sheets}")?
            }
        }
        self.write_products(s)?;
        self.write_reference(s, range)?;
        if let Some(p) = &self.pipeline {
            writeln!(s, "pipeline    {}", p.words(self.micro_batches))?;
        }
        match sum(&self.space.host) {
            0 => Ok(()),
            host => writeln!(s, "host        {} beside the device's", bytes(host)),
        }
    }

    /// Time of the reference's pass, from the time of a step.
    pub(super) fn reference_time(&self, step: Option<Range>) -> Option<Range> {
        let part = self.reference.as_ref()?.work? / self.step_work();
        step.map(|r| Range { low: r.low * part, high: r.high * part, ..r })
    }

    fn write_reference(&self, s: &mut String, range: Option<Range>) -> fmt::Result {
        let Some(reference) = &self.reference else { return Ok(()) };
        let samples = reference.samples.map_or("all samples".into(), |n| format!("{n} samples"));
        let time = self.reference_time(range);
        let time = time.map_or(String::new(), |r| format!(", {} to {}", seconds(r.low), seconds(r.high)));
        let kept = self.space.files.iter().find(|f| f.name == "reference");
        let kept = kept.map_or(String::new(), |f| format!(", {} on disk", bytes(f.bytes)));
        let alone = reference.other.as_ref();
        let alone = alone.map_or(String::new(), |other| format!("; {other} is loaded alone for it"));
        writeln!(s, "reference   one pass over {samples} before training{time}{kept}{alone}")
    }

    /// Products of 8-bit floats, if any.
    fn write_products(&self, s: &mut String) -> fmt::Result {
        let Some((of, all)) = self.fp8 else { return Ok(()) };
        let others = match all - of {
            0 => String::new(),
            n => format!("; {n} have sizes that are no multiples of 16 and stay in bf16"),
        };
        writeln!(s, "products    in fp8 with {of} of {all} frozen matrices (e4m3, gradients e5m2){others}")
    }

    fn write_time(&self, s: &mut String, range: Option<Range>) -> fmt::Result {
        let Some(r) = range else { return Ok(()) };
        let tokens = self.tokens_per_step() as f64;
        let [fewest, most] = [r.high, r.low].map(|seconds| count((tokens / seconds) as u64));
        let whole = self.workload.steps.map_or(String::new(), |n| {
            format!(", {} to {} in all", seconds(r.low * n as f64), seconds(r.high * n as f64))
        });
        writeln!(s, "time        {} to {} a step{whole}", seconds(r.low), seconds(r.high))?;
        let by = match r.source {
            Source::Measured(_) => String::new(),
            Source::Probe(_) | Source::OtherFamily(_) => format!(", {}", r.source.words()),
            Source::Datasheet(_) => {
                format!(", {}: not measured (ft bench --probe measures)", r.source.words())
            }
        };
        writeln!(s, "            {fewest} to {most} tokens a second{by}")
    }

    /// The components of the peak, those below `least` bytes as one.
    fn write_components(&self, s: &mut String, least: u64) -> fmt::Result {
        let most = self.peak.bytes.iter().map(|(_, b)| b).max().unwrap_or(1).max(1);
        let mut line = |label: &str, b: u64| {
            let bar = "#".repeat(((b as f64 / most as f64) * BAR as f64).round() as usize);
            writeln!(s, "{}", format!("  {label:<24} {:>11}  {bar}", bytes(b)).trim_end())
        };
        let mut others = 0;
        for (c, b) in self.peak.bytes.iter() {
            if b < least {
                others += b;
            } else {
                line(c.label(), b)?;
            }
        }
        if others > 0 {
            line("other", others)?;
        }
        Ok(())
    }

    fn write_data(&self, s: &mut String) -> fmt::Result {
        let (total, trainable) = self.parameters;
        let share = 100.0 * trainable as f64 / total.max(1) as f64;
        writeln!(s, "parameters  {} train of {} ({share:.2}%)", count(trainable), count(total))?;
        writeln!(s, "lr          {}", learning_rates::line(&self.learning_rates))?;
        let w = &self.workload;
        let sure = if w.measured() { "as the data has it" } else { "assuming rows full to data.max_length" };
        let steps = w.steps.map_or("steps by run.epochs".into(), |n| format!("{n} steps"));
        writeln!(
            s,
            "tokens      {} a step in {} micro-batches of {} ({sure}), {steps}",
            count(self.tokens_per_step()),
            self.micro_batches * self.data_ranks,
            count(self.mean.tokens)
        )?;
        match w.epoch {
            Some(e) => writeln!(
                s,
                "data        {}, {} tokens an epoch, {} supervised, the longest sample {}",
                e.words(),
                count(e.tokens),
                count(e.targets),
                e.longest
            ),
            None => writeln!(
                s,
                "data        lengths of samples are not known yet: ft data, ft check and ft run measure them"
            ),
        }
    }

    fn write_execution(&self, s: &mut String, range: Option<Range>) -> fmt::Result {
        let (c, why) = (&self.execution, &self.reasons);
        writeln!(s, "micro-batch {} ({})", plural(c.micro_rows, "row"), why.micro_rows)?;
        writeln!(s, "recompute   {} ({})", c.recompute.words(self.walked), why.recompute)?;
        if c.recompute.layers() > 0 && (self.machine.cuda || c.inputs.on_host) {
            writeln!(s, "inputs      of those layers on the {} ({})", c.inputs.word(), why.inputs)?;
        }
        if let Some(why) = self.no_master {
            writeln!(
                s,
                "master      none of what trains in full, which is rounded by random numbers ({why})"
            )?;
        }
        writeln!(s, "dequantize  {} ({})", c.dequantize.word(), why.dequantize)?;
        self.write_products(s)?;
        writeln!(s, "logit chunk {} targets ({})", c.head_rows, why.head_rows)?;
        self.write_time(s, range)
    }

    fn write_device(&self, s: &mut String) -> fmt::Result {
        let device = if self.machine.cuda { "CUDA" } else { "CPU" };
        let ranks = if self.ranks > 1 { format!(", each of {} ranks", self.ranks) } else { String::new() };
        writeln!(s, "\n{device} peak memory, in {}{ranks}", place(&self.peak, self.layers))?;
        self.write_components(s, 0)?;
        let verdict = match self.budget {
            None => "no budget known: set memory.budget".to_string(),
            Some(b) if self.fits_device() => format!("fits {}{}", bytes(b), self.left()),
            Some(b) => format!("DOES NOT FIT {}", bytes(b)),
        };
        writeln!(s, "  {:<24} {:>11}  {verdict}", "total", bytes(self.total()))?;
        match (self.mixture, self.peak.bytes.get(Component::Routing)) {
            (false, _) => Ok(()),
            (true, 0) => writeln!(
                s,
                "routing     planned both for tokens spread evenly over the experts and for all tokens \
                at the same ones, \
                 which takes no more"
            ),
            (true, reserve) => writeln!(
                s,
                "routing     the table has tokens spread evenly over the experts; up to {} more (the routing reserve) \
                 where all choose the same ones, less where experts stay idle",
                bytes(reserve)
            ),
        }
    }

    /// Other ranks, the server, the host, and the estimate of the literature.
    fn write_others(&self, s: &mut String) -> fmt::Result {
        if self.ranks > 1 {
            let keys = match self.exchanged {
                0 => String::new(),
                n => format!("; {} of them exchanged within layers", bytes(n)),
            };
            writeln!(s, "ranks       {} come to each from the others in a step{keys}", bytes(self.wire))?;
        }
        if let Some(server) = &self.server {
            writeln!(s, "server      {}", server.text())?;
        }
        s.push_str(&self.space.text());
        if self.machine.cuda {
            writeln!(
                s,
                "            cuda libraries: {} of host memory, by what PyTorch's processes were seen to take \
                 (pytorch issue 12873); ft's were not measured",
                bytes(overhead::CUDA_HOST)
            )?;
        }
        let Theory { weights, gradients, master, moments, total, frozen } = self.theory;
        let [weights, gradients, master, moments, total, frozen] =
            [weights, gradients, master, moments, total, frozen].map(|n| format!("{:.2}", n as f64 / 1e9));
        writeln!(
            s,
            "theory      weights {weights} + gradients {gradients} + master {master} + moments {moments} = {total} GB \
             that train, {frozen} GB frozen"
        )
    }

    /// Describes the free part of the budget if a reserve applies.
    fn left(&self) -> String {
        match self.kept_back() {
            Some((wanted, left)) if wanted > left => {
                format!(", leaving {}: less than the {} that a run should", bytes(left), bytes(wanted))
            }
            Some((wanted, left)) if wanted > 0 => format!(", leaving {}", bytes(left)),
            _ => String::new(),
        }
    }
}

/// `a of b`, with a common unit written once.
fn of_all(a: &str, b: &str) -> String {
    match (a.split_once(' '), b.split_once(' ')) {
        (Some((number, unit)), Some((_, same))) if unit == same => format!("{number} of {b}"),
        _ => format!("{a} of {b}"),
    }
}
