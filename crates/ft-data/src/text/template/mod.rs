//! Chat templates, rendered like transformers' `apply_chat_template`. Templates are untrusted input: any
//! rendering ends within about a second and in bounded memory.

mod bounds;
mod checks;
mod filters;
mod functions;
mod guard;
pub(crate) mod json;
mod operators;
mod python;
mod render;
#[cfg(test)]
mod tests;
mod unfold;

#[cfg(test)]
pub(crate) use render::renderings;
pub(crate) use render::{Template, Variables};
