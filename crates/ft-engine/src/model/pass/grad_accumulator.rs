//! Gradient accumulation in flat f32 buffers.

use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::embed::ById;
use ft_kernels::ledger::{Allocation, Ledger, Role};
use ft_kernels::optimizer::BLOCK;
use ft_kernels::padded::Padded;
use ft_kernels::{bias, dora, embed, factors, gemm, upcast};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Location of a trained tensor in the flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Index among all trained tensors.
    pub index: usize,
    /// Index of the flat buffer: see [`crate::params::Params::flats`].
    pub flat: usize,
    /// First element in the buffer.
    pub offset: usize,
    /// Rows; 1 for a vector.
    pub rows: usize,
    pub cols: usize,
}

impl Slot {
    /// Start of the next slot of the buffer: slots begin at quantization blocks of the optimizer.
    fn end(&self) -> usize {
        self.range().end.next_multiple_of(BLOCK)
    }

    /// Slots of tensors with these rows and columns, end to end in one buffer, and the buffer's length.
    #[cfg(test)]
    pub fn end_to_end(shapes: impl IntoIterator<Item = (usize, usize)>) -> (Vec<Self>, usize) {
        let mut offset = 0;
        let slots = shapes.into_iter().enumerate().map(|(index, (rows, cols))| {
            let slot = Self { index, flat: 0, offset, rows, cols };
            offset += rows * cols;
            slot
        });
        (slots.collect(), offset)
    }

    /// Element range in the buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }

    /// View `[rows, cols]` of a flat buffer.
    pub fn view(&self, flat: &Tensor) -> Result<Tensor> {
        flat.narrow(0, self.offset, self.rows * self.cols)?.reshape((self.rows, self.cols))
    }
}

/// Accumulates gradients and tracks which tensors have received one.
pub struct GradAccumulator<'a> {
    grads: Buffers<'a>,
    reached: RefCell<Vec<bool>>,
    /// Slots with stale or uninitialized memory: the first gradient overwrites, later ones add.
    stale: RefCell<BTreeMap<usize, Slot>>,
    /// Deferred gradients of a collecting accumulator.
    later: Option<RefCell<Vec<Later>>>,
    /// In a plan.
    planned: Option<PlannedBuffers<'a>>,
}

/// Gradient buffers in a plan, allocated at their first gradients.
struct PlannedBuffers<'a> {
    ledger: &'a Ledger,
    /// Bytes by buffer.
    bytes: Vec<u64>,
    allocated: RefCell<BTreeMap<usize, Allocation>>,
}

/// Flat gradient buffers.
enum Buffers<'a> {
    /// Owned by the caller; `None` if nothing trains.
    Kept(&'a [Option<Tensor>]),
    /// Allocated at the first gradient, without values, until taken.
    Live { of: Lengths<'a>, device: &'a Device, now: RefCell<BTreeMap<usize, Tensor>> },
}

/// Lengths of all buffers, and the slots in them.
pub type Lengths<'a> = (&'a [usize], &'a [Slot]);

/// A collected gradient, not yet added.
#[derive(Debug)]
pub struct Later {
    slot: Slot,
    /// Number of identical gradients it represents; 1 except in a plan.
    alike: f64,
    what: What,
}

#[derive(Debug)]
enum What {
    /// `alpha a^T b`
    Product(Tensor, Tensor, f64),
    Values(Tensor),
}

impl<'a> GradAccumulator<'a> {
    /// Accumulator over flat buffers (`None` if nothing trains); `count` is the number of trained tensors.
    pub fn new(grads: &'a [Option<Tensor>], count: usize) -> Self {
        Self {
            grads: Buffers::Kept(grads),
            reached: RefCell::new(vec![false; count]),
            stale: RefCell::default(),
            later: None,
            planned: None,
        }
    }

    /// Marks slots with values from an earlier step. The first gradient of a slot overwrites them;
    /// [`GradAccumulator::settle`] zeroes slots without a gradient.
    pub fn over(self, stale: Vec<Slot>) -> Self {
        Self { stale: RefCell::new(stale.into_iter().map(|s| (s.index, s)).collect()), ..self }
    }

    /// Zeroes slots without a gradient, in one buffer or in all.
    pub fn settle(&self, flat: Option<usize>) -> Result<()> {
        let own = |s: &Slot| flat.is_none_or(|flat| s.flat == flat);
        let mut slots: Vec<Slot> = self.stale.borrow().values().filter(|s| own(s)).copied().collect();
        self.stale.borrow_mut().retain(|_, s| !own(s));
        slots.sort_by_key(|s| (s.flat, s.offset));
        // adjacent ones at once, with the zeros between them
        for run in slots.chunk_by(|a, b| a.flat == b.flat && a.end() == b.offset) {
            if let (Some(first), Some(last)) = (run.first(), run.last()) {
                let len = last.range().end - first.offset;
                self.buffer(first.flat)?.narrow(0, first.offset, len)?.zero_set()?;
            }
        }
        Ok(())
    }

    /// Accumulator for a plan: charges the `bytes` of a buffer to the ledger from the first gradient until the
    /// accumulator is dropped.
    pub fn ghost(grads: &'a [Option<Tensor>], ledger: &'a Ledger, bytes: Vec<u64>) -> Self {
        let planned = PlannedBuffers { ledger, bytes, allocated: RefCell::default() };
        Self { planned: Some(planned), ..Self::new(grads, 0) }
    }

    /// Accumulator with buffers allocated at the first gradient and released by [`GradAccumulator::take`].
    pub fn live(of: Lengths<'a>, device: &'a Device) -> Self {
        let grads = Buffers::Live { of, device, now: RefCell::default() };
        Self { grads, reached: RefCell::new(vec![false; of.1.len()]), ..Self::new(&[], 0) }
    }

    /// Takes a buffer out of a [`GradAccumulator::live()`] accumulator; `None` if it had no gradients.
    pub fn take(&self, flat: usize) -> Result<Option<Tensor>> {
        self.settle(Some(flat))?;
        Ok(match &self.grads {
            Buffers::Kept(_) => None,
            Buffers::Live { now, .. } => now.borrow_mut().remove(&flat),
        })
    }

    /// Allocates a buffer with all slots awaiting their first gradient. Gaps between slots are zero.
    fn allocate(&self, number: usize, (lens, slots): Lengths<'_>, device: &Device) -> Result<Tensor> {
        let Some(len) = lens.get(number).filter(|n| **n > 0) else {
            candle_core::bail!("no gradient buffer {number}")
        };
        let flat = Tensor::unset(*len, DType::F32, device)?;
        for slot in slots.iter().filter(|s| s.flat == number) {
            let (start, end) = (slot.range().end, slot.end().min(*len));
            if start < end {
                flat.narrow(0, start, end - start)?.zero_set()?;
            }
            self.stale.borrow_mut().insert(slot.index, *slot);
        }
        Ok(flat)
    }

    /// Collecting accumulator for one thread; [`GradAccumulator::add_all`] adds the result to another accumulator.
    pub fn collecting() -> Self {
        let later = Some(RefCell::default());
        Self { later, ..Self::new(&[], 0) }
    }

    /// The gradients of a collecting accumulator.
    pub fn collected(self) -> Vec<Later> {
        self.later.map(RefCell::into_inner).unwrap_or_default()
    }

    /// Adds collected gradients; the products of a buffer run in parallel.
    pub fn add_all(&self, list: impl IntoIterator<Item = Later>) -> Result<()> {
        // Products into one slot follow one another: those of a round are disjoint.
        let mut rounds: BTreeMap<(usize, usize), Vec<gemm::GradProduct>> = BTreeMap::new();
        let mut seen: HashMap<usize, usize> = HashMap::new();
        for Later { slot, alike, what } in list {
            match what {
                What::Values(dw) => self.add(slot, &dw)?,
                What::Product(a, b, alpha) => {
                    let (_, add) = self.target(slot)?;
                    let Slot { offset, rows, cols, .. } = slot;
                    let round = seen.entry(slot.index).or_default();
                    let at = (slot.flat, std::mem::replace(round, *round + 1));
                    let product = gemm::GradProduct { offset, rows, cols, a, b, alpha, add, alike };
                    rounds.entry(at).or_default().push(product);
                }
            }
        }
        rounds.into_iter().try_for_each(|((flat, _), parts)| gemm::accumulate(&self.buffer(flat)?, parts))
    }

    /// Marks a tensor as reached with a zero gradient, such as one of an expert without tokens.
    pub fn touch(&self, slot: Slot) {
        if let Some(r) = self.reached.borrow_mut().get_mut(slot.index) {
            *r = true;
        }
    }

    /// A flat buffer, for kernels adding many gradients at once. The caller calls [`GradAccumulator::touch`] for every
    /// slot.
    pub fn flat(&self, flat: usize) -> Result<Tensor> {
        let buffer = self.buffer(flat)?;
        self.settle(Some(flat))?;
        Ok(buffer)
    }

    fn buffer(&self, number: usize) -> Result<Tensor> {
        if let Some(PlannedBuffers { ledger, bytes, allocated }) = &self.planned {
            let bytes = bytes.get(number).copied().unwrap_or(0);
            let hold = || ledger.role(Role::Gradients, || ledger.hold_once(bytes));
            allocated.borrow_mut().entry(number).or_insert_with(hold);
        }
        match &self.grads {
            Buffers::Kept(grads) => {
                if let Some(Some(flat)) = grads.get(number) {
                    return Ok(flat.clone());
                }
            }
            Buffers::Live { of, device, now } => {
                if let Some(flat) = now.borrow().get(&number) {
                    return Ok(flat.clone());
                }
                let flat = self.allocate(number, *of, device)?;
                now.borrow_mut().insert(number, flat.clone());
                return Ok(flat);
            }
        }
        candle_core::bail!("no gradient buffer {number}")
    }

    /// Records the gradient if this is a collecting accumulator; returns whether it is.
    fn collect(&self, slot: Slot, of: &Tensor, what: impl FnOnce() -> What) -> bool {
        if let Some(later) = &self.later {
            let alike = of.ghost().map_or(1.0, |g| g.ledger().scale());
            later.borrow_mut().push(Later { slot, alike, what: what() });
        }
        self.later.is_some()
    }

    /// For every trained tensor, whether it has received a gradient.
    pub fn reached(&self) -> Vec<bool> {
        self.reached.borrow().clone()
    }

    /// Marks a tensor as reached. Returns its gradient `[rows, cols]`, and whether to add to it: the first gradient
    /// of a step is written.
    fn target(&self, slot: Slot) -> Result<(Tensor, bool)> {
        self.touch(slot);
        let grad = slot.view(&self.buffer(slot.flat)?)?;
        Ok((grad, self.stale.borrow_mut().remove(&slot.index).is_none()))
    }

    /// As [`GradAccumulator::target`], ready to add to.
    fn reach(&self, slot: Slot) -> Result<Tensor> {
        let (grad, add) = self.target(slot)?;
        if !add {
            grad.zero_set()?;
        }
        Ok(grad)
    }

    /// `grad += alpha a^T b` for `a` `[t, rows]`, `b` `[t, cols]`.
    pub fn product(&self, slot: Slot, a: &Tensor, b: &Tensor, alpha: f64) -> Result<()> {
        if self.collect(slot, a, || What::Product(a.clone(), b.clone(), alpha)) {
            return gemm::work(a, true, b, None);
        }
        let (grad, add) = self.target(slot)?;
        gemm::matmul_onto((&grad, add), a, true, b, false, alpha)
    }

    /// [`GradAccumulator::product`] of `dy` and `u` for a slot of B, and `du = scale dy B` from the same read of `dy`,
    /// written to `to` if given. `None` and nothing done unless [`factors::takes`] them.
    pub fn factors(
        &self,
        slot: Slot,
        dy: &Tensor,
        (b, scale): (&Tensor, f64),
        u: (&Tensor, f64),
        to: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        if self.later.is_some() || !factors::takes(dy, b)? {
            return Ok(None);
        }
        let du = match to {
            Some(du) => du.clone(),
            None => Padded::empty(dy, (dy.dim(0)?, b.dim(1)?), 0, dy.dtype())?.values()?,
        };
        let (grad, add) = self.target(slot)?;
        factors::gradients(dy, (b, scale), &du, u, (&grad, add))?;
        Ok(Some(du))
    }

    /// [`GradAccumulator::product`] for several tensors `[rows, cols]` of one `b`; `a` has their columns side by side.
    /// One product if they follow one another in their buffer.
    pub fn products(&self, slots: &[Slot], a: &Tensor, b: &Tensor, alpha: f64) -> Result<()> {
        let [first, .., last] = slots else {
            return slots.iter().try_for_each(|s| self.product(*s, a, b, alpha));
        };
        let stale = self.stale.borrow();
        let is_stale = |s: &Slot| stale.contains_key(&s.index);
        let follows = |p: &[Slot]| p[0].flat == p[1].flat && p[0].range().end == p[1].offset;
        let alike = slots.windows(2).all(|p| is_stale(&p[0]) == is_stale(&p[1]) && p[0].cols == p[1].cols);
        // slots of a plan have no places
        let one = alike && self.later.is_none() && (a.ghost().is_some() || slots.windows(2).all(follows));
        drop(stale);
        if !one {
            let mut at = 0;
            return slots.iter().try_for_each(|s| {
                at += s.rows;
                self.product(*s, &a.narrow(1, at - s.rows, s.rows)?, b, alpha)
            });
        }
        let add =
            slots.iter().map(|s| self.target(*s)).collect::<Result<Vec<_>>>()?.iter().all(|(_, add)| *add);
        let all = Slot { rows: slots.iter().map(|s| s.rows).sum(), ..*first };
        gemm::matmul_onto((&all.view(&self.buffer(last.flat)?)?, add), a, true, b, false, alpha)
    }

    /// `grad += dw`.
    pub fn add(&self, slot: Slot, dw: &Tensor) -> Result<()> {
        if self.collect(slot, dw, || What::Values(dw.clone())) {
            return Ok(());
        }
        let (grad, add) = self.target(slot)?;
        gemm::put((&grad, add), dw)
    }

    /// Adds the sum of dy's rows to `grad`.
    pub fn column_sums(&self, slot: Slot, dy: &Tensor) -> Result<()> {
        if self.later.is_some() {
            return self.add(slot, &upcast(dy)?.sum_keepdim(0)?);
        }
        let (grad, add) = self.target(slot)?;
        bias::sum_onto((&grad, add), dy)
    }

    /// `grad += inverse * sum over rows of dy * z`, for DoRA's magnitude.
    pub fn magnitude(&self, slot: Slot, inverse: &Tensor, dy: &Tensor, z: &Tensor) -> Result<()> {
        if self.later.is_some() {
            return self.add(slot, &dora::magnitude(inverse, dy, z)?);
        }
        let (grad, add) = self.target(slot)?;
        dora::magnitude_onto((&grad, add), inverse, dy, z)
    }

    /// `grad[ids[i]] += dy[i]` for every token. If the slot holds only the rows `of` certain ids, other
    /// tokens are skipped.
    pub fn rows(
        &self,
        slot: Slot,
        ids: &Tensor,
        by_id: Option<&ById>,
        of: Option<&[u32]>,
        dy: &Tensor,
    ) -> Result<()> {
        embed::backward(&self.reach(slot)?, (ids, by_id, of), dy, 1.0)
    }

    /// `grad[:, ids[i]] += dy[i]` for every token; zeros in the column `pad`, if any.
    pub fn columns(&self, slot: Slot, ids: &Tensor, pad: Option<u32>, dy: &Tensor) -> Result<()> {
        let g = self.reach(slot)?;
        let add = dy.to_dtype(g.dtype())?.t()?.contiguous()?;
        // candle's index_add on CUDA needs a tensor at the start of its storage.
        let whole = if g.device().is_cpu() { g.clone() } else { g.force_contiguous()? };
        g.slice_set(&whole.index_add(ids, &add, 1)?, 0, 0)?;
        pad.map_or(Ok(()), |pad| g.narrow(1, pad as usize, 1)?.zero_set())
    }
}
