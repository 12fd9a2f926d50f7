//! Predicted time of a layout's step, by lists of actions.

use super::layout::Layout;
use crate::time::actions::{Actions, StageActions, Transfer, VisitActions};
use crate::time::links::{Members, Network};
use ft_engine::ranks::Axis;
use ft_engine::ranks::schedule::{Action, schedule};
use serde::Serialize;

/// Limit of a layout's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Arithmetic takes longer than all else.
    Compute,
    /// Gathered weights and summed gradients take longer than the arithmetic meant to hide them.
    Gathers,
    /// Exposed transfers take longer than arithmetic.
    Exchanges,
    /// Stages wait for one another longer than they compute.
    Stages,
}

impl Limit {
    /// The limit in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Compute => "arithmetic",
            Self::Gathers => "the link: gathered weights, summed gradients",
            Self::Exchanges => "the link: transfers that nothing hides",
            Self::Stages => "stages that wait",
        }
    }
}

/// Rates of devices.
#[derive(Clone, Copy, Debug)]
pub struct Rates<'n> {
    /// Work a second of a device.
    pub rate: f64,
    pub network: &'n Network,
    /// Whether transfers overlap with arithmetic: copy engines on GPUs, none on CPUs.
    pub engines: bool,
    /// Speedup of a rank with all other ranks idle; above 1 if ranks outnumber processors.
    pub alone: f64,
}

/// The plan of a layout, in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    #[serde(flatten)]
    pub layout: Layout,
    /// Other keys needed by the layout, in command-line form.
    pub beside: Vec<String>,
    /// Device peak of the rank with the most.
    pub memory: u64,
    /// Bytes received by a rank in a step.
    pub wire_bytes_a_step: u64,
    /// The part of `wire_bytes_a_step` from other machines.
    pub wire_bytes_between: u64,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Waiting time of stages, as a share of the step.
    pub bubble: f64,
    pub limit: Limit,
    /// Execution in words.
    pub how: String,
    /// The lists of actions of a step.
    #[serde(skip)]
    pub actions: Actions,
}

/// Sorts by predicted time, fastest first. Of times within 1%, less memory goes first, then fewer bytes, then the
/// plainer layout.
pub fn sort(all: &mut [Candidate]) {
    // steps of a hundredth: logarithms compare as quotients
    let step = |c: &Candidate| (c.step_seconds.max(f64::MIN_POSITIVE).ln() * 100.0).round() as i64;
    all.sort_by_key(|c| (step(c), c.memory, c.wire_bytes_a_step, c.layout.zero, c.layout));
}

/// A predicted step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub seconds: f64,
    pub limit: Limit,
    /// Mean waiting time of a stage for other stages, as a share of the step.
    pub bubble: f64,
    /// Received bytes of a rank, from its machine and from other machines, in the stage with the most.
    pub bytes: [f64; 2],
}

/// Seconds of a pass through visits: arithmetic, hideable transfers, exchanges within visits, and the total.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    compute: f64,
    hidden: f64,
    exposed: f64,
    all: f64,
}

impl Pass {
    fn add(&mut self, other: Pass) {
        self.compute += other.compute;
        self.hidden += other.hidden;
        self.exposed += other.exposed;
        self.all += other.all;
    }
}

/// A stage on its devices.
struct OnDevices<'a> {
    of: Rates<'a>,
    /// Groups of a rank of the stage, by axis.
    members: [Members; Axis::ALL.len()],
}

impl<'a> OnDevices<'a> {
    fn new(of: Rates<'a>, actions: &Actions, stage: usize) -> Self {
        let first = stage * actions.mesh.stage();
        Self { of, members: Axis::ALL.map(|axis| of.network.members(&actions.mesh, axis, first)) }
    }

    fn seconds<'t>(&self, all: impl IntoIterator<Item = &'t Transfer>) -> f64 {
        all.into_iter().map(|t| self.of.network.seconds(t, self.members[t.axis as usize])).sum()
    }

    /// A pass through visits: the weights of the next visit and the gradients of earlier ones travel during a visit.
    fn pass(&self, visits: &[VisitActions]) -> Pass {
        let sums = |i: Option<usize>, part: usize| {
            i.and_then(|i| visits.get(i)).map_or(0.0, |v| self.seconds(&v.sums[part]))
        };
        let gathers = |i: usize| visits.get(i).map_or(0.0, |v| self.seconds(&v.gathers));
        let before = gathers(0);
        let mut pass = Pass { exposed: before, all: before, ..Pass::default() };
        for (i, visit) in visits.iter().enumerate() {
            let compute = visit.work / self.of.rate;
            let hidden = gathers(i + 1) + sums(i.checked_sub(1), 0) + sums(i.checked_sub(2), 1);
            let exposed = self.seconds(&visit.exchanges);
            let all = match (self.of.engines, visit.exchanges.is_empty()) {
                (false, _) => compute + hidden + exposed,
                (true, true) => compute.max(hidden),
                // transfers go one after the other: exchanges in the middle of a visit wait for earlier ones
                (true, false) => (compute / 2.0).max(hidden) + exposed + compute / 2.0,
            };
            pass.add(Pass { compute, hidden, exposed, all });
        }
        let last = visits.len().checked_sub(1);
        let after = sums(last, 0) + sums(last, 1) + sums(last.and_then(|l| l.checked_sub(1)), 1);
        pass.add(Pass { exposed: after, all: after, ..Pass::default() });
        pass
    }

    /// The update, and transfers after the last micro-batch.
    fn update(&self, stage: &StageActions) -> Pass {
        let (compute, exposed) = (stage.update.0 / self.of.rate, self.seconds(&stage.update.1));
        Pass { compute, hidden: 0.0, exposed, all: compute + exposed }
    }

    /// Bytes of a step from the same and from other machines, without those of other stages.
    fn bytes(&self, stage: &StageActions, micros: usize) -> [f64; 2] {
        let parts = |t: &Transfer| self.of.network.parts(t.bytes, self.members[t.axis as usize]);
        let add = |sum: [f64; 2], [near, far]: [f64; 2]| [sum[0] + near, sum[1] + far];
        let micro = stage.transfers().map(parts).fold([0.0; 2], add);
        add(micro.map(|b| b * micros as f64), stage.update.1.iter().map(parts).fold([0.0; 2], add))
    }
}

/// Whether a stage and the one above are on different machines.
fn is_far(d: Rates<'_>, actions: &Actions, stage: usize) -> bool {
    let machine = |stage: usize| stage * actions.mesh.stage() / d.network.machine;
    machine(stage) != machine(stage + 1)
}

/// Seconds of an exchange between the stage and the one above: hidden states and gradients cross at once.
fn crossing(d: Rates<'_>, actions: &Actions, stage: usize) -> f64 {
    let Some(above) = actions.stages.get(stage + 1) else { return 0.0 };
    let bytes = above.passed[0].max(actions.stages[stage].passed[1]);
    let link = if is_far(d, actions, stage) { &d.network.between } else { &d.network.within };
    bytes / link.exchange + link.call[0]
}

/// State of a stage in a walk through its list.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    /// Ready for its next action.
    Nothing,
    /// A pass, with seconds left at full speed.
    Pass(f64),
    /// An exchange with the neighboring stage, with seconds left.
    Exchange(f64),
}

/// Seconds until all stages have done their lists: `times` of a forward and a backward pass while all stages compute,
/// and of the exchange with the stage above. A stage alone is faster by up to `alone`.
fn walk(actions: &Actions, times: &[[f64; 2]], crossings: &[f64], alone: f64) -> f64 {
    let stages = times.len();
    let lists: Vec<_> = (0..stages).map(|s| schedule(stages, s, actions.micros, actions.lowest)).collect();
    let (mut next, mut doing, mut clock) = (vec![0; stages], vec![Doing::Nothing; stages], 0.0);
    loop {
        for s in 0..stages {
            begin(s, &lists, &mut next, &mut doing, (times, crossings));
        }
        let active = doing.iter().filter(|d| matches!(d, Doing::Pass(_))).count().max(1);
        let speed = alone.min(stages as f64 / active as f64);
        let left = |d: &Doing| match *d {
            Doing::Nothing => None,
            Doing::Pass(left) => Some(left / speed),
            Doing::Exchange(left) => Some(left),
        };
        let Some(first) = doing.iter().filter_map(left).min_by(f64::total_cmp) else { return clock };
        clock += first;
        for d in &mut doing {
            *d = match *d {
                d if left(&d).is_none_or(|left| left <= first) => Doing::Nothing,
                Doing::Pass(left) => Doing::Pass(left - first * speed),
                Doing::Exchange(left) => Doing::Exchange(left - first),
                Doing::Nothing => Doing::Nothing,
            };
        }
    }
}

/// Begins the next action of a stage that is ready, an exchange if the stage above is ready for it too.
fn begin(
    s: usize,
    lists: &[Vec<Action>],
    next: &mut [usize],
    doing: &mut [Doing],
    (times, crossings): (&[[f64; 2]], &[f64]),
) {
    let action = |s: usize| lists.get(s).and_then(|list| list.get(next[s]));
    if doing[s] != Doing::Nothing {
        return;
    }
    match action(s) {
        Some(Action::Forward(_)) => doing[s] = Doing::Pass(times[s][0]),
        Some(Action::Backward(_)) => doing[s] = Doing::Pass(times[s][1]),
        Some(Action::Above(_))
            if doing.get(s + 1) == Some(&Doing::Nothing)
                && matches!(action(s + 1), Some(Action::Below(_))) =>
        {
            doing[s..s + 2].fill(Doing::Exchange(crossings[s]));
            next[s + 1] += 1;
        }
        _ => return,
    }
    next[s] += 1;
}

/// Predicts a step.
pub fn predict(actions: &Actions, d: Rates<'_>) -> Step {
    let on: Vec<OnDevices<'_>> = (0..actions.stages.len()).map(|s| OnDevices::new(d, actions, s)).collect();
    let both = || on.iter().zip(&actions.stages);
    let one = actions.stages.len() == 1;
    let passes: Vec<[Pass; 2]> = both()
        .map(|(on, stage)| match one {
            true => {
                let visits: Vec<VisitActions> = stage.visits().cloned().collect();
                [on.pass(&visits), Pass::default()]
            }
            false => [&stage.up, &stage.down].map(|visits| on.pass(visits)),
        })
        .collect();
    let crossings: Vec<f64> = (0..on.len()).map(|s| crossing(d, actions, s)).collect();
    let times: Vec<[f64; 2]> = passes.iter().map(|p| p.map(|p| p.all)).collect();
    let micros = actions.micros as f64;
    let busy: Vec<f64> = times.iter().map(|[up, down]| micros * (up + down)).collect();
    let mean = busy.iter().sum::<f64>() / busy.len() as f64;
    let walked = if one { busy[0] } else { walk(actions, &times, &crossings, d.alone) };
    let slowest = (0..on.len()).max_by(|a, b| busy[*a].total_cmp(&busy[*b])).unwrap_or(0);
    let updates: Vec<Pass> = both().map(|(on, stage)| on.update(stage)).collect();
    let update = updates.iter().map(|u| u.all).fold(0.0, f64::max);
    let [up, down] = passes[slowest];
    let of = |part: fn(&Pass) -> f64| micros * (part(&up) + part(&down)) + part(&updates[slowest]);
    let bytes = both().enumerate().map(|(s, (on, stage))| {
        let own = on.bytes(stage, actions.micros);
        passed(d, actions, s, own)
    });
    let most = bytes.max_by(|a, b| (a[0] + a[1]).total_cmp(&(b[0] + b[1])));
    Step {
        seconds: walked + update,
        limit: limit(of(|p| p.compute), of(|p| p.hidden), of(|p| p.exposed), walked - busy[slowest]),
        bubble: ((walked - mean) / (walked + update)).max(0.0),
        bytes: most.unwrap_or_default(),
    }
}

/// Adds the bytes of hidden states and gradients from the neighboring stages.
fn passed(d: Rates<'_>, actions: &Actions, stage: usize, mut own: [f64; 2]) -> [f64; 2] {
    let [below, above] = actions.stages[stage].passed.map(|bytes| bytes * actions.micros as f64);
    if stage > 0 {
        own[usize::from(is_far(d, actions, stage - 1))] += below;
    }
    own[usize::from(is_far(d, actions, stage))] += above;
    own
}

/// The largest of four times.
fn limit(compute: f64, hidden: f64, exposed: f64, waiting: f64) -> Limit {
    match () {
        () if waiting > compute.max(hidden).max(exposed) => Limit::Stages,
        () if exposed > compute.max(hidden) => Limit::Exchanges,
        () if hidden > compute => Limit::Gathers,
        () => Limit::Compute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::actions::Kind;
    use crate::time::links::{CLASSES, Link};
    use ft_engine::ranks::Mesh;
    use std::sync::Arc;

    const RATE: f64 = 1e12;
    const GB: f64 = 1e9;

    fn network(class: usize, machine: usize) -> Network {
        let link = Link { call: [0.0; 2], ..Link::of_class(CLASSES[class]) };
        let between = Link { call: [0.0; 2], ..Link::of_class(CLASSES[3]) };
        Network { within: link, between, machine }
    }

    /// A step of one visit of two seconds on a ring of two ranks, with hidden and exposed gigabytes.
    fn one(class: usize, engines: bool, [hidden, exposed]: [f64; 2]) -> Step {
        let transfer = |kind, gb: f64| Transfer { kind, axis: Axis::Stage, bytes: gb * GB, calls: 1.0 };
        let visit =
            |work, gathers, exchanges| VisitActions { work, gathers, exchanges, ..Default::default() };
        let exchanges = (exposed > 0.0).then(|| transfer(Kind::Exchange, exposed));
        let first = visit(2.0 * RATE, vec![], exchanges.into_iter().collect());
        let second = visit(0.0, vec![transfer(Kind::Gather, hidden)], vec![]);
        let stage = StageActions { up: vec![first, second], ..Default::default() };
        let mesh = Mesh { data: 2, ..Mesh::ONE };
        let actions = Actions { mesh, micros: 1, lowest: 0, stages: vec![Arc::new(stage)] };
        predict(&actions, Rates { rate: RATE, network: &network(class, 8), engines, alone: 1.0 })
    }

    #[test]
    fn arithmetic_hides_gathers_and_nothing_hides_exchanges() {
        let (nvlink, pcie) = (0, 2);
        for (class, engines, gb, seconds, limit) in [
            (pcie, true, [20.0, 0.0], 2.0, Limit::Compute),
            (pcie, true, [60.0, 0.0], 3.0, Limit::Gathers),
            (pcie, true, [20.0, 20.0], 3.0, Limit::Compute),
            (pcie, true, [20.0, 60.0], 5.0, Limit::Exchanges),
            (nvlink, true, [60.0, 60.0], 2.3, Limit::Compute),
            // processors copy by themselves
            (pcie, false, [20.0, 20.0], 4.0, Limit::Compute),
        ] {
            let step = one(class, engines, gb);
            assert!((step.seconds - seconds).abs() < 1e-9 && step.limit == limit, "{gb:?} {step:?}");
        }
    }

    #[test]
    fn the_longest_part_of_a_step_limits_it() {
        for (compute, hidden, exposed, waiting, is) in [
            (4.0, 4.0, 4.0, 4.0, Limit::Compute),
            (3.0, 4.0, 4.0, 4.0, Limit::Gathers),
            (3.0, 3.0, 4.0, 4.0, Limit::Exchanges),
            (3.0, 3.0, 3.0, 4.0, Limit::Stages),
            (3.0, 4.0, 3.0, 3.0, Limit::Gathers),
        ] {
            assert_eq!(limit(compute, hidden, exposed, waiting), is);
        }
    }

    /// Equal stages wait (S - 1) / (m + S - 1) of the time; of unequal ones the others wait for the slowest.
    #[test]
    fn stages_wait_for_the_share_of_the_bubble() {
        let stage = |up: f64, down: f64| {
            let visit = |seconds: f64| VisitActions { work: seconds * RATE, ..Default::default() };
            Arc::new(StageActions { up: vec![visit(up)], down: vec![visit(down)], ..Default::default() })
        };
        let network = network(0, 8);
        let rates = Rates { rate: RATE, network: &network, engines: true, alone: 1.0 };
        let of = |stages: Vec<Arc<StageActions>>, micros| {
            let mesh = Mesh { pipeline: stages.len(), ..Mesh::ONE };
            predict(&Actions { mesh, micros, lowest: 0, stages }, rates)
        };
        let latency = 1e-9;
        for (stages, micros) in [(2, 1), (2, 8), (4, 4), (4, 32), (8, 64)] {
            let step = of(vec![stage(1.0, 2.0); stages], micros);
            let seconds = 3.0 * (micros + stages - 1) as f64;
            assert!((step.seconds - seconds).abs() < latency, "{stages} {micros}: {step:?}");
            // without an update
            let bubble = (stages - 1) as f64 / (micros + stages - 1) as f64;
            assert!((step.bubble - bubble).abs() < 1e-9, "{stages} {micros}: {step:?}");
        }
        let step = of(vec![stage(1.0, 2.0), stage(2.0, 4.0), stage(1.0, 2.0)], 10);
        // its ten micro-batches, after the first has come up and before the last is down
        assert!((63.0..=66.0).contains(&step.seconds), "{step:?}");
        // stages that share processors: a stage alone has up to `alone` times its share
        let shared = |micros, alone| {
            let mesh = Mesh { pipeline: 4, ..Mesh::ONE };
            let actions = Actions { mesh, micros, lowest: 0, stages: vec![stage(1.0, 2.0); 4] };
            predict(&actions, Rates { alone, ..rates }).seconds
        };
        for (alone, seconds) in [(1.0, 12.0), (2.0, 6.0), (4.0, 3.0), (8.0, 3.0)] {
            assert!((shared(1, alone) - seconds).abs() < latency, "{alone}: {}", shared(1, alone));
        }
        // one processor never waits; two do while one stage computes, four also while three do
        let [four, two, single] = [1.0, 2.0, 4.0].map(|alone| shared(4, alone));
        assert!((single - 12.0).abs() < latency && 12.1 < two && two < four, "{single} {two} {four}");
    }

    #[test]
    fn the_fastest_go_first_and_of_equals_the_smallest() {
        let of = |data, zero, seconds, memory| Candidate {
            layout: Layout { data, pipeline: 1, context: 1, tensor: 1, expert: 1, zero },
            beside: Vec::new(),
            memory,
            wire_bytes_a_step: 0,
            wire_bytes_between: 0,
            step_seconds: seconds,
            bubble: 0.0,
            limit: Limit::Compute,
            how: String::new(),
            actions: Actions { mesh: Mesh::ONE, micros: 1, lowest: 0, stages: Vec::new() },
        };
        let mut all = vec![
            of(1, 0, 2.0, 5),
            of(2, 0, 1.001, 9),
            of(4, 3, 1.0, 9),
            of(8, 3, 0.999, 8),
            of(3, 0, 0.5, 99),
        ];
        sort(&mut all);
        assert_eq!(all.iter().map(|c| c.layout.data).collect::<Vec<_>>(), [3, 8, 2, 4, 1]);
    }
}
