//! Runs of the whole loop.

mod composed;
mod observer;
mod out_of_memory;
mod ranks;
mod session;

use anyhow::Result;
use ft_recipe::Recipe;
use serde_json::Value;
use std::path::Path;

pub(super) const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The quickstart without evaluation on the CPU, in the folder `out`.
pub(super) fn quickstart(out: &Path, set: &[&str]) -> ft_base::Result<Recipe> {
    let mut all = vec![
        "run.device=cpu".to_string(),
        format!("run.output={}", out.display()),
        format!("model.source={ROOT}/data/model"),
        format!("data.train.0.source={ROOT}/data/quickstart/train.jsonl"),
        "data.eval=[]".into(),
        "run.eval_every=0".into(),
    ];
    all.extend(set.iter().map(|s| s.to_string()));
    Ok(Recipe::load(Path::new(&format!("{ROOT}/recipes/quickstart.toml")), &all)?)
}

/// Events of a kind in the metrics of a run.
pub(super) fn events(run: &Path, kind: &str) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl"))?;
    let all: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    Ok(all.into_iter().filter(|e| e["event"] == kind).collect())
}
