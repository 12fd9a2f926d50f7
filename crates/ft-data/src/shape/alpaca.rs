//! Prompt format of the Alpaca models.

/// Preambles of the Alpaca prompt, without and with input.
const PREAMBLE: [&str; 2] = [
    "Below is an instruction that describes a task. \
     Write a response that appropriately completes the request.",
    "Below is an instruction that describes a task, paired with an input that provides further context. \
     Write a response that appropriately completes the request.",
];

/// Start of an Alpaca prompt: the row's system text or the default preamble.
pub(super) fn preamble(system: Option<&str>, input: &str) -> String {
    let text = system.map_or(PREAMBLE[usize::from(!input.is_empty())], str::trim_end);
    format!("{text}\n\n")
}

/// One turn of an Alpaca prompt, up to the response.
pub(super) fn alpaca_turn(instruction: &str, input: &str) -> String {
    let input = if input.is_empty() { String::new() } else { format!("\n\n### Input:\n{input}") };
    format!("### Instruction:\n{instruction}{input}\n\n### Response:\n")
}

/// An Alpaca prompt without input.
pub(crate) fn alpaca_prompt(system: Option<&str>, instruction: &str) -> String {
    preamble(system, "") + &alpaca_turn(instruction, "")
}
