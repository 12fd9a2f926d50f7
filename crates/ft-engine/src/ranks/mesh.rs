//! Device mesh: the parallel axes of a run, and the groups of ranks along them.

use ft_recipe::Parallel;
use std::fmt;

/// Device mesh: number of ranks along each axis. `rank = ((p * data + d) * context + c) * tensor + t`: stages of the
/// pipeline are contiguous, ranks along the tensor axis are neighbors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Pipeline parallelism: number of stages.
    pub pipeline: usize,
    /// Data parallelism: ranks split the rows.
    pub data: usize,
    /// Context parallelism: ranks split the tokens of a row.
    pub context: usize,
    /// Tensor parallelism: ranks split matrices.
    pub tensor: usize,
    /// Expert parallelism: number of neighbors of a stage to split the experts over. Adds no ranks.
    pub expert: usize,
}

/// Coordinates of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Stage of the pipeline.
    pub pipeline: usize,
    /// Index along the data axis.
    pub data: usize,
    /// Index along the context axis.
    pub context: usize,
    /// Index along the tensor axis.
    pub tensor: usize,
    /// Index within the expert-parallel block.
    pub expert: usize,
}

/// A kind of group. The groups of a kind divide the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// All ranks.
    #[default]
    World,
    /// Ranks of one stage of the pipeline: they hold copies of the same whole tensors.
    Stage,
    /// Ranks of one stage with the same index along the tensor axis: copies of the same cut tensors.
    Replica,
    /// Ranks with tokens of the same rows: a context group and its tensor groups.
    Rows,
    /// Ranks with segments of the same rows.
    Context,
    /// Ranks that split matrices.
    Tensor,
    /// Ranks that split the experts.
    Expert,
    /// Ranks with copies of the same experts.
    ExpertReplica,
    /// Ranks of all stages passing on the same micro-batches.
    Pipeline,
    /// Ranks of the first and the last stage: they hold copies of a table shared by embedding and head. The ranks
    /// between them are a group too, and hold none.
    Ends,
}

impl Axis {
    /// All kinds of groups.
    pub const ALL: [Axis; 10] = [
        Axis::World,
        Axis::Stage,
        Axis::Replica,
        Axis::Rows,
        Axis::Context,
        Axis::Tensor,
        Axis::Expert,
        Axis::ExpertReplica,
        Axis::Pipeline,
        Axis::Ends,
    ];

    /// Name of the groups, and 1 for the coordinates differing between members: pipeline, data, context, tensor.
    fn describe(self) -> (&'static str, [u8; 4]) {
        match self {
            Axis::World => ("all ranks", [1, 1, 1, 1]),
            Axis::Stage => ("stage group", [0, 1, 1, 1]),
            Axis::Replica => ("replica group", [0, 1, 1, 0]),
            Axis::Rows => ("row group", [0, 0, 1, 1]),
            Axis::Context => ("context group", [0, 0, 1, 0]),
            Axis::Tensor => ("tensor group", [0, 0, 0, 1]),
            Axis::Expert => ("expert group", [0, 1, 1, 1]),
            Axis::ExpertReplica => ("expert replica group", [0, 1, 1, 1]),
            Axis::Pipeline => ("pipeline group", [1, 0, 0, 0]),
            Axis::Ends => ("first and last stage", [1, 1, 1, 1]),
        }
    }

    /// Name of the groups, in messages.
    pub fn word(self) -> &'static str {
        self.describe().0
    }
}

impl Mesh {
    /// A mesh of one rank.
    pub const ONE: Self = Self { pipeline: 1, data: 1, context: 1, tensor: 1, expert: 1 };

    /// Reads the mesh of a recipe.
    pub fn of(p: &Parallel) -> Self {
        Self { pipeline: p.pipeline, data: p.data, context: p.context, tensor: p.tensor, expert: p.expert }
    }

    /// Ranks of one stage.
    pub fn stage(&self) -> usize {
        self.data * self.context * self.tensor
    }

    /// Total number of ranks.
    pub fn ranks(&self) -> usize {
        self.pipeline * self.stage()
    }

    /// Coordinates of a rank.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        Coordinates {
            pipeline: rank / self.stage(),
            data: rank / (self.context * self.tensor) % self.data,
            context: rank / self.tensor % self.context,
            tensor: rank % self.tensor,
            expert: rank % self.stage() % self.expert,
        }
    }

    /// Ranks of the group of `rank` along an axis, in order.
    pub fn members(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let axes = |p: Coordinates| [p.pipeline, p.data, p.context, p.tensor];
        let (own, (_, varies)) = (self.coordinates(rank), axis.describe());
        let is_end = |p: Coordinates| p.pipeline == 0 || p.pipeline + 1 == self.pipeline;
        let block = |r: usize| r % self.stage() / self.expert;
        let in_group = |other: &usize| {
            let at = self.coordinates(*other);
            let agree =
                axes(at).into_iter().zip(axes(own)).zip(varies).all(|((a, b), varies)| varies == 1 || a == b);
            agree
                && match axis {
                    Axis::Expert => block(*other) == block(rank),
                    Axis::ExpertReplica => at.expert == own.expert,
                    Axis::Ends => is_end(at) == is_end(own),
                    _ => true,
                }
        };
        (0..self.ranks()).filter(in_group).collect()
    }
}

/// Formats as `data 2 x context 4`, without axes of one rank; experts last, since they add none.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pipeline, data, context, tensor, expert } = *self;
        let axes = [("pipeline", pipeline), ("data", data), ("context", context), ("tensor", tensor)];
        let axes: Vec<_> =
            axes.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name} {n}")).collect();
        f.write_str(&if axes.is_empty() { "one rank".into() } else { axes.join(" x ") })?;
        if expert > 1 { write!(f, ", experts over {expert}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Mesh = Mesh { pipeline: 2, data: 2, context: 3, tensor: 2, expert: 4 };

    /// Groups of the first and of the last rank along each axis.
    #[test]
    fn groups_of_a_mesh_of_all_axes() {
        let at = |axis, rank| ALL.members(axis, rank);
        for (axis, first, last) in [
            (Axis::World, (0..24).collect(), (0..24).collect()),
            (Axis::Stage, (0..12).collect(), (12..24).collect()),
            (Axis::Replica, vec![0, 2, 4, 6, 8, 10], vec![13, 15, 17, 19, 21, 23]),
            (Axis::Rows, (0..6).collect(), (18..24).collect()),
            (Axis::Context, vec![0, 2, 4], vec![19, 21, 23]),
            (Axis::Tensor, vec![0, 1], vec![22, 23]),
            (Axis::Expert, vec![0, 1, 2, 3], vec![20, 21, 22, 23]),
            (Axis::ExpertReplica, vec![0, 4, 8], vec![15, 19, 23]),
            (Axis::Pipeline, vec![0, 12], vec![11, 23]),
            (Axis::Ends, (0..24).collect(), (0..24).collect()),
        ] {
            assert_eq!((at(axis, 0), at(axis, 23)), (first, last), "{axis:?}");
        }
        assert_eq!((ALL.ranks(), Mesh { expert: 1, ..ALL }.ranks()), (24, 24));
        assert_eq!(ALL.to_string(), "pipeline 2 x data 2 x context 3 x tensor 2, experts over 4");
        let place = Coordinates { pipeline: 1, data: 1, context: 0, tensor: 1, expert: 3 };
        assert_eq!(ALL.coordinates(19), place);
    }

    /// For every mesh of up to three ranks an axis: groups divide the world, and the members of a group agree on it.
    #[test]
    fn groups_divide_the_world() {
        use Axis::*;
        for n in 0..3_usize.pow(4) {
            let [pipeline, data, context, tensor] = [1, 3, 9, 27].map(|k| n / k % 3 + 1);
            for expert in (1..=data * context * tensor).filter(|e| data * context * tensor % e == 0) {
                let mesh = Mesh { pipeline, data, context, tensor, expert };
                for axis in Axis::ALL {
                    let groups: Vec<_> = (0..mesh.ranks()).map(|r| mesh.members(axis, r)).collect();
                    for (rank, group) in groups.iter().enumerate() {
                        assert!(group.contains(&rank) && group.is_sorted(), "{mesh:?} {axis:?}");
                        assert!(group.iter().all(|m| groups[*m] == *group), "{mesh:?} {axis:?}");
                    }
                    let size = match axis {
                        World => mesh.ranks(),
                        Stage => data * context * tensor,
                        Replica => data * context,
                        Rows => context * tensor,
                        Context => context,
                        Tensor => tensor,
                        Expert => expert,
                        ExpertReplica => data * context * tensor / expert,
                        Pipeline => pipeline,
                        Ends if pipeline == 3 => continue,
                        Ends => mesh.ranks(),
                    };
                    assert!(groups.iter().all(|g| g.len() == size), "{mesh:?} {axis:?}");
                }
            }
        }
    }

    #[test]
    fn a_mesh_of_data_alone_is_one_group() {
        let mesh = Mesh { data: 3, ..Mesh::ONE };
        assert_eq!((mesh.members(Axis::Stage, 1), mesh.members(Axis::Context, 1)), (vec![0, 1, 2], vec![1]));
        assert_eq!((mesh.to_string(), Mesh::ONE.to_string()), ("data 3".into(), "one rank".into()));
        assert_eq!((0..3).map(|r| mesh.coordinates(r).data).collect::<Vec<_>>(), [0, 1, 2]);
    }
}
