//! Reads small files as a whole: configs, tokenizers, manifests. Accepts only plain files (a pipe can
//! block forever, and a device has no end) up to a size limit.

use super::path::not_a_file;
use crate::store::disk::human_bytes;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Default size limit in bytes. Vocabularies have some tens of millions.
pub const LARGEST: u64 = 256 << 20;

/// Opens a plain file for reading, following links.
///
/// # Errors
/// I/O errors; a pipe, device, socket or folder.
pub fn open_plain(path: &Path) -> io::Result<File> {
    // Without NONBLOCK, opening a pipe would wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    match not_a_file(file.metadata()?.file_type()) {
        Some(kind) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {kind} and not a file")))
        }
        None => Ok(file),
    }
}

/// Reads a plain file of at most `most` bytes.
///
/// # Errors
/// As [`open_plain`]; a larger file.
pub fn read_plain(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut file = open_plain(path)?;
    let size = file.metadata()?.len();
    let too_large = || {
        let text = format!("it is larger than {}", human_bytes(most));
        io::Error::new(io::ErrorKind::InvalidInput, text)
    };
    if size > most {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    // A file can grow, and files in /proc report size 0.
    (&mut file).take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_large()) } else { Ok(bytes) }
}

/// Like [`read_plain`], for a file named on the command line: also reads a pipe with a writer, such as a
/// shell's `<(..)`.
///
/// # Errors
/// As [`read_plain`]; a pipe without a writer.
pub fn read_given(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    if !file.metadata()?.file_type().is_fifo() {
        return read_plain(path, most);
    }
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    let wrong = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    match bytes.len() as u64 {
        0 => wrong("it is a pipe that nobody writes to".into()),
        n if n > most => wrong(format!("it is larger than {}", human_bytes(most))),
        _ => Ok(bytes),
    }
}

/// Like [`read_plain`], decoded as text.
///
/// # Errors
/// As [`read_plain`]; invalid UTF-8.
pub fn read_plain_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read_plain(path, most)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_files_are_read_and_no_more_than_asked_for() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let (file, pipe) = (dir.path().join("file"), dir.path().join("pipe"));
        std::fs::write(&file, "1234")?;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR)?;
        std::os::unix::fs::symlink(&file, dir.path().join("link"))?;
        assert_eq!(read_plain(&file, 4)?, b"1234");
        assert_eq!(read_plain_text(&dir.path().join("link"), 4)?, "1234");
        let kind = |p: &Path| read_plain(p, 3).err().map(|e| e.kind());
        assert_eq!(kind(&file), Some(io::ErrorKind::InvalidInput));
        assert_eq!(kind(&pipe), Some(io::ErrorKind::InvalidInput));
        assert_eq!(kind(dir.path()), Some(io::ErrorKind::InvalidInput));
        assert_eq!(kind(Path::new("/dev/zero")), Some(io::ErrorKind::InvalidInput));
        assert_eq!(kind(&dir.path().join("none")), Some(io::ErrorKind::NotFound));
        Ok(())
    }
}
