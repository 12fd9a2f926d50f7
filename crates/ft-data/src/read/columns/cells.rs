//! Values of Arrow's types as JSON.

use super::finite;
use crate::read::row::{LONGEST_ROW, too_long};
use arrow_array::cast::AsArray;
use arrow_array::types::{Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type};
use arrow_array::types::{Float16Type, Float32Type, Float64Type};
use arrow_array::{Array, ListLikeArray, downcast_integer_array, downcast_temporal_array};
use arrow_schema::{DataType, Field};
use serde::de::IgnoredAny;
use std::io::Write;

/// Metadata of a column of JSON texts.
const EXTENSION: (&str, &str) = ("ARROW:extension:name", "arrow.json");

type Written = Result<(), String>;

/// Writes the fields of row `i` as an object. Fields are columns with a flag for used ones. Errors start with
/// the path.
pub(super) fn object<'a>(
    fields: impl Iterator<Item = (&'a Field, &'a dyn Array, bool)>,
    i: usize,
) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    write_object(fields, i, true, &mut out)?;
    Ok(out)
}

/// Writes an object, with or without its `nulls`.
fn write_object<'a>(
    fields: impl Iterator<Item = (&'a Field, &'a dyn Array, bool)>,
    i: usize,
    nulls: bool,
    out: &mut Vec<u8>,
) -> Written {
    out.push(b'{');
    let fields = fields.filter(|(_, array, _)| nulls || !is_null(*array, i));
    for (n, (field, array, read)) in fields.enumerate() {
        if n > 0 {
            out.push(b',');
        }
        json(field.name(), out)?;
        out.push(b':');
        value(field, array, i, read, out).map_err(|e| format!(".{}{e}", field.name()))?;
    }
    out.push(b'}');
    Ok(())
}

/// Writes value `i` of an array. Numbers, texts and types without JSON are an error if the column is `read`.
fn value(field: &Field, array: &dyn Array, i: usize, read: bool, out: &mut Vec<u8>) -> Written {
    if out.len() > LONGEST_ROW {
        return Err(format!(": {}", too_long()));
    }
    if is_null(array, i) {
        return json(&(), out);
    }
    let mut number = |x: f64| json(&finite(x, read)?, out);
    match array.data_type() {
        DataType::Boolean => json(&array.as_boolean().value(i), out),
        DataType::Float16 => number(array.as_primitive::<Float16Type>().value(i).to_f64()),
        DataType::Float32 => number(array.as_primitive::<Float32Type>().value(i).into()),
        DataType::Float64 => number(array.as_primitive::<Float64Type>().value(i)),
        DataType::Utf8 => text(field, array.as_string::<i32>().value(i), read, out),
        DataType::LargeUtf8 => text(field, array.as_string::<i64>().value(i), read, out),
        DataType::Utf8View => text(field, array.as_string_view().value(i), read, out),
        DataType::Binary => bytes(array.as_binary::<i32>().value(i), read, out),
        DataType::LargeBinary => bytes(array.as_binary::<i64>().value(i), read, out),
        DataType::BinaryView => bytes(array.as_binary_view().value(i), read, out),
        DataType::FixedSizeBinary(_) => bytes(array.as_fixed_size_binary().value(i), read, out),
        DataType::List(item) => list(item, array.as_list::<i32>(), i, read, out),
        DataType::LargeList(item) => list(item, array.as_list::<i64>(), i, read, out),
        DataType::ListView(item) => list(item, array.as_list_view::<i32>(), i, read, out),
        DataType::LargeListView(item) => list(item, array.as_list_view::<i64>(), i, read, out),
        DataType::FixedSizeList(item, _) => list(item, array.as_fixed_size_list(), i, read, out),
        DataType::Struct(fields) => {
            let columns = fields.iter().zip(array.as_struct().columns());
            // a struct has the keys of all rows, and nulls for keys of other rows
            write_object(columns.map(|(field, array)| (&**field, &**array, read)), i, false, out)
        }
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            match integer(dictionary.keys(), i).and_then(|key| usize::try_from(key).ok()) {
                Some(key) => value(field, dictionary.values(), key, read, out),
                None => Err(": a key of its dictionary is negative".into()),
            }
        }
        DataType::Map(..) => map(field, array, i, read, out),
        kind => match (integer(array, i), moment(array, i)) {
            (Some(n), _) => write!(out, "{n}").map_err(|e| e.to_string()),
            (None, Some(text)) => json(&text, out),
            (None, None) if read => Err(format!(": values of Arrow's type {kind} are not read")),
            (None, None) => json(&(), out),
        },
    }
}

fn is_null(array: &dyn Array, i: usize) -> bool {
    array.is_null(i) || matches!(array.data_type(), DataType::Null)
}

/// An integer of any width.
fn integer(array: &dyn Array, i: usize) -> Option<i128> {
    downcast_integer_array!(
        array => Some(i128::from(array.value(i))),
        _ => None,
    )
}

/// A date, time or decimal, as text.
fn moment(array: &dyn Array, i: usize) -> Option<String> {
    let kind = array.data_type();
    match kind {
        DataType::Decimal32(..) => return Some(array.as_primitive::<Decimal32Type>().value_as_string(i)),
        DataType::Decimal64(..) => return Some(array.as_primitive::<Decimal64Type>().value_as_string(i)),
        DataType::Decimal128(..) => return Some(array.as_primitive::<Decimal128Type>().value_as_string(i)),
        DataType::Decimal256(..) => return Some(array.as_primitive::<Decimal256Type>().value_as_string(i)),
        _ => {}
    }
    downcast_temporal_array!(
        array => match kind {
            DataType::Date32 | DataType::Date64 => array.value_as_date(i).map(|d| d.to_string()),
            DataType::Time32(_) | DataType::Time64(_) => array.value_as_time(i).map(|t| t.to_string()),
            DataType::Timestamp(..) => array.value_as_datetime(i).map(|t| t.to_string()),
            _ => None,
        },
        _ => None,
    )
}

fn json(value: &(impl serde::Serialize + ?Sized), out: &mut Vec<u8>) -> Written {
    serde_json::to_writer(out, value).map_err(|e| format!(": {e}"))
}

/// Writes a text, or the JSON that a column of such texts has.
fn text(field: &Field, text: &str, read: bool, out: &mut Vec<u8>) -> Written {
    if field.metadata().get(EXTENSION.0).is_none_or(|name| name != EXTENSION.1) {
        return json(text, out);
    }
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => out.extend_from_slice(text.as_bytes()),
        Err(e) if read => return Err(format!(": not JSON: {e}")),
        Err(_) => json(text, out)?,
    }
    Ok(())
}

/// Writes bytes as text. In unread columns, bytes other than UTF-8, such as images, are left out.
fn bytes(bytes: &[u8], read: bool, out: &mut Vec<u8>) -> Written {
    match std::str::from_utf8(bytes) {
        Ok(text) => json(text, out),
        Err(_) if read => Err(": not UTF-8".into()),
        Err(_) => json("", out),
    }
}

fn list(item: &Field, list: &dyn ListLikeArray, i: usize, read: bool, out: &mut Vec<u8>) -> Written {
    out.push(b'[');
    for (n, at) in list.element_range(i).enumerate() {
        if n > 0 {
            out.push(b',');
        }
        value(item, list.values(), at, read, out).map_err(|e| format!("[{n}]{e}"))?;
    }
    out.push(b']');
    Ok(())
}

/// Writes a map as an object. Keys that are no texts become their JSON.
fn map(field: &Field, array: &dyn Array, i: usize, read: bool, out: &mut Vec<u8>) -> Written {
    let map = array.as_map();
    let range = map.value_offsets().get(i..=i + 1).ok_or(": a map without its entries")?;
    out.push(b'{');
    for at in range[0] as usize..range[1] as usize {
        if at > range[0] as usize {
            out.push(b',');
        }
        let mut key = Vec::new();
        value(field, map.keys(), at, read, &mut key)?;
        match key.first() {
            Some(b'"') => out.extend_from_slice(&key),
            _ => json(&String::from_utf8_lossy(&key), out)?,
        }
        out.push(b':');
        value(field, map.values(), at, read, out)
            .map_err(|e| format!(".{}{e}", String::from_utf8_lossy(&key)))?;
    }
    out.push(b'}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Decimal32Array, Decimal64Array, Decimal128Array, Decimal256Array};

    #[test]
    fn decimals_of_every_width_are_texts() {
        let decimals: [&dyn Array; 4] = [
            &Decimal32Array::from_value(-225, 1).with_precision_and_scale(5, 2).unwrap(),
            &Decimal64Array::from_value(-225, 1).with_precision_and_scale(5, 2).unwrap(),
            &Decimal128Array::from_value(-225, 1).with_precision_and_scale(5, 2).unwrap(),
            &Decimal256Array::from_value((-225i32).into(), 1).with_precision_and_scale(5, 2).unwrap(),
        ];
        for decimal in decimals {
            assert_eq!(moment(decimal, 0).as_deref(), Some("-2.25"), "{}", decimal.data_type());
        }
    }
}
