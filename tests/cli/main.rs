//! End-to-end tests of the binary: files, output, exit codes, and equality of interrupted and uninterrupted
//! runs. Models have a few thousand random weights; no test needs a network or a GPU.

#![allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")]

mod adapters;
mod answers;
mod axes;
mod broken;
mod cluster;
mod context;
mod daily;
mod distill;
mod docs;
mod experts;
mod families;
mod first;
mod four_bit;
mod four_bit_verbs;
mod gguf;
mod half;
mod heads;
mod hostile;
mod import;
mod initial;
mod launched;
mod layouts;
mod learned;
mod local;
mod nested;
mod offload;
mod optimizers;
mod pipeline;
mod plan;
mod preference;
mod probe;
mod push;
mod ranks;
mod rates;
mod reference;
mod report;
mod resume;
mod room;
mod same;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod serve_ends;
#[cfg(feature = "serve")]
mod serve_refuses;
#[cfg(feature = "serve")]
mod serve_scores;
#[cfg(feature = "serve")]
mod server;
mod shipped;
mod sources;
mod split;
mod stale;
mod stops;
mod tensor;
mod terminal;
mod text;
mod tokens;
mod verbs;
mod whole;
mod words;
mod world;
