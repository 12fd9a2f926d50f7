//! The header of a safetensors file: an 8-byte length, then JSON with dtype, shape and offsets of each
//! tensor.
//!
//! Format: <https://github.com/huggingface/safetensors#format>. The crate's reader needs the whole file
//! in memory and accepts duplicate names, hence this parser.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ft_base::store::json::cut;
use safetensors::tensor::TensorInfo as RawInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::Error;

/// The limit of the safetensors crate, far above real headers.
const MAX_HEADER: u64 = 100_000_000;
/// Longest name in bytes, and most dimensions. Messages show both.
const MAX_NAME: usize = 1024;
const MAX_DIMS: usize = 64;

/// A validated header.
#[derive(Debug)]
pub struct Header {
    /// Names and tensor infos, sorted by offset. The tensors fill the data without gap or overlap.
    pub tensors: Vec<(String, RawInfo)>,
    /// The `__metadata__` of the file.
    pub metadata: BTreeMap<String, String>,
    /// Offset of the data in the file.
    pub data_start: u64,
}

/// Reads and validates the header of an open file.
///
/// # Errors
/// [`Error::Pickle`] and [`Error::OtherKind`] for files of another type with this extension;
/// [`Error::Header`] for an inconsistent header.
pub fn read(file: &File, path: &Path) -> Result<Header, Error> {
    let length = file.metadata().map_err(|e| Error::read(path, e))?.len();
    // The first bytes identify a file of another type.
    let mut head = vec![0u8; length.min(64) as usize];
    file.read_exact_at(&mut head, 0).map_err(|e| Error::read(path, e))?;
    parse(file, path, length, &head).map_err(|e| match e {
        Error::Header { .. } => other_kind(path, &head).unwrap_or(e),
        e => e,
    })
}

fn parse(file: &File, path: &Path, length: u64, head: &[u8]) -> Result<Header, Error> {
    let bad = |problem: String| Error::Header { path: path.to_path_buf(), problem };
    let Some(size) = head.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(bad(format!("the file has {length} bytes, too few for a header")));
    };
    if size > length - 8 {
        return Err(bad(format!("the header is said to take {size} bytes, and the file has {length}")));
    }
    if size > MAX_HEADER {
        return Err(bad(format!("the header takes {size} bytes; {MAX_HEADER} is the most")));
    }
    let mut json = vec![0u8; size as usize];
    file.read_exact_at(&mut json, 8).map_err(|e| Error::read(path, e))?;
    let entries: Entries = serde_json::from_slice(&json).map_err(|e| {
        bad(format!("the header is not what it should be: {}", cut(&e.to_string(), 2 * MAX_NAME)))
    })?;
    let mut tensors = entries.tensors;
    tensors.sort_by(|a, b| a.1.data_offsets.cmp(&b.1.data_offsets).then_with(|| a.0.cmp(&b.0)));
    check_places(&tensors, length - 8 - size).map_err(bad)?;
    Ok(Header { tensors, metadata: entries.metadata, data_start: 8 + size })
}

/// Checks that the tensors fill `data` bytes without gap or overlap, and match their shapes in size.
/// `tensors` is sorted by offset.
fn check_places(tensors: &[(String, RawInfo)], data: u64) -> Result<(), String> {
    let mut at = 0usize;
    for (name, info) in tensors {
        let (start, end, dims) = (info.data_offsets.0, info.data_offsets.1, info.shape.len());
        if dims > MAX_DIMS {
            return Err(format!("tensor {name:?} has {dims} dimensions; {MAX_DIMS} is the most"));
        }
        if start < at {
            return Err(format!("tensor {name:?} overlaps another one (it starts at {start})"));
        }
        if start > at {
            return Err(format!("there is a gap of {} bytes before tensor {name:?}", start - at));
        }
        if end < start || end as u64 > data {
            return Err(format!("tensor {name:?} takes bytes {start} to {end} of {data} that the file has"));
        }
        let wanted = info
            .shape
            .iter()
            .try_fold(info.dtype.bitsize(), |bits, &n| bits.checked_mul(n))
            .filter(|bits| bits % 8 == 0)
            .map(|bits| bits / 8);
        if wanted != Some(end - start) {
            return Err(format!(
                "tensor {name:?} of {} and shape {:?} cannot take {} bytes",
                info.dtype,
                info.shape,
                end - start
            ));
        }
        at = end;
    }
    if at as u64 != data {
        return Err(format!("the tensors take {at} bytes, and the file has {data} for them"));
    }
    Ok(())
}

/// Identifies a file of another type by the first bytes.
fn other_kind(path: &Path, head: &[u8]) -> Option<Error> {
    let path = path.to_path_buf();
    // Pickle protocols 2 to 5 start with 0x80 and the version; torch.save writes a zip of pickles.
    if matches!(head, [0x80, 2..=5, ..]) || head.starts_with(b"PK\x03\x04") {
        return Some(Error::Pickle { path });
    }
    let (kind, hint) = if head.starts_with(b"version https://git-lfs") {
        (
            "a Git LFS pointer, a text that stands for the file",
            "run `git lfs pull` in that repository, or name the model by its hub id",
        )
    } else if head.starts_with(b"GGUF") {
        ("a GGUF file", "use the safetensors release of the model")
    } else if head.starts_with(b"<") {
        ("a web page, perhaps an error that a download saved", "fetch the file again")
    } else {
        return None;
    };
    Some(Error::OtherKind { path, kind, hint })
}

/// The JSON object, with duplicate names rejected (a map would silently keep the last).
struct Entries {
    tensors: Vec<(String, RawInfo)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Entries { tensors: Vec::new(), metadata: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() > MAX_NAME {
                        let long = format!("a name of {} bytes; {MAX_NAME} is the most", name.len());
                        return Err(A::Error::custom(long));
                    }
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("the name {name:?} comes twice")));
                    }
                    if name == "__metadata__" {
                        entries.metadata = map.next_value()?;
                    } else {
                        entries.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Names)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use ft_base::error::Failure;
    use proptest::prelude::*;

    /// Builds a safetensors file from a header and a number of data bytes.
    pub fn file_of(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn read_bytes(bytes: &[u8]) -> Result<Header, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        std::fs::write(&path, bytes).unwrap();
        read(&File::open(&path).unwrap(), &path)
    }

    fn problem(header: &str, data: usize) -> String {
        read_bytes(&file_of(header, data)).unwrap_err().to_string()
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}"#;

    #[test]
    fn a_valid_header_is_read() {
        let header = read_bytes(&file_of(TWO, 9)).unwrap();
        assert_eq!(header.tensors.len(), 2);
        assert_eq!(header.metadata["format"], "pt");
        assert_eq!(header.data_start, 8 + TWO.len() as u64);
    }

    #[test]
    fn contradictions_in_a_safetensors_header_are_named() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(problem(&one("F32", "[2]", "[0,8]"), 9).contains("file has 9"));
        assert!(problem(&one("F32", "[2]", "[0,8]"), 7).contains("0 to 8 of 7"));
        assert!(problem(&one("F32", "[3]", "[0,8]"), 8).contains("cannot take 8 bytes"));
        assert!(problem(&one("F32", "[2]", "[8,0]"), 8).contains("gap"));
        assert!(problem(&one("F32", "[2]", "[1,9]"), 9).contains("gap of 1"));
        assert!(problem(&one("F4", "[3]", "[0,2]"), 2).contains("cannot take"));
        assert!(problem(&one("F32", "[4294967296,4294967296,0]", "[0,0]"), 0).contains("cannot"));
        assert!(problem(&one("F99", "[2]", "[0,8]"), 8).contains("F99"));
        assert!(problem(&one("F32", "[-2]", "[0,8]"), 8).contains("-2"));
        let twice = r#"{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
        assert!(problem(twice, 0).contains("comes twice"));
        let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(problem(overlap, 6).contains("overlaps"));
        let name = |n: usize| TWO.replace("\"a\"", &format!("\"{}\"", "a".repeat(n)));
        assert!(read_bytes(&file_of(&name(1024), 9)).is_ok());
        assert!(problem(&name(1025), 9).contains("a name of 1025 bytes; 1024 is the most"));
        let ones = |n: usize| one("F32", &format!("[2{}]", ",1".repeat(n - 1)), "[0,8]");
        assert!(read_bytes(&file_of(&ones(64), 8)).is_ok());
        assert!(problem(&ones(65), 8).contains("tensor \"w\" has 65 dimensions; 64 is the most"));
        assert!(problem(&one(&"F".repeat(9999), "[2]", "[0,8]"), 8).len() < 3000);
        let mut long = file_of(TWO, 9);
        long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(read_bytes(&long).unwrap_err().to_string().contains("the file has"));
        assert!(read_bytes(b"short").unwrap_err().to_string().contains("too few"));
    }

    #[test]
    fn other_kinds_are_recognised_by_their_bytes() {
        let cases: [(&[u8], &str); 5] = [
            (b"\x80\x02}q\x00(X\x01\x00\x00\x00", "pickle"),
            (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "pickle"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
            (b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00", "GGUF"),
            (b"<!DOCTYPE html><html>", "web page"),
        ];
        for (bytes, wanted) in cases {
            let error = read_bytes(bytes).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
            assert_eq!(error.exit_code(), ft_base::ExitCode::Model);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        /// Mutated headers never panic. Every accepted file is also accepted by the crate's reader, with
        /// the same tensors.
        #[test]
        fn mutated_files_never_panic_and_agree_with_the_crate(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 0..6),
            swap in prop::option::of((0..8usize, 0..8usize)),
        ) {
            const WORDS: [&str; 8] =
                ["[0,8]", "[8,9]", "F32", "U8", "\"a\"", "\"b\"", "[2]", "[]"];
            let text = match swap {
                Some((from, to)) => TWO.replace(WORDS[from], WORDS[to]),
                None => TWO.to_string(),
            };
            let mut bytes = file_of(&text, 9);
            for (at, value, kind) in &edits {
                let at = at.index(bytes.len());
                match kind {
                    0 => bytes[at] = *value,
                    1 => bytes.insert(at, *value),
                    _ => { bytes.remove(at); }
                }
            }
            let theirs = safetensors::SafeTensors::deserialize(&bytes);
            if let Ok(ours) = read_bytes(&bytes) {
                let theirs = theirs.unwrap();
                prop_assert_eq!(ours.tensors.len(), theirs.len());
                for (name, info) in &ours.tensors {
                    let view = theirs.tensor(name).unwrap();
                    prop_assert_eq!(view.shape(), &info.shape[..]);
                }
            } else if edits.is_empty() && swap.is_none() {
                prop_assert!(false, "an unchanged file was refused");
            }
        }
    }
}
