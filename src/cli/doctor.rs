//! `ft doctor`: hardware, libraries and limits of this machine, and the use of them by ft.

use super::console::print_wrapped;
use super::version;
use candle_core::Device;
use ft_base::memory::available_bytes;
use ft_base::store::{cache_folder, folder_bytes, free_bytes, human_bytes};
use ft_hub::Settings;
use ft_kernels::cuda;
use std::path::{Path, PathBuf};

/// Prints the report.
///
/// # Errors
/// stdout fails.
pub fn run() -> ft_base::Result<()> {
    let mut report = Report::default();
    report.line("ft", &version::long().replace('\n', "; "));
    machine(&mut report);
    let device = devices(&mut report);
    ranks(&mut report);
    caches(&mut report);
    report.section("ft would use");
    report.line("run.device", &format!("auto: {device}"));
    report.line("threads", &format!("{} (RAYON_NUM_THREADS changes it)", rayon::current_num_threads()));
    print_wrapped(&report.0)
}

/// Lines of a name and a text.
#[derive(Default)]
struct Report(String);

impl Report {
    fn section(&mut self, title: &str) {
        self.0 += &format!("\n{title}\n");
    }

    /// A line; further lines of the text are indented.
    fn line(&mut self, name: &str, text: &str) {
        let mut lines = text.lines();
        self.0 += &format!("  {name:<14}{}\n", lines.next().unwrap_or_default());
        for more in lines {
            self.0 += &format!("  {:<14}{}\n", "", more.trim_start());
        }
    }
}

fn machine(report: &mut Report) {
    report.section("machine");
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
    let cpu = model.map_or(std::env::consts::ARCH, |(_, name)| name.trim());
    report.line("processor", &format!("{cpu}, {cores} threads for this process"));
    report.line("instructions", &instructions());
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), human_bytes);
    report.line("memory", &format!("{} free for this process", size(available_bytes())));
    report.line("disk", &format!("{} free in this folder", size(free_bytes(Path::new(".")))));
}

/// Vector instructions of the processor with code in ft's kernels.
fn instructions() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let known = [
            ("avx2", std::is_x86_feature_detected!("avx2")),
            ("fma", std::is_x86_feature_detected!("fma")),
            ("f16c", std::is_x86_feature_detected!("f16c")),
            ("avx512f", std::is_x86_feature_detected!("avx512f")),
            ("avx512bf16", std::is_x86_feature_detected!("avx512bf16")),
        ];
        let of = |on: bool| {
            known.iter().filter(|(_, has)| *has == on).map(|(n, _)| *n).collect::<Vec<_>>().join(", ")
        };
        match of(false).as_str() {
            "" => of(true),
            lacking => format!("{}; not {lacking}", of(true)),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::env::consts::ARCH.into()
}

/// CUDA devices; what `run.device = "auto"` takes.
fn devices(report: &mut Report) -> String {
    report.section("CUDA");
    let count = cuda::count();
    let mut first = None;
    for i in 0..count {
        match cuda::open(i) {
            Ok(device) => {
                let free = cuda::cuda_memory();
                let memory =
                    free.map(|(free, all)| format!("{} of {} free", human_bytes(free), human_bytes(all)));
                report.line(&format!("cuda:{i}"), &memory.unwrap_or_else(|| "memory unknown".into()));
                first = first.or(Some(device));
            }
            Err(why) => report.line(&format!("cuda:{i}"), &why),
        }
    }
    if count == 0 {
        match cuda::open(0) {
            Ok(_) => report.line("devices", "none"),
            Err(why) => report.line("devices", &format!("none: {why}")),
        }
    }
    if cfg!(feature = "cuda") {
        let nccl = cuda::nccl_is_here()
            .map_or_else(|why| format!("none, needed for several cards: {why}"), |()| "found".into());
        report.line("NCCL", &nccl);
    }
    match first {
        Some(Device::Cuda(_)) => "cuda".into(),
        _ => "cpu".into(),
    }
}

/// MPI and launchers.
fn ranks(report: &mut Report) {
    report.section("several processes");
    let mpi = match cfg!(feature = "mpi") {
        true => "in this build",
        false => "not in this build: cargo build --release --features mpi",
    };
    report.line("MPI", mpi);
    let paths: Vec<PathBuf> =
        std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect()).unwrap_or_default();
    for program in ["mpirun", "srun", "torchrun"] {
        let found = paths.iter().map(|p| p.join(program)).find(|p| p.is_file());
        report.line(program, &found.map_or_else(|| "not on the path".into(), |p| p.display().to_string()));
    }
}

/// Folders of kept files with their sizes.
fn caches(report: &mut Report) {
    report.section("kept files");
    let settings = Settings::from_env();
    let show = |dir: &Path| match folder_bytes(dir) {
        None => format!("{} (not there yet)", dir.display()),
        Some(bytes) => format!("{} in {}", human_bytes(bytes), dir.display()),
    };
    report.line("hub", &show(&settings.cache));
    match cache_folder() {
        Some(dir) => report.line("tokens", &show(&dir)),
        None => report.line("tokens", "nowhere: neither FT_CACHE nor HOME is set"),
    }
    let offline = if settings.offline { "; HF_HUB_OFFLINE is set: nothing is downloaded" } else { "" };
    report.line("models", &format!("4-bit copies are where model.cache says{offline}"));
}
