//! Test helpers: a disk of 256 KiB, and folder listings.

use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A mounted tmpfs of 256 KiB, unmounted on drop.
pub struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts a new disk. Without permission (it needs root), prints a note and returns `None`.
    pub fn new() -> Option<Self> {
        let root = tempfile::tempdir().expect("a folder");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(root.path()).output();
        if mount.is_ok_and(|m| m.status.success()) {
            return Some(Self(root));
        }
        eprintln!("skipped: no tmpfs can be mounted here");
        None
    }

    /// Mount point.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Fills the disk with the file `filler`, except for this many pages.
    pub fn fill_but(&self, pages: u64) {
        let space = ft_base::store::free_bytes(self.path()).expect("free space");
        let bytes = space.saturating_sub(pages * 4096) as usize;
        fs::write(self.path().join("filler"), vec![0u8; bytes]).expect("a filler");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // a child process that another test starts holds files for a moment
        let unmount = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
        if !std::thread::panicking() {
            assert!(unmount.is_ok_and(|s| s.success()), "unmounting {}", self.0.path().display());
        }
    }
}

/// The names in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let name =
        |e: std::io::Result<fs::DirEntry>| e.expect("an entry").file_name().into_string().expect("UTF-8");
    let mut names: Vec<_> = fs::read_dir(dir).expect("a folder").map(name).collect();
    names.sort();
    names
}
