//! `ft logits`: rows with a teacher's log-probabilities, for distillation.

use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::infer::{LoadOptions, ModelFiles};
use crate::train::{Job, TeacherModel, write_teacher};
use ft_base::terminal::tell;
use ft_hub::Want;
use ft_plan::report;
use ft_recipe::TOP_K;
use std::path::PathBuf;
use std::slice;

/// Arguments of `ft logits`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The teacher: a folder (of a model, of an adapter, of a run or of a checkpoint), or a hub id
    model: String,
    /// A PEFT adapter over it, unmerged: a folder, or a hub id
    #[arg(long, value_name = "DIR")]
    adapter: Option<String>,
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Output folder: new or empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Most probable tokens of the teacher to keep at each supervised token
    #[arg(long, value_name = "K", default_value_t = TOP_K)]
    top_k: usize,
    #[command(flatten)]
    load: LoadOptions,
}

/// Writes the files, and prints the lines of a recipe that reads them.
///
/// # Errors
/// Errors in recipe, rows or teacher; a teacher with another tokenizer than the recipe's model; an existing folder.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let mut recipe = args.recipe.load()?;
    // rows of task "distill" may still be without values
    recipe.data.taught = false;
    let job = Job::open(recipe, Want::Tokenizer, true)?;
    let files = ModelFiles::open(&args.model, args.adapter.as_deref())?;
    let tokenizer = files.tokenizer(None)?;
    let (decoders, _) = files.load(args.load, slice::from_ref(&job.device))?;
    // removes a converted checkpoint; an end by Ctrl-C would leave it
    drop(files);
    let Some(decoder) = decoders.first() else { return Ok(()) };
    let name = args.adapter.as_ref().unwrap_or(&args.model);
    let teacher = TeacherModel { name, decoder, tokenizer: tokenizer.as_ref(), device: &job.device };
    let of = write_teacher(&job, &teacher, args.top_k, &args.out)?;
    tell(&format!(
        "{} rows with {} values at each of {} targets, {}; [data] of a recipe with task = \"distill\":",
        of.rows,
        args.top_k,
        of.targets,
        report::bytes(of.bytes)
    ));
    print(&of.sources)
}
