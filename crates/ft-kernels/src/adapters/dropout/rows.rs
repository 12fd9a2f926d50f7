//! Row numbers of a mask.

/// Rows of a mask, numbered within the step.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Consecutive rows.
    From {
        /// Number of the first row.
        first: usize,
    },
    /// Listed rows, for example the tokens of an expert.
    These {
        /// Offset added to the list.
        first: usize,
        /// Row numbers minus `first`.
        list: &'a [u32],
    },
}

impl Rows<'_> {
    /// Number of row `i`.
    pub fn number(&self, i: usize) -> usize {
        match self {
            Rows::From { first } => first + i,
            Rows::These { first, list } => first + list[i] as usize,
        }
    }
}
