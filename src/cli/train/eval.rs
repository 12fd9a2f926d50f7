//! `ft eval`: loss and perplexity on the evaluation data, and scores of generated answers if the recipe
//! asks for them.

use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::cli::quickstart;
use crate::infer::{Source, recipe_of, usage};
use crate::log;
use crate::train::{self, Job, job, reference_model};
use ft_engine::walk::{Execution, visit::NoHooks};
use ft_hub::Want;
use ft_recipe::{Init, Recipe, Weights};
use serde_json::json;

/// Arguments of `ft eval`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// A PEFT adapter (folder or hub id), a run or a checkpoint over the base, unmerged; else the recipe's lora.init,
    /// if it has one. A run's folder in the recipe's place stands for both
    #[arg(long, value_name = "DIR")]
    adapter: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Evaluates the base, with an adapter if given, and prints the result.
///
/// # Errors
/// Errors in recipe, model, adapter or data; a non-finite loss.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let (recipe, source) = recipe(args)?;
    let of_run = recipe.task.has_reference() && source.as_ref().is_some_and(Source::is_model);
    let is_adapter = |r: &Recipe| matches!(r.lora.init, Init::Adapter(_));
    if of_run && reference_model::recipe_of(&recipe).as_ref().is_none_or(is_adapter) {
        let why = "the reference of a model trained in full is its start, or an adapter over its start\n  \
                   hint: preference.reference = PATH of the model that the run began with; ft merge makes one of \
                   an adapter";
        return Err(usage(why));
    }
    let job = Job::open_frozen(recipe, Want::Weights, true)?;
    let Some(data) = job.eval_data()? else { return Ok(()) };
    job.check_rows(None, Some(&data))?;
    job.check()?;
    if let Some(adapter) = &job.adapter {
        job::tell_quantize(&job.recipe, &job.config, adapter.quantize()?);
    }
    let (decoder, params) = job.load(false)?;
    let execution =
        Execution::plain(job.recipe.run.micro_rows.count(), job.config.outputs(), job.device.is_cuda());
    let of = train::evaluate_loaded(&job, (&decoder, &params), &data, &execution)?;
    let (loss, targets) = (of.loss, of.targets);
    if !loss.is_finite() {
        return Err(train::Error::Evaluation.into());
    }
    let scores = train::score(&job, &decoder, &NoHooks, &data, &|| 0)?.map(|(scores, _)| scores);
    let shown = |is_model| source.as_ref().filter(|s| s.is_model() == is_model).map(|s| s.shown.clone());
    let model = shown(true).unwrap_or_else(|| job.model.source.clone());
    let adapter = job.adapter.as_ref().map(|a| shown(false).unwrap_or_else(|| a.dir.display().to_string()));
    let samples = (0..data.rows.len()).map(|row| data.rows.get(row).map(|samples| samples.len()));
    let samples = samples.sum::<Result<usize, ft_data::Error>>()?;
    if args.json {
        let mut line = json!({
            "model": model, "adapter": adapter, "loss": loss, "target_tokens": targets,
            "rows": data.rows.len(), "samples": samples,
        });
        of.metrics.iter().for_each(|(name, value)| line[name] = value.clone());
        if let Some(perplexity) = log::perplexity(&line) {
            line["perplexity"] = perplexity.into();
        }
        scores.iter().for_each(|s| train::add_to(&mut line, s));
        return print(&format!("{line}\n"));
    }
    let adapter = adapter.map_or(String::new(), |a| format!(" + {a}"));
    let scores = scores.map_or(String::new(), |s| format!("generated   {}\n", train::scores_line(&s)));
    let metrics: String = match of.metrics.is_empty() {
        true => format!("perplexity  {:.4}\n", loss.exp()),
        false => of.metrics.iter().map(|(name, value)| format!("{name:<17} {value}\n")).collect(),
    };
    print(&format!(
        "model       {model}{adapter}\nloss        {loss:.6}\n{metrics}targets     {targets} in {samples} samples\n\
         {scores}"
    ))
}

/// The recipe with the model or adapter to evaluate, and their source if not the recipe. A run folder
/// provides recipe and result.
fn recipe(args: &Args) -> ft_base::Result<(Recipe, Option<Source>)> {
    let named = &args.recipe.recipe;
    let (mut recipe, of_run) = match recipe_of(named, &args.recipe.set)? {
        Some(recipe) => (recipe, Some(named.display().to_string())),
        None => (Recipe::load(named, &args.recipe.set)?, None),
    };
    quickstart::provide(named, &recipe, true)?;
    if !recipe.data.evaluates() {
        let place = recipe.place("data");
        return Err(usage(format!("{place}: data.eval names nothing to evaluate on")));
    }
    if recipe.data.eval_share == 0.0 {
        recipe.data.train.clear();
    }
    let source = args.adapter.clone().or(of_run).map(|name| Source::find(&name)).transpose()?;
    match &source {
        Some(source) if source.is_model() => {
            recipe.model.source.clone_from(&source.name);
            recipe.model.weights = Weights::Load;
        }
        Some(source) => recipe.lora.init = Init::Adapter(source.name.clone()),
        None => {}
    }
    Ok((recipe, source))
}
