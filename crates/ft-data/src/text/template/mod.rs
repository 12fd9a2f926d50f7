//! Chat templates, rendered like transformers' `apply_chat_template`. Templates are untrusted input: any
//! rendering ends within about a second and in bounded memory.

mod bounds;
mod builtins;
mod costs;
mod guard;
pub(crate) mod json;
mod ops;
mod render;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use render::renderings;
pub(crate) use render::{Template, Variables, WINDOW};
