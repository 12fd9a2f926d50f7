//! Stands in for `remote.rs` in a build without the feature `hub`.

use super::error::Error;
use super::files::Repository;
use super::request::{Kind, Layout, Push};
use super::settings::Settings;
use std::path::PathBuf;

type Choose<'a> = &'a dyn Fn(&Layout) -> Result<Vec<String>, Error>;

pub(super) fn download(
    _: &Settings,
    repository: &Repository,
    _: Kind,
    _: bool,
) -> Result<(PathBuf, String), Error> {
    Err(Error::WithoutHub { id: repository.id() })
}

pub(super) fn download_dataset(
    _: &Settings,
    repository: &Repository,
    _: Choose<'_>,
    _: bool,
) -> Result<(Layout, Vec<PathBuf>), Error> {
    Err(Error::WithoutHub { id: repository.id() })
}

pub(super) fn upload(_: &Settings, repository: &Repository, _: &Push) -> Result<String, Error> {
    Err(Error::WithoutHub { id: repository.id() })
}
