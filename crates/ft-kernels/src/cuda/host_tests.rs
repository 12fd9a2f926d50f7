//! Runs the CUDA sources on the host: compiled as plain C++ with `tests/cuda/host.h` in place of the CUDA
//! headers, and executed by `tests/cuda/host.cpp`, which documents the checks.
//!
//! ```text
//! cargo test --release --lib -- --ignored on_the_host
//! ```
//!
//! Each source has a test program in `tests/cuda`, discovered automatically. In addition, Rust tests
//! launch kernels through [`Served`] and compare them with the CPU implementation.
//!
//! Requires a C++17 compiler (`CXX`, or `c++`) with sanitizers, on x86-64. Not covered: performance, and
//! kernels rejected by a real driver or memory model.

use crate::{Real, Tensor};
use candle_core::{DType, Device, Result, Shape};
use rayon::prelude::*;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Instrumentation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watched {
    /// AddressSanitizer and UndefinedBehaviorSanitizer: bounds, alignment, arithmetic.
    Bounds,
    /// Callbacks on every load and store: races, uninitialized memory, sectors, bank conflicts.
    Accesses,
}

/// Compiles programs into a temporary folder, removed on drop.
pub struct Compiler {
    dir: tempfile::TempDir,
    root: PathBuf,
    host: Arc<tempfile::TempDir>,
}

fn command() -> Command {
    let mut c = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()));
    c.args(["-std=c++17", "-g1", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi", "-ffp-contract=off"]);
    c
}

/// Programs that run longer than the optimizer takes with AddressSanitizer, and the kernels of Rust tests.
const OPTIMIZED: [&str; 4] = ["attention.cpp", "attention_plain.cpp", "grouped.cpp", "serve.cpp"];

fn run(mut c: Command) {
    let done = c.output();
    let done = done.unwrap_or_else(|e| panic!("{c:?}: {e}"));
    assert!(done.status.success(), "{c:?}\n{}", String::from_utf8_lossy(&done.stderr));
}

/// A folder with tests/cuda/host.cpp compiled, the same one while it is in use: nothing changes that file.
fn host() -> Arc<tempfile::TempDir> {
    static COMPILED: Mutex<Weak<tempfile::TempDir>> = Mutex::new(Weak::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(dir) = compiled.upgrade() {
        return dir;
    }
    let dir = Arc::new(tempfile::tempdir().expect("a folder"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/cuda/host.cpp");
    let mut c = command();
    c.args(["-O2", "-c", source, "-o"]).arg(dir.path().join("host.o"));
    run(c);
    *compiled = Arc::downgrade(&dir);
    dir
}

impl Compiler {
    /// For the sources of this repository.
    pub fn of_repository() -> Self {
        Self::of(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")))
    }

    /// For the sources in `root`.
    fn of(root: &Path) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        Self { dir, root: root.to_path_buf(), host: host() }
    }

    /// Compiles tests/cuda/`program`.
    pub fn compile<S: AsRef<OsStr>>(&self, program: &str, watched: Watched, more: &[S]) -> PathBuf {
        let out = self.dir.path().join(format!("{program}.{watched:?}"));
        let object = out.with_extension("o");
        let sanitizer: &[&str] = match watched {
            Watched::Bounds => &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
            Watched::Accesses => &["-fsanitize=thread", "-fno-threadsafe-statics"],
        };
        let mut c = command();
        let optimized = watched == Watched::Accesses || OPTIMIZED.contains(&program);
        c.args([if optimized { "-O1" } else { "-O0" }, "-I"])
            .arg(self.root.join("tests/cuda"))
            .args(sanitizer)
            .args(more);
        c.arg("-c").arg(self.root.join("tests/cuda").join(program)).arg("-o").arg(&object);
        run(c);
        let mut link = command();
        // don't link the ThreadSanitizer runtime: host.cpp implements the callbacks
        link.args(if watched == Watched::Bounds { sanitizer } else { &[] });
        link.arg(&object).arg(self.host.path().join("host.o")).arg("-o").arg(&out);
        run(link);
        out
    }
}

/// A kernel argument.
pub enum Argument<'a> {
    /// An input buffer, and the offset in bytes from an aligned address.
    In(&'a [u8], usize),
    /// An output buffer of the given size in bytes.
    Out(usize),
    /// A scalar, as raw bytes.
    Value(Vec<u8>),
    /// A null pointer.
    Null,
}

impl From<u32> for Argument<'_> {
    fn from(n: u32) -> Self {
        Argument::Value(n.to_le_bytes().to_vec())
    }
}

impl From<u64> for Argument<'_> {
    fn from(n: u64) -> Self {
        Argument::Value(n.to_le_bytes().to_vec())
    }
}

impl From<f32> for Argument<'_> {
    fn from(x: f32) -> Self {
        Argument::Value(x.to_le_bytes().to_vec())
    }
}

/// Raw bytes of a tensor's values.
pub fn bytes(t: &Tensor) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    crate::bytes::put(&t.contiguous()?, 0..t.elem_count(), &mut out)?;
    Ok(out)
}

/// Inverse of [`bytes`].
pub fn tensor(bytes: &[u8], shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Real::from_raw_buffer(bytes, dtype, shape.into().dims(), &Device::Cpu).map(Tensor::Real)
}

/// The kernels of one source, ready to launch.
pub struct Served {
    child: Child,
    // removed on drop
    _compiler: Compiler,
}

impl Served {
    /// Compiles a source, given as a path in the repository.
    pub fn new(source: &str, watched: Watched) -> Self {
        let compiler = Compiler::of_repository();
        let source = compiler.root.join(source);
        let program = compiler.compile("serve.cpp", watched, &["-include".as_ref(), source.as_os_str()]);
        let child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Self { child: child.expect("the program that was compiled"), _compiler: compiler }
    }

    /// Launches a kernel with `grid` blocks (threads per block are fixed by the kernel) and `shared`
    /// bytes of dynamic shared memory. Returns the concatenated outputs.
    pub fn launch(
        &mut self,
        kernel: &str,
        grid: [usize; 3],
        shared: usize,
        arguments: &[Argument<'_>],
    ) -> Vec<u8> {
        let mut line = format!("{kernel} {} {} {} {shared}", grid[0], grid[1], grid[2]);
        let (mut sent, mut answer) = (Vec::new(), 0);
        for a in arguments {
            line += &match a {
                Argument::In(b, skew) => format!(" in:{}:{skew}", b.len()),
                Argument::Out(n) => format!(" out:{n}:0"),
                Argument::Value(b) => format!(" value:{}", b.len()),
                Argument::Null => " null".into(),
            };
            match a {
                Argument::In(b, _) => sent.extend_from_slice(b),
                Argument::Value(b) => sent.extend_from_slice(b),
                Argument::Out(_) | Argument::Null => (),
            }
            answer += if let Argument::Out(n) = a { *n } else { 0 };
        }
        let input = self.child.stdin.as_mut().expect("a pipe");
        input.write_all((line + "\n").as_bytes()).expect("the program takes its job");
        input.write_all(&sent).expect("the program takes its job");
        input.flush().expect("sent");
        let mut out = vec![0; answer];
        self.child.stdout.as_mut().expect("a pipe").read_exact(&mut out).expect("the program's answer");
        out
    }

    /// Waits for the program to exit; leaks are reported at exit.
    pub fn finish(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("the program's end").success());
    }
}

fn nightly() -> bool {
    std::env::var("FT_TIER").is_ok_and(|tier| tier == "nightly")
}

/// The test programs in tests/cuda, except helpers and faults.cpp. measured.cpp counts accesses of kernels that other
/// programs check: at a push it is compiled for that alone.
fn programs(watched: Watched) -> Vec<String> {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/cuda");
    let names = std::fs::read_dir(dir).expect("tests/cuda").map(|e| e.expect("a file").file_name());
    let mut names: Vec<String> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    names.retain(|n| n.ends_with(".cpp") && !["host.cpp", "serve.cpp", "faults.cpp"].contains(&n.as_str()));
    names.retain(|n| n != "measured.cpp" || watched == Watched::Accesses || nightly());
    names.sort();
    names
}

fn words(o: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr))
}

/// Kernel statistics printed by the programs: `kernel NAME SECTORS PASSES`.
fn each_program(watched: Watched) -> Vec<String> {
    let compiler = Compiler::of_repository();
    let of_program = |name: &String| -> Vec<String> {
        let done = Command::new(compiler.compile::<&str>(name, watched, &[])).output().expect("a program");
        let out = words(&done);
        assert!(
            done.status.success() && out.contains("ok: "),
            "{name}, {watched:?}, {}:\n{out}",
            done.status
        );
        out.lines().filter_map(|l| l.strip_prefix("kernel ")).map(String::from).collect()
    };
    // one at a time: programs differ much in time
    let mut kernels: Vec<String> =
        programs(watched).par_iter().with_max_len(1).flat_map_iter(of_program).collect();
    kernels.sort();
    kernels
}

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn kernels_stay_within_bounds_on_the_host() {
    each_program(Watched::Bounds);
}

/// Checks for races, and compares memory access costs with the table tests/cuda/accesses.txt
/// (`FT_TABLES=write` writes it).
#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn kernels_have_no_races_on_the_host() {
    let kernels = each_program(Watched::Accesses);
    for k in &kernels {
        let numbers: Vec<f64> = k.split_whitespace().skip(1).map(|n| n.parse().expect("a number")).collect();
        let [sectors, passes] = numbers[..] else { panic!("{k}") };
        assert!(sectors >= 90.0, "{k}: less than 90% of the sectors that it touches was asked for");
        assert!(passes <= 1.05, "{k}: bank conflicts");
    }
    let made = "# kernel, bytes asked for in % of the 32-byte sectors touched, passes of shared memory in relation to its width\n\
                # (of sizes without tails; written by crates/ft-kernels/src/cuda/host_tests.rs)\n"
        .to_string()
        + &kernels.join("\n")
        + "\n";
    let at = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/cuda/accesses.txt");
    if std::env::var_os("FT_TABLES").is_some_and(|v| v == "write") {
        std::fs::write(&at, &made).expect("the table");
    }
    let kept = std::fs::read_to_string(&at).unwrap_or_default();
    let differs: Vec<_> = made.lines().filter(|l| !kept.lines().any(|k| k == *l)).collect();
    assert!(
        made == kept,
        "tests/cuda/accesses.txt: FT_TABLES=write writes it again; new are\n{}",
        differs.join("\n")
    );
}

/// Each fault in tests/cuda/faults.cpp, the instrumentation able to detect it, and the expected message.
const FAULTS: &[(&str, Watched, &str)] = &[
    ("barrier_left_out", Watched::Accesses, "no barrier between"),
    ("barrier_in_a_branch", Watched::Bounds, "lanes of a warp wait for different things"),
    ("warp_leaves_before_a_barrier", Watched::Accesses, "warps are done while others wait at a barrier"),
    ("shuffle_in_a_branch", Watched::Accesses, "lanes of a warp wait for different things"),
    ("lanes_exchange_without_syncwarp", Watched::Accesses, "no barrier between"),
    ("copy_is_not_waited_for", Watched::Accesses, "cp.async has not delivered"),
    ("copy_is_read_by_others_without_a_barrier", Watched::Accesses, "no barrier between"),
    ("shared_memory_is_too_small", Watched::Accesses, "beyond shared memory"),
    ("shared_array_is_too_small", Watched::Accesses, "beyond shared memory"),
    ("shared_memory_is_not_written", Watched::Accesses, "nothing has written"),
    ("two_blocks_write_one_value", Watched::Accesses, "has written in this launch"),
    ("tail_is_stored", Watched::Bounds, "heap-buffer-overflow"),
    ("vector_is_misaligned", Watched::Bounds, "misaligned"),
    ("index_overflows", Watched::Bounds, "overflow"),
    ("value_is_wrong", Watched::Bounds, "y: 4.20e-01"),
];

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn planted_faults_are_found_on_the_host() {
    let compiler = Compiler::of_repository();
    for watched in [Watched::Bounds, Watched::Accesses] {
        let program = compiler.compile::<&str>("faults.cpp", watched, &[]);
        for (name, _, message) in FAULTS.iter().filter(|f| f.1 == watched) {
            let done = Command::new(&program).arg(name).output().expect("a program");
            let out = words(&done);
            assert!(
                !done.status.success() && out.contains(message),
                "{name}, {watched:?}: {}\n{out}",
                done.status
            );
        }
        let done = Command::new(&program).arg("nothing_is_wrong").output().expect("a program");
        assert!(done.status.success(), "{}", words(&done));
    }
}

/// Mutations of the attention sources: file, original and replacement, then the channels of a head, the test and
/// instrumentation able to detect it, and the expected message. Each push takes one of each instrumentation.
const CHANGES: &[(&str, &str, &str, u32, &str, Watched, &str)] = &[
    (
        "attention_forward.cu",
        "    __syncthreads();\n    if (j + KEYS < end) copy_rows",
        "    if (j + KEYS < end) copy_rows",
        64,
        "bf16_of_64_channels",
        Watched::Accesses,
        "shared byte",
    ),
    (
        "attention_forward.cu",
        "    cp_async_wait<1>();\n    __syncthreads();\n    if (works) add_product",
        "    cp_async_wait<2>();\n    __syncthreads();\n    if (works) add_product",
        64,
        "bf16_of_64_channels",
        Watched::Accesses,
        "cp.async has not delivered",
    ),
    (
        "attention_backward_kv.cuh",
        "    part_barrier<THREADS, PARTS>(part);\n    if constexpr (STAGES > 1) copy(next",
        "    if constexpr (STAGES > 1) copy(next",
        64,
        "bf16_of_64_channels",
        Watched::Accesses,
        "no barrier between",
    ),
    (
        "attention_backward_kv.cuh",
        "    part_barrier<THREADS, PARTS>(part);\n    if (owns) {\n      add_exchanged",
        "    if (owns) {\n      add_exchanged",
        64,
        "bf16_of_64_channels",
        Watched::Accesses,
        "no barrier between",
    ),
    (
        "attention_backward.cu",
        "      cp_async_wait<0>();\n    } else {",
        "    } else {",
        64,
        "bf16_of_64_channels",
        Watched::Accesses,
        "cp.async has not delivered",
    ),
    (
        "attention.cuh",
        "  __syncwarp();\n#pragma unroll\n  for (int i = lane",
        "#pragma unroll\n  for (int i = lane",
        64,
        "bf16_of_64_channels",
        Watched::Accesses,
        "no barrier between",
    ),
    (
        "../cuda/matrix.cuh",
        "(piece ^ (PIECES % 8 == 0 ? row & 7 : row >> 1 & 3))",
        "piece",
        128,
        "measured_128",
        Watched::Accesses,
        "kernel attention_backward_kv_bf16_128 99.9 6.",
    ),
    (
        "attention.cuh",
        "    if (row < static_cast<int>(rows) && piece * 8 < static_cast<int>(columns))\n      store_16",
        "    if (piece * 8 < static_cast<int>(columns))\n      store_16",
        64,
        "bf16_of_64_channels",
        Watched::Bounds,
        "heap-buffer-overflow",
    ),
    (
        "attention.cuh",
        "return query - key < window;",
        "return query - key <= window;",
        64,
        "bf16_of_64_channels",
        Watched::Bounds,
        "bar",
    ),
];

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let path = entry.expect("a file").path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
}

/// Leaves the kernels for heads of one size in a source.
fn keep_channels(source: &Path, channels: u32) {
    let text = std::fs::read_to_string(source).expect("a source");
    let of = |line: &str| {
        let (kernels, sizes) = line.split_once('(')?;
        ["FORWARDS", "PAIRS", "BACKWARDS", "PAIRS_Q", "PAIRS_KV"].contains(&kernels).then_some(())?;
        sizes.split([',', ')']).next()?.parse::<u32>().ok()
    };
    let kept: Vec<_> = text.lines().filter(|line| of(line).is_none_or(|n| n == channels)).collect();
    assert!(kept.len() < text.lines().count(), "{}: no list of sizes", source.display());
    std::fs::write(source, kept.join("\n") + "\n").expect("a source");
}

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn changes_of_attention_are_found_on_the_host() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let chosen = if nightly() { CHANGES } else { &CHANGES[CHANGES.len() - 3..CHANGES.len() - 1] };
    for (file, from, to, channels, test, watched, message) in chosen {
        let dir = tempfile::tempdir().expect("a folder");
        for folder in ["tests/cuda", "crates/ft-kernels/src/attention", "crates/ft-kernels/src/cuda"] {
            copy_folder(&root.join(folder), &dir.path().join(folder));
        }
        let at = dir.path().join("crates/ft-kernels/src/attention").join(file);
        let text = std::fs::read_to_string(&at).expect("a source");
        assert_eq!(text.matches(from).count(), 1, "{file} has no {from:?} any more");
        std::fs::write(&at, text.replace(from, to)).expect("a source");
        for source in ["attention_forward.cu", "attention_backward.cu"] {
            keep_channels(&dir.path().join("crates/ft-kernels/src/attention").join(source), *channels);
        }
        let compiler = Compiler::of(dir.path());
        let program = compiler.compile::<&str>("attention.cpp", *watched, &[]);
        let done = Command::new(program).arg(test).output().expect("a program");
        assert!(words(&done).contains(message), "{file} with {to:?}: {}\n{}", done.status, words(&done));
    }
}
