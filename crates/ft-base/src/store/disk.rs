//! Free disk space, and sizes in messages.

use std::path::Path;

/// Free bytes for this user on the disk of `dir`, or of the nearest existing ancestor; `None` if unknown.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let mut ancestors = dir.ancestors().map(|d| if d.as_os_str().is_empty() { Path::new(".") } else { d });
    let stat = ancestors.find_map(|d| rustix::fs::statvfs(d).ok())?;
    // Some FUSE file systems report zeros.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
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
