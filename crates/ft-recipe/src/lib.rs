//! What the user wrote: the recipe, typed and checked for itself.
//!
//! Only this module knows TOML. What a recipe *means* for a model (which tensors a rule chooses, how many
//! bytes it takes) is decided elsewhere, from these types.
//!
//! The way of a recipe:
//!
//! ```text
//! tree       text -> tree with places; KEY=VALUE of the command line put over it
//! check      every key against its row in `keys`: names, kinds, ranges   (values: layers, experts, sizes;
//! table      checked values -> `Recipe` -> text again                      names, elsewhere: what was meant)
//! cross      checks across keys
//! not_built  keys that the interface has and `ft run` does not build yet
//! launch     whether this process is one of several, as its launcher says
//! report     how problems look: all at once, each with its line
//! write      the resolved recipe;   schema, page: `keys` -> JSON schema, reference;   shipped: the recipes in the binary
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

/// The largest recipe file that is read, in bytes. Recipes have a few thousand.
const LARGEST: u64 = 256 << 10;

/// Why there is no recipe.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the recipe {}: {source}{hint}", path.display())]
    Read {
        /// The recipe's path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// What to do next: a line break and `hint: ...`, or nothing.
        hint: String,
    },
    /// The file is larger than any recipe.
    #[error("{} has {bytes} bytes: a recipe has at most {LARGEST}", path.display())]
    TooLarge {
        /// The recipe's path.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Problems in the recipe or on the command line.
    #[error("{0}")]
    Problems(Problems),
    /// No shipped recipe has this name.
    #[error("no shipped recipe is called {name:?}\nhint: {hint}")]
    NoSuchRecipe {
        /// What was asked for.
        name: String,
        /// What to do next.
        hint: String,
    },
    /// A recipe or the schema could not be printed.
    #[error("cannot write to stdout: {0}")]
    Print(std::io::Error),
}

impl Failure for Error {
    /// [`ExitCode::Usage`], but for a stdout that takes no more.
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Print(_) => ExitCode::Storage,
            _ => ExitCode::Usage,
        }
    }
}

impl Error {
    /// The outcome of printing: a reader that goes away (`ft schema | head`) is no error.
    pub fn of_print(outcome: std::io::Result<()>) -> Result<(), Error> {
        match outcome {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::Print(e)),
            _ => Ok(()),
        }
    }

    /// The problems, where there are any to list.
    pub fn problems(&self) -> &[Diagnostic] {
        match self {
            Error::Problems(p) => p.list(),
            _ => &[],
        }
    }

    /// The message, coloured if `color`; [`ft_base::terminal::color_on_stderr`] says whether it should be.
    pub fn render(&self, color: bool) -> String {
        match self {
            Error::Problems(p) => p.render(color),
            other => other.to_string(),
        }
    }
}

/// The VALUE of a `KEY=VALUE` outside of recipes: TOML, or else a string.
pub fn loose_value(text: &str) -> serde_json::Value {
    let table = toml::from_str::<toml::Table>(&format!("v = {text}")).ok().filter(|t| t.len() == 1);
    let value = table.and_then(|mut t| t.remove("v")).and_then(|v| serde_json::to_value(v).ok());
    value.unwrap_or_else(|| text.into())
}

impl Recipe {
    /// Reads the recipe at `path`, puts the `KEY=VALUE` strings of `overrides` over it, and checks it.
    ///
    /// # Errors
    /// Every problem of the recipe at once, keys that `ft run` does not build yet among them.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Recipe, Error> {
        Self::open(path, overrides, false)
    }

    /// As [`Recipe::load`], for `ft plan`: keys that are not built yet are in [`Recipe::not_built`] instead
    /// of being refused.
    pub fn load_for_plan(path: &Path, overrides: &[String]) -> Result<Recipe, Error> {
        Self::open(path, overrides, true)
    }

    /// As [`Recipe::load`], from `text`; `file_name` is what messages call it, and its stem names the run.
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

    /// The checked recipe, typed, with what follows from other keys filled in.
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

    /// Where the key at a dotted path stands ("data.train.0.source"); where the recipe does not have it,
    /// what is around it, and the file at the last.
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

    /// The path that `written` means, `~/` the user's folder: as it is where that exists, else from the recipe's folder where that
    /// exists, else as it is.
    pub fn resolve(&self, written: &str) -> PathBuf {
        let as_is = at_home(written);
        let beside = self.folder.join(&as_is);
        if !as_is.exists() && beside.exists() { beside } else { as_is }
    }
}

/// A path in which a `~/` in front is the user's folder.
fn at_home(written: &str) -> PathBuf {
    let home = || std::env::var_os("HOME").filter(|h| !h.is_empty()).map(PathBuf::from);
    match written.strip_prefix("~/").zip(home()) {
        Some((rest, home)) => home.join(rest),
        None => written.into(),
    }
}

impl Optimizer {
    /// The peak learning rate of what trains by `method`, before a rule's `lr_scale`: what the recipe says, else
    /// 2e-4 by LoRA and 1e-5 in full.
    pub fn peak_lr(&self, method: Method) -> f64 {
        self.lr.unwrap_or(if method == Method::Full { 1e-5 } else { 2e-4 })
    }

    /// The factor on the peak learning rate of a tensor, by its rule's `lr_scale` and whether it is LoRA's B.
    pub fn factor(&self, lr_scale: f64, is_b: bool) -> f64 {
        if is_b { lr_scale * self.lr_scale_b } else { lr_scale }
    }
}

/// What is wrong with a recipe that is YAML, which has no line that TOML could read.
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

/// The problems that are no consequence of a syntax error: a line that could not be read seems to miss its
/// key, and what is nearby may be read wrongly.
fn beside_syntax(problems: Vec<Diagnostic>, syntax: &[Diagnostic]) -> Vec<Diagnostic> {
    let same_line = |d: &Diagnostic| syntax.iter().any(|s| s.place.line == d.place.line);
    problems
        .into_iter()
        .filter(|d| d.place.line == 0 || (!same_line(d) && d.message.starts_with("unknown key")))
        .collect()
}

/// The name of a run whose recipe has none: the file's stem, with what a folder's name cannot hold taken out.
fn run_name(path: &Path) -> String {
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String =
        stem.chars().map(|c| if c.is_control() || "/\\{}".contains(c) { '-' } else { c }).take(100).collect();
    if values::is_name(&name) { name } else { "recipe".into() }
}
