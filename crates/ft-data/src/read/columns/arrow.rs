//! Rows of Arrow files and streams.
//!
//! A stream is a sequence of messages: the schema, dictionaries, and batches of rows. A file is such a stream between
//! a mark and an unused index. The stated lengths of a message are checked before the message is read.

use super::{FEATURES, cells, class_names};
use crate::error::Error;
use crate::read::row::RawRow;
use crate::shape::schema::Schema;
use arrow_array::{ArrayRef, RecordBatch};
use arrow_ipc::{Message, MessageHeader, root_as_message};
use arrow_schema::SchemaRef;
use ft_base::store;
use ft_base::terminal::panics::caught;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Mark at the beginning of a file; a stream has none.
const FILE: [u8; 8] = *b"ARROW1\0\0";
/// Mark before the length of a message; streams of old versions have none.
const CONTINUED: [u8; 4] = [0xFF; 4];
/// Longest metadata of a message, in bytes.
const LONGEST_METADATA: u64 = 16 << 20;
/// Largest batch of rows, in bytes.
const LARGEST_BATCH: u64 = 1 << 30;

/// Rows of a file, read in order with one batch in memory.
pub(crate) struct Batches {
    messages: Messages<BufReader<File>>,
    schema: SchemaRef,
    /// Values of dictionaries by id.
    dictionaries: HashMap<i64, ArrayRef>,
    batch: Option<RecordBatch>,
    /// The next row of the batch.
    next: usize,
    /// The last row, from 1.
    row: usize,
    /// For every column, whether the format reads it.
    read: Vec<bool>,
    path: PathBuf,
}

impl Batches {
    /// Opens a file and reads the schema.
    pub fn open(path: &Path, rows: &Schema) -> Result<Self, Error> {
        let file = store::open_plain(path).map_err(|e| Error::read(path, e))?;
        let (messages, schema) = call(path, || {
            let bytes = file.metadata().map_err(told)?.len();
            let mut messages = Messages::open(BufReader::new(file), bytes)?;
            let Some(first) = messages.next()? else { return Err("it is empty".into()) };
            let schema =
                message(&first.metadata)?.header_as_schema().ok_or("its first message is no schema")?;
            if !schema.endianness().equals_to_target_endianness() {
                return Err("its numbers have another order of bytes".into());
            }
            Ok((messages, Arc::new(arrow_ipc::convert::try_fb_to_schema(schema).map_err(told)?)))
        })?;
        let read = schema.fields().iter().map(|f| rows.reads(f.name())).collect();
        let (batch, next, row, dictionaries) = Default::default();
        Ok(Self { messages, schema, dictionaries, batch, next, row, read, path: path.into() })
    }

    /// Names of the numbers in a column of classes, if the file has them.
    pub fn class_names(&self, column: &str) -> Option<Vec<String>> {
        class_names(self.schema.metadata().get(FEATURES)?, column)
    }

    /// Returns the next row.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        while self.batch.as_ref().is_none_or(|b| self.next >= b.num_rows()) {
            let (messages, schema, dictionaries) = (&mut self.messages, &self.schema, &mut self.dictionaries);
            self.batch = None;
            match call(&self.path, || batch(messages, schema, dictionaries))? {
                Some(batch) => self.batch = Some(batch),
                None => return Ok(None),
            }
            self.next = 0;
        }
        let Some(batch) = &self.batch else { return Ok(None) };
        let columns = batch.columns().iter().zip(self.schema.fields()).zip(&self.read);
        let columns = columns.map(|((array, field), read)| (&**field, &**array, *read));
        let bytes = call(&self.path, || Ok(cells::object(columns, self.next)))?;
        self.next += 1;
        self.row += 1;
        let bytes = bytes.map_err(|why| why.trim_start_matches(['.', ':', ' ']).to_string());
        Ok(Some(RawRow { line: self.row, column: 1, bytes }))
    }
}

/// The next batch of rows; `None` at the end. Dictionaries before it are kept.
fn batch(
    messages: &mut Messages<impl Read>,
    schema: &SchemaRef,
    dictionaries: &mut HashMap<i64, ArrayRef>,
) -> Result<Option<RecordBatch>, String> {
    while let Some(Framed { metadata, body }) = messages.next()? {
        let message = message(&metadata)?;
        let (length, body) = (body.len(), body.into());
        match message.header_type() {
            MessageHeader::RecordBatch => {
                let rows = checked(message.header_as_record_batch(), length)?;
                let version = message.version();
                let batch = arrow_ipc::reader::read_record_batch(
                    &body,
                    rows,
                    schema.clone(),
                    dictionaries,
                    None,
                    &version,
                );
                return batch.map(Some).map_err(told);
            }
            MessageHeader::DictionaryBatch => {
                let values = message.header_as_dictionary_batch().ok_or("a dictionary has no values")?;
                checked(values.data(), length)?;
                // joined to the values before, each costs their length
                if values.isDelta() {
                    return Err("a dictionary goes on in another message (a delta); write it whole".into());
                }
                arrow_ipc::reader::read_dictionary(&body, values, schema, dictionaries, &message.version())
                    .map_err(told)?;
            }
            other => return Err(format!("a message of type {other:?} between the rows")),
        }
    }
    Ok(None)
}

fn message(metadata: &[u8]) -> Result<Message<'_>, String> {
    root_as_message(metadata).map_err(told)
}

/// Checks that the buffers of a batch are uncompressed, and together no longer than its body: the library copies
/// unaligned buffers.
fn checked(
    batch: Option<arrow_ipc::RecordBatch<'_>>,
    body: usize,
) -> Result<arrow_ipc::RecordBatch<'_>, String> {
    let batch = batch.ok_or("a batch has no rows")?;
    if batch.compression().is_some() {
        return Err(
            "its buffers are compressed, which ft does not read; write it uncompressed, or as Parquet".into(),
        );
    }
    let mut lengths = batch.buffers().into_iter().flatten().map(|b| usize::try_from(b.length()).ok());
    let all = lengths.try_fold(0usize, |sum, length| sum.checked_add(length?));
    match all {
        Some(all) if all <= body => Ok(batch),
        _ => Err(format!("the buffers of a batch are longer than its {body} bytes")),
    }
}

/// A message of metadata and the buffers described by it.
struct Framed {
    metadata: Vec<u8>,
    body: Vec<u8>,
}

/// Splits a file into messages.
struct Messages<R> {
    file: R,
    /// Bytes that are not read yet.
    left: u64,
    /// Whether an index follows the last message.
    index: bool,
    /// Most words of zeros that may follow the mark: some programs begin the first message at a multiple of 64 bytes.
    padding: usize,
    /// The first bytes of a stream.
    first: Option<[u8; 8]>,
    ended: bool,
}

impl<R: Read> Messages<R> {
    /// Messages of a file of `bytes` bytes.
    fn open(file: R, bytes: u64) -> Result<Self, String> {
        let mut messages = Self { file, left: bytes, index: false, padding: 0, first: None, ended: false };
        if bytes >= 8 {
            let first = messages.array()?;
            messages.index = first == FILE;
            messages.padding = if messages.index { (64 - FILE.len()) / 4 } else { 0 };
            messages.first = (!messages.index).then_some(first);
        }
        Ok(messages)
    }

    /// Returns the next message; `None` at the end mark.
    fn next(&mut self) -> Result<Option<Framed>, String> {
        if self.ended {
            return Ok(None);
        }
        let metadata = self.length()?;
        if metadata == 0 {
            self.ended = true;
            return match self.left {
                1.. if !self.index => Err(format!("{} bytes follow its end", self.left)),
                _ => Ok(None),
            };
        }
        let metadata = self.bytes(metadata, LONGEST_METADATA, "the metadata of a message")?;
        let body = message(&metadata)?.bodyLength();
        let body = u64::try_from(body).map_err(|_| format!("a message of {body} bytes"))?;
        let body = self.bytes(body, LARGEST_BATCH, "a batch")?;
        Ok(Some(Framed { metadata, body }))
    }

    /// Length of the metadata of the next message; 0 is the end mark.
    fn length(&mut self) -> Result<u64, String> {
        let length = match self.first.take() {
            Some([a, b, c, d, length @ ..]) if [a, b, c, d] == CONTINUED => length,
            Some(_) => return Err("it begins neither as a file nor as a stream of Arrow".into()),
            None => match self.word()? {
                CONTINUED => self.array()?,
                length => length,
            },
        };
        Ok(u32::from_le_bytes(length).into())
    }

    /// The next word after the padding.
    fn word(&mut self) -> Result<[u8; 4], String> {
        for _ in 0..std::mem::take(&mut self.padding) {
            let word = self.array()?;
            if word != [0; 4] {
                return Ok(word);
            }
        }
        self.array()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.bytes(N as u64, N as u64, "a length")?;
        bytes.try_into().map_err(|_| String::new())
    }

    /// Reads bytes; `what` names them in errors.
    fn bytes(&mut self, count: u64, most: u64, what: &str) -> Result<Vec<u8>, String> {
        if count > self.left {
            return Err(match self.left {
                0 => "it ends without an end mark: it may be cut".into(),
                left => format!("{what} of {count} bytes, where the file has {left} more: it may be cut"),
            });
        }
        if count > most {
            let (mib, most) = (count >> 20, most >> 20);
            return Err(format!(
                "{what} of {mib} MiB, more than {most} MiB; save it with fewer rows a batch"
            ));
        }
        let mut bytes = vec![0; count as usize];
        self.file.read_exact(&mut bytes).map_err(told)?;
        self.left -= count;
        Ok(bytes)
    }
}

fn told(e: impl ToString) -> String {
    e.to_string()
}

/// Calls the library, and turns errors and panics into [`Error::Read`].
fn call<T>(path: &Path, f: impl FnOnce() -> Result<T, String>) -> Result<T, Error> {
    caught(f).and_then(|out| out).map_err(|why| {
        let cause = io::Error::new(io::ErrorKind::InvalidData, format!("not Arrow as it should be: {why}"));
        Error::read(path, cause)
    })
}
