//! Compares compiler statistics of the CUDA kernels with two tables, on the supported GPU architectures:
//! tests/cuda/kernels.txt with registers and resident blocks per SM, tests/cuda/loops.txt with the instructions of
//! each loop on tensor cores and its bound. Register spills and local-memory arrays (beyond [`SPILLS`]) and tensor-core
//! instructions under a predicate fail immediately.
//!
//! ```text
//! cargo test --release --lib -- --ignored as_compiled            with .ci/cuda-toolchain
//! FT_TABLES=write cargo test --release --lib -- --ignored as_compiled      writes the tables
//! ```
//!
//! As in build.rs: first PTX for 8.0, then machine code from the PTX, by the assembler `FT_PTXAS` if it is set.

mod loops;

use super::isa;
use crate::{attention, factors, grouped};
use loops::Loop;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// GPU architectures: compute capability, warps per SM, blocks per SM, shared memory per SM in KiB.
const CARDS: [(u32, usize, usize, usize); 4] =
    [(80, 64, 32, 164), (86, 48, 16, 100), (89, 48, 24, 100), (90, 64, 32, 228)];
/// Later architectures with machine code in the binary (build.rs), without a table.
const LATER: [u32; 3] = [100, 103, 120];
/// Kernels that spill registers on 12.0, by the beginning of their names, and the most bytes of local memory that a
/// thread of theirs takes, stores or loads. All others take none on any architecture.
const SPILLS: [(&str, usize); 4] =
    [("delta_rule_states_f32", 80), ("norm_forward_bf16", 12), ("norm_forward_f16", 12), ("rows_", 8)];
/// Shared memory reserved by the driver per block.
const RESERVED: usize = 1024;

/// Resource usage of a kernel, from ptxas.
#[derive(Clone, Copy, Debug, Default)]
struct Kernel {
    threads: usize,
    /// Static shared memory.
    shared: usize,
    registers: [usize; CARDS.len()],
    loops: [Option<Loop>; CARDS.len()],
}

impl Kernel {
    /// Resident blocks per SM.
    fn blocks(&self, card: usize, dynamic: usize) -> usize {
        let (_, warps, blocks, shared) = CARDS[card];
        let own = self.threads / 32;
        // registers are allocated per warp in units of 256, in four partitions of 16,384
        let of_registers = 16_384 / (self.registers[card] * 32).next_multiple_of(256) * 4 / own;
        let of_shared = (shared << 10) / (self.shared + dynamic + RESERVED);
        (warps / own).min(blocks).min(of_registers).min(of_shared)
    }
}

fn run(c: &mut Command) -> String {
    let out = c.output().unwrap_or_else(|e| panic!("{c:?}: {e}"));
    assert!(out.status.success(), "{c:?}\n{}", String::from_utf8_lossy(&out.stderr));
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

fn tool(name: &str) -> Command {
    let beside = std::env::var_os("CUDA_HOME").map(|h| PathBuf::from(h).join("bin").join(name));
    Command::new(beside.filter(|p| p.exists()).unwrap_or_else(|| name.into()))
}

fn assembler() -> Command {
    std::env::var_os("FT_PTXAS").map_or_else(|| tool("ptxas"), Command::new)
}

/// All sources in a folder, recursively.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("a file").path();
        match path.is_dir() {
            true => found.extend(sources(&path)),
            false if path.extension().is_some_and(|e| e == "cu") => found.push(path),
            false => (),
        }
    }
    found.sort();
    found
}

/// The number before a word in a line of ptxas output.
fn before(line: &str, word: &str) -> usize {
    let head = line.split(word).next().filter(|_| line.contains(word)).unwrap_or_default();
    head.split_whitespace().last().and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Assembles a source for an architecture. Returns registers and static shared memory of each kernel.
///
/// # Panics
/// A kernel takes more local memory, for spilled registers or an array, than [`SPILLS`] has.
fn assembled(ptx: &Path, architecture: u32, cubin: &Path) -> Vec<(String, usize, usize)> {
    let mut ptxas = assembler();
    ptxas.args(["-v", "-O3", &format!("-arch=sm_{architecture}"), "-o"]).arg(cubin).arg(ptx);
    let (mut name, mut out) = ("", Vec::new());
    let text = run(&mut ptxas);
    for line in text.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            name = rest.split('\'').next().unwrap_or_default();
        } else if line.contains("bytes stack frame") {
            let lost =
                ["stack frame", "spill stores", "spill loads"].map(|w| before(line, &format!(" bytes {w}")));
            let known = SPILLS.iter().find(|(kernel, _)| architecture == 120 && name.starts_with(kernel));
            let most = known.map_or(0, |(_, bytes)| *bytes);
            assert!(lost.iter().all(|bytes| *bytes <= most), "{name} on {architecture}: {line}");
        } else if line.contains("Used ") && line.contains(" registers") {
            out.push((name.to_string(), before(line, " registers"), before(line, " bytes smem")));
        }
    }
    out
}

/// The tables of kernels and of loops.
fn tables() -> [String; 2] {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("crates/ft-kernels/src");
    let of_source = |source: &PathBuf| {
        let dir = tempfile::tempdir().expect("a folder");
        let ptx = dir.path().join("kernels.ptx");
        let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
        let mut nvcc = tool("nvcc");
        nvcc.args(["-ptx", "-O3", "-std=c++17", "-arch=compute_80", "-I"]).arg(&root);
        run(nvcc.arg("-o").arg(&ptx).arg(source));
        let text = isa::lowered(&std::fs::read_to_string(&ptx).expect("PTX"));
        std::fs::write(&ptx, &text).expect("PTX");
        let cubin = dir.path().join("out.cubin");
        LATER.iter().for_each(|later| drop(assembled(&ptx, *later, &cubin)));
        for (i, (card, ..)) in CARDS.iter().enumerate() {
            for (name, registers, shared) in assembled(&ptx, *card, &cubin) {
                let k = kernels.entry(name).or_default();
                (k.registers[i], k.shared) = (registers, shared);
            }
            for (name, hot) in loops::of(&cubin) {
                let lost = (hot.predicated, hot.lost);
                assert!(
                    lost.0 == 0,
                    "{name} on {card}: {} tensor-core instructions under a predicate",
                    lost.0
                );
                kernels.entry(name).or_default().loops[i] = Some(hot);
            }
        }
        for entry in text.split(".entry ").skip(1) {
            let name = entry.split('(').next().unwrap_or_default();
            let bound = entry.split(".maxntid").nth(1).and_then(|b| b.split([',', '\n']).next());
            let threads = bound.and_then(|b| b.trim().parse().ok()).expect("launch bounds");
            kernels.get_mut(name).expect("a kernel that ptxas has seen").threads = threads;
        }
        kernels
    };
    let kernels: BTreeMap<_, _> =
        sources(&root).par_iter().with_max_len(1).flat_map_iter(of_source).collect();
    let mut out = String::from(
        "# kernel, threads of a block, its shared memory in bytes; registers/blocks of a multiprocessor on 8.0, 8.6, \
         8.9, 9.0\n\
         # (nvcc of CUDA 13.0, ptxas of 12.9; no kernel spills; written by crates/ft-kernels/src/cuda/\
         compiled_tests)\n",
    );
    let mut hot = String::from(
        "# kernel; of its loop on tensor cores, on 8.0, 8.6, 8.9, 9.0: instructions/HMMA/LDSM:cycles of a warp at the \
         bound\n\
         # (nvcc of CUDA 13.0, ptxas of 12.9; no HMMA under a predicate; written by crates/ft-kernels/src/cuda/\
         compiled_tests)\n",
    );
    for (name, k) in kernels {
        if k.loops.iter().any(Option::is_some) {
            let words = k.loops.iter().enumerate().map(|(card, l)| l.map_or("-".into(), |l| l.words(card)));
            writeln!(hot, "{name} {}", words.collect::<Vec<_>>().join(" ")).expect("a string");
        }
        let dynamic = attention::shared_memory(&name)
            + grouped::shared_memory(&name)
            + factors::shared_memory(&name)
            + crate::delta::rule::shared_memory(&name);
        write!(out, "{name} {} {}", k.threads, k.shared + dynamic).expect("a string");
        for (card, (on, registers)) in CARDS.iter().zip(k.registers).enumerate() {
            let blocks = k.blocks(card, dynamic);
            // these are chosen where they fit
            assert!(blocks > 0 || name.contains("_kv_pair_"), "{name} does not fit {}", on.0);
            write!(out, " {registers}/{blocks}").expect("a string");
        }
        out.push('\n');
    }
    [out, hot]
}

/// Checks by Little's law whether 4-bit dequantization has enough bytes in flight to reach memory
/// bandwidth: for each GPU, bandwidth in GB/s per SM times a loaded latency of 800 ns. Reads of codes and
/// scales are a fifth of the traffic (0.53 of 2.53 bytes per value; stores do not stall). Each lane has
/// 16 bytes of codes in flight, and the table gives the resident blocks. Shuffles (one per value, 32 per
/// cycle) allow 18 TB/s on 132 SMs at 1.7 GHz, so they are no bottleneck.
#[test]
fn dequantization_has_enough_bytes_in_flight() {
    let cards =
        [("A100", 2039.0, 108.0), ("A6000", 768.0, 84.0), ("L40S", 864.0, 142.0), ("H200", 4800.0, 132.0)];
    let table = include_str!("../../../../../tests/cuda/kernels.txt");
    let mut kernels = 0;
    for line in table.lines().filter(|l| l.starts_with("dequantize_")) {
        let words: Vec<_> = line.split(' ').collect();
        if !words[0].ends_with("16") {
            continue;
        }
        kernels += 1;
        let threads: f64 = words[1].parse().expect("threads");
        for ((card, bandwidth, processors), of) in cards.iter().zip(&words[3..]) {
            let blocks: f64 = of.split('/').nth(1).and_then(|b| b.parse().ok()).expect("registers/blocks");
            let (have, want) = (blocks * threads * 16.0, bandwidth / processors * 800.0 * 0.53 / 2.53);
            assert!(have >= want, "{} on {card}: {have:.0} bytes in flight, {want:.0} are needed", words[0]);
        }
    }
    assert_eq!(kernels, 4, "of the table");
}

#[test]
#[ignore = "needs nvcc; .ci/run runs it"]
fn kernels_as_compiled_are_those_of_the_table() {
    let versions = [tool("nvcc"), assembler()].map(|mut c| run(c.arg("--version")));
    for (name, made) in ["kernels", "loops"].into_iter().zip(tables()) {
        let at =
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/cuda")).join(format!("{name}.txt"));
        if std::env::var_os("FT_TABLES").is_some_and(|v| v == "write") {
            std::fs::write(&at, &made).expect("the table");
        }
        let kept = std::fs::read_to_string(&at).unwrap_or_default();
        if versions.iter().zip(["13.0", "12.9"]).all(|(is, of)| is.contains(&format!("release {of}"))) {
            let differs: Vec<_> = made.lines().filter(|l| !kept.lines().any(|k| k == *l)).collect();
            assert!(
                made == kept,
                "tests/cuda/{name}.txt: FT_TABLES=write writes it again; new are\n{}",
                differs.join("\n")
            );
        }
    }
}

/// Instructions for each tensor-core instruction, at most, on every card; measured figures are in tests/cuda/loops.txt.
#[test]
fn hot_loops_stay_within_their_instruction_limits() {
    let limits = [
        ("attention_forward_bf16_128 ", 6.5),
        ("attention_forward_pair_bf16_128 ", 6.5),
        ("attention_backward_q_bf16_128 ", 5.5),
        ("attention_backward_q_pair_bf16_128 ", 5.5),
        ("attention_backward_kv_bf16_128 ", 5.5),
        ("attention_backward_kv_pair_bf16_128 ", 5.5),
        ("grouped_forward_bf16 ", 7.0),
        ("grouped_backward_bf16 ", 7.0),
        ("grouped_coded_forward_bf16 ", 10.0),
        ("grouped_coded_backward_bf16 ", 10.0),
        ("grouped_gradient_bf16 ", 7.0),
        ("factors_16_bf16 ", 7.5),
    ];
    let table = include_str!("../../../../../tests/cuda/loops.txt");
    for (kernel, most) in limits {
        let line = table.lines().find_map(|l| l.strip_prefix(kernel)).expect("a line of the table");
        for card in line.split(' ') {
            let mut numbers = card.split(['/', ':']).map(|n| n.parse::<f64>().unwrap_or(0.0));
            let (all, tensor) = (numbers.next().unwrap_or(0.0), numbers.next().unwrap_or(0.0));
            assert!(
                tensor > 0.0 && all / tensor <= most,
                "{kernel}{card}: {:.2}, at most {most}",
                all / tensor
            );
        }
    }
}
