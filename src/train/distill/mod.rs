//! Distillation: a teacher's probabilities beside the labels.
//!
//! ```text
//! task      losses of micro-batches; checks of the rows
//! teacher   rows with the values of a teacher, from forward passes
//! ```

mod task;
mod teacher;

pub use task::{check, loss, settings, with_teacher};
pub use teacher::{TeacherFiles, TeacherModel, write_teacher};
