//! A CUDA build without NVIDIA's libraries: the CPU works, and the rest names the missing library.

use super::world::{LORA, World};
use std::path::PathBuf;

/// Runs with `path` as the only library folder besides the system folders. Returns exit code and messages.
fn with(w: &World, path: &str, args: &[&str]) -> (Option<i32>, String) {
    let out = w.command(args).env("LD_LIBRARY_PATH", path).output().expect("started");
    (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
#[cfg(target_os = "linux")]
fn the_program_starts_without_them() {
    let w = World::tiny(LORA);
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
    let w = World::tiny(LORA);
    let run = ["run", "r.toml", "run.device=cuda", "run.steps=1", "--overwrite"];
    // Libraries may be installed in a system folder.
    let (code, err) = with(&w, "", &run);
    if code != Some(0) {
        assert_eq!(code, Some(2), "{err}");
        let driver = err.contains("libcuda.so.1") && err.contains("NVIDIA's driver");
        assert!(driver || err.contains("nvidia-cublas"), "{err}");
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
            for part in ["libcublas.so.", "pip install ", "nvidia-cublas", "LD_LIBRARY_PATH"] {
                assert!(err.contains(part), "{device}: no {part}: {err}");
            }
        }
    }
    let (code, err) = with(&w, &only, &["run", "r.toml", "run.device=cpu", "run.steps=1", "--overwrite"]);
    assert_eq!(code, Some(0), "{err}");
}

/// Libraries of Python wheels are found in the active environment, in the folders of each version of CUDA.
#[test]
#[cfg(target_os = "linux")]
fn wheels_of_the_active_environment_are_found() {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let folder = path.split(':').map(PathBuf::from).find(|d| {
        ["libcuda.so.1", "libcublas.so.12", "libcublas.so.13"].iter().all(|name| d.join(name).exists())
    });
    let Some(folder) = folder else {
        eprintln!("not run: no driver with libraries of both versions of CUDA in LD_LIBRARY_PATH");
        return;
    };
    let w = World::tiny(LORA);
    let link = |from: &str, to: String| {
        std::fs::create_dir_all(w.path(&to)).expect("a folder");
        std::os::unix::fs::symlink(folder.join(from), w.path(&to).join(from)).expect("a link");
    };
    link("libcuda.so.1", "driver".into());
    let run = |driver: &str, environment: &str| {
        let mut command = w.command(&["run", "r.toml", "run.device=cuda", "run.steps=1", "--overwrite"]);
        command.env("LD_LIBRARY_PATH", w.path("driver")).env("EMU_DRIVER", driver).env_remove("CONDA_PREFIX");
        let out = command.env("VIRTUAL_ENV", w.path(environment)).output().expect("started");
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    for (driver, wheel) in [("12040", "nvidia-cublas-cu12"), ("13000", "'nvidia-cublas==13.*'")] {
        let (code, err) = run(driver, "none");
        assert!(code == Some(2) && err.contains(&format!("hint: pip install {wheel}")), "{driver}: {err}");
    }
    // A newer driver takes the older library too.
    for (inside, version, drivers) in
        [("cublas/lib", 12, &["12040", "13000"][..]), ("cu13/lib", 13, &["13000"])]
    {
        let environment = format!("of{version}");
        for name in ["cublas", "cublasLt"] {
            let to = format!("{environment}/lib/python3.12/site-packages/nvidia/{inside}");
            link(&format!("lib{name}.so.{version}"), to);
        }
        for driver in drivers {
            let (code, err) = run(driver, &environment);
            assert_eq!(code, Some(0), "{inside} with a driver of {driver}: {err}");
        }
    }
}

/// Several devices need NCCL. If it is missing, the error comes before anything is read.
#[test]
#[cfg(target_os = "linux")]
fn nccl_is_named_with_what_installs_it() {
    if ft::kernel::cuda::count() < 2 {
        eprintln!("not run: two CUDA devices are needed");
        return;
    }
    let w = World::tiny(LORA);
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
