//! Checks of a selection against the weights of a base.

use crate::adapters::{Adapter, Choice, Error, Selection, Trained};
use crate::load::{Base, FourBit};
use crate::model::modules::{Kind, Module};

/// Origin of a module's 4-bit weight; `None` if unquantized or trained in full.
pub(super) fn four_bit(base: &Base, m: &Module, choice: &Choice) -> Option<FourBit> {
    if matches!(choice, Choice::Full { .. }) { None } else { base.four_bit(m) }
}

/// Refuses selections incompatible with 4-bit weights:
///
/// * full training of a weight stored in 4 bits only, unless the adapter replaces the weight
/// * base-derived LoRA initialization of a weight stored in 4 bits only
/// * trained rows of a 4-bit weight
/// * 4-bit weights of modules other than linears
/// * `model.quantize` with nothing left to quantize
///
/// # Errors
/// [`Error::Key`].
pub fn check_full(base: &Base, selection: &Selection, adapter: Option<&Adapter>) -> Result<(), Error> {
    let mut made = false;
    for (m, choice) in &selection.modules {
        let fail = |why: &str| Err(Error::Key { place: m.name.clone(), why: why.into() });
        if matches!(choice, Choice::Full { .. })
            && base.only_4bit(m)
            && !adapter.is_some_and(|a| a.replaces(m.adapted_name()))
        {
            return fail(
                "its weight is 4-bit and cannot train in full\n  hint: method = \"lora\" for it, or model.source \
                 with its original weights (model.quantize = \"nf4\" keeps all others in 4 bits)",
            );
        }
        let how = four_bit(base, m, choice);
        if let Some(initials) = base.initials().filter(|i| i.has(&m.name) && base.only_4bit(m)) {
            let word = initials.how().word();
            return fail(&format!(
                "its weight is 4-bit already, and lora.init = \"{word}\" is of its original weights\n  hint: \
                 model.source with these, and model.quantize = \"nf4\""
            ));
        }
        if matches!(choice, Choice::Rows { .. }) && how.is_some() {
            return fail(
                "its weight is 4-bit, and rows of it cannot train\n  hint: model.source with its original weights",
            );
        }
        made |= how == Some(FourBit::Quantized);
        if how.is_some() && !matches!(m.kind, Kind::Linear { .. }) {
            return fail("not built yet: a 4-bit weight of anything but a linear");
        }
    }
    if base.quantizes() && !made {
        let why =
            "nothing is left to quantize: every linear of the decoder trains in full\n  hint: leave it out";
        return Err(Error::Key { place: "model.quantize = \"nf4\"".into(), why: why.into() });
    }
    Ok(())
}

/// Names of trained tensors without a gradient, for the check of the first step.
pub fn unreached<'a>(tensors: &'a [Trained], reached: &[bool]) -> Vec<&'a str> {
    tensors.iter().zip(reached).filter(|(_, r)| !**r).map(|(t, _)| t.name.as_str()).collect()
}
