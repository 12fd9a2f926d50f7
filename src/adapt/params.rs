//! The trained tensors in flat buffers: one set a unit of the walk.
//!
//! A unit (embedding, each layer, head) holds all its trained tensors end to end, so that reduce, norm, clip
//! and optimizer are one pass a unit. The layers get views into the `compute` buffer: a step changes them in
//! place and nothing is copied around, but where master weights and moments live on the host (`memory.offload`).

use super::selection::Trained;
use crate::kernel::Tensor;
use crate::kernel::tensor::Real;
use crate::model::sink::Slot;
use candle_core::{DType, Device, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// Elements that a tensor's offset is a multiple of: 256 bytes of f32.
pub const ALIGN: usize = 64;

/// The buffers of one unit.
#[derive(Debug)]
pub struct Unit {
    /// Elements, gaps between tensors included.
    pub len: usize,
    /// What the layers compute with, in the compute dtype.
    pub compute: Tensor,
    /// f32 master weights; the compute buffer itself where that is f32 and they are not on the host.
    pub master: Tensor,
    /// Gradients, f32; none when nothing is trained (an adapter that is only used).
    pub grads: Option<Tensor>,
    /// AdamW's moments, f32.
    pub moments: Option<(Tensor, Tensor)>,
}

/// All trained tensors of a model.
#[derive(Debug)]
pub struct Params {
    /// What trains, in the order of the forward pass.
    pub tensors: Vec<Trained>,
    /// Where each stands.
    pub slots: Vec<Slot>,
    /// Buffers by unit; `None` where nothing trains.
    pub units: Vec<Option<Unit>>,
    /// Whether master weights and moments live on the host, apart from what the layers compute with.
    pub offloaded: bool,
    /// Whether all gradients are zero since an update that left them so.
    pub zeroed: AtomicBool,
}

/// What is allocated beside the values that the layers compute with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocate {
    /// Gradients and moments.
    pub train: bool,
    /// Master weights and moments on the host (`memory.offload = ["optimizer"]`).
    pub offload: bool,
}

/// Lays tensors out in units: slots, and elements of each unit.
pub fn layout(tensors: &[Trained], units: usize) -> (Vec<Slot>, Vec<usize>) {
    let mut len = vec![0usize; units];
    let slots = tensors
        .iter()
        .enumerate()
        .map(|(index, t)| {
            let cols = *t.shape.last().unwrap_or(&1);
            let rows = t.elements() / cols.max(1);
            let offset = len[t.unit];
            len[t.unit] = (offset + t.elements()).next_multiple_of(ALIGN);
            Slot { index, unit: t.unit, offset, rows, cols }
        })
        .collect();
    (slots, len)
}

impl Params {
    /// Zero-filled buffers for these tensors.
    pub fn new(
        tensors: Vec<Trained>,
        units: usize,
        dtype: DType,
        device: &Device,
        what: Allocate,
    ) -> Result<Self> {
        let (slots, lens) = layout(&tensors, units);
        let Allocate { train, offload } = what;
        let home = if offload { &Device::Cpu } else { device };
        let state = |n| Tensor::zeros(n, DType::F32, home);
        let units = lens
            .into_iter()
            .map(|len| {
                if len == 0 {
                    return Ok(None);
                }
                let compute = Tensor::zeros(len, dtype, device)?;
                let shared = dtype == DType::F32 && !offload;
                Ok(Some(Unit {
                    len,
                    master: if shared { compute.clone() } else { state(len)? },
                    compute,
                    grads: if train { Some(Tensor::zeros(len, DType::F32, device)?) } else { None },
                    moments: if train { Some((state(len)?, state(len)?)) } else { None },
                }))
            })
            .collect::<Result<_>>()?;
        Ok(Self { tensors, slots, units, offloaded: offload, zeroed: AtomicBool::new(false) })
    }

    fn unit(&self, slot: &Slot) -> Result<&Unit> {
        match self.units.get(slot.unit) {
            Some(Some(u)) => Ok(u),
            _ => candle_core::bail!("no buffers for unit {}", slot.unit),
        }
    }

    /// Index of a trained tensor by name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|t| t.name == name)
    }

    /// What the layers compute with: a view of the shape that files have.
    pub fn view(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        slot.view(&self.unit(slot)?.compute)?.reshape(self.tensors[index].shape.as_slice())
    }

    /// The f32 values of a tensor: a view of the master weights.
    pub fn master(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        slot.view(&self.unit(slot)?.master)?.reshape(self.tensors[index].shape.as_slice())
    }

    /// The gradient of a tensor, as a view.
    pub fn grad(&self, index: usize) -> Result<Option<Tensor>> {
        let slot = &self.slots[index];
        match &self.unit(slot)?.grads {
            None => Ok(None),
            Some(g) => slot.view(g)?.reshape(self.tensors[index].shape.as_slice()).map(Some),
        }
    }

    /// The moments of a tensor, as views.
    pub fn moments(&self, index: usize) -> Result<Option<(Tensor, Tensor)>> {
        let slot = &self.slots[index];
        let shape = self.tensors[index].shape.as_slice();
        match &self.unit(slot)?.moments {
            None => Ok(None),
            Some((m, v)) => Ok(Some((slot.view(m)?.reshape(shape)?, slot.view(v)?.reshape(shape)?))),
        }
    }

    /// Sets a tensor, master and compute copy.
    pub fn set(&self, index: usize, value: &Real) -> Result<()> {
        let slot = &self.slots[index];
        let unit = self.unit(slot)?;
        // rounded where the value is, which is the host nearly always
        let flat = value.to_dtype(DType::F32)?.contiguous()?.flatten_all()?;
        if flat.elem_count() != slot.rows * slot.cols {
            candle_core::bail!("{}: {:?} values into {:?}", self.tensors[index].name, value.shape(), slot);
        }
        let put = |to: &Real, values: &Real| to.slice_set(&values.to_device(to.device())?, 0, slot.offset);
        put(unit.master.real()?, &flat)?;
        if unit.compute.dtype() != DType::F32 || self.offloaded {
            put(unit.compute.real()?, &flat.to_dtype(unit.compute.dtype())?)?;
        }
        Ok(())
    }

    /// Where the master weights of a trained tensor are: its values are best read to there.
    pub fn home(&self, index: usize) -> Result<&Device> {
        Ok(self.unit(&self.slots[index])?.master.real()?.device())
    }

    /// Gradient buffers by unit, as a [`crate::model::sink::Sink`] takes them.
    pub fn grads(&self) -> Vec<Option<Tensor>> {
        self.units.iter().map(|u| u.as_ref().and_then(|u| u.grads.clone())).collect()
    }

    /// Sets all gradients to zero, before they are summed anew: nothing to do where the last update did.
    pub fn zero_grads(&self) -> Result<()> {
        if self.zeroed.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        for u in self.units.iter().flatten() {
            if let Some(g) = &u.grads {
                g.zero_set()?;
            }
        }
        Ok(())
    }

    /// Number of trained values.
    pub fn count(&self) -> usize {
        self.tensors.iter().map(Trained::elements).sum()
    }

    /// Lowest unit that holds a trained tensor.
    pub fn lowest_unit(&self) -> Option<usize> {
        self.tensors.iter().map(|t| t.unit).min()
    }
}
