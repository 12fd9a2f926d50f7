//! Names of the files and folders of a run, and its end.

use crate::log::last_event;
use crate::report::CARD;
use ft_engine::adapters::Selection;
use ft_engine::files::{MODEL_FILES, TOKENIZER_FILES, TensorFiles};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Folder of the checkpoints in a run folder.
pub const CHECKPOINTS: &str = "checkpoints";

/// Whether a folder is a run folder.
pub fn is_run(dir: &Path) -> bool {
    ["recipe.toml", "metrics.jsonl"].iter().all(|f| dir.join(f).is_file())
}

/// Returns the `end` event of a run, if last. Otherwise, the result on disk belongs to an earlier run or step.
pub fn end_of(run: &Path) -> Option<Value> {
    last_event(&run.join("metrics.jsonl")).filter(|e| e["event"] == "end")
}

/// Folder of the result in a run folder.
pub fn result_dir(selection: &Selection, dir: &Path) -> PathBuf {
    dir.join(if selection.everything_full() { MODEL } else { ADAPTER })
}

/// Whether the folder of a result has its config, and weights with sound headers.
pub fn is_whole(result: &Path) -> bool {
    let has = |file: &str| result.join(file).is_file();
    let weights = || TensorFiles::open_file(&result.join("adapter_model.safetensors"));
    has("adapter_config.json") && weights().is_ok()
        || has("config.json") && TensorFiles::open_model(result).is_ok()
}

/// Possible folder names of a result.
pub const RESULTS: [&str; 2] = [ADAPTER, MODEL];
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";

/// Returns true for names of files written by `ft` to a model folder, and of subfolders, ending in `/`.
pub fn is_of_model(name: &str) -> bool {
    let weights = name.starts_with("model")
        && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
    let own = ["config.json", ft_engine::load::CACHE_MARKER, CARD];
    weights || own.contains(&name) || is_among(MODEL_FILES, name) || is_among(TOKENIZER_FILES, name)
}

/// Whether a name is of one of the files, or of a subfolder with one.
fn is_among(files: &[&str], name: &str) -> bool {
    files.iter().any(|file| *file == name || name.ends_with('/') && file.starts_with(name))
}

/// Returns true for names of files written by `ft` to an adapter folder, except the record of the prompt format, and of
/// subfolders, ending in `/`.
pub fn is_of_adapter(name: &str) -> bool {
    ["adapter_config.json", "adapter_model.safetensors", CARD].contains(&name)
        || is_among(TOKENIZER_FILES, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A template of an older result would be used beside the new chat template.
    #[test]
    fn a_result_replaces_the_template_for_tools() {
        for is_ours in [is_of_model, is_of_adapter] {
            assert!(is_ours(ft_data::TOOL_USE) && is_ours("additional_chat_templates/"));
            assert!(!is_ours("additional_chat_templates") && !is_ours("notes/") && !is_ours("/"));
            assert!(!is_ours("additional_chat_templates/mine.jinja"));
        }
    }
}
