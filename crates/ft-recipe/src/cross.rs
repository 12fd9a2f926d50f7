//! Checks across keys, for values valid alone but not together.

use super::check::Checker;
use super::data_types::*;
use super::keys::*;
use super::kind::TOKENS;
use super::report::At;
use super::tree::{Table, Value};
use super::types::*;
use std::collections::BTreeMap;

/// Limits on tokens per micro-batch and on ranks. They keep byte counts in the plan within 64 bits.
const MICRO_TOKENS: u64 = 1 << 31;
const RANKS: u64 = 1 << 20;

/// Field names of a format that `fields` can rename.
fn fields_of(format: Format) -> &'static [&'static str] {
    match format {
        Format::Messages => &["messages", "tools", "system"],
        Format::Alpaca => &["instruction", "input", "output", "system", "history"],
        Format::Completion => &["prompt", "completion"],
        Format::Text => &["text"],
        Format::Tokens => &["input_ids", "labels"],
    }
}

/// Runs all checks. A check is skipped if a key it depends on already has a problem.
pub(super) fn check(c: &mut Checker<'_>, root: &Table, recipe: &Recipe) {
    let mut x = Cross { c, root };
    x.model(recipe);
    x.rules(recipe);
    x.init(recipe);
    x.sources(recipe);
    x.lengths(recipe);
    x.optimizer(recipe);
    x.in_backward(recipe);
    x.galore(recipe);
    x.master(recipe);
    x.serve(recipe);
}

struct Cross<'a, 'b> {
    c: &'a mut Checker<'b>,
    root: &'a Table,
}

impl Cross<'_, '_> {
    /// Position of `path`, or of the nearest enclosing table in the recipe.
    fn at(&self, path: &str) -> At {
        let mut path = path;
        loop {
            if let Some(node) = self.root.find(path) {
                return node.at.clone();
            }
            match path.rsplit_once('.') {
                Some((above, _)) => path = above,
                None => return At { text: 0, span: 0..0 },
            }
        }
    }

    fn given(&self, path: &str) -> bool {
        self.root.find(path).is_some()
    }

    fn report(&mut self, path: &str, message: String, hint: impl Into<String>) {
        self.c.report(&self.at(path), path, message, &[hint.into()]);
    }

    fn all_good(&self, paths: &[&str]) -> bool {
        paths.iter().all(|p| !self.c.bad.contains(*p))
    }

    fn model(&mut self, recipe: &Recipe) {
        let m = &recipe.model;
        if recipe.memory.scale.is_some()
            && m.dtype != Some(Dtype::F16)
            && self.all_good(&["model.dtype", "memory.scale"])
        {
            let message = "only training in f16 scales the loss".into();
            self.report("memory.scale", message, "leave it out, or write model.dtype = \"f16\"");
        }
        if m.cache.is_none() || !self.all_good(&["model", "model.cache", "model.quantize", "model.weights"]) {
            return;
        }
        if m.quantize == Quantize::None {
            let message = "model.cache does nothing with quantize = \"none\"".into();
            self.report("model.cache", message, "leave cache out, or write quantize = \"nf4\"");
        } else if m.weights == Weights::Random {
            let message = "model.cache does nothing with weights = \"random\"".into();
            self.report("model.cache", message, "leave cache out");
        }
    }

    /// Conflicts of `lora.init` with further keys.
    fn init(&mut self, recipe: &Recipe) {
        const KEY: &str = "lora.init";
        let Some(d) = recipe.lora.init.decomposition() else { return };
        if !self.all_good(&["lora", KEY, "model", "model.quantize", "model.cache", "train"]) {
            return;
        }
        let word = d.word();
        if !recipe.uses_lora_defaults() && !self.c.bad.iter().any(|p| p.starts_with("train")) {
            let message = format!("{KEY} = \"{word}\" does nothing: no [[train]] rule has method = \"lora\"");
            self.report(KEY, message, "leave it out");
        }
        if d == Decomposition::Loftq && recipe.model.quantize == Quantize::None {
            let message = "loftq begins with what quantizing the weights loses, and model.quantize = \"none\" loses nothing";
            self.report(KEY, message.into(), "write model.quantize = \"nf4\", or leave init out");
        }
        if d.changes_base() && recipe.model.cache.is_some() {
            let message =
                format!("with {KEY} = \"{word}\" other weights are quantized than model.cache keeps");
            self.report(KEY, message, "leave model.cache out");
        }
    }

    fn rules(&mut self, recipe: &Recipe) {
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
        let rules_are_good = !self.c.bad.iter().any(|p| p.starts_with("train"));
        for key in
            ["lora.rank", "lora.alpha", "lora.dropout", "lora.rslora", "lora.dora", "optimizer.lr_scale_b"]
        {
            if self.given(key) && !recipe.uses_lora_defaults() && rules_are_good {
                let message = format!("{key} does nothing: no [[train]] rule has method = \"lora\"");
                let hint = match recipe.train.is_empty() {
                    true => "without rules, the config of the adapter in lora.init decides",
                    false => "leave it out",
                };
                self.report(key, message, hint);
            }
        }
        let freezes = |r: &Rule| r.is(Method::Freeze);
        if !recipe.train.is_empty() && recipe.train.iter().all(freezes) && self.c.bad.is_empty() {
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
            if !self.tokens(&path, rule) {
                self.narrowed(recipe, i, rule);
                continue;
            }
            if rule.method != Method::Lora {
                for key in ["rank", "alpha", "dropout", "rslora", "dora"] {
                    let key_path = format!("{path}.{key}");
                    if self.given(&key_path) {
                        let message =
                            format!("{key_path} does nothing with method = \"{}\"", rule.method.word());
                        self.report(
                            &key_path,
                            message,
                            format!("leave {key} out, or write method = \"lora\""),
                        );
                    }
                }
            }
            self.narrowed(recipe, i, rule);
            if rule.method == Method::Freeze && self.given(&format!("{path}.lr_scale")) {
                let message = format!("{path}.lr_scale does nothing with method = \"freeze\"");
                self.report(&format!("{path}.lr_scale"), message, "leave lr_scale out");
            }
            if rule.method == Method::Lora && rule.modules.iter().any(|m| m == "norms") {
                self.report(
                    &format!("{path}.modules"),
                    "LoRA needs linear layers, and norms are none".into(),
                    "give norms a rule of their own with method = \"full\"",
                );
            }
        }
    }

    /// Checks the keys of a rule for token rows. Returns false for such a rule, true for a rule for modules.
    fn tokens(&mut self, path: &str, rule: &Rule) -> bool {
        let key = |name: &str| format!("{path}.{name}");
        let (modules, tokens) = (key("modules"), key("tokens"));
        if !rule.is_of_tokens() {
            if rule.tokens.is_some() && self.all_good(&[&modules]) {
                let message = format!("{tokens} does nothing without modules = [\"{TOKENS}\"]");
                self.report(&tokens, message, "leave it out, or give the tokens a rule of their own");
            }
            return true;
        }
        if rule.modules.len() > 1 {
            let message = format!("\"{TOKENS}\" is of single rows, and the rule names modules too");
            self.report(&modules, message, "give the tokens a rule of their own");
        }
        if rule.tokens.is_none() && self.all_good(&[&tokens]) {
            let message = format!("{path} says not which tokens: {tokens} is missing");
            self.report(path, message, "such as tokens = [\"<think>\", \"</think>\"]");
        }
        for name in ["method", "layers", "experts", "rank", "alpha", "dropout", "rslora", "dora"] {
            if self.given(&key(name)) {
                let message = format!("{} does nothing with modules = [\"{TOKENS}\"]", key(name));
                self.report(&key(name), message, format!("leave {name} out: the rows themselves train"));
            }
        }
        false
    }

    /// Rejects products of a rule's numbers that are 0 or infinite in f32.
    fn narrowed(&mut self, recipe: &Recipe, i: usize, rule: &Rule) {
        let path = format!("train.{i}");
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

    fn sources(&mut self, recipe: &Recipe) {
        let data = &recipe.data;
        if data.train.is_empty() && self.given("data.train") && self.all_good(&["data.train", "data.train.0"])
        {
            self.report("data.train", "data.train is empty".into(), "it needs at least one source");
        }
        let mut global_used = false;
        for (list, sources) in [("train", &data.train), ("eval", &data.eval)] {
            for (i, source) in sources.iter().enumerate() {
                let path = format!("data.{list}.{i}");
                if self.all_good(&[&format!("{path}.format"), &format!("{path}.mask"), "data.mask"]) {
                    global_used |= source.mask.is_none();
                    self.mask(&path, source, data.mask);
                }
                if self.all_good(&[&format!("{path}.format"), &format!("{path}.fields")]) {
                    self.fields(&path, source);
                }
            }
        }
        let sources = || data.train.iter().chain(&data.eval);
        if !self.c.bad.iter().any(|p| p.starts_with("data")) && sources().next().is_some() {
            if data.mask.is_some() && !global_used {
                let message = "data.mask does nothing: every source has a mask of its own".into();
                self.report("data.mask", message, "leave it out");
            }
            if sources().all(|s| matches!(s.format, Some(Format::Text | Format::Tokens))) {
                for key in ["data.chat_template", "data.template"] {
                    let empty = matches!(self.root.find(key).map(|n| &n.value), Some(Value::Table(t)) if t.0.is_empty());
                    if self.given(key) && !empty {
                        let message = format!("{key} does nothing: no source holds conversations");
                        self.report(key, message, "leave it out, or set format = \"messages\"");
                    }
                }
            }
        }
        if recipe.run.eval_every > 0
            && !data.evaluates()
            && self.all_good(&["run.eval_every", "data.eval", "data.eval.0", "data.eval_share"])
        {
            let message = "run.eval_every does nothing: there is nothing to evaluate on".into();
            let hint = "add [[data.eval]], or data.eval_share = 0.1, or leave eval_every out";
            self.report("run.eval_every", message, hint);
        }
        for (key, on) in [("keep_best", recipe.run.keep_best), ("patience", recipe.run.patience > 0)] {
            let all = [
                "run.eval_every",
                "run.keep_best",
                "run.patience",
                "data.eval",
                "data.eval.0",
                "data.eval_share",
            ];
            if on && (!data.evaluates() || recipe.run.eval_every == 0) && self.all_good(&all) {
                let message = format!("run.{key} does nothing: the run does not evaluate on its way");
                let hint = "set run.eval_every, with [[data.eval]] or data.eval_share";
                self.report(&format!("run.{key}"), message, hint);
            }
        }
        let g = &recipe.generate;
        if g.samples > 0
            && !data.evaluates()
            && self.all_good(&["generate.samples", "data.eval", "data.eval.0", "data.eval_share"])
        {
            let message = "generate.samples does nothing: there is nothing to evaluate on".into();
            let hint = "add [[data.eval]], or data.eval_share = 0.1, or leave generate out";
            self.report("generate.samples", message, hint);
        }
        for (key, on) in
            [("generate.temperature", g.temperature > 0.0), ("generate.regex", g.regex.is_some())]
        {
            if on && g.samples == 0 && self.all_good(&["generate.samples", key]) {
                let message = format!("{key} does nothing: generate.samples is 0");
                self.report(key, message, "generate.samples = 100, or leave it out");
            }
        }
        if let Some(Err(e)) = g.regex.as_deref().map(regex::Regex::new) {
            self.report("generate.regex", e.to_string(), "a regular expression of the crate regex");
        }
        if data.eval_share > 0.0 && !data.eval.is_empty() && self.all_good(&["data.eval", "data.eval_share"])
        {
            let message = "data.eval_share and data.eval are both given".into();
            self.report("data.eval_share", message, "leave one of them out");
        }
    }

    fn mask(&mut self, path: &str, source: &Source, global: Option<Mask>) {
        let (Some(mask), Some(format)) = (source.mask.or(global), source.format) else { return };
        let can = format.masks();
        if can.contains(&mask) {
            return;
        }
        let key = if source.mask.is_some() { format!("{path}.mask") } else { "data.mask".to_string() };
        let format = format.word();
        let words: Vec<String> = can.iter().map(|m| format!("\"{}\"", m.word())).collect();
        let message =
            format!("mask = \"{}\" cannot be done for {path}, whose format is \"{format}\"", mask.word());
        self.report(&key, message, format!("\"{format}\" has mask = {}", words.join(" or ")));
    }

    fn fields(&mut self, path: &str, source: &Source) {
        let Some(format) = source.format else { return };
        let known = fields_of(format);
        let mut by_name: BTreeMap<&str, &str> = BTreeMap::new();
        for (ours, theirs) in &source.fields {
            let key = format!("{path}.fields.{ours}");
            if !known.contains(&ours.as_str()) {
                let message = format!("format \"{}\" has no field {ours}", format.word());
                let hint = match super::names::nearest(ours, known.iter().copied()) {
                    Some(near) => {
                        format!("did you mean {near}? Left stands the format's name, right the file's")
                    }
                    None => format!(
                        "its fields are {}; left stands the format's name, right the file's",
                        known.join(", ")
                    ),
                };
                self.report(&key, message, hint);
            } else if let Some(first) = by_name.insert(theirs, ours) {
                let message = format!("{first} and {ours} are both read from the file's field {theirs:?}");
                self.report(&key, message, "give each its own");
            }
        }
    }

    fn lengths(&mut self, recipe: &Recipe) {
        let (batch, micro, ranks) =
            (recipe.run.batch_rows, recipe.run.micro_rows.count(), recipe.parallel.data);
        if self.all_good(&["run", "run.batch_rows", "run.micro_rows", "parallel", "parallel.data"]) {
            // The key ranges prevent overflow. `micro` is 1 if the plan chooses `micro_rows`.
            let unit = micro.saturating_mul(ranks).max(1);
            if batch % unit != 0 {
                let key = if self.given("run.micro_rows") {
                    "run.micro_rows"
                } else if self.given("run.batch_rows") {
                    "run.batch_rows"
                } else {
                    "parallel.data"
                };
                let below = batch / unit * unit;
                let near = if below == 0 {
                    format!("batch_rows = {unit}")
                } else {
                    format!("batch_rows = {below} or {}", below + unit)
                };
                let message = format!(
                    "batch_rows = {batch} does not divide by micro_rows x data ranks = {micro} x {ranks}"
                );
                self.report(key, message, format!("nearest: {near}"));
            }
        }
        let length = recipe.data.max_length;
        if micro.saturating_mul(length) as u64 > MICRO_TOKENS
            && self.all_good(&["run", "run.micro_rows", "data", "data.max_length"])
        {
            let message = format!(
                "a micro-batch of micro_rows x max_length = {micro} x {length} tokens is more than any machine holds"
            );
            self.report("run.micro_rows", message, "fewer rows, or a smaller data.max_length");
        }
        if recipe.parallel.ranks() > RANKS && self.all_good(&["parallel"]) {
            let message = format!("[parallel] asks for {} ranks", recipe.parallel.ranks());
            self.report("parallel", message, format!("their number is a product, of up to {RANKS}"));
        }
        let output = recipe.run.output.to_string_lossy().into_owned();
        if self.all_good(&["run", "run.output"]) && output.contains(['{', '}']) {
            self.report(
                "run.output",
                "run.output has braces that are not {name}".into(),
                "{name} is the only thing that is filled in",
            );
        }
    }

    /// Rejects `optimizer.master = "none"` if nothing trains in full.
    fn master(&mut self, recipe: &Recipe) {
        const KEY: &str = "optimizer.master";
        let rules_are_good = !self.c.bad.iter().any(|p| p.starts_with("train"));
        if recipe.optimizer.master == Master::None
            && self.all_good(&[KEY])
            && rules_are_good
            && recipe.train.iter().all(|r| !r.is(Method::Full))
        {
            let message =
                format!("{KEY} = \"none\" is for what trains in full, and no rule trains anything so");
            self.report(KEY, message, "leave it out: LoRA's master weights are small, and kept");
        }
    }

    /// Checks `[serve]`.
    fn serve(&mut self, recipe: &Recipe) {
        let s = &recipe.serve;
        if !self.all_good(&["serve", "serve.devices", "serve.devices.0", "serve.port"]) {
            return;
        }
        if s.devices.is_empty() && s.port != 8000 {
            let message = "serve.port does nothing: serve.devices is empty".into();
            self.report("serve.port", message, "serve.devices = [\"cuda:1\"], or leave it out");
        }
    }

    /// Conflicts of GaLore with further keys, and GaLore keys without GaLore.
    fn galore(&mut self, recipe: &Recipe) {
        const KEY: &str = "optimizer.name";
        let o = &recipe.optimizer;
        if !self.all_good(&["optimizer", KEY, "parallel", "parallel.zero", "parallel.data", "memory.offload"])
        {
            return;
        }
        let word = o.name.word();
        if !o.name.projects() {
            let changed = [
                ("optimizer.galore_rank", o.galore_rank != 128),
                ("optimizer.galore_gap", o.galore_gap != 200),
                ("optimizer.galore_scale", o.galore_scale != 0.25),
            ];
            for (key, changed) in changed {
                if changed && self.all_good(&[key]) {
                    let message = format!("{key} does nothing with {KEY} = \"{word}\"");
                    self.report(key, message, "leave it out, or write optimizer.name = \"galore\"");
                }
            }
            return;
        }
        if recipe.parallel.zero > 0 && recipe.parallel.data > 1 {
            let message = format!("not built yet: {KEY} = \"{word}\" with states that ranks split");
            self.report("parallel.zero", message, "write parallel.zero = 0");
        }
        if recipe.memory.offloads(Offload::Optimizer) {
            let message = format!("not built yet: {KEY} = \"{word}\" with states on the host");
            self.report("memory.offload", message, "leave \"optimizer\" out of memory.offload");
        }
        let rules_are_good = !self.c.bad.iter().any(|p| p.starts_with("train"));
        if rules_are_good && !recipe.train.is_empty() && recipe.train.iter().all(|r| !r.is(Method::Full)) {
            let message =
                format!("{KEY} = \"{word}\" is for matrices that train in full, and no rule trains any");
            self.report(KEY, message, "a rule with method = \"full\", or optimizer.name = \"adamw\"");
        }
    }

    /// Conflicts of `optimizer.in_backward` with further keys.
    fn in_backward(&mut self, recipe: &Recipe) {
        const KEY: &str = "optimizer.in_backward";
        if !recipe.optimizer.in_backward
            || !self.all_good(&[
                KEY,
                "run.batch_rows",
                "run.micro_rows",
                "run.clip",
                "model.dtype",
                "parallel.data",
            ])
        {
            return;
        }
        let (run, ranks) = (&recipe.run, recipe.parallel.data);
        if run.clip != 0.0 {
            let message = "a layer that is updated in its backward pass cannot be clipped by the norm of all gradients, \
                           which is known after the last layer";
            self.report(KEY, message.into(), "write run.clip = 0, or in_backward = false");
        }
        let one = run.batch_rows / ranks.max(1);
        if run.micro_rows == MicroRows::Auto || run.micro_rows.count() * ranks != run.batch_rows {
            let micro = match run.micro_rows {
                MicroRows::Auto => "\"auto\"".to_string(),
                MicroRows::Rows(n) => n.to_string(),
            };
            let message = format!(
                "a layer is updated with one micro-batch, and a step of batch_rows = {} has micro-batches of \
                 micro_rows = {micro} on {ranks} rank(s)",
                run.batch_rows
            );
            let hint = match one * ranks == run.batch_rows && one > 0 {
                true => format!(
                    "write run.micro_rows = {one}, or run.batch_rows = {}",
                    run.micro_rows.count() * ranks
                ),
                false => format!("write run.batch_rows = {}", run.micro_rows.count() * ranks),
            };
            self.report(KEY, message, hint);
        }
        if recipe.model.dtype == Some(Dtype::F16) {
            let message =
                "in f16 a step whose gradients overflow is done again, which is known after the last layer";
            self.report(KEY, message.into(), "write model.dtype = \"bf16\", or in_backward = false");
        }
    }

    fn optimizer(&mut self, recipe: &Recipe) {
        let both = ["optimizer.warmup_steps", "optimizer.warmup_ratio"];
        if both.iter().all(|p| self.given(p)) {
            self.report(
                both[1],
                "warmup_steps and warmup_ratio are both given".into(),
                "they say the same thing in two ways: leave one out",
            );
        }
        let o = &recipe.optimizer;
        if self.all_good(&["optimizer", "optimizer.min_lr", "optimizer.lr"])
            && let Some(lr) = o.lr
            && o.min_lr > lr
        {
            let message = format!("min_lr = {:?} is above lr = {lr:?}", o.min_lr);
            self.report("optimizer.min_lr", message, "the learning rate falls from lr to min_lr");
        }
        if self.all_good(&["optimizer", "optimizer.schedule", "optimizer.min_lr"])
            && o.schedule == Schedule::Constant
            && o.min_lr > 0.0
        {
            let message = "min_lr does nothing with schedule = \"constant\"".into();
            self.report("optimizer.min_lr", message, "leave min_lr out, or choose \"cosine\" or \"linear\"");
        }
    }
}
