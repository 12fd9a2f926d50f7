//! Updates that begin with what they take of the base (`lora.init`), and their adapters, which are of the base as it is.
//!
//! Where the base lacks `s B0 A0`, what is trained is `W - s B0 A0 + s B A`. That is `W + s [B, -B0] [A; A0]`: an
//! adapter of twice the rank and the same scale, as PEFT writes it with `path_initial_model_for_weight_conversion`.

use super::selection::{Choice, Part, Selection};
use super::{Error, Params, Trained, peft};
use crate::base::{Factors, Initials};
use crate::model::modules::{Group, Kind, Module};
use crate::quant;
use ft_recipe::{Decomposition, Recipe};
use candle_core::Tensor;

/// What a recipe's `lora.init` begins updates with, for those that it can: linears, with "loftq" those in 4 bits. The others
/// begin as by default, as in PEFT.
///
/// # Errors
/// A tied head, whose weight is the embedding's too.
pub fn initials(recipe: &Recipe, selection: &Selection) -> Result<Option<Initials>, Error> {
    let Some(how) = recipe.lora.init.decomposition() else { return Ok(None) };
    let mut of = Vec::new();
    for (m, choice) in &selection.modules {
        let Choice::Lora { spec, .. } = choice else { continue };
        let takes = begins(recipe, m);
        if takes && selection.tied && m.group == Group::Head && how.changes_base() {
            let why = format!(
                "lora.init = \"{}\" on {}: its weight is the embedding's too (tie_word_embeddings)\n  hint: leave the \
                 head out of the rules",
                how.word(),
                m.name
            );
            return Err(Error::Initial { place: recipe.place("lora.init").to_string(), why });
        }
        if takes {
            of.push((m.name.clone(), spec.rank, peft::scale(spec)));
        }
    }
    Ok(Some(Initials::new(how, recipe.run.seed, of.into_iter())))
}

/// Whether an update of a module begins with what `lora.init` makes of its weight.
pub fn begins(recipe: &Recipe, m: &Module) -> bool {
    let how = recipe.lora.init.decomposition();
    how.is_some_and(|how| matches!(m.kind, Kind::Linear { .. }) && (how.changes_base() || quant::takes(m)))
}

/// What the recipe's `lora.init` means, in a line, if it is of the base's weights.
pub fn line(how: Decomposition, quantized: bool) -> String {
    let begin = match how {
        Decomposition::Pissa => "A and B begin as the largest singular values of their weights (pissa)",
        Decomposition::Olora => "A and B begin as the first part of their weights' QR decomposition (olora)",
        Decomposition::Loftq => {
            return "A and B begin as the largest singular values of what 4 bits lose (loftq); the adapter is of the base \
                    in NF4"
                .into();
        }
    };
    let quantized = match quantized {
        false => "",
        true => {
            "; what NF4 loses of the rest is in training and not in that: to be used on the base as it is, not in 4 bits"
        }
    };
    format!(
        "{begin}, which these then lack; the adapter that is written has twice the rank, for the base as it is{quantized}"
    )
}

impl Selection {
    /// The choices of the adapter that is written: twice the rank where the base lacks what an update began with.
    pub fn exported(&self, initials: Option<&Initials>) -> Self {
        let mut out = self.clone();
        let Some(initials) = initials.filter(|i| i.how().changes_base()) else { return out };
        for (m, choice) in &mut out.modules {
            if let Choice::Lora { spec, .. } = choice
                && initials.has(&m.name)
            {
                spec.rank *= 2;
                spec.alpha *= if spec.rslora { std::f64::consts::SQRT_2 } else { 2.0 };
            }
        }
        out
    }
}

impl Params {
    /// What the base lacks of a trained tensor, with the dimension along which an adapter has it after what was trained.
    fn lacking(&self, index: usize) -> Option<(std::sync::Arc<Factors>, usize)> {
        let t = &self.tensors[index];
        let dim = match t.part {
            Part::A => 0,
            Part::B => 1,
            _ => return None,
        };
        Some((self.initials.as_ref()?.taken(&t.module)?, dim))
    }

    /// What an adapter of the base as it is holds of a tensor: `value`, and what that base does not lack.
    ///
    /// # Errors
    /// Another shape than the tensor's.
    pub fn exported(&self, index: usize, value: &Tensor) -> candle_core::Result<Tensor> {
        match self.lacking(index) {
            None => Ok(value.clone()),
            Some((f, 0)) => Tensor::cat(&[value, &f.a.to_device(value.device())?], 0),
            Some((f, dim)) => Tensor::cat(&[value, &f.b.neg()?.to_device(value.device())?], dim),
        }
    }

    /// A trained tensor as an adapter of the base as it is holds it.
    pub fn exported_tensor(&self, index: usize) -> Trained {
        let mut t = self.tensors[index].clone();
        if let Some((_, dim)) = self.lacking(index) {
            t.shape[dim] *= 2;
        }
        t
    }

    /// Of what such an adapter holds, what was trained; `None` where the rest is not what the base lacks.
    ///
    /// # Errors
    /// Another shape than [`Params::exported`] gives.
    pub fn trained_of(&self, index: usize, held: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some((f, dim)) = self.lacking(index) else { return Ok(Some(held.clone())) };
        let rank = held.dim(dim)? / 2;
        let rest = held.narrow(dim, rank, rank)?.flatten_all()?.to_vec1::<f32>()?;
        let lacks = if dim == 0 { f.a.clone() } else { f.b.neg()? };
        let same = rest == lacks.flatten_all()?.to_vec1::<f32>()?;
        same.then(|| held.narrow(dim, 0, rank)?.contiguous()).transpose()
    }
}
