//! Runs of the whole loop.

mod composed;
mod out_of_memory;
mod ranks;
