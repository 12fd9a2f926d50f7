//! Streaming writer for GGUF files. The header depends only on keys, names, dtypes and shapes, so only
//! one tensor is in memory at a time (candle's writer needs all of them). Tests read the files back with
//! candle.
//!
//! The format, version 3, little-endian: magic, version, counts; keys with typed values; for each tensor
//! name, dimensions (fastest first), type and offset; then the data, with every tensor aligned to 32 bytes.

use super::write::{Output, check_space, outputs, write_tensor};
use super::{Entry, Error};
use candle_core::{DType, Tensor};
use ft_base::store::{AtomicFile, folder_of};
use std::path::Path;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// An unsigned 32-bit integer.
    U32(u32),
    /// A signed 32-bit integer.
    I32(i32),
    /// A 32-bit float.
    F32(f32),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list of signed 32-bit integers.
    I32s(Vec<i32>),
    /// A list of 32-bit floats.
    F32s(Vec<f32>),
    /// A list of booleans.
    Bools(Vec<bool>),
    /// A list of strings.
    Texts(Vec<String>),
}

impl From<&str> for GgufValue {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

/// Type codes of metadata values.
mod kind {
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Kind, length and values of a list.
fn put_list<T>(out: &mut Vec<u8>, kind: u32, list: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    out.extend(kind::ARRAY.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((list.len() as u64).to_le_bytes());
    list.iter().for_each(|x| put(out, x));
}

impl GgufValue {
    fn put(&self, out: &mut Vec<u8>) {
        let mut one = |kind: u32, value: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(value);
        };
        match self {
            Self::U32(x) => one(kind::U32, &x.to_le_bytes()),
            Self::I32(x) => one(kind::I32, &x.to_le_bytes()),
            Self::F32(x) => one(kind::F32, &x.to_le_bytes()),
            Self::Bool(x) => one(kind::BOOL, &[u8::from(*x)]),
            Self::Text(x) => {
                one(kind::TEXT, &[]);
                put_text(out, x);
            }
            Self::I32s(all) => put_list(out, kind::I32, all, |out, x| out.extend(x.to_le_bytes())),
            Self::F32s(all) => put_list(out, kind::F32, all, |out, x| out.extend(x.to_le_bytes())),
            Self::Bools(all) => put_list(out, kind::BOOL, all, |out, x| out.push(u8::from(*x))),
            Self::Texts(all) => put_list(out, kind::TEXT, all, |out, x| put_text(out, x)),
        }
    }
}

/// Writes one GGUF file atomically. `entries` has name, dtype (f32, f16, bf16, or u8 for MXFP4) and shape of every
/// tensor; of MXFP4 the last dimension is in bytes, 17 for each 32 values. Calls `get` once per tensor, in the order
/// of the entries.
///
/// # Errors
/// [`Error::DiskFull`] before anything is written; [`Error::Write`]; [`Error::Twice`] for a duplicate
/// name; [`Error::Convert`] for another dtype; [`Error::Announced`] for a tensor unlike its entry;
/// errors of `get`.
pub fn write_gguf(
    path: &Path,
    keys: &[(String, GgufValue)],
    entries: &[Entry],
    mut get: impl FnMut(&str) -> Result<Tensor, ft_base::Error>,
) -> Result<(), ft_base::Error> {
    let entries = outputs(path, entries)?;
    let mut header = MAGIC.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((entries.len() as u64).to_le_bytes());
    header.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        put_text(&mut header, key);
        value.put(&mut header);
    }
    let mut at = 0u64;
    for e in &entries {
        put_text(&mut header, &e.name);
        header.extend((e.shape.len() as u32).to_le_bytes());
        let last = e.shape.len().saturating_sub(1);
        let values =
            |(d, n): (usize, &usize)| if e.dtype == DType::U8 && d == last { n / 17 * 32 } else { *n };
        let dims: Vec<usize> = e.shape.iter().enumerate().map(values).collect();
        dims.iter().rev().for_each(|n| header.extend((*n as u64).to_le_bytes()));
        header.extend(number_of(e)?.to_le_bytes());
        header.extend(at.to_le_bytes());
        at = (at + e.bytes).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    let needed = header.len() as u64 + at;
    check_space(path, folder_of(path), needed)?;
    let mut pending = AtomicFile::create(path, Some(needed))?;
    pending.write(&header)?;
    for e in &entries {
        write_tensor(&mut pending, e, &get(&e.name)?)?;
        let padding = e.bytes.next_multiple_of(ALIGNMENT) - e.bytes;
        pending.write(&[0; ALIGNMENT as usize][..padding as usize])?;
    }
    Ok(pending.commit()?)
}

/// Type code of a dtype.
fn number_of(e: &Output) -> Result<u32, Error> {
    match e.dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(30),
        DType::U8 => Ok(39),
        other => Err(Error::Convert {
            name: e.name.clone(),
            from: other.as_str().to_uppercase(),
            to: "a GGUF type".to_string(),
        }),
    }
}
