//! Figures of `ft bench`, kept by name in JSON files of the cache folder of `ft`.

use ft_base::store;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A file of figures.
pub(super) struct BenchCache(pub &'static str);

impl BenchCache {
    /// The file, or `None` without a cache folder. Unit tests have none: figures of the user's would change plans.
    pub fn path(&self) -> Option<PathBuf> {
        if cfg!(test) { None } else { Some(store::cache_folder()?.join(self.0)) }
    }

    /// The first accepted figure, by name.
    pub fn find<T: DeserializeOwned>(&self, accepts: impl Fn(&str, &T) -> bool) -> Option<T> {
        let all = entries(&self.path()?).unwrap_or_default().into_iter();
        let mut figures = all.filter_map(|(name, value)| Some((name, serde_json::from_value(value).ok()?)));
        figures.find(|(name, figure)| accepts(name, figure)).map(|(_, figure)| figure)
    }

    /// Stores a figure and returns the file, or `None` without a cache folder. An unreadable file is replaced.
    ///
    /// # Errors
    /// An unwritable cache folder or file.
    pub fn save(&self, key: &str, figure: &impl Serialize) -> Result<Option<PathBuf>, store::Error> {
        self.path().map(|path| insert(&path, key, figure).map(|()| path)).transpose()
    }
}

/// The entries of a file by name; none without the file. Entries of other versions of ft may have another form.
pub(super) fn entries(path: &Path) -> Result<Map<String, Value>, String> {
    match store::read_plain_text(path, store::LARGEST) {
        Ok(text) => serde_json::from_str(&text).map_err(|e| e.to_string()),
        Err(e) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&e.kind()) => Ok(Map::new()),
        Err(e) => Err(e.to_string()),
    }
}

/// Stores a figure in a file.
pub(super) fn insert(path: &Path, key: &str, figure: &impl Serialize) -> Result<(), store::Error> {
    let mut all = entries(path).unwrap_or_default();
    all.insert(key.into(), serde_json::to_value(figure).unwrap_or_default());
    store::write_json(path, &all)
}
