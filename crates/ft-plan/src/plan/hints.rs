//! Hints for plans over budget: changes of the recipe, each applied, planned, and kept if the run then fits.

use super::plan::{Hint, Plan};
use crate::host::{Capacity, sum};
use crate::model::{dtype, quantization};
use crate::resolve::check_model;
use crate::search::Inputs;
use crate::units::bytes;
use crate::workload::{Workload, Workloads};
use ft_engine::adapters::Selection;
use ft_kernels::Machine;
use ft_recipe::{
    Dequantize, Method, Offload, OptimizerName, OverLength, Quantize, Recipe, Recompute, SHIPPED, Weights,
    loose_value,
};

/// Settings made together, in command-line form, and their cost in words.
struct Change {
    set: Vec<String>,
    cost: &'static str,
}

impl Change {
    fn new(set: impl IntoIterator<Item = String>, cost: &'static str) -> Self {
        Self { set: set.into_iter().collect(), cost }
    }

    /// The settings in words.
    fn text(&self) -> String {
        let one = |set: &String| match set.split_once('=') {
            Some((key, value)) => match loose_value(value) {
                serde_json::Value::String(word) => format!("{key} = {word:?}"),
                _ => format!("{key} = {value}"),
            },
            None => set.clone(),
        };
        self.set.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

/// Changes of one kind, from the mildest to the strongest.
type Kind = Vec<Change>;

impl Plan {
    /// Adds hints to a plan over the device budget, and to one with cut matrices; `room` has the machine's host memory.
    pub fn advise(&mut self, i: &Inputs<'_>, room: &Capacity<'_>) {
        self.hints.extend(fewer_bytes(self, i, room));
        if self.fits_device() {
            return;
        }
        let fitting = kinds(i).into_iter().filter_map(|kind| first(&kind, self, i, room));
        let (mut hints, mut devices): (Vec<Hint>, Vec<Hint>) =
            fitting.partition(|h| !h.set.iter().any(|s| s.starts_with("parallel.")));
        // one thing on the host comes before two
        let offloads = |h: &Hint| h.set.len() == 1 && h.set[0].starts_with("memory.offload=");
        if hints.iter().filter(|h| offloads(h)).count() > 1 {
            hints.retain(|h| !(offloads(h) && h.set[0].contains(',')));
        }
        hints.extend(shipped(i, room));
        hints.append(&mut devices);
        if hints.is_empty() {
            let (total, most) = (self.total(), self.most());
            let text = format!("no single change is enough: it needs {}, most of it {most}", bytes(total));
            hints.push(Hint { set: Vec::new(), text, total });
        }
        self.hints.splice(0..0, hints);
    }
}

/// The mildest sufficient change of a kind.
fn first(kind: &Kind, plan: &Plan, i: &Inputs<'_>, room: &Capacity<'_>) -> Option<Hint> {
    let (last, others) = kind.split_last()?;
    let strongest = hint(last, plan, i, room)?;
    Some(others.iter().find_map(|change| hint(change, plan, i, room)).unwrap_or(strongest))
}

/// The hint of a change, if the run fits with it.
fn hint(change: &Change, plan: &Plan, i: &Inputs<'_>, room: &Capacity<'_>) -> Option<Hint> {
    let recipe = i.recipe.with(&change.set).ok()?;
    check_model(&recipe, i.config).ok()?;
    let rules = change.set.iter().any(|s| s.starts_with("train."));
    let selection = rules.then(|| Selection::from_rules(i.config, &recipe.train)).transpose().ok()?;
    let then = fitting(i, &recipe, selection.as_ref().unwrap_or(i.selection), room)?;
    let (total, host) = (then.total(), sum(&then.space.host));
    let beside = match host > sum(&plan.space.host) && then.machine.cuda {
        true => format!(", {} of host memory", bytes(host)),
        false => String::new(),
    };
    let text = format!("{}: {}{beside}; {}", change.text(), bytes(total), change.cost);
    Some(Hint { set: change.set.clone(), text, total })
}

/// The plan of a changed recipe, if it fits device and host.
fn fitting(i: &Inputs<'_>, recipe: &Recipe, selection: &Selection, room: &Capacity<'_>) -> Option<Plan> {
    let width = dtype(recipe.model.dtype, i.machine.cuda).size_in_bytes() as u64;
    let stored = if recipe.model.weights == Weights::Random { width } else { i.machine.stored };
    let threads = match recipe.parallel.sharing() == i.recipe.parallel.sharing() {
        true => i.machine.threads,
        // ranks run as threads of one process and split its CPU threads
        false => recipe.parallel.threads(i.machine.threads as usize) as u64,
    };
    let machine = Machine { width, stored, threads, ..i.machine };
    // a smaller max_length can only shrink the measured micro-batches, but for divided documents
    let (before, after) = (i.recipe.data.max_length, recipe.data.max_length);
    let shrinks = after < before && recipe.data.over_length != OverLength::Split;
    let other = Workloads::new(|r| match shrinks {
        true => i.workloads.of(i.recipe, r.run.micro_rows.count()).under(r),
        false => Workload::of_recipe(r),
    });
    let workloads = if after == before { i.workloads } else { &other };
    let inputs = Inputs { recipe, selection, machine, workloads, known: None, ..*i };
    let mut plan = Plan::new(&inputs).ok()?;
    plan.space.look(recipe, machine, plan.total(), room);
    (plan.fits_device() && plan.space.host_fits()).then_some(plan)
}

/// Weights gathered by ZeRO-3 in place of cut matrices, if they fit and fewer bytes cross the links.
fn fewer_bytes(plan: &Plan, i: &Inputs<'_>, room: &Capacity<'_>) -> Option<Hint> {
    let p = &i.recipe.parallel;
    let data = p.data * p.tensor;
    let set = ["parallel.tensor=1".into(), format!("parallel.data={data}"), "parallel.zero=3".into()];
    let recipe = i.recipe.with(&set).ok().filter(|_| p.tensor > 1)?;
    let then = fitting(i, &recipe, i.selection, room).filter(|then| then.wire < plan.wire)?;
    let (change, total) = (Change::new(set, "weights are gathered layer by layer"), then.total());
    let [now, less] = [plan.wire, then.wire].map(bytes);
    let text = format!("{}: a rank receives {less} a step in place of {now}; {}", change.text(), change.cost);
    Some(Hint { set: change.set, text, total })
}

/// Fitting shipped recipes of the same model, with the data of this one; recipes alike in training come first.
fn shipped(i: &Inputs<'_>, room: &Capacity<'_>) -> Vec<Hint> {
    let ours = i.recipe;
    let mut out = Vec::new();
    for s in SHIPPED.iter().filter(|s| s.name != ours.name) {
        let Ok(mut theirs) = Recipe::parse(s.text, &format!("{}.toml", s.name), &[]) else { continue };
        if theirs.model.source != ours.model.source {
            continue;
        }
        theirs.folder.clone_from(&ours.folder);
        (theirs.data.train, theirs.data.eval) = (ours.data.train.clone(), ours.data.eval.clone());
        theirs.data.eval_share = ours.data.eval_share;
        theirs.memory.host_budget = ours.memory.host_budget;
        let selection = Selection::from_rules(i.config, &theirs.train);
        let Some(plan) = selection.ok().and_then(|s| fitting(i, &theirs, &s, room)) else { continue };
        let total = plan.total();
        let text = format!("the recipe {}: {}; {}", s.name, bytes(total), s.title());
        let full = |r: &Recipe| r.train.iter().any(|x| x.is(Method::Full));
        out.push((full(&theirs) != full(ours), Hint { set: Vec::new(), text, total }));
    }
    out.sort_by_key(|(unlike, _)| *unlike);
    out.into_iter().map(|(_, hint)| hint).collect()
}

/// The changes tried, by kind: result-preserving ones first, more devices last.
fn kinds(i: &Inputs<'_>) -> Vec<Kind> {
    let (r, m) = (i.recipe, i.machine);
    let any = |sets: &[&str], cost| vec![Change::new(sets.iter().map(|s| s.to_string()), cost)];
    let only = |kind: Kind, when: bool| if when { kind } else { Vec::new() };
    let (full, adamw) = (rules(r, Method::Full).next().is_some(), r.optimizer.name == OptimizerName::Adamw);
    let in_backward = ["optimizer.in_backward=true".into(), "run.clip=0".into(), whole_batch(r)];
    let small = ["optimizer.name=adamw8bit".to_string()];
    let offload = |what: &[Offload], cost| only(offload(r, what, cost), m.cuda);
    let [states, weights, inputs] = [Offload::Optimizer, Offload::Params, Offload::Activations];
    // a run refuses an adapter of another rank, and one with parts trained by no rule
    let continues = r.lora.init.adapter().is_some();
    let in_16_bits = m.cuda || !m.computes_in_f32();
    vec![
        offload(&[states], "states cross the bus every step"),
        offload(&[weights], "weights cross the bus at each use"),
        offload(&[weights, states], "weights and states cross the bus"),
        offload(&[inputs], "inputs of layers that are computed again cross the bus"),
        only(
            any(&["memory.recompute=auto"], "what does not fit is computed again"),
            r.memory.recompute != Recompute::Auto,
        ),
        only(
            any(&["memory.dequantize=auto"], "weights are dequantized in each product"),
            r.memory.dequantize == Dequantize::PerLayer,
        ),
        fewer_rows(r),
        shorter(r),
        only(
            any(&["model.quantize=nf4"], "the base is rounded to 4 bits"),
            quantization(i.config, r.model.quantize) == Quantize::None,
        ),
        only(any(&["model.dtype=bf16"], "less precise"), !in_16_bits),
        only(any(&["optimizer.name=adamw8bit"], "rounded moments"), adamw),
        only(
            any(&["optimizer.master=none"], "weights of 16 bits are all there is"),
            full && r.optimizer.keeps_master(m.computes_in_f32()),
        ),
        only(
            vec![
                Change::new(in_backward.clone(), "one micro-batch a step, no clipping"),
                Change::new(
                    in_backward.into_iter().chain(small),
                    "one micro-batch a step, no clipping, rounded moments",
                ),
            ],
            adamw && !r.optimizer.in_backward,
        ),
        only(lower_rank(r), !continues),
        only(without_full(r), !continues),
        devices(r, m),
    ]
}

/// `memory.offload` with `what` added; empty if it is there.
fn offload(r: &Recipe, what: &[Offload], cost: &'static str) -> Kind {
    if what.iter().any(|o| r.memory.offloads(*o)) {
        return Vec::new();
    }
    let all = r.memory.offload.iter().flatten().chain(what);
    let words: Vec<&str> = all.map(|o| o.word()).collect();
    vec![Change::new([format!("memory.offload={words:?}")], cost)]
}

/// With "auto" the plan has tried the smallest micro-batch.
fn fewer_rows(r: &Recipe) -> Kind {
    if r.run.micro_rows.is_auto() {
        return Vec::new();
    }
    let cost = "the same mathematics in smaller pieces";
    let below = divisors_below(r.run.micro_rows.count()).into_iter();
    below.map(|n| Change::new([format!("run.micro_rows={n}")], cost)).collect()
}

/// Empty if a longer sample stops the run.
fn shorter(r: &Recipe) -> Kind {
    let cost = match r.data.over_length {
        OverLength::Truncate => "longer samples are cut",
        OverLength::Drop => "longer samples are left out",
        OverLength::Split => "longer samples are divided",
        OverLength::Error => return Vec::new(),
    };
    let length = r.data.max_length;
    let shorter =
        [0.75, 0.5, 0.375, 0.25, 0.125].map(|f| ((length as f64 * f) as usize).next_multiple_of(64));
    let shorter = shorter.into_iter().filter(|n| *n < length);
    shorter.map(|n| Change::new([format!("data.max_length={n}")], cost)).collect()
}

/// The setting of one micro-batch a step.
fn whole_batch(r: &Recipe) -> String {
    format!("run.micro_rows={}", (r.run.batch_rows / r.parallel.data.max(1)).max(1))
}

fn lower_rank(r: &Recipe) -> Kind {
    let of = |k: usize| r.train[k].rank.unwrap_or(0);
    let rank = rules(r, Method::Lora).map(of).max().unwrap_or(0);
    let lower = [rank / 2, rank / 4, rank / 8].into_iter().filter(|n| *n > 0);
    let change = |n: usize| {
        let above = rules(r, Method::Lora).filter(|k| of(*k) > n);
        Change::new(above.map(|k| format!("train.{k}.rank={n}")), "an adapter that can say less")
    };
    lower.map(change).collect()
}

/// LoRA in place of training in full; norms have none and stay frozen.
fn without_full(r: &Recipe) -> Kind {
    let mut set = Vec::new();
    for k in rules(r, Method::Full) {
        let modules: Vec<&String> = r.train[k].modules.iter().filter(|m| *m != "norms").collect();
        set.push(format!("train.{k}.method={}", if modules.is_empty() { "freeze" } else { "lora" }));
        if !modules.is_empty() && modules.len() < r.train[k].modules.len() {
            set.push(format!("train.{k}.modules={modules:?}"));
        }
    }
    if set.is_empty() { Vec::new() } else { vec![Change::new(set, "adapters train instead of the weights")] }
}

fn devices(r: &Recipe, m: Machine) -> Kind {
    if r.parallel.data != 1 || !m.cuda {
        return Vec::new();
    }
    let unit = r.run.micro_rows.count();
    let counts = [2, 4, 8, 16, 32, 64].into_iter().filter(|n| r.run.batch_rows.is_multiple_of(unit * n));
    let set = |n| [format!("parallel.data={n}"), "parallel.zero=3".into()];
    counts.map(|n| Change::new(set(n), "on each device; weights are gathered layer by layer")).collect()
}

fn rules(r: &Recipe, method: Method) -> impl Iterator<Item = usize> + '_ {
    r.train.iter().enumerate().filter(move |(_, x)| x.is(method)).map(|(k, _)| k)
}

/// Divisors of `n` below `n`, largest first, at most 8. A batch divisible by `n` is divisible by them.
fn divisors_below(n: usize) -> Vec<usize> {
    (1..n.min(1 << 12)).rev().filter(|d| n.is_multiple_of(*d)).take(8).collect()
}
