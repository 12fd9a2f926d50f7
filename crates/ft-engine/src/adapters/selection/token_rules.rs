//! Rules for token rows: choice of modules, and lookup of the tokens.

use super::choice::Choice;
use super::selected::Selection;
use super::tokens::{Named, has_rows, trains_twice};
use crate::adapters::Error;
use crate::model::Config;
use crate::model::modules::{Group, Module};
use ft_data::Tokenizer;
use ft_recipe::{Rule, Token};
use std::collections::HashMap;
use std::sync::Arc;

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
                return Err(named.fail(trains_twice(m)));
            }
            *c = Choice::Rows { count, lr_scale };
        }
        self.tokens.named = Some(named);
        Ok(())
    }

    /// Refuses rules training the same weights in addition to token rows.
    pub(super) fn tokens_alone(&self) -> Result<(), Error> {
        let Some(named) = &self.tokens.named else { return Ok(()) };
        for (m, c) in self.modules.iter().filter(|(m, _)| has_rows(m)) {
            let head = self.tied && m.group == Group::Head && *c == Choice::Freeze;
            if !head && !matches!(c, Choice::Rows { .. }) {
                return Err(named.fail(trains_twice(m)));
            }
        }
        Ok(())
    }

    /// Looks up the tokens named by a rule. The padding token in an untied embedding is a warning in `notes`.
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
                    "tokens: {token} is token {id}, and the embedding has {vocab} rows\n  hint: make the model larger \
                     first, with transformers: model.resize_token_embeddings({rows}) and save_pretrained, its \
                     tokenizer beside it, and name that folder in model.source"
                )));
            }
            if let Some(other) = seen.insert(id, token) {
                let why = format!("tokens: {other} and {token} are one token\n  hint: leave one of them out");
                return Err(named.fail(why));
            }
            ids.push(id);
        }
        let in_table =
            |(m, c): &(Module, Choice)| m.group == Group::Embedding && matches!(c, Choice::Rows { .. });
        let alone = !self.tied && self.modules.iter().any(in_table);
        if let Some(token) = config.pad.filter(|_| alone).and_then(|pad| seen.get(&pad)) {
            let note = named.fail(format!(
                "tokens: {token} is the padding token, and its row of the embedding gets no gradient\n  hint: leave it \
                 out, or set pad_token_id to another token in model.override"
            ));
            self.notes.push(note.to_string());
        }
        let ids = Arc::new(ids);
        let rows = self.modules.iter().filter(|(_, c)| matches!(c, Choice::Rows { .. }));
        self.tokens.of = rows.map(|(m, _)| (m.name.clone(), Arc::clone(&ids))).collect();
        Ok(())
    }

    /// Whether a tied head's rows train together with the embedding's.
    pub fn tied_in_rows(&self) -> bool {
        self.tied && self.modules.iter().any(|(_, c)| matches!(c, Choice::Rows { .. }))
    }
}
