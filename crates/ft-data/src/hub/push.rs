//! Uploads to the hub, through crate `hf-hub`.

use super::Error;
use super::Settings;
use super::files::Repository;
#[cfg(feature = "hub")]
use super::remote::Remote;
use std::path::PathBuf;

/// One commit of files.
#[derive(Clone, Debug)]
pub struct Push {
    /// `OWNER/NAME`; made if it is not there.
    pub repository: String,
    /// The branch; made if it is not there.
    pub revision: String,
    /// Whether a repository that is made is private. One that is there stays as it is.
    pub private: bool,
    /// The commit's message.
    pub message: String,
    /// Names in the repository, and the files that become them.
    pub files: Vec<(String, PathBuf)>,
    /// Names and contents of files that are on no disk.
    pub texts: Vec<(String, String)>,
}

/// Refuses a repository or a branch that the hub can have by no such name.
///
/// # Errors
/// The name, and what it should be.
pub fn check_name(repository: &str, revision: &str) -> Result<(), Error> {
    Repository::parse(repository, revision).map(|_| ())
}

/// Uploads, and gives the address of the repository.
///
/// # Errors
/// No token; a name that cannot be; what the hub refuses, in its words, without the token.
pub fn push_with(settings: &Settings, push: &Push) -> Result<String, Error> {
    let repository = Repository::parse(&push.repository, &push.revision)?;
    let id = repository.id();
    if !cfg!(feature = "hub") {
        return Err(Error::WithoutHub { id });
    }
    if settings.offline {
        return Err(Error::Push { id, message: "HF_HUB_OFFLINE is set\nhint: unset it".into() });
    }
    if settings.token.is_none() {
        let message = "the hub wants to know who asks, and no token is set\nhint: HF_TOKEN, of a token that may write \
                       (on the hub: Settings, Access Tokens), or `hf auth login`";
        return Err(Error::Push { id, message: message.into() });
    }
    upload(settings, &repository, push)
}

#[cfg(feature = "hub")]
fn upload(settings: &Settings, repository: &Repository, push: &Push) -> Result<String, Error> {
    Remote::connect(settings, repository)?.push(push)
}

#[cfg(not(feature = "hub"))]
fn upload(_settings: &Settings, repository: &Repository, _push: &Push) -> Result<String, Error> {
    Err(Error::WithoutHub { id: repository.id() })
}
