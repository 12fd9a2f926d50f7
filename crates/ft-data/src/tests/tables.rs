//! Tables written by other programs (`tests/fixtures/make_tables.py`), and broken tables.

use super::*;
use crate::read::detect::detect;
use crate::read::reader::Rows;
use crate::shape::schema::Schema;
use ft_base::error::Failure;

/// Ids and labels of rows.
type Made = Vec<(Vec<u32>, Vec<i32>)>;

/// Encodes the rows of a file.
fn read(path: &str, format: Format) -> Result<Made, Error> {
    let d = load_in(&fixture("tables"), &[source(path, format)], &data(500), &tiny())?;
    Ok(all(&d).into_iter().map(|e| (e.ids, e.labels)).collect())
}

#[test]
fn every_file_of_the_same_rows_is_read_alike() {
    let mut names: Vec<String> = std::fs::read_dir(fixture("tables"))
        .unwrap()
        .map(|f| f.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let mut seen = 0;
    for name in names {
        let (rows, kind) = name.split_once('.').unwrap();
        if ["parquet", "arrow", "saved"].iter().any(|k| kind.ends_with(k)) && !cfg!(feature = "parquet") {
            continue;
        }
        let formats = [Format::Messages, Format::Alpaca, Format::Text, Format::Tokens];
        let format = formats.into_iter().find(|f| f.word() == rows).unwrap();
        let want = read(&format!("{rows}.jsonl"), format).unwrap();
        assert_eq!(read(&name, format).unwrap_or_else(|e| panic!("{name}: {e}")), want, "{name}");
        seen += 1;
    }
    assert!(seen > 40, "{seen}");
}

#[test]
fn patterns_and_folders_name_files() {
    let files =
        Files::new(&[("b.csv", "text\nb\n"), ("a.txt", "a\n\nc\n"), ("note.md", "x"), (".h.txt", "h")]);
    std::fs::create_dir_all(files.0.path().join("deep/er")).unwrap();
    std::fs::write(files.0.path().join("deep/er/d.jsonl"), "{\"text\": \"d\"}\n").unwrap();
    let lines = |path: &str| {
        let loaded = files.load(&[source(path, Format::Text)], &data(9));
        loaded.map(|d| all(&d).iter().map(|e| tiny().decode(&e.ids).unwrap()).collect::<Vec<_>>().concat())
    };
    let end = "<|endoftext|>";
    let of = |texts: &[&str]| texts.iter().map(|t| format!("{t}{end}")).collect::<String>();
    assert_eq!(lines(".").unwrap(), of(&["a", "c", "b"]));
    // other files of a folder are reported per source
    let warnings =
        |path: &str| files.load(&[source(path, Format::Text)], &data(9)).unwrap().warnings(9).unwrap();
    let told = "1 subfolder (deep), 1 hidden file (.h.txt), 1 file of another kind (note.md)";
    let hint = "\n  hint: a pattern takes what is in subfolders too: \"./**/*.jsonl\"";
    assert_eq!(warnings("."), [format!("not read of the folder \".\": {told}{hint}")]);
    std::fs::write(files.0.path().join("other.md"), "x").unwrap();
    let told = warnings("./").concat();
    assert!(
        told.contains("2 files of other kinds (the first: note.md)") && told.contains("\"./**/*"),
        "{told}"
    );
    assert_eq!((warnings("deep/er"), warnings("*.csv")), (vec![], vec![]));
    assert_eq!(lines("*.csv").unwrap(), of(&["b"]));
    assert_eq!(lines("[ab].*").unwrap(), of(&["a", "c", "b"]));
    assert_eq!(lines("**/*.jsonl").unwrap(), of(&["d"]));
    assert_eq!(lines("deep/*/d.jsonl").unwrap(), of(&["d"]));
    for (path, said) in
        [("*.md", "note.md"), ("*.tsv", "*.tsv"), ("a[", "a["), ("note.md", "none of the files")]
    {
        let error = lines(path).expect_err(path);
        assert!(error.to_string().contains(said), "{path}: {error}");
    }
}

/// The rows of one split are not those of another beside it, as in `load_dataset` on a folder.
#[test]
fn folders_of_several_splits_need_the_name_of_one() {
    let load = |names: &[&str], split: Option<&str>| {
        let files = Files::new(&names.iter().map(|name| (*name, &name[..1])).collect::<Vec<_>>());
        let s = ft_recipe::Source { split: split.map(String::from), ..source(".", Format::Text) };
        let d = files.load(&[s], &data(9)).map_err(|e| e.to_string())?;
        let texts = all(&d).iter().map(|e| tiny().decode(&e.ids).unwrap()).collect::<String>();
        Ok::<_, String>((texts.replace("<|endoftext|>", ""), d.warnings(9).unwrap().concat()))
    };
    let words = ["my_train.txt", "a.txt", "x-dev.txt", "readme.txt"];
    let (texts, told) = load(&words, Some("train[:100%]")).unwrap();
    assert_eq!(texts, "m");
    assert!(told.contains("1 file of another kind (readme.txt), 1 file of no split (a.txt)"), "{told}");
    assert_eq!(load(&words, Some("validation")).unwrap().0, "x");
    let shards = ["train_sft-00000-of-00001.txt", "eval-00000-of-00001.txt"];
    assert_eq!(load(&shards, Some("train_sft")).unwrap(), ("t".to_string(), String::new()));
    for (split, said) in [(None, "holds several splits"), (Some("train"), "holds no split \"train\"")] {
        let told = load(&shards, split).unwrap_err();
        assert!(told.contains(said), "{told}");
        assert!(
            told.contains("hint: split = one of eval, train_sft; a pattern takes all files: \"./*.txt\""),
            "{told}"
        );
    }
    // names of one split, or of none
    for split in [None, Some("train")] {
        assert_eq!(load(&["a.txt", "train.txt"], split).unwrap(), ("at".to_string(), String::new()));
    }
    assert!(load(&["a.txt", "test.txt"], Some("test")).unwrap_err().contains("is for datasets of the hub"));
}

/// Invalid UTF-8 stops the run or drops the row, for binary and string columns; the error names the row.
#[test]
#[cfg(feature = "parquet")]
fn bytes_of_columns_that_are_no_text_are_a_bad_row() {
    let dir = fixture("broken-tables");
    for (name, format, field) in [
        ("text.binary.parquet", Format::Text, "text"),
        ("text.string.parquet", Format::Text, "text"),
        ("text.stream.arrow", Format::Text, "text"),
        ("text.file.arrow", Format::Text, "text"),
        ("messages.binary.parquet", Format::Messages, "messages[1].content"),
        ("messages.string.parquet", Format::Messages, "messages[1].content"),
    ] {
        let load = |on_bad_row| {
            let cfg = ft_recipe::Data { on_bad_row, ..data(500) };
            load_in(&dir, &[source(name, format)], &cfg, &tiny())
        };
        let error = load(OnBadRow::Error).expect_err(name);
        let said = error.to_string();
        assert!(said.contains(&format!("{name}:2:1: {field}: not UTF-8\n")), "{said}");
        assert_eq!(error.exit_code(), ft_base::ExitCode::Data);
        let d = load(OnBadRow::Skip).unwrap();
        assert_eq!((d.stats.rows_read, d.stats.drops.bad), (3, 1), "{name}");
        let texts: Vec<String> = all(&d).iter().map(|e| tiny().decode(&e.ids).unwrap()).collect();
        assert!(texts[0].contains("café") && texts[1].contains("the end"), "{texts:?}");
        assert!(!texts.concat().contains('\u{fffd}'), "{texts:?}");
    }
    let loaded = load_in(&dir, &[source("text.twice.parquet", Format::Text)], &data(9), &tiny());
    let said = loaded.unwrap_err().to_string();
    assert!(said.contains("text.twice.parquet:1:1: the key \"text\" is there twice"), "{said}");
}

/// Errors name line and problem; neighboring rows are unaffected.
#[test]
fn broken_tables_say_where() {
    let messages = "messages\n\"[{\"\"role\"\": \"\"user\"\"}\"\n";
    let twice = "messages\n\"[{\"\"role\"\": \"\"user\"\", \"\"role\"\": \"\"user\"\"}]\"\n";
    for (name, bytes, said) in [
        ("a.csv", &b"text,id\nHello,1\nthe\nworld,2\n"[..], "a.csv:3:1: the row has 1 cells"),
        ("a.csv", b"text\nHello\n\xff\n", "a.csv:3:1: text: not UTF-8"),
        ("a.csv", b"text,id\r\nHello,1\r\nthe\r\n", "a.csv:3:1: the row has 1 cells"),
        ("a.csv", b"text\r\nHello\r\n\r\n\xff\r\n", "a.csv:4:1: text: not UTF-8"),
        ("a.csv", b"\ntext,text\nHello,b\n", "a.csv:2:1: two columns are named"),
        ("a.csv", b"text,text\nHello,b\n", "a.csv:1:1: two columns are named"),
        ("a.csv", b"te\xffxt\nHello\n", "a.csv:1:1: a name of a column is not UTF-8"),
        ("a.csv", b"wrong\nHello\n", "no field \"text\"; there is wrong"),
        ("a.tsv", b"a\ttext\nb\n", "a.tsv:2:1: the row has 1 cells"),
        ("a.txt", b"Hello\n\xff\n", "a.txt:2:1: not UTF-8"),
        ("m.csv", messages.as_bytes(), "m.csv:2:1: messages: expected JSON"),
        ("m.csv", twice.as_bytes(), "m.csv:2:1: messages: the key \"role\" is there twice"),
        ("a.csv", b"sep=;\ntext;id\na;1\nb\n", "a.csv:4:1: the row has 1 cells"),
        ("a.csv", b"text\nCaf\xe9\n", "hint: encoding = \"windows-1252\""),
        (
            "a.csv",
            b"text,id\na,1\n\"b,2\nc,3\nd,4\n",
            "a.csv:3: the quote that opens a cell in this line is not closed",
        ),
        (
            "a.csv",
            b"text,id\na,1\n\"b,2\nc,3\n\"d\",4\n",
            "a.csv:3: the quote that opens a cell in this line is closed inside",
        ),
        ("a.csv", b"\"text,id\na,1\n", "a.csv:1: the quote that opens a cell in this line is not closed"),
        ("a.csv", b"\xff\xfet", "not UTF-16LE: bytes that stand for no character"),
        ("a.txt.gz", b"no gzip", "a.txt.gz: not gzip"),
        ("a.jsonl.zst", b"no zstd", "a.jsonl.zst"),
    ] {
        let files = Files::new(&[]);
        std::fs::write(files.0.path().join(name), bytes).unwrap();
        let format = if name.starts_with('m') { Format::Messages } else { Format::Text };
        let error = files.load(&[source(name, format)], &data(9)).expect_err(name);
        assert!(error.to_string().contains(said), "{name}: {error}");
        assert_eq!(error.exit_code(), ft_base::ExitCode::Data, "{name}: {error}");
    }
}

/// Lines are counted as in an editor, for any line ending and for blank lines.
#[test]
fn rows_of_tables_have_the_line_where_they_begin() {
    let lines = |text: &str| {
        let files = Files::new(&[("a.csv", text)]);
        let any = Schema::of_any(&source("a.csv", Format::Text)).unwrap();
        let table = Rows::open(&files.0.path().join("a.csv"), &any).unwrap();
        table.map(|r| r.unwrap().line).collect::<Vec<_>>()
    };
    let rows = "text,id|a,1|\"b||b\",2|||c,3|  ,4|\"|d\",5||\"e\",6|f,7";
    let begin = [2, 3, 8, 9, 10, 13, 14];
    for end in ["\n", "\r\n"] {
        for (before, last) in [(0, 0), (0, 1), (0, 2), (2, 1)] {
            let text = end.repeat(before) + &rows.replace('|', end) + &end.repeat(last);
            assert_eq!(lines(&text), begin.map(|l| l + before), "{text:?}");
        }
    }
    // longer than the read buffer, and rows separated by a bare carriage return
    let long = "x".repeat(300_000);
    assert_eq!(lines(&format!("text,id\r\n\"{long}\r\n{long}\",1\r\n\r\nb,2")), [2, 5]);
    assert_eq!(lines("text,id\ra,1\rb,2\nc,3\n"), [1, 1, 2]);
}

/// Tables as spreadsheets write them: other separators, byte order marks, UTF-16, carriage returns in cells.
#[test]
fn tables_of_spreadsheets_are_the_same_rows() {
    let plain = "text,id\r\n\"a;b|c\",1\r\n\"d\ne\",2\r\n";
    let utf16 = |big: bool| {
        let each = |u: u16| if big { u.to_be_bytes() } else { u.to_le_bytes() };
        format!("\u{feff}{plain}").encode_utf16().flat_map(each).collect::<Vec<u8>>()
    };
    let lines = "{\"text\":\"a;b|c\"}\n{\"text\":\"d\\ne\"}\n";
    for (name, bytes) in [
        ("a.csv", plain.as_bytes().to_vec()),
        ("a.csv", format!("\u{feff}{plain}").into_bytes()),
        ("a.csv", b"text;id\n\"a;b|c\";1\n\"d\ne\";2\n".to_vec()),
        ("a.csv", b"text|id\n\"a;b|c\"|1\n\"d\ne\"|2\n".to_vec()),
        ("a.csv", b"text\tid\n\"a;b|c\"\t1\n\"d\ne\"\t2\n".to_vec()),
        ("a.csv", b"text,id\n\"a;b|c\",1\n\"d\r\ne\",2\n".to_vec()),
        ("a.csv", b"text,,\n\"a;b|c\",,\n\"d\ne\", ,1\n".to_vec()),
        ("a.csv", b"text,id\n\"a;b|c\",1\n\"d\re\",2\n".to_vec()),
        // the separator in a line before the names, white space around names, and blank cells below the table
        ("a.csv", b"\xef\xbb\xbfsep=;\r\nid; text \r\n1;\"a;b|c\"\r\n2;\"d\r\ne\"\r\n".to_vec()),
        ("a.csv", b"sep=|\na,b|text\n1|\"a;b|c\"\n2|\"d\ne\"\n".to_vec()),
        ("a.csv", b"text,id\n\"a;b|c\",1\n,\n , ,,\n\"d\ne\",2\n,\n\"\"\n".to_vec()),
        ("a.csv", utf16(false)),
        ("a.csv", utf16(true)),
        ("a.jsonl", format!("\u{feff}{lines}").into_bytes()),
        ("a.jsonl", format!("\u{feff}{lines}").encode_utf16().flat_map(u16::to_le_bytes).collect()),
    ] {
        let files = Files::new(&[]);
        std::fs::write(files.0.path().join(name), &bytes).unwrap();
        let d = files.load(&[source(name, Format::Text)], &data(99)).unwrap();
        let texts: Vec<String> = all(&d).iter().map(|e| tiny().decode(&e.ids).unwrap()).collect();
        assert_eq!(texts, ["a;b|c<|endoftext|>", "d\ne<|endoftext|>"], "{}", String::from_utf8_lossy(&bytes));
    }
}

/// As datasets reads them; a list a line is no such file.
#[test]
fn json_lines_files_of_one_array_are_its_rows() {
    for (text, said) in [
        ("[{\"text\": \"a\"}, {\"text\": \"b\"}]\n", None),
        ("\u{feff}[\n  {\"text\": \"a\"},\n  {\"text\": \"b\"}\n]\n", None),
        ("[{\"text\": \"a\"},\n{\"text\": 1}]", Some("a.jsonl:2: text: expected a string")),
        ("[{\"text\": \"a\"}]\n[{\"text\": \"b\"}]\n", Some("a.jsonl:1: expected an object, found an array")),
        ("[[{\"text\": \"a\"}]]\n", Some("a.jsonl:1: expected an object, found an array")),
    ] {
        let files = Files::new(&[("a.jsonl", text)]);
        let loaded = files.load(&[source("a.jsonl", Format::Text)], &data(9));
        match said {
            None => assert_eq!(loaded.unwrap().samples.len(), 2, "{text}"),
            Some(said) => {
                let error = loaded.unwrap_err().to_string();
                assert!(error.contains(said), "{error}");
            }
        }
    }
}

/// Cells as pandas and SQL write missing values are trained on, with a warning.
#[test]
fn texts_for_missing_values_are_told() {
    let told = |text: &str| {
        let files = Files::new(&[("a.csv", text)]);
        let d = files.load(&[source("a.csv", Format::Text)], &data(99)).unwrap();
        d.warnings(99).unwrap().concat()
    };
    let said = told("text\nnan\na\nnan\n NULL\n");
    assert!(said.contains("2 rows with the text \"nan\" as text, which programs write"), "{said}");
    assert!(said.contains("1 row with the text \" NULL\" as text, "), "{said}");
    assert_eq!(told("text\nNone of them\n"), "");
}

/// Cells under an empty name are keys that the format does not read.
#[test]
fn columns_without_a_name_have_their_number() {
    let told = |text: &str| {
        let files = Files::new(&[("a.csv", text)]);
        files
            .load(&[source("a.csv", Format::Text)], &data(9))
            .map_err(|e| e.to_string())
            .map(|d| d.warnings(9).unwrap())
    };
    assert_eq!(told("text,, ,\na,,,\n"), Ok(vec![]));
    let filled = told("text,,\na,,x\n").unwrap().concat();
    assert!(filled.starts_with("1 row with the key \"column 3\", which"), "{filled}");
    assert!(told("text,,text\na,,b\n").unwrap_err().contains("two columns are named \"text\""));
}

/// Cells of pairs and ratings: messages as JSON, and labels as spreadsheets and pandas write them.
#[test]
fn cells_of_preferences_are_read_as_their_rows() {
    let cell = |role: &str, text: &str| {
        format!("\"[{{\"\"role\"\": \"\"{role}\"\", \"\"content\"\": \"\"{text}\"\"}}]\"")
    };
    let list = |role: &str, text: &str| format!("[{{\"role\": \"{role}\", \"content\": \"{text}\"}}]");
    let [pair, row] = [&cell as &dyn Fn(&str, &str) -> String, &list]
        .map(|of| [of("user", "Two?"), of("assistant", "Yes"), of("assistant", "No")]);
    let table = format!("prompt,chosen,rejected\n{}\n", pair.join(","));
    let line = format!("{{\"prompt\": {}, \"chosen\": {}, \"rejected\": {}}}\n", row[0], row[1], row[2]);
    let files = Files::new(&[("a.csv", &table), ("a.jsonl", &line)]);
    let [of_cells, of_lists] = ["a.csv", "a.jsonl"].map(|name| {
        let d = files.load(&[source(name, Format::Preference)], &data(99)).unwrap();
        all(&d).into_iter().map(|e| (e.ids, e.labels)).collect::<Made>()
    });
    assert_eq!(of_cells, of_lists);
    let labels = ["TRUE", "FALSE", "True", "false", "1.0", "0.0", "1", " 0"];
    let rated = labels.map(|label| format!("a,b,{label}\n")).concat();
    let files = Files::new(&[("a.csv", &format!("prompt,completion,label\n{rated}"))]);
    let d = files.load(&[source("a.csv", Format::Unpaired)], &data(99)).unwrap();
    let desirable: Vec<bool> = all(&d).iter().map(|e| e.content == Content::Rated(true)).collect();
    assert_eq!(desirable, [true, false].repeat(4));
}

/// Files in an encoding that the source names, also without a format; a wrong name is told with its place.
#[test]
fn sources_name_their_encoding() {
    let (latin, sjis) = (b"text,id\n\"Caf\xe9 \x80\",1\n", b"{\"text\":\"\x83e\x83X\x83g\"}\n");
    for (name, bytes, encoding, text) in [
        ("a.csv", &latin[..], "Windows-1252", "Café €"),
        ("a.csv", latin, "latin1", "Café €"),
        ("a.csv", latin, "latin-1", "Café €"),
        ("a.csv", b"\xef\xbb\xbftext\nCaf\xc3\xa9\n", "UTF-8-sig", "Café"),
        ("a.txt", b"Caf\xe9\n", "iso-8859-1", "Café"),
        ("a.jsonl", sjis, "shift_jis", "テスト"),
        ("a.json", b"[{\"text\": \"Caf\xe9\"}]", "cp1252", "Café"),
    ] {
        let files = Files::new(&[]);
        std::fs::write(files.0.path().join(name), bytes).unwrap();
        let s = ft_recipe::Source { encoding: Some(encoding.into()), ..source(name, Format::Text) };
        let d = files.load(std::slice::from_ref(&s), &data(99)).unwrap();
        assert_eq!(
            tiny().decode(&all(&d)[0].ids).unwrap(),
            format!("{text}<|endoftext|>"),
            "{name} {encoding}"
        );
        let found = ft_recipe::Source { format: None, ..s };
        assert_eq!(detect(&found, &|p| files.0.path().join(p)).unwrap().format, Format::Text);
    }
    let files = Files::new(&[("a.txt", "a")]);
    let s = ft_recipe::Source { encoding: Some("latin".into()), ..source("a.txt", Format::Text) };
    let error = files.load(&[s], &data(9)).unwrap_err();
    assert_eq!(error.exit_code(), ft_base::ExitCode::Usage, "{error}");
    assert!(error.to_string().contains("encoding = \"latin\" is no encoding"), "{error}");
    for name in ["weights.parquet", "weights.arrow"] {
        let s = ft_recipe::Source { encoding: Some("latin1".into()), ..source(name, Format::Text) };
        let error = load_in(&fixture("saved"), &[s], &data(9), &tiny()).unwrap_err().to_string();
        assert!(error.contains("encoding does nothing: "), "{error}");
    }
}

/// Other programs write parts without rows; a source needs rows in one of its files.
#[test]
fn files_without_rows_among_others_are_told() {
    let files = Files::new(&[
        ("1.jsonl", ""),
        ("2.jsonl", "{\"text\": \"a\"}\n"),
        ("3.csv", "text\n"),
        ("4.json", "[]"),
    ]);
    let load = |path: &str| files.load(&[source(path, Format::Text)], &data(9));
    let d = load(".").unwrap();
    assert_eq!(d.samples.len(), 1);
    let told = d.warnings(9).unwrap().concat();
    assert!(told.starts_with("3 files without rows (the first: ") && told.ends_with("1.jsonl)"), "{told}");
    for (path, first) in [("3.csv", "3.csv"), ("[14].*", "1.jsonl")] {
        let error = load(path).unwrap_err();
        assert!(error.to_string().ends_with(&format!("{first}: the file holds no rows")), "{error}");
        assert_eq!(error.exit_code(), ft_base::ExitCode::Data);
    }
    let checked = Dataset::check(
        &of(&[source("[14].*", Format::Text)], &data(9)),
        &|s| files.0.path().join(s),
        Some(&tiny()),
        285,
        0,
        9,
    );
    assert_eq!(checked.problems.len(), 2, "{:?}", checked.problems);
}

/// Files of nothing but blank lines, or of rows without use, end the reading early.
#[test]
fn empty_lines_and_nulls_without_end_are_told() {
    let blank = "\n".repeat(1_000_002) + "{\"text\":\"a\"}\n";
    let nulls = format!("[{}{{\"text\":\"a\"}}]", "null,".repeat(1_010_000));
    for (name, text, said) in [
        ("a.jsonl", &blank, "a.jsonl:1: 1000000 empty lines, and no row"),
        ("a.txt", &blank, "a.txt:1: 1000000 empty lines, and no row"),
        ("a.json", &nulls, "rows can be trained on: the rest is not read"),
    ] {
        let files = Files::new(&[(name, text)]);
        let skip = ft_recipe::Data { on_bad_row: OnBadRow::Skip, ..data(9) };
        let error = files.load(&[source(name, Format::Text)], &skip).unwrap_err().to_string();
        assert!(error.contains(said), "{name}: {error}");
    }
}

#[test]
fn json_files_of_one_object_a_line_are_json_lines() {
    for (text, said) in [
        ("{\"text\": \"a\"}\n{\"text\": \"b\"}\n", None),
        ("\u{feff}\n {\"text\": \"a\"}\r\n\r\n{\"text\": \"b\"}", None),
        ("[{\"text\": \"a\"},\n{\"text\": \"b\"}]", None),
        ("{\"text\": \"a\"}\n{\"text\": 1}\n", Some("a.json:2: text: expected a string")),
        ("{\"text\": 1}\n", Some("a.json:1: text: expected a string")),
        ("{\n\"text\": \"a\"}\n{\"text\": \"b\"}\n", Some("expected an array of rows")),
    ] {
        let files = Files::new(&[("a.json", text)]);
        let loaded = files.load(&[source("a.json", Format::Text)], &data(9));
        match said {
            None => assert_eq!(loaded.unwrap().samples.len(), 2, "{text}"),
            Some(said) => {
                let error = loaded.unwrap_err().to_string();
                assert!(error.contains(said), "{error}");
            }
        }
    }
    for end in ["", "\n"] {
        let files = Files::new(&[("a.json", &format!("{{\"text\": \"a\"}}{end}"))]);
        assert_eq!(files.load(&[source("a.json", Format::Text)], &data(9)).unwrap().samples.len(), 1);
    }
}

/// A truncated compressed file is an error, not a shorter dataset.
#[test]
fn truncated_compressed_files_are_errors() {
    for (name, format) in [
        ("messages.jsonl.gz", Format::Messages),
        ("messages.jsonl.zst", Format::Messages),
        ("alpaca.pandas.csv.gz", Format::Alpaca),
        ("text.snappy.parquet", Format::Text),
        ("text.stream.arrow", Format::Text),
    ] {
        if name.ends_with(".parquet") | name.ends_with(".arrow") && !cfg!(feature = "parquet") {
            continue;
        }
        let whole = std::fs::read(fixture("tables").join(name)).unwrap();
        for len in [whole.len() / 2, whole.len() - 1] {
            let files = Files::new(&[]);
            std::fs::write(files.0.path().join(name), &whole[..len]).unwrap();
            let error = files.load(&[source(name, format)], &data(500)).expect_err(name);
            assert!(error.to_string().contains(name), "{name} of {len} bytes: {error}");
        }
    }
}

/// The limit of 32 MiB per row applies to all file types.
#[test]
fn rows_of_tables_are_bounded() {
    let files = Files::new(&[("a.csv", &format!("text\n{}\n", "a".repeat(40 << 20)))]);
    let error = files.load(&[source("a.csv", Format::Text)], &data(9)).expect_err("too long");
    assert!(error.to_string().contains("longer than 32 MiB"), "{error}");
}
