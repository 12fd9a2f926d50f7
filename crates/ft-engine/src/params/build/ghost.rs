//! Shape-only weights for a plan, mirroring what `super::build` would load and allocate.

use super::owned;
use crate::adapters::{Choice, Part, peft};
use crate::model::decoder::Weights;
use crate::model::embedding::EmbeddingLora;
use crate::model::feed_forward::LocalExperts;
use crate::model::grad_accumulator::Slot;
use crate::model::linear::Rows;
use crate::model::linear::{Dora, Lora, Stack, Weight};
use crate::model::modules::{Group, MlpTree, Module};
use crate::params::buffers::{ALIGN, cut_module, is_cut};
use crate::quant;
use candle_core::{DType, Shape};
use ft_kernels::fp8::{self, Source};
use ft_kernels::padded::Padded;
use ft_kernels::quantized::QuantizedMatrix;
use ft_kernels::tensor::Ghost;
use ft_kernels::{Ledger, Machine, Tensor};
use ft_recipe::{LoraSpec, Quantize};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Length of the buffer shared by all shape-only gradients.
const BUFFER: usize = 1 << 60;

/// Whether `quantize` makes a module's weight 4-bit: decoder linears, except routers and weights trained in
/// full.
pub fn is_quantized(m: &Module, choice: &Choice, quantize: Quantize) -> bool {
    let quantized = m.is_mxfp4() || quantize == Quantize::Nf4 && quant::applies_to(m);
    quantized && !matches!(choice, Choice::Full { .. })
}

/// Whether a frozen matrix stays in the checkpoint's half precision while the model computes in f32
/// ([`ft_kernels::gemm::kept`]).
pub fn stays_stored(m: &Module, choice: &Choice, machine: Machine) -> bool {
    m.weight_shape().len() == 2 && choice.leaves_weight() && machine.frozen() < machine.width
}

/// LoRA rank if a dense matrix gets spare columns and rows to fuse adapter products, otherwise 0. `rooms`
/// is whether weights reside on a CUDA device. DoRA and experts are excluded: they use other products
/// (`kernel::grouped` for experts).
pub fn room(m: &Module, choice: &Choice, rooms: bool) -> usize {
    let Choice::Lora { spec, .. } = choice else { return 0 };
    let takes = rooms && !spec.dora && m.expert.is_none() && matches!(m.group, Group::Attention | Group::Mlp);
    if takes { spec.rank } else { 0 }
}

/// Whether a frozen matrix is multiplied in 8-bit floats if `fp8` is set: linears of attention and dense feed-forward
/// blocks, of sizes that the products take. `m` has the dimensions of a rank.
pub fn in_fp8(m: &Module, choice: &Choice, fp8: bool) -> bool {
    fp8 && is_frozen_dense(m, choice) && matches!(m.weight_shape().as_slice(), &[o, i] if fp8::fits((o, i)))
}

/// Whether a module is a frozen matrix of an attention or dense feed-forward block.
pub fn is_frozen_dense(m: &Module, choice: &Choice) -> bool {
    choice.leaves_weight()
        && m.expert.is_none()
        && matches!(m.group, Group::Attention | Group::Mlp)
        && m.weight_shape().len() == 2
}

/// Sum of the LoRA ranks of linears of one input if their adapters are computed together, otherwise 0: all linears have
/// equal adapters, without DoRA and dropout, that follow one another in their buffer. `whole` is whether matrices are
/// whole and on a CUDA device.
pub(super) fn stacked(modules: &[&Module], choice: impl Fn(&Module) -> Choice, whole: bool) -> usize {
    let [first, _, ..] = modules else { return 0 };
    let Choice::Lora { spec, .. } = choice(first) else { return 0 };
    let alike = |m: &&Module| {
        matches!(choice(m), Choice::Lora { spec: own, .. } if own == spec)
            && matches!(m.group, Group::Attention | Group::Mlp)
            && m.expert.is_none()
            && m.a_of() == m.name
            && m.cols() == first.cols()
    };
    let takes = whole && !spec.dora && spec.dropout == 0.0 && modules.iter().all(alike);
    if takes && (spec.rank * first.cols()).is_multiple_of(ALIGN) { spec.rank * modules.len() } else { 0 }
}

/// Source of shape-only weights, given the choice for every module.
pub struct Ghosts<'a> {
    /// Ledger to charge.
    pub ledger: &'a Ledger,
    pub dtype: DType,
    /// Choice by module name; frozen if absent.
    pub choices: HashMap<&'a str, Choice>,
    /// Quantization of decoder linears.
    pub quantize: Quantize,
    /// The experts of this rank and the ranks that split them, if they do.
    pub own: Option<(Range<usize>, usize)>,
    /// Ranks that cut matrices; 1 for none.
    pub cut_over: usize,
    /// Whether weights reside on a CUDA device, so that dense ones get spare columns for adapters.
    rooms: bool,
    used: usize,
    /// The last A and its gradient, with the module: the next linear may share them.
    last_a: Option<(String, Tensor, Slot)>,
}

impl<'a> Ghosts<'a> {
    /// Builds the source; `stays` is whether weights reside on the device.
    pub fn new(
        ledger: &'a Ledger,
        dtype: DType,
        choices: impl Iterator<Item = (&'a str, Choice)>,
        (quantize, stays): (Quantize, bool),
    ) -> Self {
        Self {
            ledger,
            dtype,
            choices: choices.collect(),
            quantize,
            own: None,
            cut_over: 1,
            rooms: stays && ledger.machine().cuda,
            used: 0,
            last_a: None,
        }
    }

    /// Gradient buffers for a unit of a model with these weights: of whole tensors, then of pieces, then of experts,
    /// where ranks split these.
    pub fn grads(ledger: &Ledger) -> Vec<Option<Tensor>> {
        (0..3).map(|_| Some(Ghost::weight(ledger, BUFFER, DType::F32).into())).collect()
    }

    /// Gradient buffer of a part of a module: see [`Ghosts::grads`].
    fn buffer(&self, m: &Module, part: Part) -> usize {
        match m.expert {
            Some(_) if self.own.is_some() => 1 + usize::from(self.cut_over > 1),
            _ => usize::from(self.cut_over > 1 && is_cut(m, part)),
        }
    }

    /// A module with the dimensions on a rank.
    fn here(&self, m: &Module) -> Module {
        cut_module(m, self.cut_over)
    }

    fn choice(&self, m: &Module) -> Choice {
        self.choices.get(m.name.as_str()).copied().unwrap_or(Choice::Freeze)
    }

    fn ghost(&self, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Ghost::weight(self.ledger, shape, dtype).into()
    }

    fn slot(&mut self, (m, part): (&Module, Part), rows: usize, cols: usize) -> Slot {
        let offset = self.used;
        self.used += rows * cols;
        // a number of its own, as gradients of different slots are added at once
        Slot { index: offset, flat: self.buffer(m, part), offset, rows, cols }
    }

    fn tensor(&mut self, (m, part): (&Module, Part), shape: &[usize]) -> (Tensor, Option<Slot>) {
        let choice = self.choice(m);
        let full = matches!(choice, Choice::Full { .. });
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().product::<usize>() / cols.max(1);
        let kept = shape.len() == 2 && stays_stored(m, &choice, self.ledger.machine());
        let frozen = m.is_bare() && choice.leaves_weight();
        let dtype = if kept {
            DType::BF16
        } else if frozen {
            DType::F32
        } else {
            self.dtype
        };
        (self.ghost(shape, dtype), full.then(|| self.slot((m, part), rows, cols)))
    }

    /// LoRA of a matrix `[o, i]`: spec, A, B and gradient slots.
    fn update(&mut self, m: &Module) -> Option<(LoraSpec, Tensor, Tensor, (Slot, Slot))> {
        let Choice::Lora { spec, .. } = self.choice(m) else { return None };
        let &[o, i] = m.weight_shape().as_slice() else { return None };
        // LoRA adapts the transpose of an embedding's table `[v, d]`.
        let (o, i) = if m.last() == "embed_tokens" { (i, o) } else { (o, i) };
        if m.a_of() == m.name {
            let a = self.ghost((spec.rank, i), self.dtype);
            self.last_a = Some((m.name.clone(), a, self.slot((m, Part::A), spec.rank, i)));
        }
        let (_, a, slot) = self.last_a.clone().filter(|(of, ..)| of == m.a_of())?;
        let b = self.ghost((o, spec.rank), self.dtype);
        Some((spec, a, b, (slot, self.slot((m, Part::B), o, spec.rank))))
    }
}

impl Weights for Ghosts<'_> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn heads(&self, all: usize) -> usize {
        all / self.cut_over
    }

    fn weight(&mut self, m: &Module) -> ft_base::Result<(Tensor, Option<Slot>)> {
        let m = &self.here(m);
        Ok(self.tensor((m, Part::Weight), &m.weight_shape()))
    }

    fn matrix(&mut self, m: &Module) -> ft_base::Result<(Weight, Option<Slot>)> {
        let m = &self.here(m);
        let fp8 = in_fp8(m, &self.choice(m), self.ledger.machine().fp8);
        match m.weight_shape().as_slice() {
            &[o, i] if is_quantized(m, &self.choice(m), self.quantize) => {
                let blocks = QuantizedMatrix::ghost(self.ledger, (o, i), self.dtype, self.dtype);
                Ok((Weight::of(Source::Blocks(Arc::new(blocks)), fp8)?, None))
            }
            shape => {
                let rank = room(m, &self.choice(m), self.rooms);
                if let (&[o, i], true) = (shape, rank > 0 && !fp8) {
                    let all = self.ghost(Padded::shape((o, i), rank), self.dtype);
                    return Ok((Weight::Padded(Padded::within(all, (o, i))?), None));
                }
                let (weight, slot) = self.tensor((m, Part::Weight), shape);
                Ok((Weight::of(Source::Dense(weight), fp8)?, slot))
            }
        }
    }

    fn stack(&mut self, modules: &[&Module]) -> ft_base::Result<Option<Stack>> {
        let whole = self.ledger.machine().cuda && self.cut_over == 1;
        let rank = stacked(modules, |m| self.choice(m), whole);
        let Some(last) = modules.last().filter(|_| rank > 0) else { return Ok(None) };
        Ok(Some(Stack { a: self.ghost((rank, last.cols()), self.dtype) }))
    }

    fn bias(&mut self, m: &Module) -> ft_base::Result<(Tensor, Option<Slot>)> {
        let m = &self.here(m);
        Ok(self.tensor((m, Part::Bias), &[m.bias().unwrap_or(0)]))
    }

    fn lora(&mut self, m: &Module, weight: &Weight) -> ft_base::Result<Option<Lora>> {
        let m = &self.here(m);
        let Some((spec, a, b, slots)) = self.update(m) else { return Ok(None) };
        let (o, _) = weight.dims()?;
        let dora = spec.dora.then(|| Dora {
            magnitude: self.ghost((1, o), DType::F32),
            slot: Some(self.slot((m, Part::Magnitude), 1, o)),
            row_squares: self.ghost(o, DType::F32),
        });
        let (scale, dropout) = (peft::scale(&spec), spec.dropout);
        Ok(Some(Lora { a, b, slots: Some(slots), scale, dropout, stream: 0, columns: None, dora }))
    }

    fn embedding_lora(&mut self, m: &Module) -> ft_base::Result<Option<EmbeddingLora>> {
        let update = self.update(m);
        Ok(update.map(|(spec, a, b, slots)| EmbeddingLora {
            a,
            b,
            slots: Some(slots),
            scale: peft::scale(&spec),
        }))
    }

    fn rows(&mut self, m: &Module) -> ft_base::Result<Option<Rows>> {
        let Choice::Rows { count, .. } = self.choice(m) else { return Ok(None) };
        let (index, values) = (self.ghost(count, DType::U32), self.ghost((count, m.cols()), self.dtype));
        let slot = Some(self.slot((m, Part::Rows), count, m.cols()));
        Ok(Some(Rows { ids: Arc::default(), index, values, slot }))
    }

    fn own(&self, experts: &[MlpTree], unit: usize) -> Option<(Range<usize>, LocalExperts)> {
        Some(owned(experts, unit, self.own.clone()?, |m| self.choice(m)))
    }

    /// Run lengths of adjacent experts with equal choices.
    fn alike(&self, experts: &[MlpTree]) -> Vec<usize> {
        let mut out: Vec<usize> = Vec::new();
        let mut last = None;
        for e in experts {
            let choices = [Some(&e.gate), e.up.as_ref(), Some(&e.down)].map(|m| m.map(|m| self.choice(m)));
            match out.last_mut() {
                Some(n) if last == Some(choices) => *n += 1,
                _ => out.push(1),
            }
            last = Some(choices);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapters::Selection;
    use crate::model::decoder::Builder;
    use crate::model::modules::LayerTree;
    use crate::model::tiny_qwen3_5_moe;
    use ft_recipe::Recipe;

    /// Gate and up of fused experts have one A, with one gradient.
    #[test]
    fn the_shared_a_of_fused_experts_is_shared_in_the_plan() -> anyhow::Result<()> {
        let config = tiny_qwen3_5_moe();
        let text = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"experts\"]\n\
                    [data]\ntrain = [{ source = \"x\", format = \"text\" }]\n";
        let selection = Selection::from_rules(&config, &Recipe::parse(text, "r.toml", &[])?.train)?;
        let ledger = Ledger::new(Machine { width: 4, stored: 4, ..Machine::default() });
        let choices = selection.modules.iter().map(|(m, c)| (m.name.as_str(), *c));
        let mut ghosts = Ghosts::new(&ledger, DType::F32, choices, (Quantize::None, true));
        let layer = Builder::new(&config, &mut ghosts).layer(0, &LayerTree::of(&config, 0))?;
        let slots = layer.linears().into_iter().filter_map(|l| l.lora.as_ref()?.slots);
        let [gate, up, down, ..] = slots.map(|(a, _)| a.offset).collect::<Vec<_>>()[..] else {
            anyhow::bail!("an expert without adapters")
        };
        assert!(gate == up && up != down, "{gate}, {up}, {down}");
        Ok(())
    }
}
