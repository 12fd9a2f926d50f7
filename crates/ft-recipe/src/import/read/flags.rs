//! A command line, or a shell script with one: flags to entries with lines.

use super::entries::{Entries, Entry};
use super::scalar::scalar;
use crate::check::Foreign;
use serde_json::Value;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// Words that begin the trainer's own flags: those before are the launcher's.
const PROGRAMS: [&str; 3] = ["trl", "llamafactory-cli", "tune"];
/// Scripts of TRL with the task as their name.
const SCRIPTS: [&str; 9] = ["dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward", "reward_modeling", "gkd"];
/// Variables of the environment that a trainer reads.
const VARIABLES: [&str; 2] = ["MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"];

/// Variables that a script sets, with their lines.
type Variables = BTreeMap<String, (String, usize)>;

/// Reads the command with the most flags.
pub(in crate::import) fn read(text: &str) -> Result<Entries, String> {
    let flags = |c: &Vec<(String, usize)>| c.iter().filter(|(w, _)| w.starts_with("--")).count();
    let (commands, variables) = commands(text);
    let best = commands.into_iter().max_by_key(flags).filter(|c| flags(c) > 0);
    let command = best.ok_or("there is no command with --flags in it")?;
    let mut entries = entries(&command);
    let read = variables.into_iter().filter(|(name, _)| VARIABLES.contains(&name.as_str()));
    entries.list.extend(read.map(|(path, (value, line))| Entry { path, value: value.into(), line }));
    Ok(entries)
}

/// Whether a text looks like a command line or a script.
pub(in crate::import) fn is_command(text: &str) -> bool {
    let is_flag =
        |l: &str| l.strip_prefix("--").is_some_and(|l| l.starts_with(|c: char| c.is_ascii_alphabetic()));
    let starts = ["trl ", "accelerate ", "torchrun ", "python", "llamafactory-cli ", "export "];
    text.starts_with("#!")
        || text.lines().map(str::trim_start).any(|l| is_flag(l) || starts.iter().any(|s| l.starts_with(s)))
}

/// The commands of a script: words with their lines. Variables that the script sets are filled in.
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
        for word in split(line, &variables) {
            if matches!(word.as_str(), ";" | "&&" | "|" | "||") {
                commands.push(Vec::new());
                continue;
            }
            let command = commands.last_mut();
            let assigned = word.split_once('=').filter(|(name, _)| {
                !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            });
            match (command, assigned) {
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

/// What follows a `$`: the value of a variable that the script sets, the default in `${NAME:-default}`, or the
/// expansion as it is written.
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

/// Flags as entries: `launch.` before the program, plain after it, and its verb as `command`.
fn entries(command: &[(String, usize)]) -> Entries {
    let mut list: Vec<Entry> = Vec::new();
    let is_program = |w: &str| w.ends_with(".py") || PROGRAMS.contains(&w);
    let program = command.iter().position(|(w, _)| is_program(w));
    for (i, (word, line)) in command.iter().enumerate() {
        let before = program.is_some_and(|p| i < p);
        if let Some(flag) = word.strip_prefix("--") {
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
        } else if program.is_some_and(|p| i == p + 1) && !word.starts_with('-') {
            list.push(Entry { path: "command".into(), value: word.as_str().into(), line: *line });
        } else if program == Some(i) || program.is_none() && list.is_empty() || before && list.is_empty() {
            // the launcher's and the program's own names; a script may be the task's
            let stem = word.rsplit('/').next().and_then(|w| w.strip_suffix(".py"));
            if let Some(task) = stem.filter(|s| program == Some(i) && SCRIPTS.contains(s)) {
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
        assert!(!is_command("---\nbase_model: x\n"));
    }
}
