//! Trained token rows of the embedding and of an untied head: PEFT's `trainable_token_indices`.
//!
//! PEFT stores the new values of the rows, in the order of the list in the config; for a tied model, under
//! the embedding.

use super::selection::{Choice, Selection};
use super::{Error, PeftConfig};
use crate::model::Config;
use crate::model::modules::{Group, Module};
use ft_data::Tokenizer;
use ft_recipe::{Rule, Token};
use std::collections::HashMap;
use std::sync::Arc;

/// Tokens with trained rows.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    /// Tokens named by a rule.
    named: Option<Named>,
    /// Token ids by module, after lookup.
    of: Vec<(String, Arc<Vec<u32>>)>,
}

/// Tokens as named by a rule.
#[derive(Clone, Debug)]
struct Named {
    list: Vec<Token>,
    rule: usize,
    place: String,
}

impl Named {
    fn fail(&self, why: String) -> Error {
        Error::Rule { place: self.place.clone(), rule: self.rule, why }
    }
}

impl Tokens {
    /// Token ids with trained rows in a module; empty before lookup.
    pub fn of(&self, module: &str) -> Arc<Vec<u32>> {
        self.of.iter().find(|(m, _)| m == module).map_or_else(Arc::default, |(_, ids)| Arc::clone(ids))
    }

    /// Whether all tokens are given by id, so that no tokenizer is needed.
    pub fn are_numbers(&self) -> bool {
        let number = |t: &Token| matches!(t, Token::Id(_));
        self.named.as_ref().is_none_or(|named| named.list.iter().all(number))
    }

    /// Modules with trained rows, and their token ids.
    pub fn modules(&self) -> impl Iterator<Item = (&str, &[u32])> {
        self.of.iter().map(|(m, ids)| (m.as_str(), ids.as_slice()))
    }
}

/// Whether a module has one row per token.
fn has_rows(m: &Module) -> bool {
    matches!(m.group, Group::Embedding | Group::Head)
}

impl Selection {
    /// Applies a rule for token rows: the embedding, and the head unless tied.
    pub(super) fn choose_tokens(&mut self, number: usize, rule: &Rule) -> Result<(), Error> {
        let list = rule.tokens.clone().unwrap_or_default();
        let named = Named { list, rule: number, place: rule.place.to_string() };
        if let Some(first) = self.tokens.named.as_ref() {
            let why =
                format!("train.{} is for tokens already\n  hint: one rule with all of them", first.rule);
            return Err(named.fail(why));
        }
        let (count, lr_scale) = (named.list.len(), rule.lr_scale);
        for (m, c) in &mut self.modules {
            if !has_rows(m) || (self.tied && m.group == Group::Head) {
                continue;
            }
            if *c != Choice::Freeze {
                return Err(named.fail(twice(m)));
            }
            *c = Choice::Rows { count, lr_scale };
        }
        self.tokens.named = Some(named);
        Ok(())
    }

    /// Refuses rules that train the same weights in addition to token rows.
    pub(super) fn tokens_alone(&self) -> Result<(), Error> {
        let Some(named) = &self.tokens.named else { return Ok(()) };
        for (m, c) in self.modules.iter().filter(|(m, _)| has_rows(m)) {
            let head = self.tied && m.group == Group::Head && *c == Choice::Freeze;
            if !head && !matches!(c, Choice::Rows { .. }) {
                return Err(named.fail(twice(m)));
            }
        }
        Ok(())
    }

    /// Looks up the tokens named by a rule.
    ///
    /// # Errors
    /// An unknown token, or one without a row in the embedding.
    pub fn look_up(&mut self, config: &Config, tokenizer: Option<&Tokenizer>) -> Result<(), Error> {
        let vocab = config.vocab;
        let Some(named) = &self.tokens.named else { return Ok(()) };
        let mut ids: Vec<u32> = Vec::new();
        let mut seen = HashMap::new();
        for token in &named.list {
            let id = match (token, tokenizer) {
                (Token::Id(id), _) => *id,
                (Token::Text(text), Some(tokenizer)) => tokenizer.token_to_id(text).ok_or_else(|| {
                    named.fail(format!(
                        "tokens: {token} is no token of the model's tokenizer\n  hint: another text"
                    ))
                })?,
                (Token::Text(_), None) => {
                    let why =
                        "the model has no tokenizer.json, which knows texts\n  hint: name tokens by number";
                    return Err(named.fail(format!("tokens: {token}: {why}")));
                }
            };
            if id as usize >= vocab {
                let rows = id as usize + named.list.len();
                return Err(named.fail(format!(
                    "tokens: {token} is token {id}, and the embedding has {vocab} rows\n  hint: make the model larger first, \
                     with transformers: model.resize_token_embeddings({rows}) and save_pretrained, its tokenizer beside it, \
                     and name that folder in model.source"
                )));
            }
            if let Some(other) = seen.insert(id, token) {
                let why = format!("tokens: {other} and {token} are one token\n  hint: leave one of them out");
                return Err(named.fail(why));
            }
            ids.push(id);
        }
        let ids = Arc::new(ids);
        let rows = self.modules.iter().filter(|(_, c)| matches!(c, Choice::Rows { .. }));
        self.tokens.of = rows.map(|(m, _)| (m.name.clone(), Arc::clone(&ids))).collect();
        Ok(())
    }

    /// Applies `trainable_token_indices` of a PEFT adapter.
    pub(super) fn tokens_of(&mut self, config: &Config, peft: &PeftConfig) -> Result<(), Error> {
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
                return Err(fail(twice(m)));
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
            Some((m, _)) if config.tied && !self.tokens.of.is_empty() => Err(fail(twice(m))),
            _ => Ok(()),
        }
    }

    /// Whether a tied head's rows train together with the embedding's.
    pub fn tied_in_rows(&self) -> bool {
        self.tied && self.modules.iter().any(|(_, c)| matches!(c, Choice::Rows { .. }))
    }
}

fn twice(m: &Module) -> String {
    format!(
        "{} trains otherwise too, and rows of new tokens train alone\n  hint: leave the embedding and the head out of the \
         other rules, or train them without new_tokens",
        m.name
    )
}
