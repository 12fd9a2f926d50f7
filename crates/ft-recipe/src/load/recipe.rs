//! Loading a recipe: text -> tree -> checked values -> [`Recipe`].

use super::error::{Error, LARGEST};
use super::shipped::{SHIPPED, Shipped};
use super::yaml::yaml;
use crate::check::values::is_name;
use crate::check::{Checker, find_unsupported, meant, nearest};
use crate::cross;
use crate::keys::{Recipe, Section, Task};
use crate::syntax::{Diagnostic, Problems, SourceText, Span, Table, Value, apply_overrides, enclosing, read};
use ft_base::error::Location;
use ft_base::store;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

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
    /// All problems of the recipe at once, including a value unsupported by this build of `ft run`.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Recipe, Error> {
        Self::open(path, overrides, false)
    }

    /// Like [`Recipe::load`], for `ft plan`: a value unsupported by this build of `ft run` is in [`Recipe::not_built`],
    /// and no error.
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
        let bytes = store::read_given(path, LARGEST).map_err(read)?;
        let mut recipe = Self::build(&bytes, path, overrides, plan)?;
        recipe.folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(recipe)
    }

    pub(crate) fn build(
        bytes: &[u8],
        path: &Path,
        overrides: &[String],
        plan: bool,
    ) -> Result<Recipe, Error> {
        let file = path.display().to_string();
        let mut texts = vec![SourceText::file(file, String::from_utf8_lossy(bytes).into_owned())];
        texts.extend(overrides.iter().map(|o| SourceText::argument(o)));
        if let Err(e) = std::str::from_utf8(bytes) {
            let start = e.valid_up_to();
            let at = Span { text: 0, bytes: start..start + 1 };
            let d = Diagnostic::new(&texts, &at, format!("byte {start} is not UTF-8"));
            let d = d.hint("TOML is UTF-8: save the file in that encoding");
            return Err(Error::Problems(Problems::new(vec![d])));
        }
        if let Some(d) = yaml(&texts, path) {
            return Err(Error::Problems(Problems::new(vec![d])));
        }
        let (mut root, syntax) = read(&texts);
        let from_command_line = apply_overrides(&mut root, &texts, meant);
        let auto_layout = take_auto(&mut root);
        let mut checker = Checker { texts: &texts, problems: from_command_line, bad: Default::default() };
        let section = checker.root(&root);
        let mut recipe = Recipe::typed(&section, path);
        recipe.auto_layout = auto_layout;
        recipe.changed = cross::changed(&root);
        cross::check(&mut checker, &root, &recipe);
        let refused = find_unsupported(&root, &texts, &checker.bad);
        let mut problems = checker.problems;
        if plan {
            recipe.not_built = refused;
        } else {
            problems.extend(refused);
        }
        if !syntax.is_empty() {
            problems = without_consequences(problems, &syntax);
            problems.extend(syntax);
        }
        if !problems.is_empty() {
            return Err(Error::Problems(Problems::new(problems)));
        }
        root.walk("", &mut |path, at| {
            recipe.places.insert(path, Diagnostic::new(&texts, at, "").place);
        });
        recipe.places.insert(String::new(), Location { file: texts[0].name.clone(), line: 0, column: 0 });
        recipe.place_entries(&root, &texts);
        Ok(recipe)
    }

    /// A copy with more settings in command-line form, checked as a whole, for plans.
    ///
    /// # Errors
    /// All problems of the changed recipe at once.
    pub fn with(&self, set: &[String]) -> Result<Recipe, Error> {
        let mut r = Self::build(self.to_toml().as_bytes(), Path::new("recipe.toml"), set, true)?;
        r.folder.clone_from(&self.folder);
        let here = self.data.all_sources();
        for (source, same) in r.data.train.iter_mut().chain(&mut r.data.eval).zip(here) {
            if source.source == same.source {
                source.fetched.clone_from(&same.fetched);
            }
        }
        Ok(r)
    }

    /// Takes `[parallel]` and `run.micro_rows` from these settings, in place of `parallel = "auto"`.
    ///
    /// # Errors
    /// As [`Recipe::with`].
    pub fn adopt_layout(&mut self, set: &[String]) -> Result<(), Error> {
        let with = self.with(set)?;
        (self.parallel, self.run.micro_rows, self.auto_layout) = (with.parallel, with.run.micro_rows, false);
        Ok(())
    }

    /// Converts the checked recipe and fills in values derived from other keys.
    fn typed(section: &Section, path: &Path) -> Recipe {
        let mut r = Recipe::read(section);
        if r.name.is_empty() {
            r.name = run_name(path);
        }
        r.run.output = expand_home(&r.run.output.to_string_lossy().replace("{name}", &r.name));
        r.model.cache = r.model.cache.map(|c| expand_home(&c.to_string_lossy()));
        r.data.scores = r.scores();
        r.data.taught = r.task == Task::Distill;
        let lora = &r.lora;
        r.train.iter_mut().for_each(|rule| rule.inherit(lora));
        r
    }

    /// Sets the positions of rules and sources.
    fn place_entries(&mut self, root: &Table, texts: &[SourceText]) {
        let place = |path: String| {
            root.find(&path).map_or_else(Location::default, |n| Diagnostic::new(texts, &n.at, "").place)
        };
        for (i, rule) in self.train.iter_mut().enumerate() {
            rule.place = place(format!("train.{i}"));
        }
        for (list, key) in [(&mut self.data.train, "train"), (&mut self.data.eval, "eval")] {
            for (i, source) in list.iter_mut().enumerate() {
                source.place = place(format!("data.{key}.{i}"));
            }
        }
    }

    /// Whether the recipe or the command line has the key at a dotted path.
    pub fn has_key(&self, path: &str) -> bool {
        self.places.contains_key(path)
    }

    /// Position of the key at a dotted path ("data.train.0.source"). If absent, the nearest enclosing
    /// table, or the file.
    pub fn place(&self, path: &str) -> Location {
        let place = enclosing(path).chain([""]).find_map(|path| self.places.get(path)).cloned();
        place.unwrap_or_else(|| Location { file: "recipe".into(), line: 0, column: 0 })
    }

    /// Resolves a path from the recipe, with `~/` expanded. A path that does not exist relative to the
    /// working directory but exists relative to the recipe's folder resolves to the latter.
    pub fn resolve(&self, written: &str) -> PathBuf {
        let as_is = expand_home(written);
        let beside = self.folder.join(&as_is);
        if !as_is.exists() && beside.exists() { beside } else { as_is }
    }
}

/// Replaces `parallel = "auto"` by an empty table; returns true if it stood there.
fn take_auto(root: &mut Table) -> bool {
    let parallel = root.0.iter_mut().find(|e| e.key == "parallel").map(|e| &mut e.node.value);
    match parallel {
        Some(value) if matches!(&*value, Value::Text(s) if s == "auto") => {
            *value = Value::Table(Table::default());
            true
        }
        _ => false,
    }
}

/// Expands a leading `~`.
fn expand_home(written: &str) -> PathBuf {
    let home = std::env::var_os("HOME").filter(|h| !h.is_empty()).map(PathBuf::from);
    store::expand_home(written, home.as_deref())
}

/// Drops possible consequences of a syntax error, such as missing keys on the unreadable line.
fn without_consequences(problems: Vec<Diagnostic>, syntax: &[Diagnostic]) -> Vec<Diagnostic> {
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
    if is_name(&name) { name } else { "recipe".into() }
}
