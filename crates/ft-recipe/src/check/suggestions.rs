//! Suggestions for unknown names: similar spellings, and names used by other programs.

use super::foreign::Foreign;
use crate::keys::{Key, Kind, all_keys, first_entries};
use crate::syntax::{join, quote};

/// The entry of `names` nearest to `word` by edit distance or prefix, if close enough.
pub fn nearest<'n>(word: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let word: String = word.chars().take(64).collect::<String>().to_lowercase();
    let allowed = (word.chars().count() / 3).clamp(1, 3);
    names
        .into_iter()
        .map(|n| (strsim::damerau_levenshtein(&word, &n.to_lowercase()), n))
        .filter(|(distance, n)| {
            *distance <= allowed || (word.len() > 3 && (n.starts_with(&word) || word.starts_with(n)))
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, n)| n)
}

/// A dotted path without list indices.
fn without_indices(path: &str) -> String {
    path.split('.').filter(|p| p.parse::<usize>().is_err()).collect::<Vec<_>>().join(".")
}

/// Message and hints for an unknown key in the table at `path`.
pub(super) fn unknown(path: &str, name: &str, keys: &'static [Key]) -> (String, Vec<String>) {
    let table = match path {
        "" => "a recipe".to_string(),
        path => format!("[{}]", without_indices(path)),
    };
    let message = match path {
        "" => format!("unknown key: {name}"),
        _ => format!("unknown key: {} (in {table})", join(path, name)),
    };
    if let Some(foreign) = Foreign::key(name) {
        return (message, vec![foreign.key_hint(path)]);
    }
    let mut hints = Vec::new();
    if let Some(near) = nearest(name, keys.iter().map(|k| k.name)) {
        hints.push(format!("did you mean {near}?"));
    }
    let same_name = all_keys().iter().filter(|(_, key)| key.name == name);
    let same_name: Vec<String> = same_name.map(|(path, _)| path.replace(".0.", ".")).collect();
    if !same_name.is_empty() {
        hints.push(format!("there is {}", same_name.join(", ")));
    }
    if hints.is_empty() {
        let is_table = |k: &&Key| matches!(k.kind, Kind::Table(_) | Kind::Tables(_));
        let (tables, plain): (Vec<&Key>, Vec<&Key>) = keys.iter().partition(is_table);
        let names: Vec<&str> = plain.into_iter().chain(tables).map(|k| k.name).collect();
        hints.push(format!("keys of {table}: {}", names.join(", ")));
    }
    (message, hints)
}

/// The key of `keys` probably meant by an unknown `name`.
pub(super) fn meant(path: &str, name: &str, keys: &'static [Key]) -> Option<&'static str> {
    if let Some(foreign) = Foreign::key(name) {
        let ours = foreign.to.as_deref()?;
        return keys.iter().map(|k| k.name).find(|k| join(&first_entries(path), k) == ours);
    }
    nearest(name, keys.iter().map(|k| k.name))
}

/// The hint for a word not accepted by the key at `path`.
pub(super) fn words_hint(path: &str, word: &str, words: &[&str]) -> Vec<String> {
    if let Some(foreign) = Foreign::value(path, word) {
        return vec![foreign.value_hint()];
    }
    if let Some(n) = word.strip_prefix("cuda:").filter(|_| words.contains(&"cuda")) {
        return vec![format!("write \"cuda\", the first device seen: CUDA_VISIBLE_DEVICES={n} ft run ..")];
    }
    let all = words.iter().map(|w| quote(w)).collect::<Vec<_>>().join(", ");
    match nearest(word, words.iter().copied()).filter(|_| !word.is_empty()) {
        Some(near) if words.len() > 1 => vec![format!("did you mean {}? It takes {all}", quote(near))],
        Some(near) => vec![format!("did you mean {}?", quote(near))],
        None => vec![format!("it takes {all}")],
    }
}
