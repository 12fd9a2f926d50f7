//! Files that are written step by step: logs, metrics, tensors of several ranks. Links are not written through.

use super::atomic::AtomicFile;
use crate::store::Error;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Creates an empty file. Replaces a file or a link of that name; what the link points to stays.
///
/// # Errors
/// [`Error::Write`].
pub fn create(path: &Path) -> Result<File, Error> {
    AtomicFile::create(path, None)?.publish()
}

/// Opens a plain file for reading and appending, and creates it if missing.
///
/// # Errors
/// [`Error::Write`], also for a link.
pub fn append(path: &Path) -> Result<File, Error> {
    open(path, OpenOptions::new().read(true).append(true).create(true))
}

/// Opens an existing plain file for writing alone: an NFS client sends whole pages of files that are also open for
/// reading, over the bytes that another client writes beside.
///
/// # Errors
/// [`Error::Write`], also for a link.
pub fn reopen(path: &Path) -> Result<File, Error> {
    open(path, OpenOptions::new().write(true))
}

fn open(path: &Path, options: &mut OpenOptions) -> Result<File, Error> {
    let fail = |e| Error::write("open", path, e);
    let opened = options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32).open(path);
    let is_link = || path.symlink_metadata().is_ok_and(|m| m.is_symlink());
    let file = opened.map_err(|e| match is_link() {
        true => fail(io::Error::other("it is a link, which ft does not write through")),
        false => fail(e),
    })?;
    if file.metadata().map_err(fail)?.is_file() {
        Ok(file)
    } else {
        Err(fail(io::Error::other("it is not a plain file")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_replaced_or_refused() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let (notes, path) = (dir.path().join("notes"), dir.path().join("rank-1.log"));
        std::fs::write(&notes, "mine")?;
        for target in ["notes", "none"] {
            symlink(target, &path)?;
            for opened in [append(&path), reopen(&path)] {
                let said = opened.err().map_or(String::new(), |e| e.to_string());
                assert!(said.contains("it is a link, which ft does not write through"), "{said}");
            }
            create(&path)?.write_all(b"log")?;
            append(&path)?.write_all(b"s")?;
            assert_eq!(std::fs::read(&path)?, b"logs");
            assert_eq!(std::fs::read(&notes)?, b"mine");
            assert_eq!(std::fs::read_dir(dir.path())?.count(), 2);
            std::fs::remove_file(&path)?;
        }
        // The new file replaces the old one: hard links to the old one keep their contents.
        std::fs::hard_link(&notes, &path)?;
        create(&path)?.write_all(b"log")?;
        assert_eq!(std::fs::read(&notes)?, b"mine");
        assert_eq!(rustix::fs::fcntl_getfl(reopen(&path)?)? & OFlags::ACCMODE, OFlags::WRONLY);
        assert!(reopen(&dir.path().join("none")).is_err());
        // A pipe would swallow what is written.
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        assert!(append(&pipe).is_err() && reopen(&pipe).is_err());
        Ok(())
    }
}
