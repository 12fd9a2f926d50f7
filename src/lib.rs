//! `ft` fine-tunes open-weight language models from a recipe file: in full, with LoRA or DoRA, on the layers
//! and modules that the recipe chooses.
//!
//! # As a library
//!
//! A whole run, as `ft run` does it, with checkpoints, metrics and a result in the run folder:
//!
//! ```no_run
//! fn main() -> ft::Result<()> {
//!     let outcome = ft::Run::from_recipe("recipe.toml")?.train()?;
//!     println!("{outcome:?}");
//!     Ok(())
//! }
//! ```
//!
//! Or step by step:
//!
//! ```no_run
//! fn main() -> ft::Result<()> {
//!     let mut session = ft::Run::with_keys("recipe.toml", &["run.steps=100"])?.load()?;
//!     while let Some(step) = session.step()? {
//!         println!("step {}: loss {:.4}", session.done(), step.loss);
//!     }
//!     let (loss, targets) = session.evaluate()?;
//!     println!("loss {loss:.4} over {targets} targets; saved in {}", session.save("out")?.display());
//!     Ok(())
//! }
//! ```
//!
//! A program watches a run, and may end it, with [`Run::observe`]. [`Session::logits`] returns a tensor of
//! `candle_core`, in the version of this crate's Cargo.toml. Examples, for `cargo run --release --example NAME`:
//!
//! | name | purpose |
//! |---|---|
//! | `run_a_recipe` | a whole run |
//! | `watch_a_run` | a run that ends at an evaluation loss |
//! | `train_in_code` | a recipe in the program, step by step |
//! | `what_trains` | the parameters selected by rules, without weights |
//!
//! A program that wants plans and measured memory compared installs the counting allocator of `ft-base`, as
//! `src/main.rs` does.
//!
//! CONTRIBUTING.md says how a step runs, has the map of the crates, and says how to add a model family, a dataset
//! format, a kernel or a key.

#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]

#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod infer;
mod log;
mod report;
#[doc(hidden)]
pub mod train;

#[doc(hidden)]
pub use ft_base::{ExitCode, rng, store};
#[doc(hidden)]
pub use ft_data as data;
#[doc(hidden)]
pub use ft_engine::{adapters, export, files, load, model, optim, params, quant, ranks, walk};
#[doc(hidden)]
pub use ft_hub as hub;
#[doc(hidden)]
pub use ft_kernels as kernel;
#[doc(hidden)]
pub use ft_plan as plan;
#[doc(hidden)]
pub use ft_recipe as recipe;

pub use ft_base::{Error, Location, Result};
pub use ft_engine::adapters::Selection;
pub use ft_engine::model::Config;
pub use ft_plan::Plan;
pub use ft_recipe::Recipe;
pub use log::Event;
pub use train::session::{Run, Session};
pub use train::{Outcome, StepOutput};

/// Unit tests count allocations as the binary does.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: ft_base::memory::CountingAllocator = ft_base::memory::CountingAllocator;
