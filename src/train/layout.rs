//! Names of the files and folders of a run.

use crate::report::CARD;
use ft_engine::adapters::Selection;
use ft_engine::files::COMPANIONS;
use std::path::{Path, PathBuf};

/// Folder of the checkpoints in a run folder.
pub const CHECKPOINTS: &str = "checkpoints";

/// Folder of the result in a run folder.
pub fn result_dir(selection: &Selection, dir: &Path) -> PathBuf {
    dir.join(if selection.everything_full() { MODEL } else { ADAPTER })
}

/// Possible folder names of a result.
pub const RESULTS: [&str; 2] = [ADAPTER, MODEL];
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";

/// Returns true for file names that `ft` writes to a model folder.
pub fn is_of_model(name: &str) -> bool {
    let weights = name.starts_with("model")
        && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
    let own = ["config.json", ft_engine::load::CACHE_MARKER, CARD];
    weights || own.contains(&name) || COMPANIONS.contains(&name)
}

/// Files of the tokenizer.
pub fn tokenizer_files() -> &'static [&'static str] {
    &COMPANIONS[5..]
}

/// Returns true for file names that `ft` writes to an adapter folder, except the record of the prompt
/// format.
pub fn is_of_adapter(name: &str) -> bool {
    ["adapter_config.json", "adapter_model.safetensors", CARD].contains(&name)
        || tokenizer_files().contains(&name)
}
