//! Another model as reference, and references that cannot be computed.

use crate::train::Error;
use crate::train::job::Job;
use crate::train::job::hash::{adapter_hash, model_hash};
use crate::train::layout::{RESULTS, end_of, is_run};
use ft_engine::adapters::{Adapter, TrainedPart};
use ft_hub::Want;
use ft_plan::InferenceMemory;
use ft_recipe::{Init, Method, Recipe, Reference, Weights};
use std::path::{Path, PathBuf};

/// The recipe with another model, or an adapter over its own, in place of the trained model. A run stands for its
/// result. `None` if `preference.reference` names no other model.
pub fn recipe_of(recipe: &Recipe) -> Option<Recipe> {
    let Reference::Other(other) = &recipe.preference.reference else { return None };
    if !recipe.task.has_reference() {
        return None;
    }
    let named = recipe.resolve(other);
    let folder = result_of(&named).unwrap_or(named);
    let source = if folder.is_dir() { folder.display().to_string() } else { other.clone() };
    let mut recipe = recipe.clone();
    recipe.train.clear();
    recipe.data.train.clear();
    recipe.data.eval.clear();
    recipe.lora.init = Init::Default;
    if folder.join("adapter_config.json").is_file() && !folder.join("config.json").is_file() {
        recipe.lora.init = Init::Adapter(source);
    } else {
        let model = &mut recipe.model;
        (model.source, model.revision, model.weights) = (source, "main".into(), Weights::Load);
        (model.cache, model.overrides) = (None, Default::default());
    }
    Some(recipe)
}

/// Folder of the result of a run.
fn result_of(run: &Path) -> Option<PathBuf> {
    let is_run = run.join("recipe.toml").is_file();
    RESULTS.iter().map(|r| run.join(r)).find(|r| is_run && r.is_dir())
}

/// The job of [`recipe_of`], on the device of `job`.
///
/// # Errors
/// A run that has not ended; errors of the model.
pub fn job(job: &Job) -> ft_base::Result<Option<Job>> {
    let Some(recipe) = recipe_of(&job.recipe) else { return Ok(None) };
    if let Reference::Other(other) = &job.recipe.preference.reference {
        let run = job.recipe.resolve(other);
        if is_run(&run) && end_of(&run).is_none() {
            let earlier = result_of(&run);
            let earlier = earlier.map(|r| format!("; or name {}, the result of an earlier run", r.display()));
            let why = format!(
                "{other}: this run has not ended\n  hint: ft run --resume ends it{}",
                earlier.unwrap_or_default()
            );
            return Err(Error::at(&job.recipe, "preference.reference", why).into());
        }
    }
    let opened = Job::open_frozen(recipe, Want::Weights, true)?;
    Ok(Some(Job { device: job.device.clone(), dtype: job.dtype, ..opened }))
}

/// Hash of the weights of another model and its adapter.
pub fn hash(other: &Job) -> ft_base::Result<String> {
    let model = model_hash(&other.recipe, &other.config, &other.model.dir)?;
    let adapter = other.adapter.as_ref().map(|a| adapter_hash(&a.dir)).transpose()?;
    Ok(blake3::hash(format!("{model} {}", adapter.unwrap_or_default()).as_bytes()).to_hex().to_string())
}

/// Checks another model as reference: files, vocabulary, memory of the model alone. Returns the job, if
/// `preference.reference` names one.
///
/// # Errors
/// Errors of the model; [`Error::Usage`]; too little memory.
pub fn check(trained: &Job) -> ft_base::Result<Option<Job>> {
    let Some(other) = job(trained)? else { return Ok(None) };
    let fail = |why: String| {
        let why = format!("{}: {why}", other.model.source);
        Err(Error::at(&trained.recipe, "preference.reference", why).into())
    };
    let (theirs, own) = (other.config.vocab, trained.config.vocab);
    if theirs != own {
        return fail(format!("a vocabulary of {theirs} tokens, and the model's has {own}"));
    }
    let both = trained.tokenizer.as_ref().zip(other.tokenizer.as_ref());
    if let Some(why) = both.and_then(|(own, theirs)| own.differs(theirs)) {
        return fail(format!("another tokenizer than the model's: {why}"));
    }
    other.check()?;
    let needs = InferenceMemory::new(other.inference_model(), trained.device.is_cuda())?;
    if needs.fits() { Ok(Some(other)) } else { Err(needs.refusal(&[]).into()) }
}

/// Checks that a trained model, loaded for evaluation, can be compared with the reference.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_trained(job: &Job) -> Result<(), Error> {
    let full = |t: &TrainedPart<'_>| t.part.method() == Method::Full;
    let has_full = |a: &Adapter| a.selection(&job.config).is_ok_and(|s| s.parts().iter().any(full));
    let why = match job.recipe.preference.reference {
        _ if !job.recipe.task.has_reference() => return Ok(()),
        Reference::Start if job.adapter.is_some() => "the model at the start of the run",
        Reference::Base if job.adapter.as_deref().is_some_and(has_full) => {
            "the start of what trained in full"
        }
        _ => return Ok(()),
    };
    let hint = "run.eval_every evaluates in the run; preference.reference = PATH names a model";
    let why = format!("the reference is {why}, which only the run knows\n  hint: {hint}");
    Err(Error::at(&job.recipe, "preference.reference", why))
}
