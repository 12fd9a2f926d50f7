//! Standard scores of answers against references.

use crate::error::Error;
use crate::shape::example::{Example, IGNORE_INDEX};
use crate::tokenize::tokenizer::Tokenizer;
use regex::Regex;

/// Splits text into words like the `rouge_score` package without stemming: runs of lower-case Latin letters
/// and digits.
fn words(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let all = text.split(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit()));
    all.filter(|w| !w.is_empty()).map(String::from).collect()
}

/// ROUGE-L F-measure of an answer (Lin, "ROUGE: a package for automatic evaluation of summaries", 2004),
/// from the longest common subsequence of words. 0 without common words.
pub fn rouge_l(reference: &str, answer: &str) -> f64 {
    let (reference, answer) = (words(reference), words(answer));
    let mut row = vec![0usize; answer.len() + 1];
    for r in &reference {
        let mut before = 0;
        for (j, a) in answer.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if a == r { before + 1 } else { above.max(row[j]) };
            before = above;
        }
    }
    match row[answer.len()] as f64 {
        common if common > 0.0 => {
            let (precision, recall) = (common / answer.len() as f64, common / reference.len() as f64);
            2.0 * precision * recall / (precision + recall)
        }
        _ => 0.0,
    }
}

/// Extracts the first group of the first match, or the full match if the expression has no groups.
fn taken<'a>(regex: &Regex, text: &'a str) -> Option<&'a str> {
    let found = regex.captures(text)?;
    found.get(usize::from(found.len() > 1)).map(|m| m.as_str().trim())
}

/// Scores over answers: sums, until [`Scores::means`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// Number of answers.
    pub samples: usize,
    /// Generated tokens.
    pub tokens: usize,
    /// Share of answers equal to the reference, ignoring leading and trailing white space.
    pub exact_match: f64,
    /// Mean of [`rouge_l`].
    pub rouge_l: f64,
    /// Share of answers with the same regex extract as the reference; `None` without a regex.
    pub regex_match: Option<f64>,
}

impl Scores {
    /// Adds an answer.
    pub fn add(&mut self, reference: &str, answer: &str, tokens: usize, regex: Option<&Regex>) {
        self.samples += 1;
        self.tokens += tokens;
        self.exact_match += f64::from(u8::from(reference.trim() == answer.trim()));
        self.rouge_l += rouge_l(reference, answer);
        if let Some(regex) = regex {
            let same = taken(regex, reference).is_some_and(|r| taken(regex, answer) == Some(r));
            *self.regex_match.get_or_insert_default() += f64::from(u8::from(same));
        }
    }

    /// Divides sums by the number of answers.
    pub fn means(self) -> Self {
        let of = |sum: f64| sum / self.samples.max(1) as f64;
        let (exact_match, rouge_l) = (of(self.exact_match), of(self.rouge_l));
        Self { exact_match, rouge_l, regex_match: self.regex_match.map(of), ..self }
    }
}

/// Splits a sample into a prompt, ending before the last supervised span, and the span's text without the
/// end token. `None` if the prompt is empty, or if `data.max_length` cut off the end.
///
/// # Errors
/// Tokens that cannot be decoded.
pub fn question(e: &Example, tokenizer: &Tokenizer) -> Result<Option<(Vec<u32>, String)>, Error> {
    let supervised = |i: &usize| e.labels.get(*i).is_some_and(|l| *l != IGNORE_INDEX);
    let Some(last) = (0..e.ids.len()).rev().find(supervised) else { return Ok(None) };
    let first = (0..=last).rev().take_while(supervised).last().unwrap_or(last);
    if first == 0 || !tokenizer.eos().contains(&e.ids[last]) {
        return Ok(None);
    }
    // an end-of-sequence token may also separate packed answers
    let first = (first..last).rev().find(|i| tokenizer.eos().contains(&e.ids[*i])).map_or(first, |i| i + 1);
    // decoded like a generated answer
    let (mut decoder, mut text) = (tokenizer.decoder(true), String::new());
    for id in &e.ids[first..last] {
        text.extend(decoder.step(*id)?);
    }
    Ok(Some((e.ids[..first].to_vec(), text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Expected values from the `rouge_score` package, by `tests/fixtures/make_rouge.py`.
    #[test]
    fn rouge_l_is_that_of_the_package() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/rouge_l.json");
        let pairs: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(pairs.len() >= 200);
        for pair in pairs {
            let text = |key: &str| pair[key].as_str().unwrap();
            let (ours, theirs) =
                (rouge_l(text("reference"), text("answer")), pair["rouge_l"].as_f64().unwrap());
            assert!((ours - theirs).abs() < 1e-12, "{pair}: {ours}");
        }
    }

    #[test]
    fn answers_are_scored_by_exact_and_regex_match() {
        let regex = Regex::new(r"#### (\S+)").unwrap();
        let mut s = Scores::default();
        s.add("2 + 2\n#### 4", "four\n#### 4 ", 3, Some(&regex));
        s.add("#### 5", "#### 6", 2, Some(&regex));
        // a reference without a match never scores
        s.add("none", "none", 1, Some(&regex));
        s.add(" same\n", "same", 1, Some(&regex));
        let m = s.means();
        assert_eq!((m.samples, m.tokens, m.exact_match, m.regex_match), (4, 7, 0.5, Some(0.25)));
        assert_eq!(Scores::default().means(), Scores::default());
        let whole = Regex::new("[0-9]+").unwrap();
        let mut s = Scores::default();
        s.add("a 12", "b 12", 1, Some(&whole));
        assert_eq!(s.means().regex_match, Some(1.0));
    }
}
