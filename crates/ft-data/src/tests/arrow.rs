//! Arrow files and folders of `save_to_disk` (`tests/fixtures/make_tables.py`), and broken ones.

use super::*;
use crate::read::reader::Rows as Reader;
use crate::shape::schema::Schema;
use ft_base::error::Failure;
use serde_json::{Value, json};

/// Texts of a source of format "text", in order, and its warnings.
fn texts(folder: &Path, of: &ft_recipe::Source) -> Result<(Vec<String>, Vec<String>), Error> {
    let d = load_in(folder, std::slice::from_ref(of), &data(9), &tiny())?;
    let text = |e: &Example| tiny().decode(&e.ids).unwrap().replace("<|endoftext|>", "");
    Ok((all(&d).iter().map(text).collect(), d.warnings(9).unwrap()))
}

fn split(path: &str, split: &str) -> ft_recipe::Source {
    ft_recipe::Source { split: Some(split.into()), ..source(path, Format::Text) }
}

/// The rows of a file, up to the first error.
fn rows(file: &Path) -> Result<Vec<Value>, Error> {
    let mut text = source("", Format::Text);
    text.fields.insert("text".into(), "span".into());
    let schema =
        if file.ends_with("kinds.arrow") { Schema::of_any(&text)? } else { Schema::new(&text, None, false)? };
    Reader::open(file, &schema)?.map(|row| Ok(row?.parse().unwrap_or_else(|e| e.message.into()))).collect()
}

#[test]
fn splits_of_saved_folders_are_read_in_their_order() {
    let folder = fixture("saved");
    let read = |of: &ft_recipe::Source| texts(&folder, of).unwrap().0.concat();
    for (of, want) in [
        (split("splits", "train"), "423"),
        (split("splits", "test"), "60"),
        (split("splits", "train[1:]"), "23"),
        (source("splits/train", Format::Text), "423"),
        (split("splits/test", "train"), "60"),
        (split("named", "test"), "16"),
        (split("named", "train"), "16"),
        (source("one-split", Format::Text), "60"),
        (source("one-split/train/data-00000-of-00001.arrow", Format::Text), "60"),
        (source("replaced.arrow", Format::Text), "ababc"),
    ] {
        assert_eq!(read(&of), want, "{} {:?}", of.source, of.split);
    }
    let (rows, warnings) = texts(&folder, &source("shards", Format::Text)).unwrap();
    let order = std::fs::read_to_string(folder.join("shards.json")).unwrap();
    assert_eq!(json!(rows), serde_json::from_str::<Value>(&order).unwrap());
    let told = warnings.concat();
    assert!(told.contains("shards/state.json: _format_columns shows the columns [\"n\"] only"), "{told}");
    for (of, said) in [
        (
            source("splits", Format::Text),
            "it has several splits\n  hint: split = one of train, test, or source = \"splits/SPLIT\"",
        ),
        (
            split("splits", "dev"),
            "it has no split \"dev\"\n  hint: split = one of train, test, or source = \"splits/SPLIT\"",
        ),
        (split("named", "dev"), "named/state.json: it holds the split \"test\", not \"dev\""),
        (source("delta.arrow", Format::Text), "delta.arrow: not Arrow as it should be: a dictionary goes on"),
        (
            source("packed.arrow", Format::Text),
            "packed.arrow: not Arrow as it should be: its buffers are compressed",
        ),
    ] {
        let error = texts(&folder, &of).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn lists_of_saved_folders_are_honored_or_refused() {
    let one = fixture("saved/one-split/train");
    for (file, text, said) in [
        ("state.json", r#"{"_data_files": [{"filename": "data.arrow"}]}"#, ""),
        ("state.json", r#"{"_data_files": [{"filename": "data.arrow"}], "_indices_files": []}"#, ""),
        (
            "state.json",
            r#"{"_data_files": [{"filename": "data.arrow"}], "_indices_files": [{"filename": "indices.arrow"}]}"#,
            "state.json: _indices_files gives the rows another order",
        ),
        (
            "state.json",
            r#"{"_data_files": [{"filename": "data.arrow", "skip": 0, "take": 1}]}"#,
            "state.json: skip selects rows of a data file",
        ),
        ("state.json", r#"{"_data_files": []}"#, "state.json: it lists no data files"),
        ("state.json", "{}", "state.json: _data_files is no list"),
        ("state.json", "[]", "state.json: it holds no object"),
        ("state.json", "{", "state.json: not JSON"),
        (
            "state.json",
            r#"{"_data_files": [{"filename": "../data.arrow"}]}"#,
            "which is no name in its folder",
        ),
        ("state.json", r#"{"_data_files": [{"filename": "gone.arrow"}]}"#, "gone.arrow"),
        ("dataset_dict.json", r#"{"splits": ["/etc"]}"#, "dataset_dict.json: splits lists \"/etc\""),
        ("dataset_dict.json", r#"{"splits": []}"#, "it has several splits"),
        ("dataset_dict.json", r#"{"splits": ["train"]}"#, "train/state.json"),
    ] {
        let files = Files::new(&[(file, text)]);
        std::fs::copy(one.join("data-00000-of-00001.arrow"), files.0.path().join("data.arrow")).unwrap();
        match texts(files.0.path(), &source(".", Format::Text)) {
            Ok((rows, _)) => assert!(said.is_empty() && rows.concat() == "60", "{text}: {rows:?}"),
            Err(e) => assert!(!said.is_empty() && e.to_string().contains(said), "{text}: {e}"),
        }
    }
}

#[test]
fn values_of_all_types_become_json() {
    let want = [
        json!({
            "null": null, "bool": true, "i8": -128, "u64": 0, "f16": 0.5, "f32": 0.10000000149011612, "f64": 0.1,
            "view": "short", "bytes": "ab", "lists": [[1], []], "pairs": [1, 2], "views": [1], "map": {"a": 1},
            "struct": {"a": 1}, "codes": "x", "date": "1970-01-01", "time": "00:00:00",
            "stamp": "1970-01-01 00:00:00", "decimal": "1.50", "span": null,
        }),
        json!({
            "null": null, "bool": null, "i8": 127, "u64": u64::MAX, "f16": -2.0, "f32": null, "f64": 1e300,
            "view": "longer than the twelve bytes of a view", "bytes": "cd", "lists": [null, [2, 3]], "pairs": [3, 4],
            "views": [2, 3], "map": {"b": 2, "c": null}, "struct": null, "codes": "y", "date": "2022-01-08",
            "time": "01:02:03", "stamp": "2023-11-14 22:13:20.123", "decimal": "-2.25", "span": null,
        }),
    ];
    let file = fixture("saved/kinds.arrow");
    assert_eq!(rows(&file).unwrap(), want);
    // a type without JSON is an error in a column that is read
    let other = Files::new(&[]);
    let copy = other.0.path().join("read.arrow");
    std::fs::copy(file, &copy).unwrap();
    let told = rows(&copy).unwrap();
    assert!(told[0].as_str().unwrap().contains("span: values of Arrow's type Duration"), "{told:?}");
}

/// Numbers of classes are the names that the file has for them, if the recipe has those names too.
#[test]
fn numbers_of_classes_are_their_names_in_the_file() {
    let classes = |file: &str, names: &[&str]| {
        let scores = ft_recipe::ScoreTargets::Classes(names.iter().map(|n| n.to_string()).collect());
        let found = load_in(
            &fixture("saved"),
            &[source(file, Format::Labeled)],
            &ft_recipe::Data { scores, ..data(99) },
            &tiny(),
        );
        let labels = |d: Dataset| all(&d).iter().map(|e| *e.labels.last().unwrap()).collect::<Vec<_>>();
        found.map(labels).map_err(|e| e.to_string())
    };
    for file in ["classes", "classes.parquet"] {
        assert_eq!(classes(file, &["neg", "pos"]), Ok(vec![0, 1]), "{file}");
        assert_eq!(classes(file, &["pos", "neg"]), Ok(vec![1, 0]), "{file}");
        assert_eq!(classes(file, &["neutral", "pos", "neg"]), Ok(vec![2, 1]), "{file}");
        // other names: numbers of the recipe
        assert_eq!(classes(file, &["LABEL_0", "LABEL_1"]), Ok(vec![0, 1]), "{file}");
        let s = source(file, Format::Labeled);
        let names = classes_of(&s, &|p| fixture("saved").join(p)).unwrap();
        assert_eq!(names, Some(vec!["neg".into(), "pos".into()]), "{file}");
        let told = classes(file, &["pos", "other"]).unwrap_err();
        assert!(told.contains(":1: label: \"neg\" is none of the classes: \"pos\", \"other\""), "{told}");
    }
}

/// arrow-rs begins the messages of a file at a multiple of 64 bytes.
#[test]
fn files_of_arrow_rs_are_read() {
    let files = Files::new(&[]);
    let path = files.0.path().join("a.arrow");
    let column = std::sync::Arc::new(arrow_array::StringArray::from(vec!["a", "b"]));
    let batch = arrow_array::RecordBatch::try_from_iter([("text", column as arrow_array::ArrayRef)]).unwrap();
    let out = std::fs::File::create(&path).unwrap();
    let mut writer = arrow_ipc::writer::FileWriter::try_new(out, &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    assert_eq!(texts(files.0.path(), &source("a.arrow", Format::Text)).unwrap().0, ["a", "b"]);
}

/// A weight that JSON does not have is refused, of a message too; as null it would be 1.
#[test]
fn weights_of_columns_are_finite() {
    for file in ["weights.parquet", "weights.arrow"] {
        let load = |on_bad_row| {
            let cfg = ft_recipe::Data { on_bad_row, ..data(9) };
            load_in(&fixture("saved"), &[source(file, Format::Text)], &cfg, &tiny())
        };
        let told = load(OnBadRow::Error).unwrap_err().to_string();
        assert!(
            told.contains(&format!("{file}:2")) && told.contains("weight: NaN is not a finite number"),
            "{told}"
        );
        let d = load(OnBadRow::Skip).unwrap();
        assert_eq!((d.samples.len(), d.stats.drops.bad), (1, 2));
        assert!(d.stats.left_out[1].contains("weight: inf is not a finite number"), "{:?}", d.stats.left_out);
    }
    for file in ["message_weights.parquet", "message_weights.arrow"] {
        let found = load_in(&fixture("saved"), &[source(file, Format::Messages)], &data(9), &tiny());
        let told = found.unwrap_err().to_string();
        assert!(told.contains("messages[0].weight: NaN is not a finite number"), "{told}");
    }
}

/// Lengths that a file states are checked before memory is taken for them.
#[test]
fn lengths_without_bytes_are_told() {
    let seed = std::fs::read(fixture("tables/messages.stream.arrow")).unwrap();
    let files = Files::new(&[]);
    let file = files.0.path().join("a.arrow");
    let told = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        rows(&file).unwrap_err()
    };
    let with = |at: usize, bytes: &[u8]| [&seed[..at], bytes, &seed[at + bytes.len()..]].concat();
    for (bytes, said) in [
        (Vec::new(), "it ends without an end mark"),
        (b"plain text".to_vec(), "it begins neither as a file nor as a stream of Arrow"),
        (
            with(4, &u32::MAX.to_le_bytes()),
            "the metadata of a message of 4294967295 bytes, where the file has",
        ),
        ([&seed[..], &[0; 5]].concat(), "5 bytes follow its end"),
        (seed[..seed.len() - 8].to_vec(), "it ends without an end mark: it may be cut"),
        (with(8, &[0xFF; 64]), "not Arrow as it should be"),
    ] {
        let error = told(&bytes);
        assert!(error.to_string().contains(said) && error.to_string().contains("a.arrow"), "{error}");
        assert_eq!(error.exit_code(), ft_base::ExitCode::Data);
    }
    for cut in 0..seed.len() {
        told(&seed[..cut]);
    }
}

/// Any byte may be wrong: the rows are read, or there is an error; no panic, and no memory for a length that is not
/// there.
#[test]
fn files_with_wrong_bytes_end_in_rows_or_errors() {
    let files = Files::new(&[]);
    let file = files.0.path().join("a.arrow");
    for name in ["tables/messages.stream.arrow", "saved/kinds.arrow", "tables/text.codes.arrow"] {
        let seed = std::fs::read(fixture(name)).unwrap();
        let mut errors = 0;
        for i in 0..seed.len() {
            let mut bytes = seed.clone();
            bytes[i] ^= 0xFF;
            std::fs::write(&file, bytes).unwrap();
            errors += usize::from(rows(&file).is_err());
        }
        assert!(errors > 100, "{name}: {errors}");
    }
}
