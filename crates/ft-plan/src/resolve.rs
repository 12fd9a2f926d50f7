//! Resolves a recipe against its model: source, compute dtype, config, selection, and inputs of a plan. Shared by
//! `ft plan`, `ft run`, `ft check`, and `ft eval`: all accept and refuse the same recipes.

use crate::Error;
use crate::host::{beside_device, budget, lacks_fp8};
use crate::inference::Server;
use crate::model::{Target, machine, quantization, stored};
use crate::search::Inputs;
use crate::workload::Workloads;
use ft_base::store::json::short;
use ft_engine::adapters::{self, PeftConfig, Selection, Trained, TrainedPart, initial};
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_engine::model::modules::Module;
use ft_engine::model::units::partition;
use ft_engine::params::buffers::moments::is_large;
use ft_engine::params::buffers::projected::Projection;
use ft_engine::params::buffers::{Split, cut_module};
use ft_engine::params::build::check_full;
use ft_engine::params::build::ghost::{in_fp8, is_frozen_dense};
use ft_engine::ranks::Mesh;
use ft_hub::Settings;
use ft_kernels::Machine;
use ft_kernels::optimizer::BLOCK as STATES;
use ft_recipe::{Decay, LoraSpec, Products, Quantize, Recipe, Weights};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub use crate::model::{config_notes, dtype, source_path};

/// Config and selection of a recipe.
#[derive(Clone, Debug)]
pub struct Resolved {
    pub config: Config,
    pub selection: Selection,
}

impl Resolved {
    /// As [`Self::frozen`], for training.
    ///
    /// # Errors
    /// As [`check_model`] and [`Self::frozen`].
    pub fn new(
        recipe: &Recipe,
        config: Config,
        select: impl FnOnce(&mut Config) -> ft_base::Result<Selection>,
    ) -> ft_base::Result<Self> {
        check_training(recipe, &config)?;
        Self::frozen(recipe, config, select)
    }

    /// Selects modules with `select`, after a check of config and recipe. `select` gives the config the layout of an
    /// adapter. The model's own dropout and noise have no effect without training.
    ///
    /// # Errors
    /// As [`check_model`] but for dropout, noise and keys without effect, [`check_experts`] and [`check_stages`]; a
    /// score head of another task; errors of `select`.
    pub fn frozen(
        recipe: &Recipe,
        config: Config,
        select: impl FnOnce(&mut Config) -> ft_base::Result<Selection>,
    ) -> ft_base::Result<Self> {
        check_keys(recipe, &config)?;
        check_experts(recipe, &config)?;
        check_stages(recipe, &config)?;
        let mut config = of_task(recipe, config)?;
        let selection = select(&mut config)?;
        Ok(Self { config, selection })
    }

    /// Inputs of a plan, with the budgets of a rank. `dir` is the folder of the model, if downloaded;
    /// `host` is the host memory of the machine, if known.
    ///
    /// # Errors
    /// As [`check_products`]; tokens of a row split over ranks, with dropout in adapters of experts on CUDA;
    /// inconsistent sizes of the model.
    pub fn inputs<'a>(
        recipe: &'a Recipe,
        (config, selection): (&'a Config, &'a Selection),
        (target, dir): (Target, Option<&Path>),
        workloads: &'a Workloads<'a>,
        host: Option<u64>,
    ) -> ft_base::Result<Inputs<'a>> {
        let machine = stored(machine(recipe, target), recipe, config, dir);
        check_products(recipe, selection, machine)?;
        split_dropout(recipe, selection, machine.cuda).map_or(Ok(()), |key| Err(key.error(recipe)))?;
        let server = Server::of(recipe, config, selection, machine.stored)?.map_or(0, |s| s.on_host);
        let workload = workloads.of(recipe, recipe.run.micro_rows.count());
        Ok(Inputs {
            recipe,
            config,
            selection,
            machine,
            workloads,
            budget: budget(recipe, machine, &workload, (host, server)),
            host: beside_device(recipe, machine, (host, server)),
            known: None,
        })
    }
}

/// Key of the changes to config.json.
const OVERRIDE: &str = "model.override";

/// Refuses keys at odds with the model, and matrices not divisible among the ranks of `parallel.tensor`.
///
/// # Errors
/// Dropout or noise of the model's own; `model.override` with keys unread by the model; `parallel.context` above 1 with
/// linear attention, longrope or dynamic; answers during a run with `parallel.pipeline` above 1 and layers with shared
/// state; router losses without routers; `parallel.tensor` above 1 with another number of heads or width.
pub fn check_model(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    check_training(recipe, config)?;
    check_keys(recipe, config)
}

/// Refuses keys of `model.override` unknown to ft or unread by the model.
pub fn check_override(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    let Some((key, why)) = &config.idle_override else { return Ok(()) };
    let key = format!("{OVERRIDE}.{key}");
    Err(Error::Ignored(format!("{}: {key}: {why}", recipe.place(&key))))
}

/// As [`check_model`], for inference: but for dropout, noise, and keys without effect.
fn check_keys(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    match unsuited(recipe, config) {
        Some(key) => Err(key.error(recipe)),
        None => check_tensor(recipe, config),
    }
}

/// Refuses keys of `model.override` without effect, and the model's own dropout and noise, absent from training in ft.
/// A recipe without training data is of a run, maybe of an earlier version, and opened for inference.
fn check_training(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    if recipe.data.train.is_empty() {
        return Ok(());
    }
    check_override(recipe, config)?;
    let shown = |key: &str| format!("{key} = {}", config.key(key).map(short).unwrap_or_default());
    let given: Vec<String> = config.noise().map(shown).collect();
    if given.is_empty() {
        return Ok(());
    }
    let zero: Vec<String> = config.noise().map(|key| format!("{key} = 0.0")).collect();
    Err(Error::Ignored(format!(
        "{}: {OVERRIDE}: the model has {}, which acts in training alone and is not built\n  hint: \
         override = {{ {} }} under [model] trains without it; evaluation is the same",
        recipe.place(OVERRIDE),
        given.join(", "),
        zero.join(", ")
    )))
}

/// A key at odds with the model or its selection.
pub(crate) struct Unsuited {
    key: &'static str,
    /// Its value, if messages show it.
    value: Option<String>,
    why: String,
    hint: &'static str,
}

impl Unsuited {
    /// Key and reason, alike for all values.
    pub fn reason(&self) -> String {
        format!("{}: {}", self.key, self.why)
    }

    fn error(self, recipe: &Recipe) -> Error {
        let Self { key, value, why, hint } = self;
        let (place, value) = (recipe.place(key), value.map_or(String::new(), |v| format!(" = {v}")));
        Error::Ignored(format!("{place}: {key}{value}: {why}\n  hint: {hint}"))
    }
}

/// Tokens of a row split over ranks, with dropout in adapters of experts, on CUDA.
pub(crate) fn split_dropout(recipe: &Recipe, selection: &Selection, cuda: bool) -> Option<Unsuited> {
    let p = &recipe.parallel;
    let over = [
        ("parallel.context", p.context, "parallel.context=1, or lora.dropout=0"),
        ("parallel.tensor", p.tensor, "parallel.tensor=1, or lora.dropout=0"),
    ];
    let (key, ranks, hint) = over.into_iter().find(|(_, ranks, _)| cuda && *ranks > 1)?;
    let drops = |(m, spec): (&Module, &LoraSpec)| m.expert.is_some() && spec.dropout > 0.0;
    selection.loras().any(drops).then(|| Unsuited {
        key,
        value: Some(ranks.to_string()),
        why: "not built yet: dropout in adapters of experts on a GPU, with ranks that split the tokens of a row".into(),
        hint,
    })
}

/// The first key at odds with the model.
pub(crate) fn unsuited(recipe: &Recipe, config: &Config) -> Option<Unsuited> {
    let (p, family) = (&recipe.parallel, config.family.model_type);
    let tokens = match (config.delta.is_some(), config.rope_turn().is_some()) {
        (true, _) => Some(format!("not built for linear attention, of which {family} has layers")),
        (_, true) => {
            Some("not built for longrope and dynamic, whose factors go by the length of a document".into())
        }
        _ => None,
    };
    if let Some(why) = tokens.filter(|_| p.context > 1) {
        let (value, hint) = (Some(p.context.to_string()), "parallel.context = 1");
        return Some(Unsuited { key: "parallel.context", value, why, hint });
    }
    let answers =
        [("generate.samples", recipe.generate.samples > 0), ("log.samples", !recipe.log.samples.is_empty())];
    let answers = answers.into_iter().find(|(_, given)| *given);
    if let Some((key, _)) = answers.filter(|_| config.shares_state() && p.pipeline > 1) {
        let why = "not built with parallel.pipeline where layers share inputs, keys or values".into();
        return Some(Unsuited { key, value: None, why, hint: "leave it out, and ft chat afterwards" });
    }
    let losses = [("router.aux_loss", recipe.router.aux_loss), ("router.z_loss", recipe.router.z_loss)];
    let (key, value) = losses.into_iter().find(|(_, value)| config.moe.is_none() && *value != 0.0)?;
    let why = format!("{family} has no routers");
    Some(Unsuited { key, value: Some(value.to_string()), why, hint: "leave it out" })
}

/// Refuses products of 8-bit floats on the CPU, on a card before compute capability 8.9, in another dtype than bf16,
/// and with no frozen matrix in them.
///
/// # Errors
/// These.
pub fn check_products(recipe: &Recipe, selection: &Selection, machine: Machine) -> Result<(), Error> {
    if recipe.memory.products != Products::Fp8 {
        return Ok(());
    }
    let other = "memory.products = \"dtype\"";
    let refuse = |why: &str, hint: &str| {
        let place = recipe.place("memory.products");
        Err(Error::Ignored(format!("{place}: memory.products = \"fp8\": {why}\n  hint: {hint}")))
    };
    let (of, all) = products(recipe, selection, machine);
    match (machine.cuda, machine.card) {
        (false, _) => refuse(
            "the plan is for the CPU, which has no such products",
            &format!("{other}, or --gpu H100 to plan for a card"),
        ),
        (true, Some(card)) if lacks_fp8(card) => refuse(
            &format!("{card} has compute capability below 8.9, and no such products"),
            &format!("{other}, or a card of Ada, Hopper or Blackwell (L40S, 4090, H100, 5090)"),
        ),
        _ if machine.width != 2 => {
            refuse("model.dtype is not bf16", &format!("{other}, or model.dtype = \"bf16\""))
        }
        _ if of == 0 => refuse(
            &format!(
                "none of {all} frozen matrices of attention and dense feed-forward blocks has rows and columns in \
                 multiples of 16"
            ),
            other,
        ),
        _ => Ok(()),
    }
}

/// Frozen matrices of attention and dense feed-forward blocks: number with products in 8-bit floats, and number in all.
pub(crate) fn products(recipe: &Recipe, selection: &Selection, machine: Machine) -> (usize, usize) {
    let ranks = recipe.parallel.tensor;
    let own = selection.modules.iter().filter(|(m, choice)| is_frozen_dense(m, choice));
    own.fold((0, 0), |(of, all), (m, c)| {
        (of + usize::from(in_fp8(&cut_module(m, ranks), c, machine.fp8)), all + 1)
    })
}

/// Refuses matrices not divisible among the ranks of `parallel.tensor`.
fn check_tensor(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    let (ranks, place) = (recipe.parallel.tensor, recipe.place("parallel.tensor"));
    if ranks == 1 {
        return Ok(());
    }
    let heads: BTreeSet<usize> = (0..config.layers).map(|l| config.heads_to_cut(l)).collect();
    // Mixtures stay whole: only the widths of dense layers count.
    let dense = |l: &usize| config.moe.as_ref().is_none_or(|moe| !moe.sparse[*l]);
    let widths: BTreeSet<usize> =
        (0..config.layers).filter(dense).map(|l| config.intermediate_of(l)).collect();
    let quantized = quantization(config, recipe.model.quantize) == Quantize::Nf4;
    // Two 4-bit codes are one byte.
    let whole = |width: usize, n: usize| width.is_multiple_of(if quantized { 2 * n } else { n });
    let fits = |n: usize| heads.iter().all(|h| h.is_multiple_of(n)) && widths.iter().all(|w| whole(*w, n));
    if fits(ranks) {
        return Ok(());
    }
    let most = heads.first().copied().unwrap_or(1);
    let near: Vec<String> = (1..=most).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
    let list = |all: &BTreeSet<usize>| all.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
    let and = match widths.is_empty() {
        true => String::new(),
        false => format!(" and a feed-forward width of {}", list(&widths)),
    };
    let bytes = if quantized { ", in bytes of two 4-bit codes" } else { "" };
    Err(Error::Ignored(format!(
        "{place}: parallel.tensor = {ranks}: layers of {} heads{and} do not divide by it{bytes}\n  hint: one of {}",
        list(&heads),
        if near.is_empty() { "1".into() } else { near.join(", ") }
    )))
}

/// Whether `ranks` ranks can cut the matrices of a model.
pub(crate) fn cuts(recipe: &Recipe, of: &Resolved, ranks: usize) -> bool {
    let with = recipe.with(&[format!("parallel.tensor={ranks}")]);
    let fits = |r: Recipe| {
        check_tensor(&r, &of.config).is_ok()
            && check_adapters(&r, &of.selection).is_ok()
            && check_moments(&r, &of.selection).is_ok()
    };
    with.is_ok_and(fits)
}

/// Refuses DoRA where ranks cut matrices: its norms are of whole rows.
fn check_adapters(recipe: &Recipe, selection: &Selection) -> Result<(), Error> {
    match selection.loras().find(|(_, spec)| spec.dora) {
        Some((m, _)) if recipe.parallel.tensor > 1 => Err(Error::Ignored(format!(
            "{}: not built yet: parallel.tensor with DoRA, as of {}\n  hint: lora.dora = false, or parallel.tensor = 1",
            recipe.place("parallel.tensor"),
            m.name
        ))),
        _ => Ok(()),
    }
}

/// Refuses 8-bit moments in blocks divided by the cuts of matrices.
fn check_moments(recipe: &Recipe, selection: &Selection) -> Result<(), Error> {
    let ranks = recipe.parallel.tensor;
    if ranks == 1 || !recipe.optimizer.name.eight_bit() {
        return Ok(());
    }
    let split = Split { mesh: Mesh { tensor: ranks, ..Mesh::ONE }, ..Split::default() };
    let trained = selection.trained();
    let divided = |t: &&Trained| is_large(t.elements()) && split.piece_of(t).by(STATES).is_none();
    match trained.iter().find(divided) {
        None => Ok(()),
        Some(t) => Err(Error::Ignored(format!(
            "{}: parallel.tensor = {ranks}: 8-bit states are in blocks of {STATES} values, and the cut of {} {:?} is \
             within one\n  hint: optimizer.name = \"adamw\", or another parallel.tensor",
            recipe.place("parallel.tensor"),
            t.name,
            t.shape
        ))),
    }
}

/// Refuses a number of ranks not dividing the number of experts.
///
/// # Errors
/// `parallel.expert` above 1 without experts, or not dividing their number.
pub fn check_experts(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    let (ranks, place) = (recipe.parallel.expert, recipe.place("parallel.expert"));
    let refuse = |why: String| Err(Error::Ignored(format!("{place}: parallel.expert = {ranks}: {why}")));
    match &config.moe {
        _ if ranks == 1 => Ok(()),
        None => refuse(format!("{} has no experts\n  hint: leave it out", config.family.model_type)),
        Some(moe) if moe.experts.is_multiple_of(ranks) => Ok(()),
        Some(moe) => {
            let near: Vec<String> =
                (1..=moe.experts).filter(|n| moe.experts.is_multiple_of(*n)).map(|n| n.to_string()).collect();
            let (n, near) = (moe.experts, near.join(", "));
            refuse(format!(
                "the model has {n} experts a layer, which do not divide by it\n  hint: one of {near}"
            ))
        }
    }
}

/// Refuses more stages than layers, and `parallel.stages` of another number of layers.
///
/// # Errors
/// These.
pub fn check_stages(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    let (p, layers) = (&recipe.parallel, config.layers);
    if partition(config, p.pipeline, &p.stages).is_some() {
        return Ok(());
    }
    Err(Error::Ignored(match p.stages.iter().sum::<usize>() {
        0 => format!(
            "{}: parallel.pipeline = {}: the model has {layers} layers\n  hint: at most {layers}",
            recipe.place("parallel.pipeline"),
            p.pipeline
        ),
        sum => format!(
            "{}: stages of {sum} layers in all, and the model has {layers}\n  hint: leave it out: layers \
             are cut by their work",
            recipe.place("parallel.stages")
        ),
    }))
}

/// The config as trained by a recipe: with the head of the task, and without the format of unread weights.
///
/// # Errors
/// A score head of the checkpoint, with another number of outputs, or for a task of the vocabulary.
pub fn of_task(recipe: &Recipe, config: Config) -> Result<Config, Error> {
    let config = with_head(recipe, config)?;
    Ok(match recipe.model.weights {
        Weights::Random => config.of_random_weights(),
        Weights::Load => config,
    })
}

/// The config with the head of the recipe's task.
fn with_head(recipe: &Recipe, config: Config) -> Result<Config, Error> {
    let (place, task) = (recipe.place("model.source"), recipe.task.word());
    match (recipe.data.scores.labels(), &config.scores) {
        (None, None) => Ok(config),
        (None, Some(_)) => Err(Error::Ignored(format!(
            "{place}: the model has a score head, and task = \"{task}\" trains the vocabulary's\n  \
             hint: task = \"reward\" or \"classify\", or the language model that it was made from"
        ))),
        (Some(ours), Some(theirs)) if ours.len() != theirs.len() => Err(Error::Ignored(format!(
            "{place}: the model's score head has {} outputs ({}), and task = \"{task}\" has {}\n  \
             hint: [classify] with as many labels, or the language model that it was made from",
            theirs.len(),
            theirs.iter().take(8).cloned().collect::<Vec<_>>().join(", "),
            ours.len()
        ))),
        (Some(_), _) if config.is_nested() => Err(Error::Ignored(format!(
            "{place}: task = \"{task}\" puts a score head on the text model of a vision checkpoint, which is not built \
             yet\n  hint: a checkpoint of the text model alone"
        ))),
        (Some(ours), _) => {
            let name = config.family.model_type;
            let why = || {
                format!(
                    "{place}: task = \"{task}\": transformers has no sequence classifier of {name}\n  \
                     hint: another model"
                )
            };
            config.with_scores(ours).ok_or_else(|| Error::Ignored(why()))
        }
    }
}

/// Folder of the adapter in `lora.init`, downloaded if necessary.
///
/// # Errors
/// The adapter cannot be found.
pub fn adapter_dir(settings: &Settings, recipe: &Recipe, progress: bool) -> ft_base::Result<Option<PathBuf>> {
    let Some(written) = recipe.lora.init.adapter() else { return Ok(None) };
    Ok(Some(ft_hub::fetch_adapter_with(settings, &source_path(recipe, written), "main", progress)?))
}

/// Selects the trained modules by the rules of the recipe, or, without rules, as in its adapter.
///
/// # Errors
/// Rules or adapter do not fit the model; nothing is selected.
pub fn selection(
    recipe: &Recipe,
    config: &Config,
    of_adapter: impl FnOnce() -> ft_base::Result<Selection>,
) -> ft_base::Result<Selection> {
    let mut selection = if recipe.train.is_empty() && recipe.lora.init.adapter().is_some() {
        let mut selection = of_adapter()?;
        let place = recipe.place("lora.init");
        selection.train_scores(false).map_err(|why| Error::Ignored(format!("{place}: {why}")))?;
        selection
    } else {
        Selection::from_rules(config, &recipe.train)?
    };
    selection.notes.extend(balancing_note(recipe, config));
    if !recipe.data.train.is_empty() {
        let idle = idle_notes(recipe, &selection);
        selection.notes.extend(idle);
    }
    if selection.parts().is_empty() {
        return Err(adapters::Error::Nothing { place: recipe.place("train").to_string() }.into());
    }
    selection.check_learning_rates(recipe)?;
    check_adapters(recipe, &selection)?;
    check_moments(recipe, &selection)?;
    if recipe.lora.init.adapter().is_none() {
        // Weights of bitsandbytes are known by the files alone, checked when opened.
        let base = initial::prepared(Base::random(config.clone(), 0), recipe, &selection)?;
        check_full(&base, &selection, None)?;
    }
    Ok(selection)
}

/// A warning if transformers adds the load-balancing loss to this model's loss, and the recipe does not mention it.
fn balancing_note(recipe: &Recipe, config: &Config) -> Option<String> {
    const SWITCH: &str = "output_router_logits";
    let is_on = config.key(SWITCH).and_then(Value::as_bool) == Some(true);
    let coefficient = config.balancing_loss().filter(|c| *c != 0.0)?;
    let is_told = is_on && !recipe.has_key("router.aux_loss");
    is_told.then(|| format!(
        "{}: config.json of the model has {SWITCH} = true: transformers adds the load-balancing loss times \
         {coefficient} in training, and router.aux_loss is 0 by default\n  hint: router.aux_loss = {coefficient}, or 0 \
         to train without",
        recipe.place("router.aux_loss")
    ))
}

/// Warnings about keys without effect on the trained modules.
fn idle_notes(recipe: &Recipe, selection: &Selection) -> Vec<String> {
    let (o, parts, layers) = (&recipe.optimizer, selection.parts(), selection.layers);
    let mut notes = Vec::new();
    let mut note = |key: &str, why: String| notes.push(format!("{}: {key} {why}", recipe.place(key)));
    let how = Projection { rank: o.galore_rank, eight_bit: false };
    let is_projected = |t: &TrainedPart<'_>| how.takes(t.part, t.shape(), t.module.unit(layers), layers + 2);
    if o.name.projects() && !parts.iter().any(is_projected) {
        let why = format!(
            "= \"{}\" projects nothing: no matrix of a layer trains in full with both dimensions above \
             optimizer.galore_rank = {}\n  hint: a smaller galore_rank, or optimizer.name = \"adamw\"",
            o.name.word(),
            o.galore_rank
        );
        note("optimizer.name", why);
    }
    if let Some(init) = recipe.lora.init.decomposition() {
        let left = selection.loras().filter(|(m, _)| !initial::from_base(recipe, m));
        let left: BTreeSet<&str> = left.map(|(m, _)| m.last()).collect();
        if !left.is_empty() {
            let names: Vec<&str> = left.into_iter().collect();
            let why = format!("does nothing for {}: LoRA starts as with \"default\" there", names.join(", "));
            note("lora.init", format!("= \"{}\" {why}", init.word()));
        }
    }
    if o.lr_scale_b != 1.0 && !parts.iter().any(|t| t.plus) {
        let why = "does nothing: no LoRA trains but on embeddings\n  hint: leave it out";
        note("optimizer.lr_scale_b", why.into());
    }
    if o.weight_decay != 0.0 && o.decay == Decay::Matrices && !parts.iter().any(|t| t.matrix) {
        let hint = "leave it out, or write optimizer.decay = \"all\"";
        note("optimizer.weight_decay", format!("does nothing: no matrix trains\n  hint: {hint}"));
    }
    notes
}

/// As [`selection`], from the config of the adapter alone; gives `config` its layout. With rules, a missing adapter has
/// no effect.
pub(crate) fn selection_without_weights(recipe: &Recipe, config: &mut Config) -> ft_base::Result<Selection> {
    let dir = || adapter_dir(&Settings::from_env(), recipe, false);
    let dir = match (recipe.train.is_empty(), &config.moe) {
        (true, _) => dir()?,
        (false, Some(_)) => dir().ok().flatten(),
        (false, None) => None,
    };
    let adapter = dir.map(|dir| PeftConfig::load(&dir)).transpose()?;
    if let Some(adapter) = &adapter {
        adapter.set_layout(config);
    }
    let config = &*config;
    selection(recipe, config, || match &adapter {
        Some(adapter) => Ok(Selection::from_peft(config, adapter)?),
        None => Ok(Selection::frozen(config)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn noise_of_the_class_is_refused_with_the_override_that_ends_it() -> anyhow::Result<()> {
        let text = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"attention\"]\n[data]\n\
                    train = [{ source = \"x\", format = \"text\" }]\n";
        let recipe = Recipe::parse(text, "r.toml", &[])?;
        for (family, told) in [
            ("llama", "{ attention_dropout = 0.0 }"),
            ("phi3", "{ attention_dropout = 0.0, resid_pdrop = 0.0 }"),
            ("mixtral", "{ attention_dropout = 0.0, router_jitter_noise = 0.0 }"),
        ] {
            let raw = json!({"model_type": family, "attention_dropout": 0.1, "resid_pdrop": 0.1,
                "router_jitter_noise": 0.1, "embd_pdrop": 0.1});
            let config = Config::parse("config.json", raw.as_object().cloned().unwrap_or_default())?;
            let e = check_model(&recipe, &config).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(e.contains("attention_dropout = 0.1") && e.contains(told), "{family}: {e}");
        }
        Ok(())
    }

    #[test]
    fn an_override_without_effect_is_refused_by_key_and_line() -> anyhow::Result<()> {
        for (set, told) in [
            ("sliding_window = 4", "r.toml:4:18: model.override.sliding_window: models of llama do not"),
            ("rms_norm_ep = 0.5", "model.override.rms_norm_ep: ft does not know this key"),
        ] {
            let text = format!(
                "[model]\nsource = \"m\"\n[model.override]\n{set}\n[[train]]\nmodules = [\"attention\"]\n[data]\n\
                 train = [{{ source = \"x\", format = \"text\" }}]\n"
            );
            let recipe = Recipe::parse(&text, "r.toml", &[])?;
            let raw = json!({"model_type": "llama"}).as_object().cloned().unwrap_or_default();
            let config = Config::overridden("config.json", raw, &recipe.model.overrides)?;
            let e = check_model(&recipe, &config).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(e.contains(told), "{e}");
        }
        Ok(())
    }

    /// By what trains; with effect on a part, nothing is said.
    #[test]
    fn keys_without_effect_on_what_trains_are_told() -> anyhow::Result<()> {
        let raw = json!({"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
            "tie_word_embeddings": false});
        let config = Config::parse("config.json", raw.as_object().cloned().unwrap_or_default())?;
        let notes = |rule: &str, set: &str| -> anyhow::Result<Vec<String>> {
            let text = format!(
                "[model]\nsource = \"m\"\n[[train]]\n{rule}\n[data]\n\
                 train = [{{ source = \"x\", format = \"text\" }}]\n"
            );
            let set: Vec<String> = set.split(' ').map(String::from).collect();
            let recipe = Recipe::parse(&text, "r.toml", &set)?;
            Ok(idle_notes(&recipe, &Selection::from_rules(&config, &recipe.train)?))
        };
        let full = |of: &str| format!("modules = [\"{of}\"]\nmethod = \"full\"");
        let lora = |of: &str| format!("modules = {of}");
        let galore = "optimizer.name=galore optimizer.galore_rank=";
        for (rule, set, told) in [
            (full("mlp"), format!("{galore}32"), "optimizer.name = \"galore\" projects nothing"),
            (full("head"), format!("{galore}4"), "projects nothing"),
            (full("mlp"), format!("{galore}31"), ""),
            (lora("[\"embedding\"]"), "lora.init=pissa".into(), "\"pissa\" does nothing for embed_tokens: "),
            (lora("[\"embedding\", \"q_proj\"]"), "lora.init=olora".into(), "for embed_tokens: "),
            (lora("[\"head\"]"), "lora.init=pissa".into(), ""),
            (
                lora("[\"head\"]"),
                "lora.init=loftq model.quantize=nf4".into(),
                "lora.init = \"loftq\" does nothing for lm_head",
            ),
            (lora("[\"embedding\"]"), "optimizer.lr_scale_b=4".into(), "optimizer.lr_scale_b does nothing"),
            (lora("[\"embedding\", \"q_proj\"]"), "optimizer.lr_scale_b=4".into(), ""),
            (full("norms"), "optimizer.weight_decay=0.1".into(), "optimizer.weight_decay does nothing"),
            (full("norms"), "optimizer.weight_decay=0.1 optimizer.decay=all".into(), ""),
            (full("mlp"), "optimizer.weight_decay=0.1".into(), ""),
        ] {
            let found = notes(&rule, &set)?;
            assert_eq!(found.len(), usize::from(!told.is_empty()), "{rule} {set}: {found:?}");
            assert!(found.iter().all(|n| n.contains(told)), "{rule} {set}: {found:?}");
        }
        Ok(())
    }

    #[test]
    fn a_balancing_loss_of_the_config_alone_is_told() -> anyhow::Result<()> {
        let note = |family: &str, switch: bool, router: &str| -> anyhow::Result<Option<String>> {
            let raw = json!({"model_type": family, "num_hidden_layers": 1, "output_router_logits": switch,
                "router_aux_loss_coef": 0.02});
            let config = Config::parse("config.json", raw.as_object().cloned().unwrap_or_default())?;
            let text = format!(
                "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"attention\"]\n[router]\n{router}\n[data]\n\
                 train = [{{ source = \"x\", format = \"text\" }}]\n"
            );
            Ok(balancing_note(&Recipe::parse(&text, "r.toml", &[])?, &config))
        };
        let told = note("qwen3_moe", true, "")?;
        assert!(told.as_ref().is_some_and(|n| n.contains("router.aux_loss = 0.02")), "{told:?}");
        for (family, switch, router) in [
            ("qwen3_moe", false, ""),
            ("qwen3_moe", true, "aux_loss = 0.01"),
            ("qwen3_moe", true, "aux_loss = 0"),
            ("qwen3", true, ""),
        ] {
            assert_eq!(note(family, switch, router)?, None, "{family} {switch} {router}");
        }
        Ok(())
    }
}
