//! Lists the parameters trained by a set of rules, from the config of a model; needs no weights.
//!
//! ```text
//! cargo run --release --example what_trains -- data/model
//! ```

use anyhow::Context;
use ft::Run;

fn main() -> anyhow::Result<()> {
    let dir = std::env::args().nth(1).context("usage: what_trains MODEL_FOLDER")?;
    for (what, rules) in [
        ("LoRA of rank 16 on attention", "modules = [\"attention\"]\nrank = 16"),
        (
            "LoRA of rank 16 on all linears of the last three layers",
            "modules = [\"attention\", \"mlp\"]\nlayers = \"-3:\"\nrank = 16",
        ),
        ("norms in full", "modules = [\"norms\"]\nmethod = \"full\""),
    ] {
        let recipe = format!(
            "[model]\nsource = \"{dir}\"\n[[train]]\n{rules}\n[data]\ntrain = [{{ source = \"x.jsonl\", format = \"text\" }}]\n"
        );
        let (_, selection) = Run::from_toml(&recipe)?.selection()?;
        let trained = selection.trained();
        let values: usize = trained.iter().map(|t| t.elements()).sum();
        println!("{what}: {} tensors, {values} values; the first is {}", trained.len(), trained[0].name);
    }
    Ok(())
}
