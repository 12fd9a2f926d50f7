//! Files of an untrusted folder: a model, an adapter, a run. [`open_inside`] opens plain files inside the folder, and
//! no link out of it, except into the blobs of the hub's cache. Outside files therefore never reach an output, an
//! export or an upload.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::OFlags;

use crate::store::Error;
use crate::store::disk::human_bytes;

/// Checks that `name` is a non-empty relative path without `.` in front, `..`, root, backslash or NUL.
/// Does not access the file system.
pub fn check_name(dir: &Path, name: &str) -> Result<(), Error> {
    let refuse =
        |why: &str| Error::Unsafe { dir: dir.to_path_buf(), name: name.to_string(), why: why.to_string() };
    if name.is_empty() {
        return Err(refuse("the name is empty"));
    }
    if name.contains('\0') {
        return Err(refuse("the name contains a NUL byte"));
    }
    if name.contains('\\') {
        return Err(refuse("the name contains a backslash"));
    }
    for component in Path::new(name).components() {
        match component {
            Component::Normal(_) => {}
            Component::ParentDir => return Err(refuse("`..` leads out of the folder")),
            Component::CurDir => return Err(refuse("the name starts with `.`")),
            Component::RootDir | Component::Prefix(_) => {
                return Err(refuse("the path is absolute"));
            }
        }
    }
    Ok(())
}

/// Opens `dir/name` for reading, if it is a plain file inside `dir`.
///
/// Links within the folder are allowed. One link out of the folder is allowed too:
/// `snapshots/REVISION/file -> ../../blobs/HASH` in the cache of the Hugging Face hub. Anything but a
/// plain file (a pipe, a device, a folder) is rejected before it is opened, because opening may block or
/// have side effects.
///
/// # Errors
/// [`Error::Unsafe`] with the violated rule; [`Error::Read`] if the file cannot be opened.
pub fn open_inside(dir: &Path, name: &str) -> Result<(File, PathBuf), Error> {
    check_name(dir, name)?;
    let path = dir.join(name);
    let real_dir = dir.canonicalize().map_err(|e| Error::read(dir, e))?;
    let fail = |e| Error::read(&path, e);
    // Resolves all links; a cycle is an error.
    let real = path.canonicalize().map_err(fail)?;
    let refuse = |why: String| Error::Unsafe { dir: dir.to_path_buf(), name: name.into(), why };
    let check = |about: Metadata| match not_a_file(about.file_type()) {
        Some(kind) => Err(refuse(format!("it is {kind} and not a file"))),
        None => Ok(()),
    };
    if !real.starts_with(&real_dir) && !is_blob_of(&real_dir, &real) {
        return Err(refuse(format!(
            "it is a link to {}, outside of the folder; copy the file into the folder",
            real.display()
        )));
    }
    check(real.symlink_metadata().map_err(fail)?)?;
    let file = OpenOptions::new()
        .read(true)
        // If the file was replaced since the check, neither follow a link nor block.
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
        .open(&real)
        .map_err(fail)?;
    check(file.metadata().map_err(fail)?)?;
    Ok((file, path))
}

/// Reads `dir/name`, under the rules of [`open_inside`].
///
/// # Errors
/// As [`open_inside`]; [`Error::Unsafe`] for a file of more than `most` bytes.
pub fn read_inside(dir: &Path, name: &str, most: u64) -> Result<Vec<u8>, Error> {
    let (file, path) = open_inside(dir, name)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| Error::read(&path, e))?;
    if bytes.len() as u64 > most {
        let why = format!("it is larger than {}", human_bytes(most));
        return Err(Error::Unsafe { dir: dir.to_path_buf(), name: name.into(), why });
    }
    Ok(bytes)
}

/// As [`read_inside`]; `None` if there is no such file.
///
/// # Errors
/// As [`read_inside`].
pub fn read_if_there(dir: &Path, name: &str, most: u64) -> Result<Option<Vec<u8>>, Error> {
    match read_inside(dir, name, most) {
        Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Whether `real` is a blob in the hub cache, for a `real_dir` that is a snapshot of the same repository.
fn is_blob_of(real_dir: &Path, real: &Path) -> bool {
    let Some(snapshots) = real_dir.parent().filter(|p| p.ends_with("snapshots")) else {
        return false;
    };
    let Some(repository) = snapshots.parent() else { return false };
    // The blobs folder may itself be a link, to another disk.
    match repository.join("blobs").canonicalize() {
        Ok(blobs) => real.parent() == Some(blobs.as_path()),
        Err(_) => false,
    }
}

pub(super) fn not_a_file(kind: std::fs::FileType) -> Option<&'static str> {
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a folder")
    } else if kind.is_fifo() {
        Some("a pipe")
    } else if kind.is_socket() {
        Some("a socket")
    } else if kind.is_block_device() || kind.is_char_device() {
        Some("a device")
    } else {
        Some("something else")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn why(dir: &Path, name: &str) -> String {
        match open_inside(dir, name) {
            Err(Error::Unsafe { why, .. }) => why,
            other => panic!("{name:?}: {other:?}"),
        }
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("model");
        std::fs::create_dir_all(dir.join("a")).unwrap();
        std::fs::write(root.path().join("x"), b"x").unwrap();
        let absolute = root.path().join("x").display().to_string();
        assert!(why(&dir, "../x").contains(".."));
        assert!(why(&dir, "a/../../x").contains(".."));
        assert!(why(&dir, &absolute).contains("absolute"));
        assert!(why(&dir, "x\0y").contains("NUL"));
        assert!(why(&dir, "a\\x").contains("backslash"));
        assert!(why(&dir, "").contains("empty"));
        assert!(why(&dir, "./x").contains('.'));
    }

    #[test]
    fn links_out_and_special_files_are_refused_before_open() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("model");
        std::fs::create_dir_all(dir.join("folder")).unwrap();
        std::fs::write(root.path().join("secret"), b"x").unwrap();
        symlink("../secret", dir.join("out")).unwrap();
        symlink("/dev/zero", dir.join("zero")).unwrap();
        symlink("loop", dir.join("loop")).unwrap();
        assert!(why(&dir, "out").contains("outside"));
        assert!(why(&dir, "zero").contains("outside"));
        assert!(matches!(open_inside(&dir, "loop"), Err(Error::Read { .. })));
        assert!(why(&dir, "folder").contains("a folder"));
        // Opening a pipe for reading would wait for a writer forever.
        let pipe = dir.join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert!(why(&dir, "pipe").contains("a pipe"));
    }

    #[test]
    fn links_inside_and_the_hub_cache_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let repo = root.path().join("models--owner--name");
        let snapshot = repo.join("snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repo.join("blobs/deep")).unwrap();
        std::fs::write(repo.join("blobs/hash"), b"x").unwrap();
        std::fs::write(repo.join("blobs/deep/hash"), b"x").unwrap();
        symlink("../../blobs/hash", snapshot.join("model.safetensors")).unwrap();
        symlink("model.safetensors", snapshot.join("again")).unwrap();
        symlink("../../blobs/deep/hash", snapshot.join("deep")).unwrap();
        open_inside(&snapshot, "model.safetensors").unwrap();
        open_inside(&snapshot, "again").unwrap();
        assert!(why(&snapshot, "deep").contains("outside"));
        // The same blob, from a folder that is not a snapshot.
        let other = repo.join("other/abc");
        std::fs::create_dir_all(&other).unwrap();
        symlink("../../blobs/hash", other.join("model.safetensors")).unwrap();
        assert!(why(&other, "model.safetensors").contains("outside"));
    }
}
