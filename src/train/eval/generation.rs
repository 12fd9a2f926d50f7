//! Evaluation by generation: the model answers evaluation samples, and the answers are scored against the
//! references.

use crate::train::Error;
use crate::train::job::Job;
use crate::train::step::Stop;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use ft_data::{Dataset, Scores, Tokenizer, question, rouge_l};
use ft_engine::model::Decoder;
use ft_engine::walk::generate::{Reader, answer};
use ft_engine::walk::visit::Hooks;
use ft_recipe::Recipe;
use regex::Regex;
use serde_json::{Value, json};

/// Most answers recorded of an evaluation.
const RECORDED: usize = 16;

/// An answer of the model to an evaluation sample.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Prompt as the model reads it.
    pub prompt: String,
    /// The model's reply.
    pub reply: String,
    /// The sample's own answer.
    pub reference: String,
    /// Whether reply and reference are equal but for white space around them.
    pub exact_match: bool,
    /// ROUGE-L of the reply.
    pub rouge_l: f64,
}

/// Generates answers to the first `generate.samples` usable evaluation samples. Returns mean scores, and the
/// first answers.
/// Runs on this process alone. Returns `None` if the recipe does not ask for generation. Calls `stop`
/// before every answer and every token.
///
/// # Errors
/// Tokenizer missing; invalid `generate.regex`; no usable sample; [`Error::Abandoned`]; a failed tensor operation.
pub fn score(
    job: &Job,
    decoder: &Decoder,
    around: &dyn Hooks,
    data: &Dataset,
    stop: Stop<'_>,
) -> ft_base::Result<Option<(Scores, Vec<Answer>)>> {
    let g = &job.recipe.generate;
    if g.samples == 0 {
        return Ok(None);
    }
    check(&job.recipe, job.tokenizer.as_deref(), Some(data))?;
    let Some(tokenizer) = &job.tokenizer else { return Ok(None) };
    let fail = |e: regex::Error| Error::at(&job.recipe, "generate.regex", e);
    let regex = g.regex.as_deref().map(Regex::new).transpose().map_err(fail)?;
    let (mut scores, mut answers) = (Scores::default(), Vec::new());
    for found in questions(data, tokenizer).take(g.samples) {
        let (i, (prompt, reference)) = found?;
        check_signal(stop)?;
        let temperature = g.temperature;
        let sampling = if temperature > 0.0 { Sampling::All { temperature } } else { Sampling::ArgMax };
        // One random stream per answer keeps answers independent of earlier ones.
        let mut sampler =
            LogitsProcessor::from_sampling(job.recipe.run.seed.wrapping_add(i as u64), sampling);
        let mut reader =
            Reader::new(decoder, &job.device).within(prompt.len() + g.max_new_tokens).hooks(around);
        let mut proceed = |_: &str| stop() == 0;
        let reply = answer(&mut reader, tokenizer, &prompt, g.max_new_tokens, &mut sampler, &mut proceed)?;
        check_signal(stop)?;
        scores.add(&reference, &reply.text, reply.tokens, regex.as_ref());
        if answers.len() < RECORDED {
            let prompt = tokenizer.decode(&prompt)?;
            let exact_match = reference.trim() == reply.text.trim();
            let rouge_l = rouge_l(&reference, &reply.text);
            answers.push(Answer { prompt, reply: reply.text, reference, exact_match, rouge_l });
        }
    }
    Ok(Some((scores.means(), answers)))
}

/// Samples with a prompt and a whole answer to it: number, tokens of the prompt, answer.
fn questions<'a>(
    data: &'a Dataset,
    tokenizer: &'a Tokenizer,
) -> impl Iterator<Item = Result<(usize, (Vec<u32>, String)), ft_data::Error>> + 'a {
    let mut reader = data.samples.reader();
    (0..data.samples.len()).filter_map(move |i| {
        // a further piece of a document begins inside its text
        match reader.item(i) {
            Ok(item) if item.continued => return None,
            Ok(_) => {}
            Err(e) => return Some(Err(e)),
        }
        let sample = data.samples.get(i).transpose()?;
        let found = sample.and_then(|sample| question(&sample, tokenizer)).transpose()?;
        Some(found.map(|found| (i, found)))
    })
}

fn check_signal(stop: Stop<'_>) -> Result<(), Error> {
    match stop() {
        0 => Ok(()),
        asked => Err(Error::Abandoned(asked)),
    }
}

/// Checks that the model can generate answers to evaluation data.
///
/// # Errors
/// `generate.samples` is set, but the model has no tokenizer, or the data no sample to ask.
pub fn check(recipe: &Recipe, tokenizer: Option<&Tokenizer>, data: Option<&Dataset>) -> ft_base::Result<()> {
    if recipe.generate.samples == 0 {
        return Ok(());
    }
    let why = match (tokenizer, data) {
        (None, _) => "the model has no tokenizer.json, so it cannot be asked\n  hint: leave it out",
        (Some(tokenizer), Some(data)) if questions(data, tokenizer).next().transpose()?.is_none() => {
            "no sample of the evaluation has a prompt and a whole answer to it: texts without a prompt have none, and \
             data.max_length may cut them\n  hint: leave it out"
        }
        _ => return Ok(()),
    };
    Err(Error::at(recipe, "generate.samples", why).into())
}

/// Adds scores to an event of `metrics.jsonl`.
pub fn add_to(event: &mut Value, scores: &Scores) {
    event["exact_match"] = json!(scores.exact_match);
    event["rouge_l"] = json!(scores.rouge_l);
    if let Some(share) = scores.regex_match {
        event["regex_match"] = json!(share);
    }
    event["generated_samples"] = json!(scores.samples);
    event["generated_tokens"] = json!(scores.tokens);
}

/// Formats scores as one line for the terminal.
pub fn scores_line(scores: &Scores) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let regex = scores.regex_match.map_or(String::new(), |s| format!(", regex match {}", percent(s)));
    let (exact, samples) = (percent(scores.exact_match), scores.samples);
    format!("exact match {exact}, ROUGE-L {:.4}{regex} of {samples} answers", scores.rouge_l)
}
