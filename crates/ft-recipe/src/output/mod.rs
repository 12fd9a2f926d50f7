//! Resolved recipes, the JSON schema, and the reference page.

mod page;
mod resolved;
mod schema;

pub use page::page;
pub use schema::schema;
