//! Trained token rows of the embedding and of an untied head: PEFT's `trainable_token_indices`.
//!
//! PEFT stores the new values of the rows, in the order of the list in the config; for a tied model, under
//! the embedding.

use crate::adapters::Error;
use crate::model::modules::{Group, Module};
use ft_recipe::Token;
use std::sync::Arc;

/// Tokens with trained rows.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    /// Tokens named by a rule.
    pub(super) named: Option<Named>,
    /// Token ids by module, after lookup.
    pub(crate) of: Vec<(String, Arc<Vec<u32>>)>,
}

/// Tokens as named by a rule.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) list: Vec<Token>,
    pub(super) rule: usize,
    pub(super) place: String,
}

impl Named {
    pub(super) fn fail(&self, why: String) -> Error {
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
pub(crate) fn has_rows(m: &Module) -> bool {
    matches!(m.group, Group::Embedding | Group::Head) && !m.is_score()
}

/// Error for token rows of a module trained by another rule too.
pub(crate) fn trains_twice(m: &Module) -> String {
    format!(
        "{} trains otherwise too, and rows of new tokens train alone\n  hint: leave the embedding and the head \
         out of the other rules, or train them without new_tokens",
        m.name
    )
}
