//! Rates of the links between ranks: measured by `ft bench --ranks`, or of a class of links.

use super::kept::Kept;
use crate::model::Target;
use ft_base::store;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const LINKS: Kept = Kept("links.json");

/// Classes of links by name, with the name in words and the assumed bytes a second that a device receives.
pub const CLASSES: [(&str, &str, f64); 3] =
    [("nvlink", "NVLink", 200e9), ("pcie", "PCIe", 20e9), ("tcp", "TCP", 1e9)];
const PCIE: (&str, &str, f64) = CLASSES[1];

/// A link between ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes a second that a rank receives while all gather.
    pub gather: f64,
    /// The same while neighbours exchange in pairs.
    pub exchange: f64,
    /// Source of both.
    pub source: String,
}

impl Link {
    /// The link of a class.
    pub fn of_class((_, words, rate): (&str, &str, f64)) -> Self {
        Self { gather: rate, exchange: rate, source: format!("assumed for {words} links") }
    }

    /// The link of the class of this name, or without a name the measured one of such devices, else PCIe.
    pub fn find(class: Option<&str>, target: Target) -> Self {
        let named = class.and_then(|word| CLASSES.into_iter().find(|(name, ..)| *name == word));
        match named {
            Some(class) => Self::of_class(class),
            None => LINKS.find(&key(target)).unwrap_or_else(|| Self::of_class(PCIE)),
        }
    }

    /// Stores a measured link of such devices and returns the file, or `None` without a cache folder.
    ///
    /// # Errors
    /// A cache folder or file that cannot be written.
    pub fn save(self, target: Target) -> Result<Option<PathBuf>, store::Error> {
        LINKS.save(key(target), self)
    }
}

fn key(target: Target) -> String {
    match (target.cuda, target.card) {
        (true, card) => format!("cuda-{}", card.unwrap_or("unknown")),
        (false, _) => "cpu".into(),
    }
}
