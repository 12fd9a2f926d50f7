//! Renders conversations, checks the text for completeness, and finds the spans written by the assistant.
//!
//! | file | contents |
//! |---|---|
//! | `conversation` | conversation -> text and supervised spans |
//! | [`template`] | chat templates, with bounds on time and memory |
//! | `fragments` | strings of a conversation required in the text |
//! | `verbatim` | fast proof of completeness, without marks |
//! | `marks`, `completeness` | invisible marks in the strings; full check for completeness |
//! | `spans` | byte ranges written by the assistant |
//! | `date` | dates for templates |

pub(crate) mod completeness;
pub(crate) mod conversation;
pub(crate) mod date;
pub(crate) mod fragments;
pub(crate) mod marks;
pub(crate) mod spans;
pub(crate) mod template;
pub(crate) mod verbatim;
