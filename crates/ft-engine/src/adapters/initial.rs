//! Base-derived LoRA initialization (`lora.init`), and export of the resulting adapters for the original
//! base.
//!
//! With `s B0 A0` subtracted from the base, the trained weight is `W - s B0 A0 + s B A = W + s [B, -B0] [A;
//! A0]`: an adapter of twice the LoRA rank and equal scale, as written by PEFT with
//! `path_initial_model_for_weight_conversion`.

use super::peft;
use super::{Choice, Error, Selection};
use crate::load::{Base, Initials};
use crate::model::modules::{Group, Kind, Module};
use crate::quant;
use ft_recipe::{Decomposition, Quantize, Recipe};

/// A base with `model.quantize` and `lora.init` of a recipe.
///
/// # Errors
/// `lora.init` on a tied head.
pub fn prepared(base: Base, recipe: &Recipe, selection: &Selection) -> Result<Base, Error> {
    let nf4 = recipe.model.quantize == Quantize::Nf4;
    Ok(base.in_nf4(nf4).with_initials(initials(recipe, selection)?))
}

/// Initial factors for a recipe's `lora.init`, covering linears; with "loftq", 4-bit linears only. Other
/// modules use the default initialization, as in PEFT.
///
/// # Errors
/// A tied head, since the weight is shared with the embedding.
fn initials(recipe: &Recipe, selection: &Selection) -> Result<Option<Initials>, Error> {
    let Some(how) = recipe.lora.init.decomposition() else { return Ok(None) };
    let mut of = Vec::new();
    for (m, spec) in selection.loras() {
        let takes = from_base(recipe, m);
        if takes && selection.tied && m.group == Group::Head && how.changes_base() {
            let why = format!(
                "lora.init = \"{}\" on {}: its weight is the embedding's too (tie_word_embeddings)\n  hint: leave the \
                 head out of the rules",
                how.word(),
                m.name
            );
            return Err(Error::Key { place: recipe.place("lora.init").to_string(), why });
        }
        if takes {
            of.push((m.name.clone(), spec.rank, peft::scale(spec)));
        }
    }
    Ok(Some(Initials::new(how, recipe.run.seed, of.into_iter())))
}

/// Whether `lora.init` initializes a module's LoRA from the base weight.
pub fn from_base(recipe: &Recipe, m: &Module) -> bool {
    let how = recipe.lora.init.decomposition();
    how.is_some_and(|how| {
        // A of an adapter of all experts is shared by two linears.
        matches!(m.kind, Kind::Linear { .. })
            && m.slice().is_none()
            && (how.changes_base() || quant::applies_to(m))
    })
}

/// Description of a base-derived `lora.init`.
pub fn line(how: Decomposition, quantized: bool) -> String {
    let start = match how {
        Decomposition::Pissa => "pissa: A and B start from the top singular vectors of each weight",
        Decomposition::Olora => "olora: A and B start from the first part of each weight's QR decomposition",
        Decomposition::Loftq => {
            return "loftq: A and B start from the top singular vectors of what NF4 loses of each weight. The adapter \
                    applies to the base in NF4."
                .into();
        }
    };
    let quantized = match quantized {
        false => "",
        true => {
            " Training quantizes the remainder, and the file will not contain that rounding: use the adapter on the \
             unquantized base."
        }
    };
    format!(
        "{start}, and the frozen weight is the remainder. The adapter written has twice the rank and applies to the \
         original base.{quantized}"
    )
}

impl Selection {
    /// Selection of the exported adapter: twice the LoRA rank for modules with a residual base weight.
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
