//! `ft report`: a run folder as one self-contained HTML file.
//!
//! ```text
//! metrics      metrics.jsonl -> deduplicated steps;   files: other files of the run folder
//! plot/        series by step -> charts and heat maps in SVG coordinates
//! memory       plan and measurement;   state: how the run went
//! page         all contents of the page of a run;   comparison: of several runs
//! render       fills the templates
//! live         serves the page of a run that goes on
//! card         model card of a run's result
//! ```
//!
//! A written page loads nothing from outside and runs no script; samples and names are escaped text. The same
//! folder always gives the same page.

mod card;
mod comparison;
mod error;
mod files;
mod live;
mod memory;
mod metrics;
mod page;
mod plot;
mod render;
mod state;
#[cfg(test)]
mod tests;

pub use card::{CARD, card, is_hub_id, is_untouched, json_of, leave_card, text_of};
pub use live::Live;
pub use render::write;
