//! Use of the library without the command line: parses a recipe, runs three steps and prints the loss of
//! each.
//!
//! ```text
//! cargo run --release --example train_in_code
//! ```

use ft::data::Batches;
use ft::hub::Want;
use ft::optim::{Optimizer, Schedule};
use ft::plan::Workload;
use ft::recipe::Recipe;
use ft::train::step::Setup;
use ft::train::{Job, LossScale, StepRows, evaluate, train_step};

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

fn main() -> anyhow::Result<()> {
    let job = Job::open(Recipe::parse(RECIPE, "in-code.toml", &[])?, Want::Weights, false)?;
    let data = job.train_data()?;
    let batches = Batches::new(data.rows.len(), &job.recipe.run, job.recipe.data.shuffle);
    let plan = job.plan(|recipe| Workload::of_data(recipe, &data, None))?;
    let (decoder, params) = job.load(true)?;
    let optimizer = Optimizer::new(&params, &job.recipe.optimizer);
    let schedule = Schedule::new(&job.recipe.optimizer, batches.steps());
    let (alone, scale) = (ft::comm::alone(), LossScale::new(job.dtype, job.recipe.memory.scale));
    let setup = Setup::new(&job, (&decoder, &params, &optimizer), plan.execution, scale, &alone);
    println!("{} values train", params.count());
    for step in 0..batches.steps() {
        let lr = |peak: f64| schedule.at(step, peak);
        let s =
            train_step(&setup, StepRows { data: &data, rows: &batches.rows(step), step: step as u64 }, &lr)?;
        println!(
            "step {}: loss {:.4}, gradient norm {:.3}, {} tokens",
            step + 1,
            s.loss,
            s.grad_norm,
            s.tokens
        );
    }
    let (loss, targets) = evaluate(&decoder, &data, &plan.execution, &job.device)?;
    println!("after: loss {loss:.4} over {targets} targets");
    Ok(())
}
