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
//! A program that wants plans and measured memory compared installs the counting allocator of `ft-base`, as
//! `src/main.rs` does.
//!
//! # How a step runs
//!
//! ```text
//! train::run          the loop: rows of the step -> step -> metrics -> evaluation, checkpoint, signals
//!   train::step       micro-batches of the step; loss and gradients normalised by all its target tokens
//!     walk            forward over the layers, head with loss, backward over the layers in reverse
//!       model         the mathematics of each module: forward -> (y, Saved); backward(Saved, dy, sink) -> dx
//!         kernel      operations with a forward and a backward: CPU slices; on CUDA kernels, or candle's own ops
//!     optim           gradient norm, clip, AdamW over flat buffers
//! ```
//!
//! There is no tape: every backward pass is written by hand on untracked tensors, and what it needs is a value
//! (`Saved`). Frozen weights get no gradient; gradients of what trains accumulate in f32, in one flat buffer a
//! layer ([`adapt::params`]), of which the layers' weights are views.
//!
//! # Where things are
//!
//! ```text
//! cli/      one file a verb
//! recipe/   what the user wrote: keys, checks, diagnostics with line and column
//! hub/      where models come from: the Hugging Face hub, its cache, local folders
//! store/    bytes on disk, hostile input assumed: safetensors by tensor, atomic writes, checkpoints, whole folders
//! data/     rows -> messages -> text -> tokens and mask -> packed rows -> micro-batches
//! ranks/    ranks, and the collectives between them
//! model/    the mathematics: families as data, one decoder layer
//! load/     the model that a run starts from: config and tensors, of a checkpoint or random, 4-bit or not
//! adapt/    what trains: selection, buffers, LoRA's initial values, PEFT files in and out
//! gguf/     models and adapters as llama.cpp reads them
//! kernel/   operations; the only `unsafe`, beside system calls in store/ and the allocator that log/ counts with
//! walk/     the two loops, how routers decided, generation
//! plan/     recipe + config -> bytes by component and where the peak is; the fastest execution that fits
//! optim/    schedule, clip, AdamW with moments in f32 or 8 bits, on the device or, with its states, on the host; GaLore
//! train/    the step, the loop, what a checkpoint holds, what a run writes; merging, quantizing
//! log/      progress, metrics.jsonl, what is printed; memory, and the allocator that counts it
//! report/   a run as one HTML file
//! rng       random numbers as functions of (seed, purpose, step, layer, index)
//! ```
//!
//! # Where do I add
//!
//! | to add | touch |
//! |---|---|
//! | a model family of the usual kind | one row in [`model::family`], one fixture |
//! | a dataset shape | one file in [`data`] and one arm |
//! | an operation | one file in [`kernel`]: forward, backward, CPU, composed, gradient check |
//! | what an operation allocates or computes | beside it in [`kernel`], for its ghosts: see [`kernel::tensor`]; `tests/cli/plan.rs` compares with runs |
//! | a recipe key | one entry in [`recipe::keys`] |

#[doc(hidden)]
pub mod cli;
mod log;
mod report;
#[doc(hidden)]
pub mod train;

#[doc(hidden)]
pub use ft_base::{ExitCode, rng, store};
#[doc(hidden)]
pub use ft_data::{self as data, hub};
#[doc(hidden)]
pub use ft_engine::{adapt, files, gguf, load, model, optim, quant, ranks, walk};
#[doc(hidden)]
pub use ft_kernels as kernel;
#[doc(hidden)]
pub use ft_plan as plan;
#[doc(hidden)]
pub use ft_recipe as recipe;

pub use ft_base::{Error, Place, Result};
pub use ft_engine::adapt::Selection;
pub use ft_engine::model::Config;
pub use ft_recipe::Recipe;
pub use train::session::{Run, Session};
pub use train::{Options, Outcome, StepOutput};

/// Unit tests count allocations as the binary does.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: ft_base::memory::CountingAllocator = ft_base::memory::CountingAllocator;
