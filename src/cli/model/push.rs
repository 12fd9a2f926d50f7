//! `ft push`: uploads an adapter or a model to the hub, with a model card.

use crate::cli::console::print;
use crate::infer::{Source, usage};
use crate::report::{CARD, card, is_hub_id, is_untouched, json_of, text_of};
use crate::train::layout::{is_of_adapter, is_of_model};
use ft_base::store::{self, INDEX, SINGLE, index};
use ft_base::terminal::{tell, warn};
use ft_hub::{Push, Settings};
use std::path::{Path, PathBuf};

/// Arguments of `ft push`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A folder: an adapter, a model, a run, whose result goes, or a checkpoint
    dir: String,
    /// OWNER/NAME on the hub; made if it is not there
    repository: String,
    /// Make the repository private, if it is made; without this option it is public
    #[arg(long)]
    private: bool,
    /// The branch; made if it is not there
    #[arg(long, value_name = "BRANCH", default_value = "main")]
    revision: String,
    /// Message of the commit
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,
    /// Print the card and the files, and send nothing
    #[arg(long)]
    dry_run: bool,
}

/// Uploads and prints the repository's address; with `--dry-run` lists the files and prints the card.
///
/// # Errors
/// A folder without a result; a request refused by the hub.
pub fn run(args: &Args) -> ft_base::Result<()> {
    ft_hub::check_name(&args.repository, &args.revision).map_err(|e| usage(e.to_string()))?;
    let source = Source::find(&args.dir)?;
    let dir = result(&source)?;
    let run = source.run.as_deref();
    let (mut files, left) = files(dir)?;
    check_whole(dir, &files, run)?;
    // a generated card does not know the repository: regenerate it
    let own = text_of(dir, CARD).filter(|text| !is_untouched(text));
    let mut texts = Vec::new();
    if own.is_none() {
        files.retain(|(name, _)| name != CARD);
        texts.push((CARD.to_string(), card(dir, run, &args.repository)?));
    }
    if !left.is_empty() {
        warn(&format!("not of the model, and left out: {}", left.join(", ")));
    }
    warn_of_local_base(dir);
    if args.dry_run {
        for (name, path) in &files {
            let bytes = path.metadata().map_or(0, |m| m.len());
            tell(&format!("{name}: {bytes} bytes"));
        }
        let made = texts.first().map(|(_, text)| text.clone());
        return print(&own.or(made).unwrap_or_default());
    }
    let message =
        args.message.clone().unwrap_or_else(|| format!("Upload with ft {}", env!("CARGO_PKG_VERSION")));
    let push = Push {
        repository: args.repository.clone(),
        revision: args.revision.clone(),
        private: args.private,
        message,
        files,
        texts,
    };
    let address = ft_hub::push_with(&Settings::from_env(), &push)?;
    print(&format!("{address}\n"))
}

/// The folder, if it holds an adapter or a model.
fn result(source: &Source) -> ft_base::Result<&Path> {
    let dir = Path::new(&source.name);
    if ["adapter_config.json", "config.json"].iter().any(|f| dir.join(f).is_file()) {
        return Ok(dir);
    }
    Err(usage(format!(
        "{}: neither an adapter nor a model, and no run with one\n  hint: a folder with adapter_config.json or \
         config.json, or one that ft run wrote",
        source.name
    )))
}

/// Names and paths of files to upload.
type Files = Vec<(String, PathBuf)>;

/// Names of the entries of a folder; a subfolder with files of a model is replaced by its own entries.
fn names(dir: &Path) -> ft_base::Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| store::Error::read(dir, e))? {
        let name = entry.map_err(|e| store::Error::read(dir, e))?.file_name().to_string_lossy().into_owned();
        let (inner, folder) = (dir.join(&name), format!("{name}/"));
        // A link could lead to a private folder.
        if is_of_model(&folder) && inner.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            all.extend(names(&inner)?.iter().map(|name| format!("{folder}{name}")));
        } else {
            all.push(name);
        }
    }
    Ok(all)
}

/// Files of a folder to upload, and names of all other entries.
fn files(dir: &Path) -> ft_base::Result<(Files, Vec<String>)> {
    let (mut go, mut left) = (Vec::new(), Vec::new());
    for name in names(dir)? {
        let ours = is_of_model(&name)
            || is_of_adapter(&name)
            || name == CARD
            || name.ends_with(".gguf")
            || name.starts_with("LICENSE");
        // A link could point to a private file.
        if ours && store::open_inside(dir, &name).is_ok() {
            let path = dir.join(&name);
            go.push((name, path));
        } else {
            left.push(name);
        }
    }
    go.sort();
    left.sort();
    Ok((go, left))
}

/// Refuses an adapter or a model without config or weights among the files to upload.
fn check_whole(dir: &Path, files: &Files, run: Option<&Path>) -> ft_base::Result<()> {
    let has = |name: &str| files.iter().any(|(file, _)| file == name);
    let is_gguf = || files.iter().any(|(file, _)| file.ends_with(".gguf"));
    let mut wanted = vec!["config.json".to_string()];
    if has(INDEX) && !has(SINGLE) {
        wanted.extend(index::read(dir, INDEX)?.into_values());
    } else if !has(SINGLE) && dir.join("adapter_config.json").is_file() {
        wanted = ["adapter_config.json", "adapter_model.safetensors"].map(String::from).into();
    } else if !is_gguf() {
        wanted.push(SINGLE.into());
    }
    let Some(file) = wanted.into_iter().find(|file| !has(file)) else { return Ok(()) };
    let hint = match run {
        _ if dir.join(&file).is_symlink() => "it is a link out of the folder, not followed: put a copy there",
        Some(_) => "ft run RECIPE --resume writes the result of a run again",
        None => "put it back: the others are of no use without it",
    };
    Err(usage(format!("{}: no {file} to upload\n  hint: {hint}", dir.display())))
}

/// Warns if an adapter names a local folder as base.
fn warn_of_local_base(dir: &Path) {
    let config = json_of(dir, "adapter_config.json");
    if let Some(base) = config["base_model_name_or_path"].as_str().filter(|b| !is_hub_id(b)) {
        warn(&format!(
            "adapter_config.json names the base {base:?}, which is no repository of the hub: others will not find \
             it\n  hint: put the base's hub id there (base_model_name_or_path)"
        ));
    }
}
