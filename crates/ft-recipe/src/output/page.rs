//! The reference page: all keys of a recipe, as Markdown.

use crate::check::expected;
use crate::keys::{GROUPS, Key, Kind, Recipe, Unset};
use crate::syntax::join;
use std::fmt::Write;

/// Renders the page from the key table.
pub fn page() -> String {
    let mut out = String::from(
        "# The keys of a recipe\n\nMade by `ft schema --markdown`. A recipe is TOML; every key can also \
        be set on the command line by its dotted \
         path (`run.steps=100`, `train.0.rank=8`). A key that is not here is an error.\n",
    );
    section(&mut out, "", "", "What stands before the first table.", Recipe::KEYS);
    out
}

/// Writes the keys of a table, then subtables.
fn section(out: &mut String, path: &str, brackets: &str, doc: &str, keys: &'static [Key]) {
    let title = match brackets {
        "" => "At the top".to_string(),
        "[[" => format!("`[[{path}]]`"),
        _ => format!("`[{path}]`"),
    };
    let _ = write!(out, "\n## {title}\n\n{doc}\n\n| key | takes | default | |\n|---|---|---|---|\n");
    let inner = |k: &Key| match k.kind {
        Kind::Table(keys) => Some(("[", keys)),
        Kind::Tables(keys) => Some(("[[", keys)),
        _ => None,
    };
    for k in keys.iter().filter(|k| inner(k).is_none()) {
        let default = match k.default {
            Unset::Required => "**required**".into(),
            Unset::Toml(value) => format!("`{value}`"),
            Unset::Absent(instead) => format!("none: {instead}"),
        };
        let cells = [format!("`{}`", k.name), takes(k.kind), default, meaning(k)];
        let _ = writeln!(out, "| {} |", cells.map(|c| c.replace('|', "\\|")).join(" | "));
    }
    for k in keys {
        if let Some((brackets, keys)) = inner(k) {
            section(out, &join(path, k.name), brackets, k.doc, keys);
        }
    }
}

fn takes(kind: Kind) -> String {
    match kind {
        Kind::Word(_) => "one of the words".into(),
        Kind::Words(_) => "a list of the words".into(),
        kind => expected(kind),
    }
}

/// The documentation of a key, with the meanings of accepted words.
fn meaning(k: &Key) -> String {
    let words = match k.kind {
        Kind::Word(words) | Kind::Words(words) => words,
        Kind::Modules => GROUPS,
        _ => return k.doc.to_string(),
    };
    let each = words.iter().map(|(word, meaning)| format!("`{word}`: {}", meaning.trim_end_matches('.')));
    format!("{} {}.", k.doc, each.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_page_is_the_committed_one() -> anyhow::Result<()> {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("recipes/KEYS.md");
        if std::env::var_os("FT_TABLES").is_some_and(|v| v == "write") {
            std::fs::write(&path, page())?;
        }
        let committed = std::fs::read_to_string(&path)?;
        assert!(
            committed == page(),
            "recipes/KEYS.md: `ft schema --markdown > recipes/KEYS.md` writes it again"
        );
        Ok(())
    }

    /// Every key has a row in the section of the enclosing table.
    #[test]
    fn every_key_is_on_the_page() {
        let page = page();
        let mut keys = 0;
        for (path, key) in crate::keys::all_keys() {
            if !matches!(key.kind, Kind::Table(_) | Kind::Tables(_)) {
                let table = path.strip_suffix(key.name).unwrap_or("").trim_end_matches('.').replace(".0", "");
                let heads =
                    [format!("\n## `[{table}]`"), format!("\n## `[[{table}]]`"), "\n## At the top".into()];
                let at = heads.iter().find_map(|h| page.find(h.as_str())).unwrap_or(0);
                let section = &page[at + 1..];
                let section = &section[..section.find("\n## ").unwrap_or(section.len())];
                assert!(section.contains(&format!("\n| `{}` |", key.name)), "{path}");
                keys += 1;
            }
        }
        assert!(keys > 60, "{keys}");
    }
}
