//! Selection by the `adapter_config.json` of a PEFT adapter.

use super::config::{MERGE, PeftConfig, is_suffix};
use crate::adapters::Error;
use crate::adapters::selection::rules::check_lora;
use crate::adapters::selection::tokens::{has_rows, trains_twice};
use crate::adapters::{Choice, Selection};
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module, Parameter};
use std::sync::Arc;

impl Selection {
    /// Selection described by a PEFT adapter's config; `config` has its layout ([`PeftConfig::set_layout`]).
    pub fn from_peft(config: &Config, peft: &PeftConfig) -> Result<Self, Error> {
        let mut s = Self::frozen(config);
        s.parameters_of(peft)?;
        let named = |target: &&String| {
            let is = |p: &Arc<Parameter>| peft.spellings(&p.name).iter().any(|name| is_suffix(name, target));
            s.modules.iter().any(|(m, _)| m.parameter.as_ref().is_some_and(is))
        };
        if let Some(other) = peft.parameters.iter().find(|t| !named(t)) {
            let why = format!(
                "target_parameters: {other}: no parameter that ft adapts in {}\n  hint: {MERGE}",
                config.family.model_type
            );
            return Err(Error::Peft { file: peft.file.clone(), why });
        }
        let ties = s.tied && peft.ties_lora()?;
        for (m, c) in &mut s.modules {
            let of_table = ties && matches!(m.group, Group::Embedding | Group::Head);
            let adapted = match &m.parameter {
                Some(p) => peft.spellings(&p.name).iter().any(|name| peft.adapts(name)),
                None => of_table || peft.chooses(m)?,
            };
            if peft.spellings(m.adapted_name()).iter().any(|name| peft.saves(name)) {
                *c = Choice::Full { lr_scale: 1.0 };
            } else if adapted {
                let mut spec = peft.spec_of(m)?;
                if matches!(m.kind, Kind::Embedding { .. }) {
                    // PEFT has a single dropout for all modules and applies it to linears only.
                    spec.dropout = 0.0;
                }
                check_lora(m, spec).map_err(|why| {
                    // The hint is of rules.
                    let why = format!("{}\n  hint: {MERGE}", why.lines().next().unwrap_or_default());
                    Error::Peft { file: peft.file.clone(), why }
                })?;
                *c = Choice::Lora { spec, lr_scale: 1.0 };
            }
        }
        s.tie().map_err(|c| Error::Peft { file: peft.file.clone(), why: c.why })?;
        s.tokens_of(config, peft)?;
        Ok(s)
    }

    /// Makes parameters of the linears with weights named by a PEFT adapter in `target_parameters`.
    fn parameters_of(&mut self, peft: &PeftConfig) -> Result<(), Error> {
        let is_whole = |m: &Module| m.parameter.is_none() && matches!(m.kind, Kind::Linear { .. });
        for (m, _) in self.modules.iter_mut().filter(|(m, _)| is_whole(m)) {
            let weight = m.weight_name();
            if !peft.spellings(&weight).iter().any(|name| peft.adapts(name)) {
                continue;
            }
            if peft.chooses(m)? {
                let why =
                    format!("target_parameters: {weight}: target_modules names it too\n  hint: {MERGE}");
                return Err(Error::Peft { file: peft.file.clone(), why });
            }
            let name = m.name.clone();
            *m = m.clone().into_parameter(&name);
        }
        Ok(())
    }

    /// Applies `trainable_token_indices` of a PEFT adapter.
    fn tokens_of(&mut self, config: &Config, peft: &PeftConfig) -> Result<(), Error> {
        let fail = |why: String| Error::Peft {
            file: peft.file.clone(),
            why: format!("trainable_token_indices: {why}"),
        };
        for (target, ids) in peft.tokens() {
            let is = |m: &Module| peft.spellings(&m.name).iter().any(|name| name.ends_with(target.as_str()));
            let mut hits = self.modules.iter_mut().filter(|(m, _)| is(m));
            let (Some((m, c)), None) = (hits.next(), hits.next()) else {
                return Err(fail(format!("{target:?} names no one module of this model")));
            };
            if !has_rows(m) || (config.tied && m.group == Group::Head) {
                let tied = if has_rows(m) { " of a tied model" } else { "" };
                return Err(fail(format!("not built yet: rows of {}{tied}", m.name)));
            }
            if *c != Choice::Freeze {
                return Err(fail(trains_twice(m)));
            }
            let rows = m.rows();
            if let Some(id) = ids.iter().find(|id| **id as usize >= rows) {
                return Err(fail(format!("{} has {rows} rows, and none for token {id}", m.name)));
            }
            *c = Choice::Rows { count: ids.len(), lr_scale: 1.0 };
            self.tokens.of.push((m.name.clone(), Arc::clone(ids)));
        }
        let head = |(m, c): &&(Module, Choice)| m.group == Group::Head && *c != Choice::Freeze;
        match self.modules.iter().find(head) {
            Some((m, _)) if config.tied && !self.tokens.of.is_empty() => Err(fail(trains_twice(m))),
            _ => Ok(()),
        }
    }
}
