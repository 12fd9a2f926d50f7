//! Files of a run folder besides the metrics.

use ft_base::store::{folder_bytes, read_plain};
use ft_plan::report::bytes;
use std::path::Path;

/// Largest recipe shown, in bytes.
const MAX_RECIPE: u64 = 1 << 20;
/// Most checkpoints listed.
const MAX_CHECKPOINTS: usize = 60;

/// The recipe, and a listing of results and checkpoints.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Text of `recipe.toml`, if readable.
    pub recipe: Option<String>,
    /// Folder of the result (`adapter` or `model`), if present.
    pub result: Option<String>,
    /// Path inside the folder, and size in words.
    pub rows: Vec<Vec<String>>,
}

impl Files {
    /// Inspects a run folder; missing files are skipped.
    pub fn list(run: &Path) -> Self {
        let size = |dir: &Path| bytes(folder_bytes(dir).unwrap_or(0));
        let recipe = read_plain(&run.join("recipe.toml"), MAX_RECIPE).ok();
        let recipe = recipe.map(|r| String::from_utf8_lossy(&r).into_owned());
        let mut out = Self { recipe, ..Self::default() };
        for result in ["adapter", "model"] {
            let dir = run.join(result);
            if dir.is_dir() {
                out.rows.push(vec![format!("{result}/"), size(&dir)]);
                out.result.get_or_insert_with(|| dir.display().to_string());
            }
        }
        let checkpoints = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
        let mut steps: Vec<_> = checkpoints
            .filter(|e| e.file_name().to_string_lossy().starts_with("step-"))
            .map(|e| {
                // COMPLETE is written last
                let whole = e.path().join("COMPLETE").is_file();
                let name = format!("checkpoints/{}/", e.file_name().to_string_lossy());
                vec![if whole { name } else { format!("{name} (not whole)") }, size(&e.path())]
            })
            .collect();
        steps.sort();
        steps.truncate(MAX_CHECKPOINTS);
        out.rows.extend(steps);
        out
    }
}
