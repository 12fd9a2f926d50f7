//! Checks of `[[train]]` rules, and of `[lora]` against them.

use super::context::Cross;
use crate::keys::{Decomposition, Method, Quantize, Recipe, Rule, TOKENS};

impl Cross<'_, '_> {
    pub(super) fn rules(&mut self, recipe: &Recipe) {
        if recipe.train.is_empty()
            && recipe.lora.init.adapter().is_none()
            && self.all_good(&["train", "train.0", "lora", "lora.init"])
        {
            self.report(
                "train",
                "nothing trains: there is no [[train]] rule and no adapter in lora.init".into(),
                "the usual rule is [[train]] with modules = [\"attention\", \"mlp\"]",
            );
        }
        let freezes = |r: &Rule| r.is(Method::Freeze);
        if !recipe.train.is_empty() && recipe.train.iter().all(freezes) && self.checker.bad.is_empty() {
            self.report(
                "train",
                "nothing trains: every [[train]] rule freezes".into(),
                "what no rule matches is frozen anyway; add a rule with method = \"lora\" or \"full\" before them",
            );
        }
        for (i, rule) in recipe.train.iter().enumerate() {
            let path = format!("train.{i}");
            if !self.all_good(&[&format!("{path}.method"), &path]) {
                continue;
            }
            if rule.is_of_tokens() {
                self.tokens(&path, rule);
            }
            self.narrowed(recipe, &path, rule);
            self.norms(&path, rule);
        }
    }

    /// LoRA on norms.
    fn norms(&mut self, path: &str, rule: &Rule) {
        if rule.is(Method::Lora) && rule.modules.iter().any(|m| m == "norms") {
            self.report(
                &format!("{path}.modules"),
                "LoRA needs linear layers, and norms are none".into(),
                "give norms a rule of their own with method = \"full\"",
            );
        }
    }

    /// Checks the keys of a rule for token rows.
    fn tokens(&mut self, path: &str, rule: &Rule) {
        let (modules, tokens) = (format!("{path}.modules"), format!("{path}.tokens"));
        if rule.modules.len() > 1 {
            let message = format!("\"{TOKENS}\" is of single rows, and the rule names modules too");
            self.report(&modules, message, "give the tokens a rule of their own");
        }
        if rule.tokens.is_none() && self.all_good(&[&tokens]) {
            let message = format!("{path} says not which tokens: {tokens} is missing");
            self.report(path, message, "such as tokens = [\"<think>\", \"</think>\"]");
        }
    }

    /// Rejects products of a rule's numbers that are 0 or infinite in f32.
    fn narrowed(&mut self, recipe: &Recipe, path: &str, rule: &Rule) {
        let bad = |x: f64| !(x as f32 > 0.0 && (x as f32).is_finite());
        let keys = ["lr_scale", "rank", "alpha"].map(|k| format!("{path}.{k}"));
        let others = ["optimizer.lr", "optimizer", "lora", "lora.rank", "lora.alpha"];
        if rule.method == Method::Freeze
            || !self.all_good(&[&keys[0], &keys[1], &keys[2]])
            || !self.all_good(&others)
        {
            return;
        }
        let base = recipe.optimizer.peak_lr(rule.method);
        let lr = base * rule.lr_scale;
        if bad(lr) {
            let message = format!(
                "the learning rate {base:?} x lr_scale {:?} is {:?} in f32, which it is computed in",
                rule.lr_scale, lr as f32
            );
            self.report(&keys[0], message, "a learning rate is usually between 1e-6 and 1e-2");
        }
        let spec = rule.spec();
        let scale = spec.alpha / if spec.rslora { (spec.rank as f64).sqrt() } else { spec.rank as f64 };
        if rule.is(Method::Lora) && bad(scale) {
            let message = format!("alpha over rank is {:?} in f32, which it is computed in", scale as f32);
            self.report(&keys[2], message, "alpha is usually once or twice the rank");
        }
    }

    /// Conflicts of `lora.init` with further keys.
    pub(super) fn init(&mut self, recipe: &Recipe) {
        const KEY: &str = "lora.init";
        let Some(d) = recipe.lora.init.decomposition() else { return };
        if !self.all_good(&["lora", KEY, "model", "model.quantize", "model.cache", "train"]) {
            return;
        }
        let word = d.word();
        if d == Decomposition::Loftq && recipe.model.quantize == Quantize::None {
            let message = "loftq begins with what quantizing the weights loses, and model.quantize = \
                \"none\" loses nothing";
            self.report(KEY, message.into(), "write model.quantize = \"nf4\", or leave init out");
        }
        if d.changes_base() && recipe.model.cache.is_some() {
            let message =
                format!("with {KEY} = \"{word}\" other weights are quantized than model.cache keeps");
            self.report(KEY, message, "leave model.cache out");
        }
    }
}
