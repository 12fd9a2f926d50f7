//! Hints for plans over budget: the smallest single change of each kind to make the run fit.

use super::plan::{Hint, Plan};
use crate::search::{Inputs, Prepared, choose};
use crate::units::bytes;
use crate::workload::Workloads;
use ft_engine::adapters::Selection;
use ft_kernels::Machine;
use ft_recipe::{Dequantize, Dtype, Master, Method, Offload, OptimizerName, Quantize, Recipe, Recompute};

/// A changed recipe.
struct Change {
    /// Settings in command-line form.
    set: Vec<String>,
    /// The change in words, and its cost.
    text: String,
    cost: &'static str,
    recipe: Recipe,
    machine: Machine,
    /// Whether the `[[train]]` rules differ.
    rules: bool,
}

impl Change {
    /// Applies `edit` to the recipe of a plan.
    fn new(
        i: &Inputs<'_>,
        set: Vec<String>,
        text: String,
        cost: &'static str,
        edit: impl FnOnce(&mut Recipe),
    ) -> Self {
        let mut recipe = i.recipe.clone();
        edit(&mut recipe);
        Self { set, text, cost, recipe, machine: i.machine, rules: false }
    }

    /// Sets a key to a word.
    fn word(
        i: &Inputs<'_>,
        key: &str,
        word: &str,
        cost: &'static str,
        edit: impl FnOnce(&mut Recipe),
    ) -> Self {
        Self::new(i, vec![format!("{key}={word}")], format!("{key} = {word:?}"), cost, edit)
    }

    /// Lowers a number.
    fn number(
        i: &Inputs<'_>,
        key: &str,
        (from, to): (usize, usize),
        cost: &'static str,
        edit: impl FnOnce(&mut Recipe),
    ) -> Self {
        Self::new(i, vec![format!("{key}={to}")], format!("{key} {from} -> {to}"), cost, edit)
    }

    /// Device peak in bytes; `u64::MAX` if the rules select nothing, or the model cannot be sharded so.
    fn total(&self, i: &Inputs<'_>) -> u64 {
        let (r, machine) = (&self.recipe, self.machine);
        // a smaller max_length can only shrink the measured micro-batches
        let bounded = Workloads::new(|r| i.workloads.of(i.recipe, r.run.micro_rows.count()).under(r));
        let same = r.data.max_length == i.recipe.data.max_length;
        let workloads = if same { i.workloads } else { &bounded };
        let rules = self.rules.then(|| Selection::from_rules(i.config, &r.train)).transpose();
        let Ok(rules) = rules else { return u64::MAX };
        let selection = rules.as_ref().unwrap_or(i.selection);
        let inputs = Inputs { recipe: r, selection, machine, workloads, ..*i };
        Prepared::new(&inputs).and_then(|p| Ok(choose(&p)?.peak.bytes.total())).unwrap_or(u64::MAX)
    }

    /// The hint, if the plan needs `needed` bytes now and `total` after the change.
    fn hint(&self, needed: u64, total: u64) -> Hint {
        let built = self.set.iter().all(|s| is_built(s));
        let note = if built { "" } else { " (not built yet)" };
        let (text, cost) = (&self.text, self.cost);
        let (saved, size) = (bytes(needed.saturating_sub(total)), bytes(total));
        let text = format!("{text}: fits, saves {saved}, {size}{cost}{note}");
        Hint { set: self.set.clone(), text, total, built }
    }
}

/// Tries each kind of change and returns the smallest setting within the budget.
pub fn hints(i: &Inputs<'_>, plan: &Plan) -> Vec<Hint> {
    let Some(budget) = i.budget else { return Vec::new() };
    let needed = plan.total();
    let mut kinds = execution(i, plan);
    kinds.extend(
        [data(i), adapter_rank(i), precision(i), states(i), ranks(i), without_full(i)].into_iter().flatten(),
    );
    let fitting = kinds.iter().filter_map(|kind| first(kind, i, budget));
    let mut out: Vec<Hint> = fitting.map(|(change, total)| change.hint(needed, total)).collect();
    if out.is_empty() {
        let what = plan.peak.bytes.iter().max_by_key(|(_, b)| *b).map_or("", |(c, _)| c.label());
        let text = format!("no single change is enough: it needs {}, most of it {what}", bytes(needed));
        out.push(Hint { set: Vec::new(), text, total: needed, built: true });
    }
    out
}

/// Changes of one kind, in the order of falling totals.
type Kind = Vec<Change>;

/// First of a kind within the budget, with its total.
fn first<'a>(kind: &'a [Change], i: &Inputs<'_>, budget: u64) -> Option<(&'a Change, u64)> {
    let (last, others) = kind.split_last()?;
    let least = (last, last.total(i));
    if least.1 > budget {
        return None;
    }
    others.iter().map(|c| (c, c.total(i))).find(|(_, total)| *total <= budget).or(Some(least))
}

fn execution(i: &Inputs<'_>, plan: &Plan) -> Vec<Kind> {
    let r = i.recipe;
    let recompute = [
        ("norms", Recompute::Norms, "; hardly more time"),
        ("feed_forward", Recompute::FeedForward, "; about a fifth more time"),
        ("all", Recompute::All, "; about a third more time"),
    ];
    let recompute = recompute.map(|(word, level, cost)| {
        Change::word(i, "memory.recompute", word, cost, |c| c.memory.recompute = level)
    });
    let cost = "; weights are dequantized in each product";
    let dequantize = Change::word(i, "memory.dequantize", "per_matmul", cost, |c| {
        c.memory.dequantize = Dequantize::PerMatmul
    });
    let cost = "; the same mathematics in smaller pieces";
    let rows = r.run.micro_rows.count();
    let micro_rows =
        |n| Change::number(i, "run.micro_rows", (rows, n), cost, |c| c.run.micro_rows = n.into());
    let mut out = Vec::new();
    if plan.execution.recompute.all < plan.walked {
        out.push(recompute.into());
    }
    if r.memory.dequantize == Dequantize::PerLayer {
        out.push(vec![dequantize]);
    }
    // with "auto" the plan has already tried the smallest micro-batch
    if !r.run.micro_rows.is_auto() {
        out.push(divisors_below(rows).into_iter().map(micro_rows).collect());
    }
    out
}

fn data(i: &Inputs<'_>) -> Vec<Kind> {
    let length = i.recipe.data.max_length;
    let shorter = [0.75, 0.5, 0.375, 0.25, 0.125].map(|f| (length as f64 * f) as usize);
    let shorter = shorter.map(|n| n.next_multiple_of(64)).into_iter().filter(|n| *n < length);
    let cost = "; longer samples are cut";
    let change = |n| Change::number(i, "data.max_length", (length, n), cost, |c| c.data.max_length = n);
    vec![shorter.map(change).collect()]
}

fn adapter_rank(i: &Inputs<'_>) -> Vec<Kind> {
    let lora = i.recipe.train.iter().filter(|x| x.is(Method::Lora));
    let rank = lora.filter_map(|x| x.rank).max().unwrap_or(0);
    let lower = [rank / 2, rank / 4, rank / 8].into_iter().filter(|n| *n > 0);
    let change = |n: usize| {
        let set = rules(i.recipe, Method::Lora).map(|k| format!("train.{k}.rank={n}")).collect();
        let cost = "; an adapter that can say less";
        let change = Change::new(i, set, format!("rank {rank} -> {n}"), cost, |c| {
            let lora = c.train.iter_mut().filter(|x| x.is(Method::Lora));
            lora.for_each(|x| x.rank = x.rank.map(|r| r.min(n)));
        });
        Change { rules: true, ..change }
    };
    vec![lower.map(change).collect()]
}

fn precision(i: &Inputs<'_>) -> Vec<Kind> {
    let (r, mut out) = (i.recipe, Vec::new());
    if r.model.quantize == Quantize::None {
        let cost = "; the base is rounded to 4 bits and dequantized on the way";
        out.push(vec![Change::word(i, "model.quantize", "nf4", cost, |c| c.model.quantize = Quantize::Nf4)]);
    }
    if !i.machine.cuda && i.machine.computes_in_f32() {
        let cost = "; frozen weights in half the bytes, less precise";
        let change = Change::word(i, "model.dtype", "bf16", cost, |c| c.model.dtype = Some(Dtype::Bf16));
        out.push(vec![Change { machine: Machine { width: 2, ..i.machine }, ..change }]);
    }
    out
}

fn states(i: &Inputs<'_>) -> Vec<Kind> {
    let (r, mut out) = (i.recipe, Vec::new());
    if r.optimizer.name == OptimizerName::Adamw {
        out.push(vec![Change::word(i, "optimizer.name", "adamw8bit", "; rounded moments", |c| {
            c.optimizer.name = OptimizerName::Adamw8bit;
        })]);
    }
    if r.optimizer.keeps_master(i.machine.computes_in_f32()) && rules(r, Method::Full).next().is_some() {
        let cost = "; weights of 16 bits are all there is";
        out.push(vec![Change::word(i, "optimizer.master", "none", cost, |c| {
            c.optimizer.master = Master::None
        })]);
    }
    for (what, cost) in [
        (Offload::Activations, "; inputs of layers that are computed again cross the bus"),
        (Offload::Optimizer, "; states cross the bus every step"),
    ] {
        if i.machine.cuda && !r.memory.offloads(what) {
            let mut all = r.memory.offload.clone().unwrap_or_default();
            all.push(what);
            let words: Vec<&str> = all.iter().map(|o| o.word()).collect();
            let (set, text) = (format!("memory.offload={words:?}"), format!("memory.offload = {words:?}"));
            out.push(vec![Change::new(i, vec![set], text, cost, |c| c.memory.offload = Some(all))]);
        }
    }
    out
}

fn ranks(i: &Inputs<'_>) -> Vec<Kind> {
    let r = i.recipe;
    if r.parallel.data != 1 {
        return Vec::new();
    }
    let worlds = [2, 4, 8, 16, 32, 64].into_iter();
    let worlds = worlds.filter(|n| r.run.batch_rows.is_multiple_of(r.run.micro_rows.count() * n));
    let change = |n| {
        let set = vec![format!("parallel.data={n}"), "parallel.zero=3".into()];
        let (text, cost) =
            (format!("parallel.zero = 3 over {n} devices"), " each; weights are gathered layer by layer");
        let change = Change::new(i, set, text, cost, |c| (c.parallel.data, c.parallel.zero) = (n, 3));
        // ranks run as threads of one process and split its CPU threads
        let threads = change.recipe.parallel.threads(i.machine.threads as usize) as u64;
        Change { machine: Machine { threads, ..i.machine }, ..change }
    };
    vec![worlds.map(change).collect()]
}

fn without_full(i: &Inputs<'_>) -> Vec<Kind> {
    let set: Vec<String> = rules(i.recipe, Method::Full).map(|k| format!("train.{k}.method=lora")).collect();
    if set.is_empty() {
        return Vec::new();
    }
    let (text, cost) =
        ("method \"full\" -> \"lora\" (without norms)", "; adapters train instead of the weights");
    let change = Change::new(i, set, text.into(), cost, |c| {
        c.train.retain(|x| !(x.is(Method::Full) && x.modules.iter().all(|m| m == "norms")));
        for x in c.train.iter_mut().filter(|x| x.is(Method::Full)) {
            x.method = Method::Lora;
            x.modules.retain(|m| m != "norms");
        }
    });
    vec![vec![Change { rules: true, ..change }]]
}

fn rules(r: &Recipe, method: Method) -> impl Iterator<Item = usize> + '_ {
    r.train.iter().enumerate().filter(move |(_, x)| x.is(method)).map(|(k, _)| k)
}

/// Divisors of `n` below `n`, largest first, at most 8. A batch divisible by `n` is divisible by them.
fn divisors_below(n: usize) -> Vec<usize> {
    (1..n.min(1 << 12)).rev().filter(|d| n.is_multiple_of(*d)).take(8).collect()
}

/// Whether `ft run` supports a setting: it must pass the recipe checks on top of a minimal recipe.
pub fn is_built(setting: &str) -> bool {
    const LEAST: &str = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\n[[train]]\nmodules = [\"mlp\"]\n\
        [[train]]\nmodules = [\"mlp\"]\n[[train]]\nmodules = [\"mlp\"]\nmethod = \"full\"\n\
        [[data.train]]\nsource = \"d.jsonl\"\nformat = \"text\"\n[run]\nbatch_rows = 1024\n";
    // the minimal recipe has four rules; support does not depend on the index, so rule 0 stands in for
    // any
    let setting = match setting.strip_prefix("train.").and_then(|s| s.split_once('.')) {
        Some((_, rest)) => format!("train.0.{rest}"),
        None => setting.to_string(),
    };
    Recipe::parse(LEAST, "recipe.toml", &[setting]).is_ok()
}
