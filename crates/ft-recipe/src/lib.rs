//! The recipe: parsing, checks, and the typed result.
//!
//! Only this module handles TOML. The effect of a recipe on a model (selected tensors, memory) is
//! computed elsewhere from the typed recipe.
//!
//! The stages:
//!
//! ```text
//! tree       text -> tree with positions; overrides KEY=VALUE from the command line
//! check      every key against `keys`: names, kinds, ranges   (values: layers, experts, sizes;
//! table      checked values -> `Recipe` -> text                 names, elsewhere: suggestions)
//! cross      checks across keys
//! not_built  keys accepted by `ft plan` but not supported by `ft run` yet
//! launch     multi-process launch, from environment variables
//! report     rendering of problems: all at once, with source lines
//! write      resolved recipe;   schema, page: `keys` -> JSON schema, reference;   shipped: built-in recipes
//! ```

mod check;
mod cross;
mod data_types;
mod elsewhere;
pub mod keys;
pub mod kind;
mod launch;
pub mod names;
mod not_built;
mod page;
mod report;
mod schema;
mod shipped;
mod table;
mod tree;
mod types;
mod values;
mod write;

#[cfg(test)]
mod tests;

pub use keys::*;
pub use kind::INDEX as MAX_RANK;

pub use data_types::*;
pub use launch::{Launch, Meeting};
pub use names::nearest;
pub use page::page;
pub use report::{Diagnostic, Problems};
pub use schema::schema;
pub use shipped::{SHIPPED, Shipped};
pub use table::Json;
pub use types::*;
pub use values::module_regex;

use ft_base::error::{ExitCode, Failure, Place};
use report::Text;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Size limit of a recipe file in bytes. Typical recipes have a few thousand.
const LARGEST: u64 = 256 << 10;

/// Errors of loading a recipe.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the recipe {}: {source}{hint}", path.display())]
    Read {
        /// The recipe's path.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
        /// Advice: a line break and `hint: ...`, or empty.
        hint: String,
    },
    /// The file exceeds the size limit.
    #[error("{} has {bytes} bytes: a recipe has at most {LARGEST}", path.display())]
    TooLarge {
        /// The recipe's path.
        path: PathBuf,
        /// File size in bytes.
        bytes: u64,
    },
    /// Problems in the recipe or on the command line.
    #[error("{0}")]
    Problems(Problems),
    /// No shipped recipe has this name.
    #[error("no shipped recipe is called {name:?}\nhint: {hint}")]
    NoSuchRecipe {
        /// The requested name.
        name: String,
        /// Advice.
        hint: String,
    },
    /// Writing a recipe or the schema to stdout failed.
    #[error("cannot write to stdout: {0}")]
    Print(std::io::Error),
}

impl Failure for Error {
    /// [`ExitCode::Usage`], except for a failed write to stdout.
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Print(_) => ExitCode::Storage,
            _ => ExitCode::Usage,
        }
    }
}

impl Error {
    /// The result of printing. A closed pipe (`ft schema | head`) is not an error.
    pub fn of_print(outcome: std::io::Result<()>) -> Result<(), Error> {
        match outcome {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::Print(e)),
            _ => Ok(()),
        }
    }

    /// The problems in the recipe; empty for another kind of error.
    pub fn problems(&self) -> &[Diagnostic] {
        match self {
            Error::Problems(p) => p.list(),
            _ => &[],
        }
    }

    /// The message, in color if `color`; see [`ft_base::terminal::color_on_stderr`].
    pub fn render(&self, color: bool) -> String {
        match self {
            Error::Problems(p) => p.render(color),
            other => other.to_string(),
        }
    }
}

/// Parses the VALUE of a `KEY=VALUE` outside of recipes: as TOML, else as a plain string.
pub fn loose_value(text: &str) -> serde_json::Value {
    let table = toml::from_str::<toml::Table>(&format!("v = {text}")).ok().filter(|t| t.len() == 1);
    let value = table.and_then(|mut t| t.remove("v")).and_then(|v| serde_json::to_value(v).ok());
    value.unwrap_or_else(|| text.into())
}

impl Recipe {
    /// Reads the recipe at `path`, applies the `KEY=VALUE` overrides, and checks the result.
    ///
    /// # Errors
    /// All problems of the recipe at once, including keys that `ft run` does not support yet.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Recipe, Error> {
        Self::open(path, overrides, false)
    }

    /// Like [`Recipe::load`], for `ft plan`: keys not supported yet are listed in [`Recipe::not_built`]
    /// and are not an error.
    pub fn load_for_plan(path: &Path, overrides: &[String]) -> Result<Recipe, Error> {
        Self::open(path, overrides, true)
    }

    /// Like [`Recipe::load`], from `text`. Messages show `file_name`, and the file stem is the default
    /// run name.
    pub fn parse(text: &str, file_name: &str, overrides: &[String]) -> Result<Recipe, Error> {
        Self::build(text.as_bytes(), Path::new(file_name), overrides, false)
    }

    fn open(path: &Path, overrides: &[String], plan: bool) -> Result<Recipe, Error> {
        let shipped = path.to_str().and_then(|p| Shipped::find(p).ok());
        let read = |source: std::io::Error| {
            let near = || {
                let word = path.to_str()?;
                nearest(word.strip_suffix(".toml").unwrap_or(word), SHIPPED.iter().map(|s| s.name))
            };
            let absent = source.kind() == ErrorKind::NotFound;
            let hint = match (shipped.filter(|_| absent), near().filter(|_| absent)) {
                (Some(s), _) => format!("\nhint: a shipped recipe has this name: {}", s.name),
                (None, Some(near)) => format!("\nhint: did you mean {near}?"),
                (None, None) => String::new(),
            };
            Error::Read { path: path.into(), source, hint }
        };
        if let Some(s) = shipped.filter(|s| Path::new(s.name) == path && !path.exists()) {
            return Self::build(s.text.as_bytes(), &path.with_added_extension("toml"), overrides, plan);
        }
        let bytes = std::fs::metadata(path).map_err(read)?.len();
        if bytes > LARGEST {
            return Err(Error::TooLarge { path: path.into(), bytes });
        }
        let bytes = ft_base::store::read_given(path, LARGEST).map_err(read)?;
        let mut recipe = Self::build(&bytes, path, overrides, plan)?;
        recipe.folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(recipe)
    }

    fn build(bytes: &[u8], path: &Path, overrides: &[String], plan: bool) -> Result<Recipe, Error> {
        let file = path.display().to_string();
        let mut texts = vec![Text::file(file, String::from_utf8_lossy(bytes).into_owned())];
        texts.extend(overrides.iter().map(|o| Text::argument(o)));
        if let Err(e) = std::str::from_utf8(bytes) {
            let start = e.valid_up_to();
            let at = report::At { text: 0, span: start..start + 1 };
            let d = Diagnostic::new(&texts, &at, format!("byte {start} is not UTF-8"));
            let d = d.hint("TOML is UTF-8: save the file in that encoding");
            return Err(Error::Problems(Problems::new(vec![d])));
        }
        if let Some(d) = yaml(&texts, path) {
            return Err(Error::Problems(Problems::new(vec![d])));
        }
        let (mut root, syntax) = tree::read(&texts);
        let from_command_line = tree::apply_overrides(&mut root, &texts);
        let mut checker =
            check::Checker { texts: &texts, problems: from_command_line, bad: Default::default() };
        let section = checker.root(&root);
        let mut recipe = Recipe::typed(&section, &texts, path);
        cross::check(&mut checker, &root, &recipe);
        let refused = not_built::find(&root, &texts, &checker.bad);
        let mut problems = checker.problems;
        if plan {
            recipe.not_built = refused;
        } else {
            problems.extend(refused);
        }
        if !syntax.is_empty() {
            problems = beside_syntax(problems, &syntax);
            problems.extend(syntax);
        }
        if !problems.is_empty() {
            return Err(Error::Problems(Problems::new(problems)));
        }
        root.walk("", &mut |path, at| {
            recipe.places.insert(path, Diagnostic::new(&texts, at, "").place);
        });
        recipe.places.insert(String::new(), Place { file: texts[0].name.clone(), line: 0, column: 0 });
        Ok(recipe)
    }

    /// Converts the checked recipe and fills in values derived from other keys.
    fn typed(section: &check::Section, texts: &[Text], path: &Path) -> Recipe {
        let mut r = Recipe::read(section);
        if r.name.is_empty() {
            r.name = run_name(path);
        }
        r.run.output = at_home(&r.run.output.to_string_lossy().replace("{name}", &r.name));
        r.model.cache = r.model.cache.map(|c| at_home(&c.to_string_lossy()));
        let lora = &r.lora;
        for (rule, at) in r.train.iter_mut().zip(section.tables("train")) {
            rule.inherit(lora);
            rule.place = at.place(texts);
        }
        for (list, key) in [(&mut r.data.train, "train"), (&mut r.data.eval, "eval")] {
            for (source, at) in list.iter_mut().zip(section.table("data").map_or(&[][..], |d| d.tables(key)))
            {
                source.place = at.place(texts);
            }
        }
        r
    }

    /// Position of the key at a dotted path ("data.train.0.source"). If absent, the nearest enclosing
    /// table, or the file.
    pub fn place(&self, path: &str) -> Place {
        let mut path = path;
        loop {
            if let Some(place) = self.places.get(path) {
                return place.clone();
            }
            match path.rsplit_once('.') {
                Some((above, _)) => path = above,
                None if !path.is_empty() => path = "",
                None => return Place { file: "recipe".into(), line: 0, column: 0 },
            }
        }
    }

    /// Resolves a path from the recipe, with `~/` expanded. A path that does not exist relative to the
    /// working directory but exists relative to the recipe's folder resolves to the latter.
    pub fn resolve(&self, written: &str) -> PathBuf {
        let as_is = at_home(written);
        let beside = self.folder.join(&as_is);
        if !as_is.exists() && beside.exists() { beside } else { as_is }
    }
}

/// Expands a leading `~/`.
fn at_home(written: &str) -> PathBuf {
    let home = || std::env::var_os("HOME").filter(|h| !h.is_empty()).map(PathBuf::from);
    match written.strip_prefix("~/").zip(home()) {
        Some((rest, home)) => home.join(rest),
        None => written.into(),
    }
}

impl Optimizer {
    /// Peak learning rate for `method`, before a rule's `lr_scale`: `optimizer.lr`, by default 2e-4 for
    /// LoRA and 1e-5 for full training.
    pub fn peak_lr(&self, method: Method) -> f64 {
        self.lr.unwrap_or(if method == Method::Full { 1e-5 } else { 2e-4 })
    }

    /// Factor on the peak learning rate: `lr_scale`, times `lr_scale_b` for the LoRA matrix B.
    pub fn factor(&self, lr_scale: f64, is_b: bool) -> f64 {
        if is_b { lr_scale * self.lr_scale_b } else { lr_scale }
    }
}

/// Detects a YAML file, for a single clear message instead of many TOML errors.
fn yaml(texts: &[Text], path: &Path) -> Option<Diagnostic> {
    let named = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
    let lines =
        || texts[0].text.lines().map(str::trim_end).filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
    let is_key = |l: &str| {
        let (key, rest) = l.split_once(':')?;
        let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
        (!key.is_empty() && plain && (rest.is_empty() || rest.starts_with(' '))).then_some(())
    };
    let looks = || {
        lines().next().is_some_and(|l| l == "---" || is_key(l).is_some())
            && !lines().any(|l| l.contains(" = "))
    };
    if !(looks() || named && !lines().any(|l| l.starts_with('['))) {
        return None;
    }
    let at = report::At { text: 0, span: 0..1 };
    let d = Diagnostic::new(texts, &at, "this is YAML, and a recipe is TOML: key = value, tables as [data]");
    Some(d.hint("ft init asks for what a recipe needs and writes one; ft recipes lists some to begin with"))
}

/// Drops problems that may be consequences of a syntax error, such as missing keys on the unreadable line.
fn beside_syntax(problems: Vec<Diagnostic>, syntax: &[Diagnostic]) -> Vec<Diagnostic> {
    let same_line = |d: &Diagnostic| syntax.iter().any(|s| s.place.line == d.place.line);
    problems
        .into_iter()
        .filter(|d| d.place.line == 0 || (!same_line(d) && d.message.starts_with("unknown key")))
        .collect()
}

/// Default run name: the file stem, with characters not allowed in folder names replaced.
fn run_name(path: &Path) -> String {
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String =
        stem.chars().map(|c| if c.is_control() || "/\\{}".contains(c) { '-' } else { c }).take(100).collect();
    if values::is_name(&name) { name } else { "recipe".into() }
}
