//! Files of a run folder besides its metrics.

use ft_plan::report::bytes;
use std::fs::DirEntry;
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

/// Entries of a folder; empty if unreadable.
fn entries(dir: &Path) -> impl Iterator<Item = DirEntry> {
    std::fs::read_dir(dir).into_iter().flatten().flatten()
}

/// Bytes of all files in a folder, down to `depth` levels, not following links.
fn size(dir: &Path, depth: usize) -> u64 {
    entries(dir)
        .map(|e| match e.file_type() {
            Ok(t) if t.is_dir() && depth > 0 => size(&e.path(), depth - 1),
            Ok(t) if t.is_file() => e.metadata().map_or(0, |m| m.len()),
            _ => 0,
        })
        .sum()
}

impl Files {
    /// Inspects a run folder; missing files are skipped.
    pub fn list(run: &Path) -> Self {
        let recipe = ft_base::store::read_plain(&run.join("recipe.toml"), MAX_RECIPE).ok();
        let recipe = recipe.map(|r| String::from_utf8_lossy(&r).into_owned());
        let mut out = Self { recipe, ..Self::default() };
        for result in ["adapter", "model"] {
            let dir = run.join(result);
            if dir.is_dir() {
                out.rows.push(vec![format!("{result}/"), bytes(size(&dir, 1))]);
                out.result.get_or_insert_with(|| dir.display().to_string());
            }
        }
        let mut steps: Vec<_> = entries(&run.join("checkpoints"))
            .filter(|e| e.file_name().to_string_lossy().starts_with("step-"))
            .map(|e| {
                // COMPLETE is written last
                let whole = e.path().join("COMPLETE").is_file();
                let name = format!("checkpoints/{}/", e.file_name().to_string_lossy());
                vec![if whole { name } else { format!("{name} (not whole)") }, bytes(size(&e.path(), 1))]
            })
            .collect();
        steps.sort();
        steps.truncate(MAX_CHECKPOINTS);
        out.rows.extend(steps);
        out
    }
}
