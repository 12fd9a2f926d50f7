//! Rows of Parquet files.

use super::error::Error;
use super::reader::RawRow;
use crate::log::panics::caught;
use crate::store;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};
use std::io;
use std::path::{Path, PathBuf};

/// The rows of a file, one after the other: a page of each column is in memory.
pub(super) struct Columns {
    rows: RowIter<'static>,
    path: PathBuf,
    row: usize,
}

impl Columns {
    /// Opens a file and reads what it says of itself.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = store::open_plain(path).map_err(|cause| Error::Read { path: path.into(), cause })?;
        let rows = said(path, || Ok(RowIter::from_file_into(Box::new(SerializedFileReader::new(file)?))))?;
        Ok(Self { rows, path: path.into(), row: 0 })
    }

    /// The next row.
    pub fn next(&mut self) -> Option<Result<RawRow, Error>> {
        let row = match said(&self.path, || self.rows.next().transpose()) {
            Ok(row) => row?,
            Err(e) => return Some(Err(e)),
        };
        self.row += 1;
        let bytes = serde_json::to_vec(&object(&row)).map_err(|e| e.to_string());
        Some(Ok(RawRow { line: self.row, column: 1, bytes }))
    }
}

/// What the library says of a call; a panic of it is an error of the file too.
fn said<T>(path: &Path, f: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, Error> {
    let why = match caught(f) {
        Ok(Ok(out)) => return Ok(out),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => panic,
    };
    let cause = io::Error::new(io::ErrorKind::InvalidData, format!("not Parquet as it should be: {why}"));
    Err(Error::Read { path: path.into(), cause })
}

fn object(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// A field as JSON; what no format reads (times, decimals) as its text.
fn value(field: &Field) -> Value {
    let float = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
    match field {
        Field::Null => Value::Null,
        Field::Bool(b) => (*b).into(),
        Field::Byte(n) => (*n).into(),
        Field::Short(n) => (*n).into(),
        Field::Int(n) => (*n).into(),
        Field::Long(n) => (*n).into(),
        Field::UByte(n) => (*n).into(),
        Field::UShort(n) => (*n).into(),
        Field::UInt(n) => (*n).into(),
        Field::ULong(n) => (*n).into(),
        Field::Float16(x) => float(f64::from(*x)),
        Field::Float(x) => float(f64::from(*x)),
        Field::Double(x) => float(*x),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into(),
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let key = |k: &Field| match value(k) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(k, v)| (key(k), value(v))).collect())
        }
        other => other.to_string().into(),
    }
}
