//! Counts of true and predicted classes, and their scores.

use serde_json::{Map, Value, json};

/// Documents of a class: true, predicted, and both.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counts {
    of: u64,
    predicted: u64,
    correct: u64,
}

/// Counts of true, predicted and correct documents by class.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassCounts(Vec<Counts>);

impl ClassCounts {
    /// Without documents.
    pub fn new(classes: usize) -> Self {
        Self(vec![Counts::default(); classes])
    }

    /// Adds a document; ignores classes out of range.
    pub fn add(&mut self, class: usize, predicted: usize) {
        if class.max(predicted) < self.0.len() {
            self.0[class].of += 1;
            self.0[predicted].predicted += 1;
            self.0[class].correct += u64::from(class == predicted);
        }
    }

    /// F1 of a class, the harmonic mean of precision and recall: 0 without a correct document; `None` for a class
    /// neither present nor predicted.
    pub fn f1(&self, class: usize) -> Option<f64> {
        let Counts { of, predicted, correct } = self.0[class];
        (of + predicted > 0).then(|| 2.0 * correct as f64 / (of + predicted) as f64)
    }

    /// Accuracy, macro F1, and F1 by class. The mean leaves out classes neither present nor predicted, as
    /// scikit-learn's `f1_score(average = "macro")`.
    pub fn metrics(&self, names: &[String]) -> Map<String, Value> {
        let all: u64 = self.0.iter().map(|c| c.of).sum();
        let correct: u64 = self.0.iter().map(|c| c.correct).sum();
        let scores: Vec<(usize, f64)> = (0..self.0.len()).filter_map(|c| Some((c, self.f1(c)?))).collect();
        let mean = scores.iter().map(|(_, f1)| f1).sum::<f64>() / scores.len().max(1) as f64;
        let mut out = Map::new();
        out.insert("accuracy".into(), json!(correct as f64 / all.max(1) as f64));
        out.insert("f1".into(), json!(mean));
        for (class, f1) in scores {
            out.insert(format!("f1_{}", names.get(class).map_or("", String::as_str)), json!(f1));
        }
        out.insert("rows".into(), json!(all));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of scikit-learn 1.7: `f1_score(y, p, average = None)` and `"macro"`, of y = 0 0 0 1 1 2, p = 0 0 1 1 2 2.
    /// Class 4 is out of range.
    #[test]
    fn scores_are_those_of_scikit_learn() {
        let mut c = ClassCounts::new(4);
        for (class, predicted) in [(0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (0, 4), (4, 0)] {
            c.add(class, predicted);
        }
        let f1: Vec<Option<f64>> = (0..4).map(|class| c.f1(class)).collect();
        assert_eq!(f1, [Some(0.8), Some(0.5), Some(2.0 / 3.0), None]);
        let m = c.metrics(&["a", "b", "c", "d"].map(String::from));
        let number = |key: &str| m[key].as_f64().unwrap_or(f64::NAN);
        assert!((number("f1") - 0.655_555_555_555_555_5).abs() < 1e-12 && m.get("f1_d").is_none(), "{m:?}");
        assert!((number("accuracy") - 4.0 / 6.0).abs() < 1e-12 && m["rows"] == 6);
    }
}
