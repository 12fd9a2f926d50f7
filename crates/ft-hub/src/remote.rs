//! Downloads and uploads through the `hf-hub` crate.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hf_hub::progress::Progress;
use hf_hub::repository::{CommitOperation, RepoTreeEntry, RepoTypeAny, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync};

use super::choose::{choose, of_tokens, optional};
use super::error::Error;
use super::files::{Repository, is_commit, shards};
use super::progress::Report;
use super::request::{Kind, Layout, Push, Want};
use super::settings::Settings;
use ft_base::store::{INDEX, append, folder_of, human_bytes, write_atomic};
use ft_base::terminal::tell;
use ft_data::TOOL_USE;

/// Time limit for a connection. The system's limit is minutes in networks with packet loss.
const CONNECT: Duration = Duration::from_secs(10);
/// Retries of a request, and of downloads in a row without a further whole file.
const RETRIES: usize = 3;
/// Pauses before retries have up to 2, 4, 8 times this length.
const BACKOFF: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 200 });
/// Endpoints to which no connection came about, with the cause and the time. Models at commits in the cache do not
/// wait for them again for [`PAUSE`].
static UNREACHABLE: Mutex<BTreeMap<String, (String, Instant)>> = Mutex::new(BTreeMap::new());
/// How long an endpoint counts as unreachable.
const PAUSE: Duration = Duration::from_secs(60);
const AGENT: &str = concat!("ft/", env!("CARGO_PKG_VERSION"));
/// The branch present in every repository.
const MAIN: &str = "main";

/// Downloads the required files of a repository to the cache; returns the snapshot folder and the commit.
pub(super) fn download(
    settings: &Settings,
    repository: &Repository,
    kind: Kind,
    progress: bool,
) -> Result<(PathBuf, String), Error> {
    let cached = repository.cached(settings, kind).ok().filter(|_| is_commit(&repository.revision));
    let Some((dir, commit)) = cached else {
        return download_with(settings, repository, kind, progress, RETRIES);
    };
    // Commits are immutable: a cached one needs no request. Other programs may have left files out. Files that change
    // tokens, and with weights the files copied into a result, are present or marked as absent in a complete cache.
    let matters = if kind == Kind::Model(Want::Weights) { optional(kind) } else { of_tokens(kind) };
    if matters.iter().all(|f| dir.join(f).is_file() || repository.is_absent(settings, &commit, f)) {
        return Ok((dir, commit));
    }
    let why = || unreachable().get(&settings.endpoint).filter(|(_, at)| at.elapsed() < PAUSE).cloned();
    if let Some((cause, _)) = why() {
        let endpoint = without_user(&settings.endpoint);
        return Err(Error::Unreachable { id: repository.id(), endpoint, cause });
    }
    // The client would retry connections as often as other requests.
    match download_with(settings, repository, kind, progress, 0) {
        Err(Error::Unreachable { .. } | Error::Refused { .. }) if why().is_none() => {
            download_with(settings, repository, kind, progress, RETRIES)
        }
        downloaded => downloaded,
    }
}

fn unreachable() -> MutexGuard<'static, BTreeMap<String, (String, Instant)>> {
    UNREACHABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`download`], whatever is in the cache.
fn download_with(
    settings: &Settings,
    repository: &Repository,
    kind: Kind,
    progress: bool,
    retries: usize,
) -> Result<(PathBuf, String), Error> {
    let remote = Remote::connect(settings, repository, retries, Some(settings.timeout))?;
    let commit = remote.commit()?;
    let listed = remote.list(&commit, false)?;
    let dir = repository.snapshot(settings, &commit);

    let mut wanted = choose(repository, &listed, kind)?;
    if wanted.iter().any(|f| f == INDEX) {
        remote.fetch(&dir, &commit, &[INDEX.to_string()], &listed, false)?;
        let named = shards(&dir).map_err(|problem| remote.client_error(format!("{INDEX}: {problem}")))?;
        wanted.extend(named);
    }
    remote.fetch(&dir, &commit, &wanted, &listed, progress)?;

    if !is_commit(&repository.revision) {
        // Written last, so offline runs only find complete snapshots.
        let path = repository.reference(settings);
        write_atomic(&path, commit.as_bytes()).map_err(|e| remote.client_error(format!("the cache: {e}")))?;
    }
    for file in optional(kind) {
        if !listed.iter().any(|(name, _)| name == file) && !repository.is_absent(settings, &commit, file) {
            // Best effort: without the marker, later runs ask for a nonexistent file.
            let _ = write_atomic(&repository.absent(settings, &commit, file), b"");
        }
    }
    unreachable().remove(&settings.endpoint);
    Ok((dir, commit))
}

/// Downloads the dataset files selected by `choose` to the cache; returns the layout and the files.
pub(super) fn download_dataset(
    settings: &Settings,
    repository: &Repository,
    choose: &dyn Fn(&Layout) -> Result<Vec<String>, Error>,
    progress: bool,
) -> Result<(Layout, Vec<PathBuf>), Error> {
    let remote = Remote::connect(settings, repository, RETRIES, Some(settings.timeout))?;
    let (commit, configs) = remote.dataset()?;
    let listed = remote.list(&commit, true)?;
    let layout = Layout { commit, files: listed, configs };
    let wanted = choose(&layout)?;
    let dir = repository.snapshot(settings, &layout.commit);
    remote.fetch(&dir, &layout.commit, &wanted, &layout.files, progress)?;
    unreachable().remove(&settings.endpoint);
    let files = wanted.iter().map(|f| dir.join(f)).collect();
    Ok((layout, files))
}

/// Uploads files as a single commit; returns the URL of the repository.
pub(super) fn upload(settings: &Settings, repository: &Repository, push: &Push) -> Result<String, Error> {
    // no limit: the hub may take its time for a commit
    Remote::connect(settings, repository, RETRIES, None)?.push(push)
}

/// The first cause of an error.
fn innermost(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

struct Remote<'a> {
    settings: &'a Settings,
    repository: &'a Repository,
    client: HFClientSync,
    api: HFRepositorySync<RepoTypeAny>,
}

impl<'a> Remote<'a> {
    /// Prepares requests. `silence` is the time limit for the next bytes of an answer.
    fn connect(
        settings: &'a Settings,
        repository: &'a Repository,
        retries: usize,
        silence: Option<Duration>,
    ) -> Result<Self, Error> {
        let hint = match settings.endpoint.is_ascii() {
            true => "",
            false => "\nhint: write a host name with other than ASCII letters in Punycode (xn--..)",
        };
        let failed = |e: &dyn std::error::Error| Error::Client {
            id: repository.id(),
            message: scrub(settings, &format!("the hub's client (HF_ENDPOINT?): {}{hint}", innermost(e))),
        };
        let mut http = reqwest::Client::builder().user_agent(AGENT).connect_timeout(CONNECT);
        if let Some(limit) = silence {
            http = http.read_timeout(limit);
        }
        let mut builder = HFClient::builder()
            .client(http.build().map_err(|e| failed(&e))?)
            .endpoint(&settings.endpoint)
            .cache_dir(&settings.cache)
            .user_agent(AGENT)
            .retry_max_attempts(retries)
            .retry_base_delay(BACKOFF);
        if let Some(token) = &settings.token {
            builder = builder.token(token);
        }
        let client = builder.build_sync().map_err(|e| failed(&e))?;
        let kind = if repository.is_dataset() { RepoTypeAny::Dataset } else { RepoTypeAny::Model };
        let api = client.repository(kind, &repository.owner, &repository.name);
        Ok(Remote { settings, repository, client, api })
    }

    /// Resolves the revision to a commit.
    fn commit(&self) -> Result<String, Error> {
        let api = self.client.model(&self.repository.owner, &self.repository.name);
        let info =
            api.info().revision(self.repository.revision.clone()).send().map_err(|e| self.explain(e))?;
        self.named(info.sha)
    }

    /// Resolves the revision of a dataset; also returns the configs of the dataset card.
    fn dataset(&self) -> Result<(String, serde_json::Value), Error> {
        let api = self.client.dataset(&self.repository.owner, &self.repository.name);
        let info =
            api.info().revision(self.repository.revision.clone()).send().map_err(|e| self.explain(e))?;
        let configs = info.card_data.and_then(|mut c| Some(c.get_mut("configs")?.take()));
        Ok((self.named(info.sha)?, configs.unwrap_or_default()))
    }

    fn named(&self, commit: Option<String>) -> Result<String, Error> {
        commit
            .filter(|sha| is_commit(sha))
            .ok_or_else(|| self.client_error("the hub names no commit for that revision".into()))
    }

    /// Lists files with sizes: `all`, or those in the root and [`TOOL_USE`].
    fn list(&self, commit: &str, all: bool) -> Result<Vec<(String, u64)>, Error> {
        let wanted = |path: &str| all || !path.contains('/') || path == TOOL_USE;
        let tree =
            self.api.list_tree().revision(commit).recursive(true).send().map_err(|e| self.explain(e))?;
        Ok(tree
            .into_iter()
            .filter_map(|entry| match entry {
                // Names become paths in the cache; unusual ones are ignored.
                RepoTreeEntry::File { path, size, .. } if wanted(&path) && !path.contains(['\\', '\0']) => {
                    Some((path, size))
                }
                _ => None,
            })
            .collect())
    }

    /// Downloads files missing from the snapshot. A broken connection costs the files on their way, which begin anew.
    fn fetch(
        &self,
        dir: &Path,
        commit: &str,
        wanted: &[String],
        listed: &[(String, u64)],
        progress: bool,
    ) -> Result<(), Error> {
        let id = self.repository.id();
        let lacking = || self.lacking(dir, wanted, listed);
        if lacking()?.is_empty() {
            return Ok(());
        }
        // The client waits 10 s for a file of another process, and then gives up all of its own files.
        let waits = || tell(&format!("{id}: waiting for another process that downloads it"));
        let _turn = turn(&self.repository.lock(self.settings), &waits);
        let (mut left, mut broken, mut told) = (lacking()?, 0, false);
        while !left.is_empty() {
            match self.fetch_once(commit, &left, progress) {
                Ok(()) => return self.check(dir, &left),
                // another program than ft
                Err(HFError::CacheLockTimeout { .. }) => {
                    if !std::mem::replace(&mut told, true) {
                        waits();
                    }
                }
                Err(HFError::Request { source, .. })
                    if broken < RETRIES && (source.is_body() || source.is_decode()) =>
                {
                    broken += 1;
                    let cause = scrub(self.settings, &innermost(&source));
                    tell(&format!("{id}: the connection broke ({cause}): downloading the rest again"));
                }
                Err(e) => return Err(self.explain(e)),
            }
            let before = std::mem::replace(&mut left, lacking()?).len();
            if left.len() < before {
                broken = 0;
            }
        }
        Ok(())
    }

    /// Files missing from the snapshot, with their sizes; removes those of another size.
    fn lacking<'w>(
        &self,
        dir: &Path,
        wanted: &'w [String],
        listed: &[(String, u64)],
    ) -> Result<Vec<(&'w String, u64)>, Error> {
        let mut lacking = Vec::new();
        for file in wanted {
            let Some((_, size)) = listed.iter().find(|(name, _)| name == file) else {
                return Err(self.repository.no_file(file, format!(", which {INDEX} names")));
            };
            match size_of(&dir.join(file)) {
                Some(got) if got == *size => continue,
                Some(_) => remove_with_blob(&dir.join(file)),
                None => {}
            }
            lacking.push((file, *size));
        }
        Ok(lacking)
    }

    /// Downloads files, without a check.
    fn fetch_once(&self, commit: &str, files: &[(&String, u64)], progress: bool) -> Result<(), HFError> {
        let total = files.iter().map(|(_, size)| size).sum();
        let report = progress.then(|| Progress::new(Report::new(&self.repository.id(), files.len(), total)));
        self.api
            .snapshot_download()
            .revision(commit)
            .allow_patterns(files.iter().map(|(file, _)| literal(file)).collect())
            .max_workers(4)
            .maybe_progress(report)
            .send()
            .map(drop)
    }

    /// Checks the sizes of downloaded files, since the client stores any response body, even an error page.
    fn check(&self, dir: &Path, files: &[(&String, u64)]) -> Result<(), Error> {
        for (file, wanted) in files {
            let path = dir.join(file);
            let got = size_of(&path).unwrap_or(0);
            if got != *wanted {
                remove_with_blob(&path);
                let (id, file, wanted) = (self.repository.id(), (*file).clone(), *wanted);
                return Err(Error::Incomplete { id, file, got, wanted });
            }
        }
        Ok(())
    }

    /// Creates repository and branch if missing, and commits all files. Returns the URL.
    fn push(&self, push: &Push) -> Result<String, Error> {
        let id = self.repository.id();
        let refused = |e| self.explain_push(e);
        // a token may write to a repository, and not create one
        if self.api.exists().send().map_err(refused)? {
            if push.private {
                tell(&format!("{id} exists: who can see it does not change"));
            }
        } else {
            self.client
                .create_repository()
                .repo_id(&id)
                .repo_type(RepoTypeModel)
                .private(push.private)
                .exist_ok(true)
                .send()
                .map_err(refused)?;
        }
        if push.revision != MAIN {
            match self.api.create_branch().branch(&push.revision).send() {
                // the branch exists
                Ok(()) | Err(HFError::Conflict { .. }) => {}
                Err(e) => return Err(refused(e)),
            }
        }
        let files = push.files.iter().map(|(name, path)| CommitOperation::add_file(name, path));
        let texts =
            push.texts.iter().map(|(name, text)| CommitOperation::add_bytes(name, text.clone().into_bytes()));
        let total = push.files.iter().filter_map(|(_, path)| size_of(path)).sum();
        tell(&format!(
            "uploading {} files, {}, to {id}",
            push.files.len() + push.texts.len(),
            human_bytes(total)
        ));
        self.api
            .create_commit()
            .operations(files.chain(texts).collect())
            .commit_message(&push.message)
            .revision(&push.revision)
            .send()
            .map_err(refused)?;
        let endpoint = without_user(&self.settings.endpoint);
        Ok(match push.revision.as_str() {
            MAIN => format!("{endpoint}/{id}"),
            branch => format!("{endpoint}/{id}/tree/{branch}"),
        })
    }

    /// Converts an error of an upload.
    fn explain_push(&self, error: HFError) -> Error {
        let id = self.repository.id();
        if let HFError::Conflict { context } = &error {
            let said = context.server_message.clone().unwrap_or_else(|| "no reason given".into());
            let hint = "hint: somebody else wrote to it at the same time: try again";
            return Error::Push { id, message: format!("409, {}\n{hint}", scrub(self.settings, &said)) };
        }
        match self.explain(error) {
            Error::Unauthorized { endpoint, said, .. } => {
                let message = format!(
                    "the hub at {endpoint} does not let the token that is set write there{said}\nhint: a token with \
                     the role write (HF_TOKEN), of an account that may write to {}",
                    self.repository.owner
                );
                Error::Push { id, message }
            }
            Error::Client { message, .. } => Error::Push { id, message },
            e => e,
        }
    }

    fn client_error(&self, message: String) -> Error {
        Error::Client { id: self.repository.id(), message: scrub(self.settings, &message) }
    }

    /// Converts an error of the client, with a hint.
    fn explain(&self, error: HFError) -> Error {
        let id = self.repository.id();
        let endpoint = without_user(&self.settings.endpoint);
        let revision = Some(self.repository.revision.clone());
        match error {
            HFError::Request { source, .. } => {
                let cause = scrub(self.settings, &innermost(&source));
                if source.is_connect() || source.is_timeout() {
                    unreachable().insert(self.settings.endpoint.clone(), (cause.clone(), Instant::now()));
                }
                Error::Unreachable { id, endpoint, cause }
            }
            HFError::RepoNotFound { .. } => Error::NotFound { id, endpoint, revision: None },
            HFError::RevisionNotFound { context, .. } => {
                // The hub reports whether repository or revision is missing; other servers may not.
                let code = context.and_then(|c| c.error_code);
                let revision = revision.filter(|_| code.as_deref() != Some("RepoNotFound"));
                Error::NotFound { id, endpoint, revision }
            }
            HFError::EntryNotFound { path, .. } => self.repository.no_file(&path, ""),
            HFError::AuthRequired { context }
            | HFError::Forbidden { context }
            | HFError::RateLimited { context, .. }
            | HFError::Http { context } => {
                let status = context.status.as_u16();
                if status == 401 || status == 403 {
                    let gated = context.error_code.as_deref() == Some("GatedRepo");
                    let had_token = self.settings.token.is_some();
                    let said = context.server_message.filter(|m| !m.is_empty());
                    let said = said.map(|m| format!(": {}", scrub(self.settings, &m))).unwrap_or_default();
                    return Error::Unauthorized { id, endpoint, gated, had_token, said };
                }
                let message = match status {
                    429 => "too many requests; wait a while, or set HF_TOKEN".to_string(),
                    500.. => "the hub has a problem; try again later".to_string(),
                    _ => context.server_message.unwrap_or_else(|| "no reason given".to_string()),
                };
                let message = scrub(self.settings, &message);
                Error::Refused { id, endpoint, status, message }
            }
            HFError::Io(source) => Error::Cache { cache: self.settings.cache.clone(), source },
            HFError::Xet { operation, source } => self.client_error(format!(
                "the hub's xet storage: {} ({operation})\nhint: the network must let the hosts of xethub.hf.co \
                 through; HF_HUB_DISABLE_XET has no effect in ft",
                innermost(&*source)
            )),
            other => self.client_error(other.to_string()),
        }
    }
}

/// Locks the downloads of a repository; calls `waits` if another process has the lock. `None` without file locks.
fn turn(lock: &Path, waits: &dyn Fn()) -> Option<File> {
    std::fs::create_dir_all(folder_of(lock)).ok()?;
    let file = append(lock).ok()?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            waits();
            file.lock().ok()?;
        }
        Err(TryLockError::Error(_)) => return None,
    }
    Some(file)
}

fn size_of(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| m.len())
}

/// Removes a snapshot file and the linked blob, to force a new download.
fn remove_with_blob(path: &Path) {
    if let Ok(blob) = path.canonicalize() {
        // Best effort: a leftover file is detected by size.
        let _ = std::fs::remove_file(blob);
    }
    let _ = std::fs::remove_file(path);
}

/// Escapes a file name for use as a glob pattern.
fn literal(name: &str) -> String {
    name.chars()
        .map(|c| match c {
            '*' | '?' | '[' | ']' | '{' | '}' => format!("[{c}]"),
            c => c.to_string(),
        })
        .collect()
}

/// Removes the token, credentials and URL query strings (possibly signed) from a message.
fn scrub(settings: &Settings, text: &str) -> String {
    let mut text = match settings.token.as_deref() {
        Some(token) if !token.is_empty() => text.replace(token, "(token)"),
        _ => text.to_string(),
    };
    if let Some(user) = user_of(&settings.endpoint) {
        text = text.replace(user, "");
    }
    let words = text.split(' ').map(|word| match word.split_once('?') {
        Some((address, _)) if address.contains("://") => address,
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The `user:password@` part of a URL.
fn user_of(endpoint: &str) -> Option<&str> {
    let (_, rest) = endpoint.split_once("://")?;
    let host = rest.split('/').next()?;
    host.rfind('@').map(|at| &host[..=at])
}

fn without_user(endpoint: &str) -> String {
    match user_of(endpoint) {
        Some(user) => endpoint.replacen(user, "", 1),
        None => endpoint.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hf_hub::XetOperation;
    use std::cell::Cell;

    #[test]
    fn a_second_download_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join("a/ft.lock");
        let first = Cell::new(turn(&lock, &|| panic!("nobody has it")));
        let second = turn(&lock, &|| drop(first.take()));
        assert!(second.is_some() && first.take().is_none());
    }

    #[test]
    fn failures_of_xet_name_its_storage() {
        let settings = Settings::from_lookup(|_| None);
        let repository = Repository::parse("owner/name", "main").unwrap();
        let remote = Remote::connect(&settings, &repository, 0, None).unwrap();
        let cause = std::io::Error::other("it is blocked");
        let error = remote.explain(HFError::xet(XetOperation::BatchDownload, cause)).to_string();
        let wanted = ["owner/name", "xet storage: it is blocked", "HF_HUB_DISABLE_XET has no effect"];
        assert!(wanted.iter().all(|text| error.contains(text)), "{error}");
    }

    #[test]
    fn secrets_do_not_get_into_messages() {
        let mut settings = Settings::from_lookup(|_| None);
        settings.token = Some("hf_secret".into());
        settings.endpoint = "https://me:pass@mirror.example/x".into();
        let text =
            scrub(&settings, "Bearer hf_secret (https://me:pass@mirror.example/a?Signature=abc) really?");
        assert_eq!(text, "Bearer (token) (https://mirror.example/a really?");
        assert_eq!(without_user(&settings.endpoint), "https://mirror.example/x");
    }

    #[test]
    fn a_literal_name_is_escaped_as_a_pattern() {
        assert_eq!(literal("model-[1]*.safetensors"), "model-[[]1[]][*].safetensors");
    }
}
