//! What trains: method, targets of LoRA, layers, quantization, data masks and templates.

use super::context::{Context, Convert, Fate, Outcome, conversions, converted, needless, refused};
use super::draft::{Set, number_text};
use super::prefer::reads_pairs;
use super::read::{Entries, Entry, is_off, number, text, truth, words};
use super::tune::{is_lora, target};
use crate::check::module_regex;
use crate::keys::{Decomposition, Method, Task};
use crate::syntax::quote;
use serde_json::Value;

conversions! {
    method, peft, modules, all_linear, factory_rank, in_full, layers, last_layers, last_modules, initial,
    four_bits, bits, new_tokens, over_length, packing_strategy,
    on_inputs, assistant_only, completion_only, template_file,
    template_name, template_text, thinking, factory_packing, share, special_token, adapters, nested, parameters,
    prepared;
    "pissa" => |ctx, e| ctx.switch("lora.init", quote("pissa"), e),
    "from_scratch" => |ctx, e| ctx.switch("model.weights", quote("random"), e),
    "last_turn" => |ctx, e| ctx.switch("data.mask", quote("last"), e),
    "not_shuffled" => |ctx, e| ctx.switch("data.shuffle", "false", e)
}

/// Whether a file trains by LoRA.
pub(super) fn method_of(tool: &str, entries: &Entries) -> Method {
    let word = |key: &str| entries.get(key).and_then(text).unwrap_or_default().to_lowercase();
    let lora = match tool {
        "axolotl" => !is_off(&Value::from(word("adapter"))),
        "LLaMA-Factory" => !matches!(word("finetuning_type").as_str(), "full" | "freeze"),
        "TRL" => entries.get("use_peft").and_then(truth) == Some(true),
        _ => is_lora(&word("model._component_")),
    };
    if lora { Method::Lora } else { Method::Full }
}

fn method(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).unwrap_or_default().to_lowercase().as_str() {
        "lora" => converted("a [[train]] rule with method = \"lora\", its default"),
        "qlora" => converted(ctx.set("model.quantize", quote("nf4"), e)),
        "" | "none" | "full" => converted("[[train]] rules with method = \"full\""),
        "freeze" => converted("[[train]] rules with method = \"full\", of some layers"),
        other => refused(format!(
            "{other}: LoRA and DoRA are built, as [[train]] rules; LoRA stands in the recipe"
        )),
    }
}

fn peft(_: &mut Context<'_>, e: &Entry) -> Outcome {
    converted(match truth(&e.value) {
        Some(true) => "a [[train]] rule with method = \"lora\", its default",
        _ => "[[train]] rules with method = \"full\"",
    })
}

/// The model's name or folder.
pub(super) fn model(ctx: &Context<'_>) -> Option<String> {
    let keys = ["base_model", "model_name_or_path", "checkpointer.checkpoint_dir"];
    keys.iter().find_map(|k| ctx.get(k)).and_then(text)
}

/// Groups of the model, or a dense model's.
fn groups(ctx: &Context<'_>) -> Vec<String> {
    let known = model(ctx).and_then(|m| ctx.around.groups(&m));
    known.unwrap_or_else(|| ["attention", "mlp", "norms", "embedding", "head"].map(String::from).into())
}

/// All linears in the layers, the router aside.
fn linears(ctx: &Context<'_>) -> Vec<String> {
    groups(ctx).into_iter().filter(|g| matches!(g.as_str(), "attention" | "mlp" | "experts")).collect()
}

/// An entry of PEFT's `target_modules` as one of `train.modules`.
fn module(name: &str, whole: bool) -> Result<String, String> {
    let name = name.rsplit_once(".*").filter(|_| !whole).map_or(name, |_| name);
    Ok(match name {
        "lm_head" => "head".into(),
        "embed_tokens" => "embedding".into(),
        "output_proj" => "o_proj".into(),
        plain if plain.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => plain.into(),
        other => {
            let pattern =
                if whole { other.to_string() } else { format!("(.*[.])?{}", other.replace('.', "[.]")) };
            let entry = format!("/{}/", pattern.trim_start_matches('^').trim_end_matches('$'));
            match module_regex(&entry) {
                Some(Ok(_)) => entry,
                _ => return Err(format!("{other}: no regular expression here; write train.modules")),
            }
        }
    })
}

/// An entry of PEFT's `modules_to_save` as one of `train.modules`: modules with names ending so, and all inside them.
fn saved(name: &str) -> Result<String, String> {
    match name {
        "lm_head" => Ok("head".into()),
        "embed_tokens" => Ok("embedding".into()),
        name if !name.is_empty() && is_name(name) => Ok(format!("/.*{}([.].*)?/", name.replace('.', "[.]"))),
        other => Err(format!("{other}: not the end of a module's name; write train.modules")),
    }
}

/// Whether a word between commas names modules, by no regular expression.
fn is_name(word: &str) -> bool {
    word.trim().bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

fn modules(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if ctx.method == Method::Full {
        return needless("every weight trains: there is no LoRA");
    }
    let list = match &e.value {
        // a regular expression may have commas
        Value::String(one) if ctx.tool != "LLaMA-Factory" && !one.split(',').all(is_name) => {
            vec![one.clone()]
        }
        names => words(names),
    };
    let all = |w: &String| matches!(w.as_str(), "all" | "all-linear" | "linear");
    let whole = e.value.is_string() && list.len() == 1;
    let named: Result<Vec<String>, String> = match list.iter().any(all) {
        true => Ok(linears(ctx)),
        false => list.iter().map(|m| module(m, whole)).collect(),
    };
    match named {
        Ok(named) if named.is_empty() => needless("not set"),
        Ok(named) => {
            let shown = format!("train.0.modules = {named:?}");
            let same = named == list;
            let had = ctx.modules.take().map(|(m, _)| m).unwrap_or_default();
            let union = had.iter().cloned().chain(named.into_iter().filter(|n| !had.contains(n))).collect();
            ctx.modules = Some((union, e.path.clone()));
            if same { Outcome(Fate::Taken, shown) } else { converted(shown) }
        }
        Err(why) => refused(why),
    }
}

/// LLaMA-Factory's alpha is twice the rank by default.
fn factory_rank(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let taken = ctx.take("lora.rank", e);
    match (number(&e.value), ctx.number(&["lora_alpha"])) {
        (Some(rank), None) if ctx.method == Method::Lora => {
            let set = ctx.set("lora.alpha", number_text(2.0 * rank), e);
            converted(format!("{}, {set}: twice the rank, its default", taken.1))
        }
        _ => taken,
    }
}

fn all_linear(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        Some(true) => modules(ctx, &Entry { value: "all".into(), ..e.clone() }),
        _ => needless("off"),
    }
}

/// `lora_target_parameters`: matrices of experts.
fn parameters(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let named = words(&e.value);
    let both = ["gate_up_proj", "down_proj"]
        .iter()
        .all(|matrix| named.iter().any(|n| n.ends_with(&format!("experts.{matrix}"))));
    match () {
        () if is_off(&e.value) => needless("not set"),
        () if both && named.len() == 2 => target(ctx, e, "experts"),
        () => refused("\"experts\" in the modules of a [[train]] rule, which has all matrices of experts"),
    }
}

const SCORE: &str = "a score head, which trains in full, is in place of lm_head";

fn in_full(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if ctx.method == Method::Full || is_off(&e.value) {
        return needless(if is_off(&e.value) { "off" } else { "every weight trains" });
    }
    let mut shown = Vec::new();
    let scores = ctx.task == Task::Reward;
    for name in words(&e.value).into_iter().filter(|n| !scores || !["score", "lm_head"].contains(&n.as_str()))
    {
        match saved(name.trim()) {
            Ok(m) => {
                shown.push(m.clone());
                ctx.in_full.push((m, e.path.clone()));
            }
            Err(why) => return refused(why),
        }
    }
    let told = format!("a [[train]] rule: modules = {shown:?}, method = \"full\"");
    match (scores, shown.is_empty()) {
        (true, true) => needless(SCORE),
        (true, false) => converted(format!("{told}; {SCORE}")),
        _ => converted(told),
    }
}

fn layers(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let indices: Vec<String> = match &e.value {
        Value::Number(n) => vec![n.to_string()],
        other => words(other),
    };
    if indices.is_empty() {
        return needless("not set");
    }
    let list = format!("[{}]", indices.join(", "));
    ctx.layers = Some((list.clone(), e.path.clone()));
    converted(format!("train.0.layers = {list}"))
}

/// LLaMA-Factory's method "freeze": the last layers train, or the first if the number is negative.
fn last_layers(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if ctx.word("finetuning_type") != "freeze" {
        return needless("the method is not freeze");
    }
    let layers = match number(&e.value) {
        Some(n) if n >= 1.0 => format!("\"-{n}:\""),
        Some(n) if n <= -1.0 => format!("\"0-{}\"", -n - 1.0),
        _ => return refused("layers of a [[train]] rule"),
    };
    ctx.layers = Some((layers.clone(), e.path.clone()));
    converted(format!("train.0.layers = {layers}"))
}

fn last_modules(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if ctx.word("finetuning_type") != "freeze" {
        return needless("the method is not freeze");
    }
    let mut modules = Vec::new();
    for name in words(&e.value) {
        let ours: &[&str] = match name.as_str() {
            "all" => return needless("all modules of these layers train"),
            "self_attn" => &["attention"],
            "mlp" => &["mlp", "experts", "router"],
            other => {
                return refused(format!("{other}: modules of a [[train]] rule with method = \"full\""));
            }
        };
        modules.extend(groups(ctx).into_iter().filter(|g| ours.contains(&&**g)));
    }
    let shown = format!("train.0.modules = {modules:?}");
    ctx.modules = Some((modules, e.path.clone()));
    converted(shown)
}

fn initial(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).unwrap_or_default().to_lowercase().as_str() {
        "" | "true" => needless("A is random and B is zero here too"),
        known @ ("pissa" | "olora" | "loftq") => converted(ctx.set("lora.init", quote(known), e)),
        other => refused(format!("{other}: lora.init is default, pissa, olora, loftq or an adapter")),
    }
}

fn four_bits(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        Some(true) if ctx.method == Method::Lora => converted(ctx.set("model.quantize", quote("nf4"), e)),
        Some(true) => refused("weights that train in full are not in 4 bits"),
        _ => needless("off"),
    }
}

/// `use_bnb_nested_quant`: off by default in TRL.
fn nested(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        Some(true) => needless("so it is here too"),
        _ if !ctx.is("load_in_4bit") => needless("weights are not in 4 bits"),
        _ => refused("scales are always quantized too here"),
    }
}

/// LLaMA-Factory merges adapters into the model, but for the last.
fn adapters(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match words(&e.value).len() {
        0 | 1 => ctx.take("lora.init", e),
        _ => refused("ft merge joins all but the last into the model: lora.init = the last"),
    }
}

fn bits(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match number(&e.value) {
        Some(4.0) => four_bits(ctx, &Entry { value: true.into(), ..e.clone() }),
        None => needless("not set"),
        Some(n) => {
            refused(format!("{n} bits: model.quantize = \"nf4\" has 4, or weights are in model.dtype"))
        }
    }
}

fn new_tokens(_: &mut Context<'_>, e: &Entry) -> Outcome {
    match is_off(&e.value) {
        true => needless("not set"),
        false => refused("a [[train]] rule: modules = [\"new_tokens\"], tokens = [..]"),
    }
}

fn over_length(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let word = text(&e.value).unwrap_or_default();
    // axolotl divides texts before it looks at their length
    let kinds = |e: &&Entry| e.path.starts_with("datasets.") && e.path.ends_with(".type");
    let is_text =
        |e: &Entry| text(&e.value).is_some_and(|t| ["completion", "pretrain"].contains(&t.as_str()));
    let (texts, others): (Vec<_>, Vec<_>) = ctx.entries.list.iter().filter(kinds).partition(|e| is_text(e));
    let is_pretraining = ctx.entries.list.iter().any(|e| e.path.starts_with("pretraining_dataset"));
    let ours = match word.as_str() {
        _ if is_pretraining || !texts.is_empty() && others.is_empty() => "split",
        "raise" => "error",
        word => word,
    };
    if !["drop", "truncate", "error", "split"].contains(&ours) {
        return needless("not set");
    }
    let is_mixed = ours != "split" && !texts.is_empty();
    let set = ctx.set("data.over_length", quote(ours), e);
    match is_mixed {
        true => refused(set + " for all sources; there texts are divided, as \"split\" does"),
        false => converted(set),
    }
}

/// `train_on_inputs`, `train_on_prompt`
fn on_inputs(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        Some(true) => converted(ctx.set("data.mask", quote("none"), e) + ": every token is a target"),
        _ => needless("prompts are no targets here either"),
    }
}

fn assistant_only(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        _ if reads_pairs(ctx.task) => needless("completions are compared"),
        Some(true) => needless("the assistant's turns are the targets of conversations"),
        _ => refused(
            "every token of a conversation is a target there: data.mask = \"none\" does so for conversations",
        ),
    }
}

/// With `assistant_only_loss`, turns of other roles are never targets.
fn completion_only(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        Some(false) if ctx.is("assistant_only_loss") => {
            needless("assistant_only_loss says the targets of conversations")
        }
        Some(false) => converted(ctx.set("data.mask", quote("none"), e) + ": prompts are targets too"),
        _ => needless("completions are the targets of prompts with completions"),
    }
}

fn template_file(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let path = text(&e.value).unwrap_or_default();
    match path.ends_with(".jinja") || path.ends_with(".jinja2") {
        true => ctx.take("data.chat_template", e),
        false => refused("data.chat_template is a file with a template: chat_template.jinja of that folder"),
    }
}

/// The text of a template, or a file with it.
fn template_text(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).is_some_and(|t| ["{{", "{%", "\n"].iter().any(|mark| t.contains(mark))) {
        true => refused("write the text into a file: data.chat_template has its path"),
        false => ctx.take("data.chat_template", e),
    }
}

/// Advice on a template by name.
pub(super) const OTHER_TEMPLATE: &str =
    "the model's own chat template is used: where this is another, data.chat_template = a file of it";

fn template_name(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(name) = text(&e.value).filter(|_| !is_off(&e.value)) else { return needless("not set") };
    match name.as_str() {
        "jinja" => needless("chat_template_jinja has it"),
        own if own.starts_with("tokenizer_default") => needless("the model's own template is used"),
        _ if ctx.word("stage") == "pt" => needless("text has no template"),
        _ => refused(OTHER_TEMPLATE),
    }
}

/// `eos_token`, `bos_token`: the one of the model's tokenizer, or another.
fn special_token(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(token) = text(&e.value).filter(|t| !t.is_empty()) else { return needless("not set") };
    let name = e.path.rsplit('.').next().unwrap_or_default();
    let config = model(ctx).and_then(|m| ctx.around.read(&format!("{m}/tokenizer_config.json")));
    let config = config.and_then(|t| serde_json::from_str::<Value>(&t).ok());
    let own = config.as_ref().and_then(|c| c.get(name)).map(|own| own.get("content").unwrap_or(own));
    match own.and_then(text).is_some_and(|own| own == token) {
        true => needless("so it is in the model's tokenizer"),
        false => refused(format!(
            "{name} of the model's tokenizer_config.json is used: where that is another, write it there"
        )),
    }
}

fn thinking(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match truth(&e.value) {
        Some(on) => converted(ctx.set("data.template.enable_thinking", on.to_string(), e)),
        None => needless("not set"),
    }
}

fn factory_packing(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if e.path == "packing" && ctx.is("neat_packing") {
        return needless("neat_packing says it");
    }
    // on by default for raw text, as here
    if e.line == 0 && ctx.word("stage") == "pt" {
        return converted(ctx.set("data.pack", "true", e));
    }
    let mut outcome = ctx.take("data.pack", e);
    if e.path == "packing" && truth(&e.value) == Some(true) {
        outcome.1 += "; documents of a row never see one another (neat_packing there)";
    }
    outcome
}

/// TRL's `packing_strategy`: the splitting strategies lose no tokens of long documents.
fn packing_strategy(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let apart = "packed documents never attend to one another";
    match text(&e.value).unwrap_or_default().as_str() {
        "bfd_split" | "bfd-requeue" | "wrapped" if ctx.is("packing") => {
            converted(ctx.set("data.over_length", quote("split"), e) + "; " + apart)
        }
        _ => needless(apart),
    }
}

/// axolotl's `skip_prepare_dataset`: rows of tokens, unless a type says otherwise.
fn prepared(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if is_off(&e.value) {
        return needless("off");
    }
    let has = |i: usize, key: &str| ctx.draft.get(&format!("data.train.{i}.{key}")).is_some();
    let bare: Vec<usize> = (0..).take_while(|i| has(*i, "source")).filter(|i| !has(*i, "format")).collect();
    let tokens = |i: usize| ctx.set(&format!("data.train.{i}.format"), quote("tokens"), e);
    let set: Vec<String> = bare.into_iter().map(tokens).collect();
    match set.is_empty() {
        true => needless("the type of the data says its format"),
        false => converted(set.join(", ")),
    }
}

/// Evaluation data: a share of the samples, or their number.
fn share(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match number(&e.value) {
        Some(x) if x >= 1.0 => {
            refused(format!("data.eval_share is a share of the samples: {x} over their number"))
        }
        Some(x) if x > 0.0 => ctx.take("data.eval_share", e),
        _ => needless("off"),
    }
}

/// Writes the rules of the recipe, after all keys.
pub(super) fn rules(ctx: &mut Context<'_>) {
    const DEFAULT: &str = "PEFT's default";
    let list =
        |modules: &[String]| format!("[{}]", modules.iter().map(|m| quote(m)).collect::<Vec<_>>().join(", "));
    let full = ctx.method == Method::Full;
    let goes_on = |init: &Set| Decomposition::from_word(init.value.trim_matches('"')).is_none();
    let (modules, origin) = match ctx.modules.take() {
        Some(found) => found,
        None if full => {
            (groups(ctx).into_iter().filter(|g| g != "new_tokens").collect(), "every weight trains".into())
        }
        // axolotl's LoRA has no targets by default
        None if ctx.tool == "axolotl" && ctx.get("lora_target_parameters").is_some_and(|p| !is_off(p)) => {
            ctx.other_task.get_or_insert_with(|| "lora_target_parameters names no modules of ft".into());
            return;
        }
        // an adapter to go on from names the targets
        None if ctx.draft.get("lora.init").is_some_and(goes_on) => return,
        None => (["q_proj", "v_proj"].map(String::from).into(), DEFAULT.into()),
    };
    let within = ctx.layers.take();
    let modules = match &within {
        // parts inside the layers
        Some(_) => modules.into_iter().filter(|m| !matches!(m.as_str(), "embedding" | "head")).collect(),
        None => modules,
    };
    ctx.draft.set("train.0.modules", list(&modules), &origin, false);
    if full {
        ctx.draft.set("train.0.method", quote("full"), &origin, false);
    }
    if let Some((layers, origin)) = within {
        let by_default = ctx.is_default(&origin);
        ctx.draft.set("train.0.layers", layers, &origin, by_default);
    }
    let in_full = std::mem::take(&mut ctx.in_full);
    if let Some((_, origin)) = in_full.first() {
        let modules: Vec<String> = in_full.iter().map(|(m, _)| m.clone()).collect();
        ctx.draft.set("train.1.modules", list(&modules), origin, false);
        ctx.draft.set("train.1.method", quote("full"), origin, false);
    }
    if origin == DEFAULT {
        let told = format!("train.0.modules = {}: PEFT's of most models", list(&modules));
        ctx.told.push(("lora_target_modules".into(), told));
    }
}
