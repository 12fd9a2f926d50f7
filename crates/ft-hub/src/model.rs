//! Models and adapters, from local folders or the hub.

use super::error::Error;
use super::files::{ADAPTER, CONFIG, Repository, is_commit};
use super::remote::download;
use super::request::{Kind, ModelDir, Want};
use super::settings::Settings;
use ft_base::store::{self, INDEX, SINGLE};
use std::path::{Path, PathBuf};

/// Finds a model: a local folder, or `OWNER/NAME` on the hub. Downloads missing files up to level `want`.
///
/// A source is local if the folder exists or the name is spelled as a path: starts with `.`, `/` or `~`, or
/// is not of the form `OWNER/NAME`. A local folder must contain `config.json`. `revision` is a branch, tag
/// or commit, for the hub only. With `progress`, reports on stderr: a bar on a terminal, plain lines
/// otherwise.
///
/// # Errors
/// Errors name the model and a remedy. The exit code is 4, except for an unwritable cache (5).
pub fn fetch_model(source: &str, revision: &str, want: Want, progress: bool) -> Result<ModelDir, Error> {
    fetch_model_with(&Settings::from_env(), source, revision, want, progress)
}

/// As [`fetch_model`], with explicit settings.
///
/// # Errors
/// As [`fetch_model`].
pub fn fetch_model_with(
    settings: &Settings,
    source: &str,
    revision: &str,
    want: Want,
    progress: bool,
) -> Result<ModelDir, Error> {
    if let Some(dir) = local(settings, source)? {
        let has = |file: &str| dir.join(file).is_file();
        if has(ADAPTER[0]) && !(has(CONFIG) && (has(SINGLE) || has(INDEX))) {
            return Err(Error::IsAdapter { place: dir.display().to_string() });
        }
        if !has(CONFIG) {
            let hint = match inner(&dir) {
                Some(MODEL_FOLDER) => "; its folder model has one\nhint: name that folder",
                Some(_) => {
                    "; its folder adapter has an adapter\nhint: name that folder in lora.init, or a merge of it here"
                }
                None => "; a model's folder has one",
            };
            return Err(Error::NoLocalFile { dir, file: CONFIG, hint });
        }
        return Ok(ModelDir { dir, source: source.into(), revision: None, notes: Vec::new() });
    }
    from_hub(settings, source, revision, Kind::Model(want), progress)
}

/// Finds a PEFT adapter: a local folder, or `OWNER/NAME` on the hub, with `adapter_config.json` and
/// `adapter_model.safetensors`. Returns the folder.
///
/// # Errors
/// As [`fetch_model`]; [`Error::PickleOnly`] for an adapter with only `adapter_model.bin`.
pub fn fetch_adapter(source: &str, revision: &str, progress: bool) -> Result<PathBuf, Error> {
    fetch_adapter_with(&Settings::from_env(), source, revision, progress)
}

/// As [`fetch_adapter`], with explicit settings.
///
/// # Errors
/// As [`fetch_adapter`].
pub fn fetch_adapter_with(
    settings: &Settings,
    source: &str,
    revision: &str,
    progress: bool,
) -> Result<PathBuf, Error> {
    if let Some(dir) = local(settings, source)? {
        for file in ADAPTER {
            if dir.join(file).is_file() {
                continue;
            }
            if file == ADAPTER[1] && dir.join("adapter_model.bin").is_file() {
                let place = dir.display().to_string();
                return Err(Error::PickleOnly { place, file: "adapter_model.bin".into() });
            }
            let hint = match inner(&dir) {
                _ if dir.join(CONFIG).is_file() => "; it has config.json: a model, not an adapter",
                Some(MODEL_FOLDER) => {
                    "; its folder model has a model, not an adapter\nhint: name it in model.source"
                }
                Some(_) if file == ADAPTER[0] => "; its folder adapter has one\nhint: name that folder",
                _ => "; an adapter's folder has one",
            };
            return Err(Error::NoLocalFile { dir, file, hint });
        }
        return Ok(dir);
    }
    from_hub(settings, source, revision, Kind::Adapter, progress).map(|found| found.dir)
}

/// Names of the result in the folder of a run.
const MODEL_FOLDER: &str = "model";
const ADAPTER_FOLDER: &str = "adapter";

/// The subfolder with a model or an adapter, if a folder has one, as that of a run.
fn inner(dir: &Path) -> Option<&'static str> {
    let folders = [(MODEL_FOLDER, CONFIG), (ADAPTER_FOLDER, ADAPTER[0])];
    folders.into_iter().find(|(folder, file)| dir.join(folder).join(file).is_file()).map(|(folder, _)| folder)
}

/// The local folder of a source; `None` for a hub id.
fn local(settings: &Settings, source: &str) -> Result<Option<PathBuf>, Error> {
    let path = store::expand_home(source, settings.home.as_deref());
    if path.is_dir() {
        return Ok(Some(path));
    }
    if path.exists() {
        return Err(Error::NotAFolder { path });
    }
    let slashes = source.bytes().filter(|&b| b == b'/').count();
    let spelled_as_path =
        source.starts_with(['.', '/', '~']) || source.ends_with('/') || source.contains('\\');
    if spelled_as_path || slashes != 1 {
        let hint = match slashes {
            0 if !spelled_as_path => "; a hub id is OWNER/NAME",
            _ => "",
        };
        return Err(Error::Missing { source_name: source.to_string(), hint });
    }
    Ok(None)
}

fn from_hub(
    settings: &Settings,
    source: &str,
    revision: &str,
    kind: Kind,
    progress: bool,
) -> Result<ModelDir, Error> {
    let repository = Repository::parse(source, revision)?;
    if !cfg!(feature = "hub") {
        return Err(Error::WithoutHub { id: repository.id() });
    }
    let found =
        |dir, commit, notes| ModelDir { dir, source: source.to_string(), revision: Some(commit), notes };
    let cached = repository.cached(settings, kind);
    let is_adapter = || kind != Kind::Adapter && repository.cached(settings, Kind::Adapter).is_ok();
    if settings.offline {
        return match cached {
            Ok((dir, commit)) => Ok(found(dir, commit, Vec::new())),
            Err(_) if is_adapter() => Err(Error::IsAdapter { place: repository.id() }),
            Err(file) => Err(repository.not_cached(settings, file)),
        };
    }
    match (download(settings, &repository, kind, progress), cached) {
        (Ok((dir, commit)), _) => Ok(found(dir, commit, Vec::new())),
        // at a commit the cache is not out of date, only perhaps without optional files
        (Err(e), Ok((dir, commit))) if e.allows_cache() || is_commit(revision) => {
            let note = format!("{e}\nusing {source} from the cache, at commit {commit}");
            Ok(found(dir, commit, vec![note]))
        }
        (Err(e), _) if e.allows_cache() && is_adapter() => Err(Error::IsAdapter { place: repository.id() }),
        (Err(e), _) => Err(e),
    }
}
