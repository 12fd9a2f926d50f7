//! Files of a run folder besides its metrics.

use ft_plan::report::bytes;
use std::path::Path;

/// Largest recipe shown, in bytes.
const RECIPE: u64 = 1 << 20;
/// Most checkpoints listed.
const LISTED: usize = 60;

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

/// Bytes of all files in a folder, down to `depth` levels, not following links.
fn size(dir: &Path, depth: usize) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| match e.file_type() {
            Ok(t) if t.is_dir() && depth > 0 => size(&e.path(), depth - 1),
            Ok(t) if t.is_file() => e.metadata().map_or(0, |m| m.len()),
            _ => 0,
        })
        .sum()
}

impl Files {
    /// Inspects a run folder; missing files are skipped.
    pub fn look(run: &Path) -> Self {
        let recipe = run.join("recipe.toml");
        let recipe = ft_base::store::read_plain(&recipe, RECIPE).ok();
        let mut out =
            Self { recipe: recipe.map(|r| String::from_utf8_lossy(&r).into_owned()), ..Self::default() };
        for result in ["adapter", "model"] {
            let dir = run.join(result);
            if dir.is_dir() {
                out.rows.push(vec![format!("{result}/"), bytes(size(&dir, 1))]);
                out.result.get_or_insert_with(|| dir.display().to_string());
            }
        }
        let checkpoints = run.join("checkpoints");
        let entries = std::fs::read_dir(&checkpoints).into_iter().flatten().flatten();
        let mut steps: Vec<_> = entries
            .filter(|e| e.file_name().to_string_lossy().starts_with("step-"))
            .map(|e| {
                // COMPLETE is written last
                let whole = e.path().join("COMPLETE").is_file();
                let name = format!("checkpoints/{}/", e.file_name().to_string_lossy());
                vec![if whole { name } else { format!("{name} (not whole)") }, bytes(size(&e.path(), 1))]
            })
            .collect();
        steps.sort();
        steps.truncate(LISTED);
        out.rows.extend(steps);
        out
    }
}
