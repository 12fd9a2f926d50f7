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
//! | `rendering` | a rendered conversation, and its renderer |
//! | `date` | dates for templates |

mod completeness;
pub(crate) mod conversation;
pub(crate) mod date;
mod fragments;
pub(crate) mod marks;
mod rendering;
mod spans;
pub(crate) mod template;
mod verbatim;
