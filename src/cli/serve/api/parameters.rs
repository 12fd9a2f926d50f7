//! Parameters of a request body, taken out one by one.

use super::error::{ApiError, shown};
use axum::http::StatusCode;
use ft_base::store::json::{self, equal, short};
use serde_json::{Map, Value};

/// The parameters not taken yet.
pub struct Parameters(Map<String, Value>);

impl Parameters {
    /// Parses a JSON object with each key once; null values count as missing.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let fail = |why: &str| {
            let message = format!("We could not parse the JSON body of your request: {why}");
            ApiError::new(StatusCode::BAD_REQUEST, message)
        };
        match json::value(body) {
            Ok(Value::Object(mut map)) => {
                map.retain(|_, v| !v.is_null());
                Ok(Self(map))
            }
            Ok(_) => Err(fail("it is not an object")),
            Err(e) => Err(fail(&shown(&e.to_string()))),
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
                let message = format!("{key}: {} is not built; only {neutral} is", short(&v));
                return Err(ApiError::param(key, message));
            }
        }
        Ok(())
    }

    /// Rejects the parameters left.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            Some(key) => {
                let key = shown(key);
                Err(ApiError::param(&key, format!("Unrecognized request argument supplied: {key}")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn refusals_show_the_beginning_of_a_value() {
        let long = "x".repeat(9999);
        let of = |body: Value| Parameters::parse(body.to_string().as_bytes()).unwrap();
        let tools = of(json!({"tools": [long]})).reject_unless_neutral(&[("tools", json!([]))]);
        let unknown = of(json!({ long.as_str(): 1 })).finish();
        let twice = format!("{{\"{long}\": 1, \"{long}\": 2}}");
        let twice = Parameters::parse(twice.as_bytes()).map(|_| ());
        for refused in [tools, unknown, twice] {
            let e = refused.unwrap_err();
            assert!(e.body().to_string().len() < 1000 && e.message.contains(".."), "{}", e.message);
        }
    }

    #[test]
    fn a_key_given_twice_is_refused() {
        let refused = Parameters::parse(br#"{"stream": true, "stream": false}"#).map(|_| ()).unwrap_err();
        assert!(refused.message.contains("the key \"stream\" is there twice"), "{}", refused.message);
    }
}
