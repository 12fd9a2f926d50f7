//! Counts of true and predicted classes, and the scores made of them.

use serde_json::{Map, Value, json};

/// Counts by true class and predicted class.
#[derive(Clone, Debug, PartialEq)]
pub struct Confusion {
    counts: Vec<u64>,
    classes: usize,
}

impl Confusion {
    /// Without documents.
    pub fn new(classes: usize) -> Self {
        Self { counts: vec![0; classes * classes], classes }
    }

    /// Adds a document; ignores classes out of range.
    pub fn add(&mut self, class: usize, predicted: usize) {
        if let Some(count) = self.counts.get_mut(class * self.classes + predicted) {
            *count += 1;
        }
    }

    fn row(&self, class: usize) -> u64 {
        (0..self.classes).map(|p| self.counts[class * self.classes + p]).sum()
    }

    fn column(&self, predicted: usize) -> u64 {
        (0..self.classes).map(|c| self.counts[c * self.classes + predicted]).sum()
    }

    /// F1 of a class, the harmonic mean of precision and recall: 0 without a correct document; `None` for a class
    /// that neither occurs nor is predicted.
    pub fn f1(&self, class: usize) -> Option<f64> {
        let (correct, there) =
            (self.counts[class * self.classes + class], self.row(class) + self.column(class));
        (there > 0).then(|| 2.0 * correct as f64 / there as f64)
    }

    /// Accuracy, macro F1, and F1 by class. The mean leaves out classes that neither occur nor are predicted, as
    /// scikit-learn's `f1_score(average = "macro")`.
    pub fn metrics(&self, names: &[String]) -> Map<String, Value> {
        let all: u64 = self.counts.iter().sum();
        let correct: u64 = (0..self.classes).map(|c| self.counts[c * self.classes + c]).sum();
        let scores: Vec<(usize, f64)> = (0..self.classes).filter_map(|c| Some((c, self.f1(c)?))).collect();
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
    #[test]
    fn scores_are_those_of_scikit_learn() {
        let mut c = Confusion::new(4);
        for (class, predicted) in [(0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 2)] {
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
