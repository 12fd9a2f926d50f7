//! What the grouped products know of experts: one matrix of each, on the device.

use super::Gradient;
use crate::Tensor;
use crate::cuda::launch::address_of;
use crate::dropout;
use crate::ghost::Ghost;
use crate::quantized::{QuantizedMatrix, Scales};
use ft_base::rng::{Purpose, Stream};
use candle_core::{DType, Result};

/// 64-bit words of an expert, as `struct Expert` of grouped.cuh.
const WORDS: usize = 16;
/// Bytes that an expert takes on the device in the table of one of its matrices.
pub const BYTES: usize = 8 * WORDS;
/// In place of a gradient's place.
const NOWHERE: u64 = u64::MAX;
/// Rows of low rank begin at whole vectors.
const RANKS: usize = 8;

/// The matrix of an expert, [o, i].
#[derive(Clone, Copy, Debug)]
pub enum Side<'a> {
    /// Values.
    Values(&'a Tensor),
    /// Codes of 4 bits.
    Codes(&'a QuantizedMatrix),
}

/// The low-rank update of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Adapter<'a> {
    /// A [r, i].
    pub a: &'a Tensor,
    /// B [o, r].
    pub b: &'a Tensor,
    /// Factor on the update.
    pub scale: f64,
    /// Where the gradients of A and B begin in the buffer.
    pub gradients: Option<(usize, usize)>,
    /// Probability that an input is zeroed in training, and the number of its stream.
    pub dropout: (f64, u64),
}

/// What the table has of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// W.
    pub weight: Side<'a>,
    /// Where its gradient begins in the buffer.
    pub gradient: Option<usize>,
    /// Its adapter.
    pub adapter: Option<Adapter<'a>>,
    /// How many experts it stands for: one, but in a plan.
    pub alike: usize,
}

/// One matrix of each expert of a layer.
///
/// It has addresses, and it holds the tensors that are there: their memory is given back behind the table's.
#[derive(Clone, Debug)]
pub struct Table {
    /// [e, 16] i64.
    pub(super) experts_words: Tensor,
    /// What the addresses are of.
    _held: Vec<Tensor>,
    pub(super) experts: usize,
    /// o and i.
    pub(super) dims: (usize, usize),
    pub(super) dtype: DType,
    /// Values of a row of low rank; 0 without adapters.
    pub(super) ranks: usize,
    /// One more than the last value of a gradient.
    pub(super) ends: usize,
    /// Values that train, by [`Gradient`].
    trains: [usize; 3],
    /// Whether any expert has dropout.
    pub drops: bool,
    /// For plans: the mean of ranks, codes, bytes of values and codes.
    pub(super) mean_rank: f64,
    pub(super) coded: f64,
    pub(super) bytes: f64,
}

/// Whether the kernels take the codes of a matrix.
pub fn takes(w: &QuantizedMatrix) -> bool {
    w.block().is_power_of_two() && w.block() >= 32 && w.dims().0 * w.dims().1 < 1 << 37
}

impl Table {
    /// Of the experts in order, for products in `dtype`.
    ///
    /// # Errors
    /// Shapes or types that do not go together; a tensor of another device.
    pub fn new(entries: &[Entry<'_>], dtype: DType) -> Result<Self> {
        let Some(first) = entries.first() else { candle_core::bail!("a layer without experts") };
        let dims_of = |e: &Entry<'_>| match e.weight {
            Side::Values(w) => w.dims2(),
            Side::Codes(w) => Ok(w.dims()),
        };
        let dims = dims_of(first)?;
        let (mut ranks, mut ends, mut trains, mut experts) = (0, 0, [0; 3], 0);
        let (mut rank_sum, mut coded, mut bytes, mut drops) = (0, 0, 0, false);
        for e in entries {
            let fits = match e.weight {
                Side::Values(w) => w.dtype() == dtype && w.is_contiguous(),
                Side::Codes(w) => w.dtype() == dtype && takes(w) && e.gradient.is_none(),
            };
            if dims_of(e)? != dims || !fits {
                candle_core::bail!("experts of different shapes or types: {:?} and {dims:?}", dims_of(e)?);
            }
            experts += e.alike;
            let values = dims.0 * dims.1;
            match e.weight {
                Side::Values(_) => bytes += e.alike * values * dtype.size_in_bytes(),
                Side::Codes(w) => (coded, bytes) = (coded + e.alike * values, bytes + e.alike * w.bytes()),
            }
            if let Some(at) = e.gradient {
                (ends, trains[0]) = (ends.max(at + values), trains[0] + e.alike * values);
            }
            let Some(l) = &e.adapter else { continue };
            let r = l.a.dim(0)?;
            let fits =
                |t: &Tensor, dims: [usize; 2]| t.dims() == dims && t.dtype() == dtype && t.is_contiguous();
            if !fits(l.a, [r, dims.1]) || !fits(l.b, [dims.0, r]) {
                candle_core::bail!("an expert's adapter {:?}, {:?} of {dims:?}", l.a.shape(), l.b.shape());
            }
            ranks = ranks.max(r.next_multiple_of(RANKS));
            rank_sum += e.alike * r;
            drops |= l.dropout.0 > 0.0;
            if let Some((a, b)) = l.gradients {
                ends = ends.max(a + r * dims.1).max(b + r * dims.0);
                trains[1] += e.alike * r * dims.1;
                trains[2] += e.alike * r * dims.0;
            }
        }
        let on = match first.weight {
            Side::Values(w) => w,
            Side::Codes(w) => w.parts().0,
        };
        let mut held = Vec::new();
        let experts_words = match on.ghost() {
            Some(g) => Ghost::weight(g.ledger(), (experts, WORDS), DType::I64).into(),
            None => {
                let mut all = Vec::with_capacity(experts * WORDS);
                for e in entries {
                    all.extend(words(e, &mut held)?.map(u64::cast_signed));
                }
                Tensor::from_vec(all, (experts, WORDS), on.device())?
            }
        };
        let mean_rank = rank_sum as f64 / experts.max(1) as f64;
        let (coded, bytes) = (coded as f64, bytes as f64);
        let _held = held;
        Ok(Self {
            experts_words,
            _held,
            experts,
            dims,
            dtype,
            ranks,
            ends,
            trains,
            drops,
            mean_rank,
            coded,
            bytes,
        })
    }

    /// Whether any expert has a gradient of this kind.
    pub fn trains(&self, which: Gradient) -> bool {
        self.trains[which as usize] > 0
    }

    /// Values that train, of all experts.
    pub(super) fn gradient_values(&self, which: Gradient) -> f64 {
        self.trains[which as usize] as f64
    }
}

/// Two numbers of 32 bits in a word, the first in its lower half.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// `struct Expert` of grouped.cuh; `held` gets the tensors whose addresses it has.
fn words(e: &Entry<'_>, held: &mut Vec<Tensor>) -> Result<[u64; WORDS]> {
    let mut w = [0; WORDS];
    let mut at = |t: &Tensor| {
        held.push(t.clone());
        address_of(t)
    };
    match e.weight {
        Side::Values(t) => w[0] = at(t)?,
        Side::Codes(m) => {
            let (packed, scales) = m.parts();
            let (scales, group, offset) = match scales {
                Scales::Plain(s) => (s, 1, 0.0),
                Scales::Nested { codes, map, absmax, group, offset } => {
                    (w[6], w[7]) = (at(codes)?, at(map)?);
                    (absmax, u32::try_from(*group).map_err(candle_core::Error::wrap)?, *offset)
                }
            };
            (w[3], w[4], w[5]) = (at(packed)?, at(m.pairs())?, at(scales)?);
            let source = match m.source_dtype() {
                source if source == m.dtype() => 0,
                DType::BF16 => 1,
                DType::F16 => 2,
                _ => 0,
            };
            (w[8], w[9]) = (pair(group, m.block().trailing_zeros()), pair(offset.to_bits(), source));
        }
    }
    w[11..14].fill(NOWHERE);
    if let Some(first) = e.gradient {
        w[11] = first as u64;
    }
    w[15] = pair(1f32.to_bits(), 0);
    if let Some(l) = &e.adapter {
        let (p, stream) = l.dropout;
        w[14] = pair(Stream::new(0, Purpose::Dropout, 0, stream).words()[3], dropout::threshold(p));
        w[15] = pair(((1.0 / (1.0 - p)) as f32).to_bits(), 0);
        (w[1], w[2]) = (at(l.a)?, at(l.b)?);
        let rank = u32::try_from(l.a.dim(0)?).map_err(candle_core::Error::wrap)?;
        w[10] = pair(rank, (l.scale as f32).to_bits());
        if let Some((a, b)) = l.gradients {
            (w[12], w[13]) = (a as u64, b as u64);
        }
    }
    Ok(w)
}
