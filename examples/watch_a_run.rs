//! Watches a run from a program, and ends it once the loss is low enough.
//!
//! ```text
//! cargo run --release --example watch_a_run
//! ```

use ft::{Event, Outcome, Run};
use std::ops::ControlFlow;

/// Evaluation loss at which the run ends.
const ENOUGH: f64 = 2.0;

fn main() -> ft::Result<()> {
    let keys = ["run.output=runs/watched", "run.eval_every=5", "run.save_every=0"];
    let run = Run::with_keys("recipes/quickstart.toml", &keys)?.overwrite();
    let outcome = run
        .observe(|event| {
            match event {
                Event::Step { step, loss, .. } => println!("step {step}: loss {loss:.3}"),
                Event::Sample { prompt, reply, .. } => println!("{prompt} {reply}"),
                Event::Checkpoint { path, .. } => println!("saved {}", path.display()),
                Event::Evaluation { loss, .. } if *loss < ENOUGH => return ControlFlow::Break(()),
                _ => {}
            }
            ControlFlow::Continue(())
        })
        .train()?;
    if let Outcome::Done { result } = outcome {
        println!("{}", result.display());
    }
    Ok(())
}
