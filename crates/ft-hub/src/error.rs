//! Errors of the hub and of local model folders.

use std::path::{Path, PathBuf};

use ft_base::error::{ExitCode, Failure};

/// A failed download, upload or lookup. Messages never contain a token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A local path that does not exist.
    #[error("{source_name:?} is not there: no such folder{hint}")]
    Missing {
        /// The source as given.
        source_name: String,
        /// Possible intended meaning; empty, or starts with a separator.
        hint: &'static str,
    },
    /// A file instead of a folder.
    #[error("{} is a file; name the folder that it is in", path.display())]
    NotAFolder {
        /// Path of the file.
        path: PathBuf,
    },
    /// A local folder without a required file.
    #[error("{} has no {file}{hint}", dir.display())]
    NoLocalFile {
        /// Path of the folder.
        dir: PathBuf,
        /// Name of the file.
        file: &'static str,
        /// Actual content of the folder; empty, or starts with a separator.
        hint: &'static str,
    },
    /// An adapter in the place of a model.
    #[error(
        "{place} is an adapter, not a model: it has adapter_config.json\nhint: name it in lora.init, or as --adapter"
    )]
    IsAdapter {
        /// Folder or hub id.
        place: String,
    },
    /// Weights only in PyTorch's pickle format, unsafe to load.
    #[error(
        "{place} has weights as PyTorch pickle files only ({file}), which can run code when they are \
         read, so ft never reads them\n\
         hint: look for a safetensors release, or convert it: in Python, save_pretrained(DIR, safe_serialization=True)"
    )]
    PickleOnly {
        /// Folder or hub id.
        place: String,
        /// Name of a pickle file.
        file: String,
    },
    /// A hub repository without a required file.
    #[error("{id} has no {file} at revision {revision:?}{hint}")]
    NoHubFile {
        /// The hub id.
        id: String,
        /// The requested revision.
        revision: String,
        /// Name of the file.
        file: String,
        /// Actual content of the repository; empty, or starts with a separator.
        hint: String,
    },
    /// An invalid hub id or revision.
    #[error("{what} {text:?} is not well formed: {rule}")]
    BadName {
        /// "hub id" or "revision".
        what: &'static str,
        /// The name as given.
        text: String,
        /// The violated rule.
        rule: &'static str,
    },
    /// Repository or revision not found.
    #[error("{id} is not on the hub at {endpoint}{}\nhint: check the spelling; a local folder is \
        written ./{id}", revision.as_ref().map(|r| format!(", or has no revision {r:?}")).unwrap_or_default())]
    NotFound {
        /// The hub id.
        id: String,
        /// The hub's URL.
        endpoint: String,
        /// The revision, if possibly the missing part.
        revision: Option<String>,
    },
    /// Access requires authentication.
    #[error("{}", unauthorized(id, endpoint, *gated, *had_token, said))]
    Unauthorized {
        /// The hub id.
        id: String,
        /// The hub's URL.
        endpoint: String,
        /// Whether a license must be accepted.
        gated: bool,
        /// Whether a token was sent.
        had_token: bool,
        /// The server's reason; empty, or starts with a separator.
        said: String,
    },
    /// The hub is unreachable.
    #[error(
        "cannot reach the hub at {endpoint} for {id}: {cause}\n\
         hint: check the network (HTTPS_PROXY, HF_ENDPOINT), or fetch the model on another machine and \
         name its folder{}",
        no_folder(id)
    )]
    Unreachable {
        /// The hub id.
        id: String,
        /// The hub's URL.
        endpoint: String,
        /// The network error.
        cause: String,
    },
    /// Any other HTTP error.
    #[error("the hub at {endpoint} answered {status} for {id}: {message}")]
    Refused {
        /// The hub id.
        id: String,
        /// The hub's URL.
        endpoint: String,
        /// The HTTP status.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// Offline mode, and a file is not cached.
    #[error(
        "{file} of {id} (revision {revision:?}) is not in the cache {}, and HF_HUB_OFFLINE is set\n\
         hint: unset it, or run `hf download {id}{option} --revision {revision}` where there is a network{}",
        cache.display(), no_folder(id)
    )]
    NotCached {
        /// The hub id.
        id: String,
        /// The requested revision.
        revision: String,
        /// Name of the missing file.
        file: String,
        /// Option of `hf download` for the kind of repository; empty, or starts with a space.
        option: &'static str,
        /// The cache folder.
        cache: PathBuf,
    },
    /// A download of unexpected size.
    #[error("{file} of {id} came with {got} bytes and should have {wanted}; it was removed: try again")]
    Incomplete {
        /// The hub id.
        id: String,
        /// Name of the file.
        file: String,
        /// Bytes on disk.
        got: u64,
        /// Bytes listed by the hub.
        wanted: u64,
    },
    /// The cache is not writable.
    #[error("cannot write the cache {}: {source}\nhint: free some space there, or set HF_HOME to \
         another folder", cache.display())]
    Cache {
        /// The cache folder.
        cache: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// Any other error of the client.
    #[error("cannot fetch {id}: {message}")]
    Client {
        /// The hub id.
        id: String,
        /// The client's message, without token and query strings.
        message: String,
    },
    /// A failed upload.
    #[error("cannot push to {id}: {message}")]
    Push {
        /// The hub id.
        id: String,
        /// Reason and remedy, without the token.
        message: String,
    },
    /// An unknown config or split of a dataset.
    #[error("the dataset {id}: {message}")]
    NoSuchPart {
        /// The hub id.
        id: String,
        /// The unknown name, and the available ones.
        message: String,
    },
    /// A build without download support.
    #[error(
        "{id} is a hub id, and this ft was built without the hub feature; name a local folder, or \
            build with --features hub{}",
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

impl Error {
    /// Whether the cache answers in place of the hub: one that is unreachable or busy, fails, or refuses the token.
    pub(super) fn allows_cache(&self) -> bool {
        match self {
            Error::Unreachable { .. } | Error::Unauthorized { .. } => true,
            Error::Refused { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }
}

/// Hint for a hub id that may be a local path, if the first component is an existing folder.
fn no_folder(id: &str) -> String {
    match id.split_once('/') {
        Some((folder, _)) if Path::new(folder).is_dir() => {
            format!("\nhint: there is no folder {id:?} here, where there is {folder:?}")
        }
        _ => String::new(),
    }
}

fn unauthorized(id: &str, endpoint: &str, gated: bool, had_token: bool, said: &str) -> String {
    match (gated, had_token) {
        (true, false) => format!(
            "{id} is gated{said}\nhint: accept its license at {endpoint}/{id}, then set HF_TOKEN to a token of that \
                account"
        ),
        (true, true) => format!(
            "{id} is gated, and the token that is set has no access to it{said}\nhint: accept its license \
                at {endpoint}/{id} with the account of that token (HF_TOKEN)"
        ),
        (false, false) => format!(
            "{id} is not on the hub at {endpoint}, or it is private or gated{said}\nhint: check the \
                spelling; for a private or gated model accept its license there and set HF_TOKEN"
        ),
        (false, true) => format!(
            "the hub at {endpoint} does not give {id} to the token that is set{said}\nhint: check the \
                spelling, that HF_TOKEN is valid, and that its account has accepted the model's license"
        ),
    }
}
