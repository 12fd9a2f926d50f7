//! Device mesh: the parallel axes of a run.

use ft_recipe::Parallel;

/// Device mesh: number of ranks along each axis. Ranks of the last axis are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Data parallelism: ranks split the rows.
    pub data: usize,
    /// Pipeline parallelism: number of stages.
    pub pipeline: usize,
    /// Context parallelism: ranks split the tokens of a row.
    pub context: usize,
    /// Expert parallelism: ranks split the experts.
    pub expert: usize,
    /// Tensor parallelism: ranks split matrices.
    pub tensor: usize,
}

impl Mesh {
    /// Reads the mesh of a recipe.
    pub fn of(p: &Parallel) -> Self {
        Self { data: p.data, pipeline: p.pipeline, context: p.context, expert: p.expert, tensor: p.tensor }
    }

    /// Ranks that hold one copy of the model together and process the same rows.
    fn inner(&self) -> usize {
        [self.pipeline, self.context, self.expert, self.tensor].iter().product::<usize>().max(1)
    }

    /// Total number of ranks.
    pub fn ranks(&self) -> usize {
        self.data.max(1) * self.inner()
    }

    /// Index along the data axis.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank / self.inner()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_their_rows() {
        let m = Mesh { data: 3, pipeline: 1, context: 1, expert: 1, tensor: 1 };
        assert_eq!((m.ranks(), (0..3).map(|r| m.data_rank(r)).collect()), (3, vec![0, 1, 2]));
        let m = Mesh { data: 2, pipeline: 1, context: 1, expert: 1, tensor: 2 };
        assert_eq!((m.ranks(), (0..4).map(|r| m.data_rank(r)).collect()), (4, vec![0, 0, 1, 1]));
    }
}
