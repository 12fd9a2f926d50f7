//! `ft routes`: expert load per layer on the training data.

use crate::cli::args::RecipeArgs;
use crate::infer::usage;
use crate::train::Job;
use ft_base::terminal::Escaped;
use ft_data::Micro;
use ft_engine::model::Batch;
use ft_engine::walk::{Load, Walk, dead, entropy, peak};
use ft_hub::Want;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Arguments of `ft routes`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Rows of the training data to read; all by default
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Experts a layer in the printed rules; as many as a token uses by default
    #[arg(long, value_name = "N")]
    experts: Option<usize>,
    /// Print the counts as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the initial model forward over the training rows and prints the expert load.
///
/// # Errors
/// A model without experts; errors in recipe, model or data.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let recipe = args.recipe.load()?;
    let job = Job::open_frozen(recipe, Want::Weights, true)?;
    let Some(moe) = &job.config.moe else {
        let family = job.config.family.model_type;
        return Err(usage(format!("{}: {family} has no experts", job.recipe.model.source)));
    };
    let data = job.train_data()?;
    let (decoder, _) = job.load(false)?;

    let count = args.rows.unwrap_or(data.rows.len()).min(data.rows.len());
    let bar = indicatif::ProgressBar::new(count as u64);
    let (mut load, mut tokens) = (Load::default(), 0);
    let micro = job.recipe.run.micro_rows.count();
    for at in (0..count).step_by(micro) {
        let chunk: Vec<usize> = (at..(at + micro).min(count)).collect();
        let m = Micro::collate(&data, &chunk)?;
        if !m.ids.is_empty() {
            let batch = Batch::new(&job.config, (&m).into(), (0, 0), None, &job.device)?;
            let mut walk = Walk::new(&decoder, None, 0);
            walk.hidden(&batch)?;
            load.add(&walk.routing().read()?);
            tokens += m.ids.len();
        }
        bar.inc(chunk.len() as u64);
    }
    bar.finish_and_clear();
    let experts = args.experts.unwrap_or(moe.top_k).clamp(1, moe.experts);
    let mut out = Escaped(io::stdout().lock());
    let outcome = if args.json {
        let layers: Vec<_> = load.layers.iter().map(|(l, c)| json!({"layer": l, "tokens": c})).collect();
        writeln!(out, "{}", json!({"rows": count, "tokens": tokens, "layers": layers}))
    } else {
        show(&load, tokens, experts, &mut out)
    };
    Ok(ft_recipe::Error::of_print(outcome)?)
}

/// Experts of a layer by descending load, lower index first on ties.
fn ranked(counts: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|e| std::cmp::Reverse(counts[*e]));
    order
}

/// Prints a table of the load, and `[[train]]` rules for the most used experts.
fn show(load: &Load, tokens: usize, experts: usize, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "# {tokens} tokens; entropy: 1 is even, 0 is one expert for all; peak: the busiest expert's load\n\
         # over the even load; dead: experts that no token chose; then experts and their share of the load\n\
         # layer  entropy   peak  dead"
    )?;
    let mut rules: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    let (mut chosen, mut all) = (0, 0);
    for (layer, counts) in &load.layers {
        let sum = counts.iter().sum::<u64>();
        let order = ranked(counts);
        let share = |e: &usize| format!("{e} {:.1}%", 100.0 * counts[*e] as f64 / sum.max(1) as f64);
        let most: Vec<String> = order.iter().take(experts.max(8)).map(share).collect();
        writeln!(
            out,
            "# {layer:>5}  {:>7.3}  {:>5.2}  {:>4}  {}",
            entropy(counts),
            peak(counts),
            dead(counts),
            most.join(", ")
        )?;
        let mut top: Vec<usize> = order.into_iter().take(experts).collect();
        chosen += top.iter().map(|e| counts[*e]).sum::<u64>();
        all += sum;
        top.sort_unstable();
        rules.entry(top).or_default().push(*layer);
    }
    let share = 100.0 * chosen as f64 / all.max(1) as f64;
    writeln!(out, "\n# the {experts} most used of each layer: {share:.1}% of the load")?;
    let mut rules: Vec<_> = rules.into_iter().collect();
    rules.sort_by_key(|(_, layers)| layers[0]);
    for (experts, layers) in rules {
        writeln!(out, "\n[[train]]\nmodules = [\"experts\"]\nlayers = {layers:?}\nexperts = {experts:?}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ft_routes_prints_rules_of_the_most_used_experts() -> anyhow::Result<()> {
        let layers = vec![(0, vec![1, 9, 0, 5]), (2, vec![0, 7, 7, 7]), (3, vec![0, 3, 1, 3])];
        let mut out = Vec::new();
        show(&Load { layers }, 15, 2, &mut out)?;
        let text = String::from_utf8(out)?;
        let parsed: toml::Table = text.parse()?;
        let rules = parsed["train"].as_array().cloned().unwrap_or_default();
        let get = |i: usize, key: &str| rules[i][key].to_string();
        assert_eq!(rules.len(), 2, "{text}");
        assert_eq!((get(0, "layers"), get(0, "experts")), ("[0, 3]".into(), "[1, 3]".into()));
        assert_eq!((get(1, "layers"), get(1, "experts")), ("[2]".into(), "[1, 2]".into()));
        assert!(text.contains("79.1% of the load"), "{text}");
        Ok(())
    }
}
