//! Figures of `ft bench`, kept by name in JSON files of the cache folder of `ft`.

use ft_base::store;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file of figures.
pub(super) struct BenchCache(pub &'static str);

impl BenchCache {
    /// The file, or `None` without a cache folder. Unit tests have none: figures of the user's would change plans.
    pub fn path(&self) -> Option<PathBuf> {
        if cfg!(test) { None } else { Some(store::cache_folder()?.join(self.0)) }
    }

    fn all<T: DeserializeOwned>(&self) -> BTreeMap<String, T> {
        let text = self.path().and_then(|path| store::read_plain_text(&path, store::LARGEST).ok());
        text.and_then(|t| serde_json::from_str(&t).ok()).unwrap_or_default()
    }

    /// The figure of this name, if any.
    pub fn find<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.all().remove(key)
    }

    /// The first accepted figure, by name.
    pub fn find_by<T: DeserializeOwned>(&self, accepts: impl Fn(&str, &T) -> bool) -> Option<T> {
        self.all().into_iter().find(|(name, figure)| accepts(name, figure)).map(|(_, figure)| figure)
    }

    /// Stores a figure and returns the file, or `None` without a cache folder.
    ///
    /// # Errors
    /// A cache folder or file that cannot be written.
    pub fn save<T: Serialize + DeserializeOwned>(
        &self,
        key: String,
        figure: T,
    ) -> Result<Option<PathBuf>, store::Error> {
        let Some(path) = self.path() else { return Ok(None) };
        let mut all = self.all();
        all.insert(key, figure);
        write(&path, &all)?;
        Ok(Some(path))
    }
}

/// Writes all figures of a file, and makes its folder.
pub(super) fn write(path: &Path, all: &impl Serialize) -> Result<(), store::Error> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(|e| store::Error::write("make the folder", dir, e))?;
    }
    store::write_json(path, all)
}
