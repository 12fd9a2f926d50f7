//! Selection by the `adapter_config.json` of a PEFT adapter.

use super::config::{PeftConfig, is_suffix};
use crate::adapters::Error;
use crate::adapters::selection::rules::check_lora;
use crate::adapters::selection::tokens::{has_rows, trains_twice};
use crate::adapters::{Choice, Selection};
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module, Parameter};
use std::sync::Arc;

impl Selection {
    /// Selection described by a PEFT adapter's config.
    pub fn from_peft(config: &Config, peft: &PeftConfig) -> Result<Self, Error> {
        let mut s = Self::frozen(config);
        let named = |target: &&String| {
            let is = |p: &Arc<Parameter>| peft.spellings(&p.name).iter().any(|name| is_suffix(name, target));
            s.modules.iter().any(|(m, _)| m.parameter.as_ref().is_some_and(is))
        };
        if let Some(other) = peft.parameters.iter().find(|t| !named(t)) {
            let why = format!(
                "target_parameters: {other}: no parameter that ft adapts in {}\n  hint: merge it into its base with \
                 PEFT (merge_and_unload), and name the merged model in model.source",
                config.family.model_type
            );
            return Err(Error::Peft { file: peft.file.clone(), why });
        }
        for (m, c) in &mut s.modules {
            let adapted = match &m.parameter {
                Some(p) => peft.spellings(&p.name).iter().any(|name| peft.adapts(name)),
                None => peft.chooses(m)?,
            };
            if peft.spellings(&m.name).iter().any(|name| peft.saves(name)) {
                *c = Choice::Full { lr_scale: 1.0 };
            } else if adapted {
                let mut spec = peft.spec_of(m)?;
                if matches!(m.kind, Kind::Embedding { .. }) {
                    // PEFT has a single dropout for all modules and applies it to linears only.
                    spec.dropout = 0.0;
                }
                check_lora(m, spec).map_err(|why| Error::Peft { file: peft.file.clone(), why })?;
                *c = Choice::Lora { spec, lr_scale: 1.0 };
            }
        }
        s.tie().map_err(|c| Error::Peft { file: peft.file.clone(), why: c.why })?;
        s.tokens_of(config, peft)?;
        Ok(s)
    }

    /// Applies `trainable_token_indices` of a PEFT adapter.
    pub(crate) fn tokens_of(&mut self, config: &Config, peft: &PeftConfig) -> Result<(), Error> {
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
