//! End-to-end tests of the binary: files, output, exit codes, and equality of interrupted and uninterrupted
//! runs. Models have a few thousand random weights; no test needs a network or a GPU.

#![allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")]

mod commands;
mod data;
mod messages;
mod models;
mod parallel;
mod plan;
mod runs;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod server;
mod split;
mod tasks;
mod training;
mod world;
