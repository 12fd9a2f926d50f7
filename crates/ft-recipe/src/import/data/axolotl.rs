//! Data sets of axolotl: `datasets`, `test_datasets`, `pretraining_dataset`.

use super::source::{Keys, Source, names, origin, value, word};
use crate::import::context::{Context, Outcome, converted, needless, refused};
use crate::import::prefer::reads_pairs;
use crate::import::read::{is_off, text, words};
use crate::import::train::OTHER_TEMPLATE;
use crate::keys::{Format, Task};
use crate::syntax::quote;
use serde_json::Value;

/// Kinds of files, also taken as a path by axolotl.
const KINDS: &[&str] = &["json", "csv", "parquet", "text", "arrow"];

/// Default prompt of a type with columns of its own.
const PLAIN_PROMPT: &str = "the prompt there is \"{instruction} {input} \", without a chat template: \
                            write prompts with that text, and completions, into the rows";

pub(super) fn source(ctx: &mut Context<'_>, keys: &Keys) -> Vec<Source> {
    let origin = origin(keys, "datasets");
    let path = word(keys, "path").unwrap_or_default();
    let files = value(keys, "data_files").map(words).unwrap_or_default();
    let kind = KINDS.contains(&path.as_str());
    let list = if origin.starts_with("test") { "data.eval" } else { "data.train" };
    let mut source = Source::named(&path, origin);
    for (at, key, value) in keys {
        let outcome = match key.as_str() {
            "path" if kind && !files.is_empty() => needless("the kind of files: their names tell it"),
            "path" => converted(format!("{list}: source = {path:?}")),
            "data_files" if files.is_empty() => needless("not set"),
            "data_files" if kind || path.is_empty() => {
                converted(format!("a source each: {}", files.join(", ")))
            }
            "data_files" => converted(format!("files below {path}: {}", files.join(", "))),
            key => match preferred(ctx.task, &mut source, keys, key, value) {
                Some(outcome) => outcome,
                None => of_key(&mut source, keys, key, value),
            },
        };
        ctx.of_data.insert(at.clone(), outcome);
    }
    // raw text is the form of pretraining data
    if origin.starts_with("pretraining") && !source.keys.contains_key("format") {
        source.format("text");
    }
    let folder = if kind || path.is_empty() { String::new() } else { format!("{path}/") };
    source.of_files(&files, &folder)
}

/// Keys of data for preference tasks.
fn preferred(task: Task, source: &mut Source, keys: &Keys, key: &str, value: &Value) -> Option<Outcome> {
    let key = key.strip_prefix("type.").unwrap_or(key);
    let name = key.strip_prefix("field_").filter(|_| reads_pairs(task));
    Some(match name {
        Some(name @ ("prompt" | "chosen" | "rejected" | "completion" | "label")) => source.field(name, value),
        Some("messages") => source.field("prompt", value),
        _ if key == "type" && reads_pairs(task) && !is_off(value) => {
            let kind = text(value).unwrap_or_default();
            let of_pairs = task == Task::Dpo || task == Task::Simpo;
            let columns: &[(&str, &str)] = match kind.rsplit('.').next().unwrap_or_default() {
                "intel" => &[("prompt", "question")],
                "icr" => &[("prompt", "input")],
                _ if kind.starts_with("bradley_terry") => &[("prompt", "input")],
                "default" if of_pairs && kind.starts_with("chat_template") => &[("prompt", "messages")],
                "argilla" if of_pairs => &[
                    ("prompt", "instruction"),
                    ("chosen", "chosen_response"),
                    ("rejected", "rejected_response"),
                ],
                _ => &[],
            };
            let given = |key: &str| word(keys, &format!("field_{key}")).is_some();
            for &(ours, theirs) in columns {
                if !(given(ours) || ours == "prompt" && given("messages")) {
                    source.fields.insert(ours.into(), theirs.into());
                }
            }
            let told = format!("format = {:?}", task.format().map_or("", Format::word));
            let form: String = match kind.split('.').next().unwrap_or_default() {
                "chat_template" | "bradley_terry" => "through the model's chat template".into(),
                name @ ("chatml" | "llama3") if kind.ends_with(".default") => format!(
                    "through the model's chat template, there that of {name}; without a column prompt, \
                     fields.prompt = \"input\", \"question\" or \"instruction\""
                ),
                name @ ("chatml" | "llama3" | "zephyr") => {
                    format!("through the model's chat template, there that of {name}")
                }
                _ => return Some(converted(told + ": texts as they are")),
            };
            source.keys.insert("form", quote("chat"));
            converted(format!("{told}, form = \"chat\": {form}"))
        }
        _ => return None,
    })
}

fn of_key(source: &mut Source, keys: &Keys, key: &str, value: &Value) -> Outcome {
    let is = |word: &str| text(value).as_deref() == Some(word);
    match key {
        "name" => source.put("config", value),
        "split" => source.put("split", value),
        "revision" => source.put("revision", value),
        "ds_type" => needless("the files' names tell their kind"),
        "type" => of_type(source, keys, value),
        "field" | "text_column" => source.field("text", value),
        "field_messages" => source.field("messages", value),
        "field_tools" => source.field("tools", value),
        "field_system" | "type.field_system" => source.field("system", value),
        "field_instruction" | "type.field_instruction" => user_defined(source, keys, key, value),
        "field_input" | "type.field_input" => user_defined(source, keys, key, value),
        "field_output" | "type.field_output" => user_defined(source, keys, key, value),
        "message_field_role" | "message_property_mappings.role" => named_as(value, names("role")),
        "message_field_content" | "message_property_mappings.content" => named_as(value, names("content")),
        "roles_to_train" if words(value) == ["assistant"] || words(value) == ["gpt"] => {
            needless("the assistant's turns are the targets")
        }
        "roles_to_train" => refused("the assistant's turns are the targets, or every token: mask = \"none\""),
        "train_on_eos" | "train_on_eot" if value.is_null() => needless("not set"),
        "train_on_eos" | "train_on_eot" if is("turn") => needless("a turn's end is a target here too"),
        "train_on_eos" | "train_on_eot" => refused("the end of each of the assistant's turns is a target"),
        "chat_template" if is("tokenizer_default") => needless("the model's own template is used"),
        "chat_template" | "conversation" if !is_off(value) => refused(OTHER_TEMPLATE),
        "chat_template_jinja" if !is_off(value) => {
            refused("data.chat_template: one template for all sources")
        }
        "trust_remote_code" => needless("no code of a data set is ever run"),
        k if k.starts_with("roles.") => roles(k, value),
        "shards" | "shards_idx" | "preprocess_shards" | "skip" if is_off(value) => needless("off"),
        "shards" | "shards_idx" => refused("weight = 0.5 takes half of the samples"),
        "type.format" | "type.no_input_format" | "type.system_format" | "type.system_prompt"
            if !is_off(value) =>
        {
            refused(
                "the chat template forms the prompt, or Alpaca's; else write prompt and completion into the rows",
            )
        }
        _ if is_off(value) => needless("off"),
        _ => refused("no such key of a source: ft schema lists them"),
    }
}

/// A column; the first one of a type without `type.format` tells the default prompt.
fn user_defined(source: &mut Source, keys: &Keys, key: &str, value: &Value) -> Outcome {
    source.format("alpaca");
    let told = source.field(key.rsplit("field_").next().unwrap_or_default(), value);
    let first = keys
        .iter()
        .map(|(_, k, _)| k.as_str())
        .find(|k| k.starts_with("type.field_") && *k != "type.field_system");
    match first == Some(key) && word(keys, "type.format").is_none() {
        true => refused(format!("{}; {PLAIN_PROMPT}", told.1)),
        false => told,
    }
}

/// `roles`: names in the rows of a role.
fn roles(key: &str, value: &Value) -> Outcome {
    let role = key.trim_start_matches("roles.");
    match words(value).into_iter().find(|name| !names(role).contains(&name.as_str())) {
        Some(name) => refused(format!("{name:?} is no name of {role} here: rename it in the rows")),
        None => needless("user, human, assistant, gpt, system and tool are known"),
    }
}

/// Names inside a message: OpenAI's and ShareGPT's are read.
fn named_as(value: &Value, known: &[&str]) -> Outcome {
    match text(value).as_deref() {
        Some(name) if known.contains(&name) => needless(format!("{name:?} is read as it is")),
        _ => refused(format!("messages have {}: rename it in the rows", known.join(" or "))),
    }
}

/// Rows with a prompt of axolotl's own.
fn other_prompt(source: &mut Source, kind: &str) -> Outcome {
    source.format("alpaca");
    if kind.ends_with("load_qa") {
        source.fields.insert("prompt".into(), "question".into());
        source.fields.insert("completion".into(), "answer".into());
        source.format("completion");
    }
    let lost = match kind.starts_with("reflection") {
        true => "the thought and its reflection are targets too there",
        false => "the prompt has a text of its own there",
    };
    refused(format!("{kind}: {lost}: write prompts with that text, and completions, into the rows"))
}

fn of_type(source: &mut Source, keys: &Keys, value: &Value) -> Outcome {
    let Some(kind) = text(value).filter(|_| !is_off(value)) else {
        return needless("found by the first row");
    };
    let base = kind.split([':', '.']).next().unwrap_or_default();
    let style = kind.split_once(':').map_or("instruct", |(_, style)| style);
    match base {
        "chat_template" | "sharegpt" => source.format("messages"),
        "completion" | "pretrain" => source.format("text"),
        "alpaca" | "gpteacher" | "oasst" if style == "instruct" => {
            let outcome = source.format("alpaca");
            source.keys.insert("form", quote("plain"));
            let columns: &[(&str, &str)] = match base {
                "gpteacher" => &[("output", "response")],
                "oasst" => &[("instruction", "INSTRUCTION"), ("output", "RESPONSE")],
                _ => &[],
            };
            source.fields.extend(columns.iter().map(|(ours, theirs)| (ours.to_string(), theirs.to_string())));
            Outcome(outcome.0, outcome.1 + ": the text of Alpaca's prompt")
        }
        "alpaca" | "gpteacher" | "oasst" | "alpaca_chat" | "alpaca_w_system" | "reflection" => {
            other_prompt(source, &kind)
        }
        "input_output" => refused("parts with a label each: write tokens with labels, format = \"tokens\""),
        _ if word(keys, "field_messages").is_some() => source.format("messages"),
        other => refused(format!("{other}: the format is found by the first row, or named: format")),
    }
}
