//! `model.safetensors.index.json`: maps tensors to shards.

use super::json;
use super::path::{check_name, open_inside};
use crate::store::Error;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// The index of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";

/// The weights of a model that is not sharded.
pub const SINGLE: &str = "model.safetensors";

/// Size limit in bytes, far above any real index (50 MB for half a million tensors).
const MAX_INDEX: u64 = 64 << 20;

/// Reads the `weight_map` of the index `name` in `dir`: tensor name to file name. Checks that the file
/// names stay in the folder.
///
/// # Errors
/// [`Error::Index`] for an invalid index; [`Error::Unsafe`] for a file name that leads out of the folder.
pub fn read(dir: &Path, name: &str) -> Result<BTreeMap<String, String>, Error> {
    let (file, path) = open_inside(dir, name)?;
    let bad = |problem: String| Error::Index { path: path.clone(), problem };
    let mut bytes = Vec::new();
    file.take(MAX_INDEX + 1).read_to_end(&mut bytes).map_err(|e| Error::read(&path, e))?;
    if bytes.len() as u64 > MAX_INDEX {
        return Err(bad(format!("the index is larger than {} MiB", MAX_INDEX >> 20)));
    }
    let map = parse(&bytes).map_err(bad)?;
    for file in map.values() {
        check_name(dir, file)?;
    }
    Ok(map)
}

/// Parses the `weight_map` of an index.
pub fn parse(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    if bytes.starts_with(b"version https://git-lfs") {
        return Err("this is a Git LFS pointer; run `git lfs pull` in that repository".into());
    }
    let mut index = match json::value(bytes) {
        Ok(Value::Object(index)) => index,
        Ok(_) => return Err("not a shard index: not a JSON object".into()),
        Err(e) => return Err(format!("not a shard index: {e}")),
    };
    // "metadata" is skipped: `total_size` is wrong in many real files, and not needed.
    let names = index.remove("weight_map").ok_or("not a shard index: it has no weight_map")?;
    let names: BTreeMap<String, String> =
        serde_json::from_value(names).map_err(|e| format!("not a shard index: weight_map: {e}"))?;
    if names.is_empty() {
        return Err("its weight_map is empty".into());
    }
    Ok(names)
}

/// Whether a file name is one that PyTorch gives to pickle files.
pub fn is_pickle_name(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|e| e.to_str()).unwrap_or("");
    ["bin", "pt", "pth", "ckpt", "pkl", "pickle"].iter().any(|p| extension.eq_ignore_ascii_case(p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str =
        r#"{"metadata":{"total_size":9},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#;

    #[test]
    fn mistakes_in_an_index_are_named() {
        assert_eq!(parse(GOOD.as_bytes()).unwrap().len(), 2);
        let cases = [
            ("{}", "weight_map"),
            (r#"{"weight_map":{}}"#, "empty"),
            (r#"{"weight_map":{"a":"x","a":"y"}}"#, "\"a\" is there twice"),
            (r#"{"weight_map":{"a":"x"},"weight_map":{"a":"y"}}"#, "\"weight_map\" is there twice"),
            (r#"{"weight_map":{"a":1}}"#, "string"),
            ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ];
        for (text, wanted) in cases {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn mutated_indexes_never_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        ) {
            let mut bytes = GOOD.as_bytes().to_vec();
            for (at, value) in &edits {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(INDEX), &bytes).unwrap();
            match read(dir.path(), INDEX) {
                Ok(map) => for file in map.values() {
                    prop_assert!(check_name(dir.path(), file).is_ok());
                },
                Err(e) => prop_assert!(!edits.is_empty(), "{}", e),
            }
        }
    }
}
