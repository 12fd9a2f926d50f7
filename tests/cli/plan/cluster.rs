//! Plans of many cards against the simulator of `benches/cluster`.

#[path = "../../../benches/cluster/simulator.rs"]
mod simulator;

use crate::world::nightly;
use ft::plan::actions::{Actions, Kind, StageActions, Transfer, VisitActions};
use ft::plan::links::Network;
use ft::plan::{Devices, Rates, Target, card, layouts_of_recipe, predict};
use ft::ranks::{Axis, Mesh};
use ft::recipe::Recipe;
use simulator::{Choices, simulate};
use std::path::Path;
use std::sync::Arc;

const RATE: f64 = 1e15;
const TARGET: Target = Target { cuda: true, card: None };

/// Three visits each way with transfers along all axes; stages differ in their arithmetic.
fn actions(mesh: Mesh, micros: usize) -> Actions {
    let transfer = |kind, axis, mb: f64| Transfer { kind, axis, bytes: mb * 1e6, calls: 1.0 };
    let visit = |seconds: f64, i: usize, back: bool| VisitActions {
        work: seconds * RATE,
        gathers: vec![
            transfer(Kind::Gather, Axis::Stage, 20.0 + i as f64),
            transfer(Kind::Gather, Axis::ExpertReplica, 10.0),
        ],
        exchanges: [Axis::Context, Axis::Tensor, Axis::Expert]
            .map(|axis| transfer(Kind::Exchange, axis, 3.0))
            .into(),
        sums: match back {
            true => [
                vec![transfer(Kind::Sum, Axis::Replica, 40.0)],
                vec![transfer(Kind::Gather, Axis::Replica, 30.0)],
            ],
            false => Default::default(),
        },
    };
    let stage = |s: usize| {
        let time = 1e-3 * (1.0 + 0.1 * s as f64);
        Arc::new(StageActions {
            up: (0..3).map(|i| visit(time, i, false)).collect(),
            down: (0..3).map(|i| visit(2.0 * time, i, true)).collect(),
            passed: [if s > 0 { 8e6 } else { 0.0 }, if s + 1 < mesh.pipeline { 8e6 } else { 0.0 }],
            update: (1e-3 * RATE, vec![transfer(Kind::Gather, Axis::Stage, 50.0)]),
        })
    };
    Actions { mesh, micros, lowest: 0, stages: (0..mesh.pipeline).map(stage).collect() }
}

/// Ranks of a stage do the same at the same time: one of them stands for all, also where cards share links.
#[test]
fn one_simulated_rank_stands_for_all_of_its_stage() {
    for (axes, machine) in [
        ([1, 8, 1, 1, 1], 4),
        ([2, 2, 2, 2, 4], 4),
        ([4, 2, 1, 2, 2], 8),
        ([4, 1, 2, 1, 2], 4),
        ([2, 4, 1, 1, 8], 2),
    ] {
        let [pipeline, data, context, tensor, expert] = axes;
        let mesh = Mesh { pipeline, data, context, tensor, expert: expert.min(data * context * tensor) };
        let network = Network::find(TARGET, Some("nvlink"), Some("ib"), Some(machine));
        for (pooled, slow) in [(false, None), (true, None), (false, Some((0, 1.5)))] {
            let of = |folded| simulate(&actions(mesh, 6), RATE, &network, Choices { folded, pooled, slow });
            let (one, all) = (of(true), of(false));
            assert!((one.seconds / all.seconds - 1.0).abs() < 1e-9, "{mesh} {pooled}: {one:?} {all:?}");
            assert_eq!(one.bytes, all.bytes, "{mesh}");
            assert!((one.bubble - all.bubble).abs() < 1e-9, "{mesh} {pooled}: {one:?} {all:?}");
        }
    }
}

/// What the simulator is for: transfers that share a link take longer, stages wait for the slowest.
#[test]
fn simulated_steps_take_longer_with_slower_stages_and_links() {
    let mesh = Mesh { pipeline: 2, data: 4, ..Mesh::ONE };
    let run = |between, slow| {
        let network = Network::find(TARGET, Some("nvlink"), Some(between), Some(2));
        simulate(&actions(mesh, 6), RATE, &network, Choices { folded: true, slow, ..Choices::default() })
    };
    let plain = run("ib", None);
    assert!(run("tcp", None).seconds > 10.0 * plain.seconds);
    let slow = run("ib", Some((1, 2.0)));
    assert!(slow.seconds > plain.seconds && slow.bubble > plain.bubble, "{slow:?} {plain:?}");
}

/// Predicted seconds, bytes and waits are those of the simulation, for made-up actions and for all layouts of recipes.
#[test]
fn plans_of_many_cards_are_those_of_the_simulation() -> anyhow::Result<()> {
    let network = Network::find(TARGET, Some("nvlink"), Some("ib"), Some(4));
    let all = |bytes: [f64; 2]| bytes[0] + bytes[1];
    for axes in [[1, 16, 1, 1], [4, 4, 1, 1], [2, 2, 2, 2], [8, 2, 1, 1]] {
        let [pipeline, data, context, tensor] = axes;
        let actions = actions(Mesh { pipeline, data, context, tensor, expert: 1 }, 16);
        let planned = predict(&actions, Rates { rate: RATE, network: &network, engines: true, alone: 1.0 });
        let choices = Choices { folded: true, ..Choices::default() };
        let simulated = simulate(&actions, RATE, &network, choices);
        let apart = planned.seconds / simulated.seconds - 1.0;
        assert!(apart.abs() < 0.05, "{axes:?}: {apart} {planned:?} {simulated:?}");
        let apart = all(planned.bytes) / all(simulated.bytes) - 1.0;
        assert!(apart.abs() < 1e-9, "{axes:?}: {apart} {planned:?} {simulated:?}");
    }
    for (recipe, keys) in
        [("llama-3.1-8b-full", &["run.batch_rows=128"][..]), ("qwen3-30b-a3b-qlora", &["run.batch_rows=64"])]
    {
        let (card, bytes) = card("H100").expect("a known card");
        let budget = [format!("memory.budget={bytes}"), "run.device=cuda".into()];
        let keys: Vec<String> = budget.into_iter().chain(keys.iter().map(|k| k.to_string())).collect();
        let recipe = Recipe::load_for_plan(Path::new(recipe), &keys)?;
        let target = Target { cuda: true, card: Some(card) };
        let network = Network::find(target, Some("nvlink"), Some("ib"), None);
        let found = layouts_of_recipe(&recipe, target, Devices { count: 16, network })?;
        for layout in found.fitting.iter().step_by(if nightly() { 1 } else { 6 }) {
            let choices = Choices { folded: true, ..Choices::default() };
            let simulated = simulate(&layout.actions, found.rates().rate, &found.devices.network, choices);
            let apart = layout.step_seconds / simulated.seconds - 1.0;
            assert!(apart.abs() < 0.05, "{}: {apart} {simulated:?}", layout.words());
            let planned = predict(&layout.actions, found.rates());
            let bytes = all(planned.bytes) / all(simulated.bytes) - 1.0;
            assert!(bytes.abs() < 0.01 || all(simulated.bytes) < 1.0, "{}: {bytes}", layout.words());
            // the plan tells those of the stage that needs the most memory
            let wire = layout.wire_bytes_a_step as f64;
            assert!(wire <= 1.01 * all(simulated.bytes), "{}: {wire} {simulated:?}", layout.words());
            let one = layout.layout.pipeline == 1;
            assert!(!one || wire >= 0.99 * all(simulated.bytes), "{}: {wire} {simulated:?}", layout.words());
        }
    }
    Ok(())
}
