//! HTTP: who may ask, connections, routes.

pub mod auth;
mod connections;
mod routes;

pub use routes::start;
