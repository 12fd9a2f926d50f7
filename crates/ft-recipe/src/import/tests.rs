use super::convert::by_name;
use super::table::{How, TABLES, tools};
use super::*;
use crate::check::{Foreign, module_regex};
use crate::keys::{
    Best, Dtype, Form, Format, Interval, Mask, Offload, OptimizerName, OverLength, PreferenceLoss, Reference,
    find_key,
};
use std::path::PathBuf;

/// No files beside the configuration, and no models.
struct Nowhere;

impl Around for Nowhere {}

/// A model's tokenizer is at hand.
struct Model;

impl Around for Model {
    fn read(&self, path: &str) -> Option<String> {
        let config = r#"{"eos_token": {"content": "</s>"}}"#;
        (path == "m/tokenizer_config.json").then(|| config.into())
    }
}

fn listing(imported: &Imported) -> String {
    let mut lines: Vec<&Line> = imported.lines.iter().collect();
    lines.sort_by_key(|l| l.fate);
    let shown = lines.iter().map(|l| format!("{:?} {}:{} {}\n", l.fate, l.line, l.key, l.text));
    shown.collect()
}

fn of(text: &str) -> Imported {
    import(text, "theirs.yaml", &Nowhere).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn parsed(imported: &Imported) -> Recipe {
    let text = imported.recipe.as_ref().unwrap_or_else(|e| panic!("{e}\n{}", listing(imported)));
    Recipe::parse(text, "theirs.toml", &[]).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn recipe(text: &str) -> Recipe {
    parsed(&of(text))
}

/// The line of a key.
fn fate(imported: &Imported, key: &str) -> Fate {
    imported.lines.iter().find(|l| l.key == key).unwrap_or_else(|| panic!("{key}")).fate
}

#[test]
fn tables_name_keys_and_conversions() {
    let tables = TABLES.as_ref().expect("tools.toml");
    for (name, tool) in tools(tables).into_iter().chain([("transformers", &tables.transformers)]) {
        for (key, how) in tool.each() {
            match how {
                How::To(path) => assert!(find_key(path).is_some(), "{name} {key}: no key {path}"),
                How::By(by) => assert!(by_name(by).is_some(), "{name} {key}: {by}"),
                How::Needless(text) | How::Refused(text) => assert!(!text.is_empty(), "{name} {key}"),
                How::Set(_) => unreachable!("of the table of hints"),
            }
            // hints and imports name the same key
            let hinted = Foreign::key(key).and_then(|f| f.to.as_deref().filter(|_| f.how.is_none()));
            if let (How::To(ours), Some(theirs)) = (how, hinted) {
                assert_eq!(ours, theirs, "{name} {key}");
            }
        }
        for key in tool.defaults.keys().chain(tool.same.keys()) {
            let known = |(_, t): &(_, &Tool)| t.find(&tables.transformers, key).is_some();
            let known =
                if name == "transformers" { tools(tables).iter().any(known) } else { known(&(name, tool)) };
            assert!(known, "{name}: {key}");
        }
    }
    for (name, builder) in &tables.torchtune_data {
        let source = format!("source = \"x\"\nformat = \"{}\"", builder.format);
        let task = if builder.format == "preference" { "dpo" } else { "sft" };
        let recipe = format!(
            "task = \"{task}\"\n[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\n[[data.train]]\n{source}\n"
        );
        assert!(Recipe::parse(&recipe, "r.toml", &[]).is_ok(), "{name}");
    }
}

/// Published configurations: every key has a fate, none is unknown, and the recipe passes the checks.
#[test]
fn published_configurations_are_imported() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/import");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&folder).expect("fixtures").flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e != "md"));
    files.sort();
    assert_eq!(files.len(), 16);
    for file in files {
        let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let text = std::fs::read_to_string(&file).expect("text");
        let imported = import(&text, &name, &Nowhere).unwrap_or_else(|e| panic!("{name}: {e}"));
        let tool = name.split('-').next().unwrap_or_default();
        assert!(imported.tool.to_lowercase().contains(tool), "{name}: {}", imported.tool);
        let keys = read::read(&text).expect("keys").list;
        let told: Vec<&str> = imported.lines.iter().filter(|l| l.line > 0).map(|l| l.key.as_str()).collect();
        assert_eq!(told, keys.iter().map(|e| e.path.as_str()).collect::<Vec<_>>(), "{name}: each key once");
        assert!(imported.lines.iter().all(|l| l.fate != Fate::Unknown), "{name}:\n{}", listing(&imported));
        let recipe =
            imported.recipe.as_ref().unwrap_or_else(|e| panic!("{name}: {e}\n{}", listing(&imported)));
        insta::assert_snapshot!(name, format!("{}\n{recipe}", listing(&imported)));
    }
}

#[test]
fn imported_batches_become_rows_of_a_step() {
    let text = "base_model: m\nadapter: lora\nlora_r: 8\ndatasets: [{path: a.jsonl, type: completion}]\n\
                micro_batch_size: 2\ngradient_accumulation_steps: 8\n";
    let imported = of(text);
    let line = imported.lines.iter().find(|l| l.key == "gradient_accumulation_steps").expect("a line");
    assert_eq!(line.fate, Fate::Converted);
    assert!(line.text.starts_with("run.batch_rows = 16: 2 rows x 8 x 1 rank(s)"), "{}", line.text);
    let r = recipe(text);
    assert_eq!((r.run.batch_rows, r.run.micro_rows.count(), r.lora.rank), (16, 2, 8));
    assert_eq!(r.data.max_length, 512, "axolotl's default");
    assert!(!r.data.pack, "axolotl's default");
    let script = "torchrun --nproc_per_node 4 train.py --model_name_or_path m --dataset_name d.jsonl \
                  --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --deepspeed ds_z3.json";
    let r = recipe(script);
    assert_eq!((r.run.batch_rows, r.parallel.data, r.parallel.zero), (24, 4, 3));
    let r = recipe(&script.replace("torchrun", "torchrun --nnodes 2"));
    assert_eq!((r.run.batch_rows, r.parallel.data), (48, 8));
    let r = recipe(&text.replace("micro_batch_size", "batch_size: 1.5\nmicro_batch_size"));
    assert_eq!(r.run.batch_rows, 16, "a share of a row is no number of rows");
}

/// Minimal configurations of the toolkits.
const AXOLOTL: &str = "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl}]\n";
const FACTORY: &str = "model_name_or_path: m\nfinetuning_type: lora\ndataset: a\n";
const TRL: &str = "model_name_or_path: m\ndataset_name: d\nuse_peft: true\n";
const TUNE: &str = "model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_0_5b, lora_attn_modules: [q_proj]}\n\
    checkpointer: {checkpoint_dir: m}\ndataset: {_component_: torchtune.datasets.chat_dataset, source: d}\n";

/// The line of a default; `None` if it does not count.
fn default_of<'i>(imported: &'i Imported, key: &str) -> Option<&'i str> {
    let of_key = |l: &&Line| l.key == key && l.line == 0 && l.fate == Fate::Default;
    imported.lines.iter().find(of_key).map(|l| l.text.as_str())
}

/// The file may give a value under another name than the default has.
#[test]
fn a_default_gives_way_to_the_file() {
    let imported = of(&format!("{TRL}max_seq_length: 4096\nr: 64\n"));
    let r = parsed(&imported);
    assert_eq!((r.data.max_length, r.lora.rank), (4096, 64));
    assert_eq!(["max_length", "lora_r"].map(|key| default_of(&imported, key)), [None; 2]);
    let imported = of(&format!("{TRL}max_length: null\n"));
    assert_eq!(fate(&imported, "max_length"), Fate::NotSupported, "{}", listing(&imported));
    assert_eq!(parsed(&imported).data.max_length, 2048, "null is no limit, not TRL's default");
}

/// Defaults of torchtune's builders: rows are not packed, LoRA has rank 8; Adam does not decay.
#[test]
fn builders_of_torchtune_have_defaults() {
    let imported = of(TUNE);
    let r = parsed(&imported);
    assert!(!r.data.pack);
    assert_eq!(default_of(&imported, "dataset.packed"), Some("data.pack = false"));
    assert_eq!((r.lora.rank, r.lora.alpha), (8, 16.0));
    assert!(
        default_of(&imported, "model.lora_rank").is_some()
            && default_of(&imported, "model.lora_alpha").is_some()
    );
    let full = of(&TUNE.replace("lora_qwen", "qwen"));
    assert_eq!(default_of(&full, "model.lora_rank"), None, "{}", listing(&full));
    let decay = |optimizer: &str| {
        recipe(&format!("{TUNE}optimizer: {{_component_: {optimizer}}}\n")).optimizer.weight_decay
    };
    assert_eq!([decay("torch.optim.AdamW"), decay("torch.optim.Adam")], [0.01, 0.0]);
}

/// Checkpoints on the way, where the file does not say it.
#[test]
fn checkpoints_have_defaults() {
    let trl = "trl sft --model_name_or_path m --dataset_name d --use_peft";
    for (text, every, keep) in [
        (FACTORY.to_string(), 500, 2),
        (format!("{FACTORY}save_strategy: 'no'\n"), 0, 2),
        (trl.to_string(), 500, 2),
        (format!("{trl} --save_steps 7 --save_total_limit 3"), 7, 3),
        (AXOLOTL.to_string(), 0, 4),
    ] {
        let run = recipe(&text).run;
        assert_eq!((run.save_every, run.keep), (Interval::Steps(every), keep), "{text}");
    }
    let told = |text: &str, key: &str| default_of(&of(text), key).is_some();
    assert!(told(FACTORY, "save_steps") && told(FACTORY, "save_total_limit"));
    assert!(!told(&format!("{FACTORY}save_strategy: 'no'\n"), "save_total_limit"));
    // the end of the only epoch is that of the run
    assert!(!told(AXOLOTL, "saves_per_epoch") && !told(TUNE, "save_every_n_steps"));
    assert!(told(&format!("{AXOLOTL}num_epochs: 2\n"), "saves_per_epoch"));
    assert!(!told(&format!("{AXOLOTL}num_epochs: 2\nsave_steps: 5\n"), "saves_per_epoch"));
    assert!(told(&format!("{TUNE}epochs: 2\n"), "save_every_n_steps"));
}

/// Splits of hub data sets that the toolkits read by default.
#[test]
fn splits_of_the_hub_have_defaults() {
    let splits = |text: &str| {
        let data = recipe(text).data;
        [data.train, data.eval].map(|list| list.first().and_then(|s| s.split.clone()).unwrap_or_default())
    };
    let trl = "trl sft --model_name_or_path m --use_peft --dataset_name";
    let axolotl = AXOLOTL.replace("a.jsonl", "o/a");
    for (text, expected) in [
        (format!("{trl} o/a"), ["train", ""]),
        (format!("{trl} d.jsonl --eval_strategy steps"), ["", ""]),
        (format!("{trl} o/a --eval_strategy steps --eval_steps 100"), ["train", "test"]),
        (format!("{trl} o/a --eval_strategy steps --dataset_test_split dev"), ["train", "dev"]),
        (TUNE.replace("source: d", "source: o/d"), ["train", ""]),
        (format!("{axolotl}test_datasets: [{{path: o/b}}]\n"), ["train", "test"]),
        (AXOLOTL.replace("a.jsonl", "o/a, split: dev"), ["dev", ""]),
        (AXOLOTL.replace("a.jsonl", "./a"), ["", ""]),
        (format!("{FACTORY}dataset_dir: ONLINE\n").replace("dataset: a", "dataset: o/a"), ["train", ""]),
    ] {
        assert_eq!(splits(&text), expected, "{text}");
    }
    let imported = of(&format!("{trl} o/a --eval_strategy steps --logging_steps 25"));
    assert_eq!(default_of(&imported, "dataset_test_split"), Some("data.eval: split = \"test\""));
    assert_eq!(parsed(&imported).run.eval_every, Interval::Steps(25), "{}", listing(&imported));
    assert_eq!(recipe(&format!("{trl} o/a --eval_strategy steps")).run.eval_every, Interval::Steps(10));
}

/// `optim` says which moments LLaMA-Factory's GaLore has.
#[test]
fn galore_of_llama_factory_has_defaults() {
    let full = FACTORY.replace("lora", "full");
    let galore = |more: &str| recipe(&format!("{full}use_galore: true\n{more}")).optimizer;
    let o = galore("");
    assert_eq!((o.name, o.galore_rank, o.galore_scale), (OptimizerName::Galore, 16, 2.0));
    assert_eq!(galore("optim: adamw_8bit\n").name, OptimizerName::Galore8bit);
    assert_eq!(galore("galore_rank: 64\n").galore_rank, 64);
    let other = of(&format!("{full}use_galore: true\noptim: adafactor\n"));
    assert_eq!(fate(&other, "optim"), Fate::NotSupported);
    assert_eq!(default_of(&of(&full), "galore_rank"), None);
}

/// A data type that the file turns off is f32.
#[test]
fn bf16_may_be_off() {
    let trl = "trl sft --model_name_or_path m --dataset_name d --use_peft";
    for (text, dtype) in [
        (format!("{AXOLOTL}bf16: false\nfp16: false\n"), Some(Dtype::F32)),
        (format!("{AXOLOTL}bf16: false\nfp16: true\n"), Some(Dtype::F16)),
        (format!("{AXOLOTL}bf16: auto\n"), None),
        (format!("{trl} --no_bf16"), Some(Dtype::F32)),
        (format!("{trl} --bf16 false --dtype float16"), Some(Dtype::F16)),
        (format!("{FACTORY}bf16: false\n"), None),
    ] {
        assert_eq!(recipe(&text).model.dtype, dtype, "{text}");
    }
}

/// Several keys may each move something to the host.
#[test]
fn offloads_add_up() {
    let keys = ["optimizer: paged_adamw_8bit", "activation_offloading: true"];
    for [a, b] in [keys, [keys[1], keys[0]]] {
        let memory = recipe(&format!("{AXOLOTL}{a}\n{b}\n")).memory;
        assert!(memory.offloads(Offload::Optimizer) && memory.offloads(Offload::Activations), "{a}");
        assert_eq!(memory.offload.map(|all| all.len()), Some(2));
    }
}

/// Order and warm-up of axolotl.
#[test]
fn axolotl_shuffles_epochs_and_may_not_warm_up() {
    let shuffle = |more: &str| recipe(&format!("{AXOLOTL}{more}\n")).data.shuffle;
    assert!(shuffle("shuffle_merged_datasets: false") && shuffle("curriculum_sampling: false"));
    assert!(!shuffle("curriculum_sampling: true"));
    let warmup = |more: &str| recipe(&format!("{AXOLOTL}{more}\n")).optimizer.warmup_ratio;
    assert_eq!([warmup("warmup_steps: 0"), warmup("")], [None, Some(0.03)]);
}

/// Types of axolotl's data sets, with their columns and prompts.
#[test]
fn types_of_axolotl_have_columns_and_prompts() {
    let set = |keys: &str| of(&AXOLOTL.replace("path: a.jsonl", &format!("path: a.jsonl, {keys}")));
    for (kind, column, name) in [
        ("gpteacher", "output", "response"),
        ("oasst", "instruction", "INSTRUCTION"),
        ("alpaca:instruct", "", ""),
    ] {
        let imported = set(&format!("type: \"{kind}\""));
        assert_eq!(fate(&imported, "datasets.0.type"), Fate::Converted, "{kind}");
        let source = parsed(&imported).data.train.remove(0);
        assert_eq!(source.form, Some(Form::Plain), "{kind}");
        assert_eq!(source.fields.get(column).map_or("", String::as_str), name);
    }
    for kind in
        ["alpaca_chat", "alpaca_chat.load_qa", "alpaca_w_system.load_open_orca", "reflection", "alpaca:chat"]
    {
        let imported = set(&format!("type: \"{kind}\""));
        assert_eq!(fate(&imported, "datasets.0.type"), Fate::NotSupported, "{kind}");
        assert!(imported.recipe.is_ok(), "{kind}");
    }
    let own = set("type: {field_instruction: q, field_output: a}");
    assert_eq!(fate(&own, "datasets.0.type.field_instruction"), Fate::NotSupported, "{}", listing(&own));
    assert_eq!(fate(&own, "datasets.0.type.field_output"), Fate::Converted);
    let own = set("type: {system_prompt: \"\", field_system: s, field_instruction: q, field_output: a}");
    assert_eq!(fate(&own, "datasets.0.type.field_instruction"), Fate::NotSupported, "{}", listing(&own));
    assert_eq!(parsed(&own).data.train[0].fields["instruction"], "q");
    let prompt = |keys: &str| {
        let text = AXOLOTL.replace("path: a.jsonl", &format!("path: a.jsonl, {keys}"));
        recipe(&format!("{text}rl: dpo\n")).data.train[0].fields["prompt"].clone()
    };
    assert_eq!(prompt("type: chat_template.default"), "messages");
    assert_eq!(prompt("type: chat_template.default, field_messages: talk"), "talk");
    assert_eq!(prompt("field_messages: talk, type: chat_template.default"), "talk");
    for (names, expected) in [
        ("{assistant: [gpt, model]}", Fate::NoEffect),
        ("{assistant: [bot]}", Fate::NotSupported),
        ("{assistant: [user]}", Fate::NotSupported),
    ] {
        assert_eq!(fate(&set(&format!("roles: {names}")), "datasets.0.roles.assistant"), expected, "{names}");
    }
}

/// Rows of tokens are those of no type; `skip_prepare_dataset` is also of data that a processor reads.
#[test]
fn a_type_says_the_format_of_rows() {
    let text = AXOLOTL.replace("a.jsonl}", "a.jsonl, type: chat_template}, {path: b.jsonl}");
    let formats: Vec<Option<Format>> =
        recipe(&format!("{text}skip_prepare_dataset: true\n")).data.train.iter().map(|s| s.format).collect();
    assert_eq!(formats, [Some(Format::Messages), Some(Format::Tokens)]);
}

/// Fused matrices of experts are targets of axolotl's LoRA, beside modules or alone.
#[test]
fn matrices_of_experts_are_targets() {
    let experts = "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n";
    let modules = |more: &str| recipe(&format!("{AXOLOTL}{more}")).train.remove(0).modules;
    assert_eq!(modules(experts), ["experts"]);
    assert_eq!(modules(&format!("{experts}lora_target_modules: [q_proj]\n")), ["experts", "q_proj"]);
    assert_eq!(modules(&format!("lora_target_modules: [q_proj]\n{experts}")), ["q_proj", "experts"]);
}

/// The learning rate of Muon is not AdamW's, which stands in its place.
#[test]
fn the_rate_of_muon_is_left_out() {
    let muon = of(&format!("{AXOLOTL}optimizer: muon\nlearning_rate: 0.02\ncosine_min_lr_ratio: 0.1\n"));
    let fates = ["optimizer", "learning_rate", "cosine_min_lr_ratio"].map(|key| fate(&muon, key));
    assert_eq!(fates, [Fate::NotSupported; 3], "{}", listing(&muon));
    assert_eq!(parsed(&muon).optimizer.lr, None);
    let four = recipe(&format!("{AXOLOTL}optimizer: adamw_torch_4bit\nlearning_rate: 0.02\n")).optimizer;
    assert_eq!((four.name, four.lr), (OptimizerName::Adamw8bit, Some(0.02)));
}

/// Random weights, and timeouts without end.
#[test]
fn a_model_may_begin_anew_and_wait_long() {
    let full = AXOLOTL.replace("adapter: lora\n", "");
    let weights = |more: &str| recipe(&format!("{full}{more}")).model.weights;
    assert_ne!(weights("reinit_weights: true\n"), weights(""));
    let long = format!("{FACTORY}ddp_timeout: 180000000\n");
    assert_eq!(fate(&of(&long), "ddp_timeout"), Fate::NoEffect);
    let script = "torchrun --nproc_per_node 4 sft.py --model_name_or_path m --dataset_name d --use_peft";
    assert_eq!(recipe(&format!("{script} --ddp_timeout 180000000")).parallel.timeout, 1_000_000);
}

/// A number of steps ends a run, whatever the epochs.
#[test]
fn steps_win_over_epochs() {
    for text in [
        format!("{TRL}max_steps: 5\n"),
        format!("{TRL}max_steps: 5\nnum_train_epochs: 2\n"),
        format!("{AXOLOTL}max_steps: 5\nnum_epochs: 2\n"),
        format!("{TUNE}max_steps_per_epoch: 5\nepochs: 1\n"),
    ] {
        let written = of(&text).recipe.unwrap_or_default();
        assert!(written.contains("steps = 5") && !written.contains("epochs ="), "{text}\n{written}");
    }
    assert!(of(&format!("{TRL}max_steps: -1\n")).recipe.is_ok_and(|r| r.contains("epochs = 3")));
}

/// Data sets of alignment-handbook, in its two forms.
#[test]
fn mixtures_of_the_handbook_are_sources() {
    let model = "model_name_or_path: m\nuse_peft: true\nchat_template: own.jinja\nwandb_project: w\nwandb_entity: e\n";
    let text = format!(
        "{model}dataset_mixture:\n  datasets:\n    - {{id: a/b, config: c, split: train_sft, columns: [x], weight: 1.0}}\n    \
         - {{id: d/e, weight: 0.5}}\n  seed: 0\n  test_split_size: 0.1\n"
    );
    let imported = of(&text);
    assert_eq!(imported.tool, "TRL");
    assert!(imported.lines.iter().all(|l| l.fate != Fate::Unknown), "{}", listing(&imported));
    assert_eq!(fate(&imported, "dataset_mixture.datasets.1.weight"), Fate::NotSupported);
    let data = parsed(&imported).data;
    let shown = |s: &crate::keys::Source| [Some(s.source.clone()), s.config.clone(), s.split.clone()];
    let words = |words: [&str; 3]| words.map(|w| Some(w.to_string()).filter(|w| !w.is_empty()));
    let shown = data.train.iter().map(shown).collect::<Vec<_>>();
    assert_eq!(shown, [words(["a/b", "c", "train_sft"]), words(["d/e", "", "train"])]);
    assert_eq!((data.eval_share, data.chat_template), (0.1, Some("own.jinja".into())));
    let older = of(&format!(
        "{model}dataset_mixer: {{a/b-1.5: 1.0, d/e: 0.5}}\ndataset_splits: [train_sft, test_sft]\n"
    ));
    let fates = ["a/b-1.5", "d/e"].map(|name| fate(&older, &format!("dataset_mixer.{name}")));
    assert_eq!(fates, [Fate::Converted, Fate::NotSupported], "{}", listing(&older));
    let data = parsed(&older).data;
    assert_eq!([&data.train, &data.eval].map(|list| list.len()), [2, 2]);
    assert_eq!((data.eval[1].source.as_str(), data.eval[1].split.as_deref()), ("d/e", Some("test_sft")));
}

/// PEFT's `modules_to_save` are the modules whose names end so, and all inside them.
#[test]
fn saved_modules_are_those_with_the_end_of_a_name() {
    let norms = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_norm"];
    let inside = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"];
    for (text, key) in
        [(AXOLOTL, "lora_modules_to_save"), (TRL, "lora_modules_to_save"), (FACTORY, "additional_target")]
    {
        let imported = of(&format!("{text}{key}: 'embed_tokens,norm, self_attn,mlp.gate,lm_head'\n"));
        assert_eq!(fate(&imported, key), Fate::Converted, "{}", listing(&imported));
        let modules = parsed(&imported).train.remove(1).modules;
        assert_eq!((modules[0].as_str(), modules[4].as_str()), ("embedding", "head"));
        let matched = |entry: &str, names: &[&str]| {
            let regex = module_regex(entry).and_then(Result::ok).expect(entry);
            names.iter().map(|name| regex.is_match(name)).collect::<Vec<_>>()
        };
        assert_eq!(matched(&modules[1], &norms), [true; 3]);
        assert_eq!(matched(&modules[1], &inside), [false; 2]);
        assert_eq!(matched(&modules[2], &inside), [true, false], "a module has others inside");
        assert_eq!(matched(&modules[3], &inside), [false, true]);
    }
    let odd = of(&format!("{TRL}lora_modules_to_save: ['.*norm']\n"));
    assert_eq!(fate(&odd, "lora_modules_to_save"), Fate::NotSupported, "{}", listing(&odd));
}

/// axolotl's minimum of the learning rate is of the schedule "cosine", its default.
#[test]
fn a_minimum_of_the_cosine_is_of_no_other_schedule() {
    let minimum = |schedule: &str| {
        let imported = of(&format!("{AXOLOTL}learning_rate: 1e-4\ncosine_min_lr_ratio: 0.1\n{schedule}"));
        (parsed(&imported).optimizer.min_lr, fate(&imported, "cosine_min_lr_ratio"))
    };
    for schedule in ["", "lr_scheduler: cosine\n"] {
        assert_eq!(minimum(schedule), (1e-5, Fate::Converted), "{schedule}");
    }
    for schedule in ["linear", "constant", "one_cycle"] {
        assert_eq!(minimum(&format!("lr_scheduler: {schedule}\n")), (0.0, Fate::NoEffect), "{schedule}");
    }
}

/// Tables of arguments may be texts in JSON.
#[test]
fn tables_may_be_texts() {
    let trl =
        "trl sft --model_name_or_path m --dataset_name d --use_peft --lr_scheduler_type cosine_with_min_lr";
    for text in [
        format!("{trl} --lr_scheduler_kwargs '{{\"min_lr\": 1e-5}}'"),
        format!("{TRL}lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: '{{\"min_lr\": 1e-5}}'\n"),
    ] {
        let imported = of(&text);
        assert_eq!(fate(&imported, "lr_scheduler_kwargs.min_lr"), Fate::Taken, "{}", listing(&imported));
        assert_eq!(parsed(&imported).optimizer.min_lr, 1e-5, "{text}");
    }
    let bad = of(&format!("{trl} --lr_scheduler_kwargs \"{{'min_lr': 1e-5}}\""));
    assert_eq!(fate(&bad, "lr_scheduler_kwargs"), Fate::NotSupported, "{}", listing(&bad));
    let more = of(&format!(
        "{trl} --gradient_checkpointing_kwargs '{{}}' --model_init_kwargs '{{\"torch_dtype\": \"auto\"}}'"
    ));
    let keys = ["gradient_checkpointing_kwargs", "model_init_kwargs.torch_dtype"];
    assert_eq!(keys.map(|key| fate(&more, key)), [Fate::NoEffect; 2], "{}", listing(&more));
    let full = AXOLOTL.replace("adapter: lora\n", "optimizer: galore_adamw\n");
    for arguments in ["{rank: 64}", "'{\"rank\": 64}'", "rank=64"] {
        let r = recipe(&format!("{full}optim_args: {arguments}\n"));
        assert_eq!(r.optimizer.galore_rank, 64, "{arguments}");
    }
}

/// GaLore here projects all that trains in full.
#[test]
fn targets_of_galore_are_all_linears() {
    for (optim, modules, expected) in [
        ("galore_adamw", "all-linear", Fate::NoEffect),
        ("galore_adamw", "[q_proj]", Fate::NotSupported),
        ("adamw_torch", "[q_proj]", Fate::NoEffect),
    ] {
        let text = "model_name_or_path: m\ndataset_name: d\n";
        let imported = of(&format!("{text}optim: {optim}\noptim_target_modules: {modules}\n"));
        let told = fate(&imported, "optim_target_modules");
        assert_eq!(told, expected, "{optim} {modules}\n{}", listing(&imported));
    }
}

/// The metric of the best checkpoint: the loss, or the accuracy of pairs.
#[test]
fn the_best_metric_is_a_loss_or_an_accuracy() {
    let eval = "val_size: 0.1\neval_strategy: steps\neval_steps: 5\nload_best_model_at_end: true\n";
    for (stage, metric, greater, best, expected) in [
        ("sft", "loss", false, Best::Loss, [Fate::Converted, Fate::NoEffect]),
        ("sft", "eval_loss", true, Best::Loss, [Fate::Converted, Fate::NotSupported]),
        ("sft", "eval_accuracy", true, Best::Loss, [Fate::NotSupported, Fate::NoEffect]),
        ("rm", "eval_accuracy", true, Best::Accuracy, [Fate::Converted, Fate::NoEffect]),
        ("dpo", "eval_rewards/accuracies", false, Best::Accuracy, [Fate::Converted, Fate::NotSupported]),
        ("kto", "eval_accuracy", true, Best::Loss, [Fate::NotSupported, Fate::NoEffect]),
    ] {
        let imported = of(&format!(
            "{FACTORY}stage: {stage}\n{eval}metric_for_best_model: {metric}\ngreater_is_better: {greater}\n"
        ));
        let told = ["metric_for_best_model", "greater_is_better"].map(|key| fate(&imported, key));
        assert_eq!(told, expected, "{stage} {metric}\n{}", listing(&imported));
        let run = parsed(&imported).run;
        assert_eq!((run.best, run.keep_best), (best, true), "{stage} {metric}");
    }
}

/// A command may train by a file, over whose keys its flags come.
#[test]
fn a_command_may_train_by_a_file() {
    struct Files;
    impl Around for Files {
        fn read(&self, path: &str) -> Option<String> {
            match path {
                "t.yaml" => {
                    Some("model_name_or_path: m\ndataset_name: d\nbeta: 0.2\nuse_peft: true\n".into())
                }
                "f.yaml" => Some(format!("{FACTORY}stage: kto\n")),
                "x.yml" => Some(AXOLOTL.into()),
                _ => None,
            }
        }
    }
    for (command, task, beta) in [
        ("trl dpo --config t.yaml", Task::Dpo, 0.2),
        ("accelerate launch scripts/dpo.py --config t.yaml --beta 0.4", Task::Dpo, 0.4),
        ("llamafactory-cli train f.yaml", Task::Kto, 0.1),
        ("axolotl train x.yml", Task::Sft, 0.1),
    ] {
        let r = parsed(&import(command, "a.sh", &Files).expect(command));
        assert_eq!((r.task, r.preference.beta(Task::Dpo)), (task, beta), "{command}");
    }
    let command = "llamafactory-cli train f.yaml learning_rate=7e-5 stage=dpo";
    let r = parsed(&import(command, "a.sh", &Files).expect(command));
    assert_eq!((r.task, r.optimizer.lr), (Task::Dpo, Some(7e-5)));
    let error = import("llamafactory-cli train y.yaml\n", "a.sh", &Files).expect_err("no file");
    assert!(error.contains("ft import y.yaml"), "{error}");
}

/// Ranks of TRL's own command.
#[test]
fn ranks_may_stand_behind_the_verb() {
    let trl = "trl sft --num_processes 4 --model_name_or_path m --dataset_name d --use_peft \
               --per_device_train_batch_size 2";
    let r = recipe(trl);
    assert_eq!((r.parallel.data, r.run.batch_rows), (4, 8));
    let all = of("torchrun --nproc_per_node gpu sft.py --model_name_or_path m --dataset_name d --use_peft");
    assert_eq!(fate(&all, "launch.nproc_per_node"), Fate::NotSupported, "{}", listing(&all));
}

/// Keys of a recipe of reinforcement learning, with folders of several models.
const PPO: &str = "output_dir: o\npolicy_model: {_component_: torchtune.models.mistral.mistral_7b}\n\
    dataset: {_component_: torchtune.datasets.text_completion_dataset, source: d, column: prompt}\n\
    checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m, output_dir: o}\n\
    value_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: v, output_dir: v}\n\
    ppo_epochs: 1\nkl_coeff: 0.01\nloss: {_component_: torchtune.rlhf.loss.PPOLoss, epsilon: 0.2}\n";

#[test]
fn another_task_is_refused_by_name() {
    for (text, named) in [
        ("base_model: m\nrl: grpo\ndatasets: [{path: a}]", "grpo"),
        ("stage: ppo\nmodel_name_or_path: m\nfinetuning_type: lora\ndataset: a", "ppo"),
        (
            "stage: dpo\npref_loss: hinge\nmodel_name_or_path: m\nfinetuning_type: lora\ndataset: a",
            "hinge of dpo",
        ),
        ("trl prm --model_name_or_path m --dataset_name d", "prm"),
        ("base_model: m\nprocess_reward_model: true\ndatasets: [{path: a}]", "process_reward_model"),
        ("python examples/grpo.py --model_name_or_path m --dataset_name d", "grpo"),
        ("python examples/ppo/ppo_tldr.py --model_name_or_path m --dataset_name d --use_peft", "ppo"),
        ("python examples/scripts/dpo_online.py --model_name_or_path m --dataset_name d", "online"),
        ("model_name_or_path: m\nfinetuning_type: lora\ndataset: a\nuse_dft_loss: true", "use_dft_loss"),
        ("trl sft --model_name_or_path m --dataset_name d --loss_type dft", "does not have, dft"),
        ("base_model: m\nadapter: lora\ndatasets: [{path: a}]\nuse_eaft: true", "use_eaft"),
        ("base_model: m\nadapter: lora\ndatasets: [{path: a}]\ndiffusion: {eps: 0.1}", "diffusion"),
        (
            "model: {_component_: x.lora_qwen2_7b}\ncheckpointer: {checkpoint_dir: m}\n\
             dataset: {_component_: chat_dataset, source: d}\nkd_loss: {_component_: x.ForwardKLLoss}\n",
            "task = \"distill\"",
        ),
        (
            "base_model: m\nadapter: lora\ndatasets: [{path: a}]\nlora_target_parameters: [mlp.experts.w1]",
            "lora_target_parameters names no modules",
        ),
        ("compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: bf16", "accelerate"),
        ("model: m\ntrain_dataset: data/a.yaml\noutput_dir: o\nlearning_rate: 1.0e-4", "trainer v1"),
        ("model_name_or_path: m\ndataset_name: d\nuse_peft: true\nbeta: 0.2", "`command: dpo`"),
        ("model_name_or_path: m\ndataset_name: d\nreward_funcs: [think_format_reward]", "grpo"),
        ("llamafactory-cli export --model_name_or_path m --export_dir o", "llamafactory-cli export does not"),
        (PPO, "ppo"),
        (
            "loss: {_component_: torchtune.rlhf.loss.RSOLoss}\ncheckpointer: {checkpoint_dir: m}\n\
             dataset: {_component_: preference_dataset, source: d}\n",
            "no translation, RSOLoss",
        ),
        (
            "model: {_component_: torchtune.models.llama3_2_vision.lora_llama3_2_vision_11b}\n\
             checkpointer: {checkpoint_dir: m}\n\
             dataset: {_component_: torchtune.datasets.multimodal.the_cauldron_dataset, subset: ocrvqa}\n",
            "a model of images, lora_llama3_2_vision_11b",
        ),
        (
            "model: {_component_: x.qwen2_7b}\ncheckpointer: {checkpoint_dir: m}\ntasks: [truthfulqa_mc2]",
            "evaluates",
        ),
        (
            "model: {_component_: x.qwen2_7b}\ncheckpointer: {checkpoint_dir: m}\nprompt: {user: hi}",
            "ft chat",
        ),
        ("model_name_or_path: m\nexport_dir: o\nfinetuning_type: lora", "ft merge"),
        ("base_model: m\nadapter: lora", "datasets names no training data"),
    ] {
        let refused = of(text).recipe.expect_err(text);
        assert!(refused.contains(named), "{text}: {refused}");
    }
}

/// torchtune's folders of other models are not those of the model, but for the reference of DPO.
#[test]
fn only_the_checkpointer_of_the_model_names_it() {
    let fates = |text: &str, keys: [&str; 3]| {
        let imported = of(text);
        keys.map(|key| fate(&imported, key))
    };
    let keys = ["value_checkpointer.checkpoint_dir", "value_checkpointer.output_dir", "kl_coeff"];
    assert_eq!(fates(PPO, keys), [Fate::NotSupported; 3], "{}", listing(&of(PPO)));
    let other = "rival: {checkpoint_dir: v, output_dir: v, max_seq_len: 3}\n";
    let keys = ["rival.checkpoint_dir", "rival.output_dir", "rival.max_seq_len"];
    let dpo = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\ncheckpointer: {checkpoint_dir: a/m/}\n\
               dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset}\n\
               loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n\
               ref_checkpointer: {checkpoint_dir: a/m, checkpoint_files: [x], model_type: LLAMA3}\n";
    assert_eq!(fates(&format!("{dpo}{other}"), keys), [Fate::Unknown; 3]);
    let keys = ["checkpoint_dir", "checkpoint_files", "model_type"].map(|k| format!("ref_checkpointer.{k}"));
    let keys = [&*keys[0], &*keys[1], &*keys[2]];
    assert_eq!(fates(dpo, keys), [Fate::NoEffect; 3], "{}", listing(&of(dpo)));
    let r = recipe(dpo);
    assert_eq!(
        (r.task, r.preference.reference, r.model.source.as_str()),
        (Task::Dpo, Reference::Base, "a/m")
    );
    let r = recipe(&dpo.replace("dir: a/m,", "dir: b/,"));
    assert_eq!((r.preference.reference, r.model.source.as_str()), (Reference::Other("b".into()), "a/m"));
}

/// Texts of pairs and of rated completions go through the chat template where the toolkit puts them there.
#[test]
fn texts_of_pairs_are_conversations_where_they_are_there() {
    let form = |text: &str| recipe(text).data.train[0].form;
    let axolotl = "base_model: m\nadapter: lora\nrl: RL\ndatasets: [{path: a.jsonl, type: TYPE}]\n";
    for (rl, kind, expected) in [
        ("dpo", "chatml.intel", Some(Form::Chat)),
        ("orpo", "chat_template.argilla", Some(Form::Chat)),
        ("kto", "llama3.ultra", Some(Form::Chat)),
        ("dpo", "user_defined.default", None),
    ] {
        assert_eq!(form(&axolotl.replace("RL", rl).replace("TYPE", kind)), expected, "{kind}");
    }
    let reward = "base_model: m\nadapter: lora\nreward_model: true\n\
                  datasets: [{path: a.jsonl, type: bradley_terry.chat_template}]\n";
    assert_eq!(form(reward), Some(Form::Chat));
    let factory = "model_name_or_path: m\nfinetuning_type: lora\ndataset: a\nstage: ";
    let forms = ["dpo", "kto", "rm", "sft"].map(|stage| form(&format!("{factory}{stage}\n")));
    assert_eq!(forms, [Some(Form::Chat), Some(Form::Chat), Some(Form::Chat), None]);
    let trl = "--model_name_or_path m --dataset_name d.jsonl --use_peft";
    assert_eq!(["dpo", "kto"].map(|verb| form(&format!("trl {verb} {trl}"))), [None; 2], "texts as they are");
}

/// The reference of LLaMA-Factory: a model, or an adapter over the model itself.
#[test]
fn a_reference_may_be_an_adapter() {
    let text = "model_name_or_path: m\nfinetuning_type: lora\nstage: dpo\ndataset: a\n";
    let reference = |more: &str| {
        let imported = of(&format!("{text}{more}"));
        (parsed(&imported).preference.reference, fate(&imported, "ref_model_adapters"))
    };
    let other = |name: &str| Reference::Other(name.into());
    assert_eq!(reference("ref_model: m\nref_model_adapters: ad\n"), (other("ad"), Fate::Taken));
    assert_eq!(reference("ref_model: z\nref_model_adapters: ad\n"), (other("z"), Fate::NotSupported));
    assert_eq!(reference("ref_model_adapters: ad\n"), (Reference::Base, Fate::NoEffect));
}

/// FSDP's offload, under each of its names, and ranks of a launcher.
#[test]
fn launchers_and_fsdp_are_imported() {
    let axolotl = "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl}]\n";
    let trl = "sft.py --model_name_or_path m --dataset_name d --use_peft";
    for text in [
        format!("{axolotl}fsdp_config: {{offload_params: true}}\n"),
        format!("{axolotl}fsdp_config: {{fsdp_offload_params: true}}\n"),
        format!("{axolotl}fsdp: [full_shard, offload]\n"),
        format!("accelerate launch --fsdp_offload_params true {trl}"),
    ] {
        let memory = recipe(&text).memory;
        assert!(memory.offloads(Offload::Params) && memory.offloads(Offload::Optimizer), "{text}");
    }
    assert!(recipe(&format!("{axolotl}fsdp_config: {{offload_params: false}}\n")).memory.offload.is_none());
    let imported = of(&format!("accelerate launch --config_file a.yaml --num_processes 4 {trl}"));
    assert_eq!(fate(&imported, "launch.config_file"), Fate::NotSupported, "{}", listing(&imported));
    assert_eq!(recipe(&format!("deepspeed --num_gpus 4 --num_nodes 2 {trl}")).parallel.data, 8);
}

/// DeepSpeed's stage from the name of its file, and stage and offload from the file.
#[test]
fn deepspeed_is_imported() {
    struct Config(&'static str);
    impl Around for Config {
        fn read(&self, path: &str) -> Option<String> {
            (path == "ds_z2.json").then(|| format!("{{\"zero_optimization\": {}}}", self.0))
        }
    }
    let script = |file: &str| {
        let launched = "torchrun --nproc_per_node 4 train.py --model_name_or_path m --dataset_name d.jsonl";
        format!("{launched} --deepspeed {file}")
    };
    for (file, stage) in [
        ("/home/user1/ds_z3.json", 3),
        ("ds_z3_config.json", 3),
        ("ds_8gpu_zero3.json", 3),
        ("deepspeed_zero_3.json", 3),
        ("deepspeed_configs/zero1_bf16.json", 1),
        ("zero-stage-2.json", 2),
    ] {
        assert_eq!(recipe(&script(file)).parallel.zero, stage, "{file}");
    }
    let unnamed = of(&script("run3/ds_8gpu.json"));
    assert_eq!(fate(&unnamed, "deepspeed"), Fate::NotSupported, "{}", listing(&unnamed));
    let both = r#"{"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}"#;
    let one = r#"{"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "cpu"}}"#;
    let disk = r#"{"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme"}}"#;
    for (config, params, optimizer, expected) in [
        (both, true, true, Fate::Converted),
        (one, false, true, Fate::Converted),
        (disk, true, false, Fate::NotSupported),
        (r#"{"stage": 3}"#, false, false, Fate::Converted),
    ] {
        let imported = import(&script("ds_z2.json"), "a.sh", &Config(config)).expect("an import");
        assert_eq!(fate(&imported, "deepspeed"), expected, "{}", listing(&imported));
        let r = parsed(&imported);
        let offloads = [Offload::Params, Offload::Optimizer].map(|part| r.memory.offloads(part));
        assert_eq!((r.parallel.zero, offloads), (3, [params, optimizer]), "{config}");
    }
}

/// One key packs training and evaluation data.
#[test]
fn a_second_packing_is_told() {
    let text = "model: {_component_: x.lora_llama3, lora_attn_modules: [q_proj]}\ncheckpointer: {checkpoint_dir: m}\n\
                dataset: {_component_: chat_dataset, source: a, packed: true}\n\
                dataset_val: {_component_: chat_dataset, source: b, packed: OF_EVAL}\n";
    for (packed, expected) in [("true", Fate::NoEffect), ("false", Fate::NotSupported)] {
        let imported = of(&text.replace("OF_EVAL", packed));
        assert_eq!(fate(&imported, "dataset.packed"), Fate::Converted);
        assert_eq!(fate(&imported, "dataset_val.packed"), expected, "{}", listing(&imported));
        assert!(parsed(&imported).data.pack);
    }
}

/// Tasks, losses and their parameters, of each toolkit.
#[test]
fn preferences_are_imported() {
    let task = |text: &str| {
        let r = recipe(text);
        (r.task, r.preference.loss(r.task), r.preference.beta(r.task))
    };
    let axolotl =
        "base_model: m\nadapter: lora\nlora_dropout: 0.1\ndatasets: [{path: a.jsonl, type: chatml.intel}]\n";
    let r = recipe(&format!("{axolotl}rl: ipo\nrl_beta: 0.3\ndpo_label_smoothing: 0.1"));
    assert_eq!(
        (r.task, r.preference.loss(r.task), r.preference.beta(r.task)),
        (Task::Dpo, PreferenceLoss::Ipo, 0.3)
    );
    assert_eq!(r.data.train[0].format, Some(Format::Preference));
    assert_eq!(r.data.train[0].fields["prompt"], "question");
    assert_eq!((r.lora.dropout, r.preference.label_smoothing), (0.0, 0.0), "IPO has no smoothing");
    assert_eq!(task(&format!("{axolotl}rl: orpo\norpo_alpha: 0.2")), (Task::Orpo, PreferenceLoss::Orpo, 0.2));
    let imported = of(&format!("{axolotl}rl: simpo\nrl_beta: 2.5\nsimpo_gamma: 0.7"));
    assert_eq!(fate(&imported, "cpo_alpha"), Fate::Default, "{}", listing(&imported));
    let r = parsed(&imported);
    assert_eq!((r.task, r.preference.gamma, r.preference.beta(r.task)), (Task::Simpo, 0.7, 2.5));

    let factory = "model_name_or_path: m\nfinetuning_type: lora\ndataset: mine\nmax_samples: 7\n";
    let r = recipe(&format!("{factory}stage: dpo\npref_loss: simpo"));
    assert_eq!(
        (r.task, r.preference.gamma, r.preference.beta(r.task)),
        (Task::Simpo, 0.5, 0.1),
        "its defaults"
    );
    assert_eq!(r.data.train[0].max_samples, Some(7));
    let r = recipe(&format!("{factory}stage: kto\npref_beta: 0.2\nkto_chosen_weight: 2.0"));
    assert_eq!((r.task, r.preference.desirable_weight, r.preference.beta(r.task)), (Task::Kto, 2.0, 0.2));
    assert_eq!(r.data.train[0].format, Some(Format::Unpaired));

    let trl = "--model_name_or_path m --dataset_name d.jsonl --use_peft";
    let r = recipe(&format!("trl dpo {trl} --loss_type ipo --beta 0.4"));
    assert_eq!(
        (r.task, r.preference.loss(r.task), r.preference.beta(r.task)),
        (Task::Dpo, PreferenceLoss::Ipo, 0.4)
    );
    assert_eq!((r.optimizer.lr, r.lora.dropout), (Some(1e-6), 0.0), "defaults of its preference trainers");
    assert_eq!(
        recipe(&format!("trl dpo {trl} --lora_dropout 0.1 --disable_dropout false")).lora.dropout,
        0.1
    );
    let r = recipe(&format!("python examples/scripts/cpo.py {trl} --cpo_alpha 0.5"));
    assert_eq!((r.task, r.preference.nll), (Task::Cpo, 0.5));
    assert_eq!(
        task(&format!("command: orpo\n{}", "model_name_or_path: m\ndataset_name: d\nbeta: 0.2")).0,
        Task::Orpo
    );
}

/// KTO has no steps of one row: such a batch is left out of the recipe, and told.
#[test]
fn a_batch_of_one_row_is_no_batch_of_kto() {
    const KEY: &str = "gradient_accumulation_steps";
    let text = format!("{FACTORY}stage: kto\nper_device_train_batch_size: 1\n{KEY}: ");
    for (steps, told, rows) in [(1, Fate::NotSupported, 16), (2, Fate::Converted, 2)] {
        let imported = of(&format!("{text}{steps}\n"));
        assert_eq!(fate(&imported, KEY), told, "{}", listing(&imported));
        assert_eq!(parsed(&imported).run.batch_rows, rows);
    }
    let axolotl = "base_model: m\nadapter: lora\nrl: kto\ndatasets: [{path: a.jsonl, type: llama3.ultra}]\n";
    assert_eq!(recipe(axolotl).run.batch_rows, 16, "its default is one row");
}

/// Label smoothing where the toolkit's loss has it.
#[test]
fn label_smoothing_is_that_of_the_loss() {
    let trl = "--model_name_or_path m --dataset_name d.jsonl --use_peft --label_smoothing 0.2";
    let factory =
        "model_name_or_path: m\nfinetuning_type: lora\ndataset: a\nstage: dpo\ndpo_label_smoothing: 0.2\n";
    let axolotl = "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl}]\ndpo_label_smoothing: 0.2\n";
    for (text, smoothing) in [
        (format!("python examples/scripts/cpo.py {trl}"), 0.2),
        (format!("python examples/scripts/cpo.py {trl} --loss_type simpo --cpo_alpha 0"), 0.2),
        (format!("trl dpo {trl}"), 0.0),
        (factory.to_string(), 0.2),
        (format!("{factory}pref_loss: simpo\n"), 0.0),
        (format!("{axolotl}rl: dpo\n"), 0.0),
        (format!("{axolotl}rl: simpo\n"), 0.0),
    ] {
        let key = if text.contains("dpo_label") { "dpo_label_smoothing" } else { "label_smoothing" };
        assert_eq!(recipe(&text).preference.label_smoothing, smoothing, "{text}");
        let expected = if smoothing > 0.0 { Fate::Taken } else { Fate::NoEffect };
        assert_eq!(fate(&of(&text), key), expected, "{text}");
    }
}

/// TRL's order of rows: that of the file in KTO by default, and where the key says so.
#[test]
fn rows_come_in_the_order_of_trl() {
    let trl = "--model_name_or_path m --dataset_name d.jsonl --use_peft";
    let order = |text: &str| {
        let imported = of(text);
        (recipe(text).data.shuffle, imported.lines.iter().any(|l| l.text.contains("data.shuffle")))
    };
    assert_eq!(order(&format!("trl kto {trl}")), (false, true));
    assert_eq!(fate(&of(&format!("trl kto {trl}")), "train_sampling_strategy"), Fate::Default);
    assert_eq!(order(&format!("trl dpo {trl}")), (true, false));
    assert_eq!(order(&format!("trl sft {trl} --train_sampling_strategy sequential")), (false, true));
    assert_eq!(order(&format!("trl sft {trl} --train_sampling_strategy random")), (true, false));
}

/// TRL adds the load-balancing loss of a mixture with the coefficient of its config.
#[test]
fn the_router_loss_of_trl_is_the_models_own() {
    struct Models;
    impl Around for Models {
        fn router_loss(&self, model: &str) -> Option<f64> {
            match model {
                "balanced" => Some(0.02),
                "dense" => Some(0.0),
                _ => None,
            }
        }
    }
    let trl = "--dataset_name d.jsonl --use_peft --lora_target_modules q_proj --model_name_or_path";
    for (command, coefficient, told) in [
        ("trl sft {trl} balanced", 0.02, true),
        ("trl kto {trl} balanced", 0.02, true),
        ("trl sft {trl} dense", 0.0, false),
        ("trl sft {trl} far", 0.0, true),
        ("trl reward {trl} balanced", 0.0, false),
        ("trl sft {trl} balanced --router_aux_loss_coef 0.5", 0.5, true),
    ] {
        let imported = import(&command.replace("{trl}", trl), "a.sh", &Models).expect(command);
        assert_eq!(parsed(&imported).router.aux_loss, coefficient, "{command}");
        let line = imported.lines.iter().any(|l| l.text.contains("router.aux_loss"));
        assert_eq!(line, told, "{command}\n{}", listing(&imported));
    }
}

/// The Trainer hands GaLore the learning rate alone; LLaMA-Factory's own GaLore has all arguments.
#[test]
fn galore_of_the_trainer_has_defaults_of_its_own() {
    let decay = |text: &str| {
        let o = recipe(text).optimizer;
        (o.weight_decay, o.eps)
    };
    let trl = "model_name_or_path: m\ndataset_name: d\noptim_target_modules: all-linear\nweight_decay: 0.1\n\
               adam_epsilon: 1.0e-7\noptim: ";
    assert_eq!(decay(&format!("{trl}galore_adamw\n")), (0.0, 1e-6));
    assert_eq!(decay(&format!("{trl}galore_adamw_8bit\n")), (0.01, 1e-8));
    assert_eq!(decay(&format!("{trl}adamw_torch\n")), (0.1, 1e-7));
    let factory =
        "model_name_or_path: m\nfinetuning_type: full\ndataset: a\nuse_galore: true\nweight_decay: 0.1\n";
    assert_eq!(decay(factory).0, 0.1);
}

/// Reward models of each toolkit that trains them.
#[test]
fn reward_models_are_imported() {
    let axolotl = "base_model: m\nmodel_type: AutoModelForSequenceClassification\nnum_labels: 1\nreward_model: true\n\
                   adapter: lora\nlora_dropout: 0.1\nlora_modules_to_save: [score, lm_head]\n\
                   datasets: [{path: a.jsonl, type: bradley_terry.chat_template}]\ncenter_rewards_coefficient: 0.01\n";
    let r = recipe(axolotl);
    assert_eq!(
        (r.task, r.data.train[0].format, r.lora.dropout),
        (Task::Reward, Some(Format::Preference), 0.0)
    );
    assert_eq!(r.data.train[0].fields["prompt"], "input");
    assert_eq!(r.train.len(), 1, "the score head trains by itself");
    let imported = of(axolotl);
    let fates = ["num_labels", "lora_modules_to_save", "reward_model", "center_rewards_coefficient"];
    let want = [Fate::NoEffect, Fate::NoEffect, Fate::Converted, Fate::NotSupported];
    assert_eq!(fates.map(|key| fate(&imported, key)), want, "{}", listing(&imported));
    let off = "base_model: m\nreward_model: false\nadapter: lora\ndatasets: [{path: a.jsonl}]";
    assert_eq!((recipe(off).task, fate(&of(off), "reward_model")), (Task::Sft, Fate::NoEffect));

    let r =
        recipe("model_name_or_path: m\nstage: rm\nfinetuning_type: lora\nlora_dropout: 0.1\ndataset: mine");
    assert_eq!(
        (r.task, r.data.train[0].format, r.lora.dropout),
        (Task::Reward, Some(Format::Preference), 0.1)
    );

    let trl = "--model_name_or_path m --dataset_name d.jsonl --use_peft --lora_task_type SEQ_CLS --lora_dropout 0.1";
    for verb in ["trl reward", "python examples/scripts/reward_modeling.py"] {
        let r = recipe(&format!("{verb} {trl}"));
        assert_eq!((r.task, r.optimizer.lr, r.lora.dropout), (Task::Reward, Some(1e-4), 0.0), "{verb}");
        assert_eq!(r.data.over_length, crate::keys::OverLength::Drop, "{verb}");
    }
    let full = recipe("trl reward --model_name_or_path m --dataset_name d.jsonl");
    assert!(full.train.iter().any(|t| t.modules.iter().any(|m| m.contains("attention"))), "{:?}", full.train);
}

/// MLflow's server, experiment and run, of each toolkit.
#[test]
fn trackers_are_imported() {
    let log = |text: &str| {
        let r = recipe(text);
        (r.log.mlflow.unwrap_or_default(), r.log.mlflow_experiment.unwrap_or_default(), r.name)
    };
    let all = ("http://h:5000".to_string(), "mine".to_string(), "first".to_string());
    let axolotl = "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl}]\nuse_mlflow: true\n\
                   mlflow_tracking_uri: http://h:5000\nmlflow_experiment_name: mine\nmlflow_run_name: first";
    assert_eq!(log(axolotl), all);
    let script = "export MLFLOW_TRACKING_URI=http://h:5000 MLFLOW_EXPERIMENT_NAME=mine\n\
                  trl sft --model_name_or_path m --dataset_name d --use_peft --run_name first --report_to mlflow";
    assert_eq!(log(script), all);
    let tune = "model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_0_5b, lora_attn_modules: [q_proj]}\n\
                checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m}\n\
                dataset: {_component_: torchtune.datasets.alpaca_dataset}\n\
                metric_logger: {_component_: torchtune.training.metric_logging.MLFlowLogger, tracking_uri: 'http://h:5000', \
                experiment_name: mine, run_name: first}\n";
    assert_eq!(log(tune), all);
    let imported = of(&axolotl.replace("http://h:5000", "sqlite:///a.db"));
    assert_eq!(fate(&imported, "mlflow_tracking_uri"), Fate::NotSupported, "{}", listing(&imported));
    let factory = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: a\nreport_to: mlflow";
    assert_eq!(fate(&of(factory), "report_to"), Fate::NotSupported, "no address in the file");
}

#[test]
fn unknown_keys_and_unsupported_values_are_told() {
    let text = "base_model: m\nload_in_8bit: true\nadapter: lora\nlora_target_modules: '.*self_attn.(q|v)_proj'\n\
                optimizer: lion\nlr_scheduler: constant\nwarmup_steps: 5\nmy_key: 3\nwandb_project: mine\n\
                datasets: [{path: json, ds_type: json, data_files: [a.jsonl, b.jsonl], type: alpaca, surprise: 1}]\n";
    let imported = of(text);
    for (key, expected) in [
        ("my_key", Fate::Unknown),
        ("load_in_8bit", Fate::NotSupported),
        ("optimizer", Fate::NotSupported),
        ("warmup_steps", Fate::NoEffect),
        ("wandb_project", Fate::NotSupported),
        ("datasets.0.surprise", Fate::NotSupported),
        ("lora_target_modules", Fate::Converted),
    ] {
        assert_eq!(fate(&imported, key), expected, "{key}\n{}", listing(&imported));
    }
    let r = recipe(text);
    assert_eq!(r.data.train.iter().map(|s| s.source.as_str()).collect::<Vec<_>>(), ["a.jsonl", "b.jsonl"]);
    assert_eq!(r.train[0].modules, ["/.*self_attn.(q|v)_proj/"]);
    assert_eq!(r.optimizer.warmup_steps, 0);
    // an evaluation without data would be refused: left out, and told
    let imported = of("base_model: m\nadapter: lora\neval_steps: 50\ndatasets: [{path: a.jsonl}]");
    assert_eq!(fate(&imported, "eval_steps"), Fate::NoEffect, "{}", listing(&imported));
    assert!(import("a: 1", "a.yaml", &Nowhere).unwrap_err().contains("no key"));
}

/// Of the names of fields only that without a counterpart is left out, and told.
#[test]
fn only_fields_without_a_counterpart_are_left_out() {
    let text = "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl, type: completion, field: body, field_system: s}]";
    let (imported, r) = (of(text), recipe(text));
    let line = imported.lines.iter().find(|l| l.key == "datasets.0.field_system").expect("a line");
    assert_eq!((line.fate, line.text.as_str()), (Fate::NotSupported, "format \"text\" has no field system"));
    assert_eq!(fate(&imported, "datasets.0.field"), Fate::Converted, "{}", listing(&imported));
    assert_eq!(r.data.train[0].format, Some(Format::Text));
    assert_eq!(
        r.data.train[0].fields.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>(),
        ["text=body"]
    );
    // the text of Alpaca's prompt has no tools
    let tools = of("base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl, type: alpaca, field_tools: t}]");
    assert_eq!(fate(&tools, "datasets.0.field_tools"), Fate::NotSupported, "{}", listing(&tools));
}

/// The line of a data set names its sources beside a refused field.
#[test]
fn a_refused_field_is_told_beside_the_sources() {
    struct Info;
    impl Around for Info {
        fn read(&self, path: &str) -> Option<String> {
            let info = r#"{"mine": {"file_name": "a.json", "formatting": "sharegpt",
                "columns": {"messages": "talk", "prompt": "q"}}}"#;
            (path == "dir/dataset_info.json").then(|| info.into())
        }
    }
    let text = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: mine\ndataset_dir: dir\n";
    let imported = import(text, "a.yaml", &Info).expect("an import");
    let line = imported.lines.iter().find(|l| l.key == "dataset").expect("a line");
    let told = "sources \"dir/a.json\"; format \"messages\" has no field instruction";
    assert_eq!((line.fate, line.text.as_str()), (Fate::NotSupported, told));
    let recipe = parsed(&imported);
    assert_eq!(recipe.data.train[0].fields["messages"], "talk");
}

/// Masks of TRL: the assistant's wins over that of completions.
#[test]
fn masks_of_trl_agree_with_their_list() {
    let trl = "model_name_or_path: m\ndataset_name: d.jsonl\nuse_peft: true\ncompletion_only_loss: false\n";
    assert_eq!(recipe(trl).data.mask, Some(Mask::None));
    let both = format!("{trl}assistant_only_loss: true\n");
    assert_eq!(recipe(&both).data.mask, None);
    let fates = ["assistant_only_loss", "completion_only_loss"].map(|key| fate(&of(&both), key));
    assert_eq!(fates, [Fate::NoEffect; 2], "{}", listing(&of(&both)));
}

/// Keys without effect here only where their values agree with ft.
#[test]
fn values_that_lose_something_are_not_supported() {
    let axolotl =
        "base_model: m\nadapter: lora\nval_set_size: 0.1\ndatasets: [{path: a.jsonl, type: chat_template}]\n";
    let bare = "base_model: m\nadapter: lora\n";
    let factory = "model_name_or_path: m\nfinetuning_type: lora\ndataset: a\n";
    let trl = "model_name_or_path: m\ndataset_name: d\nuse_peft: true\n";
    let tune =
        "model._component_: torchtune.models.llama3_1.lora_llama3_1_8b\ncheckpointer.checkpoint_dir: m\n";
    for (text, key, expected) in [
        (axolotl, "special_tokens: {eos_token: '</s>'}", Fate::NoEffect),
        (axolotl, "special_tokens: {eos_token: <|im_end|>}", Fate::NotSupported),
        (axolotl, "special_tokens: {pad_token: <pad>}", Fate::NoEffect),
        (axolotl, "chat_template: tokenizer_default", Fate::NoEffect),
        (axolotl, "chat_template: chatml", Fate::NotSupported),
        (axolotl, "early_stopping_patience: 3", Fate::NoEffect),
        (bare, "datasets: [{path: a.jsonl, train_on_eos: none}]", Fate::NotSupported),
        (bare, "datasets: [{path: a.jsonl, train_on_eos: last}]", Fate::NotSupported),
        (bare, "datasets: [{path: a.jsonl, train_on_eos: turn}]", Fate::NoEffect),
        (bare, "datasets: [{path: a.jsonl, message_field_role: speaker}]", Fate::NotSupported),
        (bare, "datasets: [{path: a.jsonl, message_field_content: value}]", Fate::NoEffect),
        (axolotl, "plugins: [axolotl.integrations.liger.LigerPlugin]", Fate::NoEffect),
        (
            axolotl,
            "plugins: [axolotl.integrations.liger.LigerPlugin, axolotl.integrations.spectrum.SpectrumPlugin]",
            Fate::NotSupported,
        ),
        (axolotl, "dpo_use_weighting: true", Fate::NotSupported),
        (axolotl, "max_prompt_len: 512", Fate::NotSupported),
        (axolotl, "merge_lora: true", Fate::NoEffect),
        (axolotl, "ddp_timeout: 600", Fate::Taken),
        (axolotl, "processor_type: AutoProcessor", Fate::NotSupported),
        (axolotl, "torchdistx_path:", Fate::NoEffect),
        (axolotl, "skip_prepare_dataset: true", Fate::NoEffect),
        (axolotl, "pretrain_multipack_attn: true", Fate::NoEffect),
        (axolotl, "pretrain_multipack_attn: false", Fate::NotSupported),
        (axolotl, "bnb_config_kwargs: {bnb_4bit_use_double_quant: true}", Fate::NoEffect),
        (axolotl, "bnb_config_kwargs: {bnb_4bit_use_double_quant: false}", Fate::NotSupported),
        (axolotl, "expert_parallel_size: 1", Fate::Taken),
        (axolotl, "plugins: [axolotl.integrations.kernels.KernelsPlugin]", Fate::NoEffect),
        (axolotl, "tokenizer_use_mistral_common: true", Fate::NotSupported),
        (factory, "context_parallel_size: 1", Fate::Taken),
        (factory, "kt_config: {kt_backend: AMX}", Fate::NoEffect),
        (factory, "fp8: true", Fate::NotSupported),
        (trl, "chat_template: '{% for m in messages %}{{ m }}{% endfor %}'", Fate::NotSupported),
        (axolotl, "lora_target_modules: 'layers[.][0-9]{1,2}[.]self_attn[.](q|v)_proj'", Fate::Converted),
        (axolotl, "lora_target_modules: 'q_proj, v_proj'", Fate::Taken),
        (axolotl, "fsdp_version: 2", Fate::NoEffect),
        (trl, "datasets: [{path: o/a, fraction: 0.5}]", Fate::NotSupported),
        (trl, "use_bnb_nested_quant: false", Fate::NoEffect),
        (trl, "load_in_4bit: true\nuse_bnb_nested_quant: false", Fate::NotSupported),
        (factory, "adapter_name_or_path: a,b", Fate::NotSupported),
        (factory, "adapter_name_or_path: a", Fate::Taken),
        (trl, "eos_token: <|im_end|>", Fate::NotSupported),
        (trl, "eos_token: </s>", Fate::NoEffect),
        (trl, "bnb_4bit_use_double_quant: false", Fate::NotSupported),
        (factory, "double_quantization: false", Fate::NotSupported),
        (factory, "double_quantization: true", Fate::NoEffect),
        (factory, "template: qwen", Fate::NotSupported),
        (factory, "split_special_tokens: true", Fate::NotSupported),
        (factory, "split_special_tokens: false", Fate::NoEffect),
        (factory, "preserve_thinking: true", Fate::NotSupported),
        (trl, "target_parameters: [mlp.experts.gate_up_proj]", Fate::NotSupported),
        (tune, "tokenizer: {prompt_template: torchtune.data.SummarizeTemplate}", Fate::NotSupported),
        (tune, "tokenizer: {prompt_template: {user: [a, b]}}", Fate::NotSupported),
        (tune, "tokenizer: {prompt_template: null}", Fate::NoEffect),
        (
            tune,
            "dataset: {_component_: text_completion_dataset, source: s, add_eos: False}",
            Fate::NotSupported,
        ),
        (tune, "dataset: {_component_: text_completion_dataset, source: s, add_eos: True}", Fate::NoEffect),
    ] {
        let imported = import(&format!("{text}{key}\n"), "a.yaml", &Model).expect(key);
        let line = imported.lines.iter().rfind(|l| l.line > 0).expect(key);
        assert_eq!(line.fate, expected, "{key}\n{}", listing(&imported));
    }
    assert!(default_of(&of(&format!("{trl}load_in_4bit: true\n")), "use_bnb_nested_quant").is_some());
    let sharded = of(&format!("{axolotl}fsdp_version: 2\nfsdp_config: {{reshard_after_forward: true}}\n"));
    assert!(listing(&sharded).contains("parallel.zero = 3"), "{}", listing(&sharded));
}

/// Toolkits that divide long texts.
#[test]
fn long_texts_are_divided_where_the_toolkit_does() {
    let over = |text: &str| recipe(text).data.over_length;
    let raw = format!("{FACTORY}stage: pt\n");
    let pretraining = AXOLOTL.replace("datasets:", "pretraining_dataset:");
    let split = TUNE.replace("source: d", "source: d, split_across_pack: True");
    let completion = AXOLOTL.replace("a.jsonl", "a.jsonl, type: completion");
    let bfd = format!("{TRL}packing: true\npacking_strategy: bfd_split\n");
    for text in [&raw, &pretraining, &split, &completion, &bfd, &bfd.replace("bfd_split", "wrapped")] {
        assert_eq!(over(text), OverLength::Split, "{text}");
    }
    for text in [TUNE, AXOLOTL, &bfd.replace("_split", ""), &bfd.replace("true", "false")] {
        assert_ne!(over(text), OverLength::Split, "{text}");
    }
    let mixed = completion.replace("}]", "}, {path: b.jsonl, type: chat_template}]");
    let mixed = of(&format!("{mixed}excess_length_strategy: truncate\n"));
    assert_eq!(fate(&mixed, "excess_length_strategy"), Fate::NotSupported, "{}", listing(&mixed));
}

/// Intervals by epochs and by shares of the steps.
#[test]
fn intervals_are_steps_shares_or_parts_of_an_epoch() {
    let eval = "val_set_size: 0.1\n";
    let factory = format!("{FACTORY}val_size: 0.1\n");
    let (epoch, share) = (Interval::Epoch, Interval::Percent);
    for (text, save, evaluate) in [
        (format!("{AXOLOTL}{eval}saves_per_epoch: 1\nevals_per_epoch: 4\n"), epoch(1), epoch(4)),
        (format!("{AXOLOTL}{eval}save_steps: 0.25\neval_steps: 0.07\n"), share(25.0), share(7.0)),
        (format!("{AXOLOTL}{eval}save_strategy: epoch\neval_strategy: epoch\n"), epoch(1), epoch(1)),
        (format!("{AXOLOTL}{eval}num_epochs: 2\nevals_per_epoch: 0\n"), epoch(1), Interval::Steps(0)),
        (format!("{factory}save_strategy: epoch\neval_strategy: epoch\nsave_steps: 9\n"), epoch(1), epoch(1)),
        (format!("{TUNE}epochs: 2\n"), epoch(1), Interval::Steps(0)),
    ] {
        let run = recipe(&text).run;
        assert_eq!((run.save_every, run.eval_every), (save, evaluate), "{text}");
    }
    let patient = recipe(&format!("{AXOLOTL}{eval}evals_per_epoch: 2\nearly_stopping_patience: 3\n"));
    assert_eq!(patient.run.patience, 3);
    let imported = of(&format!("{AXOLOTL}{eval}evals_per_epoch: 0.5\nearly_stopping_patience: 3\n"));
    let line = |key: &str| imported.lines.iter().find(|l| l.key == key).expect("a line");
    assert_eq!(line("evals_per_epoch").fate, Fate::NotSupported);
    assert!(line("early_stopping_patience").text.ends_with("write run.eval_every"), "{}", listing(&imported));
}

/// axolotl's template is a file, or its text, which a recipe has in a file.
#[test]
fn a_template_is_a_file_or_text() {
    let template = |value: &str| {
        let text = format!(
            "base_model: m\nadapter: lora\nchat_template: jinja\nchat_template_jinja: {value}\ndatasets: [{{path: a.jsonl}}]\n"
        );
        (recipe(&text).data.chat_template, fate(&of(&text), "chat_template_jinja"))
    };
    assert_eq!(template("own.jinja"), (Some("own.jinja".into()), Fate::Taken));
    assert_eq!(template("\"{% for m in messages %}{{ m }}{% endfor %}\""), (None, Fate::NotSupported));
}

/// Keys with a reason of their own, and what the recipe has of them.
#[test]
fn imported_keys_have_reasons_of_their_own() {
    let axolotl = "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl}]\n";
    let imported = of(&format!(
        "{axolotl}test_datasets: [{{path: t.jsonl}}]\ndp_shard_size: 4\ndp_replicate_size: 1\nring_attn_func: x\n"
    ));
    let tune = "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj]}\n\
                checkpointer: {checkpoint_dir: /tmp/student, adapter_checkpoint: adapter_0.pt}\n\
                teacher_checkpointer: {checkpoint_dir: /tmp/teacher}\ncontext_parallel_dim: 2\n\
                batch_size_val: 2\ntensor_parallel_plan: {_component_: x.y}\ndataset: {_component_: alpaca_dataset}\n";
    let script = "trl sft --model_name_or_path $M --dataset_name ${D:-a/b} --dataset_kwargs.skip_prepare_dataset true \
                  --use_peft --gradient_accumulation_steps $((8 / 2)) \"$@\"";
    let shown = [imported, of(tune), of(script)].map(|i| {
        let lines = i.lines.iter().filter(|l| l.line > 0);
        lines.map(|l| format!("{:?} {} {}\n", l.fate, l.key, l.text)).collect::<String>()
    });
    insta::assert_snapshot!(shown.join("\n"), @r#"
    Taken base_model model.source = "m"
    Converted adapter a [[train]] rule with method = "lora", its default
    Converted datasets.0.path data.train: source = "a.jsonl"
    Converted test_datasets.0.path data.eval: source = "t.jsonl"
    NotSupported dp_shard_size parallel.data = the ranks, with parallel.zero = 3
    NoEffect dp_replicate_size so it is here too
    NoEffect ring_attn_func parallel.context has no further settings

    Converted model._component_ a [[train]] rule with LoRA; the model is that of checkpointer.checkpoint_dir
    Taken model.lora_attn_modules train.0.modules = ["q_proj"]
    Taken checkpointer.checkpoint_dir model.source = "/tmp/student"
    NotSupported checkpointer.adapter_checkpoint lora.init is a folder in PEFT's layout: adapter_config.json and adapter_model.safetensors
    NotSupported teacher_checkpointer.checkpoint_dir ft logits TEACHER RECIPE --out DIR writes the rows of a teacher
    Taken context_parallel_dim parallel.context = 2
    NoEffect batch_size_val evaluation takes run.micro_rows at a time
    NoEffect tensor_parallel_plan._component_ parallel.tensor has one plan: heads of attention, and columns of the feed-forward
    NotSupported dataset._component_ source = "tatsu-lab/alpaca", mask = "none": prompts are targets too; there the user's message has the text of Alpaca's prompt, here instruction and input alone: write prompts with that text, and completions, into the rows

    NoEffect command task = "sft" is next-token training
    NotSupported model_name_or_path model.source = "$M": variables are not expanded here: write the value
    Converted dataset_name data.train: source = "a/b"
    NotSupported dataset_kwargs.skip_prepare_dataset rows of tokens have format = "tokens" in [[data.train]]
    Converted use_peft a [[train]] rule with method = "lora", its default
    NotSupported gradient_accumulation_steps a number is wanted: run.batch_rows
    NotSupported $@ arguments of the script: write them into its command
    "#);
}

/// LLaMA-Factory trains some modules of some layers in full.
#[test]
fn modules_of_frozen_layers_become_a_rule() {
    let text = "model_name_or_path: m\nfinetuning_type: freeze\nfreeze_trainable_layers: 2\ndataset: a\n";
    let modules =
        |named: &str| recipe(&format!("{text}freeze_trainable_modules: {named}\n")).train[0].modules.clone();
    assert_eq!(modules("mlp,self_attn"), ["mlp", "attention"]);
    assert_eq!(modules("all"), ["attention", "mlp", "norms"]);
    let other = of(&format!("{text}freeze_trainable_modules: mlp,input_layernorm\n"));
    assert_eq!(fate(&other, "freeze_trainable_modules"), Fate::NotSupported, "{}", listing(&other));
}

/// LLaMA-Factory's method "freeze" trains the last two layers by default.
#[test]
fn frozen_layers_have_a_default() {
    let text = "model_name_or_path: m\nfinetuning_type: freeze\ndataset: a\n";
    let imported = of(text);
    let written =
        |imported: &Imported| imported.recipe.clone().unwrap_or_default().contains("layers = \"-2:\"");
    assert_eq!(fate(&imported, "freeze_trainable_layers"), Fate::Default, "{}", listing(&imported));
    assert!(written(&imported), "{:?}", imported.recipe);
    for method in ["full", "lora"] {
        let other = of(&text.replace("freeze", method));
        let told = other.lines.iter().any(|l| l.key == "freeze_trainable_layers");
        assert!(!told && !written(&other), "{}", listing(&other));
    }
}

/// Keys of `dataset_info.json` without a counterpart are told, and a file that is no JSON.
#[test]
fn lost_keys_of_dataset_info_are_told() {
    struct Info(&'static str);
    impl Around for Info {
        fn read(&self, path: &str) -> Option<String> {
            (path == "dir/dataset_info.json").then(|| self.0.into())
        }
    }
    let text = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: mine\ndataset_dir: dir\n";
    let line = |info: &'static str| {
        let imported = import(text, "a.yaml", &Info(info)).expect("an import");
        imported.lines.into_iter().find(|l| l.key == "dataset").expect("a line")
    };
    let hub = line(r#"{"mine": {"hf_hub_url": "x/y", "ms_hub_url": "z", "revision": "r", "folder": null}}"#);
    assert_eq!(hub.fate, Fate::Converted, "{}", hub.text);
    for (info, advice) in [
        (
            r#"{"mine": {"file_name": "a.json", "num_samples": 7}}"#,
            "; mine: num_samples = 7 random rows: max_samples takes the first ones",
        ),
        (
            r#"{"mine": {"hf_hub_url": "x/y", "folder": "f"}}"#,
            "; mine: no key folder here: ft schema lists them",
        ),
        (r#"{"mine": {"ms_hub_url": "x/y"}}"#, "; mine: ms_hub_url is not read: write the rows into a file"),
        (
            r#"{"mine": {"script_url": "x", "file_name": "a.json"}}"#,
            "; mine: script_url is not read: write the rows into a file",
        ),
        (
            r#"{"mine": {"file_name": "a.json", "surprise": 1}}"#,
            "; mine: no key surprise here: ft schema lists them",
        ),
        (
            "{\"mine\": }",
            "; dir/dataset_info.json, which describes them, is no JSON: expected value at line 1 column ",
        ),
    ] {
        let told = line(info);
        assert_eq!(told.fate, Fate::NotSupported, "{info}: {}", told.text);
        assert!(told.text.contains(advice), "{info}: {}", told.text);
    }
}

/// `num_samples` of LLaMA-Factory's data sets, beside `max_samples` of all.
#[test]
fn the_fewer_samples_are_read() {
    struct Info;
    impl Around for Info {
        fn read(&self, path: &str) -> Option<String> {
            let info = r#"{"a": {"file_name": "a.json", "num_samples": 20}, "b": {"file_name": "b.json"}}"#;
            (path == "data/dataset_info.json").then(|| info.into())
        }
    }
    for (more, expected) in [
        ("", [Some(20), None]),
        ("max_samples: 1000\n", [Some(20), Some(1000)]),
        ("max_samples: 7\n", [Some(7), Some(7)]),
    ] {
        let text = format!("{}{more}", FACTORY.replace("dataset: a", "dataset: a,b"));
        let imported = import(&text, "a.yaml", &Info).expect("an import");
        assert_eq!(fate(&imported, "dataset"), Fate::NotSupported, "{}", listing(&imported));
        let read: Vec<_> = parsed(&imported).data.train.iter().map(|s| s.max_samples).collect();
        assert_eq!(read, expected, "{more}");
    }
}

/// Data sets of LLaMA-Factory are described by a file beside them.
#[test]
fn dataset_info_describes_sources() {
    struct Info;
    impl Around for Info {
        fn read(&self, path: &str) -> Option<String> {
            let info = r#"{"mine": {"file_name": "rows.json", "columns": {"prompt": "q", "response": "a"}},
                "talk": {"hf_hub_url": "x/y", "formatting": "sharegpt", "split": "train", "columns": {"messages": "conversations"}},
                "pairs": {"file_name": "b.json", "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
                "plain": {"file_name": "c.json", "columns": {"prompt": "prompt", "chosen": "good"}},
                "rated": {"file_name": "d.json", "formatting": "sharegpt",
                    "columns": {"messages": "talk", "kto_tag": "liked"}},
                "lists": {"file_name": "e.json", "formatting": "sharegpt", "ranking": true,
                    "columns": {"messages": "talk", "chosen": "chosen", "rejected": "rejected"}}}"#;
            (path == "dir/dataset_info.json").then(|| info.into())
        }
        fn groups(&self, _: &str) -> Option<Vec<String>> {
            Some(["attention", "experts", "router"].map(String::from).into())
        }
    }
    let text = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nlora_target: all\ndataset: mine, talk\ndataset_dir: dir\n";
    let raw =
        import(&text.replace("sft", "pt").replace(", talk", ", other"), "a.yaml", &Info).expect("an import");
    let recipe = parsed(&raw);
    assert!(recipe.data.pack, "rows of stage pt are packed");
    assert!(recipe.data.train.iter().all(|s| s.format == Some(Format::Text)));
    assert_eq!((recipe.data.train[0].fields["text"].as_str(), recipe.data.train[1].fields.len()), ("q", 0));
    let unpacked = "model_name_or_path: m\nstage: pt\nfinetuning_type: lora\npacking: false\ndataset: a";
    assert!(!super::tests::recipe(unpacked).data.pack);
    let imported = import(text, "a.yaml", &Info).expect("an import");
    let recipe = parsed(&imported);
    let sources = &recipe.data.train;
    assert_eq!((sources[0].source.as_str(), sources[1].source.as_str()), ("dir/rows.json", "x/y"));
    assert_eq!(sources[0].fields["instruction"], "q");
    assert_eq!(recipe.train[0].modules, ["attention", "experts"]);
    let pairs = text.replace("sft", "dpo").replace("mine, talk", "pairs");
    let recipe = parsed(&import(&pairs, "a.yaml", &Info).expect("an import"));
    let fields = ["prompt", "chosen", "rejected"].map(|field| recipe.data.train[0].fields[field].as_str());
    assert_eq!(fields, ["q", "good", "bad"]);
    let plain = parsed(&import(&pairs.replace("pairs", "plain"), "a.yaml", &Info).expect("an import"));
    let fields = &plain.data.train[0].fields;
    assert_eq!(
        (fields.get("prompt"), fields["chosen"].as_str()),
        (None, "good"),
        "LLaMA-Factory's default is instruction"
    );
    assert_eq!(plain.data.train[0].form, Some(Form::Chat), "rows of texts");
    let lists = parsed(&import(&pairs.replace("pairs", "lists"), "a.yaml", &Info).expect("an import"));
    assert_eq!((lists.data.train[0].form, lists.data.train[0].fields["prompt"].as_str()), (None, "talk"));
    let rated = import(&pairs.replace("dpo", "kto").replace("pairs", "rated"), "a.yaml", &Info);
    let rated = rated.expect("an import");
    assert_eq!(fate(&rated, "dataset"), Fate::Converted, "{}", listing(&rated));
    let fields = parsed(&rated).data.train[0].fields.clone();
    assert_eq!(
        fields.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>(),
        ["label=liked", "messages=talk"]
    );
}
