//! Memory and arithmetic of ghosts, recorded without computing.
//!
//! The entry of a ghost ([`crate::tensor::Ghost`]) counts until the last handle or view drops. Lifetimes therefore
//! match a run on tensors. The ledger tracks the peak and its composition.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The machine of a plan and the dtypes of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// CUDA instead of CPU.
    pub cuda: bool,
    /// Bytes per value in the compute dtype.
    pub width: u64,
    /// Bytes per value of a stored matrix.
    pub stored: u64,
    /// Number of CPU threads.
    pub threads: u64,
    /// Model of the CUDA card, if it is known.
    pub card: Option<&'static str>,
    /// Whether products with frozen matrices of dense linears are in 8-bit floats: see [`crate::fp8`].
    pub fp8: bool,
}

impl Machine {
    /// Whether the compute dtype is f32.
    pub fn computes_in_f32(&self) -> bool {
        self.width == 4
    }

    /// Bytes per value of a frozen matrix: see [`crate::gemm::kept`].
    pub fn frozen(&self) -> u64 {
        if self.cuda { self.width } else { self.width.min(self.stored) }
    }
}

/// Purpose of an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Inputs of the micro-batch.
    Batch,
    /// Saved activations.
    Activations,
    /// Workspace of an operation or layer.
    #[default]
    Workspace,
    /// Dequantized 4-bit weights.
    InFlight,
    /// Logit chunk of the head.
    Logits,
    /// Gradients of a micro-batch before reduction over ranks.
    Gradients,
}

/// Number of roles.
pub const ROLES: usize = Role::ALL.len();

impl Role {
    /// All roles.
    pub const ALL: [Role; 6] =
        [Role::Batch, Role::Activations, Role::Workspace, Role::InFlight, Role::Logits, Role::Gradients];
}

/// Arithmetic, memory traffic and launches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations of matrix products.
    pub flops: f64,
    /// Share of attention in `flops`.
    pub attention: f64,
    /// Share of the delta rule in `flops`.
    pub delta: f64,
    /// Share of grouped products in `flops`.
    pub grouped: f64,
    /// Share of products of 8-bit floats in `flops`.
    pub fp8: f64,
    /// 4-bit values dequantized.
    pub dequantized: f64,
    /// Bytes of matrices dequantized as a whole and read again.
    pub held: f64,
    /// Bytes of weights read by products, and of weight gradients read and written.
    pub read: f64,
    /// Bytes read and written by other operations, excluding weights.
    pub moved: f64,
    /// Operations launched.
    pub started: f64,
    /// Exchanges with other ranks, by [`Peers`].
    pub wire: [Wire; Peers::ALL.len()],
}

/// Ranks that exchange tensors within a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Ranks with tokens of the same rows.
    Context,
    /// Ranks that cut matrices.
    Tensor,
    /// Ranks that split the experts.
    Experts,
}

impl Peers {
    /// All kinds.
    pub const ALL: [Peers; 3] = [Peers::Context, Peers::Tensor, Peers::Experts];
}

/// Exchanges with other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wire {
    /// Bytes received.
    pub bytes: f64,
    /// Number of exchanges.
    pub calls: f64,
}

impl Cost {
    /// The cost of one exchange in which `bytes` come from `peers`.
    pub fn exchange(peers: Peers, bytes: f64) -> Self {
        let mut cost = Self::default();
        cost.wire[peers as usize] = Wire { bytes, calls: 1.0 };
        cost
    }

    /// Bytes received from other ranks.
    pub fn received(&self) -> f64 {
        self.wire.iter().map(|w| w.bytes).sum()
    }

    /// Adds `n` times `c`.
    pub fn add(&mut self, c: Cost, n: f64) {
        self.flops += n * c.flops;
        self.attention += n * c.attention;
        self.delta += n * c.delta;
        self.grouped += n * c.grouped;
        self.fp8 += n * c.fp8;
        self.dequantized += n * c.dequantized;
        self.held += n * c.held;
        self.read += n * c.read;
        self.moved += n * c.moved;
        self.started += n * c.started;
        for (sum, w) in self.wire.iter_mut().zip(c.wire) {
            sum.bytes += n * w.bytes;
            sum.calls += n * w.calls;
        }
    }
}

/// A region executed once and counted `n` times: see [`Ledger::times`].
#[derive(Debug, Default)]
struct Scope {
    /// Index of the first entry made in the scope.
    first: usize,
    n: f64,
    /// Live bytes of entries made in the scope.
    new: u64,
    /// Live bytes of entries shared by all repetitions: see [`Ledger::hold_once`].
    common: u64,
    /// Bytes of older scaled entries dropped in the scope, one share per repetition. Older shared entries
    /// stay until the last repetition.
    dropped: u64,
    /// Number of concurrent repetitions.
    at_once: f64,
    /// Peak of one repetition above the level at entry.
    most: f64,
    /// Peak of the first concurrent repetitions, with the shared entries they make.
    most_first: f64,
}

impl Scope {
    fn look(&mut self, more: f64) {
        let one = self.new as f64 - self.dropped as f64 / self.n + more;
        self.most = self.most.max(one);
        self.most_first = self.most_first.max(self.at_once * one + self.common as f64);
    }
}

#[derive(Debug)]
struct Entry {
    role: Role,
    bytes: u64,
    /// Scaled by an earlier scope, one share per repetition.
    shares: bool,
    /// Shared by all repetitions.
    once: bool,
}

#[derive(Debug, Default)]
struct State {
    entries: Vec<Entry>,
    live: [u64; ROLES],
    sum: u64,
    high: u64,
    at_peak: [u64; ROLES],
    listed: HashSet<(Role, u64)>,
    role: Role,
    cost: Cost,
    skewed: bool,
    /// Product of the repetition counts of all open scopes.
    scale: f64,
    scopes: Vec<Scope>,
}

impl State {
    fn peak(&mut self) {
        if self.sum > self.high {
            (self.high, self.at_peak) = (self.sum, self.live);
        }
    }

    fn add(&mut self, role: Role, bytes: u64, once: bool) -> usize {
        let id = self.entries.len();
        self.entries.push(Entry { role, bytes, shares: false, once });
        self.live[role as usize] += bytes;
        self.sum += bytes;
        self.listed.insert((role, bytes));
        for s in &mut self.scopes {
            *(if once { &mut s.common } else { &mut s.new }) += bytes;
            s.look(0.0);
        }
        self.peak();
        id
    }

    fn remove(&mut self, id: usize) {
        let Some(Entry { role, bytes, shares, once }) = self.entries.get_mut(id) else { return };
        let bytes = std::mem::take(bytes);
        self.live[*role as usize] -= bytes;
        self.sum -= bytes;
        for s in &mut self.scopes {
            if id >= s.first {
                *(if *once { &mut s.common } else { &mut s.new }) -= bytes;
            } else if *shares {
                s.dropped += bytes;
            }
        }
    }

    /// Updates the peak as if `more` additional bytes of workspace were live.
    fn rise(&mut self, more: f64) {
        let more = more.max(0.0).round() as u64;
        for s in &mut self.scopes {
            s.look(more as f64);
        }
        if self.sum + more > self.high {
            (self.high, self.at_peak) = (self.sum + more, self.live);
            self.at_peak[Role::Workspace as usize] += more;
        }
    }

    /// Closes a scope and scales its entries by `n`.
    fn close(&mut self, scope: Scope, before: u64) {
        let Scope { first, n, new, common, dropped, at_once, most, most_first } = scope;
        let mut grown = 0;
        for e in self.entries.iter_mut().skip(first).filter(|e| e.bytes > 0 && !e.once) {
            let all = (e.bytes as f64 * n).round() as u64;
            let live = &mut self.live[e.role as usize];
            *live = *live + all - e.bytes;
            grown += all as i64 - e.bytes as i64;
            (e.bytes, e.shares) = (all, true);
        }
        self.sum = self.sum.saturating_add_signed(grown);
        for s in &mut self.scopes {
            s.new = s.new.saturating_add_signed(grown);
            s.look(0.0);
        }
        // Candidates for the peak: the first repetitions, with nothing dropped yet; later ones, which find
        // the shared entries; the last ones, after all previous results were left and shares dropped.
        let begin = before as f64 + most_first;
        let (before, late) = ((before + common) as f64, n > at_once);
        let start = before + at_once * most;
        let end =
            before - dropped as f64 + (n - at_once) * new as f64 + at_once * (dropped as f64 / n + most);
        let later = if late { start.max(end) } else { begin };
        self.rise(begin.max(later) - self.sum as f64);
        self.peak();
    }
}

/// Record of a visit.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// Bytes by role at the peak.
    pub at_peak: [u64; ROLES],
    /// Distinct allocation sizes by role.
    pub listed: Vec<(Role, u64)>,
    /// Work of the visit.
    pub cost: Cost,
}

/// A ledger of memory and work. Clones share the same records.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<(Machine, Mutex<State>)>);

impl Ledger {
    /// Creates an empty ledger.
    pub fn new(machine: Machine) -> Self {
        Self(Arc::new((machine, Mutex::new(State { scale: 1.0, ..State::default() }))))
    }

    /// The machine of the plan.
    pub fn machine(&self) -> Machine {
        self.0.0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates bytes in the current role until the returned handle drops.
    pub fn hold(&self, bytes: u64) -> Allocation {
        self.allocate(bytes, false)
    }

    /// Like [`Ledger::hold`], for memory shared by all [repetitions](Ledger::times).
    pub fn hold_once(&self, bytes: u64) -> Allocation {
        self.allocate(bytes, true)
    }

    fn allocate(&self, bytes: u64, once: bool) -> Allocation {
        let id = if bytes == 0 {
            NOTHING
        } else {
            let mut s = self.state();
            let role = s.role;
            s.add(role, bytes, once)
        };
        Allocation { ledger: self.clone(), id }
    }

    /// A handle for weights and gradient buffers, which no visit counts.
    pub fn uncounted(&self) -> Allocation {
        Allocation { ledger: self.clone(), id: UNCOUNTED }
    }

    /// Records a temporary allocation, freed at once.
    pub fn touch(&self, bytes: u64) {
        drop(self.hold(bytes));
    }

    /// Records work, multiplied by the current repetition count.
    pub fn work(&self, cost: Cost) {
        let mut s = self.state();
        let n = s.scale;
        s.cost.add(cost, n);
    }

    /// Current repetition count.
    pub fn scale(&self) -> f64 {
        self.state().scale
    }

    /// Sets the routing assumed from now on: all tokens to the same experts if `skewed`, else an even load.
    pub fn route(&self, skewed: bool) {
        self.state().skewed = skewed;
    }

    /// Whether all tokens choose the same experts.
    pub fn skewed(&self) -> bool {
        self.state().skewed
    }

    /// Runs `f` with `role` as the current role.
    pub fn role<R>(&self, role: Role, f: impl FnOnce() -> R) -> R {
        let before = std::mem::replace(&mut self.state().role, role);
        let out = f();
        self.state().role = before;
        out
    }

    /// Runs `f` once and counts remaining allocations and work `n` times, with
    /// `at_once` concurrent repetitions.
    pub fn times<R>(&self, n: f64, at_once: f64, f: impl FnOnce() -> R) -> R {
        let before = {
            let mut s = self.state();
            s.scale *= n;
            let first = s.entries.len();
            s.scopes.push(Scope { first, n, at_once: at_once.min(n), ..Scope::default() });
            s.sum
        };
        let out = f();
        let mut s = self.state();
        s.scale /= n;
        if let Some(scope) = s.scopes.pop() {
            s.close(scope, before);
        }
        out
    }

    /// Turns all live workspace into saved activations; returns live bytes by role.
    pub fn keep(&self) -> [u64; ROLES] {
        let mut s = self.state();
        s.entries.iter_mut().filter(|e| e.role == Role::Workspace).for_each(|e| e.role = Role::Activations);
        s.live[Role::Activations as usize] += std::mem::take(&mut s.live[Role::Workspace as usize]);
        s.live
    }

    /// Work since the last call of [`Ledger::take`].
    pub fn cost(&self) -> Cost {
        self.state().cost
    }

    /// Returns the record since the last call and starts a new one from the live entries. Discards all
    /// entries if none is live.
    pub fn take(&self) -> Taken {
        let mut s = self.state();
        if s.sum == 0 {
            s.entries.clear();
        }
        let mut listed: Vec<_> = s.listed.drain().collect();
        listed.sort_unstable();
        let cost = std::mem::take(&mut s.cost);
        let taken = Taken { at_peak: s.at_peak, listed, cost };
        (s.high, s.at_peak) = (s.sum, s.live);
        taken
    }
}

/// Handle of an entry; dropping it frees the bytes.
#[derive(Debug)]
pub struct Allocation {
    ledger: Ledger,
    id: usize,
}

/// Special ids: an empty allocation, and an uncounted one.
const NOTHING: usize = usize::MAX - 1;
const UNCOUNTED: usize = usize::MAX;

impl Allocation {
    /// Ledger of this entry.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Whether visits count this allocation.
    pub fn is_counted(&self) -> bool {
        self.id != UNCOUNTED
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.id < NOTHING {
            self.ledger.state().remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: usize = Role::Workspace as usize;

    #[test]
    fn the_ledger_keeps_the_peak() {
        let ledger = Ledger::new(Machine::default());
        let a = ledger.role(Role::Batch, || ledger.hold(100));
        let b = ledger.hold(50);
        drop(b);
        let _d = ledger.hold(20);
        drop(a);
        ledger.touch(30);
        let taken = ledger.take();
        assert_eq!((taken.at_peak[W], taken.at_peak.iter().sum::<u64>()), (50, 150));
        assert_eq!(taken.listed.len(), 4);
        let again = ledger.take();
        assert_eq!((again.at_peak[W], again.listed.len()), (20, 0));
        assert_eq!(ledger.keep()[Role::Activations as usize], 20);
    }

    /// `times` leaves the same entries as a loop, and has the same peak.
    #[test]
    fn repetitions_counted_at_once_equal_a_loop() {
        for at_once in [1u64, 2] {
            // each result is larger than the share freed; `all` is shared by all repetitions
            let part = |l: &Ledger, taken: Allocation, size: u64, all: Option<Allocation>| {
                let busy = l.hold(70 * size);
                drop((taken, all));
                let more = l.hold(20 * size);
                drop(busy);
                l.work(Cost { flops: 5.0, ..Cost::default() });
                more
            };
            let (one, many) = (Ledger::new(Machine::default()), Ledger::new(Machine::default()));
            let kept = one.times(8.0, 1.0, || one.hold(10));
            let all = one.hold(160);
            let left = one.times(8.0, at_once as f64, || part(&one, kept, 1, Some(all)));
            let kept: Vec<Allocation> = (0..8).map(|_| many.hold(10)).collect();
            let mut all = Some(many.hold(160));
            let mut rest = Vec::new();
            let mut kept = kept.into_iter();
            while let Some(first) = kept.next() {
                let other = if at_once == 2 { kept.next() } else { None };
                let _beside = other.map(|o| (many.hold(70), o));
                let last = if kept.len() == 0 { all.take() } else { None };
                rest.push(part(&many, first, 1, last));
                if at_once == 2 {
                    drop(_beside);
                    many.work(Cost { flops: 5.0, ..Cost::default() });
                    rest.push(many.hold(20));
                }
            }
            let (a, b) = (one.take(), many.take());
            assert_eq!(a.cost, b.cost);
            assert_eq!(one.take().at_peak, many.take().at_peak, "what is left");
            let (a, b) = (a.at_peak[W] as f64, b.at_peak[W] as f64);
            assert!(a >= b && a <= b + 40.0, "{at_once} at once: {a}, in a loop {b}");
            drop((left, rest));
        }
    }

    /// Memory made by the first repetition for all is counted once.
    #[test]
    fn memory_shared_by_repetitions_is_counted_once() {
        let ledger = Ledger::new(Machine::default());
        let mut shared = None;
        ledger.times(8.0, 2.0, || {
            ledger.times(3.0, 1.0, || {
                shared.get_or_insert_with(|| ledger.role(Role::Gradients, || ledger.hold_once(1000)));
                ledger.touch(10);
            });
        });
        let taken = ledger.take().at_peak;
        assert_eq!((taken[Role::Gradients as usize], taken.iter().sum::<u64>()), (1000, 1020));
        assert_eq!(ledger.take().at_peak[Role::Gradients as usize], 1000);
        drop(shared);
        ledger.take();
        assert_eq!(ledger.take().at_peak, [0; ROLES]);
        // with one repetition, the peak is before the shared allocation; later ones find it
        for (n, most) in [(1.0, 1040), (2.0, 1100)] {
            let mut shared = None;
            ledger.times(n, 1.0, || {
                ledger.touch(100);
                shared = Some(ledger.hold_once(1000));
                ledger.touch(40);
            });
            assert_eq!(ledger.take().at_peak.iter().sum::<u64>(), most);
            drop(shared);
            ledger.take();
        }
    }
}
