//! Parsing of recipes, rejected recipes, and rendering of problems.

mod properties;

use super::*;
use crate::check::values;
use crate::load::LARGEST;
use crate::syntax::{MAX_PROBLEMS, Value, join, parse_value};
use ft_base::error::{ExitCode, Failure};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const SMALL: &str = r#"
[model]
source = "m"
[[train]]
modules = ["attention"]
[[data.train]]
source = "d.jsonl"
format = "messages"
"#;

fn parse(text: &str, file: &str, overrides: &[&str]) -> Result<Recipe, Error> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    Recipe::parse(text, file, &overrides)
}

fn small(overrides: &[&str]) -> Result<Recipe, Error> {
    parse(SMALL, "dir/small.toml", overrides)
}

fn ok(overrides: &[&str]) -> Recipe {
    small(overrides).unwrap_or_else(|e| panic!("{overrides:?}: {e}"))
}

fn message(overrides: &[&str]) -> String {
    match small(overrides) {
        Ok(_) => panic!("{overrides:?} was accepted"),
        Err(e) => e.to_string(),
    }
}

/// The TOML files of a folder of the repository, by name.
fn recipes_in(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(folder);
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .collect();
    files.sort();
    files
}

/// All defaults, by name.
#[test]
fn a_minimal_recipe_gets_all_defaults() {
    let keys = ok(&[]).math_keys();
    let all = ok(&[]);
    assert_eq!(all.name, "small");
    assert_eq!(all.run.output, Path::new("runs/small"));
    insta::assert_snapshot!(all.to_toml());
    assert_eq!(keys["optimizer.lr"], "(default)");
    assert_eq!(all.optimizer.peak_lr(Method::Lora), 2e-4);
    assert_eq!(all.optimizer.peak_lr(Method::Full), 1e-5);
}

/// Every broken recipe is rejected, and every problem has line and column. The rendered problems are a
/// snapshot.
#[test]
fn broken_recipes_are_refused_with_line_and_column() {
    let files = recipes_in("tests/fixtures/broken-recipes");
    assert_eq!(files.len(), BROKEN, "the corpus lost or won a recipe");
    let mut all = String::new();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let error = match Recipe::build(&std::fs::read(file).unwrap(), Path::new(&name), &[], false) {
            Ok(_) => panic!("{name} was accepted"),
            Err(e) => e,
        };
        assert!(!error.problems().is_empty(), "{name}");
        for problem in error.problems() {
            let p = &problem.place;
            assert!(p.line > 0 && p.column > 0, "{name}: {} has no line and column", problem.message);
        }
        assert_eq!(error.exit_code(), ExitCode::Usage);
        writeln!(all, "===== {name}\n{error}\n").unwrap();
    }
    insta::assert_snapshot!(all);
}

const BROKEN: usize = 180;

/// One mistake results in one message, without consequences of the mistake.
#[test]
fn one_mistake_one_message() {
    let several = [
        "many",
        "parallel-too-many-ranks",
        "model-other-tools-name",
        "toml-two-errors-and-a-typo",
        "train-rank-with-full",
        "crlf",
        "empty",
        "train-target-modules",
    ];
    let mut seen = 0;
    for path in recipes_in("tests/fixtures/broken-recipes") {
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        if !several.contains(&stem.as_str()) {
            let error = Recipe::load(&path, &[]).unwrap_err();
            seen += 1;
            assert_eq!(error.problems().len(), 1, "{stem}: {error}");
        }
    }
    assert_eq!(seen + several.len(), BROKEN);
}

#[test]
fn shipped_recipes_are_good_and_all_listed() {
    let in_folder: BTreeSet<String> = recipes_in("recipes")
        .iter()
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    let listed: BTreeSet<String> = SHIPPED.iter().map(|s| s.name.to_string()).collect();
    assert_eq!(in_folder, listed);
    for s in SHIPPED {
        let recipe =
            Recipe::parse(s.text, &format!("{}.toml", s.name), &[]).unwrap_or_else(|e| panic!("{e}"));
        assert!(!recipe.train.is_empty(), "{}", s.name);
        let header = s.text.lines().take_while(|l| l.starts_with('#')).count();
        assert!(header >= 3 && s.title().len() > 10, "{} says too little at its top", s.name);
    }
    let error = Shipped::find("qwen3-8b-lorra").unwrap_err().to_string();
    assert!(error.contains("did you mean qwen3-8b-lora?"), "{error}");
}

#[test]
fn overrides_win_over_the_file() {
    let r = ok(&[
        "run.seed=7",
        "train.0.rank=8",
        "train.0.layers=-6:",
        "data.train.0.source=other.jsonl",
        "optimizer.betas=[0.8, 0.9]",
        "model.override.rope_scaling.factor=2.0",
        "model.source=org/name#1",
        "run.output = \"a b/{name}\"",
    ]);
    assert_eq!((r.run.seed, r.train[0].spec().rank), (7, 8));
    assert_eq!(r.train[0].layers, Some(LayerSet::Last(6)));
    assert_eq!(r.data.train[0].source, "other.jsonl");
    assert_eq!(r.optimizer.betas, [0.8, 0.9]);
    assert_eq!(r.model.overrides["rope_scaling"]["factor"], 2.0);
    assert_eq!(r.model.source, "org/name#1");
    assert_eq!(r.run.output, Path::new("a b/small"));
    assert_eq!(r.place("run.seed").to_string(), "command line: run.seed=7");
    assert_eq!(r.place("train.0.modules").to_string(), "dir/small.toml:5:11");
    assert_eq!(r.train[0].place.to_string(), "dir/small.toml:4:1");
    assert_eq!(r.place("data.train.0.weight").to_string(), "dir/small.toml:6:1");
    assert_eq!(r.place("optimizer.lr").to_string(), "command line: optimizer.betas=[0.8, 0.9]");
    assert_eq!(r.place("memory.pin").to_string(), "dir/small.toml");
}

/// A key on the command line removes a conflicting key of the file.
#[test]
fn epochs_on_the_command_line_win_over_steps_in_the_file() {
    let text = format!("{SMALL}[run]\nsteps = 5\n[optimizer]\nwarmup_ratio = 0.1\n");
    let length = |o: &[&str]| {
        let r = parse(&text, "x.toml", o).unwrap_or_else(|e| panic!("{e}"));
        (r.run.length(), r.optimizer.warmup(40))
    };
    assert_eq!(length(&[]), (Length::Steps(5), 4));
    assert_eq!(length(&["run.epochs=2"]).0, Length::Epochs(2.0));
    assert_eq!(length(&["run.epochs=2", "run.steps=3"]).0, Length::Steps(3));
    assert_eq!(length(&["optimizer.warmup_steps=2"]).1, 2);
}

#[test]
fn bad_overrides_are_refused() {
    let cases: &[&[&str]] = &[
        &["run.sed=1"],
        &["run.seed=x"],
        &["run.seed"],
        &["run.seed="],
        &["=3"],
        &["run..seed=3"],
        &["train.3.rank=8"],
        &["data.eval.0.source=x"],
        &["train.0.modules.5=mlp"],
        &["model.source.x=1"],
        &["optimizer.betas=[0.9"],
        &["run.seed=1\nkeep=3"],
        &["run.seed=1", "run.seed=2"],
        &["run.batch_rows=10", "run.micro_rows=4"],
        &["parallel.tensor=2", "log.samples=['a']"],
        &["log.mlflow='http://b\u{fc}cher.example'"],
        &["optimizer.warmup_steps=1", "optimizer.warmup_ratio=0.1"],
        &["lora=3"],
    ];
    let mut all = String::new();
    for case in cases {
        let text = message(case);
        assert!(text.contains("command line: "), "{text}");
        writeln!(all, "===== {case:?}\n{text}\n").unwrap();
    }
    insta::assert_snapshot!(all);
}

/// Also beside other problems, and with a slash in it.
#[test]
fn messages_do_not_show_the_password_of_a_server() {
    let url = "http://user:s3cret/s3cret@h";
    let file = parse(&format!("{SMALL}[log]\nmlflow = \"{url}\"\n"), "r.toml", &[]).unwrap_err();
    let given = [
        format!("log.mlflow='{url}'"),
        format!("log.mlflow={}", url.replace('/', "")),
        "log.mlflow=http://user:s3cret@h".into(),
        "log.mlflow=user:s3cret@h".into(),
        format!("log.mlflw={url}"),
        format!("log.mlflow=\"{url}"),
    ];
    let twice = message(&[given[0].as_str(), given[1].as_str()]);
    for text in given.iter().map(|set| message(&[set.as_str()])).chain([file.to_string(), twice]) {
        assert!(text.contains("mlfl") && text.contains("***") && !text.contains("s3cret"), "{text}");
    }
    assert!(ok(&["log.mlflow=http://h:5000/a@b"]).log.mlflow.is_some());
    let revision = message(&["data.train.0.sorce=hf://datasets/own/name@main"]);
    assert!(revision.contains("own/name@main"), "{revision}");
}

/// Values that TOML takes for something else, and short forms.
#[test]
fn overrides_have_the_type_of_their_key() {
    assert_eq!(ok(&["name=7"]).name, "7");
    assert_eq!(ok(&["name=2026-11-23"]).name, "2026-11-23");
    assert_eq!(ok(&["model.revision=1e5"]).model.revision, "1e5");
    for slice in ["[-50:]", "[:20%]", "[100:200]"] {
        let r = ok(&[&format!("data.train.0.split={slice}")]);
        assert_eq!(r.data.train[0].split.as_deref(), Some(slice));
    }
    assert_eq!(ok(&["data.train.0.split='[5:]'"]).data.train[0].split.as_deref(), Some("[5:]"));
    assert!(message(&["data.train.0.split=[-50:"]).contains("a slice is [100:200]"));
    assert!(message(&["train.0.modules=['a'"]).contains("is not TOML"));
    let r = ok(&["data.train=my.jsonl", "data.eval='your.csv'"]);
    assert_eq!((r.data.train.len(), r.data.train[0].source.as_str()), (1, "my.jsonl"));
    assert_eq!((r.data.train[0].format, r.data.eval[0].source.as_str()), (None, "your.csv"));
    assert_eq!(ok(&["memory.budget=48G"]).memory.budget, Some(48_000_000_000));
    let told = message(&["run.device=cuda:1"]);
    assert!(told.contains("CUDA_VISIBLE_DEVICES=1 ft run .."), "{told}");
}

/// Keys that depend on machine, launch or model are told, once those are known.
#[test]
fn keys_without_effect_are_told() {
    let told = |set: &str, facts: Facts| {
        let r = ok(&[set]);
        r.warnings(facts).iter().any(|w| w.starts_with("command line: ") && w.contains(" does nothing"))
    };
    let cpu = Facts {
        cuda: Some(false),
        in_f32: Some(true),
        four_bit: Some(false),
        is_folder: Some(true),
        resolved: true,
    };
    let gpu =
        Facts { cuda: Some(true), in_f32: Some(false), four_bit: Some(true), is_folder: Some(false), ..cpu };
    for (set, on_gpu) in [
        ("model.revision=v2", false),
        ("memory.dequantize=per_layer", false),
        ("memory.pin=false", false),
        ("memory.offload=['params']", false),
        ("parallel.zero=2", true),
        ("parallel.timeout=9", true),
        ("optimizer.decay=all", true),
        ("run.eval_at_start=true", true),
        ("generate.max_new_tokens=9", true),
        ("data.train.0.revision=v2", true),
    ] {
        assert!(told(set, cpu) && told(set, gpu) == on_gpu, "{set}");
        // nothing is said of what is not known
        assert!(on_gpu || !told(set, Facts::default()), "{set}");
    }
    for used in ["optimizer.weight_decay=0.1", "parallel.zero=0", "run.steps=3", "memory.pin=true"] {
        assert!(ok(&[used]).warnings(cpu).is_empty(), "{used}");
    }
    let r = ok(&["memory.offload=['activations']", "memory.recompute=none"]);
    assert!(r.warnings(gpu)[0].contains("\"activations\" does nothing with memory.recompute"));
    let r = ok(&["train.0.method=full", "optimizer.master=f32"]);
    assert_eq!((r.warnings(cpu).len(), r.warnings(gpu).len()), (1, 0));
    // the rules of a resolved recipe have values of their own
    let resolved = ok(&[]).to_toml();
    for set in ["lora.rank=64", "lora.alpha=9", "lora.dropout=0.5", "lora.rslora=true", "lora.dora=true"] {
        let r =
            Recipe::parse(&resolved, "recipe.toml", &[set.into()]).unwrap_or_else(|e| panic!("{set}: {e}"));
        let says = format!("{} does nothing: every rule", set.split_once('=').unwrap().0);
        assert!(r.warnings(gpu).iter().any(|w| w.contains(&says)), "{set}: {:?}", r.warnings(gpu));
        assert!(ok(&[set]).warnings(gpu).is_empty(), "{set}");
    }
    assert!(ok(&["lora.rank=64", "train.0.rank=64"]).warnings(gpu).is_empty());
    // answers to log.samples have a length of their own
    let r = ok(&["log.samples=['a']", "generate.max_new_tokens=9"]);
    assert!(r.warnings(cpu)[0].contains("generate.max_new_tokens does nothing"));
}

/// Intervals beyond the run, warm-up of the whole run, masks of rows with labels.
#[test]
fn values_that_never_act_are_told() {
    let warned =
        |set: &[&str], says: &str| ok(set).warnings(Facts::default()).iter().any(|w| w.contains(says));
    let says = "optimizer.schedule does nothing with warmup_ratio";
    assert!(warned(&["optimizer.warmup_ratio=1.0", "optimizer.schedule=linear"], says));
    assert!(!warned(&["optimizer.warmup_ratio=0.5", "optimizer.schedule=linear"], says));
    for key in ["data.mask", "data.train.0.mask"] {
        let (none, says) = (format!("{key}=none"), format!("{key} does nothing: the labels"));
        assert!(warned(&["data.train.0.format=tokens", &none], &says), "{key}");
        assert!(!warned(&["data.train.0.format=text", &none], &says), "{key}");
    }
}

/// Keys with an effect that other keys do not show.
#[test]
fn keys_with_an_effect_are_accepted() {
    // samples are answered at each evaluation, also without data for one
    ok(&["run.eval_every=5", "log.samples=['a']"]);
    // an adapter trains its B and its modules_to_save without a rule
    let without = SMALL.replace("[[train]]\nmodules = [\"attention\"]", "[lora]\ninit = 'a'");
    for set in ["optimizer.lr_scale_b=16", "optimizer.master=none"] {
        Recipe::parse(&without, "x", &[set.into()]).unwrap_or_else(|e| panic!("{set}: {e}"));
    }
    // a score head trains in full
    let classify = [
        "task=classify",
        "classify.labels=['a', 'b']",
        "data.train.0.format=labeled",
        "optimizer.master=none",
    ];
    ok(&classify);
    assert!(message(&["optimizer.master=none"]).contains("optimizer.master does nothing"));
}

/// Elsewhere a default that is written out is accepted.
#[test]
fn a_key_of_a_rule_that_does_nothing_is_refused_with_its_default_too() {
    let told = message(&["train.0.modules=['new_tokens']", "train.0.tokens=[1]", "train.0.method=lora"]);
    assert!(told.contains("train.0.method does nothing"), "{told}");
}

/// Each field that the reader of a format honors can be renamed.
#[test]
fn fields_are_those_that_a_format_reads() {
    for (field, others) in [
        ("messages", &[][..]),
        ("role", &[]),
        ("conversations", &[]),
        ("weight", &["data.train.0.format=text"]),
        ("attention_mask", &["data.train.0.format=tokens"]),
        ("system", &["task=dpo", "data.train.0.format=preference"]),
        ("tools", &["task=kto", "data.train.0.format=unpaired"]),
        ("content", &["task=classify", "classify.num_labels=2", "data.train.0.format=labeled"]),
    ] {
        let fields = format!("data.train.0.fields={{{field}='mine'}}");
        let r = ok(&[others, &[&fields]].concat());
        assert_eq!(r.data.train[0].fields[field], "mine");
    }
    assert!(message(&["data.train.0.fields={instruction='mine'}"]).contains("has no field instruction"));
    let tools =
        ["data.train.0.format=alpaca", "data.train.0.fields={tools='mine'}", "data.train.0.form=plain"];
    assert!(message(&tools).contains("format \"alpaca\" in form \"plain\" has no field tools"));
    for form in [&[][..], &["data.train.0.form=chat"]] {
        ok(&[&tools[..2], form].concat());
    }
    for form in ["data.train.0.form=chat", "data.train.0.form=plain"] {
        ok(&["task=dpo", "data.train.0.format=preference", "data.train.0.fields={system='mine'}", form]);
    }
    let one = message(&["data.train.0.format=messages", "data.train.0.form=chat"]);
    assert!(one.contains("rows of this format have one form only"), "{one}");
}

/// A hint names a micro-batch within the bound of its key.
#[test]
fn hints_name_no_micro_batch_above_its_bound() {
    let told = |rows: &str| message(&["optimizer.in_backward=true", "run.clip=0", rows]);
    let small = told("run.batch_rows=65536");
    assert!(small.contains("write run.micro_rows = 65536, or run.batch_rows = 1"), "{small}");
    let large = told("run.batch_rows=65537");
    assert!(large.contains("write run.batch_rows = 1") && !large.contains("= 65537, or"), "{large}");
}

/// Rules and sources have their positions in lists of any length.
#[test]
fn entries_of_long_lists_have_positions() {
    let more = (0..1200).map(|i| format!("[[train]]\nmodules = [\"m{i}\"]\n")).collect::<String>();
    let r = Recipe::parse(&format!("{SMALL}{more}"), "r.toml", &[]).unwrap_or_else(|e| panic!("{e}"));
    let lines: Vec<usize> = r.train.iter().map(|rule| rule.place.line).collect();
    assert_eq!((lines.len(), lines[0], lines[1], lines[1200]), (1201, 4, 9, 2407));
    let of_command = ok(&["data.train=my.jsonl"]).data.train[0].place.to_string();
    assert_eq!(of_command, "command line: data.train=my.jsonl");
}

#[cfg(not(feature = "mpi"))]
#[test]
fn plans_accept_recipes_that_this_build_cannot_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.toml");
    std::fs::write(&path, format!("{SMALL}[parallel]\ncomm = \"mpi\"\n[memory]\nbudget = \"48GiB\"\n"))
        .unwrap();
    assert_eq!(Recipe::load(&path, &[]).unwrap_err().problems().len(), 1);
    let plan = Recipe::load_for_plan(&path, &[]).unwrap();
    assert_eq!(plan.memory.budget, Some(48 << 30));
    let said: Vec<&str> = plan.not_built.iter().map(|d| d.message.as_str()).collect();
    assert_eq!(said, ["not built yet: parallel.comm = \"mpi\""]);
    assert!(Recipe::load_for_plan(&path, &["run.micro_rows=auto".into()]).unwrap().run.micro_rows.is_auto());
    // An unsupported key with its default value is accepted.
    assert!(small(&["parallel.data=1", "router.aux_loss=0", "data.train.0.weight=1"]).is_ok());
}

/// A recipe of nothing but mistakes costs no more than one with a hundred.
#[test]
fn problems_are_bounded() {
    let text: String = (0..20_000).fold(String::new(), |t, i| t + &format!("k{i} = 1\n"));
    let error = Recipe::parse(&text, "x.toml", &[]).unwrap_err();
    assert_eq!(error.problems().len(), MAX_PROBLEMS);
    assert!(error.to_string().ends_with("100 or more problems in the recipe"));
}

#[test]
fn colour_is_for_terminals_only() {
    let error = small(&["run.sed=1"]).unwrap_err();
    assert!(error.render(true).contains("\u{1b}["));
    assert!(!error.render(false).contains('\u{1b}') && !error.to_string().contains('\u{1b}'));
}

/// Recipes of maximum size, in shapes on which a quadratic check would take too long.
#[test]
fn recipes_of_the_maximum_size_are_checked() {
    let n = LARGEST as usize;
    let many = |part: &str, count: usize| part.repeat(count);
    let shapes = [
        format!("a = [{}]", many("1,", n / 2 - 10)),
        format!("[model]\noverride = {{{}}}", (0..n / 9).map(|i| format!("k{i}=1,")).collect::<String>()),
        format!("train = [{}]", many("{},", n / 3 - 10)),
        format!("[[train]]\nmodules = [{}]", many("'a',", n / 4 - 10)),
        format!("[[train]]\nlayers = [{}]", (0..n / 6).map(|i| format!("{i},")).collect::<String>()),
        many("[[train]]\n", n / 10),
        many("=\n", n / 2),
    ];
    for text in shapes {
        let head: String = text.chars().take(30).collect();
        let said = Recipe::parse(&text, "x.toml", &[]).unwrap_err().to_string();
        assert!(said.contains("x.toml") && said.len() < 100_000, "{head}: {} bytes", said.len());
    }
}

#[test]
fn a_recipe_file_is_read_and_its_paths_resolved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.toml");
    let missing = Recipe::load(&path, &[]).unwrap_err().to_string();
    assert!(missing.contains("cannot read the recipe") && missing.contains("r.toml"), "{missing}");
    std::fs::write(&path, format!("\u{feff}{SMALL}")).unwrap();
    let recipe = Recipe::load(&path, &[]).unwrap();
    assert_eq!(recipe.folder, folder.path());
    std::fs::write(folder.path().join("only-here.jsonl"), "").unwrap();
    assert_eq!(recipe.resolve("only-here.jsonl"), folder.path().join("only-here.jsonl"));
    assert_eq!(recipe.resolve("Cargo.toml"), Path::new("Cargo.toml"));
    assert_eq!(recipe.resolve("nowhere.jsonl"), Path::new("nowhere.jsonl"));
    std::fs::write(&path, vec![b'#'; LARGEST as usize + 1]).unwrap();
    assert!(matches!(Recipe::load(&path, &[]), Err(Error::TooLarge { .. })));
    let shipped = Recipe::load(Path::new("qwen3-8b-lora"), &[]).unwrap();
    assert_eq!((shipped.name.as_str(), shipped.folder.as_path()), ("qwen3-8b-lora", Path::new("")));
    let near = Recipe::load(Path::new("qwen3-8b-lora.toml"), &[]).unwrap_err().to_string();
    assert!(near.contains("a shipped recipe has this name: qwen3-8b-lora"), "{near}");
}

#[test]
fn ranges_of_layers_and_experts_are_read() {
    let layers = |s: &str| ok(&[&format!("train.0.layers={s}")]).train[0].layers.clone();
    let within = |s: &str| match layers(s) {
        None => (0..8).collect::<Vec<_>>(),
        Some(set) => (0..8).filter(|i| set.contains(*i, 8)).collect(),
    };
    assert_eq!(layers("all"), None);
    assert_eq!(within("0-5"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(within("'3'"), [3]);
    assert_eq!(within("3"), [3]);
    assert_eq!(within("6-"), [6, 7]);
    assert_eq!(within("-6:"), [2, 3, 4, 5, 6, 7]);
    assert_eq!(within("-60:").len(), 8);
    assert_eq!(within("[0, 3, 5]"), [0, 3, 5]);
    let experts = |s: &str| ok(&[&format!("train.0.experts={s}")]).train[0].experts.clone();
    assert_eq!(experts("all"), Some(IndexSet::Range(0, None)));
    assert_eq!(experts("0-3"), Some(IndexSet::Range(0, Some(3))));
    assert_eq!(experts("[0, 7]"), Some(IndexSet::List(vec![0, 7])));
    assert_eq!(ok(&[]).train[0].experts, None);
}

#[test]
fn sizes_are_read_with_their_units() {
    for (text, bytes) in [
        ("48GiB", 48u64 << 30),
        ("1.5 MiB", 3 << 19),
        ("80GB", 80_000_000_000),
        ("1048576", 1 << 20),
        ("1024B", 1024),
        ("2kB", 2000),
        ("2K", 2000),
        ("48G", 48_000_000_000),
        ("1.5 T", 1_500_000_000_000),
        ("1048576TiB", 1 << 60),
    ] {
        assert_eq!(values::bytes(&Value::Text(text.into()), "b").unwrap(), bytes, "{text}");
    }
    for text in [
        "",
        "GiB",
        "1048577TiB",
        "1048575",
        "1..5GiB",
        "-1GiB",
        "0B",
        "1024",
        "1e30TiB",
        "48gib",
        "48g",
        "3B4",
        "9999999999TiB",
    ] {
        assert!(values::bytes(&Value::Text(text.into()), "b").is_err(), "{text}");
    }
}

/// The schema takes the sizes that recipes take.
#[test]
fn the_schema_has_the_units_of_sizes() {
    let schema = schema();
    let pattern = &schema["properties"]["memory"]["properties"]["budget"]["oneOf"][1]["pattern"];
    let pattern = regex::Regex::new(pattern.as_str().unwrap()).unwrap();
    let units = ["", "B", "k", "K", "M", "G", "T", "kB", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"];
    for text in units.map(|unit| format!("48000000 {unit}")) {
        assert!(pattern.is_match(&text), "{text}");
    }
    for unit in units.iter().filter(|unit| !unit.contains('T')) {
        let text = format!("48000000{unit}");
        assert!(values::bytes(&Value::Text(text.clone()), "b").is_ok(), "{text}");
    }
    for text in ["48gib", "48g", "3B4", "GiB", "-1GiB", "48 iB", ""] {
        assert!(!pattern.is_match(text), "{text}");
    }
}

#[test]
fn derived_values_follow_from_the_optimizer() {
    let optimizer = |keys: &[&str]| ok(keys).optimizer;
    let keeps = |keys: &[&str]| {
        let optimizer = optimizer(&[&["train.0.method=full"], keys].concat());
        [false, true].map(|in_f32| optimizer.keeps_master(in_f32))
    };
    assert_eq!(keeps(&[]), [true, true]);
    assert_eq!(keeps(&["optimizer.name=adamw8bit"]), [false, true]);
    assert_eq!(keeps(&["optimizer.name=adamw8bit", "optimizer.master=f32"]), [true, true]);
    assert_eq!(keeps(&["optimizer.master=none"]), [false, true]);
    let warmup = |keys: &[&str]| optimizer(keys).warmup(41);
    assert_eq!((warmup(&["optimizer.warmup_steps=7"]), warmup(&["optimizer.warmup_ratio=0.1"])), (7, 5));
    let b = optimizer(&["optimizer.lr_scale_b=16"]);
    assert_eq!((b.factor(2.0, false), b.factor(2.0, true)), (2.0, 32.0));
}

#[test]
fn regexes_match_whole_names() {
    let re = module_regex("/model[.]layers[.]\\d+|head/").unwrap().unwrap();
    assert!(re.is_match("model.layers.3") && re.is_match("head"));
    assert!(!re.is_match("model.layers.3.mlp") && !re.is_match("lm_head"));
    assert!(module_regex("/a)|(?:b/").unwrap().is_err(), "leaves the anchored group");
    assert!(module_regex("attention").is_none() && module_regex("/").is_none());
}

#[test]
fn rules_take_unset_keys_from_the_lora_table() {
    let text = SMALL.replace("[[train]]", "[lora]\nrank = 4\nalpha = 5\ndora = true\n[[train]]\nrank = 64");
    let spec = Recipe::parse(&text, "x", &[]).unwrap().train[0].spec();
    assert_eq!(spec, LoraSpec { rank: 64, alpha: 5.0, dropout: 0.0, rslora: false, dora: true });
    assert!(
        Recipe::parse(&SMALL.replace("[[train]]\nmodules = [\"attention\"]", "[lora]\ninit = 'a'"), "x", &[])
            .is_ok()
    );
}

/// Table, writer, schema and checks agree on the set of keys, for a recipe with all of them.
#[test]
fn table_writer_schema_and_checks_have_the_same_keys() {
    let mut table = BTreeSet::new();
    let mut defaults = 0;
    for (path, key) in all_keys() {
        if !matches!(key.kind, Kind::Table(_) | Kind::Tables(_)) {
            table.insert(path.to_string());
        }
        if let Unset::Toml(text) = key.default {
            let node = parse_value(text).unwrap_or_else(|| panic!("{path}: {text}"));
            // A default is accepted when written out.
            let required = ["train", "data"].contains(&path.as_str()) || matches!(key.kind, Kind::Tables(_));
            if !required && !path.starts_with("data.eval") {
                small(&[&format!("{path}={}", node.value)]).unwrap_or_else(|e| panic!("{path}: {e}"));
                defaults += 1;
            }
        }
    }
    assert!(table.len() > 80 && defaults > 50, "{} {defaults}", table.len());

    let text = format!("{SMALL}[[data.eval]]\nsource = \"e\"\nformat = \"messages\"\n");
    let written = |o: &[&str]| -> BTreeSet<String> {
        let recipe = parse(&text, "x.toml", o).unwrap_or_else(|e| panic!("{e}"));
        recipe.blocks().iter().flat_map(|b| b.paths()).collect()
    };
    let mut writer = written(&[]);
    writer.extend(written(&["run.steps=1", "optimizer.warmup_ratio=0.1"]));
    writer.extend(written(&["optimizer.name=galore", "train.0.method=full"]));
    writer.extend(written(&[
        "generate.samples=5",
        "run.eval_every=1",
        "model.dtype=f16",
        "model.quantize=nf4",
    ]));
    writer.extend(written(&["run.eval_every=1", "run.keep_best=true"]));
    writer.extend(written(&["log.mlflow='http://h'"]));
    writer.extend(written(&[
        "serve.devices=['cpu']",
        "data.train.0.format=alpaca",
        "data.eval.0.format=alpaca",
    ]));
    writer.extend(written(&["train.0.modules=['new_tokens']", "train.0.tokens=[1]"]));
    for task in ["dpo", "simpo", "cpo", "kto", "distill"] {
        let format = match task {
            "kto" => "unpaired",
            "distill" => "tokens",
            _ => "preference",
        };
        let formats = ["train", "eval"].map(|part| format!("data.{part}.0.format={format}"));
        writer.extend(written(&[&format!("task={task}"), &formats[0], &formats[1]]));
    }
    for labels in ["classify.labels=['a', 'b']", "classify.num_labels=3"] {
        let formats = ["train", "eval"].map(|part| format!("data.{part}.0.format=labeled"));
        writer.extend(written(&["task=classify", labels, &formats[0], &formats[1]]));
    }
    assert_eq!(writer, table);

    let mut in_schema = BTreeSet::new();
    schema_keys(&schema(), "", &mut in_schema);
    assert_eq!(in_schema, table);
}

/// Of two keys that stand for each other, the resolved recipe has the one in use.
#[test]
fn replaced_keys_are_left_out_of_the_resolved_recipe() {
    let keys = ok(&["run.steps=12", "optimizer.warmup_ratio=0.1"]).math_keys();
    let has = ["run.steps", "run.epochs", "optimizer.warmup_ratio", "optimizer.warmup_steps"];
    assert_eq!(has.map(|key| keys.contains_key(key)), [true, false, true, false]);
}

fn schema_keys(schema: &serde_json::Value, path: &str, keys: &mut BTreeSet<String>) {
    if let Some(properties) = schema["properties"].as_object() {
        assert_eq!(schema["additionalProperties"], false, "{path}");
        for (name, property) in properties {
            assert!(property["description"].as_str().is_some_and(|d| d.len() > 5), "{path}.{name}");
            schema_keys(property, &join(path, name), keys);
        }
    } else if schema["items"]["properties"].is_object() {
        schema_keys(&schema["items"], &format!("{path}.0"), keys);
    } else {
        keys.insert(path.to_string());
    }
}

/// Numbers outside of the range of f32 are rejected with a position, since updates use f32.
#[test]
fn numbers_outside_f32_are_refused() {
    for (set, key, says) in [
        ("optimizer.eps=1e-46", "optimizer.eps", "is 0 in f32"),
        ("optimizer.eps=1e39", "optimizer.eps", "is infinite in f32"),
        ("optimizer.lr=1e-50", "optimizer.lr", "is 0 in f32"),
        ("optimizer.lr=1e300", "optimizer.lr", "is infinite in f32"),
        ("optimizer.betas=[0.9, 0.99999999999]", "optimizer.betas", "is 1 in f32"),
        ("optimizer.betas=[0.999999999, 0.9]", "optimizer.betas", "is 1 in f32"),
        ("optimizer.weight_decay=1e-60", "optimizer.weight_decay", "is 0 in f32"),
        ("optimizer.min_lr=1e-60", "optimizer.min_lr", "is 0 in f32"),
        ("run.clip=1e-60", "run.clip", "is 0 in f32"),
        ("lora.dropout=0.999999999", "lora.dropout", "is 1 in f32"),
        ("train.0.lr_scale=1e-44", "train.0.lr_scale", "in f32"),
    ] {
        let Err(Error::Problems(p)) = small(&[set]) else { panic!("{set} was accepted") };
        let message = &p.list()[0].message;
        assert!(
            message.contains(key.rsplit('.').next().unwrap()) && message.contains(says),
            "{set}: {message}"
        );
    }
    for good in ["optimizer.eps=1e-44", "optimizer.betas=[0.0, 0.99999994]", "run.clip=0", "run.epochs=1e-60"]
    {
        ok(&[good]);
    }
}

/// The schema is a snapshot, so that a change of the interface is visible in review.
#[test]
fn schema_is_as_committed() {
    insta::assert_snapshot!(serde_json::to_string_pretty(&schema()).unwrap());
}

#[test]
fn math_keys_are_those_that_change_results() {
    let base = ok(&[]).math_keys();
    for same in [
        "name=x",
        "run.keep=9",
        "run.save_every=5",
        "run.output=x",
        "run.device=cpu",
        "memory.recompute=none",
        "memory.dequantize=per_layer",
        "data.drop_share=0.9",
        "lora.rank=16",
        "parallel.data=2",
        "parallel.zero=1",
        "parallel.timeout=9",
    ] {
        assert_eq!(ok(&[same]).math_keys(), base, "{same}");
    }
    for (other, key, value) in [
        ("run.seed=1", "run.seed", "1"),
        ("run.micro_rows=2", "run.micro_rows", "2"),
        ("run.micro_rows=auto", "run.micro_rows", "\"auto\""),
        ("lora.rank=8", "train.0.rank", "8"),
        ("lora.init=a", "lora.init", "\"a\""),
        ("lora.init=pissa", "lora.init", "\"pissa\""),
        ("data.neftune=5", "data.neftune", "5.0"),
        ("model.dtype=bf16", "model.dtype", "\"bf16\""),
        ("data.train.0.mask=none", "data.train.0.mask", "\"none\""),
        ("train.0.layers=3", "train.0.layers", "[3]"),
    ] {
        let changed = ok(&[other]).math_keys();
        let differ: Vec<&String> =
            changed.iter().filter(|(k, v)| base.get(*k) != Some(v)).map(|(k, _)| k).collect();
        assert_eq!(differ, [key], "{other}");
        assert_eq!(changed[key], value);
    }
}

/// A recipe is checked without candle, so that tools can depend on this crate alone.
#[test]
fn candle_is_no_dependency() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tree = std::process::Command::new(cargo);
    tree.args([
        "tree",
        "--offline",
        "--locked",
        "--package",
        "ft-recipe",
        "--edges",
        "normal",
        "--prefix",
        "none",
    ]);
    let out = tree.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let packages = String::from_utf8(out.stdout).unwrap();
    assert!(packages.contains("ft-base") && !packages.contains("candle"), "{packages}");
}

#[test]
fn a_layout_can_be_left_to_the_plan() {
    let text = |parallel: &str| format!("{parallel}\n{SMALL}");
    let auto = |parallel: &str, set: &[&str]| {
        parse(&text(parallel), "r.toml", set).map(|r| (r.auto_layout, r.parallel.data))
    };
    assert_eq!(auto("parallel = \"auto\"", &[]).expect("a recipe"), (true, 1));
    assert_eq!(auto("", &["parallel=auto"]).expect("a recipe"), (true, 1));
    assert_eq!(auto("parallel = { data = 2 }", &[]).expect("a recipe"), (false, 2));
    let e = auto("parallel = \"all\"", &[]).expect_err("a word").to_string();
    assert!(e.contains("parallel takes a table, not the string \"all\"") && e.contains("or \"auto\""), "{e}");
    let mut chosen = Recipe::parse(&text("parallel = \"auto\""), "r.toml", &[]).expect("a recipe");
    chosen.adopt_layout(&["parallel.data=2".into(), "parallel.zero=1".into()]).expect("a layout");
    assert_eq!((chosen.auto_layout, chosen.parallel.data, chosen.parallel.zero), (false, 2, 1));
}
