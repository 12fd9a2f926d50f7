//! Rates of the links between ranks: measured by `ft bench --ranks`, or of a class of links.

use super::actions::{Kind, Transfer};
use super::bench_cache::BenchCache;
use crate::model::Target;
use ft_base::store;
use ft_engine::ranks::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const LINKS: BenchCache = BenchCache("links.json");

/// Classes of links by name, with the name in words and the assumed bytes a second received by a device.
pub const CLASSES: [(&str, &str, f64); 4] =
    [("nvlink", "NVLink", 200e9), ("ib", "InfiniBand", 50e9), ("pcie", "PCIe", 20e9), ("tcp", "TCP", 1e9)];
const INFINIBAND: (&str, &str, f64) = CLASSES[1];
const PCIE: (&str, &str, f64) = CLASSES[2];

/// Assumed seconds of a collective of two ranks before the first byte, and of each further member: a round of words
/// between processes precedes each collective of devices.
const CALL: f64 = 50e-6;
const PEER: f64 = 5e-6;

/// Number of CUDA cards of a machine, unless told.
const MACHINE: usize = 8;

/// A link between ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes a second received by a rank while all gather.
    pub gather: f64,
    /// The same while all sum.
    pub sum: f64,
    /// The same while neighbors exchange in pairs.
    pub exchange: f64,
    /// Seconds of a collective without bytes, and per member beyond the second.
    pub call: [f64; 2],
    /// Source of all.
    pub source: String,
}

impl Link {
    /// The link of a class.
    pub fn of_class((_, words, rate): (&str, &str, f64)) -> Self {
        let source = format!("assumed for {words} links");
        Self { gather: rate, sum: rate, exchange: rate, call: [CALL, PEER], source }
    }

    fn named(class: Option<&str>) -> Option<Self> {
        let named = class.and_then(|word| CLASSES.into_iter().find(|(name, ..)| *name == word));
        named.map(Self::of_class)
    }

    /// The link of the class of this name, or without a name the measured one of such devices, else PCIe.
    fn find(class: Option<&str>, target: Target) -> Self {
        let measured = || LINKS.find(|name, _| name == key(target)).unwrap_or_else(|| Self::of_class(PCIE));
        Self::named(class).unwrap_or_else(measured)
    }

    /// Stores a measured link of such devices and returns the file, or `None` without a cache folder.
    ///
    /// # Errors
    /// An unwritable cache folder or file.
    pub fn save(self, target: Target) -> Result<Option<PathBuf>, store::Error> {
        LINKS.save(&key(target), &self)
    }

    /// Bytes a second of a kind of transfer.
    pub fn rate(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Gather => self.gather,
            Kind::Sum => self.sum,
            Kind::Exchange => self.exchange,
        }
    }
}

fn key(target: Target) -> String {
    match (target.cuda, target.card) {
        (true, card) => format!("cuda-{}", card.unwrap_or("unknown")),
        (false, _) => "cpu".into(),
    }
}

/// Links of devices on several machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Network {
    /// Links between the devices of a machine.
    pub within: Link,
    /// Links of a device to devices of other machines, all usable at once.
    pub between: Link,
    /// Devices of a machine.
    pub machine: usize,
}

/// Ranks of a group in all, and on the machine of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members {
    pub all: usize,
    pub near: usize,
}

impl Network {
    /// Links of the named classes. Without names: measured links of such devices, else PCIe, within a machine;
    /// InfiniBand between machines. A machine has `machine` cards, 8 if not given. The ranks of a CPU are of one
    /// machine.
    pub fn find(target: Target, within: Option<&str>, between: Option<&str>, machine: Option<usize>) -> Self {
        let within = Link::find(within, target);
        let between = Link::named(between).unwrap_or_else(|| Link::of_class(INFINIBAND));
        Self { within, between, machine: if target.cuda { machine.unwrap_or(MACHINE) } else { usize::MAX } }
    }

    /// The group of a rank along an axis.
    pub fn members(&self, mesh: &Mesh, axis: Axis, rank: usize) -> Members {
        let all = mesh.members(axis, rank);
        let near = all.iter().filter(|r| *r / self.machine == rank / self.machine).count();
        Members { all: all.len(), near }
    }

    /// Bytes of a transfer from the same machine, and from other machines.
    pub fn parts(&self, bytes: f64, m: Members) -> [f64; 2] {
        let others = m.all.saturating_sub(1).max(1) as f64;
        let near = bytes * m.near.saturating_sub(1) as f64 / others;
        [near, bytes - near]
    }

    /// Seconds before the first byte of a transfer.
    pub fn latency(&self, calls: f64, m: Members) -> f64 {
        if m.all < 2 {
            return 0.0;
        }
        let [call, peer] = if m.near < m.all { self.between.call } else { self.within.call };
        calls * (call + peer * (m.all - 2) as f64)
    }

    /// Seconds of a transfer in a group. Bytes within a machine and between machines are received at the same time.
    pub fn seconds(&self, t: &Transfer, m: Members) -> f64 {
        let [near, far] = self.parts(t.bytes, m);
        let bytes = (near / self.within.rate(t.kind)).max(far / self.between.rate(t.kind));
        bytes + self.latency(t.calls, m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 6 ranks on machines of 4, the first has 3 others of its machine, the last has 1.
    #[test]
    fn members_of_a_group_are_near_on_the_same_machine() {
        let target = Target { cuda: true, card: None };
        let network = Network::find(target, Some("pcie"), None, Some(4));
        let mesh = Mesh { data: 6, ..Mesh::ONE };
        for (rank, near) in [(0, 4), (3, 4), (4, 2), (5, 2)] {
            assert_eq!(network.members(&mesh, Axis::Stage, rank), Members { all: 6, near }, "{rank}");
        }
        assert_eq!(network.parts(10.0, Members { all: 6, near: 4 }), [6.0, 4.0]);
    }
}
