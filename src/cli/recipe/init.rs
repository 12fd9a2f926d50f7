//! `ft init`: asks some questions and writes a recipe.

use super::measure::{Length, Measured, task_of};
use super::plan::gpu;
use crate::cli::console::print;
use crate::infer::{usage, words};
use ft_base::store;
use ft_base::terminal::{shell_word, tell, warn, width, wrap};
use ft_engine::model::Config;
use ft_engine::model::modules::{Group, groups};
use ft_plan::{card, source};
use ft_recipe::{Recipe, Task};
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;

/// Training methods with descriptions.
const METHODS: &[(&str, &str)] = &[
    ("lora", "adapters on the base as it is"),
    ("qlora", "adapters on a 4-bit base: the least memory"),
    ("full", "every weight"),
];

/// Tokens of a row at the most, if the model has as many positions.
const LONGEST: usize = 2048;

/// Arguments of `ft init`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the recipe: NAME.toml is written
    #[arg(default_value = "recipe")]
    name: String,
    /// The model: hub id or folder; asked for if not given
    #[arg(long)]
    model: Option<String>,
    /// The task; found from the rows if not given
    #[arg(long, value_parser = words(Task::WORDS, Task::from_word))]
    task: Option<Task>,
    /// With --task classify: names of the classes, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    labels: Vec<String>,
    /// The training data: file, folder, pattern or hub dataset; again for each further source; asked for if not given
    #[arg(long)]
    data: Vec<String>,
    /// How to train; asked for if not given
    #[arg(long, value_parser = words(METHODS, |w| Some(w.to_string())))]
    method: Option<String>,
    /// Memory of the card, such as 24GB, or its name, such as L4, or "free" for the free memory; asked for if not given
    #[arg(long)]
    memory: Option<String>,
    /// Overwrite an existing file
    #[arg(long)]
    overwrite: bool,
}

/// Asks on stdin for missing options, and writes the recipe.
///
/// # Errors
/// Invalid answers; an existing file; a closed stdin. Data that needs other keys, after the recipe is written.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let path = PathBuf::from(format!("{}.toml", args.name.trim_end_matches(".toml")));
    if path.exists() && !args.overwrite {
        let what = format!("{} is there already\n  hint: another name, or --overwrite", path.display());
        return Err(usage(what));
    }
    let any = |answer: &str| Ok(answer.to_string());
    let model = ask(args.model.as_deref(), ("Model (hub id or folder)", "Qwen/Qwen3-0.6B"), any)?;
    let question = ("Training data (file, folder, pattern or hub dataset)", "data/train.jsonl");
    let data = if args.data.is_empty() { vec![ask(None, question, any)?] } else { args.data.clone() };
    let methods = METHODS.iter().map(|(w, what)| format!("{w}: {what}")).collect::<Vec<_>>().join("; ");
    let method = ask(args.method.as_deref(), (&format!("Method ({methods})"), "lora"), method_of)?;
    let memory = "Memory of the card, such as 24GB, or its name, such as L4 (free: the free memory)";
    let memory = ask(args.memory.as_deref(), (memory, "free"), budget)?;
    if args.labels.is_empty() == (args.task == Some(Task::Classify)) {
        return Err(usage("--labels names the classes of --task classify: --task classify --labels no,yes"));
    }
    let of = |(task, labels): &(Task, Vec<String>), measured: &Measured, config: Option<&Config>| {
        let recipe =
            text((*task, &model), &measured.sources(&data), &method, &memory, config, measured.length);
        task_text(*task, labels) + &recipe
    };
    // invalid answers are reported before anything is written
    let parse = |task: &(Task, Vec<String>), config: Option<&Config>| {
        Recipe::parse(&of(task, &Measured::default(), config), &path.display().to_string(), &[])
    };
    let task = match args.task {
        Some(task) => (task, args.labels.clone()),
        None => task_of(&parse(&(Task::Sft, Vec::new()), None)?),
    };
    // an unavailable model is no error here: `ft check` reports it
    let found = match source::find(&parse(&task, None)?) {
        Ok(found) => Some(found),
        Err(e) if e.of::<ft_hub::Error>().is_some() => {
            warn(&format!("the model's config is not at hand: {e}"));
            None
        }
        Err(e) => return Err(e),
    };
    let config = found.as_ref().map(|found| &found.config);
    let mut measured = Measured::default();
    let outcome = measured.read(&parse(&task, config)?, found.as_ref());
    if outcome.as_ref().is_err_and(|e| !is_for_a_key(e)) {
        return outcome;
    }
    store::write_atomic(&path, of(&task, &measured, config).as_bytes())?;
    let next = format!("ft check {0}, ft plan {0}, ft run {0}", shell_word(&path.to_string_lossy()));
    if outcome.is_err() {
        tell(&format!("{} is written; mend the error below, then {next}", path.display()));
        return outcome;
    }
    tell(&format!("next: {next}"));
    print(&format!("{}\n", path.display()))
}

/// Whether an error comes from existing data, and a key of the recipe may solve it.
fn is_for_a_key(e: &ft_base::Error) -> bool {
    e.of::<ft_data::Error>().is_some_and(|e| !matches!(e, ft_data::Error::Missing { .. }))
}

/// A training method by name, in any case.
fn method_of(answer: &str) -> ft_base::Result<String> {
    let known = METHODS.iter().find(|(word, _)| word.eq_ignore_ascii_case(answer));
    let known = known.map(|(word, _)| word.to_string());
    known.ok_or_else(|| usage(format!("{answer:?} is no method\n  hint: lora, qlora or full")))
}

/// Value of `memory.budget` of a card's name or of gigabytes; other sizes and "free" are left as they are.
fn budget(memory: &str) -> ft_base::Result<String> {
    match card(memory) {
        Some((_, bytes)) => Ok(format!("{}MiB", bytes >> 20)),
        None if memory.eq_ignore_ascii_case("free") => Ok("free".into()),
        None => match gpu("--memory", memory) {
            Err(_) if memory.starts_with(|c: char| c.is_ascii_digit()) => Ok(memory.into()),
            found => Ok(found?.1),
        },
    }
}

/// The value of an option, or of the answer to a question with a default. On a terminal, asks again after an invalid
/// answer.
fn ask(
    given: Option<&str>,
    (question, default): (&str, &str),
    value: impl Fn(&str) -> ft_base::Result<String>,
) -> ft_base::Result<String> {
    if let Some(given) = given {
        return value(given);
    }
    loop {
        match value(&answer(question, default)?) {
            Err(e) if io::stdin().is_terminal() => warn(&e.to_string()),
            value => return value,
        }
    }
}

/// Reads an answer from stdin; an empty line gives the default.
fn answer(question: &str, default: &str) -> ft_base::Result<String> {
    let cannot = |e: io::Error| usage(format!("cannot ask: {e}"));
    let mut err = io::stderr();
    let asked = wrap(&format!("{question} [{default}]:"), width());
    write!(err, "{asked} ").and_then(|()| err.flush()).map_err(cannot)?;
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line).map_err(cannot)?;
    if !io::stdin().is_terminal() {
        // echo the missing line break, as the answer was not typed
        let _ = writeln!(err);
    }
    if read == 0 {
        let hint = "hint: --model, --data, --method and --memory answer without being asked";
        return Err(usage(format!("stdin ended before {question:?} was answered\n  {hint}")));
    }
    let line = line.trim();
    Ok(if line.is_empty() { default.into() } else { line.into() })
}

/// Module groups trained by a method, out of the model's groups (by default a dense model's). Adapters go
/// on attention, feed-forward and expert linears; routers are rarely fine-tuned.
fn trained(method: &str, has: Option<&[Group]>) -> Vec<&'static str> {
    let dense = [Group::Attention, Group::Mlp, Group::Norms, Group::Embedding, Group::Head];
    let adapted = |g: &Group| matches!(g, Group::Attention | Group::Mlp | Group::Experts);
    let of = has.unwrap_or(&dense).iter();
    of.filter(|g| method == "full" || adapted(g)).map(|g| g.name()).collect()
}

/// Learning rate of a method and a task.
fn rate(method: &str, task: Task) -> &'static str {
    match (method, task.prefers()) {
        ("full", false) => "1e-5",
        ("full", true) => "5e-7",
        (_, false) => "2e-4",
        (_, true) => "5e-5",
    }
}

/// The keys of a task; empty for supervised fine-tuning.
fn task_text(task: Task, labels: &[String]) -> String {
    if task == Task::Sft {
        return String::new();
    }
    let mut out =
        format!("{:<33} # docs/tasks.md says what it learns\n\n", format!("task = \"{}\"", task.word()));
    if task == Task::Classify {
        let names = toml::Value::from(labels.to_vec());
        out += &format!("[classify]\nlabels = {names}\n\n");
    }
    out
}

/// The recipe with comments on the keys. `config` is the model's, if available.
fn text(
    (task, model): (Task, &str),
    sources: &str,
    method: &str,
    memory: &str,
    config: Option<&Config>,
    length: Option<Length>,
) -> String {
    let quote = |s: &str| toml::Value::from(s).to_string();
    let mut out = format!("[model]\nsource = {}\n", quote(model));
    if method == "qlora" {
        out += "quantize = \"nf4\"                  # decoder linears in 4 bits; adapters train on top\n";
    }
    if method != "full" {
        out += "\n[lora]\nrank = 16                         # width of the update; more learns more and \
        takes more memory\n\
                alpha = 32                        # its scale is alpha / rank\n";
    }
    out += "\n[[train]]                         # what trains; more rules may follow, a later one wins\n";
    if config.is_none() {
        out += "# The model's config was not at hand: these are modules of a dense model. A mixture of \
        experts has \"experts\"\n\
                # and \"router\", and mostly no \"mlp\".\n";
    }
    let modules = format!("modules = {:?}", trained(method, config.map(groups).as_deref()));
    out += &match method {
        "full" => format!("{modules}\nmethod = \"full\"\n"),
        _ => format!("{modules:<33} # of the model's groups; or names, \"/regex/\"\n"),
    };
    let Length { pack, batch_rows, epochs, steps, evaluates } = length.unwrap_or_default();
    out += &format!("\n[data]\ntrain = [{sources}]         # the format was found by the first row\n");
    if evaluates {
        out += "eval_share = 0.02                 # of the rows: evaluated on, not trained on\n";
    }
    let longest = format!("max_length = {}", config.map_or(LONGEST, |c| c.reach().min(LONGEST)));
    out += &format!("{longest:<33} # tokens a row at the most: ft data shows what it cuts\n");
    if !pack {
        out += "pack = false                      # a sample a row: packed, they would make few steps\n";
    }
    let counted = length.map_or(String::new(), |l| format!(": {} steps in all", l.steps));
    let every = (steps / 5).clamp(1, 100);
    out += &format!(
        "\n[run]\nepochs = {epochs}\n{:<33} # rows an optimizer step{counted}\n\
         micro_rows = \"auto\"               # rows at once: as many as is fastest\n\
         {:<33} # steps\n",
        format!("batch_rows = {batch_rows}"),
        format!("save_every = {every}"),
    );
    if evaluates {
        out += &format!("eval_every = {every}\n");
    }
    out += &format!("\n[optimizer]\nlr = {}\nwarmup_ratio = 0.03\n", rate(method, task));
    if memory != "free" {
        out += &format!("\n[memory]\nbudget = {}                  # ft plan says what fits\n", quote(memory));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_makes_a_recipe() {
        for (word, _) in Task::WORDS.iter().filter(|(word, _)| *word != "distill") {
            let task = Task::from_word(word).expect("a task");
            let labels = ["no".to_string(), "a \"b\"".to_string()];
            let all =
                task_text(task, &labels) + &text((task, "m"), "{ source = 'd' }", "lora", "free", None, None);
            let r = Recipe::parse(&all, "r.toml", &[]).unwrap_or_else(|e| panic!("{e}\n{all}"));
            assert_eq!((r.task, r.classify.labels.len()), (task, if task == Task::Classify { 2 } else { 0 }));
        }
    }

    #[test]
    fn a_card_stands_for_its_memory() -> ft_base::Result<()> {
        for (answer, is) in [
            ("L4", "20944MiB"),
            ("RTX 4090", "22393MiB"),
            ("24GB", "24GB"),
            ("24", "24GB"),
            ("22.5GiB", "22.5GiB"),
            ("Free", "free"),
        ] {
            assert_eq!(budget(answer)?, is);
        }
        assert!(budget("T4").is_err() && budget("many").is_err());
        Ok(())
    }

    #[test]
    fn every_answer_makes_a_recipe() {
        for (method, _) in METHODS {
            for memory in ["free", "24GiB"] {
                let text =
                    text((Task::Sft, "a \"b\""), "{ source = 'c\\d.csv' }", method, memory, None, None);
                let r = Recipe::parse(&text, "r.toml", &[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
                assert_eq!(
                    (r.model.source.as_str(), r.data.train[0].source.as_str()),
                    ("a \"b\"", "c\\d.csv")
                );
                assert_eq!(r.memory.budget.is_some(), memory != "free");
                assert_eq!(r.model.quantize == ft_recipe::Quantize::Nf4, *method == "qlora");
            }
        }
    }
}
