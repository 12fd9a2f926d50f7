//! Data sources, and the texts made of their rows.

mod sources;
mod text;
