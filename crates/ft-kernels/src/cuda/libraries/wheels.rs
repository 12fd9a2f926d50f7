//! Folders of NVIDIA's Python wheels.

use std::path::PathBuf;

/// Existing folders `nvidia/INSIDE` of the Python environments that are active (`VIRTUAL_ENV`, `CONDA_PREFIX`), and of
/// the environment in which this program is installed.
pub fn folders(inside: &str) -> Vec<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let own = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.to_path_buf()));
    let environments = [named("VIRTUAL_ENV"), named("CONDA_PREFIX"), own].into_iter().flatten();
    let pythons = environments.filter_map(|e| std::fs::read_dir(e.join("lib")).ok()).flatten().flatten();
    let folders = pythons
        .filter(|p| p.file_name().to_string_lossy().starts_with("python3"))
        .map(|p| p.path().join("site-packages/nvidia").join(inside));
    folders.filter(|f| f.is_dir()).collect()
}
