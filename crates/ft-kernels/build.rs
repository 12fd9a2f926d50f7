//! Compiles every CUDA source of this crate, with the `cuda` feature.
//!
//! Each source is compiled to PTX for the compute capability `CUDA_COMPUTE_CAP` (default 80; runs on all
//! later devices), of a version that drivers of CUDA 12.4 compile. The PTX is then assembled to machine code for the
//! compute capabilities in `FT_CUDA_CODE` (default `80,86,89,90,100,103,120`; any unknown to ptxas are dropped; empty
//! for none and a faster build). CI runs the PTX on an emulated device, so the tests cover the input of the machine
//! code.
//!
//! `FT_PTXAS` is the assembler (default: the one beside nvcc). Drivers of CUDA 12 load machine code of any ptxas of
//! CUDA 12, and those of CUDA 13 load it too; they refuse that of CUDA 13 and compile the PTX instead.

#![allow(clippy::disallowed_methods, reason = "a build script writes to OUT_DIR")]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    if let Err(why) = cuda::compile() {
        eprintln!(
            "the `cuda` feature compiles crates/ft-kernels/src/**/*.cu with nvcc: {why}\n\
             hint: eval \"$(.ci/cuda-toolchain)\" installs a compiler and sets CUDA_COMPUTE_CAP; without the \
             feature none is needed"
        );
        std::process::exit(1);
    }
}

#[cfg(feature = "cuda")]
#[path = "src/cuda/libraries/isa.rs"]
mod isa;

#[cfg(feature = "cuda")]
mod cuda {
    use super::isa;
    use std::error::Error;
    use std::fmt::Write;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::time::SystemTime;

    type Result<T> = std::result::Result<T, Box<dyn Error>>;

    const SOURCES: &str = "src";
    /// Compute capability of the PTX: the first with bf16, and the oldest supported GPU (as in cuda/device.rs).
    const OLDEST: u32 = 80;
    const CODE: &str = "80,86,89,90,100,103,120";

    /// Writes `OUT_DIR/NAME.ptx` and `OUT_DIR/NAME.CAPABILITY.cubin` for each source `NAME.cu`, and
    /// `OUT_DIR/modules.rs` with one constant per source.
    pub fn compile() -> Result<()> {
        let out = PathBuf::from(std::env::var("OUT_DIR")?);
        for name in ["CUDA_COMPUTE_CAP", "FT_CUDA_CODE", "FT_PTXAS", "NVCC", "CUDA_HOME"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let (mut sources, mut newest) = (Vec::new(), modified(Path::new("build.rs"))?);
        for path in files(Path::new(SOURCES))? {
            match path.extension().and_then(|e| e.to_str()) {
                Some("cu") => sources.push(path),
                Some("cuh") => newest = newest.max(modified(&path)?),
                _ => {}
            }
        }
        sources.sort();
        let nvcc = Compiler::find()?;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len());
        let work = || -> std::result::Result<(), String> {
            loop {
                let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some(source) = sources.get(i) else { return Ok(()) };
                nvcc.compile(source, &out, newest).map_err(|e| format!("{}: {e}", source.display()))?;
            }
        };
        std::thread::scope(|s| {
            let all: Vec<_> = (0..threads).map(|_| s.spawn(work)).collect();
            all.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err("a thread failed".into())))
        })?;
        let mut text = String::new();
        for source in &sources {
            let name = stem(source)?;
            let file = |end: &str| format!("(concat!(env!(\"OUT_DIR\"), \"/{name}.{end}\"))");
            let code =
                nvcc.code.iter().map(|n| format!("({n}, include_bytes!{})", file(&format!("{n}.cubin"))));
            writeln!(
                text,
                "/// `{}`.\npub const {}: Module = Module {{ name: {name:?}, ptx: include_str!{}, code: &[{}] }};",
                source.display(),
                name.to_uppercase(),
                file("ptx"),
                code.collect::<Vec<_>>().join(", "),
            )?;
        }
        let names = sources.iter().map(|s| stem(s).map(str::to_uppercase)).collect::<Result<Vec<_>>>()?;
        writeln!(text, "/// All of them.\npub const ALL: &[Module] = &[{}];", names.join(", "))?;
        std::fs::write(out.join("modules.rs"), text)?;
        Ok(())
    }

    fn stem(source: &Path) -> Result<&str> {
        source.file_stem().and_then(|s| s.to_str()).ok_or_else(|| "a source without a name".into())
    }

    fn modified(path: &Path) -> Result<SystemTime> {
        Ok(std::fs::metadata(path)?.modified()?)
    }

    struct Compiler {
        nvcc: PathBuf,
        ptxas: PathBuf,
        ptx: u32,
        code: Vec<u32>,
    }

    impl Compiler {
        fn find() -> Result<Self> {
            let home = ["CUDA_HOME", "CUDA_PATH"].iter().find_map(std::env::var_os);
            let beside = home.map(|h| PathBuf::from(h).join("bin/nvcc")).filter(|p| p.exists());
            let named = |variable| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
            let nvcc = named("NVCC").or(beside).unwrap_or_else(|| "nvcc".into());
            let ptxas = named("FT_PTXAS").unwrap_or_else(|| nvcc.with_file_name("ptxas"));
            let ptx = match std::env::var("CUDA_COMPUTE_CAP") {
                Ok(cap) => cap.replace('.', "").parse().map_err(|_| format!("CUDA_COMPUTE_CAP = {cap:?}"))?,
                Err(_) => OLDEST,
            };
            let wanted = std::env::var("FT_CUDA_CODE").unwrap_or_else(|_| CODE.into());
            let number = |n: &str| n.trim().parse::<u32>().map_err(|_| format!("FT_CUDA_CODE = {wanted:?}"));
            let code: Vec<u32> = wanted
                .split(',')
                .filter(|n| !n.trim().is_empty())
                .map(number)
                .collect::<std::result::Result<_, _>>()?;
            let help = if code.is_empty() { String::new() } else { run(Command::new(&ptxas).arg("--help"))? };
            let has = |n: &u32| help.contains(&format!("'sm_{n}'"));
            Ok(Self { code: code.into_iter().filter(|n| *n >= ptx && has(n)).collect(), nvcc, ptxas, ptx })
        }

        /// Compiles a source unless the outputs are newer than sources and headers and were built with
        /// the same settings.
        fn compile(&self, source: &Path, out: &Path, headers: SystemTime) -> Result<()> {
            let name = stem(source)?;
            let at = |end: &str| out.join(format!("{name}.{end}"));
            let (nvcc, ptxas) = (self.nvcc.display(), self.ptxas.display());
            let settings = format!("{} {:?} {nvcc} {ptxas}", self.ptx, self.code);
            let same = std::fs::read_to_string(at("made")).is_ok_and(|s| s == settings);
            let made = modified(&at("made"));
            if same && made.is_ok_and(|t| t > headers && modified(source).is_ok_and(|s| t > s)) {
                return Ok(());
            }
            let _ = std::fs::remove_file(at("made"));
            let mut nvcc = Command::new(&self.nvcc);
            nvcc.args(["-ptx", "-O3", "-std=c++17"]).arg(format!("-arch=compute_{}", self.ptx));
            run(nvcc.arg("-I").arg(SOURCES).arg("-o").arg(at("ptx")).arg(source))?;
            std::fs::write(at("ptx"), isa::lowered(&std::fs::read_to_string(at("ptx"))?))?;
            for n in &self.code {
                let mut ptxas = Command::new(&self.ptxas);
                ptxas.arg("-O3").arg(format!("-arch=sm_{n}"));
                run(ptxas.arg("-o").arg(at(&format!("{n}.cubin"))).arg(at("ptx")))?;
            }
            Ok(std::fs::write(at("made"), settings)?)
        }
    }

    /// Runs a command and returns stdout. A failure carries the command line and stderr.
    fn run(command: &mut Command) -> Result<String> {
        let out = command.output().map_err(|e| format!("{:?}: {e}", command.get_program()))?;
        if !out.status.success() {
            return Err(format!("{command:?}\n{}", String::from_utf8_lossy(&out.stderr)).into());
        }
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// All files below a folder, told to cargo together with the folders.
    fn files(dir: &Path) -> Result<Vec<PathBuf>> {
        println!("cargo:rerun-if-changed={}", dir.display());
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() {
                found.extend(files(&path)?);
            } else {
                found.push(path);
            }
        }
        Ok(found)
    }
}
