//! Packs samples into rows, and rows into steps and micro-batches.
//!
//! | file | contents |
//! |---|---|
//! | `dataset` | all sources of a recipe |
//! | `epoch`, `mix` | rows of an epoch; samples per source and epoch, by weight |
//! | `order`, `pack` | random permutations; packing of samples into rows |
//! | `storage` | storage of lists, and bounds on memory |
//! | `packed` | rows as lists of samples |
//! | `batches` | rows of a step, a pure function of the step number |
//! | `micro` | model input: concatenated documents and targets, and their segments over ranks |
//! | `score` | evaluation questions, and scores of answers |
//! | [`show`] | rows and statistics as text |

pub(crate) mod batches;
pub(crate) mod dataset;
mod epoch;
pub(crate) mod micro;
mod mix;
mod order;
pub(crate) mod pack;
pub(crate) mod packed;
pub(crate) mod score;
pub mod show;
mod storage;
