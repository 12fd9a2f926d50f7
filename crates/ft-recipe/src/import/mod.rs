//! Recipes from configurations of other toolkits: axolotl, LLaMA-Factory, torchtune, TRL.
//!
//! ```text
//! read      YAML, JSON or a command line -> keys with values and lines
//! table     tools.toml: the import of every toolkit's keys
//! context   state of an import, the fate of a key
//! run, optimize, train, tune, prefer, data   conversions; convert finds them by name
//! draft     the recipe
//! ```

mod context;
mod convert;
mod data;
mod draft;
mod optimize;
mod prefer;
mod read;
mod run;
mod table;
mod train;
mod tune;

#[cfg(test)]
mod tests;

use crate::keys::{Recipe, Task};
use crate::load::Error;
pub use context::{Around, Fate};
use context::{Context, Outcome, converted, needless, refused};
use draft::{Draft, Set};
pub use read::yaml_value;
use read::{Entries, Entry, is_expansion, is_off};
use std::collections::BTreeMap;
use std::path::Path;
use table::{How, NOTHING, TABLES, Tables, Tool, detect};

/// What became of one key.
#[derive(Clone, Debug)]
pub struct Line {
    /// Dotted path in the file.
    pub key: String,
    /// Line of the file; 0 for a default.
    pub line: usize,
    /// Its fate.
    pub fate: Fate,
    /// The key of the recipe, the reason, or advice.
    pub text: String,
}

/// An imported configuration.
#[derive(Debug)]
pub struct Imported {
    /// The toolkit.
    pub tool: &'static str,
    /// Every key of the file, and the toolkit's defaults other than ft's.
    pub lines: Vec<Line>,
    /// The recipe, or the reason against one.
    pub recipe: Result<String, String>,
}

/// Keys that say when to evaluate.
const EVALUATIONS: &[&str] = &["eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"];
/// Rounds of leaving out keys refused by the recipe's checks.
const ROUNDS: usize = 8;

/// Imports a configuration. `file` is its name.
///
/// # Errors
/// A file unreadable as YAML, JSON or a command line, or of no known toolkit.
pub fn import(text: &str, file: &str, around: &dyn Around) -> Result<Imported, String> {
    let mut entries = read::read(text)?;
    if read::is_command(text) {
        add_file(&mut entries, around)?;
    }
    let tables = TABLES.as_ref().ok_or("the table of keys is broken")?;
    let Some((name, tool)) = detect(tables, &entries) else {
        return Err("no key of axolotl, LLaMA-Factory, torchtune or TRL is in it".into());
    };
    let task = prefer::task_of(name, &entries);
    let is = |of: fn(Task) -> bool| task.as_ref().is_ok_and(|t| of(*t));
    let of_pairs = tool.preference.iter().filter(|_| is(|t| t.prefers()));
    let of_task = of_pairs.chain(tool.reward.iter().filter(|_| is(|t| t == Task::Reward)));
    let of_any = tool.defaults.iter().filter(|(key, _)| !of_task.clone().any(|(k, _)| k == *key));
    for (key, value) in of_task.clone().chain(of_any) {
        // these nulls are values of their own: no limit
        let given =
            |e: &Entry| e.path == *key && (name == "torchtune" || key == "max_length" || !e.value.is_null());
        if !entries.list.iter().any(given) {
            let value = serde_json::to_value(value).unwrap_or_default();
            entries.list.push(Entry { path: key.clone(), value, line: 0 });
        }
    }
    let mut ctx = Context {
        tool: name,
        tables,
        entries: &entries,
        around,
        method: train::method_of(name, &entries),
        draft: Draft::default(),
        modules: None,
        in_full: Vec::new(),
        layers: None,
        of_data: BTreeMap::new(),
        told: Vec::new(),
        task: *task.as_ref().unwrap_or(&Task::Sft),
        other_task: task.err(),
    };
    data::all(&mut ctx);
    let mut lines: Vec<Line> = entries.list.iter().map(|e| line(&mut ctx, tool, tables, e)).collect();
    train::rules(&mut ctx);
    let told = std::mem::take(&mut ctx.told);
    lines.extend(told.into_iter().map(|(key, text)| Line { key, line: 0, fate: Fate::Default, text }));
    let why = ctx.other_task.take().or_else(|| data::missing(&ctx));
    let draft = ctx.draft;
    let recipe = match why {
        Some(why) => Err(format!("{file}: {why}: no recipe is written")),
        None => settle(draft, &mut lines, name, file),
    };
    lines.retain(|l| l.line > 0 || l.fate == Fate::Default);
    Ok(Imported { tool: name, lines, recipe })
}

/// Adds the keys of the file of a command; keys of the command win.
fn add_file(entries: &mut Entries, around: &dyn Around) -> Result<(), String> {
    let named = entries.get(read::FILE).and_then(read::text);
    let Some(file) = named.filter(|file| read::is_file(file)) else { return Ok(()) };
    let Some(inside) = around.read(&file) else {
        return Err(format!("it trains by {file}, which is not at hand: ft import {file}"));
    };
    let keys = read::read(&inside).map_err(|e| format!("{file}: {e}"))?;
    entries.list.retain(|e| e.path != read::FILE);
    let added: Vec<Entry> = keys.list.into_iter().filter(|k| entries.get(&k.path).is_none()).collect();
    entries.list.extend(added);
    Ok(())
}

/// Converts one key.
fn line(ctx: &mut Context<'_>, tool: &Tool, tables: &Tables, e: &Entry) -> Line {
    // torchtune's own keys alone: others mean other things there
    let shared = if ctx.tool == "torchtune" { &*NOTHING } else { &tables.transformers };
    let found = tool.find(shared, &e.path);
    let same = tool.same.get(&e.path).or_else(|| shared.same.get(&e.path));
    let is_same = || {
        let theirs = same.and_then(|v| serde_json::to_value(v).ok());
        theirs.is_some_and(|v| {
            v == e.value || read::number(&v).is_some_and(|n| read::number(&e.value) == Some(n))
        })
    };
    let Outcome(fate, text) = match found {
        Some(How::To(path)) => ctx.take(path, e),
        Some(How::By(name)) => match convert::by_name(name) {
            Some(convert) => convert(ctx, e),
            None => refused("not built"),
        },
        Some(How::Set(settings)) if !is_off(&e.value) => converted(ctx.settings(settings, e).join(", ")),
        Some(How::Set(_)) => needless("off"),
        Some(How::Needless(why)) => needless(why),
        Some(How::Refused(_)) if e.value.is_null() => needless("not set"),
        Some(How::Refused(_)) if is_same() => needless("so it is here too"),
        Some(How::Refused(_)) if same.is_none() && is_off(&e.value) => needless("off"),
        Some(How::Refused(advice)) => refused(advice),
        None if e.value.is_null() => needless("not set"),
        None => Outcome(Fate::Unknown, format!("= {}: no known key of {}", e.value, ctx.tool)),
    };
    let unfilled = is_expansion(&e.value) && fate <= Fate::Converted;
    let (fate, text) = match unfilled {
        true => (Fate::NotSupported, format!("{text}: variables are not expanded here: write the value")),
        false => (fate, text),
    };
    let shown = if fate == Fate::Unknown { text.chars().take(200).collect() } else { text };
    Line { key: e.path.clone(), line: e.line, fate, text: shown }
}

/// Leaves out keys refused by the recipe's own checks, and says so.
fn settle(mut draft: Draft, lines: &mut [Line], tool: &str, file: &str) -> Result<String, String> {
    draft.drop_defaults();
    let name = file.replace(|c: char| c.is_control(), " ");
    // evaluations on the way, at an interval without a counterpart
    let unevaluated = lines.iter().any(|l| l.fate == Fate::NotSupported && EVALUATIONS.contains(&&*l.key));
    let head =
        format!("# From {name} of {tool}, by ft import. Behind each key stands the one that it is from.\n");
    let mut last = Err(Error::NoSuchRecipe { name: String::new(), hint: String::new() });
    for _ in 0..ROUNDS {
        let text = draft.text(&head);
        last = Recipe::parse(&text, &format!("{}.toml", stem(file)), &[]).map(|_| text);
        let Err(problems) = &last else { break };
        let mut removed = false;
        for problem in problems.problems() {
            let Some(key) = problem.key.as_deref() else { continue };
            let Some(set) = draft.remove(key) else { continue };
            removed = true;
            let lost = unevaluated && ["run.patience", "run.keep_best"].contains(&set.path.as_str());
            let fate = match problem.message.contains("does nothing") && !lost {
                true => Fate::NoEffect,
                false => Fate::NotSupported,
            };
            let text = problem.message.clone() + if lost { ": write run.eval_every" } else { "" };
            let others_stay = draft.keys.iter().any(|s| s.origin == set.origin);
            for l in lines.iter_mut().filter(|l| tells_of(l, &set, key)) {
                if l.key == set.origin && others_stay {
                    l.text += &format!("; {text}");
                    l.fate = if fate == Fate::NoEffect { l.fate } else { fate };
                } else {
                    (l.fate, l.text) = (fate, text.clone());
                }
            }
        }
        if !removed {
            break;
        }
    }
    for l in lines.iter_mut().filter(|l| l.line == 0) {
        let differs = draft.keys.iter().any(|s| s.by_default && s.origin == l.key);
        if differs || l.fate == Fate::NotSupported {
            l.fate = Fate::Default;
        }
    }
    last.map_err(|e| e.to_string())
}

/// Whether a line tells of `key`, removed from the recipe: as the origin, or as the data set's key behind it.
fn tells_of(line: &Line, removed: &Set, key: &str) -> bool {
    let (name, entry) =
        (removed.path.rsplit('.').next().unwrap_or_default(), key.strip_prefix(&removed.path));
    let said = match entry.and_then(|rest| rest.strip_prefix('.')) {
        Some(entry) => format!("{name} = {{ {entry} = "),
        None => format!("{name} = "),
    };
    let is_below = line.key.strip_prefix(&removed.origin).is_some_and(|rest| rest.starts_with('.'));
    line.key == removed.origin || is_below && line.text.starts_with(&said)
}

/// The name of a file without folders and ending.
pub(crate) fn stem(file: &str) -> String {
    let stem = Path::new(file).file_stem().map(|s| s.to_string_lossy().into_owned());
    stem.filter(|s| !s.is_empty()).unwrap_or_else(|| "recipe".into())
}
