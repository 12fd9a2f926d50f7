//! The first minutes: version, doctor, the quickstart in an empty folder, words of other programs.

use crate::world::World;

#[test]
fn the_quickstart_needs_nothing_but_the_binary() {
    let w = World::new();
    let r = w.ok(&["run", "quickstart", "run.steps=1", "run.eval_at_start=false", "run.eval_every=0"]);
    assert!(r.err.contains("written here from the binary: data/model, data/quickstart"), "{}", r.err);
    // what is there stays
    let rows = w.read("data/quickstart/eval.jsonl");
    w.write("data/quickstart/train.jsonl", &rows);
    let r = w.ok(&["check", "quickstart"]);
    assert!(!r.err.contains("written here"), "{}", r.err);
    assert_eq!(w.read("data/quickstart/train.jsonl"), rows);
    // a recipe of one's own, or another model, gets nothing
    let other = World::new();
    other.write("mine.toml", include_str!("../../../recipes/quickstart.toml"));
    assert_eq!(other.ft(&["check", "mine.toml"]).code, 4);
    other.ok(&["plan", "quickstart"]);
    assert!(other.path("data/model/config.json").exists() && !other.path("data/quickstart").exists());
}

#[test]
fn doctor_and_version_show_machine_and_features() {
    let w = World::new();
    let r = w.ok(&["doctor"]);
    for line in
        ["processor", "instructions", "memory", "CUDA", "MPI", "hub", "run.device    auto: ", "threads"]
    {
        assert!(r.out.contains(line), "{line}\n{}", r.out);
    }
    let r = w.ok(&["--version"]);
    assert!(r.out.starts_with(concat!("ft ", env!("CARGO_PKG_VERSION"), " (")), "{}", r.out);
    assert!(r.out.contains("features: ") && r.out.contains("hub"), "{}", r.out);
    assert_eq!(w.ok(&["-V"]).out.lines().count(), 1);
}

#[test]
fn verbs_of_other_programs_are_refused_with_a_hint() {
    let w = World::new();
    for (theirs, ours) in [
        ("train", "ft run"),
        ("finetune", "ft run"),
        ("sft", "ft run"),
        ("inference", "ft chat"),
        ("generate", "ft chat"),
        ("convert", "ft import"),
        ("help-me", "ft --help"),
    ] {
        let r = w.ft(&[theirs, "x"]);
        assert_eq!(r.code, 2, "{theirs}");
        assert!(r.err.contains("hint: ") && r.err.contains(ours), "{theirs}: {}", r.err);
    }
}
