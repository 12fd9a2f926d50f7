//! Encodes a sample as token ids and labels, limited to `max_length`, or returns the reason for dropping
//! it.

use super::markers;
use super::tokenizer::{Encoded, Tokenizer};
use crate::error::{Error, Problem};
use crate::shape::{
    example::{Content, Example, IGNORE_INDEX, Teacher},
    messages::Chat,
    notes::Note,
    sample::Sample,
    schema::Schema,
    teacher::TeacherLogits,
};
use ft_recipe::{Mask, OverLength, ScoreTargets};
use std::ops::Range;

/// An encoded row, with samples as `S`.
pub(crate) struct EncodedRow<S = Example> {
    /// One sample, or the pieces of a divided document.
    pub samples: Vec<S>,
    /// Number of tokens before truncation, of the longest document.
    pub whole: usize,
    pub cut: bool,
    pub notes: Vec<Note>,
    /// Identity of the teacher, as JSON.
    pub teacher: Option<String>,
}

impl EncodedRow {
    /// The row with samples as `f` makes them, by their number in the row.
    pub fn map<S>(self, f: impl Fn(usize, Example) -> S) -> EncodedRow<S> {
        let Self { samples, whole, cut, notes, teacher } = self;
        let samples = samples.into_iter().enumerate().map(|(i, e)| f(i, e)).collect();
        EncodedRow { samples, whole, cut, notes, teacher }
    }
}

/// Settings for encoding the samples of one source.
pub(crate) struct Encoder<'a> {
    pub schema: &'a Schema,
    pub data: &'a ft_recipe::Data,
    pub tokenizer: Option<&'a Tokenizer>,
    pub vocab_size: usize,
    pub source: usize,
}

/// The first tokens of a sample, and a summary of the rest.
#[derive(Default)]
struct Tokens {
    ids: Vec<u32>,
    labels: Vec<i32>,
    /// Weights of the labels; empty for weights of 1.
    weights: Vec<f32>,
    /// Values of a teacher at each token.
    teacher: Option<TeacherLogits>,
    /// Number of tokens, including the rest.
    total: usize,
    /// Whether the rest contains a supervised token.
    more_targets: bool,
    /// Number of tokens before the completion of a text.
    prompt: usize,
}

impl Encoder<'_> {
    /// Encodes a row.
    pub fn encode(&self, row: serde_json::Value, line: usize) -> Result<EncodedRow, Problem> {
        let mut notes = Vec::new();
        let weight = self.schema.weight(&row).map_err(Problem::Bad)?;
        let sample = self.schema.sample(row, &self.data.scores, &mut notes).map_err(Problem::Bad)?;
        let class = match &sample {
            Sample::Labeled(_, class) => Some(Some(*class)),
            _ => (self.data.scores != ScoreTargets::None).then_some(None),
        };
        let document = |tokens| self.document(tokens, (weight, class));
        let mut tokens = |sample| self.tokens(sample, &mut notes);
        let (mut first, second, content) = match sample {
            Sample::Pair(both) => {
                let [chosen, rejected] = both.map(&mut tokens);
                let (mut chosen, mut rejected) = (chosen?, rejected?);
                let prompt = chosen.prompt.min(rejected.prompt);
                // The completion of a text begins as early as that of the other side.
                for side in [&mut chosen, &mut rejected] {
                    if prompt < side.prompt {
                        side.supervise(prompt);
                    }
                }
                let (chosen, rejected) = (document(chosen)?, document(rejected)?);
                let content = Content::Pair(chosen.ids.len());
                (chosen, Some(rejected), content)
            }
            Sample::Rated(sample, desirable) => {
                (document(tokens(*sample)?)?, None, Content::Rated(desirable))
            }
            Sample::Labeled(sample, _) => (document(tokens(*sample)?)?, None, Content::Document),
            sample => (document(tokens(sample)?)?, None, Content::Document),
        };
        let mut cut = first.total > self.data.max_length;
        let mut whole = first.total;
        if let Content::Rated(desirable) = content {
            notes.push(Note::Rated(desirable));
        }
        if let Some(Tokens { ids, labels, total, .. }) = second {
            if ids == first.ids {
                notes.push(Note::Equal);
            }
            cut |= total > self.data.max_length;
            whole = whole.max(total);
            first.ids.extend(ids);
            first.labels.extend(labels);
        }
        let Tokens { ids, labels, weights, teacher, .. } = first;
        let (source, scored, none) = (self.source, class.is_some(), Teacher::default());
        let example = Example { ids, labels, weights, teacher: none, content, scored, source, line };
        let mut pieces = vec![(0, example)];
        if cut && self.data.over_length == OverLength::Split {
            pieces = divided(&pieces[0].1, self.data.max_length);
            let all = pieces.len();
            pieces.retain(|(_, piece)| piece.targets() > 0);
            if pieces.is_empty() {
                return Err(Problem::EmptyAfterTruncation { tokens: whole, max: self.data.max_length });
            }
            if pieces.len() < all {
                notes.push(Note::Untrained);
            }
        }
        let mut by = None;
        if let Some(of) = teacher {
            for (from, piece) in &mut pieces {
                let queries = piece.queries().map(|query| query + *from).collect();
                piece.teacher = Teacher::at(&of.values, queries).map_err(Problem::Bad)?;
            }
            by = of.by;
        }
        let samples = pieces.into_iter().map(|(_, piece)| piece).collect();
        Ok(EncodedRow { samples, whole, cut, notes, teacher: by })
    }

    /// Cuts a document to `max_length`, and gives it the weight of its row. `class` belongs to documents of a score
    /// head, with `None` for a pair's.
    fn document(
        &self,
        mut out: Tokens,
        (weight, class): (f32, Option<Option<u32>>),
    ) -> Result<Tokens, Problem> {
        out.weigh(weight);
        self.check(&out.ids, &out.labels).map_err(Problem::Bad)?;
        self.check_teacher(out.teacher.as_ref()).map_err(Problem::Bad)?;
        let targets = |labels: &[i32]| class.is_some() || labels.iter().skip(1).any(|l| *l != IGNORE_INDEX);
        if out.ids.is_empty() {
            return Err(Problem::Bad("the row has no tokens".into()));
        }
        if !targets(&out.labels) && !out.more_targets {
            let why = if out.total == 1 {
                "one token alone has no token before it to predict it".into()
            } else if out.labels[0] != IGNORE_INDEX {
                "only its first token is, and no token before it could predict it".into()
            } else {
                format!("none of its {} tokens", out.total)
            };
            return Err(Problem::EmptyMask(why));
        }
        let (tokens, max) = (out.total, self.data.max_length);
        if tokens > max {
            match self.data.over_length {
                over @ (OverLength::Drop | OverLength::Error) => {
                    return Err(Problem::TooLong { tokens, max, dropped: over == OverLength::Drop });
                }
                OverLength::Truncate => {
                    out.ids.truncate(max);
                    out.labels.truncate(max);
                    out.weights.truncate(max);
                }
                OverLength::Split => {}
            }
            if !targets(&out.labels) {
                return Err(Problem::EmptyAfterTruncation { tokens, max });
            }
        }
        if let Some(class) = class {
            out.score(class);
        }
        Ok(out)
    }

    fn tokens(&self, sample: Sample, notes: &mut Vec<Note>) -> Result<Tokens, Problem> {
        let turns = match sample {
            Sample::Tokens { ids, labels, weights, teacher } => {
                let total = ids.len();
                return Ok(Tokens { ids, labels, weights, teacher, total, ..Tokens::default() });
            }
            Sample::Completion(prompt, text) => return self.completion(&prompt, &text, notes),
            Sample::Plain(text) => {
                let tokenizer = self.tokenizer.ok_or_else(no_tokenizer)?;
                let mut out = Tokens::start(tokenizer);
                self.encoded(tokenizer, &text, &[], notes, &mut out)?;
                let (end, max) = (tokenizer.text_suffix(), self.data.max_length);
                out.total += end.len();
                if out.total > max {
                    out.ids.truncate(max.saturating_sub(end.len()));
                }
                out.ids.extend(end);
                out.labels = vec![IGNORE_INDEX; out.ids.len()];
                return Ok(out);
            }
            Sample::Pair(_) | Sample::Rated(..) | Sample::Labeled(..) => {
                return Err(Problem::Bad("a sample inside a sample: a bug in ft".into()));
            }
            Sample::Text(turns) => turns,
            Sample::Chat(chat) => return self.chat(&chat, notes),
        };
        let (tokenizer, eos) = self.with_end()?;
        // Tokens the tokenizer puts before a text are kept as in pre-training, but never become targets.
        let mut out = Tokens::start(tokenizer);
        if self.schema.mask == Mask::None {
            out.labels = out.ids.iter().map(|i| label(*i)).collect();
        }
        for (text, from) in turns {
            let span = from..text.len();
            let before = out.ids.len();
            self.encoded(tokenizer, &text, std::slice::from_ref(&span), notes, &mut out)?;
            out.end(&text, before, (tokenizer, eos))?;
        }
        Ok(out)
    }

    /// The tokenizer, and the token at the end of a text.
    fn with_end(&self) -> Result<(&Tokenizer, u32), Problem> {
        let tokenizer = self.tokenizer.ok_or_else(no_tokenizer)?;
        let no_end = || Problem::Bad("the tokenizer has no end-of-sequence token".into());
        Ok((tokenizer, tokenizer.text_end().ok_or_else(no_end)?))
    }

    /// A text that begins with a prompt. The completion begins at the first token unlike the prompt's own, as in TRL,
    /// and ends with the end-of-sequence token, appended unless the text has it.
    fn completion(&self, prompt: &str, text: &str, notes: &mut Vec<Note>) -> Result<Tokens, Problem> {
        let (tokenizer, eos) = self.with_end()?;
        let start = tokenizer.text_start();
        let before = tokenizer.encode(prompt).map_err(problem)?;
        let mut out = Tokens::start(tokenizer);
        self.encoded(tokenizer, text, &[], notes, &mut out)?;
        let kept = &out.ids[start.len()..];
        let same = kept.iter().zip(&before).take_while(|(a, b)| a == b).count();
        // a prompt longer than the kept tokens goes on beyond them
        let read = if same == kept.len() { before.len() } else { same };
        if read < before.len() && self.data.scores == ScoreTargets::None {
            notes.push(Note::Merged);
        }
        out.end(text, start.len(), (tokenizer, eos))?;
        out.supervise(start.len() + read);
        Ok(out)
    }

    fn chat(&self, chat: &Chat, notes: &mut Vec<Note>) -> Result<Tokens, Problem> {
        let tokenizer = self.tokenizer.ok_or_else(no_tokenizer)?;
        let supervise = self.schema.mask != Mask::None;
        let conversation = tokenizer.conversation(chat, &self.data.template, supervise, notes);
        let (text, mut spans) = conversation.map_err(Problem::Bad)?;
        if !supervise {
            spans = std::iter::once(0..text.len()).collect();
        }
        let mut out = Tokens::default();
        let encoded = self.encoded(tokenizer, &text, &spans, notes, &mut out)?;
        markers::note(&text, &encoded, chat, tokenizer.specials(), notes);
        Ok(out)
    }

    /// Appends the tokens of a text, supervised inside `spans`. Unless documents are divided, stops one token beyond
    /// `max_length`; later tokens are only counted.
    fn encoded(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        spans: &[Range<usize>],
        notes: &mut Vec<Note>,
        out: &mut Tokens,
    ) -> Result<Encoded, Problem> {
        let keep = match self.data.over_length {
            OverLength::Split => usize::MAX,
            _ => self.data.max_length.saturating_add(1).saturating_sub(out.ids.len()),
        };
        let encoded = tokenizer.encode_first(text, keep, spans).map_err(problem)?;
        if markers::cuts(&encoded, spans) {
            notes.push(Note::Edge);
        }
        let supervised = mask(&encoded, spans);
        let labels = encoded.ids.iter().zip(supervised);
        out.labels.extend(labels.map(|(i, s)| if s { label(*i) } else { IGNORE_INDEX }));
        out.ids.extend(&encoded.ids);
        out.total += encoded.total;
        out.more_targets |= encoded.more_within;
        Ok(encoded)
    }

    fn check(&self, ids: &[u32], labels: &[i32]) -> Result<(), String> {
        let size = self.vocab_size;
        let out = |i: u64| format!("token id {i} is not in the model's vocabulary of {size}");
        if let Some(&id) = ids.iter().find(|i| **i as usize >= size) {
            return Err(out(u64::from(id)));
        }
        match labels.iter().find(|l| **l != IGNORE_INDEX && (**l < 0 || **l as usize >= size)) {
            Some(&l) => Err(format!("label {}", out(u64::from(l.unsigned_abs())))),
            None => Ok(()),
        }
    }

    /// Refuses values of a teacher with a larger vocabulary, and a row without values if the task needs them.
    fn check_teacher(&self, teacher: Option<&TeacherLogits>) -> Result<(), String> {
        if self.data.taught && teacher.is_none() {
            return Err(format!(
                "no values of a teacher ({}), which task = \"distill\" needs\n  hint: ft logits TEACHER RECIPE --out \
                 DIR writes rows with them",
                self.schema.name("teacher_ids")
            ));
        }
        let size = self.vocab_size;
        for (i, at) in teacher.iter().flat_map(|t| t.values.iter().enumerate()) {
            if let Some((id, _)) = at.iter().find(|(id, _)| *id as usize >= size) {
                return Err(format!(
                    "teacher_ids[{i}]: token id {id} is not in the model's vocabulary of {size}"
                ));
            }
        }
        Ok(())
    }
}

impl Tokens {
    /// The tokens before a text, without supervision.
    fn start(tokenizer: &Tokenizer) -> Self {
        let ids = tokenizer.text_start().to_vec();
        Self { labels: vec![IGNORE_INDEX; ids.len()], total: ids.len(), ids, ..Self::default() }
    }

    /// Appends the end-of-sequence token as a target, unless the text has it. Tokens of the text stand behind the first
    /// `before`. As in TRL.
    fn end(&mut self, text: &str, before: usize, (tokenizer, eos): (&Tokenizer, u32)) -> Result<(), Problem> {
        if self.total > self.ids.len() {
            self.more_targets = true;
            let end = tokenizer.decode(&[eos]).map_err(problem)?;
            self.total += usize::from(!text.ends_with(&end));
        } else if self.ids.len() == before || self.ids.last() != Some(&eos) {
            self.ids.push(eos);
            self.labels.push(label(eos));
            self.total += 1;
        }
        Ok(())
    }

    /// Supervises all but the first `prompt` tokens.
    fn supervise(&mut self, prompt: usize) {
        let labels = (0..).zip(&self.ids).map(|(i, id)| if i < prompt { IGNORE_INDEX } else { label(*id) });
        self.labels = labels.collect();
        self.more_targets = self.total > self.ids.len().max(prompt);
        self.prompt = prompt;
    }

    /// Supervises the last token alone, with a class, or with its own id for a pair's.
    fn score(&mut self, class: Option<u32>) {
        self.labels.fill(IGNORE_INDEX);
        if let (Some(last), Some(id)) = (self.labels.last_mut(), self.ids.last()) {
            *last = label(class.unwrap_or(*id));
        }
    }

    /// Multiplies the weights by the weight of the row. Labels of weight 0 stay targets, without effect.
    fn weigh(&mut self, weight: f32) {
        if weight != 1.0 {
            self.weights.resize(self.ids.len(), 1.0);
            self.weights.iter_mut().for_each(|w| *w *= weight);
        }
        if self.weights.iter().all(|w| *w == 1.0) {
            self.weights.clear();
        }
    }
}

/// Consecutive pieces of a document, of at most `max` tokens, each with the index of its first token.
fn divided(e: &Example, max: usize) -> Vec<(usize, Example)> {
    let n = e.ids.len();
    let mut starts: Vec<usize> = (0..n).step_by(max).collect();
    // a last token alone would have none before it to predict it
    if let Some(last) = starts.last_mut().filter(|last| **last + 1 == n && max > 2) {
        *last -= 1;
    }
    let piece = |(from, to): (usize, usize)| {
        let range = from..to;
        let (ids, labels) = (e.ids[range.clone()].to_vec(), e.labels[range.clone()].to_vec());
        let weights = e.weights.get(range).unwrap_or_default().to_vec();
        let &Example { content, scored, source, line, .. } = e;
        (from, Example { ids, labels, weights, teacher: Teacher::default(), content, scored, source, line })
    };
    let ends = starts.iter().skip(1).copied().chain([n]);
    starts.iter().copied().zip(ends).map(piece).collect()
}

/// Converts an id to a label. Ids beyond `i32` are refused later by the vocabulary check.
fn label(id: u32) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}

fn no_tokenizer() -> Problem {
    Problem::Bad("there is no tokenizer".into())
}

/// Error for a text refused by the tokenizer or template.
fn problem(e: Error) -> Problem {
    match e {
        Error::Tokenizer { .. } => Problem::Tokenizer(e.to_string()),
        e => Problem::Bad(e.to_string()),
    }
}

/// Whether every token lies entirely inside one of the sorted spans. A token crossing an edge contains text
/// not to be trained on.
pub(crate) fn mask(encoded: &Encoded, spans: &[Range<usize>]) -> Vec<bool> {
    let within = |start: usize, end: usize| {
        let next = spans.partition_point(|s| s.end <= start);
        spans.get(next).is_some_and(|s| s.start <= start && end <= s.end)
    };
    encoded.offsets.iter().map(|&(start, end)| within(start, end)).collect()
}
