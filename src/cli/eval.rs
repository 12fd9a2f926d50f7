//! `ft eval`: loss and perplexity on the evaluation data, and scores of generated answers if the recipe
//! asks for them.

use super::RecipeArgs;
use super::given::{Given, recipe_of};
use crate::train::{self, Job};
use ft_base::terminal::warn;
use ft_data::hub::Want;
use ft_engine::walk::{Execution, NoHooks};
use ft_recipe::{Init, Recipe, Weights};
use serde_json::json;

/// Arguments of `ft eval`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// A PEFT adapter (folder or hub id), a run or a checkpoint over the base, unmerged; else the recipe's lora.init, if
    /// it has one. A run's folder in the recipe's place stands for both
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
    // a run folder provides recipe and result
    let run = recipe_of(&args.recipe.recipe);
    let mut recipe = Recipe::load(run.as_ref().unwrap_or(&args.recipe.recipe), &args.recipe.set)?;
    if !recipe.data.evaluates() {
        let place = recipe.place("data");
        return Err(super::usage(format!("{place}: data.eval names nothing to evaluate on")));
    }
    if recipe.data.eval_share == 0.0 {
        recipe.data.train.clear();
    }
    let of_run = || run.is_some().then(|| args.recipe.recipe.display().to_string());
    let given = args.adapter.clone().or_else(of_run).map(|name| Given::find(&name)).transpose()?;
    match &given {
        Some(given) if given.is_model() => {
            recipe.model.source.clone_from(&given.name);
            recipe.model.weights = Weights::Load;
        }
        Some(given) => recipe.lora.init = Init::Adapter(given.name.clone()),
        None => {}
    }
    let job = Job::open_frozen(recipe, Want::Weights, true)?;
    let Some(data) = job.eval_data()? else { return Ok(()) };
    job.check()?;
    let (here, there) = (job.recipe.model.quantize, job.adapter.as_ref().map(|a| a.quantize()).transpose()?);
    if let Some(there) = there.filter(|t| *t != here && !job.config.four_bit) {
        let (here, there) = (here.word(), there.word());
        warn(&format!("the adapter was trained with model.quantize = {there:?}, and here it is {here:?}"));
    }
    let (decoder, _) = job.load(false)?;
    let execution =
        Execution::plain(job.recipe.run.micro_rows.count(), job.config.vocab, job.device.is_cuda());
    let (loss, targets) = train::evaluate(&decoder, &data, &execution, &job.device)?;
    if !loss.is_finite() {
        return Err(train::Error::Evaluation.into());
    }
    let scores = train::score(&job, &decoder, &NoHooks, &data, &|| 0)?;
    let shown = |is_model: bool| given.as_ref().filter(|g| g.is_model() == is_model).map(|g| g.shown.clone());
    let model = shown(true).unwrap_or_else(|| job.model.source.clone());
    let adapter = job.adapter.as_ref().map(|a| shown(false).unwrap_or_else(|| a.dir.display().to_string()));
    if args.json {
        let mut line = json!({
            "model": model, "adapter": adapter, "loss": loss, "perplexity": loss.exp(),
            "target_tokens": targets, "rows": data.rows.len(),
        });
        scores.iter().for_each(|s| train::add_to(&mut line, s));
        return super::print(&format!("{line}\n"));
    }
    super::print(&format!(
        "model       {}{}\nloss        {loss:.6}\nperplexity  {:.4}\ntargets     {targets} in {} rows\n{}",
        model,
        adapter.map_or(String::new(), |a| format!(" + {a}")),
        loss.exp(),
        data.rows.len(),
        scores.map_or(String::new(), |s| format!("generated   {}\n", train::scores_line(&s))),
    ))
}
