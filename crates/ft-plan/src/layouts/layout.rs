//! Layouts of ranks over the axes of `[parallel]`.

use ft_recipe::Parallel;
use serde::Serialize;

/// Numbers of ranks by axis, and the ZeRO stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Layout {
    /// Ranks that split the rows.
    pub data: usize,
    /// Stages of layers.
    pub pipeline: usize,
    /// Ranks that split the tokens of a row.
    pub context: usize,
    /// Ranks that cut matrices.
    pub tensor: usize,
    /// Ranks that split the experts; they belong to the other axes too.
    pub expert: usize,
    /// ZeRO stage.
    pub zero: u8,
}

impl Layout {
    /// The layout of a recipe.
    pub fn of(p: &Parallel) -> Self {
        let (data, pipeline, context) = (p.data, p.pipeline, p.context);
        Self { data, pipeline, context, tensor: p.tensor, expert: p.expert, zero: p.zero }
    }

    /// Searched layouts of `devices` ranks, for a model of `layers` layers with `experts` experts a layer (0 for none);
    /// `cuts` tells whether a number of ranks divides the matrices. A stage of one rank has nothing to split by ZeRO.
    pub fn all(devices: usize, layers: usize, experts: usize, cuts: impl Fn(usize) -> bool) -> Vec<Self> {
        let mut all = Vec::new();
        for pipeline in divisors(devices).filter(|n| *n == 1 || *n <= layers) {
            let stage = devices / pipeline;
            let zeros = if stage == 1 { 0..=0 } else { 0..=3 };
            for tensor in divisors(stage).filter(|n| *n == 1 || cuts(*n)) {
                for context in divisors(stage / tensor) {
                    let data = stage / tensor / context;
                    let experts = divisors(stage).filter(|e| experts.max(1).is_multiple_of(*e));
                    for (expert, zero) in experts.flat_map(|e| zeros.clone().map(move |zero| (e, zero))) {
                        all.push(Self { data, pipeline, context, tensor, expert, zero });
                    }
                }
            }
        }
        all.retain(Self::is_searched);
        all
    }

    /// Whether it has one axis beside data, stages with cut matrices or with experts, or tokens with experts. Further
    /// combinations are for hands: at a thousand cards they are thousands.
    fn is_searched(&self) -> bool {
        let [pipeline, context, tensor, expert] =
            [self.pipeline, self.context, self.tensor, self.expert].map(|n| n > 1);
        !(context && (pipeline || tensor) || tensor && expert)
    }

    /// Keys, values and defaults; a default is also the minimum.
    fn all_keys(&self) -> [(&'static str, usize, usize); 6] {
        let Self { data, pipeline, context, tensor, expert, zero } = *self;
        [
            ("data", data, 1),
            ("pipeline", pipeline, 1),
            ("context", context, 1),
            ("tensor", tensor, 1),
            ("expert", expert, 1),
            ("zero", zero.into(), 0),
        ]
    }

    /// The keys with non-default values, and the values.
    pub fn keys(&self) -> Vec<(&'static str, usize)> {
        self.all_keys().into_iter().filter(|(_, n, least)| n > least).map(|(key, n, _)| (key, n)).collect()
    }

    /// All keys in command-line form, defaults included.
    pub fn settings(&self) -> Vec<String> {
        self.all_keys().iter().map(|(key, n, _)| format!("parallel.{key}={n}")).collect()
    }
}

fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_divide_the_devices_and_the_experts() {
        let of = |devices, experts| Layout::all(devices, 3, experts, |n| n == 2 && experts == 0);
        let plain = Layout { data: 1, pipeline: 1, context: 1, tensor: 1, expert: 1, zero: 0 };
        assert_eq!(of(1, 0), [plain]);
        // tokens over 1, 2, 3, 6, or matrices over 2 ranks; 2 or 3 stages, the latter with matrices too
        assert_eq!(of(6, 0).len(), (5 + 1 + 2) * 4);
        // 12 experts divide by 1, 2, 4 of the divisors of 8; with tokens over 1, 2, 4, 8 ranks, or 2 stages
        assert_eq!(of(8, 12).len(), (4 * 3 + 3) * 4);
        assert!(of(8, 12).iter().all(|l| l.data * l.context * l.pipeline == 8 && 12 % l.expert == 0));
        let l = Layout { data: 4, expert: 2, zero: 3, ..plain };
        assert_eq!(l.keys(), [("data", 4), ("expert", 2), ("zero", 3)]);
        assert_eq!(l.settings().len(), 6);
    }
}
