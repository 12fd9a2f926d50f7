//! Lists the parameters trained by a set of rules, from the config of a model; needs no weights.
//!
//! ```text
//! cargo run --release --example what_trains -- data/model
//! ```

use anyhow::Context;
use ft::adapters::Selection;
use ft::model::{Config, modules};
use ft::recipe::Recipe;
use std::path::Path;

fn main() -> anyhow::Result<()> {
    let dir = std::env::args().nth(1).context("usage: what_trains MODEL_FOLDER")?;
    let config = Config::load(Path::new(&dir), &serde_json::Map::new())?;
    println!("{}: {:.1} M parameters", config.family.model_type, modules::parameters(&config) as f64 / 1e6);
    for (what, rules) in [
        ("LoRA of rank 16 on attention", "modules = [\"attention\"]\nrank = 16"),
        (
            "LoRA of rank 16 on all linears of the upper half",
            "modules = [\"attention\", \"mlp\"]\nlayers = \"-3:\"\nrank = 16",
        ),
        ("norms in full", "modules = [\"norms\"]\nmethod = \"full\""),
    ] {
        let text = format!(
            "[model]\nsource = \"{dir}\"\n[[train]]\n{rules}\n[data]\ntrain = [{{ source = \"x.jsonl\", format = \"text\" }}]\n"
        );
        let recipe = Recipe::parse(&text, "rules.toml", &[])?;
        let trained = Selection::from_rules(&config, &recipe.train)?.trained();
        let values: usize = trained.iter().map(|t| t.elements()).sum();
        println!("{what}: {} tensors, {values} values; the first is {}", trained.len(), trained[0].name);
    }
    Ok(())
}
