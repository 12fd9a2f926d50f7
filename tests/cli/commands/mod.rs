//! Commands in everyday use.

mod daily;
mod first;
mod import;
mod push;
mod shipped;
mod verbs;
