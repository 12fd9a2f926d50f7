//! Series of numbers by step: smoothing, thinning, formatting.

/// Most points of a drawn line; longer series are thinned.
pub const POINTS: usize = 1000;
/// Most rows of the table behind a chart.
pub const ROWS: usize = 40;

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
            let mut kept: Vec<usize> = Vec::with_capacity(3);
            let finite = || part.iter().enumerate().filter(|(_, p)| p.1.is_finite());
            kept.extend(finite().min_by(|a, b| a.1.1.total_cmp(&b.1.1)).map(|(i, _)| i));
            kept.extend(finite().max_by(|a, b| a.1.1.total_cmp(&b.1.1)).map(|(i, _)| i));
            kept.extend(part.iter().position(|p| !p.1.is_finite()));
            kept.sort_unstable();
            kept.dedup();
            out.extend(kept.into_iter().map(|i| part[i]));
        }
        out.push(self.0[n - 1]);
        Series(out)
    }
}

/// Indices of `rows` out of `count` items: first, last, and evenly spaced between.
pub fn evenly(count: usize, rows: usize) -> Vec<usize> {
    if count <= rows || rows < 2 {
        return (0..count.min(rows.max(1))).collect();
    }
    (0..rows).map(|r| r * (count - 1) / (rows - 1)).collect()
}

/// Formats with four significant digits; "none" if not finite.
pub fn short(y: f64) -> String {
    if !y.is_finite() {
        return "none".into();
    }
    let size = y.abs();
    if y == 0.0 {
        "0".into()
    } else if !(1e-3..1e6).contains(&size) {
        format!("{y:.3e}")
    } else {
        let decimals = (3 - size.log10().floor() as i32).max(0) as usize;
        format!("{y:.decimals$}")
    }
}

/// Formats an integer with thin spaces between thousands.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 2);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('\u{2009}');
        }
        out.push(d);
    }
    out
}

/// Formats a duration.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "unknown".into();
    }
    match seconds {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

/// Formats a Unix time as date and time in UTC.
pub fn moment(seconds: u64) -> String {
    // Howard Hinnant's civil_from_days, for years after 1970
    let z = seconds / 86_400 + 719_468;
    let day_of_era = z % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = z / 146_097 * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}
