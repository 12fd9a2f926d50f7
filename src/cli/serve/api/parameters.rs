//! Parameters of a request body, taken out one by one.

use super::error::ApiError;
use axum::http::StatusCode;
use ft_base::store::json::equal;
use serde_json::{Map, Value};

/// The parameters not taken yet.
pub struct Parameters(Map<String, Value>);

impl Parameters {
    /// Parses a JSON object; null values count as missing.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let fail = |why: &str| {
            let message = format!("We could not parse the JSON body of your request: {why}");
            ApiError::new(StatusCode::BAD_REQUEST, message)
        };
        match serde_json::from_slice(body) {
            Ok(Value::Object(mut map)) => {
                map.retain(|_, v| !v.is_null());
                Ok(Self(map))
            }
            Ok(_) => Err(fail("it is not an object")),
            Err(e) => Err(fail(&e.to_string())),
        }
    }

    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key)
    }

    /// Takes a parameter that `read` accepts; `wanted` names the valid values.
    pub fn read<T>(
        &mut self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| ApiError::param(key, format!("{key}: {wanted} is wanted")))
    }

    /// Accepts parameters only with a neutral value.
    pub fn reject_unless_neutral(&mut self, parameters: &[(&str, Value)]) -> Result<(), ApiError> {
        for (key, neutral) in parameters {
            if let Some(v) = self.take(key).filter(|v| !equal(v, neutral)) {
                return Err(ApiError::param(key, format!("{key}: {v} is not built; only {neutral} is")));
            }
        }
        Ok(())
    }

    /// Rejects the parameters left.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            Some(key) => Err(ApiError::param(key, format!("Unrecognized request argument supplied: {key}"))),
            None => Ok(()),
        }
    }
}
