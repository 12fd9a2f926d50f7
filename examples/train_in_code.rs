//! Use of the library without the command line: parses a recipe, runs three steps and prints the loss of
//! each.
//!
//! ```text
//! cargo run --release --example train_in_code
//! ```

use ft::Run;

const RECIPE: &str = r#"
[model]
source = "data/model"

[lora]
rank = 4

[[train]]
modules = ["attention"]

[data]
train = [{ source = "data/quickstart/train.jsonl", format = "messages" }]
max_length = 256

[run]
steps = 3
batch_rows = 4
micro_rows = 2
device = "cpu"
"#;

fn main() -> ft::Result<()> {
    let mut session = Run::from_toml(RECIPE)?.load()?;
    println!("{} values train", session.trained_values());
    while let Some(s) = session.step()? {
        println!(
            "step {}: loss {:.4}, gradient norm {:.3}, {} tokens",
            session.done(),
            s.loss,
            s.grad_norm,
            s.tokens
        );
    }
    let (loss, targets) = session.evaluate()?;
    println!("after: loss {loss:.4} over {targets} targets");
    Ok(())
}
