//! Rows of Parquet files.

use super::{FEATURES, class_names, finite, levels, nesting, pages};
use crate::error::Error;
use crate::read::row::RawRow;
use crate::shape::schema::Schema;
use ft_base::store;
use ft_base::store::json;
use ft_base::terminal::panics::caught;
use parquet::basic::{ConvertedType, LogicalType, Type as Physical};
use parquet::file::metadata::ParquetMetaDataReader;
use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::{ReadOptionsBuilder, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::schema::types::{SchemaDescriptor, Type};
use serde_json::map::Entry;
use serde_json::{Map, Number, Value};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows of a file, read in order with one page per column in memory.
pub(crate) struct Columns {
    file: SerializedFileReader<File>,
    /// The next row group.
    group: usize,
    rows: Option<ReaderIter>,
    path: PathBuf,
    row: usize,
    /// For every column, whether the format reads it.
    read: Vec<bool>,
}

impl Columns {
    /// Opens a file and reads the metadata.
    pub fn open(path: &Path, schema: &Schema) -> Result<Self, Error> {
        let file = store::open_plain(path).map_err(|e| Error::read(path, e))?;
        let file = call(path, || reader(file))?;
        let columns = file.metadata().file_metadata().schema().get_fields();
        let read = columns.iter().map(|c| schema.reads(c.name())).collect();
        Ok(Self { file, group: 0, rows: None, path: path.into(), row: 0, read })
    }

    /// Names of the numbers in a column of classes, if the file has them.
    pub fn class_names(&self, column: &str) -> Option<Vec<String>> {
        let metadata = self.file.metadata().file_metadata().key_value_metadata()?;
        class_names(metadata.iter().find(|m| m.key == FEATURES)?.value.as_ref()?, column)
    }

    /// Returns the next row.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        let row = loop {
            if let Some(row) = call(&self.path, || self.rows.as_mut().and_then(Iterator::next).transpose())? {
                break row;
            }
            if self.group == self.file.num_row_groups() {
                return Ok(None);
            }
            self.rows = Some(call(&self.path, || rows(&self.file, self.group))?);
            self.group += 1;
        };
        self.row += 1;
        let fields = row.get_column_iter().zip(&self.read).map(|((name, field), read)| (name, field, *read));
        let bytes = match object(fields) {
            Ok(row) => serde_json::to_vec(&row).map_err(|e| e.to_string()),
            Err(why) => Err(why.trim_start_matches(['.', ':', ' ']).to_string()),
        };
        Ok(Some(RawRow { line: self.row, column: 1, bytes }))
    }
}

/// Opens a reader that returns strings as bytes, and JSON as strings. Read as a string, a text with invalid UTF-8
/// would lose the following rows.
fn reader(file: File) -> parquet::errors::Result<SerializedFileReader<File>> {
    nesting::check(&file)?;
    let about = ParquetMetaDataReader::new().parse_and_finish(&file)?;
    pages::check(&file, &about, pages::LARGEST, pages::LARGEST_ROW)?;
    let schema = SchemaDescriptor::new(Arc::new(plain(about.file_metadata().schema())?));
    let options = ReadOptionsBuilder::new().with_parquet_schema(Arc::new(schema)).build();
    SerializedFileReader::new_with_options(file, options)
}

/// The rows of a row group.
fn rows(file: &SerializedFileReader<File>, group: usize) -> parquet::errors::Result<ReaderIter> {
    let group = file.get_row_group(group)?;
    levels::check(&*group, levels::MOST_VALUES)?;
    TreeBuilder::new().as_iter(file.metadata().file_metadata().schema_descr_ptr(), &*group)
}

/// Replaces string types by bytes, so that only columns of JSON are strings.
fn plain(of: &Type) -> parquet::errors::Result<Type> {
    let about = of.get_basic_info();
    if let Type::GroupType { basic_info, fields } = of {
        let fields =
            fields.iter().map(|f| Ok(Arc::new(plain(f)?))).collect::<parquet::errors::Result<_>>()?;
        return Ok(Type::GroupType { basic_info: basic_info.clone(), fields });
    }
    let json = about.converted_type() == ConvertedType::JSON
        || matches!(about.logical_type_ref(), Some(LogicalType::Json));
    let text = json || matches!(about.converted_type(), ConvertedType::UTF8 | ConvertedType::ENUM);
    if !text || of.get_physical_type() != Physical::BYTE_ARRAY {
        return Ok(of.clone());
    }
    Type::primitive_type_builder(about.name(), Physical::BYTE_ARRAY)
        .with_repetition(about.repetition())
        .with_converted_type(if json { ConvertedType::JSON } else { ConvertedType::NONE })
        .build()
}

/// Calls the library, and turns errors and panics into [`Error::Read`].
fn call<T>(path: &Path, f: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, Error> {
    let why = match caught(f) {
        Ok(Ok(out)) => return Ok(out),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => panic,
    };
    let cause = io::Error::new(io::ErrorKind::InvalidData, format!("not Parquet as it should be: {why}"));
    Err(Error::read(path, cause))
}

/// Converts fields (with a flag for used ones) to an object. Errors start with the path.
fn object<'a>(
    fields: impl Iterator<Item = (&'a String, &'a Field, bool)>,
) -> Result<Map<String, Value>, String> {
    let mut out = Map::new();
    for (name, field, read) in fields {
        let value = value(field, read).map_err(|e| format!(".{name}{e}"))?;
        put(&mut out, name.clone(), value)?;
    }
    Ok(out)
}

fn put(object: &mut Map<String, Value>, key: String, value: Value) -> Result<(), String> {
    match object.entry(key) {
        Entry::Vacant(free) => free.insert(value),
        Entry::Occupied(there) => return Err(format!(": {}", json::duplicate_key(there.key()))),
    };
    Ok(())
}

/// Converts a field to JSON. Unsupported types (times, decimals) become text. Non-finite numbers, invalid UTF-8 and
/// invalid JSON are an error if the field is `read`.
fn value(field: &Field, read: bool) -> Result<Value, String> {
    let float = |x: f64| finite(x, read).map(|x| Number::from_f64(x).map_or(Value::Null, Value::Number));
    Ok(match field {
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
        Field::Float16(x) => float(f64::from(*x))?,
        Field::Float(x) => float(f64::from(*x))?,
        Field::Double(x) => float(*x)?,
        Field::Str(text) => match json::value(text.as_bytes()) {
            Ok(value) => value,
            Err(e) if read => return Err(format!(": {}", json::describe(&e, "not JSON"))),
            Err(_) => text.as_str().into(),
        },
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) if read => return Err(": not UTF-8".into()),
            Err(_) => String::from_utf8_lossy(bytes.data()).into(),
        },
        Field::Group(row) => {
            // a struct has the keys of all rows, and nulls for keys of other rows
            let there = row.get_column_iter().filter(|(_, f)| !matches!(f, Field::Null));
            Value::Object(object(there.map(|(n, f)| (n, f, read)))?)
        }
        Field::ListInternal(list) => {
            let item = |(i, f): (usize, &Field)| value(f, read).map_err(|e| format!("[{i}]{e}"));
            Value::Array(list.elements().iter().enumerate().map(item).collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut out = Map::new();
            for (k, v) in map.entries() {
                let key = match value(k, read)? {
                    Value::String(text) => text,
                    other => other.to_string(),
                };
                let value = value(v, read).map_err(|e| format!(".{key}{e}"))?;
                put(&mut out, key, value)?;
            }
            Value::Object(out)
        }
        // the library panics at a date or time out of range
        other => match caught(|| other.to_string()) {
            Ok(text) => text.into(),
            Err(_) if read => return Err(": a date or time out of range".into()),
            Err(_) => Value::Null,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::source;
    use ft_recipe::Format;
    use parquet::data_type::ByteArrayType;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use serde_json::json;

    /// The rows of a file with these levels and values in its columns.
    fn rows(schema: &str, columns: &[(&[i16], &[&str])]) -> Vec<Result<Value, String>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut file =
            SerializedFileWriter::new(File::create(&path).unwrap(), schema, Arc::default()).unwrap();
        let mut group = file.next_row_group().unwrap();
        for (levels, values) in columns {
            let mut column = group.next_column().unwrap().unwrap();
            let values: Vec<_> = values.iter().map(|v| (*v).into()).collect();
            column.typed::<ByteArrayType>().write_batch(&values, Some(levels), None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        file.close().unwrap();
        let schema = Schema::new(&source("a.parquet", Format::Text), None, false).unwrap();
        let mut columns = Columns::open(&path, &schema).unwrap();
        std::iter::from_fn(|| columns.next().unwrap()).map(|r| r.parse().map_err(|e| e.message)).collect()
    }

    /// Today's datasets package writes lists and objects of changing types so.
    #[test]
    fn columns_of_json_are_values() {
        let found = rows(
            "message m { optional binary text (JSON); }",
            &[(&[1, 0, 1, 1], &[r#"{"b": [1, null], "a": "x"}"#, "{", "2"])],
        );
        let broken = "text: not JSON: EOF while parsing an object at line 1 column 1".to_string();
        let whole = json!({"text": {"b": [1, null], "a": "x"}});
        assert_eq!(found, [Ok(whole), Ok(json!({"text": null})), Err(broken), Ok(json!({"text": 2}))]);
        let text = rows("message m { optional binary text (UTF8); }", &[(&[1], &["{}"])]);
        assert_eq!(text, [Ok(json!({"text": "{}"}))]);
    }

    #[test]
    fn times_out_of_range_are_told_where_they_are_read() {
        let time = Field::TimestampMicros(i64::MAX);
        assert_eq!(value(&time, true), Err(": a date or time out of range".into()));
        assert_eq!(value(&time, false), Ok(Value::Null));
    }

    #[test]
    fn structs_have_no_nulls_of_the_keys_of_other_rows() {
        let schema =
            "message m { optional group text { optional binary x (UTF8); optional binary y (UTF8); } }";
        let found = rows(schema, &[(&[2, 1, 0], &["a"]), (&[1, 2, 0], &["b"])]);
        let want = [json!({"text": {"x": "a"}}), json!({"text": {"y": "b"}}), json!({"text": null})];
        assert_eq!(found, want.map(Ok));
    }
}
