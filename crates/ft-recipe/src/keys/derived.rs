//! Values derived from several keys.

use super::data_words::{Form, Format, ScoreTargets, Slice, numbered};
use super::kind::TOKENS;
use super::tables::{
    Classify, Data, Lora, Memory, Optimizer, Parallel, Preference, Recipe, Rule, Run, Source,
};
use super::words::{Length, Master, Method, Offload, PreferenceLoss, Task};

impl Memory {
    /// Whether `memory.offload` contains `what`.
    pub fn offloads(&self, what: Offload) -> bool {
        self.offload.as_ref().is_some_and(|all| all.contains(&what))
    }
}

impl Recipe {
    /// Whether a frozen matrix that stays on the device is stored with padding columns for an adapter. Never
    /// with several ranks, so that results round alike in all ZeRO stages.
    pub fn has_rooms(&self) -> bool {
        self.parallel.ranks() == 1 && !self.weights_come_and_go()
    }

    /// Whether a layer's compute weights are fetched before a visit and released afterwards: with ZeRO
    /// stage 3 from other ranks, with `memory.offload = ["params"]` from the host.
    pub fn weights_come_and_go(&self) -> bool {
        let split = self.parallel.stage() > 1 && self.parallel.zero >= 3;
        split || self.memory.offloads(Offload::Params)
    }

    /// Whether `[lora]`'s rank, alpha, dropout, rslora and dora have an effect, because some rule trains
    /// LoRA. Without rules, the config of the adapter in `lora.init` decides.
    pub fn uses_lora_defaults(&self) -> bool {
        self.train.iter().any(|r| r.is(Method::Lora))
    }

    /// Targets of the score head, if the task has one.
    pub(crate) fn scores(&self) -> ScoreTargets {
        match self.task {
            Task::Reward => ScoreTargets::Pairs,
            Task::Classify => ScoreTargets::Classes(self.classify.names()),
            _ => ScoreTargets::None,
        }
    }
}

/// LoRA parameters of one linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraSpec {
    /// LoRA rank: inner dimension of A and B.
    pub rank: usize,
    /// The update is scaled by alpha / rank (rsLoRA: alpha / sqrt(rank)).
    pub alpha: f64,
    /// Dropout probability on the input of A during training.
    pub dropout: f64,
    /// Scale by alpha / sqrt(rank).
    pub rslora: bool,
    /// DoRA: a trained magnitude for each output row.
    pub dora: bool,
}

impl Rule {
    /// Whether the rule trains rows of single tokens. Such rows train in full, regardless of the default
    /// of `method`.
    pub fn is_of_tokens(&self) -> bool {
        self.modules.iter().any(|m| m == TOKENS)
    }

    /// Whether the rule applies `method` to modules. False for a rule for token rows.
    pub fn is(&self, method: Method) -> bool {
        self.method == method && !self.is_of_tokens()
    }

    /// Fills in LoRA parameters missing in the rule from `[lora]`.
    pub(crate) fn inherit(&mut self, lora: &Lora) {
        self.rank.get_or_insert(lora.rank);
        self.alpha.get_or_insert(lora.alpha);
        self.dropout.get_or_insert(lora.dropout);
        self.rslora.get_or_insert(lora.rslora);
        self.dora.get_or_insert(lora.dora);
    }

    /// The LoRA parameters of the rule.
    pub fn spec(&self) -> LoraSpec {
        LoraSpec {
            rank: self.rank.unwrap_or_default(),
            alpha: self.alpha.unwrap_or_default(),
            dropout: self.dropout.unwrap_or_default(),
            rslora: self.rslora.unwrap_or_default(),
            dora: self.dora.unwrap_or_default(),
        }
    }
}

impl Run {
    /// Length of the run: `steps` if given, else `epochs`.
    pub fn length(&self) -> Length {
        self.steps.map_or(Length::Epochs(self.epochs), Length::Steps)
    }
}

impl Optimizer {
    /// Whether fully trained weights have separate f32 master weights, or are f32 themselves (`in_f32`).
    pub fn keeps_master(&self, in_f32: bool) -> bool {
        in_f32
            || match self.master {
                Master::Auto => !self.name.eight_bit(),
                Master::F32 => true,
                Master::None => false,
            }
    }

    /// Number of warm-up steps in a run of `steps`: `warmup_ratio` of the steps, rounded up, if given,
    /// else `warmup_steps`.
    pub fn warmup(&self, steps: usize) -> usize {
        self.warmup_ratio.map_or(self.warmup_steps, |r| (r * steps as f64).ceil() as usize)
    }

    /// Peak learning rate for `method`, before a rule's `lr_scale`: `optimizer.lr`, by default 2e-4 for
    /// LoRA and 1e-5 for full training.
    pub fn peak_lr(&self, method: Method) -> f64 {
        self.lr.unwrap_or(if method == Method::Full { 1e-5 } else { 2e-4 })
    }

    /// Factor on the peak learning rate: `lr_scale`, times `lr_scale_b` under LoRA+.
    pub fn factor(&self, lr_scale: f64, plus: bool) -> f64 {
        if plus { lr_scale * self.lr_scale_b } else { lr_scale }
    }
}

impl Preference {
    /// The loss of a task.
    pub fn loss(&self, task: Task) -> PreferenceLoss {
        let own = PreferenceLoss::from_word(task.word()).unwrap_or(PreferenceLoss::Sigmoid);
        self.loss.unwrap_or(own)
    }

    /// Scale of the rewards in a task.
    pub fn beta(&self, task: Task) -> f64 {
        self.beta.unwrap_or(if task == Task::Simpo { 2.0 } else { 0.1 })
    }
}

impl Classify {
    /// Names of the classes.
    pub fn names(&self) -> Vec<String> {
        if self.labels.is_empty() { numbered(self.num_labels.unwrap_or(0)) } else { self.labels.clone() }
    }
}

impl Data {
    /// Whether documents share a row. A row of preferences is one pair or rated completion.
    pub fn packs(&self) -> bool {
        let paired = |s: &Source| s.format.is_some_and(Format::is_preference);
        self.pack && !self.all_sources().any(paired)
    }

    /// Whether evaluation data is configured.
    pub fn evaluates(&self) -> bool {
        self.eval_share > 0.0 || !self.eval.is_empty()
    }

    /// The sources of the training data, then of the evaluation data.
    pub fn all_sources(&self) -> impl Iterator<Item = &Source> {
        self.train.iter().chain(&self.eval)
    }

    /// The sources of the training or evaluation data. With `eval_share`, evaluation uses the training
    /// sources.
    pub fn sources(&self, part: Part) -> &[Source] {
        match part {
            Part::Eval if self.eval_share == 0.0 => &self.eval,
            _ => &self.train,
        }
    }
}

impl Source {
    /// The split's name, and the rows of it.
    pub fn slice(&self) -> (Option<&str>, Slice) {
        // checked when the recipe was loaded
        let parsed = self.split.as_deref().map(|s| Slice::parse(s).unwrap_or((s, Slice::ALL)));
        let (name, slice) = parsed.unwrap_or(("", Slice::ALL));
        (Some(name).filter(|n| !n.is_empty()), slice)
    }

    /// Whether only a part of the rows is read.
    pub fn is_part(&self) -> bool {
        self.max_samples.is_some() || self.slice().1 != Slice::ALL
    }

    /// Whether rows of texts go through the chat template; `template`: the model has one.
    pub fn is_chat(&self, template: bool) -> bool {
        match self.format {
            Some(Format::Messages) => true,
            Some(f) if f.has_forms() => {
                self.form.map_or(template && f.is_template_default(), |form| form == Form::Chat)
            }
            _ => false,
        }
    }
}

/// Training or evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `data.train`.
    Train,
    /// `data.eval`, or the share `data.eval_share` of the training data.
    Eval,
}

impl Part {
    /// The recipe key that defines this part.
    pub fn key(self, data: &Data) -> &'static str {
        match self {
            Part::Train => "data.train",
            Part::Eval if data.eval_share > 0.0 => "data.eval_share",
            Part::Eval => "data.eval",
        }
    }
}

impl Parallel {
    /// Total number of ranks. Experts are spread over them and add none.
    pub fn ranks(&self) -> u64 {
        (self.pipeline as u64).saturating_mul(self.stage())
    }

    /// Ranks of one stage of the pipeline.
    pub fn stage(&self) -> u64 {
        [self.data, self.context, self.tensor].iter().fold(1, |all, n| all.saturating_mul(*n as u64))
    }
}
