//! A command line, or a shell script with one: flags to entries with lines.

use super::entries::{Entries, Entry, twice};
use super::scalar::scalar;
use crate::check::Foreign;
use serde_json::Value;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// Words before the trainer's own flags: earlier flags are the launcher's.
const PROGRAMS: [&str; 4] = ["trl", FACTORY, TUNE, AXOLOTL];
const AXOLOTL: &str = "axolotl";
const TUNE: &str = "tune";
const FACTORY: &str = "llamafactory-cli";
/// The program of LLaMA-Factory as a module.
const FACTORY_MODULE: &str = "llamafactory.cli";
/// Modules behind `-m` with another program as an argument.
const LAUNCHERS: [&str; 3] = ["torch.distributed.", "accelerate.commands.", "deepspeed.launcher."];
/// Options of uv with the name of a package, and of conda with the name of an environment.
const PACKAGES: [&str; 7] = ["--with", "--from", "--extra", "--group", "--package", "-n", "--name"];
/// First words of a command.
const FIRST: [&str; 6] = ["trl", "accelerate", "torchrun", "deepspeed", FACTORY, "export"];
/// Programs before a command, with options of their own.
const RUNNERS: [&str; 10] =
    ["env", "exec", "nohup", "time", "uv", "uvx", "srun", "mpirun", "conda", "poetry"];
/// Tasks in names of scripts, also of tasks missing in ft; the first one found counts.
const TASKS: [&str; 26] = [
    "online",
    "dpo",
    "kto",
    "orpo",
    "cpo",
    "grpo",
    "rloo",
    "gkd",
    "gold",
    "ppo",
    "xpo",
    "nash",
    "bco",
    "prm",
    "tpo",
    "mpo",
    "gspo",
    "papo",
    "sdft",
    "sdpo",
    "ssd",
    "distillation",
    "minillm",
    "reward",
    "diffusion",
    "ebft",
];
/// Further scripts and verbs of training.
const TRAINS: [&str; 2] = ["sft", "train"];
/// Words in names of preparing, measuring or converting scripts.
const HELPERS: [&str; 16] = [
    "prepare",
    "preprocess",
    "build",
    "make",
    "create",
    "generate",
    "convert",
    "download",
    "data",
    "dataset",
    "eval",
    "evaluate",
    "evaluation",
    "test",
    "merge",
    "export",
];
/// The key of a command's configuration file.
pub(in crate::import) const FILE: &str = "config";
/// Environment variables read by a trainer.
const VARIABLES: [&str; 2] = ["MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"];

/// Variables set by a script, with their lines.
type Variables = BTreeMap<String, (String, usize)>;

/// Reads the training command, or else the command with the most flags.
pub(in crate::import) fn read(text: &str) -> Result<Entries, String> {
    let flags = |c: &Vec<(String, usize)>| c.iter().filter(|(w, _)| w.starts_with("--")).count();
    let (commands, variables) = commands(text);
    let lines: Vec<usize> =
        commands.iter().filter(|c| trains(c)).filter_map(|c| Some(c.first()?.1)).collect();
    if let [first, second, ..] = lines[..] {
        return Err(format!(
            "line {second}: a second training command, after that of line {first}: write it into a file of its own"
        ));
    }
    let best = commands.into_iter().max_by_key(|c| (trains(c), flags(c)));
    let best = best.filter(|c| trains(c) || flags(c) > 0);
    let command = best.ok_or("there is no command with --flags in it")?;
    let program = (0..command.len()).find(|i| is_program(&command, *i));
    if trains(&command) && program.is_some_and(|i| command[i].0 == TUNE) {
        return Err(
            "it trains by the file of --config: ft import that file (tune cp copies torchtune's own)".into(),
        );
    }
    let mut entries = entries(&command);
    once(&entries.list)?;
    entries.unfold();
    let read = variables.into_iter().filter(|(name, _)| VARIABLES.contains(&name.as_str()));
    entries.list.extend(read.map(|(path, (value, line))| Entry { path, value: value.into(), line }));
    Ok(entries)
}

/// Whether a text looks like a command line or a script.
pub(in crate::import) fn is_command(text: &str) -> bool {
    let is_flag =
        |l: &str| l.strip_prefix("--").is_some_and(|l| l.starts_with(|c: char| c.is_ascii_alphabetic()));
    text.starts_with("#!") || text.lines().map(str::trim_start).any(|l| is_flag(l) || starts_command(l))
}

/// Whether a line starts a command, behind variables and [`RUNNERS`].
fn starts_command(line: &str) -> bool {
    let is_first = |w: &str| FIRST.contains(&w) || is_python(w);
    let words = split(line, &Variables::new());
    let mut words = words.iter().map(String::as_str).skip_while(|w| assigned(w).is_some());
    match words.next() {
        Some(word) if RUNNERS.contains(&word) => words.any(is_first),
        Some(AXOLOTL | TUNE) => words.next().is_some_and(|verb| verb == "train" || verb == "run"),
        Some(word) => is_first(word) && words.next().is_some(),
        None => false,
    }
}

fn is_python(word: &str) -> bool {
    let name = word.rsplit('/').next().and_then(|name| name.strip_prefix("python"));
    name.is_some_and(|version| version.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
}

/// Name and value of a variable, set by a word.
fn assigned(word: &str) -> Option<(&str, &str)> {
    word.split_once('=')
        .filter(|(name, _)| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'))
}

/// Whether a word redirects output, and whether the next word is the file.
fn redirects(word: &str) -> Option<bool> {
    let rest = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '&');
    let file = rest.strip_prefix(">>").or_else(|| rest.strip_prefix('>'));
    file.or((rest == "<").then_some("")).map(str::is_empty)
}

/// The commands of a script: words with their lines. Variables set by the script are filled in.
fn commands(text: &str) -> (Vec<Vec<(String, usize)>>, Variables) {
    let mut commands = vec![Vec::new()];
    let mut variables = Variables::new();
    let mut continued = false;
    for (i, line) in text.lines().enumerate() {
        let (line, more) = match line.trim_end().strip_suffix('\\') {
            Some(l) => (l, true),
            None => (line, false),
        };
        if !continued {
            commands.push(Vec::new());
        }
        let mut words = split(line, &variables).into_iter();
        while let Some(word) = words.next() {
            if matches!(word.as_str(), ";" | "&" | "&&" | "|" | "||") {
                commands.push(Vec::new());
                continue;
            }
            if let Some(to_next) = redirects(&word) {
                words.by_ref().take(usize::from(to_next)).for_each(drop);
                continue;
            }
            match (commands.last_mut(), assigned(&word)) {
                (Some(c), Some((name, value))) if c.is_empty() => {
                    variables.insert(name.into(), (value.into(), i + 1));
                }
                (Some(c), _) if !(c.is_empty() && word == "export") => c.push((word, i + 1)),
                _ => {}
            }
        }
        continued = more;
    }
    (commands, variables)
}

/// The text for a `$`: the value of a variable set by the script, the default in `${NAME:-default}`, or the expansion
/// as written.
fn expanded(chars: &mut Peekable<Chars<'_>>, variables: &Variables) -> String {
    let braced = chars.next_if_eq(&'{').is_some();
    let mut name = String::new();
    while let Some(c) = chars.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
        name.push(c);
    }
    let value = variables.get(&name).map(|(value, _)| value.clone());
    if braced {
        let rest: String = chars.by_ref().take_while(|c| *c != '}').collect();
        let default = rest.strip_prefix(":-").or(rest.strip_prefix('-'));
        let plain = default.is_some() || rest.is_empty();
        let known = value.filter(|_| plain).or(default.map(String::from));
        return known.unwrap_or_else(|| format!("${{{name}{rest}}}"));
    }
    let mut written = format!("${name}");
    // a command or arithmetic
    let mut depth = 0;
    while name.is_empty()
        && let Some(c) = chars.next_if(|c| depth > 0 || *c == '(')
    {
        depth += i32::from(c == '(') - i32::from(c == ')');
        written.push(c);
        if depth == 0 {
            break;
        }
    }
    value.unwrap_or(written)
}

/// Splits a line as a shell does: quotes, backslashes, comments, `$NAME`.
fn split(line: &str, variables: &Variables) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let (mut word, mut inside, mut quote) = (String::new(), false, None);
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (q, Some(open)) if q == open => quote = None,
            ('\'' | '"', None) => (quote, inside) = (Some(c), true),
            ('\\', None | Some('"')) => word.extend(chars.next()),
            ('$', None | Some('"')) => {
                inside = true;
                word += &expanded(&mut chars, variables);
            }
            ('#', None) if !inside && word.is_empty() => break,
            (c, None) if c.is_whitespace() => {
                if inside || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                inside = false;
            }
            (c, _) => word.push(c),
        }
    }
    if inside || !word.is_empty() {
        words.push(word);
    }
    words
}

/// Whether the word at `i` is the trainer: a script, a module behind `-m`, or one of [`PROGRAMS`].
fn is_program(command: &[(String, usize)], i: usize) -> bool {
    let word = command[i].0.as_str();
    match i.checked_sub(1).map(|before| command[before].0.as_str()) {
        Some(option) if PACKAGES.contains(&option) => false,
        Some("-m") => !LAUNCHERS.iter().any(|l| word.starts_with(l)),
        _ => word.ends_with(".py") || PROGRAMS.contains(&word),
    }
}

/// The name of a script without folders and ending, or the last part of a module's.
fn stem(word: &str) -> &str {
    let name = word.rsplit('/').next().unwrap_or_default();
    name.strip_suffix(".py").or_else(|| name.rsplit('.').next()).unwrap_or_default()
}

/// The task in the name of a script: `run_dpo`, `dpo_vlm`, `reward_modeling`.
fn task_in(stem: &str) -> Option<&'static str> {
    TASKS.into_iter().find(|task| stem.split(['_', '-']).any(|word| word == *task))
}

/// Whether a word names a configuration.
pub(in crate::import) fn is_file(word: &str) -> bool {
    [".yaml", ".yml", ".json"].iter().any(|ending| word.ends_with(ending))
}

/// Whether a command trains, by the verb of its program, or by the name of a script or module with flags or a
/// configuration.
fn trains(command: &[(String, usize)]) -> bool {
    let Some(program) = (0..command.len()).find(|i| is_program(command, *i)) else { return false };
    let is_task = |word: &str| task_in(word).is_some() || TRAINS.contains(&word);
    let (word, rest) = (command[program].0.as_str(), &command[program + 1..]);
    if PROGRAMS.contains(&word) || word == FACTORY_MODULE {
        return rest.first().is_some_and(|(verb, _)| is_task(verb) || word == TUNE && verb == "run");
    }
    let helps = stem(word).split(['_', '-']).any(|part| HELPERS.contains(&part));
    is_task(stem(word)) && !helps && rest.iter().any(|(w, _)| w.starts_with("--") || is_file(w))
}

/// Refuses a flag of the trainer given twice.
fn once(list: &[Entry]) -> Result<(), String> {
    let mut lines = BTreeMap::new();
    let is_flag =
        |e: &&Entry| !e.path.starts_with("launch.") && !["command", "$@"].contains(&e.path.as_str());
    for e in list.iter().filter(is_flag) {
        if let Some(first) = lines.insert(e.path.as_str(), e.line) {
            return Err(format!("line {}: {}", e.line, twice(&e.path, first)));
        }
    }
    Ok(())
}

/// Flags, and words `key=value` behind a file, as entries: `launch.` before the program, plain after it, and the verb
/// as `command`, LLaMA-Factory's under the program's name.
fn entries(command: &[(String, usize)]) -> Entries {
    let (mut list, mut assigns) = (Vec::<Entry>::new(), false);
    let program = (0..command.len()).find(|i| is_program(command, *i));
    for (i, (word, line)) in command.iter().enumerate() {
        let before = program.is_some_and(|p| i < p);
        if let Some(flag) = word.strip_prefix("--") {
            assigns = false;
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(scalar(value))),
                None => (flag, None),
            };
            let name = name.replace('-', "_");
            let (name, value) = match name.strip_prefix("no_").filter(|rest| Foreign::key(rest).is_some()) {
                Some(off) if Foreign::key(&name).is_none() => (off.to_string(), Some(Value::Bool(false))),
                _ => (name, value),
            };
            let path = if before { format!("launch.{name}") } else { name };
            list.push(Entry { path, value: value.unwrap_or(Value::Bool(true)), line: *line });
        } else if assigns && let Some((name, value)) = assigned(word) {
            list.push(Entry { path: name.into(), value: scalar(value), line: *line });
        } else if program.is_some_and(|p| p < i && i <= p + 2)
            && is_file(word)
            && !command[i - 1].0.starts_with('-')
        {
            assigns = true;
            list.push(Entry { path: FILE.into(), value: word.as_str().into(), line: *line });
        } else if program.is_some_and(|p| i == p + 1) && !word.starts_with('-') {
            let path = match program.map(|p| command[p].0.as_str()) {
                Some(FACTORY | FACTORY_MODULE) => FACTORY,
                // its file says the task
                Some(AXOLOTL) => continue,
                _ => "command",
            };
            list.push(Entry { path: path.into(), value: word.as_str().into(), line: *line });
        } else if program == Some(i)
            || program.is_none() && list.is_empty()
            || before && (list.is_empty() || word.starts_with('-'))
        {
            // names of the launcher and the program, short options; a script or module may be the task's
            if program == Some(i)
                && let Some(task) = task_in(stem(word))
            {
                list.push(Entry { path: "command".into(), value: task.into(), line: *line });
            }
        } else if word == "$@" || word == "$*" {
            list.push(Entry { path: "$@".into(), value: Value::Bool(true), line: *line });
        } else if let Some(last) = list.last_mut() {
            let value = scalar(word);
            last.value = match std::mem::take(&mut last.value) {
                Value::Bool(true) => value,
                Value::Array(mut all) => {
                    all.push(value);
                    Value::Array(all)
                }
                first => Value::Array(vec![first, value]),
            };
        }
    }
    Entries { list }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_gives_the_flags_of_its_trainer() {
        let text = "#!/bin/bash\nexport MODEL=a/b # the model\nset -e\naccelerate launch --num_processes 4 \\\n  train.py \\\n  \
                    --model_name_or_path $MODEL --lora_target_modules q_proj \"v_proj\" \\\n  --packing --learning_rate=2e-5 \
                    --output-dir 'a b' # --seed 3\n";
        assert!(is_command(text));
        let list = read(text).unwrap().list;
        let shown: Vec<String> = list.iter().map(|e| format!("{}:{}={}", e.line, e.path, e.value)).collect();
        insta::assert_snapshot!(shown.join("\n"), @r#"
        4:launch.num_processes=4
        6:model_name_or_path="a/b"
        6:lora_target_modules=["q_proj","v_proj"]
        7:packing=true
        7:learning_rate=0.00002
        7:output_dir="a b"
        "#);
        for (script, task) in [
            ("scripts/run_dpo.py", "dpo"),
            ("dpo_vlm.py", "dpo"),
            ("dpo_online.py", "online"),
            ("ppo/ppo_tldr.py", "ppo"),
            ("nash_md.py", "nash"),
            ("reward_modeling.py", "reward"),
        ] {
            let list = read(&format!("python {script} --a 1")).unwrap().list;
            assert_eq!((list[0].path.as_str(), &list[0].value), ("command", &task.into()), "{script}");
        }
        let list = read("trl dpo --beta 0.1").unwrap().list;
        assert_eq!((list[0].path.as_str(), &list[0].value), ("command", &"dpo".into()));
        let text = "A=1\ntrl sft --a ${A:-2}$A --b \"${B:-c/d}\" --e ${E} --f x-$(date +%F) --g $((8 / 2)) $G \"$@\"\n";
        let shown: Vec<String> =
            read(text).unwrap().list.iter().map(|e| format!("{}={}", e.path, e.value)).collect();
        insta::assert_snapshot!(shown.join("\n"), @r#"
        command="sft"
        a=11
        b="c/d"
        e="${E}"
        f="x-$(date +%F)"
        g=["$((8 / 2))","$G"]
        $@=true
        "#);
        assert!(!is_command("base_model: x\n# --no\n") && !is_command("{\"a\": 1}"));
        assert!(!is_command("description: |\n  axolotl is a toolkit\n  tune the model\n"));
        assert!(read("tune run full --config llama3/8B_full\n").unwrap_err().contains("ft import"));
        assert!(read("trl sft --run_name tune\n").is_ok());
        let run = read("conda run -n axolotl trl dpo --beta 0.1\n").unwrap().list;
        assert_eq!((run[0].path.as_str(), &run[0].value), ("command", &"dpo".into()));
        // a script beside the training one, before or behind it
        let both = "python prepare_dpo_data.py --in a\ntrl sft --b 1\npython eval_reward.py --model c\n";
        assert_eq!(read(both).unwrap().list[0].value, "sft");
        assert!(!is_command("---\nbase_model: x\ntime: 3\npython_version: 3\ntrl:\n  beta: 1\n"));
    }

    #[test]
    fn a_flag_of_the_trainer_stands_once() {
        let error = |text: &str| read(text).unwrap_err();
        assert_eq!(
            error("trl sft --a-b 2 \\\n --c 1 \\\n --a_b=8\n"),
            "line 3: a_b is given twice, first in line 1: leave one out"
        );
        assert_eq!(
            error("trl sft --packing --no-packing"),
            "line 1: packing is given twice, first in line 1: leave one out"
        );
        for text in
            ["uv run --with trl --with peft trl sft --a 1 2", "python dpo.py sft --a \"$@\" --b \"$@\""]
        {
            assert!(read(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_script_has_one_training_command() {
        let paths =
            |text: &str| read(text).map(|e| e.list.iter().map(|e| e.path.clone()).collect::<Vec<_>>());
        for second in [
            "trl dpo --a 1",
            "accelerate launch --num_processes 2 \\\n  trl/scripts/sft.py --a 1",
            "A=1 python -m trl.scripts.dpo --a 1",
            "llamafactory-cli train b.yaml",
            "python -m llamafactory.cli train --a 1",
            "torchrun src/train.py --a 1",
        ] {
            let text = format!("set -e\ntrl sft --a 1 \\\n  --b 2\n{second}\n");
            let expected =
                "line 4: a second training command, after that of line 2: write it into a file of its own";
            assert_eq!(paths(&text).unwrap_err(), expected, "{second}");
        }
        for other in [
            "python prepare.py --x 1 --y 2 --z 3",
            "pip install --upgrade --quiet --user trl",
            "curl -L --retry 3 --silent --output sft.py https://host/sft.py",
            "llamafactory-cli export --x 1 --y 2 --z 3",
            "python evaluate.py train --x 1 --y 2 --z 3",
        ] {
            for text in [format!("{other}\ntrl sft --a 1\n"), format!("trl sft --a 1\n{other}\n")] {
                assert_eq!(paths(&text).unwrap(), ["command", "a"], "{text}");
            }
        }
    }

    /// Variables and programs before the trainer's own words, and a file for the output.
    #[test]
    fn a_command_may_stand_behind_other_words() {
        for (text, expected) in [
            ("CUDA_VISIBLE_DEVICES=0 trl sft --a 1", "command=\"sft\" a=1"),
            ("A=1 B='x y' python trl/scripts/dpo.py --a 1", "command=\"dpo\" a=1"),
            ("python3.11 -m trl.scripts.dpo --a 1", "command=\"dpo\" a=1"),
            (
                "python -m torch.distributed.run --nproc_per_node 2 sft.py --a 1",
                "launch.nproc_per_node=2 a=1",
            ),
            ("python -m llamafactory.cli train --a 1", "llamafactory-cli=\"train\" a=1"),
            ("FORCE_TORCHRUN=1 llamafactory-cli train --a 1", "llamafactory-cli=\"train\" a=1"),
            (
                "accelerate launch --num_processes 4 -m trl.scripts.dpo --a 1",
                "launch.num_processes=4 command=\"dpo\" a=1",
            ),
            ("uv run --with trl trl sft --a 1", "launch.with=\"trl\" command=\"sft\" a=1"),
            ("nohup trl sft --a > log.txt 2>&1 &", "command=\"sft\" a=true"),
            ("time trl sft --a '<|x|>' 2>err >>out", "command=\"sft\" a=\"<|x|>\""),
            ("srun --gpus 4 env A=1 trl kto --a 1", "launch.gpus=[4,\"env\",\"A=1\"] command=\"kto\" a=1"),
            ("deepspeed --num_gpus 2 x.py --a 1", "launch.num_gpus=2 a=1"),
            ("llamafactory-cli train a.yaml", "llamafactory-cli=\"train\" config=\"a.yaml\""),
            ("axolotl train a.yml --a 1", "config=\"a.yml\" a=1"),
            (
                "llamafactory-cli train a.yaml a=7e-5 b=c.json --c d=1",
                "llamafactory-cli=\"train\" config=\"a.yaml\" a=0.00007 b=\"c.json\" c=\"d=1\"",
            ),
            ("torchrun src/train.py a.yaml b=c.json", "config=\"a.yaml\" b=\"c.json\""),
            ("accelerate launch src/train.py a.json", "config=\"a.json\""),
            ("trl sft --config a.yaml --a b.json", "command=\"sft\" config=\"a.yaml\" a=\"b.json\""),
        ] {
            assert!(is_command(text), "{text}");
            let list = read(text).unwrap().list;
            let shown: Vec<String> = list.iter().map(|e| format!("{}={}", e.path, e.value)).collect();
            assert_eq!(shown.join(" "), expected, "{text}");
        }
    }
}
