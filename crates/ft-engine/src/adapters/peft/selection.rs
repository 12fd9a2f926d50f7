//! Selection by the `adapter_config.json` of a PEFT adapter.

use super::config::PeftConfig;
use crate::adapters::Error;
use crate::adapters::selection::rules::check_lora;
use crate::adapters::selection::tokens::{has_rows, trains_twice};
use crate::adapters::{Choice, Selection};
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module};
use ft_recipe::LoraSpec;
use std::sync::Arc;

impl Selection {
    /// Selection described by a PEFT adapter's config.
    pub fn from_peft(config: &Config, peft: &PeftConfig) -> Result<Self, Error> {
        let mut s = Self::frozen(config);
        let targets = peft.targets();
        for (m, c) in &mut s.modules {
            if peft.saves(&m.name) {
                *c = Choice::Full { lr_scale: 1.0 };
            } else if let Some(name) = m.parameter() {
                if peft.adapts(&name) {
                    let spec = LoraSpec { dropout: 0.0, ..peft.spec(&name) };
                    check_lora(m, spec).map_err(|why| Error::Peft { file: peft.file.clone(), why })?;
                    *c = Choice::Lora { spec, lr_scale: 1.0 };
                }
            } else if targets.matches(m) {
                let mut spec = peft.spec(&m.name);
                if matches!(m.kind, Kind::Embedding { .. }) {
                    // PEFT has a single dropout for all modules and applies it to linears only.
                    spec.dropout = 0.0;
                }
                check_lora(m, spec).map_err(|why| Error::Peft { file: peft.file.clone(), why })?;
                *c = Choice::Lora { spec, lr_scale: 1.0 };
            }
        }
        let fail = |why: String| Error::Peft { file: peft.file.clone(), why };
        let names: Vec<String> = s.modules.iter().filter_map(|(m, _)| m.parameter()).collect();
        if let Some(unknown) = peft.unknown_parameter(&names) {
            let why = format!(
                "target_parameters: {unknown:?} is no parameter of this model that PEFT adapts as a whole"
            );
            return Err(fail(why));
        }
        s.tie().and_then(|()| s.check_parameters()).map_err(|c| fail(c.why))?;
        s.tokens_of(config, peft)?;
        Ok(s)
    }

    /// Applies `trainable_token_indices` of a PEFT adapter.
    fn tokens_of(&mut self, config: &Config, peft: &PeftConfig) -> Result<(), Error> {
        let fail = |why: String| Error::Peft {
            file: peft.file.clone(),
            why: format!("trainable_token_indices: {why}"),
        };
        for (target, ids) in peft.tokens() {
            let mut hits = self.modules.iter_mut().filter(|(m, _)| m.name.ends_with(target.as_str()));
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
