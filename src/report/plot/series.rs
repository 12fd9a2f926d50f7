//! Series of numbers by step: statistics, smoothing, thinning.

/// Values by step; non-finite values are gaps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series(pub Vec<(u64, f64)>);

impl Series {
    /// Finite points.
    pub fn finite(&self) -> impl DoubleEndedIterator<Item = (u64, f64)> + '_ {
        self.0.iter().copied().filter(|(_, y)| y.is_finite())
    }

    /// Steps with a missing or non-finite value.
    pub fn gaps(&self) -> Vec<u64> {
        self.0.iter().filter(|(_, y)| !y.is_finite()).map(|(x, _)| *x).collect()
    }

    /// Point with the lowest value, the first of equals.
    pub fn lowest(&self) -> Option<(u64, f64)> {
        self.finite().reduce(|a, b| if b.1 < a.1 { b } else { a })
    }

    /// Point with the highest value, the first of equals.
    pub fn highest(&self) -> Option<(u64, f64)> {
        self.finite().reduce(|a, b| if b.1 > a.1 { b } else { a })
    }

    /// Median of the finite values.
    pub fn median(&self) -> Option<f64> {
        let mut all: Vec<f64> = self.finite().map(|(_, y)| y).collect();
        all.sort_unstable_by(f64::total_cmp);
        let middle = all.len() / 2;
        match all.len() {
            0 => None,
            n if n % 2 == 1 => Some(all[middle]),
            _ => Some((all[middle - 1] + all[middle]) / 2.0),
        }
    }

    /// Mean of all points so far with weights `exp(-distance / over)`, distance in points. Normalized,
    /// hence without bias towards the first value.
    pub fn smooth(&self, over: f64) -> Series {
        let keep = (-1.0 / over.max(1e-9)).exp();
        let (mut sum, mut weight) = (0.0, 0.0);
        let smooth = |&(x, y): &(u64, f64)| {
            if y.is_finite() {
                sum = sum * keep + y;
                weight = weight * keep + 1.0;
            }
            (x, if weight > 0.0 { sum / weight } else { f64::NAN })
        };
        Series(self.0.iter().map(smooth).collect())
    }

    /// At most about `points` points with the same look: minimum, maximum and a gap of each range, plus
    /// the first and last point.
    pub fn thin(&self, points: usize) -> Series {
        let n = self.0.len();
        if n <= points || points < 8 {
            return self.clone();
        }
        let ranges = points / 3;
        let mut out = vec![self.0[0]];
        for s in 0..ranges {
            let part = &self.0[1 + s * (n - 2) / ranges..1 + (s + 1) * (n - 2) / ranges];
            let finite = || (0..part.len()).filter(|i| part[*i].1.is_finite());
            let by_value = |a: &usize, b: &usize| part[*a].1.total_cmp(&part[*b].1);
            let gap = part.iter().position(|p| !p.1.is_finite());
            let mut kept: Vec<usize> =
                [finite().min_by(by_value), finite().max_by(by_value), gap].into_iter().flatten().collect();
            kept.sort_unstable();
            kept.dedup();
            out.extend(kept.into_iter().map(|i| part[i]));
        }
        out.push(self.0[n - 1]);
        Series(out)
    }
}
