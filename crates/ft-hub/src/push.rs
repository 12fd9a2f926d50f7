//! Uploads to the hub, through the `hf-hub` crate.

use super::error::Error;
use super::files::Repository;
use super::remote::upload;
use super::request::Push;
use super::settings::Settings;

/// Validates the names of a repository and branch.
///
/// # Errors
/// The invalid name, and the rule.
pub fn check_name(repository: &str, revision: &str) -> Result<(), Error> {
    Repository::parse(repository, revision).map(|_| ())
}

/// Uploads, and returns the URL of the repository.
///
/// # Errors
/// A missing token, an invalid name, or an error of the hub, without the token.
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
