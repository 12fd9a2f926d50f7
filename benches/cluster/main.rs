//! Plans of `ft plan --devices` against a simulation of their lists of actions, event by event.
//!
//!     cargo bench --bench cluster [-- RECIPE CARD DEVICES KEY=VALUE..]
//!
//! Without arguments: Qwen3-235B-A22B and Llama-3.1-405B in full on 1,024 H100 in machines of 8, NVLink within and
//! InfiniBand between them. Prints for each of the fastest layouts: seconds of a step, bytes received by a rank from
//! the same machine and from others, and the share of waiting stages, planned and simulated; the same with links
//! between machines shared by the cards; and with one stage 10% slower. Ends with 1 if a plan is off by more than 5%.

mod simulator;

use ft::plan::links::Network;
use ft::plan::{Candidate, Layouts, Target, card, layouts_of_recipe};
use ft::recipe::Recipe;
use simulator::{Choices, simulate};
use std::path::Path;

/// Largest difference of planned and simulated seconds.
const BOUND: f64 = 0.05;

const QWEN: &[&str] = &[
    "model.source=Qwen/Qwen3-235B-A22B",
    "train.0.modules=['attention', 'experts', 'router', 'norms', 'embedding', 'head']",
    "train.0.method=full",
    "data.max_length=4096",
    "run.batch_rows=4096",
];
const LLAMA: &[&str] =
    &["model.source=meta-llama/Llama-3.1-405B", "data.max_length=8192", "run.batch_rows=2048"];

fn plan(recipe: &str, name: &str, devices: usize, keys: &[&str]) -> ft::Result<Layouts> {
    let (card, bytes) = card(name).map_or((None, 0), |(card, bytes)| (Some(card), bytes));
    let budget = ["run.device=cuda".to_string(), format!("memory.budget={bytes}")];
    let keys: Vec<String> = budget.into_iter().chain(keys.iter().map(|k| k.to_string())).collect();
    let recipe = Recipe::load_for_plan(Path::new(recipe), &keys)?;
    let target = Target { cuda: true, card };
    let network = Network::find(target, Some("nvlink"), Some("ib"), None);
    layouts_of_recipe(&recipe, target, ft::plan::Devices { count: devices, network })
}

/// Prints a layout; returns the relative difference of planned and simulated seconds.
fn compare(found: &Layouts, layout: &Candidate) -> f64 {
    let (rates, network) = (found.rates(), &found.devices.network);
    let run = |choices| simulate(&layout.actions, rates.rate, network, Choices { folded: true, ..choices });
    let plain = run(Choices::default());
    let pooled = run(Choices { pooled: true, ..Choices::default() });
    let slow = run(Choices { slow: Some((layout.actions.stages.len() - 1, 1.1)), ..Choices::default() });
    let near = layout.wire_bytes_a_step - layout.wire_bytes_between;
    let gb = |bytes: f64| format!("{:.1}", bytes / 1e9);
    println!("  {}", layout.words());
    println!("    {:<34} {:>10} {:>10}", "", "planned", "simulated");
    println!("    {:<34} {:>10.3} {:>10.3}", "seconds of a step", layout.step_seconds, plain.seconds);
    println!("    {:<34} {:>10} {:>10}", "GB from the same machine", gb(near as f64), gb(plain.bytes[0]));
    let between = layout.wire_bytes_between as f64;
    println!("    {:<34} {:>10} {:>10}", "GB from other machines", gb(between), gb(plain.bytes[1]));
    println!("    {:<34} {:>10.3} {:>10.3}", "share of waiting stages", layout.bubble, plain.bubble);
    println!("    {:<34} {:>10} {:>10.3}", "seconds, cards share links", "", pooled.seconds);
    println!("    {:<34} {:>10} {:>10.3}", "seconds, the last stage 10% slower", "", slow.seconds);
    layout.step_seconds / plain.seconds - 1.0
}

fn main() -> ft::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let cases: Vec<(&str, &str, usize, &[&str])> = match args.as_slice() {
        [recipe, card, devices, keys @ ..] => vec![(recipe, card, devices.parse().unwrap_or(8), keys)],
        _ => vec![("llama-3.1-8b-full", "H100", 1024, QWEN), ("llama-3.1-8b-full", "H100", 1024, LLAMA)],
    };
    let mut most: f64 = 0.0;
    for (recipe, card, devices, keys) in cases {
        let start = std::time::Instant::now();
        let found = plan(recipe, card, devices, keys)?;
        println!("{}: {devices} {card}, planned in {:.1} s", found.of, start.elapsed().as_secs_f64());
        for layout in found.best() {
            most = most.max(compare(&found, layout).abs());
        }
    }
    println!("plans are within {:.1}% of the simulation", 100.0 * most);
    std::process::exit(i32::from(most > BOUND));
}
