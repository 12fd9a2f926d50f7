//! The keys of other toolkits as data: `tools.toml`.

use super::read::Entries;
use crate::check::Foreign;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// A toolkit.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Tool {
    /// Letters in the table of hints.
    letters: String,
    /// Values of absent keys.
    pub defaults: BTreeMap<String, toml::Value>,
    /// Defaults of preference tasks, in place of `defaults`.
    pub preference: BTreeMap<String, toml::Value>,
    /// Defaults of reward models, in place of `defaults`.
    pub reward: BTreeMap<String, toml::Value>,
    /// Keys taken as they are.
    pub to: BTreeMap<String, String>,
    /// Keys converted by a function.
    pub by: BTreeMap<String, String>,
    /// Values of unsupported keys with ft's own meaning.
    pub same: BTreeMap<String, toml::Value>,
    /// Keys without effect here, by reason.
    none: BTreeMap<String, Vec<String>>,
    /// Unsupported keys, by advice.
    no: BTreeMap<String, Vec<String>>,
}

/// A builder of torchtune's data sets.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Builder {
    pub source: Option<String>,
    pub config: Option<String>,
    pub format: String,
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
    /// `form` of rows of text.
    pub form: Option<String>,
    /// Whether prompts are supervised by default.
    #[serde(default)]
    pub on_input: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tables {
    pub transformers: Tool,
    trl: Tool,
    llamafactory: Tool,
    axolotl: Tool,
    torchtune: Tool,
    pub torchtune_data: BTreeMap<String, Builder>,
}

/// How a key is imported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How<'t> {
    To(&'t str),
    By(&'t str),
    /// Settings implied by a switch turned on.
    Set(&'t [String]),
    /// No effect here, with the reason.
    Needless(&'t str),
    /// Not supported, with advice.
    Refused(&'t str),
}

impl<'t> From<&'t Foreign> for How<'t> {
    fn from(foreign: &'t Foreign) -> Self {
        match foreign {
            Foreign { to: Some(to), how: None, .. } => How::To(to),
            Foreign { how: Some(how), .. } => How::Refused(how),
            Foreign { idle: Some(why), .. } => How::Needless(why),
            Foreign { none: Some(advice), .. } => How::Refused(advice),
            Foreign { set, .. } => How::Set(set),
        }
    }
}

/// Sections of torchtune's files with keys known by their last part. Other sections are of other models and tasks.
const SECTIONS: [&str; 9] = [
    "checkpointer",
    "dataloader",
    "dataset",
    "dataset_val",
    "loss",
    "lr_scheduler",
    "model",
    "optimizer",
    "tokenizer",
];

/// The parsed tables. A test parses them; a build with a broken table imports nothing.
pub(super) static TABLES: LazyLock<Option<Tables>> =
    LazyLock::new(|| toml::from_str(include_str!("tools.toml")).ok());

/// A tool without keys.
pub(super) static NOTHING: LazyLock<Tool> = LazyLock::new(Tool::default);

/// Toolkits by name, in the order of ties: the most specific first.
pub(super) fn tools(tables: &Tables) -> [(&'static str, &Tool); 4] {
    [
        ("torchtune", &tables.torchtune),
        ("axolotl", &tables.axolotl),
        ("LLaMA-Factory", &tables.llamafactory),
        ("TRL", &tables.trl),
    ]
}

impl Tool {
    fn own(&self, key: &str) -> Option<How<'_>> {
        let to = self.to.get(key).map(|to| How::To(to));
        let by = || self.by.get(key).map(|by| How::By(by));
        let none = || reason(&self.none, key).map(How::Needless);
        to.or_else(by).or_else(none).or_else(|| reason(&self.no, key).map(How::Refused))
    }

    /// Every key of the table, with how it is imported.
    #[cfg(test)]
    pub fn each(&self) -> Vec<(&str, How<'_>)> {
        let grouped = self.none.values().chain(self.no.values()).flatten();
        let all = self.to.keys().chain(self.by.keys()).chain(grouped);
        all.filter_map(|k| Some((k.as_str(), self.own(k)?))).collect()
    }

    /// How the key at a dotted path is imported: by its row, the row of an enclosing table, or the table of hints.
    pub fn find<'t>(&'t self, shared: &'t Tool, path: &str) -> Option<How<'t>> {
        self.row(shared, path).or_else(|| self.hint(path).map(How::from))
    }

    /// The entry of the table of hints: by the first part of the path, in the known sections of torchtune by the last
    /// one too, unless the first one has no counterpart.
    fn hint(&self, path: &str) -> Option<&'static Foreign> {
        let of = |name: Option<&str>| {
            let found = Foreign::key(name?)?;
            found.of.chars().any(|l| self.letters.contains(l)).then_some(found)
        };
        let section = path.split('.').next();
        let known = self.letters == "U" && section.is_some_and(|s| SECTIONS.contains(&s));
        let last = || path.rsplit('.').next().filter(|_| known);
        let first = of(section);
        first.filter(|f| f.none.is_some()).or_else(|| of(last())).or(first)
    }

    fn row<'t>(&'t self, shared: &'t Tool, path: &str) -> Option<How<'t>> {
        let mut names = vec![path.to_string()];
        let parts: Vec<&str> = path.split('.').collect();
        names.extend((1..parts.len()).rev().map(|n| format!("{}.*", parts[..n].join("."))));
        names.iter().find_map(|n| self.own(n).or_else(|| shared.own(n)))
    }
}

/// The reason or advice for a key.
fn reason<'t>(groups: &'t BTreeMap<String, Vec<String>>, key: &str) -> Option<&'t str> {
    groups.iter().find(|(_, keys)| keys.iter().any(|k| k == key)).map(|(text, _)| text.as_str())
}

/// The toolkit with the most keys of its own in a file, if it has two, or a file's only key.
pub(super) fn detect<'t>(tables: &'t Tables, entries: &Entries) -> Option<(&'static str, &'t Tool)> {
    if entries.list.iter().any(|e| e.path.ends_with("_component_")) {
        return Some(tools(tables)[0]);
    }
    let own = |tool: &Tool| {
        let letters = tool.letters.chars().next();
        let hinted =
            |path: &str| tool.hint(path).is_some_and(|f| f.of.chars().next() == letters && f.of.len() == 1);
        entries.list.iter().filter(|e| tool.row(&NOTHING, &e.path).is_some() || hinted(&e.path)).count()
    };
    let shared = entries.list.iter().any(|e| tables.transformers.own(&e.path).is_some());
    let best = tools(tables)[1..].iter().copied().rev().max_by_key(|(_, t)| own(t))?;
    // nothing but keys that all share: TRL's arguments
    if own(best.1) == 0 { shared.then_some(tools(tables)[3]) } else { Some(best) }
}
