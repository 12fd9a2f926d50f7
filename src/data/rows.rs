//! Rows of an epoch: which samples each holds.

/// Rows as lists of samples, four bytes a sample and four a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    samples: Vec<u32>,
    /// Where each row ends among the samples; each has one sample where there is no list.
    ends: Option<Vec<u32>>,
}

impl Rows {
    /// Rows of one sample.
    pub(super) fn single(samples: Vec<u32>) -> Self {
        Self { samples, ends: None }
    }

    /// Rows that end at these places of a list of samples.
    pub(super) fn packed(samples: Vec<u32>, ends: Vec<u32>) -> Self {
        Self { samples, ends: Some(ends) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.as_ref().map_or(self.samples.len(), Vec::len)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The samples of row `i`; none where it is not there.
    pub fn get(&self, i: usize) -> &[u32] {
        let range = match &self.ends {
            None => i..i.saturating_add(1),
            Some(ends) => {
                let start = i.checked_sub(1).map_or(Some(0), |before| ends.get(before).map(|e| *e as usize));
                match (start, ends.get(i)) {
                    (Some(start), Some(end)) => start..*end as usize,
                    _ => 0..0,
                }
            }
        };
        self.samples.get(range).unwrap_or_default()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// The samples of all rows, in order.
    pub fn samples(&self) -> impl Iterator<Item = usize> + '_ {
        self.samples.iter().map(|s| *s as usize)
    }

    /// Bytes that they take in memory.
    pub fn resident(&self) -> u64 {
        4 * (self.samples.len() + self.ends.as_ref().map_or(0, Vec::len)) as u64
    }
}

impl From<Vec<Vec<usize>>> for Rows {
    fn from(rows: Vec<Vec<usize>>) -> Self {
        let mut out = (Vec::new(), Vec::new());
        for row in rows {
            out.0.extend(row.into_iter().map(super::record::small));
            out.1.push(super::record::small(out.0.len()));
        }
        Self::packed(out.0, out.1)
    }
}
