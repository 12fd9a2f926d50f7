//! Preference optimization and reward models: the task, its loss, and their parameters.

use super::context::{Context, Convert, Outcome, conversions, converted, needless, refused};
use super::read::{Entries, Entry, is_off, number, text, truth, words};
use super::tune;
use crate::keys::Task;
use crate::syntax::quote;

/// Keys that name the loss.
const LOSSES: &[&str] = &["pref_loss", "loss_type", "dpo_loss_type"];
/// First parts of keys for losses without a counterpart.
const OTHER_LOSSES: [&str; 7] =
    ["use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_eaft", "early_exit_loss", "diffusion", "kd_loss"];
const NO_LOSS: &str = "it trains with a loss that ft does not have";
/// The program of LLaMA-Factory, the key of the command's verb.
const VERB: &str = "llamafactory-cli";

conversions! {
    task, verb, pref_loss, pref_beta, pref_nll, smoothing, dropout, factory_reference;
    "no_dropout" => |_, e| match truth(&e.value) {
        Some(false) => needless("lora.dropout says it"),
        _ => needless("lora.dropout is 0, its default"),
    }
}

/// Whether rows are pairs or rated completions.
pub(super) fn reads_pairs(task: Task) -> bool {
    task.prefers() || task == Task::Reward
}

/// The task of a configuration; an error names a task or a loss missing in ft.
pub(super) fn task_of(tool: &str, entries: &Entries) -> Result<Task, String> {
    let word = |key: &str| {
        let all = entries.get(key).map(words).unwrap_or_default();
        all.join(", ").rsplit('.').next().unwrap_or_default().to_lowercase()
    };
    let is = |key: &str| entries.get(key).and_then(truth) == Some(true);
    for e in entries.list.iter().filter(|e| !is_off(&e.value)) {
        let first = e.path.split('.').next().unwrap_or_default();
        if OTHER_LOSSES.contains(&first) {
            let instead =
                if first == "kd_loss" { " (task = \"distill\" has the rows of ft logits)" } else { "" };
            return Err(format!("{NO_LOSS}, {first}{instead}"));
        }
    }
    let named = match tool {
        "axolotl" if is("process_reward_model") => "process_reward_model".into(),
        "axolotl" if is("reward_model") => "reward".into(),
        "axolotl" => word("rl"),
        "LLaMA-Factory" => match word(VERB).as_str() {
            "" | "train" => word("stage"),
            other => return Err(format!("{VERB} {other} does not train")),
        },
        "TRL" if entries.get("command").is_none() && entries.get("reward_funcs").is_some() => "grpo".into(),
        "TRL" => word("command"),
        _ => tune::task_of(entries)?,
    };
    let loss = LOSSES.iter().map(|key| word(key)).find(|w| !w.is_empty()).unwrap_or_default();
    Ok(match (named.as_str(), loss.as_str()) {
        ("", _) if tool == "TRL" && entries.get("beta").is_some() => {
            let which = "`command: dpo`, kto, orpo or cpo";
            return Err(format!("beta is of a preference trainer, and which one is not said: add {which}"));
        }
        ("", _) if tool == "TRL" && entries.get("center_rewards_coefficient").is_some() => Task::Reward,
        ("rm" | "reward" | "reward_modeling", _) => Task::Reward,
        ("" | "sft", "dft") => return Err(format!("{NO_LOSS}, dft")),
        ("" | "sft" | "pt" | "train" | "none" | "false", _) => Task::Sft,
        ("dpo", "" | "sigmoid" | "ipo") | ("ipo", _) => Task::Dpo,
        ("orpo", _) | ("dpo", "orpo") => Task::Orpo,
        ("simpo", _) | ("dpo" | "cpo", "simpo") => Task::Simpo,
        ("cpo", "" | "sigmoid") => Task::Cpo,
        ("kto", "" | "sigmoid" | "kto") => Task::Kto,
        (named, "") => return Err(format!("it trains with a task that ft does not have, {named}")),
        (named, loss) => {
            return Err(format!("{NO_LOSS}, {loss} of {named}"));
        }
    })
}

/// The verb of LLaMA-Factory's command.
fn verb(ctx: &mut Context<'_>, _: &Entry) -> Outcome {
    match &ctx.other_task {
        Some(other) => refused(other.clone()),
        None => needless("stage says the task"),
    }
}

/// `rl`, `reward_model`, `stage`, the verb of a command, a loss of torchtune.
fn task(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if let Some(other) = &ctx.other_task {
        return refused(other.clone());
    }
    if is_off(&e.value) {
        return needless("off");
    }
    if ctx.task == Task::Sft && ctx.word("stage") == "pt" {
        let split = ctx.set("data.over_length", quote("split"), e);
        return converted(format!("format = \"text\" of each source, {split}"));
    }
    if ctx.task == Task::Sft {
        return needless("task = \"sft\" is next-token training");
    }
    let mut set = ctx.set("task", quote(ctx.task.word()), e);
    if text(&e.value).is_some_and(|t| t.eq_ignore_ascii_case("ipo")) {
        set += &format!(", {}", ctx.set("preference.loss", quote("ipo"), e));
    }
    // its trainer of reward models leaves such pairs out
    if ctx.tool == "TRL" && ctx.task == Task::Reward {
        set += &format!(", {}", ctx.set("data.over_length", quote("drop"), e));
    }
    converted(set)
}

fn pref_loss(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let word = words(&e.value).join(", ").to_lowercase();
    match (ctx.task, word.as_str()) {
        (Task::Sft, _) if ctx.other_task.is_some() => refused("ft does not have that loss"),
        (Task::Sft, "" | "nll") => needless("so it is here too"),
        (Task::Sft, _) if e.path == "loss_type" => {
            refused("the loss is the cross-entropy of the targets of a step")
        }
        (Task::Sft, _) => needless("of preference tasks"),
        (Task::Dpo, "ipo") => converted(ctx.set("preference.loss", quote("ipo"), e)),
        (task, _) => needless(format!("task = {:?} has that loss", task.word())),
    }
}

/// `ref_model` of LLaMA-Factory, and `ref_model_adapters` over it.
fn factory_reference(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let (reference, model) = (ctx.get("ref_model"), ctx.get("model_name_or_path"));
    let (given, own) = (reference.is_some(), reference == model);
    let adapted = ctx.get("ref_model_adapters").is_some_and(|a| !is_off(a));
    match e.path.as_str() {
        _ if is_off(&e.value) => needless("not set"),
        "ref_model" if own && adapted => needless("ref_model_adapters is over the model itself"),
        "ref_model_adapters" if !given => needless("it is read beside ref_model only"),
        "ref_model_adapters" if !own => {
            refused("preference.reference = the model that ft merge makes of ref_model and this adapter")
        }
        _ => ctx.take("preference.reference", e),
    }
}

/// Scale of the rewards; `orpo_alpha` is ORPO's.
fn pref_beta(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let of_task = ctx.task.prefers() && (e.path != "orpo_alpha" || ctx.task == Task::Orpo);
    match of_task {
        false => needless("of another task"),
        // 0.1 is the default here too, but for SimPO
        true if e.line == 0 && ctx.task != Task::Simpo => needless("so it is here too"),
        true => ctx.take("preference.beta", e),
    }
}

/// `cpo_alpha`: weight of the likelihood of the chosen completion.
fn pref_nll(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match ctx.task {
        Task::Cpo => ctx.take("preference.nll", e),
        Task::Simpo if number(&e.value) != Some(0.0) => {
            refused("task = \"simpo\" has no term of the likelihood: it is as cpo_alpha = 0")
        }
        Task::Simpo => needless("so it is here too"),
        _ => needless("of another task"),
    }
}

/// `label_smoothing`, `dpo_label_smoothing`: of CPO's trainer in TRL, and of DPO's in LLaMA-Factory.
fn smoothing(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match (ctx.tool, ctx.task) {
        ("TRL", Task::Cpo | Task::Simpo) | ("LLaMA-Factory", Task::Dpo) => {
            ctx.take("preference.label_smoothing", e)
        }
        (_, Task::Dpo) => needless("TRL's losses \"sigmoid\" and \"ipo\" have no smoothing"),
        _ => needless("of another task"),
    }
}

/// `lora_dropout`: trainers on pairs turn every dropout off, but for LLaMA-Factory's of reward models.
fn dropout(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let kept = ctx.get("disable_dropout").and_then(truth) == Some(false)
        || ctx.task == Task::Reward && ctx.tool == "LLaMA-Factory";
    match reads_pairs(ctx.task) && !kept {
        true => needless("training with preferences has no dropout there"),
        false => ctx.take("lora.dropout", e),
    }
}
