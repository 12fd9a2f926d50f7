//! The CUDA sources on the host: compiled as plain C++ by `tests/cuda/host.cpp`, launched as on a GPU, held to the
//! CPU version.
//!
//! ```text
//! cargo test --release --lib -- --ignored on_the_host
//! ```
//!
//! Needs a C++17 compiler (`CXX`, or `c++`) with its sanitizers. What this cannot find is what only a GPU does: its
//! speed, and a kernel that its driver or its memory rules refuse.

use super::tests::{Made, bits, made};
use super::tiles::{FEW, ROWS, ROWS_THREADS, THREADS, Tile, name};
use super::*;
use crate::kernel::check::{distance, randn, values};
use crate::kernel::gemm;
use half::{bf16, f16};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

/// The running program, fed with jobs.
struct Host {
    child: Child,
    // removed when this is dropped
    _dir: tempfile::TempDir,
}

/// A launch, but for the matrix.
struct Launch<'a> {
    kernel: &'a str,
    blocks: usize,
    threads: u32,
    x: &'a [u8],
    out: usize,
    /// Bytes from an aligned address to the first code.
    skew: usize,
    numbers: &'a [usize],
}

impl Host {
    fn compile() -> Self {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let dir = tempfile::tempdir().expect("a folder");
        let program = dir.path().join("host");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let done = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-g", "-Wno-unknown-pragmas", "-ffp-contract=off"])
            .args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I"])
            .args([root.join("tests/cuda"), root.join("tests/cuda/host.cpp"), "-o".into(), program.clone()])
            .status();
        assert!(done.is_ok_and(|s| s.success()), "{compiler} could not compile tests/cuda/host.cpp");
        let child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Self { child: child.expect("the program that was compiled"), _dir: dir }
    }

    /// What a kernel writes.
    fn run(&mut self, m: &Made, launch: &Launch<'_>) -> Vec<u8> {
        let floats = |t: &Tensor| -> Vec<u8> {
            let v: Vec<f32> = t.flatten_all().and_then(|t| t.to_vec1()).expect("floats");
            v.iter().flat_map(|x| x.to_le_bytes()).collect()
        };
        let (scales, codes, map, group, offset) = match &m.w.scales {
            Scales::Plain(s) => (floats(s), vec![], vec![], 1, 0f32),
            Scales::Nested { codes, map, absmax, group, offset } => {
                (floats(absmax), codes.to_vec1::<u8>().expect("bytes"), floats(map), *group, *offset)
            }
        };
        let pairs = floats(&m.w.book.pairs);
        let l = launch;
        let mut line = format!("{} {} {}", l.kernel, l.blocks, l.threads);
        let sizes = [m.packed.len(), scales.len(), codes.len(), map.len(), l.x.len(), l.out, l.skew, group];
        let matrix = [offset.to_bits() as usize, m.w.block.trailing_zeros() as usize, m.w.rows * m.w.cols];
        for n in sizes.iter().chain(&matrix).chain(l.numbers) {
            line += &format!(" {n}");
        }
        let input = self.child.stdin.as_mut().expect("a pipe");
        let mut send = |bytes: &[u8]| input.write_all(bytes).expect("the program takes its job");
        send((line + "\n").as_bytes());
        for part in [&m.packed, &pairs, &scales, &codes, &map, l.x] {
            send(part);
        }
        input.flush().expect("sent");
        let mut out = vec![0; l.out];
        self.child.stdout.as_mut().expect("a pipe").read_exact(&mut out).expect("the program's answer");
        out
    }

    fn dequantize(&mut self, m: &Made, tile: Tile, skew: usize) -> Vec<u8> {
        self.run(
            m,
            &Launch {
                kernel: &name("dequantize", m.w.source, m.w.compute),
                blocks: tile.blocks(),
                threads: THREADS,
                x: &[],
                out: tile.len() * m.w.compute.size_in_bytes(),
                skew,
                numbers: &[tile.first, tile.stride, tile.width, tile.runs, tile.chunks()],
            },
        )
    }

    fn finish(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("the program's end").success());
    }
}

/// A tensor's values as they lie in memory.
fn bytes(t: &Tensor) -> Result<Vec<u8>> {
    let t = t.flatten_all()?;
    Ok(match t.dtype() {
        DType::F32 => t.to_vec1::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::BF16 => t.to_vec1::<bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => t.to_vec1::<f16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
    })
}

fn tensor(bytes: &[u8], shape: (usize, usize), dtype: DType) -> Result<Tensor> {
    crate::kernel::Real::from_raw_buffer(bytes, dtype, &[shape.0, shape.1], &Device::Cpu).map(Tensor::Real)
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn dequantize_cu_on_the_host_gives_the_same_bits() -> Result<()> {
    let mut host = Host::compile();
    // whole chunks, short ones, blocks across rows, odd numbers of values and of columns, a single value
    let shapes = [
        ((8, 1024), 64, Some(256)),
        ((9, 48), 64, Some(3)),
        ((7, 50), 32, Some(4)),
        ((5, 13), 32, None),
        ((33, 129), 128, None),
        ((3, 700), 256, Some(256)),
        ((3, 1100), 512, None),
        ((2, 2100), 1024, Some(2)),
        ((2, 2500), 2048, None),
        ((3, 4096), 4096, Some(1)),
        ((1, 1), 64, Some(256)),
    ];
    let mut checked = 0;
    for (dims, block, group) in shapes {
        for source in FLOATS {
            for compute in FLOATS {
                let m = made(dims, block, group, source, compute)?;
                let ((rows, cols), whole) = (dims, m.w.dequantize()?);
                let mut tiles = vec![
                    (Tile::rows(dims, 0..rows), whole.clone()),
                    (Tile::rows(dims, rows / 2..rows), whole.narrow(0, rows / 2, rows - rows / 2)?),
                    (Tile::columns(dims, 0..cols), whole.clone()),
                ];
                for columns in [0..64, 64..128, cols / 3..cols, 3..cols] {
                    if columns.start < columns.end && columns.end <= cols {
                        let want = whole.narrow(1, columns.start, columns.len())?;
                        tiles.push((Tile::columns(dims, columns), want));
                    }
                }
                for (i, (tile, want)) in tiles.into_iter().enumerate() {
                    // the last one from an odd address
                    let skew = if i == 3 { 1 } else { 0 };
                    let got = tensor(&host.dequantize(&m, tile, skew), want.dims2()?, compute)?;
                    let what = format!("{dims:?} block {block} {source:?} {compute:?} {tile:?}");
                    assert!(bits(&got)? == bits(&want)?, "{what}");
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 300, "{checked}");
    host.finish();
    Ok(())
}

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn rows_cu_on_the_host_multiplies_from_codes() -> Result<()> {
    let mut host = Host::compile();
    let shapes = [
        ((3, 32), 32, None),
        ((5, 1024), 64, Some(256)),
        ((4, 1056), 64, Some(4)),
        ((2, 5120), 128, None),
        ((7, 96), 4096, Some(256)),
    ];
    for (dims, block, group) in shapes {
        for source in FLOATS {
            for (compute, bar) in [(DType::F32, 1e-6), (DType::BF16, 4e-3), (DType::F16, 5e-4)] {
                let m = made(dims, block, group, source, compute)?;
                for tokens in [1, 2, FEW] {
                    let x = randn(tokens as u64, (tokens, dims.1), compute)?;
                    let (upto, rows) = ROWS.into_iter().find(|(upto, _)| tokens <= *upto).expect("a kernel");
                    let out = host.run(
                        &m,
                        &Launch {
                            kernel: &format!("{}_{upto}", name("rows", source, compute)),
                            blocks: dims.0.div_ceil(rows),
                            threads: ROWS_THREADS,
                            x: &bytes(&x)?,
                            out: tokens * dims.0 * compute.size_in_bytes(),
                            skew: 0,
                            numbers: &[tokens, dims.0, dims.1],
                        },
                    );
                    let got = tensor(&out, (tokens, dims.0), compute)?;
                    let upcast = |t: &Tensor| t.to_dtype(DType::F64);
                    let want = gemm::matmul(&upcast(&x)?, false, &upcast(&m.w.dequantize()?)?, true)?;
                    let apart = distance(&values(&got), &values(&want));
                    let what = format!("{dims:?} block {block} {source:?} {compute:?}, {tokens} tokens");
                    assert!(apart <= bar, "{what}: {apart:.2e}, bar {bar:.0e}");
                }
            }
        }
    }
    host.finish();
    Ok(())
}
