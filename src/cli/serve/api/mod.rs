//! OpenAI's API: requests, responses, errors.

mod error;
mod parameters;
mod prompt;
mod request;
mod response;

pub use error::ApiError;
pub use request::{Request, parse};
pub use response::{Endpoint, Json, Reply};
