//! Runs of the whole loop.

mod composed;
mod observer;
mod out_of_memory;
mod ranks;
mod session;
