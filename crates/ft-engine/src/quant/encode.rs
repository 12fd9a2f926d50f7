//! Quantization to NF4, bit-exact with bitsandbytes' CPU implementation.

use super::codebook::{CodeTables, Type};
use super::error::Error;
use super::lazy::{LazyMatrix, LazyScales, LazyVector, ReadRange};
use candle_core::{DType, Device, Result};
use ft_kernels::cpu;
use ft_kernels::quantized::{QuantizedMatrix, Scales, dynamic_map};
use ft_kernels::{Real, Tensor};
use std::ops::Range;

/// Values per quantization block.
pub const BLOCK: usize = 64;
/// Scales per group of double quantization.
pub const GROUP: usize = 256;

/// Midpoints between neighboring codes.
fn bounds() -> [f32; 15] {
    let code = Type::Nf4.table();
    std::array::from_fn(|i| (code[i] + code[i + 1]) / 2.0)
}

/// Quantizes values starting at a block boundary: codes, two per byte, into `packed` and one scale per
/// block into `scales`. With `codes` false, only the scales. Returns whether all values are finite.
pub(super) fn encode(values: &[f32], packed: &mut [u8], scales: &mut [f32], codes: bool) -> bool {
    let bounds = bounds();
    let code = |x: f32| bounds.iter().map(|b| u8::from(x > *b)).sum::<u8>();
    let mut finite = true;
    for ((block, packed), scale) in values.chunks(BLOCK).zip(packed.chunks_mut(BLOCK / 2)).zip(scales) {
        finite &= block.iter().all(|x| x.is_finite());
        let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
        let floor = largest.max(1e-38);
        // bitsandbytes multiplies full blocks by the inverse but divides a last short block.
        let short = block.len() < BLOCK;
        let inverse = 1.0 / floor;
        *scale = if short { floor } else { largest };
        if !codes {
            continue;
        }
        let unit = |x: f32| (if short { x / floor } else { x * inverse }).clamp(-1.0, 1.0);
        for (pair, byte) in block.chunks(2).zip(packed) {
            let second = pair.get(1).map_or(0.0, |x| unit(*x));
            *byte = (code(unit(pair[0])) << 4) | code(second);
        }
    }
    finite
}

/// A matrix in NF4, on the host.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// Rows and columns.
    pub dims: (usize, usize),
    /// Packed codes, two per byte.
    pub packed: Vec<u8>,
    /// Scale of every block.
    pub scales: Vec<f32>,
    /// Dtype before quantization; dequantized values are rounded to it.
    pub source: DType,
}

impl Encoded {
    /// Quantizes a matrix. `source` is the original dtype of the values.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with `name`.
    pub fn new(
        name: &str,
        values: &[f32],
        dims: (usize, usize),
        source: DType,
    ) -> std::result::Result<Self, Error> {
        let mut e = Self::empty(dims, source);
        let piece = 256 * BLOCK;
        let blocks = e.packed.chunks_mut(piece / 2).zip(e.scales.chunks_mut(piece / BLOCK));
        let finite = cpu::map(blocks.zip(values.chunks(piece)), |((p, s), v)| encode(v, p, s, true));
        if finite.into_iter().all(|finite| finite) {
            Ok(e)
        } else {
            Err(Error::NotFinite { name: name.into() })
        }
    }

    pub(super) fn empty(dims: (usize, usize), source: DType) -> Self {
        let n = dims.0 * dims.1;
        // bitsandbytes supports these dtypes; f64 values are narrowed to f32 before quantization.
        let source = if source == DType::F64 { DType::F32 } else { source };
        Self { dims, packed: vec![0; n.div_ceil(2)], scales: vec![0.0; n.div_ceil(BLOCK)], source }
    }

    /// Copies the matrix to the device of `books` for products in `compute`; `double` quantizes the scales
    /// to 8 bits.
    pub fn into_matrix(
        self,
        double: bool,
        compute: DType,
        books: &mut CodeTables,
    ) -> Result<QuantizedMatrix> {
        let device = books.device().clone();
        let scales = if double {
            let n = Nested::new(&self.scales);
            Scales::Nested {
                map: books.map(&dynamic_map(true))?,
                codes: Tensor::new(n.codes, &device)?,
                absmax: Tensor::new(n.absmax, &device)?,
                group: GROUP,
                offset: n.offset,
            }
        } else {
            Scales::Plain(Tensor::new(self.scales, &device)?)
        };
        let packed = Tensor::new(self.packed, &device)?;
        QuantizedMatrix::new(self.dims, BLOCK, packed, scales, books.book(Type::Nf4), self.source, compute)
    }
}

/// Block scales of values starting at a block boundary.
///
/// # Errors
/// [`Error::NotFinite`] with `name`.
pub fn scales_of(name: &str, values: &[f32]) -> std::result::Result<Vec<f32>, Error> {
    let mut scales = vec![0.0; values.len().div_ceil(BLOCK)];
    let mut none: Vec<u8> = vec![0; values.len().div_ceil(2)];
    let finite = encode(values, &mut none, &mut scales, false);
    if finite { Ok(scales) } else { Err(Error::NotFinite { name: name.into() }) }
}

/// A matrix quantized lazily by ranges, from `values` of dtype `source` and precomputed `scales`; double
/// quantization is applied. `values` reads a range of the flattened matrix.
pub fn lazy_nf4<'a>(
    name: &str,
    dims: (usize, usize),
    source: DType,
    scales: &[f32],
    values: impl Fn(Range<usize>) -> ft_base::Result<Vec<f32>> + 'a,
) -> LazyMatrix<'a> {
    let (n, name) = (dims.0 * dims.1, name.to_string());
    let read: ReadRange<'a> = Box::new(move |bytes| {
        // Widened to whole blocks.
        let first = bytes.start * 2 / BLOCK * BLOCK;
        let end = (bytes.end * 2).next_multiple_of(BLOCK).min(n);
        let e = Encoded::new(&name, &values(first..end.max(first))?, (1, end.saturating_sub(first)), source)?;
        let at = bytes.start - first / 2;
        Ok(Real::new(&e.packed[at..at + bytes.len()], &Device::Cpu)?)
    });
    let nested = Nested::new(scales);
    LazyMatrix {
        dims,
        block: BLOCK,
        kind: Type::Nf4,
        source: if source == DType::F64 { DType::F32 } else { source },
        packed: LazyVector { dtype: DType::U8, len: n.div_ceil(2), read },
        scales: LazyScales::Nested {
            codes: LazyVector::of(nested.codes),
            factors: LazyVector::of(nested.absmax),
            map: dynamic_map(true).to_vec(),
            group: GROUP,
            offset: nested.offset,
        },
    }
}

/// Double quantization: scales in 8 bits, as offsets from their mean, in groups with a common factor.
#[derive(Clone, Debug)]
pub struct Nested {
    /// One code per scale.
    pub codes: Vec<u8>,
    /// One factor per group.
    pub absmax: Vec<f32>,
    /// Mean of the scales.
    pub offset: f32,
}

impl Nested {
    /// Quantizes scales.
    pub fn new(scales: &[f32]) -> Self {
        let map = dynamic_map(true);
        let sum: f64 = scales.iter().map(|s| f64::from(*s)).sum();
        let offset = (sum / scales.len().max(1) as f64) as f32;
        let mut absmax = Vec::with_capacity(scales.len().div_ceil(GROUP));
        let mut codes = Vec::with_capacity(scales.len());
        for group in scales.chunks(GROUP) {
            let largest = group.iter().fold(0f32, |m, s| m.max((s - offset).abs()));
            absmax.push(largest);
            codes.extend(group.iter().map(|s| {
                let unit = if largest > 0.0 { ((s - offset) / largest).clamp(-1.0, 1.0) } else { 0.0 };
                nearest(&map, unit)
            }));
        }
        Self { codes, absmax, offset }
    }
}

/// Index of the entry of a sorted map nearest to `x`; the lower one on ties.
fn nearest(map: &[f32; 256], x: f32) -> u8 {
    let above = map.partition_point(|m| *m <= x);
    let left = above.saturating_sub(1);
    let right = above.min(255);
    (if (map[right] - x).abs() < (x - map[left]).abs() { right } else { left }) as u8
}
