//! Snapshots of user-visible text: help, plans, checks. Changes show up in review.

use crate::world::World;
use std::fmt::Write;

const VERBS: &[&str] = &[
    "",
    "run",
    "check",
    "data",
    "eval",
    "chat",
    "merge",
    "logits",
    "routes",
    "export",
    "bench",
    "plan",
    "quantize",
    "report",
    "serve",
    "recipes",
    "init",
    "import",
    "schema",
    "push",
    "doctor",
    "completions",
    "man",
];

#[test]
fn help_of_each_verb() {
    let w = World::new();
    let mut all = String::new();
    for verb in VERBS.iter().copied() {
        let args: Vec<&str> = [verb, "--help"].into_iter().filter(|a| !a.is_empty()).collect();
        let r = w.ft(&args);
        assert_eq!(r.code, 0, "{verb}: {}", r.err);
        writeln!(all, "===== ft {}\n{}", args.join(" "), r.out).expect("a string");
    }
    for line in w.ft(&["--help"]).out.lines().filter(|l| l.starts_with("  ") && !l.trim().starts_with('-')) {
        let verb = line.split_whitespace().next().unwrap_or_default();
        assert!(verb == "help" || VERBS.contains(&verb), "{verb} has no snapshot");
    }
    insta::assert_snapshot!(all);
}

/// Plans for a fully specified machine, independent of the present one.
#[test]
fn plans_of_shipped_recipes() {
    let w = World::new();
    let machine =
        ["run.device=cuda", "memory.budget=44GiB", "memory.host_budget=128GiB", "memory.disk_budget=1TiB"];
    let mut all = String::new();
    for (name, set, code) in [
        ("qwen3-8b-qlora", "run.seed=0", 0),
        ("mixtral-8x7b-6layers-2experts", "run.seed=0", 0),
        ("qwen3-8b-full", "memory.budget=24GiB", 8),
        ("llama-3.3-70b-qlora", "parallel.zero=3", 0),
    ] {
        let recipe = ft::recipe::Shipped::find(name).expect("a shipped recipe");
        let file = format!("{name}.toml");
        w.write(&file, recipe.text);
        let own = set.split('=').next().unwrap_or_default();
        let mut args = vec!["plan", &file];
        args.extend(machine.iter().filter(|m| !m.starts_with(own)));
        args.push(set);
        if set == "parallel.zero=3" {
            args.extend(["parallel.data=2", "--verbose"]);
        }
        let r = w.ft(&args);
        writeln!(all, "===== ft {}\nexit code {}\n{}{}", args.join(" "), r.code, r.out, r.err)
            .expect("a string");
        assert_eq!(r.code, code, "{name}: {}{}", r.out, r.err);
    }
    insta::assert_snapshot!(all.replace(&w.path("").display().to_string(), "FOLDER/"));
}

#[test]
fn output_of_ft_check() {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", crate::world::recipe(crate::world::LORA));
    let r = w.ft(&["check", "r.toml", "run.device=cpu"]);
    assert_eq!(r.code, 0, "{}", r.err);
    insta::assert_snapshot!(format!("{}{}", r.out, r.err));
}
