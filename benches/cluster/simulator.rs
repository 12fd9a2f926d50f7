//! A step of a cluster, event by event: ranks compute and wait, transfers share links.
//!
//! A rank executes a list of actions, and transfers one after the other, as on the one stream of a card for them. A
//! collective begins when all members have come to it, after its latency; each member then receives bytes over two
//! links at once: the card's link within the machine, and the link to other machines. Transfers of several cards over
//! one link share it evenly.

use ft::plan::actions::{Actions, Kind, Transfer, VisitActions};
use ft::plan::links::{Members, Network};
use ft::ranks::schedule::{Action, ExchangeMicros, schedule};
use ft::ranks::{Axis, Mesh};
use std::collections::{BTreeMap, VecDeque};

/// Choices of a simulation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices {
    /// One rank stands for all ranks of a stage: they do the same at the same time.
    pub folded: bool,
    /// Cards of a machine share the links to other machines, in place of one link per card.
    pub pooled: bool,
    /// A stage of slower cards, and how much longer they take.
    pub slow: Option<(usize, f64)>,
}

/// A simulated step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulated {
    pub seconds: f64,
    /// Most bytes received by a rank, from the same machine and from others.
    pub bytes: [f64; 2],
    /// Mean share of the step spent waiting for other stages.
    pub bubble: f64,
}

/// A step of a rank's program.
#[derive(Clone, Copy, Debug)]
enum Op {
    Compute(f64),
    /// Comes to a collective of a group, and goes on.
    Start(Call),
    /// Waits for a collective's transfers; the number counts back from the last one started.
    Wait(usize),
}

/// A collective, as a member calls it.
#[derive(Clone, Copy, Debug)]
struct Call {
    group: usize,
    /// Seconds over the link within the machine and over the one between machines, without other transfers.
    sizes: [f64; 2],
    latency: f64,
    /// Whether it is with another stage.
    across: bool,
}

/// Members of a collective that have come, and when it began.
#[derive(Default)]
struct Meeting {
    came: Vec<(usize, usize, Call)>,
}

/// A transfer over one link.
struct Flow {
    link: usize,
    left: f64,
    rank: usize,
    call: usize,
}

/// A rank at work.
struct Rank {
    program: Vec<Op>,
    next: usize,
    /// End of the current arithmetic.
    until: f64,
    /// Open transfers of each collective, by number; 2 until it has begun.
    open: Vec<usize>,
    /// Whether the collective is with another stage.
    across: Vec<bool>,
    /// Collectives of each group so far.
    turns: BTreeMap<usize, usize>,
    waited: f64,
    /// Collectives to come, with their numbers, and whether one is at work.
    queue: VecDeque<(usize, Call)>,
    busy: bool,
}

/// Simulates a step at `rate` work a second of a card.
pub fn simulate(actions: &Actions, rate: f64, network: &Network, choices: Choices) -> Simulated {
    let mesh = actions.mesh;
    let ranks: Vec<usize> = match choices.folded {
        true => (0..mesh.pipeline).map(|s| s * mesh.stage()).collect(),
        false => (0..mesh.ranks()).collect(),
    };
    let world = World { actions, rate, network, choices, ranks };
    let programs: Vec<Program> = (0..world.ranks.len()).map(|r| world.program(r)).collect();
    let most = programs.iter().map(|p| p.bytes).max_by(|a, b| (a[0] + a[1]).total_cmp(&(b[0] + b[1])));
    let mut run = Run::new(&world, programs);
    run.all();
    let waited: f64 = run.ranks.iter().map(|r| r.waited).sum();
    let bubble = waited / run.ranks.len() as f64 / run.time;
    Simulated { seconds: run.time, bytes: most.unwrap_or_default(), bubble }
}

struct World<'a> {
    actions: &'a Actions,
    rate: f64,
    network: &'a Network,
    choices: Choices,
    /// Simulated ranks.
    ranks: Vec<usize>,
}

/// The program of a rank.
#[derive(Default)]
struct Program {
    ops: Vec<Op>,
    /// Collectives so far.
    calls: usize,
    /// Bytes received from the same machine and from others.
    bytes: [f64; 2],
}

impl World<'_> {
    fn mesh(&self) -> &Mesh {
        &self.actions.mesh
    }

    /// Number of a group: its axis and its first member.
    fn group(&self, axis: Axis, rank: usize) -> usize {
        let first = self.mesh().members(axis, rank).first().copied().unwrap_or(rank);
        axis as usize * self.mesh().ranks() + first
    }

    /// Simulated members of a group.
    fn simulated(&self, group: usize) -> usize {
        let (axis, first) = (group / self.mesh().ranks(), group % self.mesh().ranks());
        // pairs of neighboring stages are numbered beyond the axes
        let Some(axis) = Axis::ALL.get(axis) else { return 2 };
        let members = self.mesh().members(*axis, first);
        members.iter().filter(|r| self.ranks.contains(r)).count()
    }

    fn program(&self, number: usize) -> Program {
        let (rank, mesh) = (self.ranks[number], self.mesh());
        let stage = mesh.coordinates(rank).pipeline;
        let own = &self.actions.stages[stage];
        let slow = self.choices.slow.filter(|(s, _)| *s == stage).map_or(1.0, |(_, factor)| factor);
        let mut p = Program::default();
        let list = schedule(mesh.pipeline, stage, self.actions.micros, self.actions.lowest);
        let walk = |p: &mut Program, visits: &[&VisitActions]| self.pass(p, rank, visits, slow);
        let up: Vec<&VisitActions> = own.up.iter().collect();
        let down: Vec<&VisitActions> = own.down.iter().collect();
        for action in list {
            match action {
                // without stages the two passes are one walk
                Action::Forward(_) if mesh.pipeline == 1 => walk(&mut p, &[&up[..], &down[..]].concat()),
                Action::Backward(_) if mesh.pipeline == 1 => {}
                Action::Forward(_) => walk(&mut p, &up),
                Action::Backward(_) => walk(&mut p, &down),
                Action::Above(passed) => self.cross(&mut p, rank, (stage, true), passed),
                Action::Below(passed) => self.cross(&mut p, rank, (stage - 1, false), passed),
            }
        }
        p.ops.push(Op::Compute(slow * own.update.0 / self.rate));
        own.update.1.iter().for_each(|t| {
            self.start(&mut p, rank, t);
            p.ops.push(Op::Wait(0));
        });
        p
    }

    /// A pass through visits. Weights of the next visit and gradients of earlier ones travel during a visit.
    fn pass(&self, p: &mut Program, rank: usize, visits: &[&VisitActions], slow: f64) {
        let all = |p: &mut Program, list: &[Transfer]| -> Vec<usize> {
            list.iter().map(|t| self.start(p, rank, t)).collect()
        };
        let wait = |p: &mut Program, started: Vec<usize>| {
            let calls = p.calls;
            p.ops.extend(started.into_iter().map(|number| Op::Wait(calls - 1 - number)));
        };
        let mut gathered = visits.first().map_or(Vec::new(), |v| all(p, &v.gathers));
        let mut sums: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
        let mut before: &[Transfer] = &[];
        for (i, visit) in visits.iter().enumerate() {
            let next = visits.get(i + 1).map_or(Vec::new(), |v| all(p, &v.gathers));
            wait(p, std::mem::replace(&mut gathered, next));
            let half = Op::Compute(slow * visit.work / self.rate / 2.0);
            p.ops.push(half);
            for t in &visit.exchanges {
                let started = self.start(p, rank, t);
                wait(p, vec![started]);
            }
            p.ops.push(half);
            let here = all(p, &visit.sums[0]);
            wait(p, std::mem::replace(&mut sums[0], here));
            let spread = all(p, before);
            wait(p, std::mem::replace(&mut sums[1], spread));
            before = &visit.sums[1];
        }
        let [summed, spread] = sums;
        wait(p, summed);
        let last = all(p, before);
        wait(p, spread);
        wait(p, last);
    }

    /// Starts a transfer and returns its number.
    fn start(&self, p: &mut Program, rank: usize, t: &Transfer) -> usize {
        let m: Members = self.network.members(self.mesh(), t.axis, rank);
        let parts = self.network.parts(t.bytes, m);
        let latency = self.network.latency(t.calls, m);
        self.call(p, (self.group(t.axis, rank), t.kind), parts, latency, false)
    }

    /// Exchanges hidden states and gradients between a stage and the one above, and waits.
    fn cross(&self, p: &mut Program, rank: usize, (lower, is_lower): (usize, bool), passed: ExchangeMicros) {
        let mesh = self.mesh();
        let pair = if is_lower { rank } else { rank - mesh.stage() };
        let far = pair / self.network.machine != (pair + mesh.stage()) / self.network.machine;
        let stages = &self.actions.stages;
        let bytes = match is_lower {
            true => passed.down.map_or(0.0, |_| stages[lower].passed[1]),
            false => passed.up.map_or(0.0, |_| stages[lower + 1].passed[0]),
        };
        let (parts, link) = match far {
            true => ([0.0, bytes], &self.network.between),
            false => ([bytes, 0.0], &self.network.within),
        };
        let group = Axis::ALL.len() * mesh.ranks() + pair;
        self.call(p, (group, Kind::Exchange), parts, link.call[0], true);
        p.ops.push(Op::Wait(0));
    }

    fn call(
        &self,
        p: &mut Program,
        (group, kind): (usize, Kind),
        parts: [f64; 2],
        latency: f64,
        across: bool,
    ) -> usize {
        p.bytes = [0, 1].map(|i| p.bytes[i] + parts[i]);
        let sizes = [parts[0] / self.network.within.rate(kind), parts[1] / self.network.between.rate(kind)];
        p.ops.push(Op::Start(Call { group, sizes, latency, across }));
        p.calls += 1;
        p.calls - 1
    }
}

/// A simulation at work.
struct Run<'w> {
    world: &'w World<'w>,
    time: f64,
    ranks: Vec<Rank>,
    meetings: BTreeMap<(usize, usize), Meeting>,
    /// Members by group.
    members: BTreeMap<usize, usize>,
    /// Transfers that begin later, with the time.
    later: Vec<(f64, Flow)>,
    flows: Vec<Flow>,
}

impl<'w> Run<'w> {
    fn new(world: &'w World<'w>, programs: Vec<Program>) -> Self {
        let rank = |p: Program| Rank {
            open: vec![2; p.calls],
            across: p
                .ops
                .iter()
                .filter_map(|op| if let Op::Start(c) = op { Some(c.across) } else { None })
                .collect(),
            program: p.ops,
            next: 0,
            until: 0.0,
            turns: BTreeMap::new(),
            waited: 0.0,
            queue: VecDeque::new(),
            busy: false,
        };
        Self {
            world,
            time: 0.0,
            ranks: programs.into_iter().map(rank).collect(),
            meetings: BTreeMap::new(),
            members: BTreeMap::new(),
            later: Vec::new(),
            flows: Vec::new(),
        }
    }

    /// Runs to the end.
    fn all(&mut self) {
        let mut started = vec![0; self.ranks.len()];
        loop {
            for r in 0..self.ranks.len() {
                self.go(r, &mut started);
            }
            let Some(next) = self.next() else { break };
            self.advance(next, &started);
        }
        let stuck = self.ranks.iter().position(|r| r.next < r.program.len());
        assert_eq!(stuck, None, "a rank waits forever");
    }

    /// Executes what a rank can execute now.
    fn go(&mut self, r: usize, started: &mut [usize]) {
        while self.ranks[r].until <= self.time {
            let rank = &mut self.ranks[r];
            match rank.program.get(rank.next).copied() {
                Some(Op::Compute(seconds)) => {
                    rank.until = self.time + seconds;
                }
                Some(Op::Start(call)) => {
                    rank.queue.push_back((started[r], call));
                    started[r] += 1;
                    self.begin(r);
                }
                Some(Op::Wait(back)) => {
                    let number = started[r] - 1 - back;
                    if rank.open[number] > 0 {
                        return;
                    }
                }
                None => return,
            }
            self.ranks[r].next += 1;
        }
    }

    /// Comes to the next collective of a rank, unless one is at work.
    fn begin(&mut self, r: usize) {
        let rank = &mut self.ranks[r];
        if rank.busy {
            return;
        }
        let Some((number, call)) = rank.queue.pop_front() else { return };
        rank.busy = true;
        let turn = rank.turns.entry(call.group).or_default();
        let key = (call.group, *turn);
        *turn += 1;
        self.meet(key, r, number, call);
    }

    /// A rank comes to a collective; the last member begins it.
    fn meet(&mut self, key: (usize, usize), r: usize, number: usize, call: Call) {
        let world = self.world;
        let members = *self.members.entry(key.0).or_insert_with(|| world.simulated(key.0));
        let meeting = self.meetings.entry(key).or_default();
        meeting.came.push((r, number, call));
        if meeting.came.len() < members {
            return;
        }
        for (rank, number, call) in self.meetings.remove(&key).map_or(Vec::new(), |m| m.came) {
            for (kind, size) in call.sizes.into_iter().enumerate() {
                let flow = Flow { link: self.link(rank, kind), left: size, rank, call: number };
                self.later.push((self.time + call.latency, flow));
            }
        }
    }

    /// Number of a link: of a card within its machine (0) or to others (1).
    fn link(&self, r: usize, kind: usize) -> usize {
        let rank = self.world.ranks[r];
        let pooled = kind == 1 && self.world.choices.pooled;
        let card = if pooled { rank / self.world.network.machine } else { rank };
        2 * card + kind
    }

    /// Transfers of real ranks represented by a simulated one on a link, and the link's capacity of transfers at full
    /// speed.
    fn weight(&self, flow: &Flow) -> (f64, f64) {
        let (mesh, machine) = (self.world.mesh(), self.world.network.machine);
        if flow.link.is_multiple_of(2) || !self.world.choices.pooled {
            return (1.0, 1.0);
        }
        let alike = if self.world.choices.folded { mesh.stage().min(machine) } else { 1 };
        (alike as f64, machine.min(mesh.ranks()) as f64)
    }

    /// Speed of each transfer.
    fn speeds(&self) -> Vec<f64> {
        let mut load: BTreeMap<usize, f64> = BTreeMap::new();
        for flow in &self.flows {
            *load.entry(flow.link).or_default() += self.weight(flow).0;
        }
        self.flows.iter().map(|f| self.weight(f).1 / load[&f.link]).collect()
    }

    /// Time of the next event; `None` at the end.
    fn next(&self) -> Option<f64> {
        let ends = self.ranks.iter().map(|r| r.until).filter(|t| *t > self.time);
        let begins = self.later.iter().map(|(t, _)| *t);
        let flows = self.flows.iter().zip(self.speeds()).map(|(f, speed)| self.time + f.left / speed);
        ends.chain(begins).chain(flows).min_by(f64::total_cmp)
    }

    fn advance(&mut self, to: f64, started: &[usize]) {
        let (dt, speeds) = (to - self.time, self.speeds());
        for (rank, started) in self.ranks.iter_mut().zip(started) {
            let waits = match rank.program.get(rank.next) {
                Some(Op::Wait(back)) if rank.until <= self.time => rank.across[started - 1 - back],
                Some(_) => false,
                // done before others
                None => rank.until <= self.time,
            };
            rank.waited += if waits { dt } else { 0.0 };
        }
        for (flow, speed) in self.flows.iter_mut().zip(speeds) {
            flow.left -= dt * speed;
        }
        self.time = to;
        let (done, flows): (Vec<Flow>, Vec<Flow>) =
            std::mem::take(&mut self.flows).into_iter().partition(|f| f.left <= 1e-12);
        self.flows = flows;
        for flow in done {
            let rank = &mut self.ranks[flow.rank];
            rank.open[flow.call] -= 1;
            if rank.open[flow.call] == 0 {
                rank.busy = false;
                self.begin(flow.rank);
            }
        }
        let (begin, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.later).into_iter().partition(|(t, _)| *t <= to);
        self.later = later;
        self.flows.extend(begin.into_iter().map(|(_, flow)| flow));
    }
}
