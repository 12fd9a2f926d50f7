//! `ft import`: a recipe from the configuration of another toolkit.

use super::check;
use crate::cli::console::print;
use crate::infer::usage;
use ft_base::error::Error;
use ft_base::store;
use ft_base::terminal::{shell_word, tell, wrap};
use ft_engine::model::Config;
use ft_engine::model::modules::groups;
use ft_hub::Settings;
use ft_plan::source;
use ft_recipe::{Around, Fate, Imported, Line, Recipe, import};
use std::path::{Path, PathBuf};

/// Bytes of a configuration at the most.
const LARGEST: u64 = 256 << 10;
/// Columns of the list on the screen.
const COLUMNS: usize = 100;

/// Arguments of `ft import`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The configuration: YAML or JSON of axolotl, LLaMA-Factory, torchtune or TRL, or a script with the command
    file: PathBuf,
    /// The recipe to write; by default FILE's name with .toml, in the current folder
    #[arg(long, value_name = "RECIPE")]
    out: Option<PathBuf>,
    /// Overwrite an existing recipe
    #[arg(long)]
    overwrite: bool,
}

/// Writes the recipe, lists the outcome for every key, and checks the recipe. Missing files and models are no problems
/// yet. Returns the problems in order.
pub fn run(args: &Args) -> Vec<Error> {
    match write(args) {
        Ok(out) => {
            let problems = problems(&out);
            let word = shell_word(&out.to_string_lossy()).into_owned();
            let next = match problems.is_empty() {
                true => format!("next: ft check {word}, ft plan {word}, ft run {word}"),
                false => "it has problems".into(),
            };
            tell(&format!("{word} is written; {next}"));
            problems
        }
        Err(e) => vec![e],
    }
}

/// Imports and writes; returns the path of the recipe.
fn write(args: &Args) -> ft_base::Result<PathBuf> {
    let name = args.file.display().to_string();
    let cannot = |e: std::io::Error| usage(format!("cannot read {name}: {e}"));
    let bytes = store::read_given(&args.file, LARGEST).map_err(cannot)?;
    let text = String::from_utf8(bytes).map_err(|e| usage(format!("{name} is not UTF-8: {e}")))?;
    let stem = args.file.file_stem().map_or_else(|| "recipe".into(), |s| s.to_os_string());
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(stem).with_added_extension("toml"));
    if out.exists() && !args.overwrite {
        let what =
            format!("{} is there already\n  hint: another name by --out, or --overwrite", out.display());
        return Err(usage(what));
    }
    let file = args.file.file_name().map_or_else(|| name.clone(), |n| n.to_string_lossy().into_owned());
    let beside = Beside(args.file.parent().unwrap_or(Path::new("")));
    let imported = import(&text, &file, &beside).map_err(|e| {
        usage(format!(
            "{name}: {e}\n  hint: configurations of axolotl, LLaMA-Factory, torchtune and TRL are known, as YAML, \
             JSON or a command"
        ))
    })?;
    print(&listing(&imported, &name))?;
    let recipe = imported.recipe.map_err(|e| usage(format!("no recipe can be made of {name}\n{e}")))?;
    store::write_atomic(&out, recipe.as_bytes())?;
    Ok(out)
}

/// Files beside the configuration or in the current folder; models whose config is at hand.
struct Beside<'a>(&'a Path);

/// The config of a model, if at hand.
fn config_of(model: &str) -> Option<Config> {
    let model = toml::Value::from(model);
    let text = format!(
        "model.source = {model}\ntrain = [{{ modules = [\"mlp\"] }}]\ndata.train = [{{ source = \"x\" }}]"
    );
    let recipe = Recipe::parse(&text, "import.toml", &[]).ok()?;
    let local = recipe.resolve(&recipe.model.source).join("config.json").exists();
    let known = local || source::built_in(&recipe.model).ok()?.is_some();
    Some(known.then(|| source::find(&recipe).ok())??.config)
}

impl Around for Beside<'_> {
    fn read(&self, path: &str) -> Option<String> {
        let paths = [self.0.join(path), PathBuf::from(path)];
        let bytes = paths.iter().find_map(|p| store::read_plain(p, LARGEST << 4).ok())?;
        String::from_utf8(bytes).ok()
    }

    fn groups(&self, model: &str) -> Option<Vec<String>> {
        Some(groups(&config_of(model)?).into_iter().map(|g| g.name().to_string()).collect())
    }

    fn router_loss(&self, model: &str) -> Option<f64> {
        Some(config_of(model)?.balancing_loss().unwrap_or(0.0))
    }
}

/// The keys by fate.
fn listing(imported: &Imported, name: &str) -> String {
    let count = imported.lines.iter().filter(|l| l.line > 0).count();
    let mut out = format!("{name}: {}, {count} keys\n", imported.tool);
    let default = format!("not in the file: defaults of {}", imported.tool);
    for (fate, title) in [
        (Fate::Taken, "taken"),
        (Fate::Converted, "converted"),
        (Fate::Default, &default),
        (Fate::NoEffect, "without effect here"),
        (Fate::NotSupported, "not supported"),
        (Fate::Unknown, "unknown"),
    ] {
        let lines: Vec<&Line> = imported.lines.iter().filter(|l| l.fate == fate).collect();
        if lines.is_empty() {
            continue;
        }
        out += &format!("\n{title}\n");
        for l in lines {
            let at = if l.line > 0 { l.line.to_string() } else { String::new() };
            let line = format!("  {at:>4}  {:<28}  {}", l.key, l.text);
            out += &wrap(&line, COLUMNS);
            out.push('\n');
        }
    }
    out
}

/// Problems of the recipe found by `ft check` without the hub. Missing files are left out.
fn problems(out: &Path) -> Vec<Error> {
    let settings = Settings { offline: true, ..Settings::from_env() };
    match Recipe::load(out, &[]) {
        Ok(mut recipe) => {
            let (errors, _) = check::all(&mut recipe, settings);
            errors.into_iter().filter(|e| !is_missing(e)).collect()
        }
        Err(e) => vec![e.into()],
    }
}

/// Whether an error says that a file, a folder or a model is not at hand.
fn is_missing(e: &Error) -> bool {
    use ft_data::Error::{Missing, NoDataset};
    let hub = |e: &ft_hub::Error| {
        use ft_hub::Error::{Missing, NotCached, NotFound, Unreachable, WithoutHub};
        matches!(
            e,
            Missing { .. } | NotCached { .. } | NotFound { .. } | Unreachable { .. } | WithoutHub { .. }
        )
    };
    matches!(e.of(), Some(Missing { .. } | NoDataset { .. })) || e.of().is_some_and(hub)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_router_loss_of_a_model_is_that_of_its_class() {
        let of = |model: &str| Beside(Path::new("")).router_loss(model);
        for (model, coefficient) in [
            ("mistralai/Mixtral-8x7B-v0.1", Some(0.02)),
            ("Qwen/Qwen3.5-35B-A3B", Some(0.001)),
            ("google/gemma-4-26B-A4B", Some(0.0)),
            ("Qwen/Qwen3-8B", Some(0.0)),
            ("someone/something", None),
        ] {
            assert_eq!(of(model), coefficient, "{model}");
        }
    }
}
