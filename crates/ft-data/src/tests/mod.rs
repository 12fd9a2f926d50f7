//! Tests of the data pipeline; unit tests are in the modules.

#[cfg(feature = "parquet")]
mod arrow;
mod broken;
mod cached;
pub(super) mod chat;
mod digest;
mod kept;
mod many;
mod properties;
mod rows;
mod tables;

use super::*;
use ft_base::error::Location;
use ft_recipe::{Form, Format, OnBadRow, OverLength, Part};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/fixtures").join(name)
}

fn tiny() -> Tokenizer {
    Tokenizer::load(&fixture("tiny-tokenizer"), None).unwrap().unwrap()
}

pub(super) fn source(path: &str, format: Format) -> ft_recipe::Source {
    ft_recipe::Source {
        source: path.into(),
        format: Some(format),
        form: format.is_template_default().then_some(Form::Plain),
        weight: 1.0,
        split: None,
        max_samples: None,
        config: None,
        revision: None,
        encoding: None,
        fields: Default::default(),
        mask: None,
        place: Location { file: "recipe.toml".into(), line: 7, column: 3 },
        fetched: Vec::new(),
    }
}

fn data(max_length: usize) -> ft_recipe::Data {
    ft_recipe::Data {
        train: Vec::new(),
        eval: Vec::new(),
        eval_share: 0.0,
        max_length,
        over_length: OverLength::Truncate,
        on_bad_row: OnBadRow::Error,
        drop_share: 1.0,
        cache: true,
        pack: false,
        shuffle: false,
        mask: None,
        chat_template: None,
        template: Default::default(),
        neftune: 0.0,
        scores: Default::default(),
        taught: false,
    }
}

/// Settings with these training sources.
fn of(sources: &[ft_recipe::Source], cfg: &ft_recipe::Data) -> ft_recipe::Data {
    ft_recipe::Data { train: sources.to_vec(), ..cfg.clone() }
}

/// Training data from the files of a folder.
fn load_in(
    dir: &Path,
    sources: &[ft_recipe::Source],
    cfg: &ft_recipe::Data,
    tokenizer: &Tokenizer,
) -> Result<Dataset, Error> {
    Dataset::load(Part::Train, &of(sources, cfg), &|s| dir.join(s), Some(tokenizer), 285, 11)
}

/// All samples of a dataset.
fn all(d: &Dataset) -> Vec<Example> {
    d.samples.all().unwrap()
}

/// The sample numbers of all rows.
fn lists(rows: &Rows) -> Vec<Vec<u32>> {
    (0..rows.len()).map(|r| rows.get(r).unwrap()).collect()
}

/// Sample `i` of a dataset.
fn nth(d: &Dataset, i: usize) -> Example {
    d.samples.get(i).unwrap().unwrap()
}

/// A temporary folder of data files.
struct Files(tempfile::TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        Self(dir)
    }

    fn load(&self, sources: &[ft_recipe::Source], cfg: &ft_recipe::Data) -> Result<Dataset, Error> {
        load_in(self.0.path(), sources, cfg, &tiny())
    }
}
