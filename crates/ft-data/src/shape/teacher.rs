//! Values of a teacher in a row of tokens, for distillation.

use super::example::Teacher;
use super::keys::says_nothing;
use super::schema::Schema;
use super::values::{brief, kind};
use serde_json::{Map, Value};

/// Values of a teacher in a row.
pub(crate) struct TeacherLogits {
    /// For each token, ids and unnormalized log-probabilities of the next token.
    pub values: Vec<Vec<(u32, f32)>>,
    /// Identity of teacher and tokenizer, as JSON.
    pub by: Option<String>,
}

impl Schema {
    /// The values of a teacher, if the row has any: `teacher_ids` and `teacher_logits`, a list per token of the row
    /// (empty for tokens without a prediction), and `teacher`, the identity of the teacher.
    pub(super) fn teacher_logits(
        &self,
        row: &Map<String, Value>,
        tokens: usize,
    ) -> Result<Option<TeacherLogits>, String> {
        let [ids, logits] = ["teacher_ids", "teacher_logits"].map(|name| self.name(name));
        let given = |name: &str| row.get(name).filter(|v| !says_nothing(v));
        let (all_ids, all_logits) = match (given(ids), given(logits)) {
            (None, None) => return Ok(None),
            (Some(a), Some(b)) => (lists(ids, a, tokens)?, lists(logits, b, tokens)?),
            (Some(_), None) => return Err(format!("{ids} without {logits}")),
            (None, Some(_)) => return Err(format!("{logits} without {ids}")),
        };
        let at = |i: usize| {
            let pairs = (all_ids[i], all_logits[i]);
            values_of(pairs).map_err(|(name, why)| format!("{}[{i}]{why}", self.name(name)))
        };
        let values = (0..tokens).map(at).collect::<Result<Vec<_>, _>>()?;
        let by = given(self.name("teacher"));
        if let Some(other) = by.filter(|by| !by.is_object()) {
            return Err(format!("{}: expected an object, found {}", self.name("teacher"), kind(other)));
        }
        Ok(Some(TeacherLogits { values, by: by.map(Value::to_string) }))
    }
}

/// One list for each token.
fn lists<'a>(name: &str, value: &'a Value, tokens: usize) -> Result<Vec<&'a [Value]>, String> {
    let Value::Array(all) = value else {
        return Err(format!("{name}: expected an array of arrays, found {}", kind(value)));
    };
    if all.len() != tokens {
        return Err(format!("{name} has {} lists for {tokens} tokens", all.len()));
    }
    let list = |(i, v): (usize, &'a Value)| match v {
        Value::Array(list) => Ok(list.as_slice()),
        Value::Null => Ok(&[][..]),
        other => Err(format!("{name}[{i}]: expected an array of numbers, found {}", kind(other))),
    };
    all.iter().enumerate().map(list).collect()
}

/// The values at a token. Errors have the field and the rest of the message.
fn values_of((ids, logits): (&[Value], &[Value])) -> Result<Vec<(u32, f32)>, (&'static str, String)> {
    if ids.len() != logits.len() {
        let why = format!(" has {} numbers and teacher_ids {}", logits.len(), ids.len());
        return Err(("teacher_logits", why));
    }
    if ids.len() > Teacher::MOST_KEPT {
        let why = format!(" has {} numbers, more than {}", ids.len(), Teacher::MOST_KEPT);
        return Err(("teacher_ids", why));
    }
    let mut out = Vec::with_capacity(ids.len());
    for (i, (id, logit)) in ids.iter().zip(logits).enumerate() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| ("teacher_ids", format!("[{i}]: {} is not a token id", brief(&ids[i]))))?;
        let number = logit.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
        let number =
            number.ok_or_else(|| ("teacher_logits", format!("[{i}]: {} is no number", brief(logit))))?;
        out.push((id, number));
    }
    let mut sorted: Vec<u32> = out.iter().map(|(id, _)| *id).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => Err(("teacher_ids", format!(": token {} occurs twice", twice[0]))),
        None => Ok(out),
    }
}

impl Teacher {
    /// The values at some tokens, the targets' queries. Errors name a token without values.
    pub(crate) fn at(values: &[Vec<(u32, f32)>], queries: Vec<usize>) -> Result<Self, String> {
        let kept = queries.iter().map(|i| values[*i].len()).max().unwrap_or(0);
        let mut out = Self { kept, ..Self::default() };
        for query in queries {
            let found = &values[query];
            if found.is_empty() {
                return Err(format!(
                    "teacher_ids[{query}] is empty, and the token behind is supervised: the teacher predicts it there"
                ));
            }
            let (ids, logits) = found.iter().copied().unzip();
            out.append(1, &Self { kept: found.len(), ids, logits });
        }
        Ok(out)
    }
}
