//! Host memory available to this process: the minimum over free system memory, control group limits
//! (versions 1 and 2, at every level of the hierarchy) and the address space limit.

use std::io::Read;
use std::path::{Path, PathBuf};

/// Limits from this value on mean "unlimited": cgroup version 1 reports the largest page-aligned number.
const NONE: u64 = 1 << 60;

/// Bytes available without swapping or exceeding a limit; `None` if unknown.
///
/// `root` contains `proc` and `sys`: `/`, except in tests.
pub fn available(root: &Path) -> Option<u64> {
    let system = field(&root.join("proc/meminfo"), "MemAvailable:");
    groups(root).chain(system).chain(addresses(root)).min()
}

/// Anonymous resident bytes of this process, freed when the process ends.
pub fn own(root: &Path) -> Option<u64> {
    let status = root.join("proc/self/status");
    field(&status, "RssAnon:").or_else(|| field(&status, "VmRSS:"))
}

/// Reads a line "KEY  N kB" of a `/proc` file, in bytes.
pub fn field(file: &Path, key: &str) -> Option<u64> {
    let text = text(file)?;
    let kb = text.lines().find_map(|l| l.strip_prefix(key)?.trim().strip_suffix(" kB")?.trim().parse().ok());
    kb.map(|kb: u64| kb * 1024)
}

/// Bytes left under this process's address space limit (`ulimit -v`).
pub fn addresses(root: &Path) -> Option<u64> {
    let limits = text(&root.join("proc/self/limits"))?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let soft: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(soft.saturating_sub(field(&root.join("proc/self/status"), "VmSize:")?))
}

/// Bytes left in each control group with a limit, from this process's group up to the root.
///
/// In a container, the path in `/proc/self/cgroup` may not be visible. The root of the mount is then the
/// container's own group, so the root is always included.
fn groups(root: &Path) -> impl Iterator<Item = u64> {
    let text = text(&root.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let inside = Path::new(path.trim_start_matches('/'));
        if controllers.is_empty() {
            for mount in ["sys/fs/cgroup", "sys/fs/cgroup/unified"] {
                found.extend(up(&root.join(mount), inside).filter_map(|d| v2(&d)));
            }
        } else if controllers.split(',').any(|c| c == "memory") {
            found.extend(up(&root.join("sys/fs/cgroup/memory"), inside).filter_map(|d| v1(&d)));
        }
    }
    found.into_iter()
}

/// The folders from `mount/inside` up to `mount`.
fn up(mount: &Path, inside: &Path) -> impl Iterator<Item = PathBuf> {
    inside.ancestors().map(move |p| mount.join(p))
}

/// Reads a `/proc` or `/sys` file. Reserves 8 KiB up front because such files report size 0, and the
/// kernel generates the text again for each read.
fn text(path: &Path) -> Option<String> {
    let mut text = String::with_capacity(8192);
    std::fs::File::open(path).ok()?.read_to_string(&mut text).ok()?;
    Some(text)
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

/// Reads a line "KEY N" of `memory.stat`.
fn stat(dir: &Path, key: &str) -> u64 {
    let text = text(&dir.join("memory.stat")).unwrap_or_default();
    text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok()).unwrap_or(0)
}

/// Bytes left in a group with a limit. Inactive file cache counts as free because the kernel reclaims
/// such pages before it refuses an allocation. Skips the usage files of a group without a limit, since
/// the kernel takes time to compute them.
fn left(dir: &Path, limit: u64, used: &str, inactive: &str) -> Option<u64> {
    if limit >= NONE {
        return None;
    }
    let used = number(&dir.join(used))?.saturating_sub(stat(dir, inactive));
    Some(limit.saturating_sub(used))
}

fn v2(dir: &Path) -> Option<u64> {
    let limit = ["memory.max", "memory.high"].iter().filter_map(|f| number(&dir.join(f))).min()?;
    left(dir, limit, "memory.current", "inactive_file")
}

fn v1(dir: &Path) -> Option<u64> {
    let limit = number(&dir.join("memory.limit_in_bytes"))?;
    left(dir, limit, "memory.usage_in_bytes", "total_inactive_file")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A fake system root with these files.
    fn system(files: &[(&str, String)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    fn meminfo(gib: u64) -> (&'static str, String) {
        ("proc/meminfo", format!("MemTotal: 99999999 kB\nMemAvailable:   {} kB\n", gib << 20))
    }

    #[test]
    fn without_cgroups_the_memory_of_the_system_counts() {
        let s = system(&[meminfo(8)]);
        assert_eq!(available(s.path()), Some(8 * GIB));
        assert_eq!(available(Path::new("/nowhere")), None);
    }

    #[test]
    fn cgroup_v2_limits_count_at_every_level() {
        let at = |level: &str, file: &str| format!("sys/fs/cgroup/{level}{file}");
        let files = [
            (at("a/b/", "memory.max"), "max\n".to_string()),
            (at("a/b/", "memory.current"), "100\n".into()),
            (at("a/", "memory.max"), (4 * GIB).to_string()),
            (at("a/", "memory.current"), (3 * GIB).to_string()),
            (at("a/", "memory.stat"), format!("anon 5\ninactive_file {GIB}\n")),
        ];
        let mut all = vec![meminfo(8), ("proc/self/cgroup", "0::/a/b\n".into())];
        all.extend(files.iter().map(|(n, t)| (n.as_str(), t.clone())));
        let s = system(&all);
        // Limit 4 GiB, 3 GiB used, 1 GiB of this reclaimable file cache.
        assert_eq!(available(s.path()), Some(2 * GIB));
        std::fs::write(s.path().join("sys/fs/cgroup/a/b/memory.high"), GIB.to_string()).unwrap();
        assert_eq!(available(s.path()), Some(GIB - 100));
    }

    #[test]
    fn cgroup_v1_limits_count_and_the_largest_number_is_none() {
        let of = |limit: u64, path: &str| {
            let d = "sys/fs/cgroup/memory";
            let (limit_at, usage_at, stat_at) = (
                format!("{d}/memory.limit_in_bytes"),
                format!("{d}/memory.usage_in_bytes"),
                format!("{d}/memory.stat"),
            );
            let files = [
                meminfo(8),
                ("proc/self/cgroup", format!("9:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n")),
                (limit_at.as_str(), format!("{limit}\n")),
                (usage_at.as_str(), format!("{GIB}\n")),
                (stat_at.as_str(), "inactive_file 7\ntotal_inactive_file 0\n".into()),
            ];
            let s = system(&files);
            available(s.path())
        };
        assert_eq!(of(3 * GIB, "/"), Some(2 * GIB));
        // In a container, with a path visible only on the host.
        assert_eq!(of(3 * GIB, "/docker/0123"), Some(2 * GIB));
        assert_eq!(of(9_223_372_036_854_771_712, "/"), Some(8 * GIB));
        // Usage above the limit leaves 0 and does not underflow.
        assert_eq!(of(GIB / 2, "/"), Some(0));
    }

    #[test]
    fn a_limit_on_the_address_space_counts() {
        let limits = |soft: &str| {
            let s = system(&[
                meminfo(8),
                ("proc/self/status", format!("VmSize: {} kB\nRssAnon: 2048 kB\n", 1 << 20)),
                (
                    "proc/self/limits",
                    format!(
                        "Limit  Soft Limit  Hard Limit  Units\nMax address space  {soft}  unlimited  bytes\n"
                    ),
                ),
            ]);
            (available(s.path()), own(s.path()))
        };
        assert_eq!(limits("unlimited"), (Some(8 * GIB), Some(2 << 20)));
        assert_eq!(limits(&(3 * GIB).to_string()).0, Some(2 * GIB));
    }
}
