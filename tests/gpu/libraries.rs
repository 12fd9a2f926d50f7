//! A CUDA build without NVIDIA's libraries: the CPU works, and the rest names the missing library.

use super::world::{LORA, World, recipe};
use std::path::PathBuf;

fn world() -> World {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", recipe(LORA));
    w
}

/// Runs with `path` as the only library folder besides the system folders. Returns exit code and messages.
fn with(w: &World, path: &str, args: &[&str]) -> (Option<i32>, String) {
    let out = w.command(args).env("LD_LIBRARY_PATH", path).output().expect("started");
    (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
#[cfg(target_os = "linux")]
fn the_program_starts_without_them() {
    let w = world();
    // The dynamic loader lists the required libraries without running the program.
    let listed = w.command(&[]).env("LD_TRACE_LOADED_OBJECTS", "1").output().expect("started");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("libc.so") && !listed.contains("libcu") && !listed.contains("libnv"), "{listed}");
    for verb in ["check", "plan", "data"] {
        let (code, err) = with(&w, "", &[verb, "r.toml"]);
        assert_eq!(code, Some(0), "{verb}: {err}");
    }
    let (code, err) = with(&w, "", &["run", "r.toml", "run.device=cpu", "run.steps=1"]);
    assert_eq!(code, Some(0), "{err}");
}

#[test]
#[cfg(target_os = "linux")]
fn what_is_missing_is_named_with_what_installs_it() {
    let w = world();
    let run = ["run", "r.toml", "run.device=cuda", "run.steps=1", "--overwrite"];
    // Libraries may be installed in a system folder.
    let (code, err) = with(&w, "", &run);
    if code != Some(0) {
        assert_eq!(code, Some(2), "{err}");
        let driver = err.contains("libcuda.so.1") && err.contains("NVIDIA's driver");
        assert!(driver || err.contains("pip install 'nvidia-cublas=="), "{err}");
        assert!(!err.contains("panicked"), "{err}");
    }
    // The driver alone.
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let driver = path.split(':').map(|d| PathBuf::from(d).join("libcuda.so.1")).find(|p| p.exists());
    let Some(driver) = driver else {
        eprintln!("not run: no driver in LD_LIBRARY_PATH");
        return;
    };
    std::fs::create_dir(w.path("driver")).expect("a folder");
    std::os::unix::fs::symlink(driver, w.path("driver/libcuda.so.1")).expect("a link");
    let only = w.path("driver").display().to_string();
    for device in ["run.device=cuda", "run.device=auto"] {
        let (code, err) = with(&w, &only, &["run", "r.toml", device, "run.steps=1", "--overwrite"]);
        if code != Some(0) {
            assert_eq!(code, Some(2), "{device}: {err}");
            for part in ["libcublas.so.", "pip install 'nvidia-cublas==", "LD_LIBRARY_PATH"] {
                assert!(err.contains(part), "{device}: no {part}: {err}");
            }
        }
    }
    let (code, err) = with(&w, &only, &["run", "r.toml", "run.device=cpu", "run.steps=1", "--overwrite"]);
    assert_eq!(code, Some(0), "{err}");
}

/// Several devices need NCCL. If it is missing, the error comes before anything is read.
#[test]
#[cfg(target_os = "linux")]
fn nccl_is_named_with_what_installs_it() {
    if ft::kernel::cuda::count() < 2 {
        eprintln!("not run: two CUDA devices are needed");
        return;
    }
    let w = world();
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    std::fs::create_dir(w.path("others")).expect("a folder");
    for file in path.split(':').filter_map(|d| std::fs::read_dir(d).ok()).flatten().flatten() {
        let name = file.file_name();
        // The loader uses the first match.
        if !name.to_string_lossy().starts_with("libnccl") {
            let _ = std::os::unix::fs::symlink(file.path(), w.path("others").join(name));
        }
    }
    let others = w.path("others").display().to_string();
    let (code, err) = with(&w, &others, &["run", "r.toml", "run.device=cuda", "parallel.data=2"]);
    // The library may be installed in a system folder.
    if code != Some(0) {
        assert_eq!(code, Some(2), "{err}");
        for part in ["libnccl.so.2", "pip install nvidia-nccl-cu", "LD_LIBRARY_PATH"] {
            assert!(err.contains(part), "no {part}: {err}");
        }
    }
    let (code, err) = with(&w, &others, &["run", "r.toml", "run.device=cuda", "run.steps=1", "--overwrite"]);
    assert_eq!(code, Some(0), "{err}");
}
