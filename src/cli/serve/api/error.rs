//! Errors in OpenAI's format.

use super::response::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ft_base::store::json::cut;
use serde_json::{Value, json};

/// Seconds until a client may try again; an answer takes about as long.
const RETRY: &str = "1";

/// Text of a request for a message, truncated.
pub fn shown(text: &str) -> String {
    cut(text, 200)
}

/// A rejected request, or a failed answer.
#[derive(Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The offending parameter.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// An invalid parameter.
    pub fn param(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// An unknown model; `step` is the loaded one of a served run.
    pub fn no_model(name: &str, served: &str, step: Option<u64>) -> Self {
        let at = step.map_or(String::new(), |step| format!(", at step {step}"));
        let message = format!("The model `{}` does not exist; {served:?} is served{at}", shown(name));
        let error = Self::param("model", message).with_code("model_not_found");
        Self { status: StatusCode::NOT_FOUND, ..error }
    }

    /// A failed answer.
    pub fn internal(why: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, why)
    }

    /// No room at present.
    pub fn busy(why: &str) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, format!("{why}: try again later"))
    }

    /// The server ends, or all replicas have stopped.
    pub fn stopped() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is ending")
    }

    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Body of the response.
    pub fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<ft_data::Error> for ApiError {
    fn from(e: ft_data::Error) -> Self {
        ft_base::Error::from(e).into()
    }
}

impl From<ft_base::Error> for ApiError {
    fn from(e: ft_base::Error) -> Self {
        Self::new(StatusCode::BAD_REQUEST, e.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY));
        }
        response
    }
}
