//! Log-probabilities of tokens: of the softmax over the model's logits, before temperature and penalties.

use ft_data::Tokenizer;

/// A token in a text and the most likely alternatives, with log-probabilities.
pub struct Token {
    /// Characters of the text before it.
    pub offset: usize,
    pub spelled: Spelled,
    /// `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    pub top: Vec<(Spelled, f32)>,
}

/// Text of a token.
pub struct Spelled {
    pub text: String,
    /// Whether the token is whole characters, and `text` not just its name.
    pub whole: bool,
}

impl Spelled {
    fn new(tokenizer: &Tokenizer, id: u32) -> Result<Self, ft_data::Error> {
        let (text, whole) = tokenizer.token_text(id)?;
        Ok(Self { text, whole })
    }
}

impl Token {
    /// Token `id`, given the logits `[v]` before it and the number of alternatives.
    pub fn new(
        tokenizer: &Tokenizer,
        id: u32,
        offset: usize,
        logits: &[f32],
        alternatives: usize,
    ) -> Result<Self, ft_data::Error> {
        let norm = log_sum_exp(logits);
        let spelled = |id| Spelled::new(tokenizer, id);
        let top = most_likely(logits, alternatives).into_iter();
        Ok(Self {
            offset,
            spelled: spelled(id)?,
            logprob: logits.get(id as usize).map(|x| x - norm),
            top: top.map(|(id, x)| Ok((spelled(id)?, x - norm))).collect::<Result<_, ft_data::Error>>()?,
        })
    }

    /// The first token of a prompt.
    pub fn first(tokenizer: &Tokenizer, id: u32) -> Result<Self, ft_data::Error> {
        Ok(Self { offset: 0, spelled: Spelled::new(tokenizer, id)?, logprob: None, top: Vec::new() })
    }
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    (f64::from(most) + sum.ln()) as f32
}

/// The `n` largest values with their indices, largest first; of equal ones the first.
fn most_likely(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(n + 1);
    for (id, x) in logits.iter().enumerate() {
        if top.len() < n || top.last().is_some_and(|(_, least)| x > least) {
            let at = top.partition_point(|(_, y)| y >= x);
            top.insert(at, (id as u32, *x));
            top.truncate(n);
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_are_sorted_and_the_first_of_equal_ones_wins() {
        let logits = [1.0, 3.0, -2.0, 3.0, 2.0];
        assert_eq!(most_likely(&logits, 3), [(1, 3.0), (3, 3.0), (4, 2.0)]);
        assert_eq!(most_likely(&logits, 1), [(1, 3.0)]);
        assert_eq!(most_likely(&logits, 0), []);
        assert_eq!(most_likely(&logits, 9).len(), 5);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let logits = [100.0, 99.0, -50.0, 98.5];
        let norm = log_sum_exp(&logits);
        let sum: f32 = logits.iter().map(|x| (x - norm).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
    }
}
