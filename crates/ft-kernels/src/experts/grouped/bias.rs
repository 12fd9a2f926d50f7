//! Biases of experts, for rows sorted by expert.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, address_of, args, compiled};
use crate::dispatch::Sorted;
use crate::tensor::{Ghost, ghosts};
use candle_core::{DType, Result};

/// Threads per block, same as in grouped_bias.cu.
const THREADS: u32 = 256;
/// Columns per block of the sums.
const COLUMNS: usize = 32;
/// Bytes per expert on the device.
pub const BYTES: usize = 16;

/// Device table of a bias `[o]` of each expert.
///
/// Stores device addresses, and keeps the tensors alive as long as the table.
#[derive(Clone, Debug)]
pub struct Biases {
    /// Addresses and gradient offsets [e, 2], i64; -1 if frozen.
    words: Tensor,
    _held: Vec<Tensor>,
    experts: usize,
    width: usize,
    dtype: DType,
    /// End of the last gradient in the buffer.
    ends: usize,
    /// Whether any bias trains.
    pub trains: bool,
}

impl Biases {
    /// Builds the table from the biases in expert order, with offsets in the gradient buffer and the number of
    /// experts that each represents: 1, except in plans.
    ///
    /// # Errors
    /// Biases of different shapes or dtypes.
    pub fn new(entries: &[(&Tensor, Option<usize>, usize)]) -> Result<Self> {
        let Some((first, ..)) = entries.first() else { candle_core::bail!("a layer without experts") };
        let (width, dtype) = (first.elem_count(), first.dtype());
        let fits = |b: &Tensor| b.elem_count() == width && b.dtype() == dtype;
        if let Some((other, ..)) = entries.iter().find(|(b, ..)| !fits(b)) {
            candle_core::bail!("biases of experts: {:?} and {:?}", first.shape(), other.shape());
        }
        let experts = entries.iter().map(|(.., alike)| alike).sum();
        let words = match first.ghost() {
            Some(g) => Ghost::weight(g.ledger(), (experts, 2), DType::I64).into(),
            None => {
                let mut words = Vec::with_capacity(2 * experts);
                for (bias, slot, _) in entries {
                    let offset = slot.map_or(-1, |at| at as i64);
                    words.extend([address_of(bias)?.cast_signed(), offset]);
                }
                Tensor::from_vec(words, (experts, 2), first.device())?
            }
        };
        let slots = entries.iter().filter_map(|(_, slot, _)| *slot);
        let ends = slots.clone().map(|at| at + width).max().unwrap_or(0);
        let _held = entries.iter().map(|(b, ..)| (*b).clone()).collect();
        Ok(Self { words, _held, experts, width, dtype, ends, trains: slots.count() > 0 })
    }

    fn check(&self, y: &Tensor, s: &Sorted) -> Result<()> {
        if y.dims() != [s.rows(), self.width] || y.dtype() != self.dtype || self.experts != s.experts {
            candle_core::bail!("biases of experts: {:?} for {} rows of {}", y.shape(), s.rows(), self.width);
        }
        Ok(())
    }

    /// Adds to each row of `y` [n, o] the bias of its expert, in place.
    pub fn add(&self, y: &Tensor, s: &Sorted) -> Result<()> {
        self.check(y, s)?;
        if ghosts(&[y], [], |_| ()).is_some() {
            return Ok(());
        }
        let launch = Launch::of(y, compiled!(GROUPED_BIAS), "grouped_bias_add")?;
        let launch = launch.with(args![&self.words, &s.starts, self.experts, self.width, y])?;
        // SAFETY: y has a row of `width` values for each entry of the schedule; the table holds the addresses of
        // as many biases as it has experts, and keeps them alive; one block per row.
        unsafe { launch.run(Grid::new(s.rows(), THREADS)) }
    }

    /// Adds the sums of the rows of `dy` [n, o] by expert to `grads`, the flat f32 buffer of the offsets.
    pub fn add_sums(&self, dy: &Tensor, s: &Sorted, grads: &Tensor) -> Result<()> {
        self.check(dy, s)?;
        if grads.dtype() != DType::F32 || grads.elem_count() < self.ends {
            candle_core::bail!("biases of experts: gradients of {} values", grads.elem_count());
        }
        if ghosts(&[dy], [], |_| ()).is_some() {
            return Ok(());
        }
        let dy = dy.contiguous()?;
        let launch = Launch::of(&dy, compiled!(GROUPED_BIAS), "grouped_bias_sum")?;
        let launch = launch.with(args![&self.words, &s.starts, self.width, &dy, grads])?;
        // SAFETY: as in `add`; offsets lie inside the buffer (`ends` was checked), and each value is written by one
        // block.
        unsafe { launch.run(Grid::new(self.width.div_ceil(COLUMNS), THREADS).by(self.experts)) }
    }
}
