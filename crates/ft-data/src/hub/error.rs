//! What can go wrong on the way to a model.

use std::path::{Path, PathBuf};

use ft_base::error::{ExitCode, Failure};

/// A model or adapter that could not be had. No message ever holds a token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What looks like a local path, and nothing is there.
    #[error("{source_name:?} is not there: no such folder{hint}")]
    Missing {
        /// The source as it was written.
        source_name: String,
        /// What else it could have meant; empty, or starts with a separator.
        hint: &'static str,
    },
    /// A file where a folder is needed.
    #[error("{} is a file; name the folder that it is in", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// A local folder that lacks a file.
    #[error("{} has no {file}{hint}", dir.display())]
    NoLocalFile {
        /// The folder.
        dir: PathBuf,
        /// The file.
        file: &'static str,
        /// What the folder is instead; empty, or starts with a separator.
        hint: &'static str,
    },
    /// Weights in PyTorch's pickle format only, which can run code when they are read.
    #[error(
        "{place} has weights as PyTorch pickle files only ({file}), which can run code when they are \
         read, so ft never reads them\n\
         hint: look for a safetensors release, or convert it: in Python, save_pretrained(DIR, safe_serialization=True)"
    )]
    PickleOnly {
        /// The folder or hub id.
        place: String,
        /// One of the files.
        file: String,
    },
    /// A hub repository that lacks a file that is needed.
    #[error("{id} has no {file} at revision {revision:?}{hint}")]
    NoHubFile {
        /// The hub id.
        id: String,
        /// The revision asked for.
        revision: String,
        /// The file.
        file: String,
        /// What it has instead; empty, or starts with a separator.
        hint: String,
    },
    /// A name that cannot be a hub id, or a revision that cannot be one.
    #[error("{what} {text:?} is not well formed: {rule}")]
    BadName {
        /// "hub id" or "revision".
        what: &'static str,
        /// As it was written.
        text: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// No such repository, or no such revision of it.
    #[error("{id} is not on the hub at {endpoint}{}\nhint: check the spelling; a local folder is written ./{id}", revision.as_ref().map(|r| format!(", or has no revision {r:?}")).unwrap_or_default())]
    NotFound {
        /// The hub id.
        id: String,
        /// The hub's address.
        endpoint: String,
        /// The revision, when it may be what is missing.
        revision: Option<String>,
    },
    /// The hub wants to know who asks.
    #[error("{}", unauthorized(id, endpoint, *gated, *had_token))]
    Unauthorized {
        /// The hub id.
        id: String,
        /// The hub's address.
        endpoint: String,
        /// Whether the hub says that a licence must be accepted.
        gated: bool,
        /// Whether a token was sent.
        had_token: bool,
    },
    /// No answer from the hub.
    #[error(
        "cannot reach the hub at {endpoint} for {id}: {cause}\n\
         hint: check the network (HTTPS_PROXY, HF_ENDPOINT), or fetch the model on another machine and name its folder{}",
        no_folder(id)
    )]
    Unreachable {
        /// The hub id.
        id: String,
        /// The hub's address.
        endpoint: String,
        /// What the network said.
        cause: String,
    },
    /// An answer from the hub that is an error of another kind.
    #[error("the hub at {endpoint} answered {status} for {id}: {message}")]
    Refused {
        /// The hub id.
        id: String,
        /// The hub's address.
        endpoint: String,
        /// The HTTP status.
        status: u16,
        /// What it said.
        message: String,
    },
    /// Offline, and the cache lacks a file.
    #[error(
        "{file} of {id} (revision {revision:?}) is not in the cache {}, and HF_HUB_OFFLINE is set\n\
         hint: unset it, or run `hf download {id} --revision {revision}` where there is a network{}",
        cache.display(), no_folder(id)
    )]
    NotCached {
        /// The hub id.
        id: String,
        /// The revision asked for.
        revision: String,
        /// The file that is missing.
        file: String,
        /// The cache folder.
        cache: PathBuf,
    },
    /// A download that is not the file that the hub lists.
    #[error("{file} of {id} came with {got} bytes and should have {wanted}; it was removed: try again")]
    Incomplete {
        /// The hub id.
        id: String,
        /// The file.
        file: String,
        /// Bytes on disk.
        got: u64,
        /// Bytes that the hub lists.
        wanted: u64,
    },
    /// The cache cannot be written.
    #[error("cannot write the cache {}: {source}\nhint: free some space there, or set HF_HOME to another folder", cache.display())]
    Cache {
        /// The cache folder.
        cache: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Anything else that the client reports.
    #[error("cannot fetch {id}: {message}")]
    Client {
        /// The hub id.
        id: String,
        /// What the client said, without token and query strings.
        message: String,
    },
    /// An upload that cannot be.
    #[error("cannot push to {id}: {message}")]
    Push {
        /// The hub id.
        id: String,
        /// Why, and what to do; without the token.
        message: String,
    },
    /// A config or a split that a dataset does not have.
    #[error("the dataset {id}: {message}")]
    NoSuchPart {
        /// The hub id.
        id: String,
        /// What it lacks, and what it has.
        message: String,
    },
    /// This build cannot download.
    #[error(
        "{id} is a hub id, and this ft was built without the hub feature; name a local folder, or build with --features hub{}",
        no_folder(id)
    )]
    WithoutHub {
        /// The hub id.
        id: String,
    },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Cache { .. } => ExitCode::Storage,
            Error::NoSuchPart { .. } => ExitCode::Data,
            _ => ExitCode::Model,
        }
    }
}

/// What is said beside of a hub id that may be a path: it begins with a folder that is here.
fn no_folder(id: &str) -> String {
    match id.split_once('/') {
        Some((folder, _)) if Path::new(folder).is_dir() => {
            format!("\nhint: there is no folder {id:?} here, where there is {folder:?}")
        }
        _ => String::new(),
    }
}

fn unauthorized(id: &str, endpoint: &str, gated: bool, had_token: bool) -> String {
    match (gated, had_token) {
        (true, false) => format!(
            "{id} is gated\nhint: accept its licence at {endpoint}/{id}, then set HF_TOKEN to a token of that account"
        ),
        (true, true) => format!(
            "{id} is gated, and the token that is set has no access to it\nhint: accept its licence at {endpoint}/{id} with the account of that token (HF_TOKEN)"
        ),
        (false, false) => format!(
            "{id} is not on the hub at {endpoint}, or it is private or gated\nhint: check the spelling; for a private or gated model accept its licence there and set HF_TOKEN"
        ),
        (false, true) => format!(
            "the hub at {endpoint} does not give {id} to the token that is set\nhint: check the spelling, that HF_TOKEN is valid, and that its account has accepted the model's licence"
        ),
    }
}
