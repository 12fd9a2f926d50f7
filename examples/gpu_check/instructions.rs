//! Every inline asm instruction of the kernels on random fragments: the device against
//! the host twin used by the tests.
//!
//! `.ci/gpu bundle` compiles `tests/cuda/instructions.cu` for both: `instructions.fatbin`, and the program
//! `instructions_twin`, driven by the protocol in `tests/cuda/serve.cpp`.

use super::report::Report;
use anyhow::{Context, Result, ensure};
use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use ft::rng::{Purpose, Stream};
use half::{bf16, f16};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Fragments per instruction; one warp per block processes one fragment.
const BLOCKS: usize = 64;
const LANES: usize = 32;

/// Content of the input words of a lane.
#[derive(Clone, Copy)]
enum Words {
    Bits,
    F32,
    /// Floats with difficult rounding: ties, tiny, huge, infinite.
    Hard,
    /// Six words with bf16 pairs, then four f32.
    Bf16,
    /// Six words with f16 pairs, then four f32.
    F16,
}

struct Instruction {
    kernel: &'static str,
    words: Words,
    /// Input and output words per lane.
    lane: (usize, usize),
    /// Tolerance (relative L2), 0 for equal bits. Tensor cores sum in an undocumented order; ex2 is
    /// approximate.
    bar: f64,
}

const fn of(kernel: &'static str, words: Words, lane: (usize, usize), bar: f64) -> Instruction {
    Instruction { kernel, words, lane, bar }
}

const ALL: [Instruction; 9] = [
    of("one_mma_bf16", Words::Bf16, (10, 4), 1e-6),
    of("one_mma_f16", Words::F16, (10, 4), 1e-6),
    of("one_ldmatrix", Words::Bits, (4, 4), 0.0),
    of("one_ldmatrix_trans", Words::Bits, (4, 4), 0.0),
    of("one_cp_async", Words::Bits, (4, 8), 0.0),
    of("one_exp2", Words::F32, (1, 1), 3e-7),
    of("one_pack_bf16", Words::Hard, (2, 1), 0.0),
    of("one_pack_f16", Words::Hard, (2, 1), 0.0),
    of("one_warp", Words::F32, (1, 2), 0.0),
];

fn hard(s: &Stream, i: u64) -> f32 {
    match s.word(i) % 8 {
        // ties in bf16 and in f16
        0 => f32::from_bits(s.normal(i).to_bits() & 0xffff_0000 | 0x8000),
        1 => f32::from_bits(s.normal(i).to_bits() & 0xffff_e000 | 0x1000),
        2 => s.normal(i) * 1e-6,
        3 => s.normal(i) * 7e4,
        4 => f32::INFINITY,
        _ => s.normal(i),
    }
}

fn input(instruction: &Instruction, seed: u64) -> Vec<u32> {
    let s = Stream::new(seed, Purpose::Test, 0, 0);
    let pair = |i: u64, bits: &dyn Fn(f32) -> u16| {
        u32::from(bits(s.normal(2 * i))) | u32::from(bits(s.normal(2 * i + 1))) << 16
    };
    let word = |i: u64| match instruction.words {
        Words::Bits => s.word(i),
        Words::F32 => s.normal(i).to_bits(),
        Words::Hard => hard(&s, i).to_bits(),
        Words::Bf16 | Words::F16 if i % 10 >= 6 => s.normal(2 * i).to_bits(),
        Words::Bf16 => pair(i, &|x| bf16::from_f32(x).to_bits()),
        Words::F16 => pair(i, &|x| f16::from_f32(x).to_bits()),
    };
    (0..(BLOCKS * LANES * instruction.lane.0) as u64).map(word).collect()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn twin(program: &Path, instruction: &Instruction, x: &[u32]) -> Result<Vec<u32>> {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut out = vec![0; 4 * BLOCKS * LANES * instruction.lane.1];
    {
        let mut job = child.stdin.take().context("a pipe")?;
        let (kernel, of, to) = (instruction.kernel, 4 * x.len(), out.len());
        job.write_all(format!("{kernel} {BLOCKS} 1 1 0 in:{of}:0 out:{to}:0\n").as_bytes())?;
        job.write_all(&bytes(x))?;
    }
    child.stdout.take().context("a pipe")?.read_exact(&mut out)?;
    ensure!(child.wait()?.success(), "{} failed", program.display());
    Ok(out.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// Relative L2 distance of f32 words; for a tolerance of 0, the share of words with different bits.
fn apart(instruction: &Instruction, a: &[u32], b: &[u32]) -> f64 {
    if instruction.bar == 0.0 {
        return a.iter().zip(b).filter(|(a, b)| a != b).count() as f64 / a.len() as f64;
    }
    let f = |w: &u32| f64::from(f32::from_bits(*w));
    let off: f64 = a.iter().zip(b).map(|(a, b)| (f(a) - f(b)).powi(2)).sum();
    (off / b.iter().map(|b| f(b).powi(2)).sum::<f64>()).sqrt()
}

/// Checks every instruction; `dir` holds both programs.
pub fn check(device: &Device, dir: &Path, report: &mut Report) -> Result<()> {
    let cuda = device.as_cuda_device().context("instructions are a CUDA device's")?;
    let image = std::fs::read(dir.join("instructions.fatbin"))?;
    let stream = cuda.cuda_stream();
    let module = stream.context().load_module(Ptx::from_binary(image))?;
    for (seed, instruction) in ALL.iter().enumerate() {
        let x = input(instruction, seed as u64);
        let function = module.load_function(instruction.kernel)?;
        let given = stream.clone_htod(&x)?;
        let mut made = stream.alloc_zeros::<u32>(BLOCKS * LANES * instruction.lane.1)?;
        let config = LaunchConfig {
            grid_dim: (BLOCKS as u32, 1, 1),
            block_dim: (LANES as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut launch = stream.launch_builder(&function);
        launch.arg(&given).arg(&mut made);
        // SAFETY: the kernel accesses `lane.0` input and `lane.1` output words per lane, and both buffers
        // cover every launched lane.
        unsafe { launch.launch(config) }?;
        let made = stream.clone_dtoh(&made)?;
        let expected = twin(&dir.join("instructions_twin"), instruction, &x)?;
        let name = instruction.kernel.trim_start_matches("one_");
        report.line(&format!("instruction {name}"), apart(instruction, &made, &expected), instruction.bar);
    }
    Ok(())
}
