//! Who may ask: holders of the key; without a key, programs of this machine, except foreign web pages.

use crate::cli::serve::api::ApiError;
use crate::cli::serve::state::ServerState;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// Path that needs no key.
pub(super) const HEALTH: &str = "/health";

/// Refuses a forbidden request.
pub(super) async fn check(
    State(state): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    match &state.key {
        Some(_) if request.uri().path() == HEALTH => {}
        Some(key) => has_key(request.headers(), key)?,
        None => is_local(&request)?,
    }
    Ok(next.run(request).await)
}

/// Lets web pages of any origin send requests to a server with a key and read answers (CORS). A preflight request has
/// no key.
pub(super) async fn allow_pages(request: Request, next: Next) -> Response {
    let headers = request.headers();
    let is_preflight = request.method() == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = match is_preflight {
        true => StatusCode::NO_CONTENT.into_response(),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
    if is_preflight {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        // clients have headers of their own, and `*` leaves out Authorization
        let asked = asked.unwrap_or(HeaderValue::from_static("authorization, content-type"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked);
    }
    response
}

/// Whether a key can be sent in a header.
pub fn is_sendable(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic())
}

/// The key of an `Authorization` header; the scheme is case-insensitive.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = header.split_at_checked("bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
}

fn has_key(headers: &HeaderMap, key: &str) -> Result<(), ApiError> {
    let sent = headers.get(header::AUTHORIZATION).and_then(|v| bearer(v.as_bytes())).unwrap_or_default();
    // hashes are compared in constant time
    if blake3::hash(sent) == blake3::hash(key.as_bytes()) {
        return Ok(());
    }
    let message = "the API key is missing, or it is another";
    Err(ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key"))
}

/// Checks a request of a server without a key. A stranger's web page has another `Origin`, another `Host` (DNS
/// rebinding), or a body of a type that a browser sends without a preflight.
fn is_local(request: &Request) -> Result<(), ApiError> {
    let refuse = |what: &str, code| {
        let message = format!("{what}; a server that asks for a key (ft serve --api-key) takes it");
        Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code(code))
    };
    let headers = request.headers();
    let host = only(headers, header::HOST);
    let target = request.uri().authority().map(Authority::as_str);
    if !host.is_some_and(is_loopback) || target.is_some_and(|t| !is_loopback(t)) {
        return refuse("the request names another host than this machine", "foreign_host");
    }
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let own = |o: &str| o.split_once("://").is_some_and(|(_, authority)| Some(authority) == host);
    if !origins.all(|o| o.to_str().is_ok_and(own)) {
        return refuse("the request comes from a web page of another origin", "foreign_origin");
    }
    if request.method() == Method::POST && !only(headers, header::CONTENT_TYPE).is_some_and(is_json) {
        let message = "Content-Type: application/json is wanted";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    Ok(())
}

/// The value of a header that occurs once.
fn only(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    let mut all = headers.get_all(name).iter();
    all.next().filter(|_| all.next().is_none())?.to_str().ok()
}

/// Whether an authority (`host:port`) is this machine, by address or as localhost.
fn is_loopback(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return false };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    !authority.as_str().contains('@')
        && (host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|a| a.to_canonical().is_loopback()))
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_of_a_key_is_case_insensitive() {
        let key = |s: &'static str| bearer(s.as_bytes());
        assert_eq!(["Bearer k", "bearer k", "BEARER k"].map(key), [Some(&b"k"[..]); 3]);
        assert_eq!(["k", "Basic k", "Bearerk", ""].map(key), [None; 4]);
    }

    #[test]
    fn only_loopback_names_are_of_this_machine() {
        for own in
            ["localhost", "LocalHost:80", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::ffff:127.0.0.1]"]
        {
            assert!(is_loopback(own), "{own}");
        }
        for foreign in [
            "",
            "example.com",
            "localhost.example.com:8000",
            "127.0.0.1.example.com",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "localhost@example.com",
            "example.com@localhost",
            "127.0.0.1, example.com",
            "2130706433",
        ] {
            assert!(!is_loopback(foreign), "{foreign}");
        }
    }
}
