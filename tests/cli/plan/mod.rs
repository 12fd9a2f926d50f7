//! Plans: memory, disks, rates of cards and layouts of ranks, before a run and against it.

mod cluster;
mod layouts;
mod memory;
mod probe;
mod room;
