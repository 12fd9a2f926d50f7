//! Splits data files into rows.

use super::array::Array;
#[cfg(feature = "parquet")]
use super::columns::{Batches, Columns};
use super::encoding::{self, Decoded};
use super::files::{self, Compression, Kind};
use super::lines::Lines;
use super::row::RawRow;
use super::tables::{Table, Texts};
use crate::error::Error;
use crate::shape::schema::Schema;
use encoding_rs::Encoding;
use ft_base::store;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Iterates over the rows of a file. A read error ends the iteration.
pub(crate) enum Rows {
    /// One row per line.
    Lines(Lines),
    /// Items of one array.
    Array(Array),
    Table(Box<Table>),
    /// One text per line.
    Texts(Texts),
    #[cfg(feature = "parquet")]
    Parquet(Box<Columns>),
    #[cfg(feature = "parquet")]
    Arrow(Box<Batches>),
}

/// Opens a file, with decompression and as UTF-8.
fn decompressed(
    path: &Path,
    compression: Option<Compression>,
    given: Option<&'static Encoding>,
) -> io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::with_capacity(1 << 17, store::open_plain(path)?);
    let is_gzip = file.fill_buf()?.starts_with(&[0x1F, 0x8B]);
    let buffered = |r: Box<dyn Read>| Box::new(BufReader::with_capacity(1 << 18, r));
    let mut bytes = buffered(match compression {
        None => Box::new(file),
        Some(Compression::Gzip) if !is_gzip => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not gzip, by its first bytes"));
        }
        Some(Compression::Gzip) => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Some(Compression::Zstd) => Box::new(zstd::Decoder::with_buffer(file)?),
    });
    Ok(match encoding::of(bytes.fill_buf()?, given) {
        Some(encoding) => buffered(Box::new(Decoded::new(bytes, encoding))),
        None => bytes,
    })
}

/// The first bytes of a file, behind a byte order mark and white space.
fn start<'a>(file: &'a mut dyn BufRead, path: &Path) -> Result<&'a [u8], Error> {
    let start = file.fill_buf().map_err(|e| Error::read(path, e))?;
    Ok(start.strip_prefix("\u{feff}".as_bytes()).unwrap_or(start).trim_ascii_start())
}

/// Whether a `.jsonl` file is one array of objects, not an array a line.
fn holds_array(mut file: Box<dyn BufRead>, path: &Path) -> Result<bool, Error> {
    let items = start(&mut file, path)?.strip_prefix(b"[");
    if !items.is_some_and(|items| items.trim_ascii_start().starts_with(b"{")) {
        return Ok(false);
    }
    let mut lines = Lines::new(file, path.into());
    let whole = lines.next()?.is_some_and(|row| row.parse().is_ok());
    Ok(!whole || lines.next()?.is_none())
}

/// Whether a `.json` file is JSON Lines: its first line is an object.
fn holds_lines(mut file: Box<dyn BufRead>, path: &Path) -> Result<bool, Error> {
    if !start(&mut file, path)?.starts_with(b"{") {
        return Ok(false);
    }
    let mut lines = Lines::new(file, path.into());
    let object = |row: RawRow| row.parse().is_ok_and(|v| v.is_object());
    Ok(lines.next()?.is_some_and(object))
}

impl Rows {
    /// Opens a file in the format given by the file name, for rows of `schema`.
    pub fn open(path: &Path, schema: &Schema) -> Result<Self, Error> {
        let (kind, compression) = files::kind(path).unwrap_or((Kind::Lines, None));
        let file = || decompressed(path, compression, schema.encoding).map_err(|e| Error::read(path, e));
        let lines = || Ok::<_, Error>(Lines::new(file()?, path.into()));
        Ok(match kind {
            Kind::Lines if holds_array(file()?, path)? => Rows::Array(Array::new(file()?, path.into())),
            Kind::Lines => Rows::Lines(lines()?),
            Kind::Text => Rows::Texts(Texts::new(lines()?, schema.name("text"))),
            Kind::Array if holds_lines(file()?, path)? => Rows::Lines(lines()?),
            Kind::Array => Rows::Array(Array::new(file()?, path.into())),
            Kind::Table(delimiter) => Rows::Table(Box::new(Table::open(file()?, path, delimiter, schema)?)),
            #[cfg(feature = "parquet")]
            Kind::Parquet => Rows::Parquet(Box::new(Columns::open(path, schema)?)),
            #[cfg(feature = "parquet")]
            Kind::Arrow => Rows::Arrow(Box::new(Batches::open(path, schema)?)),
            #[cfg(not(feature = "parquet"))]
            Kind::Parquet | Kind::Arrow => {
                let what = "Parquet and Arrow files, in a build of ft without its parquet feature";
                return Err(Error::NotBuilt(format!("{} ({what})", path.display())));
            }
        })
    }

    /// Names of the numbers in a column of classes, if the file has them.
    #[cfg_attr(not(feature = "parquet"), allow(unused_variables))]
    pub fn class_names(&self, column: &str) -> Option<Vec<String>> {
        match self {
            #[cfg(feature = "parquet")]
            Rows::Parquet(c) => c.class_names(column),
            #[cfg(feature = "parquet")]
            Rows::Arrow(b) => b.class_names(column),
            Rows::Lines(_) | Rows::Array(_) | Rows::Table(_) | Rows::Texts(_) => None,
        }
    }
}

impl Iterator for Rows {
    type Item = Result<RawRow, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = match self {
            Rows::Lines(l) => l.next(),
            Rows::Array(a) => a.next(),
            Rows::Table(t) => t.next(),
            Rows::Texts(t) => t.next(),
            #[cfg(feature = "parquet")]
            Rows::Parquet(c) => c.next(),
            #[cfg(feature = "parquet")]
            Rows::Arrow(b) => b.next(),
        };
        row.transpose()
    }
}
