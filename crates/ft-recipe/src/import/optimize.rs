//! Optimizer, schedule, regularization.

use super::context::{Context, Convert, Fate, Outcome, conversions, converted, needless, refused};
use super::draft::number_text;
use super::read::{Entry, is_off, number, text, words};
use super::train::model;
use crate::keys::{Method, Task};
use crate::syntax::quote;

/// The first learning rate of a warm-up in transformers' schedules.
const WARMUP: &str = "; the first update has lr / warm-up steps, not 0";

conversions! {
    optimizer, optimizer_argument, galore, galore_rank, galore_modules, decay_of_all, schedule_argument,
    cosine_min_lr, warmup, router_loss;
    "betas" => |ctx, e| of_adamw(ctx, e, betas),
    "epsilon" => |ctx, e| of_adamw(ctx, e, |ctx, e| ctx.take("optimizer.eps", e)),
    "decay" => |ctx, e| of_adamw(ctx, e, |ctx, e| ctx.take("optimizer.weight_decay", e)),
    "factory_galore" => |ctx, e| match ctx.is("use_galore") {
        true => ctx.take(&format!("optimizer.{}", e.path), e),
        false => needless("GaLore is not used"),
    },
    "rate" => |ctx, e| match is_of_muon(ctx) {
        true => refused("of Muon, many times that of AdamW: choose optimizer.lr"),
        false => ctx.take("optimizer.lr", e),
    },
    "schedule" => |ctx, e| ctx.take_word("optimizer.schedule", e)
}

fn optimizer(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if ctx.is("use_galore") {
        return match ctx.word("optim").as_str() {
            "adafactor" => {
                refused("GaLore has the moments of AdamW: optimizer.name = \"galore\" or \"galore8bit\"")
            }
            _ => needless("use_galore chooses it"),
        };
    }
    let mut taken = ctx.take_word("optimizer.name", e);
    if taken.0 == Fate::NotSupported {
        taken.1 += "; the learning rate is of that optimizer: choose optimizer.lr";
    }
    let Some(own) = trainers_galore(ctx) else { return taken };
    let set: Vec<String> = own.iter().map(|(key, value)| ctx.set(key, *value, e)).collect();
    converted(format!("{}, {}: its own there", taken.1, set.join(", ")))
}

/// Whether Muon trains, with learning rates of another size.
fn is_of_muon(ctx: &Context<'_>) -> bool {
    ctx.is("use_muon") || ["optim", "optimizer"].iter().any(|key| ctx.word(key).contains("muon"))
}

/// Keys with other defaults than AdamW's under GaLore of transformers' Trainer: it hands the learning rate alone to
/// galore_torch. `None` for other optimizers.
fn trainers_galore(ctx: &Context<'_>) -> Option<&'static [(&'static str, &'static str)]> {
    match ["optim", "optimizer"].map(|key| ctx.word(key)).concat().as_str() {
        _ if ctx.is("use_galore") => None,
        "galore_adamw" | "galore_adamw_layerwise" => Some(&[("optimizer.eps", "1e-6")]),
        "galore_adamw_8bit" => Some(&[("optimizer.weight_decay", "0.01"), ("optimizer.decay", "\"all\"")]),
        _ => None,
    }
}

/// `use_galore` of LLaMA-Factory, with 8-bit moments by `optim`.
fn galore(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let name = match ctx.word("optim").as_str() {
        "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" => "galore8bit",
        _ => "galore",
    };
    ctx.switch("optimizer.name", quote(name), e)
}

fn galore_rank(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match ctx.word("optimizer").contains("galore") {
        true => ctx.take("optimizer.galore_rank", e),
        false => needless("the optimizer is not GaLore"),
    }
}

/// `optim_target_modules`: all linears, or some of them.
fn galore_modules(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    const ALL: &str = "GaLore projects all matrices that train in full";
    let named = words(&e.value).join(", ");
    match named.replace('_', "-").as_str() {
        "" => needless("not set"),
        _ if !["optim", "optimizer"].iter().any(|key| ctx.word(key).contains("galore")) => {
            needless("the optimizer is not GaLore")
        }
        "all-linear" => needless(ALL),
        _ => refused(format!("{ALL}, not those of {named} alone")),
    }
}

/// `rank=64, update_proj_gap=100, scale=0.1`, or one of them as a key of a table
fn optimizer_argument(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let written = match (e.path.split_once('.'), text(&e.value)) {
        (Some((_, name)), Some(value)) => format!("{name}={value}"),
        (None, Some(written)) => written,
        (_, None) if is_off(&e.value) => return needless("not set"),
        (_, None) => return refused("keys of [optimizer] are in ft schema"),
    };
    let (mut set, mut unknown) = (Vec::new(), Vec::new());
    for argument in written.split(',').map(str::trim).filter(|a| !a.is_empty()) {
        let (name, value) = argument.split_once('=').unwrap_or((argument, ""));
        let key = match name.trim() {
            "rank" => "optimizer.galore_rank",
            "update_proj_gap" => "optimizer.galore_gap",
            "scale" => "optimizer.galore_scale",
            _ => "",
        };
        match value.trim().parse::<f64>().ok().filter(|_| !key.is_empty()) {
            Some(x) => set.push(ctx.set(key, number_text(x), e)),
            None => unknown.push(argument),
        }
    }
    match unknown.is_empty() {
        true => converted(set.join(", ")),
        false => {
            refused(format!("{} has no key here; keys of [optimizer] are in ft schema", unknown.join(", ")))
        }
    }
}

/// Converts an argument of AdamW, without effect under GaLore of transformers' Trainer.
fn of_adamw(ctx: &mut Context<'_>, e: &Entry, convert: Convert) -> Outcome {
    match trainers_galore(ctx) {
        Some(_) => needless("the Trainer does not hand it to GaLore's optimizer"),
        None => convert(ctx, e),
    }
}

fn betas(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let (a, b) = (ctx.number(&["adam_beta1"]).unwrap_or(0.9), ctx.number(&["adam_beta2"]).unwrap_or(0.999));
    converted(ctx.set("optimizer.betas", format!("[{a:?}, {b:?}]"), e))
}

/// AdamW of PyTorch decays all trained weights, norms too.
fn decay_of_all(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if e.line == 0 && !ctx.word("optimizer._component_").contains("adamw") {
        return needless("the default of another optimizer than AdamW is 0, as here");
    }
    let outcome = ctx.take("optimizer.weight_decay", e);
    if ctx.method == Method::Full && number(&e.value).is_some_and(|x| x > 0.0) {
        let set = ctx.set("optimizer.decay", quote("all"), e);
        return converted(format!("{}, {set}: norms decay there too", outcome.1));
    }
    outcome
}

fn schedule_argument(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match e.path.rsplit('.').next() {
        Some("min_lr") => ctx.take("optimizer.min_lr", e),
        Some("min_lr_rate") => min_lr_ratio(ctx, e),
        Some("num_cycles") if number(&e.value) == Some(0.5) => needless("half a cosine is what there is"),
        _ => refused("the schedules are cosine, linear and constant, with warm-up and optimizer.min_lr"),
    }
}

/// axolotl's `cosine_min_lr_ratio`: of one schedule.
fn cosine_min_lr(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match ctx.word("lr_scheduler").as_str() {
        "cosine" => min_lr_ratio(ctx, e),
        other => needless(format!("of the schedule \"cosine\" alone there, and this is {other:?}")),
    }
}

fn min_lr_ratio(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let rate = ctx.number(&["learning_rate"]).filter(|_| !is_of_muon(ctx));
    match (number(&e.value), rate) {
        (Some(ratio), Some(lr)) => {
            // to the digits that were written
            let min: f64 = format!("{:.12e}", ratio * lr).parse().unwrap_or(ratio * lr);
            let set = ctx.set("optimizer.min_lr", number_text(min), e);
            converted(format!("{set}: {ratio} x {lr:?}"))
        }
        (Some(_), None) => refused("write optimizer.min_lr"),
        _ => needless("not set"),
    }
}

fn warmup(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let constant = ["lr_scheduler_type", "lr_scheduler"].iter().any(|k| ctx.word(k) == "constant");
    let Some(x) = number(&e.value) else { return needless("not set") };
    if constant && x > 0.0 {
        return needless("the schedule \"constant\" has no warm-up there");
    }
    let steps = ctx.number(&["warmup_steps"]).filter(|s| *s > 0.0);
    match (e.path.as_str(), steps) {
        _ if e.line == 0 && ctx.get("warmup_steps").is_some() => needless("warmup_steps says it"),
        _ if x == 0.0 => needless("off"),
        ("warmup_ratio", Some(steps)) => needless(format!("warmup_steps = {steps} wins")),
        (_, _) if x < 1.0 => {
            let set = ctx.set("optimizer.warmup_ratio", number_text(x), e);
            match (ctx.tool, e.line) {
                ("axolotl", 0) => converted(format!("{set} (100 steps at the most there){WARMUP}")),
                _ => converted(set + WARMUP),
            }
        }
        _ => {
            let Outcome(fate, told) = ctx.take("optimizer.warmup_steps", e);
            Outcome(fate, if fate <= Fate::Converted { told + WARMUP } else { told })
        }
    }
}

/// `router_aux_loss_coef`: by default the model's own, in TRL's trainers of these tasks.
fn router_loss(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if e.line > 0 {
        return ctx.take("router.aux_loss", e);
    }
    if !matches!(ctx.task, Task::Sft | Task::Dpo | Task::Kto) {
        return needless("its trainer adds none by default");
    }
    match model(ctx).and_then(|name| ctx.around.router_loss(&name)) {
        Some(0.0) => needless("the model has none"),
        Some(own) => converted(ctx.set("router.aux_loss", number_text(own), e) + ": the model's own"),
        None => {
            refused("for a mixture of experts: router.aux_loss = router_aux_loss_coef of its config.json")
        }
    }
}
