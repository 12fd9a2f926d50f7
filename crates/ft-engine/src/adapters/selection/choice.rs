//! Training method of a module.

use ft_recipe::LoraSpec;

/// Training method of a module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// Frozen.
    Freeze,
    /// The weight, and the bias if any, trains in full.
    Full {
        /// Factor on the learning rate.
        lr_scale: f64,
    },
    /// LoRA trains.
    Lora {
        spec: LoraSpec,
        /// Factor on the learning rate.
        lr_scale: f64,
    },
    /// Token rows of the weight train.
    Rows {
        /// Number of rows.
        count: usize,
        /// Factor on the learning rate.
        lr_scale: f64,
    },
}

impl Choice {
    /// Whether the weight stays unchanged.
    pub fn leaves_weight(self) -> bool {
        matches!(self, Choice::Freeze | Choice::Lora { .. })
    }
}
