//! A step of a pipeline: the layers are divided over stages, and micro-batches pass through all of them.

mod run;
