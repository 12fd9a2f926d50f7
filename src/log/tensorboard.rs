//! TensorBoard event files with the contents of `metrics.jsonl`.
//!
//! A file is a sequence of records (length, bytes, and checksums of both), one `Event` protocol buffer
//! per record. The new file of a resumed run begins with a session start at the first repeated step: TensorBoard then
//! drops later events of earlier files.

use super::logger::{Logger, scalars};
use ft_base::store;
use prost::Message;
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Subfolder of the run folder.
pub const FOLDER: &str = "tensorboard";
/// `file_version` of the first record.
const VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
const START: i32 = 1;
/// `DataType.DT_STRING`.
const STRING: i32 = 7;

/// `tensorflow.Event`, with the fields used here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Entry>,
}

/// `Summary.Value`
#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    tensor: Option<Texts>,
    #[prost(message, optional, tag = "9")]
    metadata: Option<Metadata>,
}

/// `TensorProto` of strings.
#[derive(Clone, PartialEq, Message)]
struct Texts {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {}

/// `SummaryMetadata`
#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(message, optional, tag = "1")]
    plugin_data: Option<Plugin>,
}

#[derive(Clone, PartialEq, Message)]
struct Plugin {
    #[prost(string, tag = "1")]
    plugin_name: String,
}

/// An open event file.
#[derive(Debug)]
pub struct TensorBoard {
    file: File,
    path: PathBuf,
}

impl TensorBoard {
    /// Creates an event file in a run folder. `resume_from` is the step of the checkpoint, for a resumed run.
    pub fn open(run: &Path, resume_from: Option<u64>) -> Result<Self, store::Error> {
        let dir = run.join(FOLDER);
        let fail = |what, path: &Path, e| store::Error::write(what, path, e);
        if resume_from.is_none() && dir.is_dir() {
            // Left over from a run that is being overwritten.
            let stale = std::fs::read_dir(&dir).map_err(|e| fail("list", &dir, e))?.flatten();
            for file in stale.filter(|f| f.file_name().to_string_lossy().starts_with("events.out.tfevents."))
            {
                std::fs::remove_file(file.path()).map_err(|e| fail("remove", &file.path(), e))?;
            }
        }
        std::fs::create_dir_all(&dir).map_err(|e| fail("create", &dir, e))?;
        // Names sort by time, TensorBoard's order of reading.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let path =
            dir.join(format!("events.out.tfevents.{:010}.{:09}.ft", time.as_secs(), time.subsec_nanos()));
        let file = File::create_new(&path).map_err(|e| fail("create", &path, e))?;
        let mut out = Self { file, path };
        out.record(0, What::FileVersion(VERSION.into()))?;
        if let Some(step) = resume_from {
            out.record(step + 1, What::SessionLog(SessionLog { status: START }))?;
        }
        Ok(out)
    }

    fn record(&mut self, step: u64, what: What) -> Result<(), store::Error> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let bytes = framed(&Event { wall_time: time.as_secs_f64(), step, what: Some(what) }.encode_to_vec());
        let written = self.file.write_all(&bytes);
        written.map_err(|e| store::Error::write_sized("append to", &self.path, Some(bytes.len() as u64), e))
    }
}

impl Logger for TensorBoard {
    /// Writes the scalars and samples of an event.
    fn write(&mut self, event: &Value) -> Result<(), store::Error> {
        let value = entries(event);
        if value.is_empty() {
            return Ok(());
        }
        self.record(event["step"].as_u64().unwrap_or(0), What::Summary(Summary { value }))
    }
}

/// Frames bytes as a record.
fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), bytes, &masked(bytes)].concat()
}

/// The masked CRC-32C of the record format: rotated by 15 bits, plus a constant.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8).to_le_bytes()
}

fn entries(event: &Value) -> Vec<Entry> {
    if event["event"] == "sample" {
        return vec![sample(event)];
    }
    let entry = |(tag, x): (String, f64)| Entry { tag, simple_value: Some(x as f32), ..Entry::default() };
    scalars(event).into_iter().map(entry).collect()
}

/// A reply as text, with a tag by the number of its prompt.
fn sample(event: &Value) -> Entry {
    let text = |key: &str| event[key].as_str().unwrap_or_default();
    let shown = format!("**{}**\n\n{}", text("prompt"), text("reply"));
    let plugin = Plugin { plugin_name: "text".into() };
    Entry {
        tag: format!("sample/{}", event["number"].as_u64().unwrap_or(1)),
        tensor: Some(Texts { dtype: STRING, shape: Some(Shape {}), string_val: vec![shown.into_bytes()] }),
        metadata: Some(Metadata { plugin_data: Some(plugin) }),
        ..Entry::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Reads the records of a file and verifies their checksums.
    fn records(path: &Path) -> anyhow::Result<Vec<Event>> {
        let bytes = std::fs::read(path)?;
        let (mut at, mut out) = (0, Vec::new());
        while at < bytes.len() {
            let n = u64::from_le_bytes(bytes[at..at + 8].try_into()?) as usize;
            assert_eq!(masked(&bytes[at..at + 8]), bytes[at + 8..at + 12]);
            let body = &bytes[at + 12..at + 12 + n];
            assert_eq!(masked(body), bytes[at + 12 + n..at + 16 + n]);
            out.push(Event::decode(body)?);
            at += 16 + n;
        }
        Ok(out)
    }

    #[test]
    fn events_are_records_with_checksums() -> anyhow::Result<()> {
        // Test vector of RFC 3720: 32 zero bytes.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8A91_36AA);
        let dir = tempfile::tempdir()?;
        let mut first = TensorBoard::open(dir.path(), None)?;
        first.write(&json!({"event": "start"}))?;
        first.write(&json!({"event": "step", "step": 1, "loss": 2.5, "lr": 0.1, "other": 3}))?;
        first.write(&json!({"event": "sample", "step": 1, "prompt": "a", "reply": "b"}))?;
        let found = records(&first.path)?;
        assert_eq!(found.len(), 3);
        assert_eq!(found[0].what, Some(What::FileVersion(VERSION.into())));
        let Some(What::Summary(s)) = &found[1].what else { panic!("{found:?}") };
        let tags: Vec<_> = s.value.iter().map(|v| (v.tag.as_str(), v.simple_value)).collect();
        assert_eq!(tags, [("train/loss", Some(2.5)), ("train/lr", Some(0.1))]);
        let more = TensorBoard::open(dir.path(), Some(1))?;
        assert!(more.path > first.path);
        assert_eq!(records(&more.path)?[1].step, 2);
        TensorBoard::open(dir.path(), None)?;
        assert_eq!(std::fs::read_dir(dir.path().join(FOLDER))?.count(), 1);
        Ok(())
    }
}
