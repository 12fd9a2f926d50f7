//! Adapters on fused experts, whose LoRA PEFT keeps in tensors for all experts of a layer.

use super::choice::Choice;
use super::rules::Conflict;
use super::selected::Selection;
use super::trained::FusedPart;
use crate::model::modules::{Kind, Module};
use std::collections::HashMap;

/// Places of adapted parameters in PEFT's files.
pub(super) struct Places {
    /// By parameter: module in PEFT's files, and number of experts.
    parameters: HashMap<String, (String, usize)>,
}

impl Places {
    /// Places of the adapters of a selection. Of several adapted parameters of a module, PEFT nests the earlier ones
    /// below the later ones.
    pub(super) fn of_selection(s: &Selection) -> Self {
        let mut counts: HashMap<String, usize> = HashMap::new();
        let mut adapted: Vec<String> = Vec::new();
        for (m, choice) in s.modules.iter().filter(|(m, _)| m.is_fused()) {
            let Some(name) = m.parameter() else { continue };
            let count = counts.entry(name.clone()).or_default();
            *count += 1;
            if *count == 1 && matches!(choice, Choice::Lora { .. }) {
                adapted.push(name);
            }
        }
        let owner = |name: &str| name.rsplit_once('.').map_or(String::new(), |(owner, _)| owner.to_string());
        let place = |(i, name): (usize, &String)| {
            let owner_name = owner(name);
            // the parameters of a module follow one another
            let later = adapted[i + 1..].iter().take_while(|n| owner(n) == owner_name).count();
            let module = owner_name + &".base_layer".repeat(later);
            (name.clone(), (module, counts.get(name).copied().unwrap_or(0)))
        };
        Self { parameters: adapted.iter().enumerate().map(place).collect() }
    }

    /// Place of a module's adapter; `None` for modules that are not fused.
    pub(super) fn of(&self, m: &Module) -> Option<FusedPart> {
        if !m.is_fused() {
            return None;
        }
        let (module, experts) = self.parameters.get(&m.parameter()?)?.clone();
        Some(FusedPart { module, expert: m.expert?, experts })
    }
}

impl Selection {
    /// Refuses adapters that PEFT's format cannot hold: of some experts of a fused parameter, with dropout or DoRA on
    /// parameters, and parameters that train in full beside an adapter.
    pub(crate) fn check_parameters(&self) -> Result<(), Conflict> {
        let mut first: HashMap<String, usize> = HashMap::new();
        let refuse = |at: usize, why: &str| {
            let why = format!("{}: {why}", self.modules[at].0.name);
            Err(Conflict { modules: [at, at], why })
        };
        let lora = |c: &Choice| match c {
            Choice::Lora { spec, .. } => Some(*spec),
            _ => None,
        };
        let dora = self.modules.iter().any(|(_, c)| lora(c).is_some_and(|s| s.dora));
        let full = self.everything_full();
        for (at, (m, choice)) in self.modules.iter().enumerate() {
            let apart = m.is_fused() || matches!(m.kind, Kind::Vector { .. });
            if apart && !full && matches!(choice, Choice::Full { .. }) {
                return refuse(
                    at,
                    "it cannot train in full beside an adapter: PEFT's format has no place for it\n  hint: leave it \
                     out of the rules, or train every module in full",
                );
            }
            let Some(parameter) = m.parameter() else { continue };
            if let Some(spec) = lora(choice) {
                if dora {
                    let why = "LoRA on it beside DoRA: PEFT has one switch for both, and no DoRA on parameters\n  hint: \
                               dora = false in all rules, or leave it out of them";
                    return refuse(at, why);
                }
                if spec.dropout > 0.0 {
                    let why = "PEFT has no dropout on parameters\n  hint: dropout = 0 in a rule of its own";
                    return refuse(at, why);
                }
            }
            let at_first = *first.entry(parameter).or_insert(at);
            if self.modules[at_first].1 != *choice {
                let why = "all experts of this model are one parameter, and train in the same way\n  hint: leave out \
                           experts = [..]";
                return refuse(at, why);
            }
        }
        Ok(())
    }
}
