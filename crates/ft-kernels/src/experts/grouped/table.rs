//! Device table of experts for grouped GEMMs: one matrix per expert.

use crate::Tensor;
use crate::cuda::launch::address_of;
use crate::dropout;
use crate::quantized::{QuantizedMatrix, Scales};
use crate::tensor::Ghost;
use candle_core::{DType, Result};
use ft_base::rng::{Purpose, Stream};

/// 64-bit words per expert; must match `struct Expert` in grouped.cuh.
const WORDS: usize = 16;
/// Bytes per expert and matrix on the device.
pub const BYTES: usize = 8 * WORDS;
/// Gradient offset of frozen parameters.
const NOWHERE: u64 = u64::MAX;
/// Row strides of u and du are a multiple of this, for vector alignment.
const RANKS: usize = 8;

/// Operand receiving a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// W, from dy and x.
    Weight,
    /// A, from du and x.
    A,
    /// B, from dy and u.
    B,
}

/// The matrix W of an expert, [o, i].
#[derive(Clone, Copy, Debug)]
pub enum Side<'a> {
    /// Stored values.
    Values(&'a Tensor),
    /// 4-bit codes.
    Codes(&'a QuantizedMatrix),
}

/// The LoRA adapter of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Adapter<'a> {
    /// A [r, i].
    pub a: &'a Tensor,
    /// B [o, r].
    pub b: &'a Tensor,
    /// Factor on the update (alpha / r, or the rsLoRA variant).
    pub scale: f64,
    /// Offsets of A and B in the gradient buffer.
    pub gradients: Option<(usize, usize)>,
    /// Dropout probability, and number of the random stream.
    pub dropout: (f64, u64),
}

/// One expert's entry.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Weight matrix W.
    pub weight: Side<'a>,
    /// Offset of W in the gradient buffer; `None` if frozen.
    pub gradient: Option<usize>,
    /// LoRA adapter.
    pub adapter: Option<Adapter<'a>>,
    /// Number of experts represented by this entry: 1, except in plans.
    pub alike: usize,
}

/// One matrix of each expert of a layer.
///
/// Stores device addresses, and keeps the tensors alive as long as the table.
#[derive(Clone, Debug)]
pub struct Table {
    /// Table words [e, 16], i64.
    pub(super) experts_words: Tensor,
    /// Tensors behind the addresses.
    _held: Vec<Tensor>,
    /// (o, i).
    pub(super) dims: (usize, usize),
    pub(super) dtype: DType,
    /// Offsets of A and B in the gradient buffer, by entry.
    places: Vec<Option<(usize, usize)>>,
    /// Sums and maxima over the entries.
    pub totals: Totals,
}

/// Whether the kernels support a matrix's quantization blocks and groups of scales.
pub fn takes(w: &QuantizedMatrix) -> bool {
    let grouped = match w.parts().1 {
        Scales::Plain(_) => true,
        Scales::Nested { group, .. } => group.is_power_of_two(),
    };
    grouped && w.block().is_power_of_two() && w.block() >= 32 && w.dims().0 * w.dims().1 < 1 << 37
}

impl Entry<'_> {
    fn dims(&self) -> Result<(usize, usize)> {
        match self.weight {
            Side::Values(w) => w.dims2(),
            Side::Codes(w) => Ok(w.dims()),
        }
    }
}

/// Sums and maxima over the entries of a [`Table`].
#[derive(Clone, Debug, Default)]
pub struct Totals {
    pub(super) experts: usize,
    /// Row stride of u and du, in values; 0 without adapters.
    pub(super) ranks: usize,
    /// End of the last gradient in the buffer.
    pub(super) ends: usize,
    /// Trainable values by [`Gradient`].
    trains: [usize; 3],
    /// Whether any expert has dropout.
    pub drops: bool,
    /// For plans: LoRA ranks, number of quantized values, bytes of weights and codes.
    rank_sum: usize,
    pub(super) coded: usize,
    pub(super) bytes: usize,
}

impl Totals {
    fn add(&mut self, e: &Entry<'_>, dims: (usize, usize), dtype: DType) -> Result<()> {
        let fits = match e.weight {
            Side::Values(w) => w.dtype() == dtype && w.is_contiguous(),
            Side::Codes(w) => w.dtype() == dtype && takes(w) && e.gradient.is_none(),
        };
        if e.dims()? != dims || !fits {
            candle_core::bail!("experts of different shapes or types: {:?} and {dims:?}", e.dims()?);
        }
        self.experts += e.alike;
        let values = dims.0 * dims.1;
        match e.weight {
            Side::Values(_) => self.bytes += e.alike * values * dtype.size_in_bytes(),
            Side::Codes(w) => {
                self.coded += e.alike * values;
                self.bytes += e.alike * w.bytes();
            }
        }
        if let Some(at) = e.gradient {
            self.ends = self.ends.max(at + values);
            self.trains[0] += e.alike * values;
        }
        let Some(l) = &e.adapter else { return Ok(()) };
        let r = l.a.dim(0)?;
        let fits = |t: &Tensor, dims: [usize; 2]| t.dims() == dims && t.dtype() == dtype && t.is_contiguous();
        if !fits(l.a, [r, dims.1]) || !fits(l.b, [dims.0, r]) {
            candle_core::bail!("an expert's adapter {:?}, {:?} of {dims:?}", l.a.shape(), l.b.shape());
        }
        self.ranks = self.ranks.max(r.next_multiple_of(RANKS));
        self.rank_sum += e.alike * r;
        self.drops |= l.dropout.0 > 0.0;
        if let Some((a, b)) = l.gradients {
            self.ends = self.ends.max(a + r * dims.1).max(b + r * dims.0);
            self.trains[1] += e.alike * r * dims.1;
            self.trains[2] += e.alike * r * dims.0;
        }
        Ok(())
    }
}

impl Table {
    /// Builds the table for products in `dtype`, with `entries` in expert order.
    ///
    /// # Errors
    /// Shapes or dtypes don't match, or a tensor is on another device.
    pub fn new(entries: &[Entry<'_>], dtype: DType) -> Result<Self> {
        let Some(first) = entries.first() else { candle_core::bail!("a layer without experts") };
        let dims = first.dims()?;
        let mut totals = Totals::default();
        entries.iter().try_for_each(|e| totals.add(e, dims, dtype))?;
        let experts = totals.experts;
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
        let places = entries.iter().map(|e| e.adapter?.gradients).collect();
        Ok(Self { experts_words, _held: held, dims, dtype, places, totals })
    }

    /// Mean LoRA rank of the experts.
    pub(super) fn mean_rank(&self) -> f64 {
        self.totals.rank_sum as f64 / self.totals.experts.max(1) as f64
    }

    /// Whether any expert has an adapter.
    pub fn has_adapters(&self) -> bool {
        self.totals.ranks > 0
    }

    /// Whether any expert has a gradient of this kind.
    pub fn trains(&self, which: Gradient) -> bool {
        self.totals.trains[which as usize] > 0
    }

    /// Whether an expert's gradient of A, or of B, has one place in both tables.
    pub(super) fn shares(&self, other: &Self, which: Gradient) -> bool {
        let of = |places: Option<(usize, usize)>| match which {
            Gradient::Weight => None,
            Gradient::A => places.map(|(a, _)| a),
            Gradient::B => places.map(|(_, b)| b),
        };
        self.places.iter().zip(&other.places).any(|(a, b)| of(*a).is_some() && of(*a) == of(*b))
    }

    /// Trainable values of all experts.
    pub(super) fn gradient_values(&self, which: Gradient) -> f64 {
        self.totals.trains[which as usize] as f64
    }
}

/// Packs two 32-bit numbers into a word, `low` in the lower half.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Encodes `struct Expert` of grouped.cuh. Tensors behind addresses are pushed to `held`.
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
                Scales::Plain(s) => (s, 0, 0.0),
                Scales::Nested { codes, map, absmax, group, offset } => {
                    (w[6], w[7]) = (at(codes)?, at(map)?);
                    (absmax, group.trailing_zeros(), *offset)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    #[test]
    fn tables_share_the_gradient_of_a_common_a() -> Result<()> {
        let ledger = Ledger::new(Default::default());
        let ghost = |dims: (usize, usize)| Tensor::from(Ghost::weight(&ledger, dims, DType::BF16));
        let (w, a, b) = (ghost((16, 8)), ghost((4, 8)), ghost((16, 4)));
        let table = |trained: Option<(usize, usize)>| {
            let entry = |gradients| {
                let adapter = Adapter { a: &a, b: &b, scale: 1.0, gradients, dropout: (0.0, 0) };
                Entry { weight: Side::Values(&w), gradient: None, adapter: Some(adapter), alike: 1 }
            };
            Table::new(&[entry(None), entry(trained)], DType::BF16)
        };
        let (gate, up, other) = (table(Some((0, 64)))?, table(Some((0, 128)))?, table(Some((192, 256)))?);
        assert!(gate.shares(&up, Gradient::A) && !gate.shares(&up, Gradient::B));
        assert!(!gate.shares(&other, Gradient::A) && !gate.shares(&other, Gradient::Weight));
        let frozen = table(None)?;
        assert!(!frozen.shares(&frozen, Gradient::A));
        Ok(())
    }
}
