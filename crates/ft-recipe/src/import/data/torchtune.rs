//! Data sets of torchtune: builders with arguments.

use super::source::{Keys, Source, origin, value, word};
use crate::import::context::{Context, Outcome, converted, needless, refused};
use crate::import::read::{is_off, truth, words};
use crate::import::table::Builder;
use crate::keys::Format;
use crate::syntax::quote;
use serde_json::Value;

/// What is lost of Alpaca's builders.
const ALPACA: &str = "; there the user's message has the text of Alpaca's prompt, here instruction and input alone: \
                      write prompts with that text, and completions, into the rows";

pub(super) fn source(ctx: &mut Context<'_>, keys: &Keys) -> Vec<Source> {
    let origin = origin(keys, "dataset");
    let component = word(keys, "_component_").unwrap_or_default();
    let builder = component.rsplit('.').next().unwrap_or_default();
    let tables = ctx.tables;
    let known = tables.torchtune_data.get(builder);
    let mut source = Source::named(word(keys, "source").unwrap_or_default(), origin);
    let files = value(keys, "data_files").map(words).unwrap_or_default();
    let mut on_input = false;
    if let Some(known) = known {
        source.format(&known.format);
        source.fields = known.fields.clone();
        if source.source.is_empty() {
            source.source = known.source.clone().unwrap_or_default();
        }
        if let Some(config) = &known.config {
            source.keys.insert("config", quote(config));
        }
        if let Some(form) = &known.form {
            source.keys.insert("form", quote(form));
        }
        on_input = known.on_input;
    }
    if let Some(given) = value(keys, "train_on_input").and_then(truth) {
        on_input = given;
    }
    if on_input && known.is_some_and(|k| k.format != "text") {
        source.keys.insert("mask", quote("none"));
    }
    let evaluates = origin.starts_with("dataset_val");
    for (at, key, value) in keys {
        let outcome = match key.as_str() {
            "_component_" => match known {
                Some(known) => of_builder(&source, known, on_input),
                None => refused(format!("{builder}: name the rows and their format in data.train")),
            },
            "packed" => packed(ctx, at, value, evaluates),
            "split_across_pack" if truth(value) == Some(true) => {
                ctx.draft.set("data.over_length", quote("split"), at, false);
                converted("data.over_length = \"split\": longer documents are divided, others stay whole")
            }
            "source" if !files.is_empty() => needless("the kind of files: their names tell it"),
            key => of_key(&mut source, key, value, &files),
        };
        ctx.of_data.insert(at.clone(), outcome);
    }
    if files.is_empty() && source.source.is_empty() { Vec::new() } else { source.of_files(&files, "") }
}

fn of_builder(source: &Source, known: &Builder, on_input: bool) -> Outcome {
    let mut told = format!("source = {:?}", source.source);
    if let Some(form) = &known.form {
        told += &format!(", form = {form:?}: texts go through the model's chat template");
    }
    if on_input {
        told += ", mask = \"none\": prompts are targets too";
    }
    match known.format == Format::Alpaca.word() {
        true => refused(told + ALPACA),
        false => converted(told),
    }
}

/// `packed` of a data set; those of training come first.
fn packed(ctx: &mut Context<'_>, at: &str, value: &Value, evaluates: bool) -> Outcome {
    let Some(pack) = truth(value).map(|pack| pack.to_string()) else { return needless("not set") };
    match ctx.draft.get("data.pack") {
        Some(set) if set.value == pack => needless(format!("data.pack is that of {}", set.origin)),
        None if !evaluates => {
            let told = format!("data.pack = {pack}");
            ctx.draft.set("data.pack", pack, at, false);
            converted(told)
        }
        _ => refused("data.pack is one key for all sources, of training and evaluation"),
    }
}

fn of_key(source: &mut Source, key: &str, value: &Value, files: &[String]) -> Outcome {
    let completion = source.keys.get("format").is_some_and(|f| f == "\"completion\"");
    match key {
        "source" => converted(format!("source = {:?}", source.source)),
        "data_files" => converted(format!("source = {}", files.join(", "))),
        "split" => source.put("split", value),
        "name" | "subset" => source.put("config", value),
        "train_on_input" => converted(format!(
            "mask: prompts are {}targets",
            if truth(value) == Some(true) { "" } else { "no " }
        )),
        "column" => source.field("text", value),
        "conversation_column" => source.field("messages", value),
        "conversation_style" => needless("the names of OpenAI and of ShareGPT are read as they are"),
        "column_map.input" => source.field(if completion { "prompt" } else { "input" }, value),
        "column_map.output" => source.field(if completion { "completion" } else { "output" }, value),
        "column_map.prompt"
        | "column_map.chosen"
        | "column_map.rejected"
        | "column_map.instruction"
        | "column_map.system" => source.field(key.trim_start_matches("column_map."), value),
        "add_eos" if truth(value) == Some(false) => refused("documents end with the end-of-text token"),
        "add_eos" => needless("documents end with the end-of-text token"),
        _ if is_off(value) => needless("off"),
        "new_system_prompt" => refused("write system messages into the rows"),
        _ => refused("no such key of a source: ft schema lists them"),
    }
}
