//! dequantize.cu and rows.cu compiled for the host, compared with the CPU implementation; see
//! `kernel::cuda::host_tests`.

use super::tests::{Made, bits, made};
use super::tiles::{FEW, ROWS, Tile, name};
use super::*;
use crate::check::{distance, randn, values};
use crate::cuda::host_tests::{Argument, Served, Watched, bytes, tensor};
use crate::{Tensor, gemm, padded};
use candle_core::{DType, Result};

/// The two kinds of checks on memory accesses.
const HOW: [Watched; 2] = [Watched::Bounds, Watched::Accesses];

/// Launches a kernel with the matrix's arguments, then `rest`.
fn launch(
    to: &mut Served,
    m: &Made,
    kernel: &str,
    blocks: usize,
    skew: usize,
    rest: Vec<Argument<'_>>,
) -> Vec<u8> {
    let bytes = |t: &Tensor| bytes(t).expect("values");
    let (scales, nested, group, offset) = match &m.w.scales {
        Scales::Plain(s) => (bytes(s), None, 1, 0f32),
        Scales::Nested { codes, map, absmax, group, offset } => {
            (bytes(absmax), Some((bytes(codes), bytes(map))), *group, *offset)
        }
    };
    let pairs = bytes(&m.w.book.pairs);
    let mut all = vec![Argument::In(&m.packed, skew), Argument::In(&pairs, 0), Argument::In(&scales, 0)];
    match &nested {
        Some((codes, map)) => all.extend([Argument::In(codes, 0), Argument::In(map, 0)]),
        None => all.extend([Argument::Null, Argument::Null]),
    }
    all.extend([(group as u32).into(), offset.into(), m.w.block.trailing_zeros().into()]);
    all.push(((m.w.rows * m.w.cols) as u64).into());
    all.extend(rest);
    to.launch(kernel, [blocks, 1, 1], 0, &all)
}

/// Adapter part to the right of a tile or below it: bytes and rank.
#[derive(Clone, Copy)]
enum Low<'a> {
    None,
    Beside(&'a [u8], usize),
    Below(&'a [u8], usize),
}

fn dequantize(
    to: &mut Served,
    m: &Made,
    tile: Tile,
    skew: usize,
    (apart, rows): (usize, usize),
    low: Low<'_>,
) -> Vec<u8> {
    let kernel = name("dequantize", m.w.source, m.w.compute);
    let mut rest: Vec<Argument<'_>> =
        [tile.first, tile.stride, tile.width].iter().map(|n| Argument::from(*n as u64)).collect();
    rest.extend([Argument::from(tile.runs as u32), Argument::from(tile.chunks() as u32)]);
    rest.push(Argument::from(apart as u64));
    // the adapter slice: source, rows, columns, stride, destination
    let size = m.w.compute.size_in_bytes();
    let (from, n, cols, stride, at) = match low {
        Low::None => (Argument::Null, 0, 0, 0, 0),
        Low::Beside(b, rank) => (Argument::In(b, 0), tile.runs, rank, rank, tile.width),
        Low::Below(a, rank) => {
            (Argument::In(&a[tile.first * size..], 0), rank, tile.width, tile.stride, tile.runs * apart)
        }
    };
    rest.extend([from, Argument::from(n as u32), Argument::from(cols as u32)]);
    rest.extend([Argument::from(stride as u64), Argument::from(at as u64)]);
    rest.push(Argument::Out(rows * apart * size));
    launch(to, m, &kernel, tile.blocks(n * cols), skew, rest)
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn dequantize_cu_on_the_host_gives_the_same_bits() -> Result<()> {
    let mut hosts = HOW.map(|w| Served::new("crates/ft-kernels/src/quantized/dequantize.cu", w));
    // whole chunks, short chunks, blocks across rows, odd numbers of values and columns, a single value
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
                    // the last shape starts at an odd address
                    let skew = if i == 3 { 1 } else { 0 };
                    // all with bounds checks, one in five also with access checks
                    for host in &mut hosts[..if checked % 5 == 0 { 2 } else { 1 }] {
                        let out = dequantize(host, &m, tile, skew, (tile.width, tile.runs), Low::None);
                        let got = tensor(&out, want.dims2()?, compute)?;
                        let what = format!("{dims:?} block {block} {source:?} {compute:?} {tile:?}");
                        assert!(bits(&got)? == bits(&want)?, "{what}");
                    }
                    checked += 1;
                }
                // with an adapter: to the right of whole rows, with an untouched gap, and below a range
                // of columns
                let rank = 3;
                let (b, a) = (randn(1, (rows, rank), compute)?, randn(2, (rank, cols), compute)?);
                let apart = padded::stride(cols, rank);
                for host in &mut hosts[..if checked % 5 == 0 { 2 } else { 1 }] {
                    let (tile, from) = (Tile::rows_apart(dims, rows / 2..rows), rows / 2);
                    let part = b.narrow(0, from, rows - from)?;
                    let (own, values) = (bytes(&part)?, whole.narrow(0, from, rows - from)?);
                    let out = dequantize(host, &m, tile, 0, (apart, tile.runs), Low::Beside(&own, rank));
                    let got = tensor(&out, (tile.runs, apart), compute)?.narrow(1, 0, cols + rank)?;
                    let what = format!("{dims:?} block {block} {source:?} {compute:?} with an adapter");
                    assert!(
                        bits(&got.contiguous()?)? == bits(&Tensor::cat(&[&values, &part], 1)?)?,
                        "{what}"
                    );
                    let columns = cols / 3..cols;
                    let tile = Tile::columns_apart(dims, columns.clone());
                    let low = bytes(&a)?;
                    let out =
                        dequantize(host, &m, tile, 0, (tile.width, rows + rank), Low::Below(&low, rank));
                    let got = tensor(&out, (rows + rank, tile.width), compute)?;
                    let want = Tensor::cat(&[&whole, &a], 0)?.narrow(1, columns.start, columns.len())?;
                    assert!(bits(&got)? == bits(&want.contiguous()?)?, "{what}");
                }
            }
        }
    }
    assert!(checked > 300, "{checked}");
    hosts.into_iter().for_each(Served::finish);
    Ok(())
}

#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn rows_cu_on_the_host_multiplies_from_codes() -> Result<()> {
    let mut hosts = HOW.map(|w| Served::new("crates/ft-kernels/src/quantized/rows.cu", w));
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
                    let kernel = format!("{}_{upto}", name("rows", source, compute));
                    let xs = bytes(&x)?;
                    for host in &mut hosts {
                        let rest = vec![
                            Argument::In(&xs, 0),
                            (tokens as u32).into(),
                            (dims.0 as u64).into(),
                            (dims.1 as u64).into(),
                            Argument::Out(tokens * dims.0 * compute.size_in_bytes()),
                        ];
                        let out = launch(host, &m, &kernel, dims.0.div_ceil(rows), 0, rest);
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
    }
    hosts.into_iter().for_each(Served::finish);
    Ok(())
}
