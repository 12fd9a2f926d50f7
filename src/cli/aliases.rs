//! Subcommands of other programs: the subcommand of ft to use instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Words of other programs, and ours.
const WORDS: &[(&str, &str)] = &[
    ("api", "ft serve"),
    ("benchmark", "ft bench"),
    ("convert", "ft export writes other layouts, ft import takes other toolkits' configurations"),
    ("cp", "ft recipes NAME prints a recipe"),
    ("diagnose", "ft doctor"),
    (
        "distill",
        "ft logits TEACHER RECIPE writes a teacher's rows; ft run with task = \"distill\" trains on them",
    ),
    ("dpo", "ft run; task = \"dpo\" in the recipe"),
    ("env", "ft doctor"),
    ("estimate", "ft plan"),
    ("evaluate", "ft eval"),
    ("fetch", "ft check RECIPE names what is missing; ft run downloads"),
    ("fine-tune", "ft run"),
    ("finetune", "ft run"),
    ("generate", "ft chat MODEL, or ft serve MODEL"),
    ("grpo", "ft run; task = \"dpo\" or \"kto\" learns from preferences, without generating"),
    ("help-me", "ft --help, ft help VERB; ft doctor tells what this machine has"),
    ("infer", "ft chat MODEL, or ft serve MODEL"),
    ("inference", "ft chat MODEL, or ft serve MODEL"),
    ("info", "ft doctor"),
    ("launch", "ft run; torchrun, srun, mpirun or parallel.local start several processes"),
    ("list", "ft recipes"),
    ("ls", "ft recipes"),
    ("memory", "ft plan"),
    ("merge-lora", "ft merge"),
    ("new", "ft init"),
    ("preprocess", "ft data shows the rows; ft run keeps the tokens by itself"),
    ("publish", "ft push"),
    ("resume", "ft run RECIPE --resume"),
    ("server", "ft serve"),
    ("sft", "ft run"),
    ("status", "ft report RUN"),
    ("tokenize", "ft data shows the rows; ft run keeps the tokens by itself"),
    ("train", "ft run"),
    ("tune", "ft run"),
    ("upload", "ft push"),
    ("validate", "ft check"),
    ("version", "ft --version"),
    ("webui", "ft chat MODEL; ft serve MODEL"),
];

/// The error for a subcommand of other programs.
pub(super) fn advice(e: &clap::Error) -> Option<String> {
    let word = match (e.kind(), e.get(ContextKind::InvalidSubcommand)?) {
        (ErrorKind::InvalidSubcommand, ContextValue::String(word)) => word.to_lowercase(),
        _ => return None,
    };
    let (theirs, ours) = WORDS.iter().find(|(theirs, _)| *theirs == word.replace('_', "-"))?;
    Some(format!("error: there is no subcommand {theirs}\nhint: {ours}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_of_other_programs_are_sorted_and_none_of_fts() {
        assert!(WORDS.is_sorted_by(|a, b| a.0 < b.0), "in order, each once");
        let verbs = crate::cli::subcommands();
        for (theirs, ours) in WORDS {
            assert!(!verbs.contains(&theirs.to_string()), "{theirs} is ours");
            let verb = ours.split("ft ").nth(1).unwrap_or_default();
            let verb = verb.split([' ', ';', ',']).next().unwrap_or_default();
            assert!(verb.starts_with("--") || verbs.contains(&verb.to_string()), "{ours}");
        }
    }
}
