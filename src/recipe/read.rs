//! Checked values as the typed recipe.

use super::check::{Checked, Section};
use super::report::{Diagnostic, Text};
use super::types::*;
use crate::error::Place;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Takes a value of one variant out of a section. The table of keys gives each key its kind, so that a
/// variant that does not fit is a mistake in this file, which the test of the defaults finds.
macro_rules! take {
    ($name:ident, $variant:ident, $type:ty) => {
        fn $name(&self, key: &str) -> Option<$type> {
            match self.values.get(key) {
                Some(Checked::$variant(v)) => Some(v.clone()),
                _ => None,
            }
        }
    };
}

impl Section {
    take!(int_or, Int, u64);
    take!(number_or, Number, f64);
    take!(bool_or, Bool, bool);
    take!(text_or, Text, String);
    take!(texts_or, Texts, Vec<String>);
    take!(json_or, Json, serde_json::Map<String, serde_json::Value>);
    take!(strings_or, Strings, BTreeMap<String, String>);
    take!(layers_or, Layers, Option<LayerSet>);
    take!(experts_or, Experts, Option<IndexSet>);
    take!(pair_or, Pair, [f64; 2]);
    take!(recompute_or, Recompute, Recompute);

    fn int(&self, key: &str) -> u64 {
        self.int_or(key).unwrap_or_default()
    }

    fn size(&self, key: &str) -> usize {
        usize::try_from(self.int(key)).unwrap_or(usize::MAX)
    }

    fn number(&self, key: &str) -> f64 {
        self.number_or(key).unwrap_or_default()
    }

    fn bool(&self, key: &str) -> bool {
        self.bool_or(key).unwrap_or_default()
    }

    fn text(&self, key: &str) -> String {
        self.text_or(key).unwrap_or_default()
    }

    fn word<T>(&self, key: &str, from: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.text_or(key).and_then(|w| from(&w))
    }

    fn table(&self, key: &str) -> Section {
        match self.values.get(key) {
            Some(Checked::Table(s)) => s.clone(),
            _ => Section::default(),
        }
    }

    fn tables(&self, key: &str) -> Vec<Section> {
        match self.values.get(key) {
            Some(Checked::Tables(s)) => s.clone(),
            _ => Vec::new(),
        }
    }

    fn place(&self, texts: &[Text]) -> Place {
        match &self.at {
            Some(at) => Diagnostic::new(texts, at, "").place,
            None => {
                Place { file: texts.first().map_or(String::new(), |t| t.name.clone()), line: 0, column: 0 }
            }
        }
    }
}

/// The recipe that `root` holds. `name` is the run's name where the recipe gives none.
pub(super) fn recipe(root: &Section, texts: &[Text], name: &str) -> Recipe {
    let name = root.text_or("name").unwrap_or_else(|| name.to_string());
    let lora = lora(&root.table("lora"));
    let router = root.table("router");
    Recipe {
        version: root.int("version") as u32,
        task: root.word("task", Task::from_word).unwrap_or(Task::Sft),
        model: model(&root.table("model")),
        train: root.tables("train").iter().map(|s| rule(s, &lora.spec, texts)).collect(),
        lora,
        router: Router { aux_loss: router.number("aux_loss"), z_loss: router.number("z_loss") },
        data: data(&root.table("data"), texts),
        run: run(&root.table("run"), &name),
        optimizer: optimizer(&root.table("optimizer")),
        memory: memory(&root.table("memory")),
        parallel: parallel(&root.table("parallel")),
        log: Log {
            tensorboard: root.table("log").bool("tensorboard"),
            sample: root.table("log").text_or("sample"),
        },
        name,
        folder: PathBuf::new(),
        places: BTreeMap::new(),
        not_built: Vec::new(),
    }
}

fn model(s: &Section) -> Model {
    Model {
        source: s.text("source"),
        revision: s.text("revision"),
        dtype: s.word("dtype", Dtype::from_word),
        quantize: s.word("quantize", Quantize::from_word).unwrap_or(Quantize::None),
        cache: s.text_or("cache").map(PathBuf::from),
        weights: s.word("weights", Weights::from_word).unwrap_or(Weights::Load),
        overrides: s.json_or("override").unwrap_or_default(),
    }
}

fn lora(s: &Section) -> Lora {
    Lora {
        spec: LoraSpec {
            rank: s.size("rank"),
            alpha: s.number("alpha"),
            dropout: s.number("dropout"),
            rslora: s.bool("rslora"),
            dora: s.bool("dora"),
        },
        init: s.text_or("init").filter(|i| i != "default"),
    }
}

fn rule(s: &Section, lora: &LoraSpec, texts: &[Text]) -> Rule {
    Rule {
        modules: s.texts_or("modules").unwrap_or_default(),
        layers: s.layers_or("layers").flatten(),
        experts: s.experts_or("experts").flatten(),
        method: s.word("method", Method::from_word).unwrap_or(Method::Lora),
        spec: LoraSpec {
            rank: s.int_or("rank").map_or(lora.rank, |r| r as usize),
            alpha: s.number_or("alpha").unwrap_or(lora.alpha),
            dropout: s.number_or("dropout").unwrap_or(lora.dropout),
            rslora: s.bool_or("rslora").unwrap_or(lora.rslora),
            dora: s.bool_or("dora").unwrap_or(lora.dora),
        },
        lr_scale: s.number("lr_scale"),
        place: s.place(texts),
    }
}

fn data(s: &Section, texts: &[Text]) -> Data {
    let sources = |key| s.tables(key).iter().map(|s| source(s, texts)).collect();
    Data {
        train: sources("train"),
        eval: sources("eval"),
        max_length: s.size("max_length"),
        over_length: s.word("over_length", OverLength::from_word).unwrap_or(OverLength::Truncate),
        on_bad_row: s.word("on_bad_row", OnBadRow::from_word).unwrap_or(OnBadRow::Error),
        pack: s.bool("pack"),
        shuffle: s.bool("shuffle"),
        mask: s.word("mask", Mask::from_word),
        chat_template: s.text_or("chat_template").map(PathBuf::from),
        template: s.json_or("template").unwrap_or_default(),
    }
}

fn source(s: &Section, texts: &[Text]) -> Source {
    Source {
        source: s.text("source"),
        format: s.word("format", Format::from_word).unwrap_or(Format::Messages),
        weight: s.number("weight"),
        split: s.text_or("split"),
        config: s.text_or("config"),
        fields: s.strings_or("fields").unwrap_or_default(),
        mask: s.word("mask", Mask::from_word),
        place: s.place(texts),
    }
}

fn run(s: &Section, name: &str) -> Run {
    Run {
        seed: s.int("seed"),
        length: match s.int_or("steps") {
            Some(n) => Length::Steps(n as usize),
            None => Length::Epochs(s.number("epochs")),
        },
        batch_rows: s.size("batch_rows"),
        micro_rows: s.int_or("micro_rows").map_or(1, |n| usize::try_from(n).unwrap_or(usize::MAX)),
        micro_auto: matches!(s.values.get("micro_rows"), Some(Checked::Auto)),
        clip: s.number("clip"),
        eval_every: s.size("eval_every"),
        save_every: s.size("save_every"),
        eval_at_start: s.bool("eval_at_start"),
        keep: s.size("keep"),
        output: PathBuf::from(s.text("output").replace("{name}", name)),
        device: s.word("device", Device::from_word).unwrap_or(Device::Auto),
    }
}

fn optimizer(s: &Section) -> Optimizer {
    Optimizer {
        name: s.word("name", OptimizerName::from_word).unwrap_or(OptimizerName::Adamw),
        lr: s.number_or("lr"),
        betas: s.pair_or("betas").unwrap_or_default(),
        eps: s.number("eps"),
        weight_decay: s.number("weight_decay"),
        decay: s.word("decay", Decay::from_word).unwrap_or(Decay::Matrices),
        schedule: s.word("schedule", Schedule::from_word).unwrap_or(Schedule::Cosine),
        warmup: match s.number_or("warmup_ratio") {
            Some(r) => Warmup::Ratio(r),
            None => Warmup::Steps(s.size("warmup_steps")),
        },
        min_lr: s.number("min_lr"),
        in_backward: s.bool("in_backward"),
    }
}

fn memory(s: &Section) -> Memory {
    Memory {
        budget: s.int_or("budget"),
        host_budget: s.int_or("host_budget"),
        disk_budget: s.int_or("disk_budget"),
        recompute: s.recompute_or("recompute").unwrap_or(Recompute::Auto),
        decoded: s.word("decoded", Decoded::from_word).unwrap_or(Decoded::Auto),
        offload: s
            .texts_or("offload")
            .unwrap_or_default()
            .iter()
            .filter_map(|w| Offload::from_word(w))
            .collect(),
        pin: s.bool("pin"),
    }
}

fn parallel(s: &Section) -> Parallel {
    Parallel {
        data: s.size("data"),
        zero: s.int("zero") as u8,
        tensor: s.size("tensor"),
        pipeline: s.size("pipeline"),
        expert: s.size("expert"),
        context: s.size("context"),
        comm: s.word("comm", Comm::from_word).unwrap_or(Comm::Auto),
        timeout: s.int("timeout"),
    }
}
