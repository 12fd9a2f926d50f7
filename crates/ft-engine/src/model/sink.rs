//! Where the gradients of trained tensors go: flat f32 buffers, one a unit of the walk.

use ft_kernels::Tensor;
use ft_kernels::embed::ById;
use ft_kernels::ledger::{Allocation, Ledger, Role};
use ft_kernels::{bias, dora, embed, gemm, upcast};
use candle_core::{DType, Device, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// A trained tensor's place in the flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Index among all trained tensors.
    pub index: usize,
    /// Unit of the walk whose buffer holds it.
    pub unit: usize,
    /// First element in that buffer.
    pub offset: usize,
    /// Rows (a vector has one).
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Slot {
    /// Its elements of the buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }

    /// Its part of a flat buffer, [rows, cols].
    pub fn view(&self, flat: &Tensor) -> Result<Tensor> {
        flat.narrow(0, self.offset, self.rows * self.cols)?.reshape((self.rows, self.cols))
    }
}

/// Accumulates gradients, and remembers which tensors were reached.
pub struct Sink<'a> {
    grads: Buffers<'a>,
    reached: RefCell<Vec<bool>>,
    /// Those whose values are what an earlier step left, to be written over.
    stale: RefCell<BTreeMap<usize, Slot>>,
    /// Gradients to add later, where this sink only collects.
    later: Option<RefCell<Vec<Later>>>,
    /// In a plan, a buffer that comes to be with the first gradient.
    live: Option<(&'a Ledger, u64, RefCell<Option<Allocation>>)>,
}

/// The flat buffers of gradients.
enum Buffers<'a> {
    /// One a unit (`None` where nothing trains), for as long as the sink's owner likes.
    Kept(&'a [Option<Tensor>]),
    /// Each from the first gradient of its unit until it is taken.
    Live { lens: &'a [usize], device: &'a Device, now: RefCell<BTreeMap<usize, Tensor>> },
}

/// A gradient that was collected and not yet added.
#[derive(Debug)]
pub struct Later {
    slot: Slot,
    /// How many it stands for: one, but in a plan.
    alike: f64,
    what: What,
}

#[derive(Debug)]
enum What {
    /// `alpha a^T b`
    Product(Tensor, Tensor, f64),
    Values(Tensor),
}

impl<'a> Sink<'a> {
    /// A sink over one flat buffer a unit (`None` where nothing trains); `count` trained tensors in all.
    pub fn new(grads: &'a [Option<Tensor>], count: usize) -> Self {
        Self {
            grads: Buffers::Kept(grads),
            reached: RefCell::new(vec![false; count]),
            stale: RefCell::default(),
            later: None,
            live: None,
        }
    }

    /// Of buffers in which these parts hold what an earlier step left: the first gradient of each is written over it, and
    /// [`Sink::settle`] makes zero what had none.
    pub fn over(self, stale: &[Slot]) -> Self {
        Self { stale: RefCell::new(stale.iter().map(|s| (s.index, *s)).collect()), ..self }
    }

    /// Whether this is the first gradient of a tensor whose values are an earlier step's.
    fn is_first(&self, slot: Slot) -> bool {
        self.stale.borrow_mut().remove(&slot.index).is_some()
    }

    /// Makes zero what an earlier step left, of one unit or of all.
    pub fn settle(&self, unit: Option<usize>) -> Result<()> {
        let own = |s: &Slot| unit.is_none_or(|unit| s.unit == unit);
        let mut stale = self.stale.borrow_mut();
        for slot in stale.values().filter(|s| own(s)) {
            slot.view(&self.buffer(slot.unit)?)?.zero_set()?;
        }
        stale.retain(|_, s| !own(s));
        Ok(())
    }

    /// A sink over ghosts whose buffer, of so many bytes, lives from the first gradient until the sink is dropped.
    pub fn ghost(grads: &'a [Option<Tensor>], ledger: &'a Ledger, bytes: u64) -> Self {
        Self { live: Some((ledger, bytes, RefCell::default())), ..Self::new(grads, 0) }
    }

    /// A sink whose buffers, of these lengths, live from the first gradient of a unit until they are [taken](Sink::take).
    pub fn live(lens: &'a [usize], device: &'a Device, count: usize) -> Self {
        let grads = Buffers::Live { lens, device, now: RefCell::default() };
        Self { grads, reached: RefCell::new(vec![false; count]), ..Self::new(&[], 0) }
    }

    /// The gradients of a unit, where the sink made a buffer for them.
    pub fn take(&self, unit: usize) -> Option<Tensor> {
        match &self.grads {
            Buffers::Kept(_) => None,
            Buffers::Live { now, .. } => now.borrow_mut().remove(&unit),
        }
    }

    /// A sink that only collects, for a thread of its own: [`Sink::add_all`] adds what it has.
    pub fn collecting() -> Self {
        let later = Some(RefCell::default());
        Self { later, ..Self::new(&[], 0) }
    }

    /// What a collecting sink has.
    pub fn collected(self) -> Vec<Later> {
        self.later.map(RefCell::into_inner).unwrap_or_default()
    }

    /// Adds what collecting sinks have, the products of a unit side by side.
    pub fn add_all(&self, list: impl IntoIterator<Item = Later>) -> Result<()> {
        let mut units: BTreeMap<usize, Vec<gemm::GradProduct>> = BTreeMap::new();
        for Later { slot, alike, what } in list {
            match what {
                What::Values(dw) => self.add(slot, &dw)?,
                What::Product(a, b, alpha) => {
                    self.touch(slot);
                    let Slot { offset, rows, cols, .. } = slot;
                    units.entry(slot.unit).or_default().push(gemm::GradProduct {
                        offset,
                        rows,
                        cols,
                        a,
                        b,
                        alpha,
                        add: !self.is_first(slot),
                        alike,
                    });
                }
            }
        }
        units.into_iter().try_for_each(|(unit, parts)| gemm::accumulate(&self.buffer(unit)?, parts))
    }

    /// Marks a tensor as reached whose gradient is zero this time: that of an expert without tokens.
    pub fn touch(&self, slot: Slot) {
        if let Some(r) = self.reached.borrow_mut().get_mut(slot.index) {
            *r = true;
        }
    }

    /// The flat buffer of a unit, for what adds many gradients at once; each is told to [`Sink::touch`].
    pub fn flat(&self, unit: usize) -> Result<Tensor> {
        self.settle(Some(unit))?;
        self.buffer(unit)
    }

    fn buffer(&self, unit: usize) -> Result<Tensor> {
        if let Some((ledger, bytes, live)) = &self.live {
            live.borrow_mut()
                .get_or_insert_with(|| ledger.role(Role::Gradients, || ledger.hold_once(*bytes)));
        }
        match &self.grads {
            Buffers::Kept(grads) => {
                if let Some(Some(flat)) = grads.get(unit) {
                    return Ok(flat.clone());
                }
            }
            Buffers::Live { lens, device, now } => {
                if let Some(flat) = now.borrow().get(&unit) {
                    return Ok(flat.clone());
                }
                if let Some(len) = lens.get(unit).filter(|n| **n > 0) {
                    let flat = Tensor::zeros(*len, DType::F32, *device)?;
                    now.borrow_mut().insert(unit, flat.clone());
                    return Ok(flat);
                }
            }
        }
        candle_core::bail!("no gradient buffer for unit {unit}")
    }

    /// Whether this sink only collects; if so, takes a gradient.
    fn collect(&self, slot: Slot, of: &Tensor, what: impl FnOnce() -> What) -> bool {
        if let Some(later) = &self.later {
            let alike = of.ghost().map_or(1.0, |g| g.ledger().scale());
            later.borrow_mut().push(Later { slot, alike, what: what() });
        }
        self.later.is_some()
    }

    /// Which trained tensors got a gradient since the sink was made.
    pub fn reached(&self) -> Vec<bool> {
        self.reached.borrow().clone()
    }

    /// Marks a tensor as reached, and gives its gradient [rows, cols], to add to.
    fn reach(&self, slot: Slot) -> Result<Tensor> {
        self.touch(slot);
        let grad = slot.view(&self.buffer(slot.unit)?)?;
        if self.is_first(slot) {
            grad.zero_set()?;
        }
        Ok(grad)
    }

    /// `grad += alpha a^T b` for `a` [t, rows], `b` [t, cols].
    pub fn product(&self, slot: Slot, a: &Tensor, b: &Tensor, alpha: f64) -> Result<()> {
        if self.collect(slot, a, || What::Product(a.clone(), b.clone(), alpha)) {
            return gemm::work(a, true, b, None);
        }
        self.touch(slot);
        let grad = slot.view(&self.buffer(slot.unit)?)?;
        gemm::matmul_onto((&grad, !self.is_first(slot)), a, true, b, false, alpha)
    }

    /// `grad += dw`.
    pub fn add(&self, slot: Slot, dw: &Tensor) -> Result<()> {
        if self.collect(slot, dw, || What::Values(dw.clone())) {
            return Ok(());
        }
        gemm::acc(&self.reach(slot)?, dw)
    }

    /// `grad += the sum of dy's rows`.
    pub fn column_sums(&self, slot: Slot, dy: &Tensor) -> Result<()> {
        if self.later.is_some() {
            return self.add(slot, &upcast(dy)?.sum_keepdim(0)?);
        }
        bias::add_sum(&self.reach(slot)?, dy)
    }

    /// `grad += inverse * (the sum of dy's rows times z's)`: of DoRA's magnitude.
    pub fn magnitude(&self, slot: Slot, inverse: &Tensor, dy: &Tensor, z: &Tensor) -> Result<()> {
        if self.later.is_some() {
            return self.add(slot, &dora::magnitude(inverse, dy, z)?);
        }
        dora::add_magnitude(&self.reach(slot)?, inverse, dy, z)
    }

    /// `grad[ids[i]] += dy[i]` for every token; where the slot has the rows `of` some ids alone, for those.
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

    /// `grad[:, ids[i]] += dy[i]` for every token.
    pub fn columns(&self, slot: Slot, ids: &Tensor, dy: &Tensor) -> Result<()> {
        let g = self.reach(slot)?;
        let add = dy.to_dtype(g.dtype())?.t()?.contiguous()?;
        // candle's addition by index on CUDA takes a tensor that begins its storage
        let whole = if g.device().is_cpu() { g.clone() } else { g.force_contiguous()? };
        g.slice_set(&whole.index_add(ids, &add, 1)?, 0, 0)
    }
}
