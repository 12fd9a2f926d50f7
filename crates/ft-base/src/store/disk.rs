//! Free disk space, and sizes in messages.

use std::path::Path;

/// Most levels of folders whose files [`folder_bytes`] counts.
const DEEPEST: usize = 12;

/// Free bytes for this user on the disk of `dir`, or of the nearest existing ancestor; `None` if unknown.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let mut ancestors = dir.ancestors().map(|d| if d.as_os_str().is_empty() { Path::new(".") } else { d });
    let stat = ancestors.find_map(|d| rustix::fs::statvfs(d).ok())?;
    // Some FUSE file systems report zeros.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes of the plain files below a folder, links not followed; `None` if it cannot be listed.
pub fn folder_bytes(dir: &Path) -> Option<u64> {
    fn below(dir: &Path, depth: usize) -> Option<u64> {
        let entries = std::fs::read_dir(dir).ok().filter(|_| depth < DEEPEST)?;
        let of = |e: std::fs::DirEntry| match e.file_type().ok()? {
            t if t.is_dir() => below(&e.path(), depth + 1),
            t if t.is_file() => Some(e.metadata().ok()?.len()),
            _ => None,
        };
        Some(entries.flatten().filter_map(of).sum())
    }
    below(dir, 0)
}

/// Formats bytes as `12.3 GiB`; exact below 1 KiB.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = bytes.checked_ilog2().unwrap_or(0) as usize / 10;
    match power.min(UNITS.len()) {
        0 => format!("{bytes} bytes"),
        power => format!("{:.1} {}", bytes as f64 / 1024f64.powi(power as i32), UNITS[power - 1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn bytes_of_a_folder_are_those_of_its_plain_files() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("one"), [0; 10]).unwrap();
        fs::write(at("a/b/two"), [0; 500]).unwrap();
        std::os::unix::fs::symlink(at("a"), at("again")).unwrap();
        std::os::unix::fs::symlink(at("one"), at("a/link")).unwrap();
        assert_eq!(folder_bytes(dir.path()), Some(510));
        assert_eq!(folder_bytes(&at("a/b")), Some(500));
        assert_eq!((folder_bytes(&at("none")), folder_bytes(&at("one"))), (None, None));
    }

    #[test]
    fn sizes_have_the_largest_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            ((1 << 20) - 1, "1024.0 KiB"),
            (3 << 19, "1.5 MiB"),
            (1 << 30, "1.0 GiB"),
            (1 << 60, "1024.0 PiB"),
        ] {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
