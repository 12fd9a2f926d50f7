//! Data sets of LLaMA-Factory: names, described by `dataset_info.json` of `dataset_dir`.

use super::source::{Source, names};
use crate::import::context::{Context, converted, needless, refused};
use crate::import::draft::number_text;
use crate::import::prefer::reads_pairs;
use crate::import::read::{is_off, number, text, words};
use crate::keys::Task;
use crate::syntax::quote;
use serde_json::Value;

/// Keys of an entry, and of a source.
const TAKEN: [(&str, &str); 4] =
    [("subset", "config"), ("split", "split"), ("hf_revision", "revision"), ("revision", "revision")];
/// Further known keys.
const READ: [&str; 6] = ["hf_hub_url", "file_name", "formatting", "ranking", "columns", "tags"];
/// Other places of the rows, behind `hf_hub_url`.
const PLACES: [&str; 4] = ["ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"];

/// The sources that `key` names.
pub(super) fn sources(ctx: &mut Context<'_>, key: &'static str) -> Vec<Source> {
    let folder = ctx.get("dataset_dir").and_then(text).unwrap_or_else(|| "data".into());
    let remote = folder == "ONLINE";
    let file = format!("{folder}/dataset_info.json");
    let info = ctx.around.read(&file).map(|t| serde_json::from_str::<Value>(&t));
    let raw = ctx.word("stage") == "pt";
    let Some(names) = ctx.get(key).map(words).filter(|n| !n.is_empty()) else { return Vec::new() };
    let mut sources = Vec::new();
    let mut advice = Vec::new();
    for name in &names {
        let described = info.as_ref().and_then(|i| i.as_ref().ok()?.get(name));
        if let Some(entry) = described {
            lost(entry, name, &mut advice);
        }
        let mut source = match described {
            Some(entry) if raw => of_text(entry, place(entry, name, &folder), key, &mut advice),
            Some(entry) => of_entry(entry, name, (&folder, key, ctx.task), &mut advice),
            None if remote => of_hub(Source::named(name, key)),
            None => Source::named(format!("{folder}/{name}.json"), key),
        };
        if raw {
            source.format("text");
        }
        if reads_pairs(ctx.task) && !source.is_of_messages() {
            source.keys.insert("form", quote("chat"));
        }
        let counts =
            [ctx.number(&["max_samples"]), described.and_then(|entry| number(&entry["num_samples"]))];
        if let Some(n) = counts.into_iter().flatten().filter(|n| *n >= 1.0).reduce(f64::min) {
            source.keys.insert("max_samples", number_text(n));
        }
        sources.push(source);
    }
    let shown: Vec<String> = sources.iter().map(|s| format!("{:?}", s.source)).collect();
    let mut told = format!("sources {}", shown.join(", "));
    if sources.iter().any(|s| s.keys.contains_key("form")) {
        told += "; form = \"chat\": texts go through the model's chat template";
    }
    match info {
        None if !remote => told += &format!("; {file}, which describes them, is not there"),
        Some(Err(e)) => advice.push(format!("{file}, which describes them, is no JSON: {e}")),
        _ => {}
    }
    let outcome = match advice.is_empty() {
        true => converted(told),
        false => refused(format!("{told}; {}", advice.join("; "))),
    };
    ctx.of_data.insert(key.into(), outcome);
    ctx.of_data.insert("dataset_dir".into(), needless("part of the sources' paths"));
    if let Some(n) = ctx.number(&["max_samples"]) {
        let of_all = number_text(n);
        let is_less = |s: &Source| s.keys.get("max_samples").is_some_and(|own| *own != of_all);
        let less = if sources.iter().any(is_less) { ", or fewer: its num_samples" } else { "" };
        let told = format!("max_samples = {of_all} of each source{less}");
        ctx.of_data.insert("max_samples".into(), converted(told));
    }
    sources
}

/// Advice on keys of an entry without a counterpart.
fn lost(entry: &Value, name: &str, advice: &mut Vec<String>) {
    let on_hub = entry.get("hf_hub_url").is_some();
    for (key, value) in entry.as_object().into_iter().flatten().filter(|(_, v)| !is_off(v)) {
        advice.push(match key.as_str() {
            key if READ.contains(&key) || TAKEN.iter().any(|(theirs, _)| *theirs == key) => continue,
            key if PLACES.contains(&key) && on_hub => continue,
            key if PLACES.contains(&key) => format!("{name}: {key} is not read: write the rows into a file"),
            "num_samples" => {
                format!("{name}: num_samples = {value} random rows: max_samples takes the first ones")
            }
            key => format!("{name}: no key {key} here: ft schema lists them"),
        });
    }
}

/// The file or data set of an entry in `dataset_info.json`.
fn place(entry: &Value, name: &str, folder: &str) -> String {
    let get = |k: &str| entry.get(k).and_then(text);
    match (get("hf_hub_url"), get("file_name")) {
        (Some(hub), _) => hub,
        (None, Some(file)) => format!("{folder}/{file}"),
        (None, None) => format!("{folder}/{name}"),
    }
}

/// A source at `place`, with its keys of an entry.
fn named(entry: &Value, place: String, key: &str) -> Source {
    let mut source = Source::named(place, key);
    for (theirs, ours) in TAKEN {
        if let Some(value) = entry.get(theirs) {
            source.put(ours, value);
        }
    }
    if entry.get("hf_hub_url").is_some() { of_hub(source) } else { source }
}

/// A source of the hub, with the default split.
fn of_hub(mut source: Source) -> Source {
    source.keys.entry("split").or_insert_with(|| quote("train"));
    source
}

/// Raw text for `stage: pt`, which reads the prompts alone.
fn of_text(entry: &Value, place: String, key: &str, advice: &mut Vec<String>) -> Source {
    let column = |name: &str| entry.pointer(&format!("/columns/{name}"));
    if column("query").is_some() || column("messages").is_some() {
        advice.push(format!("{place}: write the text of each row into one field"));
    }
    let mut source = named(entry, place, key);
    source.field("text", column("prompt").unwrap_or(&Value::from("instruction")));
    source
}

/// A source from an entry of `dataset_info.json`.
fn of_entry(
    entry: &Value,
    name: &str,
    (folder, key, task): (&str, &str, Task),
    advice: &mut Vec<String>,
) -> Source {
    let get = |k: &str| entry.get(k).and_then(text);
    let mut source = named(entry, place(entry, name, folder), key);
    if entry.get("ranking").and_then(Value::as_bool) == Some(true) && !reads_pairs(task) {
        advice.push(format!("{name} has preferences: stage: dpo and stage: rm read them"));
    }
    let sharegpt = get("formatting").is_some_and(|f| f == "sharegpt" || f == "openai");
    source.format(if sharegpt { "messages" } else { "alpaca" });
    // the last of the messages is the answer
    let answered = sharegpt && task == Task::Kto;
    if reads_pairs(task) && !answered {
        let prompt = if sharegpt { "conversations" } else { "instruction" };
        source.fields.insert("prompt".into(), prompt.into());
    }
    for (theirs, value) in entry.get("columns").and_then(Value::as_object).into_iter().flatten() {
        let ours = match theirs.as_str() {
            "messages" if answered => theirs.as_str(),
            "prompt" | "messages" if reads_pairs(task) => "prompt",
            "response" if reads_pairs(task) => "completion",
            "kto_tag" if reads_pairs(task) => "label",
            "chosen" | "rejected" | "system" | "tools" if reads_pairs(task) => theirs.as_str(),
            _ if reads_pairs(task) => {
                advice.push(format!("{name}: {theirs} is a part of the prompt: write it there, in the rows"));
                continue;
            }
            "prompt" => "instruction",
            "query" => "input",
            "response" => "output",
            "history" | "messages" | "system" | "tools" => theirs.as_str(),
            _ => {
                advice.push(format!("{name}: no column {theirs} here"));
                continue;
            }
        };
        // both names of a list of messages are read
        if !(ours == "messages" && text(value).as_deref() == Some("conversations")) {
            source.field(ours, value);
        }
    }
    for (tag, value) in entry.get("tags").and_then(Value::as_object).into_iter().flatten() {
        let value = text(value).unwrap_or_default();
        if !names(tag.trim_end_matches("_tag")).contains(&value.as_str()) {
            advice.push(format!("{name}: {tag} = {value:?} is to be renamed in the rows"));
        }
    }
    source
}
