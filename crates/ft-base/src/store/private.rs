//! Files for one user alone: secrets shared by the processes of a machine.

use super::Error;
use super::write::{TEMPORARY, folder_of};
use rustix::fs::OFlags;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Writes a file that only this user may read, replacing any other. Its folder is created if missing.
///
/// # Errors
/// [`Error::Write`].
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let fail = |doing, e| Error::write(doing, path, e);
    let dir = folder_of(path);
    std::fs::create_dir_all(dir).map_err(|e| Error::write("create", dir, e))?;
    let temporary = tempfile::Builder::new().prefix(TEMPORARY.0).suffix(TEMPORARY.1).tempfile_in(dir);
    let mut file = temporary.map_err(|e| fail("create a file for", e))?;
    file.write_all(bytes).map_err(|e| fail("write", e))?;
    file.persist(path).map_err(|e| fail("rename to", e.error))?;
    Ok(())
}

/// Reads a file of [`write_private`], of at most `most` bytes.
///
/// # Errors
/// A link, a file of another user, or one that others may read or write.
pub fn read_private(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    let own = about.uid() == rustix::process::geteuid().as_raw();
    if !about.is_file() || !own || about.mode() & 0o077 != 0 || about.len() > most {
        return Err(io::Error::other("it is not a file of this user alone"));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_a_file_of_this_user_alone_is_read() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("folder/key");
        write_private(&path, b"old")?;
        write_private(&path, b"secret")?;
        assert_eq!(read_private(&path, 6)?, b"secret");
        assert_eq!(path.metadata()?.mode() & 0o777, 0o600);
        assert!(read_private(&path, 5).is_err());
        symlink(&path, dir.path().join("link"))?;
        assert!(read_private(&dir.path().join("link"), 6).is_err());
        for mode in [0o640, 0o604, 0o620] {
            set_permissions(&path, Permissions::from_mode(mode))?;
            assert!(read_private(&path, 6).is_err(), "{mode:o}");
        }
        // A link in place of the file is replaced, not followed.
        std::fs::remove_file(&path)?;
        symlink("elsewhere", &path)?;
        write_private(&path, b"secret")?;
        assert_eq!(read_private(&path, 6)?, b"secret");
        assert!(!dir.path().join("folder/elsewhere").exists());
        Ok(())
    }
}
