//! The commit of the sources, for `ft --version`: from git, or from the file that `cargo package` writes; else unknown.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=FT_COMMIT");
    let given = std::env::var("FT_COMMIT").ok().filter(|c| !c.is_empty());
    let commit = given.or_else(git).or_else(packaged).unwrap_or_else(|| "unknown commit".into());
    println!("cargo:rustc-env=FT_BUILT_FROM={commit}");
}

/// First digits and date of the commit of this repository.
fn git() -> Option<String> {
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8(out.stdout).ok()?.trim().to_string()).filter(|s| !s.is_empty())
    };
    // the sources may lie inside another repository
    let root = git(&["rev-parse", "--show-toplevel"])?;
    let here = std::env::var("CARGO_MANIFEST_DIR").ok()?;
    if Path::new(&root).canonicalize().ok()? != Path::new(&here).canonicalize().ok()? {
        return None;
    }
    let branch = git(&["symbolic-ref", "-q", "HEAD"]).unwrap_or_default();
    for name in ["HEAD", "packed-refs", branch.as_str()].into_iter().filter(|n| !n.is_empty()) {
        if let Some(path) = git(&["rev-parse", "--git-path", name]).filter(|p| Path::new(p).exists()) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    git(&["show", "-s", "--format=%h of %cs"])
}

/// The commit in an archive of `cargo package`.
fn packaged() -> Option<String> {
    let text = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let hash = text.split("\"sha1\": \"").nth(1)?.split('"').next()?;
    hash.get(..9).map(String::from)
}
