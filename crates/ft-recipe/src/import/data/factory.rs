//! Data sets of LLaMA-Factory: names, described by `dataset_info.json` of `dataset_dir`.

use super::source::Source;
use crate::import::context::{Context, converted, needless, refused};
use crate::import::read::{number, text, words};
use serde_json::Value;

/// The sources that `key` names.
pub(super) fn sources(ctx: &mut Context<'_>, key: &'static str) -> Vec<Source> {
    let folder = ctx.get("dataset_dir").and_then(text).unwrap_or_else(|| "data".into());
    let remote = folder == "ONLINE";
    let info = ctx.around.read(&format!("{folder}/dataset_info.json"));
    let info = info.and_then(|t| serde_json::from_str::<Value>(&t).ok());
    let Some(names) = ctx.get(key).map(words).filter(|n| !n.is_empty()) else { return Vec::new() };
    let mut sources = Vec::new();
    let mut advice = Vec::new();
    for name in &names {
        let described = info.as_ref().and_then(|i| i.get(name));
        let source = match described {
            Some(entry) => of_entry(entry, name, &folder, key, &mut advice),
            None if remote => Source::named(name, key),
            None => Source::named(format!("{folder}/{name}.json"), key),
        };
        limit(ctx);
        sources.push(source);
    }
    let shown: Vec<String> = sources.iter().map(|s| format!("{:?}", s.source)).collect();
    let mut told = format!("sources {}", shown.join(", "));
    if info.is_none() && !remote {
        told += &format!("; {folder}/dataset_info.json, which describes them, is not there");
    }
    let outcome = match advice.is_empty() {
        true => converted(told),
        false => refused(format!("{told}; {}", advice.join("; "))),
    };
    ctx.of_data.insert(key.into(), outcome);
    ctx.of_data.insert("dataset_dir".into(), needless("part of the sources' paths"));
    sources
}

/// `max_samples`: of each data set.
fn limit(ctx: &mut Context<'_>) {
    let Some(n) = ctx.get("max_samples").and_then(number) else { return };
    let advice = format!("weight takes a share of a source's samples: {n} over their number");
    ctx.of_data.insert("max_samples".into(), refused(advice));
}

/// A source from its entry in `dataset_info.json`.
fn of_entry(entry: &Value, name: &str, folder: &str, key: &str, advice: &mut Vec<String>) -> Source {
    let get = |k: &str| entry.get(k).and_then(text);
    let place = match (get("hf_hub_url"), get("file_name")) {
        (Some(hub), _) => hub,
        (None, Some(file)) => format!("{folder}/{file}"),
        (None, None) => format!("{folder}/{name}"),
    };
    let mut source = Source::named(place, key);
    for (theirs, ours) in [("subset", "config"), ("split", "split"), ("hf_revision", "revision")] {
        if let Some(value) = entry.get(theirs) {
            source.put(ours, value);
        }
    }
    if entry.get("ranking").and_then(Value::as_bool) == Some(true) {
        advice.push(format!("{name} has preferences, a task to come"));
    }
    let sharegpt = get("formatting").is_some_and(|f| f == "sharegpt" || f == "openai");
    source.format(if sharegpt { "messages" } else { "alpaca" });
    for (theirs, value) in entry.get("columns").and_then(Value::as_object).into_iter().flatten() {
        let ours = match theirs.as_str() {
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
    let known = ["role", "from", "content", "value", "human", "user", "gpt", "assistant", "system", "tool"];
    let more = ["observation", "function", "function_call"];
    for (tag, value) in entry.get("tags").and_then(Value::as_object).into_iter().flatten() {
        let value = text(value).unwrap_or_default();
        if !known.contains(&value.as_str()) && !more.contains(&value.as_str()) {
            advice.push(format!("{name}: {tag} = {value:?} is to be renamed in the rows"));
        }
    }
    source
}
