//! The recipe: parsing, checks, and the typed result.
//!
//! Only this crate handles TOML. The effect of a recipe on a model (selected tensors, memory) is
//! computed elsewhere from the typed recipe. A folder uses only the folders listed above:
//!
//! ```text
//! syntax  text -> tree with positions; overrides KEY=VALUE from the command line; diagnostics
//! keys    one entry per key; typed recipe <-> checked values -> TOML
//! check   every key against its entry: names, kinds, ranges; suggestions; values missing in a build
//! cross   checks across keys
//! output  resolved recipe; JSON schema; reference page
//! load    files, texts and built-in recipes -> `Recipe`
//! import  configurations of other toolkits -> recipes
//! launch  multi-process launch, from environment variables
//! nodes   processes started by `ft run` itself
//! ```

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]
#![forbid(unsafe_code)]

mod check;
mod cross;
mod import;
pub mod keys;
mod launch;
mod load;
mod nodes;
mod output;
mod syntax;

#[cfg(test)]
mod tests;

pub use check::{Foreign, module_regex, nearest};
pub use cross::Facts;
pub use import::{Around, Fate, Imported, Line, import, yaml_value};
pub use keys::INDEX as MAX_RANK;
pub use keys::*;
pub use launch::{Launch, Rendezvous};
pub use load::{Error, SHIPPED, Shipped, loose_value};
pub use nodes::{Refused, Start};
pub use output::{page, schema};
pub use syntax::{Diagnostic, Problems};
