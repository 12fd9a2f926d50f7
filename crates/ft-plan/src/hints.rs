//! Hints for plans over budget: the smallest single change of each kind to make the run fit.

use super::search::choose;
use super::{Inputs, Machine, Plan, Prepared, Workloads};
use ft_engine::adapters::Selection;
use ft_recipe::{Method, Offload, OptimizerName, Quantize, Recipe, Recompute};
use serde::Serialize;

/// A recipe change to make the run fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hint {
    /// Settings in command-line form, e.g. `run.micro_rows=1`.
    pub set: Vec<String>,
    /// The change in words, with its cost and the bytes saved.
    pub text: String,
    /// Device peak in bytes after the change.
    pub total: u64,
    /// Whether `ft run` supports these settings.
    pub built: bool,
}

/// Tries each kind of change and returns the smallest setting within the budget.
pub fn hints(i: &Inputs<'_>, plan: &Plan) -> Vec<Hint> {
    let Some(budget) = i.budget else { return Vec::new() };
    let mut out = Vec::new();
    let mut add = |set: Vec<String>, change: String, cost: &str, total: u64| {
        let built = set.iter().all(|s| is_built(s));
        let note = if built { "" } else { " (not built yet)" };
        let (size, saved) =
            (super::report::bytes(total), super::report::bytes(plan.total().saturating_sub(total)));
        out.push(Hint {
            set,
            text: format!("{change}: fits, saves {saved}, {size}{cost}{note}"),
            total,
            built,
        });
    };
    let r = i.recipe;
    let total = |r: &Recipe| with(i, r);

    if plan.execution.recompute.all < plan.walked {
        for (word, recompute, cost) in [
            ("norms", Recompute::Norms, "; hardly more time"),
            ("feed_forward", Recompute::FeedForward, "; about a fifth more time"),
            ("all", Recompute::All, "; about a third more time"),
        ] {
            let mut c = r.clone();
            c.memory.recompute = recompute;
            let t = total(&c);
            if t <= budget {
                add(
                    vec![format!("memory.recompute={word}")],
                    format!("memory.recompute = \"{word}\""),
                    cost,
                    t,
                );
                break;
            }
        }
    }
    if r.memory.dequantize == ft_recipe::Dequantize::PerLayer {
        let mut c = r.clone();
        c.memory.dequantize = ft_recipe::Dequantize::PerMatmul;
        let t = total(&c);
        if t <= budget {
            let (set, change) = ("memory.dequantize=per_matmul", "memory.dequantize = \"per_matmul\"");
            add(vec![set.into()], change.into(), "; weights are dequantized in each product", t);
        }
    }
    // with "auto" the plan has already tried the smallest micro-batch
    let fewer =
        if r.run.micro_rows.is_auto() { Vec::new() } else { divisors_below(r.run.micro_rows.count()) };
    if let Some((n, t)) = first(fewer, budget, |n| {
        let mut c = r.clone();
        c.run.micro_rows = n.into();
        total(&c)
    }) {
        let change = format!("run.micro_rows {} -> {n}", r.run.micro_rows.count());
        add(vec![format!("run.micro_rows={n}")], change, "; the same mathematics in smaller pieces", t);
    }
    let length = r.data.max_length;
    let shorter =
        [0.75, 0.5, 0.375, 0.25, 0.125].map(|f| ((length as f64 * f) as usize).next_multiple_of(64));
    if let Some((n, t)) = first(shorter.into_iter().filter(|n| *n < length).collect(), budget, |n| {
        let mut c = r.clone();
        c.data.max_length = n;
        total(&c)
    }) {
        let change = format!("data.max_length {length} -> {n}");
        add(vec![format!("data.max_length={n}")], change, "; longer samples are cut", t);
    }
    let rank = r.train.iter().filter(|x| x.is(Method::Lora)).filter_map(|x| x.rank).max().unwrap_or(0);
    let ranks: Vec<usize> = [rank / 2, rank / 4, rank / 8].into_iter().filter(|n| *n > 0).collect();
    if let Some((n, t)) = first(ranks, budget, |n| {
        let mut c = r.clone();
        for x in c.train.iter_mut().filter(|x| x.is(Method::Lora)) {
            x.rank = x.rank.map(|r| r.min(n));
        }
        with_rules(i, &c)
    }) {
        let set = rules(r, Method::Lora).map(|k| format!("train.{k}.rank={n}")).collect();
        add(set, format!("rank {rank} -> {n}"), "; an adapter that can say less", t);
    }
    if r.model.quantize == Quantize::None {
        let mut c = r.clone();
        c.model.quantize = Quantize::Nf4;
        let t = total(&c);
        if t <= budget {
            let cost = "; the base is rounded to 4 bits and dequantized on the way";
            add(vec!["model.quantize=nf4".into()], "model.quantize = \"nf4\"".into(), cost, t);
        }
    }
    if !plan.machine.cuda && plan.machine.computes_in_f32() {
        let mut c = r.clone();
        c.model.dtype = Some(ft_recipe::Dtype::Bf16);
        let t = changed(i, &c, Machine { width: 2, ..i.machine }, i.selection);
        if t <= budget {
            add(
                vec!["model.dtype=bf16".into()],
                "model.dtype = \"bf16\"".into(),
                "; frozen weights in half the bytes, less precise",
                t,
            );
        }
    }
    if r.optimizer.name == OptimizerName::Adamw {
        let mut c = r.clone();
        c.optimizer.name = OptimizerName::Adamw8bit;
        let t = total(&c);
        if t <= budget {
            add(
                vec!["optimizer.name=adamw8bit".into()],
                "optimizer.name = \"adamw8bit\"".into(),
                "; rounded moments",
                t,
            );
        }
    }
    if r.optimizer.keeps_master(i.machine.computes_in_f32()) && rules(r, Method::Full).next().is_some() {
        let mut c = r.clone();
        c.optimizer.master = ft_recipe::Master::None;
        let t = total(&c);
        if t <= budget {
            let set = vec!["optimizer.master=none".into()];
            add(set, "optimizer.master = \"none\"".into(), "; weights of 16 bits are all there is", t);
        }
    }
    for (what, cost) in [
        (Offload::Activations, "; inputs of layers that are computed again cross the bus"),
        (Offload::Optimizer, "; states cross the bus every step"),
    ] {
        if r.memory.offloads(what) || !i.machine.cuda {
            continue;
        }
        let mut c = r.clone();
        let all = c.memory.offload.get_or_insert_default();
        all.push(what);
        let words: Vec<&str> = all.iter().map(|o| o.word()).collect();
        let t = total(&c);
        if t <= budget {
            add(vec![format!("memory.offload={words:?}")], format!("memory.offload = {words:?}"), cost, t);
        }
    }
    if r.parallel.data == 1 {
        let worlds: Vec<usize> = [2, 4, 8, 16, 32, 64]
            .into_iter()
            .filter(|n| r.run.batch_rows.is_multiple_of(r.run.micro_rows.count() * n))
            .collect();
        if let Some((n, t)) = first(worlds, budget, |n| {
            let mut c = r.clone();
            (c.parallel.data, c.parallel.zero) = (n, 3);
            // ranks run as threads of one process and split its CPU threads
            let threads = c.parallel.threads(i.machine.threads as usize) as u64;
            changed(i, &c, Machine { threads, ..i.machine }, i.selection)
        }) {
            let set = vec![format!("parallel.data={n}"), "parallel.zero=3".into()];
            add(
                set,
                format!("parallel.zero = 3 over {n} devices"),
                " each; weights are gathered layer by layer",
                t,
            );
        }
    }
    if rules(r, Method::Full).next().is_some() {
        let mut c = r.clone();
        c.train.retain(|x| !(x.is(Method::Full) && x.modules.iter().all(|m| m == "norms")));
        for x in c.train.iter_mut().filter(|x| x.is(Method::Full)) {
            x.method = Method::Lora;
            x.modules.retain(|m| m != "norms");
        }
        let t = with_rules(i, &c);
        if t <= budget {
            let change = "method \"full\" -> \"lora\" (without norms)".to_string();
            let set = rules(r, Method::Full).map(|k| format!("train.{k}.method=lora")).collect();
            add(set, change, "; adapters train instead of the weights", t);
        }
    }
    let needed = super::report::bytes(plan.total());
    let what = plan.peak.bytes.iter().max_by_key(|(_, b)| *b).map_or("", |(c, _)| c.label());
    if out.is_empty() {
        out.push(Hint {
            set: Vec::new(),
            text: format!("no single change is enough: it needs {needed}, most of it {what}"),
            total: plan.total(),
            built: true,
        });
    }
    out
}

fn rules(r: &Recipe, method: Method) -> impl Iterator<Item = usize> + '_ {
    r.train.iter().enumerate().filter(move |(_, x)| x.is(method)).map(|(k, _)| k)
}

/// Divisors of `n` below `n`, largest first, at most 8. A batch divisible by `n` is divisible by them.
fn divisors_below(n: usize) -> Vec<usize> {
    (1..n.min(1 << 12)).rev().filter(|d| n.is_multiple_of(*d)).take(8).collect()
}

/// First of `values` with a total within the budget. Totals must decrease along `values`.
fn first(values: Vec<usize>, budget: u64, total: impl Fn(usize) -> u64) -> Option<(usize, u64)> {
    let last = *values.last()?;
    let least = (last, total(last));
    if least.1 > budget {
        return None;
    }
    values[..values.len() - 1].iter().map(|n| (*n, total(*n))).find(|(_, t)| *t <= budget).or(Some(least))
}

/// Device peak in bytes with another recipe and the same `[[train]]` rules.
fn with(i: &Inputs<'_>, r: &Recipe) -> u64 {
    changed(i, r, i.machine, i.selection)
}

/// Device peak in bytes with other `[[train]]` rules; `u64::MAX` if they select nothing.
fn with_rules(i: &Inputs<'_>, r: &Recipe) -> u64 {
    match Selection::from_rules(i.config, &r.train) {
        Ok(s) => changed(i, r, i.machine, &s),
        Err(_) => u64::MAX,
    }
}

fn changed(i: &Inputs<'_>, r: &Recipe, machine: Machine, selection: &Selection) -> u64 {
    // a smaller max_length can only shrink the measured micro-batches
    let bounded = Workloads::new(|r| i.workloads.of(i.recipe, r.run.micro_rows.count()).under(r));
    let same = r.data.max_length == i.recipe.data.max_length;
    let workloads = if same { i.workloads } else { &bounded };
    let inputs = Inputs { recipe: r, selection, machine, workloads, ..*i };
    // `u64::MAX` if the model cannot be sharded this way
    let decision = Prepared::new(&inputs).and_then(|p| Ok(choose(&p)?.peak.bytes.total()));
    decision.unwrap_or(u64::MAX)
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
