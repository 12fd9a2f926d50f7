//! Plans: choices under a budget, and planned bytes.

use super::*;
use crate::memory::Settings;
use crate::resolve::selection_without_weights;
use crate::search::Prepared;
use ft_engine::adapters::Selection;
use ft_engine::model::layer::Level;
use ft_engine::walk::{Dequantize, Recomputed};
use ft_kernels::decompose;
use ft_recipe::{Recipe, SHIPPED};
use std::path::Path;

mod published;
mod shipped;

/// A machine with room for everything.
const PLENTY: Capacity<'static> = Capacity {
    host: Some(1 << 50),
    shared: Some(1 << 40),
    volume: &|_| Some(host::Volume { id: 1, free: 1 << 50 }),
    ..Capacity::UNKNOWN
};

const BASE: &str = "[model]\nsource = \"SOURCE\"\n[[data.train]]\nsource = \"d.jsonl\"\nformat = \"text\"\n";

/// A recipe with the given rules and settings, as `ft plan` reads it.
fn recipe(source: &str, rules: &str, set: &[&str]) -> anyhow::Result<Recipe> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("r.toml");
    std::fs::write(&path, BASE.replace("SOURCE", source) + rules)?;
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    Ok(Recipe::load_for_plan(&path, &set)?)
}

fn plan(source: &str, rules: &str, set: &[&str], cuda: bool) -> anyhow::Result<Plan> {
    Ok(of_recipe_in(&recipe(source, rules, set)?, cuda, &PLENTY)?.0)
}

fn rule(modules: &str, more: &str) -> String {
    format!("[[train]]\nmodules = {modules}\n{more}\n")
}

const ALL: &str = "[\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"]";
const LORA: &str = "[\"attention\", \"mlp\"]";
const MIXTRAL: &str = "mistralai/Mixtral-8x7B-v0.1";

fn full() -> String {
    rule(ALL, "method = \"full\"")
}

#[test]
fn stages_divide_states_then_gradients_then_weights() -> anyhow::Result<()> {
    let at = |zero: u8| -> anyhow::Result<Plan> {
        let zero = format!("parallel.zero={zero}");
        plan("Qwen/Qwen3-8B", &full(), &["parallel.data=4", &zero], true)
    };
    let plans: Vec<Plan> = (0..4).map(at).collect::<anyhow::Result<_>>()?;
    for (c, from) in
        [(Component::Moments, 1), (Component::Master, 1), (Component::Gradients, 2), (Component::Trained, 3)]
    {
        let whole = plans[0].peak.bytes.get(c);
        for (stage, p) in plans.iter().enumerate() {
            let want = if stage >= from { whole.div_ceil(4) } else { whole };
            let got = p.peak.bytes.get(c);
            assert!(got.abs_diff(want) <= whole / 1000, "stage {stage}, {c:?}: {got}, not {want}");
        }
    }
    Ok(())
}

/// From ZeRO stage 3 on, the weights of a layer are gathered for its visit, those of the next one during it.
#[test]
fn gathered_weights_are_those_of_two_layers() -> anyhow::Result<()> {
    let layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288);
    for (zero, layers) in [(2, 0), (3, 2)] {
        let p = plan("Qwen/Qwen3-8B", &full(), &["parallel.data=4", &format!("parallel.zero={zero}")], true)?;
        let gathered = p.peak.bytes.get(Component::InFlight);
        // with norms and the alignment of tensors
        assert!((layers * layer..=layers * (layer + layer / 1000)).contains(&gathered), "{zero}: {gathered}");
    }
    Ok(())
}

/// Low-rank factors from the base wait in f32, on the host with CUDA.
#[test]
fn initial_factors_are_planned() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &["lora.init=pissa", "lora.rank=8"], true)?;
    let sides = (1024 + 2048) * 2 + (1024 + 1024) * 2 + (1024 + 3072) * 3;
    let factors = p.space.host.iter().find(|(k, _)| *k == "initial_factors").map(|(_, b)| *b);
    assert_eq!(factors, Some(28 * 4 * 8 * sides));
    Ok(())
}

/// On the CPU, pissa and GaLore decompose one matrix at a time, of f32 values. The frozen weight that pissa leaves of
/// the last matrix is not yet there.
#[test]
fn matrices_are_decomposed_from_f32() -> anyhow::Result<()> {
    let (o, i) = (1024, 3072);
    let beside = |more: &str, phase: Phase, set: &[&str]| {
        let p = plan("Qwen/Qwen3-0.6B", &rule("[\"mlp\"]", more), set, false)?;
        anyhow::Ok(p.peak.phases[phase as usize] - states(&p))
    };
    let pissa = beside("", Phase::Load, &["lora.init=pissa", "lora.rank=512"])?;
    let svd = decompose::bytes((o, i), 512);
    // with the buffer that weights are read by
    assert!((svd..svd + (9 << 20)).contains(&pissa), "{pissa}, not {svd}");
    let galore = ["optimizer.name=galore", "optimizer.galore_rank=128"];
    let projecting = (4 * o * i) as u64 + decompose::bytes((o, i), 128);
    assert_eq!(beside("method = \"full\"", Phase::Step, &galore)?, projecting);
    // in the backward pass of each of two ranks too
    let back = |rank: usize| {
        let rank = format!("optimizer.galore_rank={rank}");
        let two =
            ["parallel.data=2", "parallel.zero=0", "run.batch_rows=2", "run.micro_rows=1", "run.clip=0"];
        let own = ["optimizer.in_backward=true", galore[0], &rank, "data.max_length=16"];
        beside("method = \"full\"", Phase::Backward, &[&two[..], &own].concat())
    };
    let more = decompose::bytes((o, i), 512) - decompose::bytes((o, i), 128);
    assert_eq!(back(512)? - back(128)?, more);
    Ok(())
}

/// A matrix in half precision is read back in f32 and rounded.
#[test]
fn saving_holds_the_largest_matrix_in_f32_and_rounded() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen3-8B", &full(), &["model.dtype=bf16"], false)?;
    let [step, save] = [Phase::Step, Phase::Save].map(|phase| p.peak.phases[phase as usize]);
    let both = (4 + 2) * 151_936 * 4096;
    assert!((both..both + both / 100).contains(&(save - step)), "{step} {save}");
    Ok(())
}

/// A or B of all experts of a layer is joined on the host before it is written.
#[test]
fn saving_holds_the_largest_tensor_of_all_experts() -> anyhow::Result<()> {
    let p = plan("openai/gpt-oss-20b", &rule("[\"experts\"]", ""), &["lora.rank=4"], true)?;
    let joined = p.space.host.iter().find(|(k, _)| *k == "reading_weights").map(|(_, b)| *b);
    assert_eq!(joined, Some(4 * 32 * 4 * 2 * 2880));
    Ok(())
}

/// In evaluation, too, inputs and shared keys of layers live until the last layer.
#[test]
fn evaluation_holds_the_keys_that_layers_share() -> anyhow::Result<()> {
    let sweep = Sweep::new("google/gemma-4-E4B", &rule(LORA, ""), &[], true)?;
    let eval = Some(Tokens::of(&[4096], 4095));
    let workload = Workload { train: Tokens::of(&[64], 63), eval, micro_rows: 1, ..Workload::default() };
    let p = Plan::new(&sweep.inputs(&Workloads::new(|_| workload), None))?;
    assert_eq!(p.peak.phase, Phase::Evaluate);
    // hidden states; inputs of 42 layers; keys and values of a local and of a global layer with 2 heads each
    let held = 4096 * 2 * (2560 + 42 * 256 + 2 * 2 * (256 + 512));
    let planned = p.peak.bytes.get(Component::Activations);
    assert!((held..held + held / 1000).contains(&planned), "{planned}, not {held}");
    Ok(())
}

/// Memory is that of the largest micro-batch; tokens and work of a step are those of rows of mean length.
#[test]
fn measured_data_has_steps_of_mean_rows() -> anyhow::Result<()> {
    let set = ["run.batch_rows=16", "run.micro_rows=1"];
    let sweep = Sweep::new("Qwen/Qwen3-0.6B", &rule(LORA, ""), &set, true)?;
    let plan = |train: Tokens, is_measured: bool| -> anyhow::Result<Plan> {
        let mut w = Workload { train, micro_rows: 1, steps: Some(63), ..Workload::default() };
        if is_measured {
            let epoch = w.epoch.get_or_insert_default();
            (epoch.rows, epoch.tokens, epoch.targets) = (1000, 200_000, 100_000);
        }
        Ok(Plan::new(&sweep.inputs(&Workloads::new(|_| w), None))?)
    };
    let [largest, mean] = [Tokens::of(&[2048], 2047), Tokens::of(&[200], 100)];
    let (p, full, short) = (plan(largest, true)?, plan(largest, false)?, plan(mean, false)?);
    assert_eq!((p.total(), full.tokens_per_step()), (full.total(), 16 * 2048));
    assert_eq!((p.tokens_per_step(), p.work, p.step_work()), (16 * 200, short.work, short.step_work()));
    // no step has more tokens than one of the largest micro-batches
    assert_eq!(plan(Tokens::of(&[100], 99), true)?.tokens_per_step(), 16 * 100);
    Ok(())
}

/// A tied head trains with the embedding, counted once; frozen layers below the lowest trained one save
/// no activations.
#[test]
fn layers_below_the_lowest_trained_one_save_no_activations() -> anyhow::Result<()> {
    let top = rule(LORA, "layers = \"-4:\"");
    let p = plan("Qwen/Qwen3-0.6B", &top, &["memory.recompute=none"], false)?;
    assert_eq!((p.walked, p.layers), (4, 28));
    let all = plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &["memory.recompute=none"], false)?;
    let kept = |p: &Plan| p.peak.bytes.get(Component::Activations);
    assert!(kept(&p) * 5 < kept(&all), "{} {}", kept(&p), kept(&all));
    Ok(())
}

/// Methods that a run refuses for the weights of the model have no plan.
#[test]
fn weights_that_cannot_train_so_are_refused() -> anyhow::Result<()> {
    const EVERYTHING: &str =
        "[\"attention\", \"sinks\", \"router\", \"experts\", \"norms\", \"embedding\", \"head\"]";
    let (tied, gpt_oss) = ("Qwen/Qwen3-0.6B", "openai/gpt-oss-20b");
    let (head, nf4) = (rule("[\"head\"]", ""), &["model.quantize=nf4"][..]);
    for (source, rules, set, says) in [
        (tied, &head, &["lora.init=olora"][..], "lora.init = \"olora\" on lm_head"),
        (tied, &full(), nf4, "nothing is left to quantize"),
        (gpt_oss, &rule(EVERYTHING, "method = \"full\""), &[], "cannot train in full"),
    ] {
        let e = plan(source, rules, set, true).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(e.contains(says), "{source} {set:?}: {e}");
    }
    Ok(())
}

/// A recipe on one machine, to plan under various budgets.
struct Sweep {
    recipe: Recipe,
    found: source::Found,
    selection: Selection,
    cuda: bool,
    /// Host memory, if known.
    host: Option<u64>,
}

impl Sweep {
    fn new(source: &str, rules: &str, set: &[&str], cuda: bool) -> anyhow::Result<Self> {
        let recipe = recipe(source, rules, set)?;
        let mut found = source::find(&recipe)?;
        let selection = selection_without_weights(&recipe, &mut found.config)?;
        Ok(Self { recipe, found, selection, cuda, host: None })
    }

    fn inputs<'a>(&'a self, workloads: &'a Workloads<'a>, budget: Option<u64>) -> Inputs<'a> {
        Inputs {
            recipe: &self.recipe,
            config: &self.found.config,
            selection: &self.selection,
            machine: Machine { threads: 2, ..machine(&self.recipe, self.cuda) },
            workloads,
            budget,
            host: self.host,
            known: None,
        }
    }

    fn at(&self, budget: Option<u64>) -> Plan {
        let workloads = Workloads::new(Workload::of_recipe);
        let inputs = self.inputs(&workloads, budget);
        let mut plan = Plan::new(&inputs).unwrap_or_else(|e| panic!("{e}"));
        plan.advise(&inputs, &PLENTY);
        plan
    }
}

/// `auto`: no recompute if everything fits, full recompute if needed, norms and mixes in between; more
/// memory never costs time. For a dense model, a mixture and a 4-bit base, with fixed and automatic
/// `micro_rows`.
#[test]
fn more_memory_is_never_more_time() -> anyhow::Result<()> {
    let experts = rule("[\"attention\", \"experts\"]", "");
    let (dense, four_bit, micro) = ("Qwen/Qwen3-0.6B", "model.quantize=nf4", "run.micro_rows=auto");
    for (source, rules, set, cuda) in [
        (dense, &rule(LORA, ""), &[][..], false),
        (dense, &full(), &[], false),
        (dense, &rule(LORA, ""), &[micro], false),
        (dense, &rule(LORA, ""), &[four_bit, micro], false),
        ("Qwen/Qwen3-8B", &rule(LORA, ""), &[four_bit], true),
        ("Qwen/Qwen3-8B", &rule(LORA, ""), &[four_bit, micro, "run.batch_rows=12"], true),
        (MIXTRAL, &experts, &[four_bit], true),
        (MIXTRAL, &experts, &[micro], true),
        ("Qwen/Qwen3-30B-A3B", &experts, &[four_bit], true),
    ] {
        let what = format!("{source} {set:?} {cuda}");
        let sweep = Sweep::new(source, rules, set, cuda)?;
        let (least, most) = (sweep.at(Some(1)), sweep.at(Some(1 << 60)));
        assert!(!least.fits() && !least.hints.is_empty(), "{what}");
        assert_eq!(most.execution.recompute, Recomputed::default(), "{what}");
        // the smallest plan is minimal; the peak may be at the head
        let with = |layers: usize| -> anyhow::Result<u64> {
            let layers = format!("memory.recompute={layers}");
            Ok(Sweep::new(source, rules, &[set, &[&layers]].concat(), cuda)?.at(Some(1)).total())
        };
        assert!(with(0)? > least.total(), "{what}: none takes less");
        assert!(with(least.walked)? >= least.total(), "{what}: all take less");
        // plus the reserve
        let (low, high) = (least.total(), most.total() / 24 * 25 + 100);
        assert!(low < high, "{what}: {low} {high}");
        let short = sweep.at(Some(low - 1));
        assert!(!short.fits() && short.total() == low, "{what}");
        let (mut last, mut levels) = (f64::INFINITY, std::collections::BTreeSet::new());
        for step in 0..=40 {
            let budget = low + (high - low) * step / 40;
            let p = sweep.at(Some(budget));
            assert!(p.fits(), "{what} in {budget}: {}", p.total());
            assert!(p.step_work() <= last, "{what} in {budget}: {} after {last}", p.step_work());
            last = p.step_work();
            levels.insert(p.execution.recompute);
        }
        assert_eq!(last, most.step_work(), "{what}");
        let between = |n: usize| (1..least.walked).contains(&n);
        assert!(levels.contains(&Recomputed::default()), "{what}: {levels:?}");
        assert!(levels.iter().any(|r| between(r.all)), "{what}: {levels:?}");
        assert!(levels.iter().any(|r| r.norms > 0 && r.products() == 0), "{what}: {levels:?}");
    }
    Ok(())
}

/// The chosen recompute levels are the fastest fitting mix of two levels at any row length; with long
/// rows attention is saved before the feed-forward.
#[test]
fn the_mix_of_recompute_levels_is_the_fastest_that_fits() -> anyhow::Result<()> {
    let mut kept = Vec::new();
    for length in [256, 32_768] {
        let set = [format!("data.max_length={length}"), "run.batch_rows=1".into()];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let sweep = Sweep::new("Qwen/Qwen3-8B", &rule(LORA, ""), &set, true)?;
        let (low, high) = (sweep.at(Some(1)).total(), sweep.at(Some(1 << 60)).total());
        let mut feed_forward = 0;
        for step in 1..8 {
            let budget = low + (high - low) * step / 8;
            let p = sweep.at(Some(budget));
            let head = p.execution.head_rows as u64;
            let workloads = Workloads::new(Workload::of_recipe);
            let inputs = sweep.inputs(&workloads, Some(budget));
            let prepared = Prepared::new(&inputs, 0)?;
            let parts = prepared.simulate(prepared.workload(1), &[head])?;
            let of = |recompute| Settings {
                recompute,
                inputs: p.execution.inputs,
                dequantize: p.execution.dequantize,
                head: 0,
            };
            for (a, b) in (0..4).flat_map(|a| (0..a).map(move |b| (a, b))) {
                for n in 0..=p.walked {
                    let mix = Recomputed::mixed((n, Level::ALL[a]), Level::ALL[b], p.walked);
                    let fits = parts.total(of(mix)) + crate::search::reserve(p.machine, budget) <= budget;
                    let work = parts.work(of(mix)).total();
                    assert!(!fits || work >= p.work.total(), "{length}, {budget}: {mix:?}, {p:?}");
                }
            }
            feed_forward += usize::from(p.execution.recompute.feed_forward > 0);
        }
        kept.push(feed_forward);
    }
    assert!(kept[0] < kept[1], "{kept:?}");
    Ok(())
}

/// On CUDA, without explicit settings, inputs of recomputed layers move to the host if this is faster:
/// never without gain, on the CPU, without page-locked memory, or beyond half of the remaining host
/// memory.
#[test]
fn inputs_wait_on_the_host_where_that_is_faster() -> anyhow::Result<()> {
    const PLENTY: u64 = 1 << 40;
    let rows = ["data.max_length=4096", "run.batch_rows=4", "run.micro_rows=4"];
    let sweep = |set: &[&str], cuda, host| -> anyhow::Result<Sweep> {
        let set = [&rows, set].concat();
        Ok(Sweep { host, ..Sweep::new("Qwen/Qwen3-8B", &rule(LORA, ""), &set, cuda)? })
    };
    let (with, without) = (sweep(&[], true, Some(PLENTY))?, sweep(&[], true, None)?);
    let never = [
        sweep(&["memory.offload=[]"], true, Some(PLENTY))?,
        sweep(&["memory.recompute=all"], true, Some(PLENTY))?,
        sweep(&[], true, Some(1 << 30))?,
        sweep(&[], false, Some(PLENTY))?,
    ];
    let unlocked = sweep(&["memory.pin=false"], true, Some(PLENTY))?;
    let on_host = |p: &Plan| p.space.host.iter().find(|(k, _)| *k == "offloaded_activations").map(|h| h.1);
    let (low, high) = (with.at(Some(1)).total(), with.at(Some(1 << 60)).total());
    assert!(low < without.at(Some(1)).total(), "inputs on the host take less");
    let (mut moved, mut last) = (0, f64::INFINITY);
    for step in 0..=24 {
        let budget = Some((low + (high - low) * step / 24) / 24 * 25 + 100);
        let (p, stay) = (with.at(budget), without.at(budget));
        assert!(p.fits() && p.work.total() <= 1.01 * last, "{step}");
        last = p.work.total();
        let (text, choice) = (p.details(None), p.choices_json()["inputs"].clone());
        assert!(choice["reason"].as_str().is_some_and(|r| !r.is_empty()), "{choice}");
        if p.execution.inputs.on_host {
            moved += 1;
            assert!(!stay.fits() || 1.01 * p.work.total() < stay.work.total(), "{step}: it spares nothing");
            let waiting = 16_384 * 4096 * 2 * p.execution.recompute.layers().min(35) as u64;
            assert_eq!((on_host(&p), &choice["value"]), (Some(waiting), &"host".into()));
            assert!(text.contains("inputs      of those layers on the host (auto: "), "{text}");
            assert!(p.execution.words(p.walked).ends_with(", whose inputs wait on the host"));
        } else {
            assert_eq!((p.work.total(), on_host(&p)), (stay.work.total(), None), "{step}");
            assert!(!text.contains("on the host (auto"), "{text}");
        }
        for other in never.iter().map(|s| s.at(budget)) {
            assert!(!other.execution.inputs.on_host && on_host(&other).is_none(), "{step}");
        }
        // pageable transfers block the host: used only if nothing else fits
        assert!(!stay.execution.inputs.on_host);
        assert!(!stay.fits() || !unlocked.at(budget).execution.inputs.on_host, "{step}");
    }
    assert!((3..25).contains(&moved), "{moved}");
    // explicit settings are kept
    let told = sweep(&["memory.offload=['activations']"], true, None)?.at(Some(1 << 60));
    assert!(told.execution.inputs.on_host && told.reasons.inputs == "the recipe says so");
    Ok(())
}

/// Without a budget nothing is searched, as each choice says.
#[test]
fn without_a_budget_the_reasons_say_so() -> anyhow::Result<()> {
    let set = ["model.quantize=nf4", "run.micro_rows=auto"];
    let why = Sweep::new("Qwen/Qwen3-0.6B", &rule(LORA, ""), &set, true)?.at(None).reasons;
    for why in [why.recompute, why.inputs, why.dequantize, why.head_rows, why.micro_rows] {
        assert_eq!(why, "auto; no budget known: set memory.budget");
    }
    Ok(())
}

/// Every choice equals the best of an exhaustive search, and fixed settings are kept.
#[test]
fn choices_are_those_of_an_exhaustive_search() -> anyhow::Result<()> {
    let nf4 = "model.quantize=nf4";
    let at = |set: &[&str], budget: Option<u64>, cuda: bool| -> anyhow::Result<Plan> {
        Ok(Sweep::new("Qwen/Qwen3-0.6B", &rule(LORA, ""), set, cuda)?.at(budget))
    };
    let (large, all) = (Some(1 << 40), "memory.recompute=all");
    // by CPU measurements and CUDA data sheets, dequantizing tiles again is faster than holding the layer
    for cuda in [false, true] {
        let p = at(&[nf4, all], large, cuda)?;
        let other = at(&[nf4, all, "memory.dequantize=per_layer"], large, cuda)?;
        assert_eq!(p.execution.dequantize, Dequantize::PerMatmul);
        assert!(
            p.step_work() < other.step_work() && p.reasons.dequantize.contains("is faster than"),
            "{cuda}"
        );
    }
    assert_eq!(
        at(&[nf4, all, "memory.dequantize=per_layer"], large, false)?.execution.dequantize,
        Dequantize::PerLayer
    );
    assert_eq!(
        at(&[nf4, all, "memory.dequantize=per_matmul"], large, true)?.execution.dequantize,
        Dequantize::PerMatmul
    );
    // without 4-bit weights or repeated dequantization there is nothing to choose
    assert_eq!(
        at(&[all, "memory.dequantize=per_layer"], large, true)?.execution.dequantize,
        Dequantize::PerMatmul
    );
    assert_eq!(at(&[nf4], large, true)?.execution.dequantize, Dequantize::PerMatmul);
    // holding a dequantized layer takes more memory
    let rows = ["run.batch_rows=16", "run.micro_rows=16"];
    let [tiles, visit] = ["per_matmul", "per_layer"]
        .map(|d| at(&[nf4, all, &format!("memory.dequantize={d}"), rows[0], rows[1]], None, true));
    assert!(tiles?.peak.bytes.get(Component::InFlight) < visit?.peak.bytes.get(Component::InFlight));
    // without a budget the choice is the safest
    let p = at(&[nf4, "run.micro_rows=auto"], None, true)?;
    assert_eq!(
        (p.execution.micro_rows, p.execution.recompute, p.execution.dequantize),
        (1, 28.into(), Dequantize::PerMatmul)
    );
    // micro-batches divide a rank's rows of a step
    for budget in [6u64, 8, 12, 20, 60].map(|g| g << 30) {
        let p = at(&["run.micro_rows=auto", "run.batch_rows=24", "parallel.data=2"], Some(budget), false)?;
        assert!(12 % p.execution.micro_rows == 0, "{}", p.execution.micro_rows);
        assert_eq!(p.micro_batches * p.execution.micro_rows as u64, 12);
    }
    // a trained head keeps the default chunk: its gradient is a sum over chunks in fixed order
    let rules = rule("[\"head\"]", "");
    let head =
        |budget| Sweep::new("Qwen/Qwen3-8B", &rules, &[], true).map(|s| s.at(budget).execution.head_rows);
    assert_eq!(head(Some(1))?, head(Some(1 << 50))?);
    let frozen = |budget| at(&[], budget, true).map(|p| p.execution.head_rows);
    assert!(frozen(None)? < frozen(large)?);
    // every choice has a reason
    let p = at(&[nf4, "run.micro_rows=auto"], Some(3 << 30), false)?;
    let (json, text) = (p.json(None), p.details(None));
    for key in ["micro_rows", "recompute", "dequantize", "head_rows"] {
        let c = &json["choices"][key];
        let reason = c["reason"].as_str().unwrap_or_default();
        assert!(!c["value"].is_null() && !reason.is_empty() && text.contains(reason), "{key}: {c}");
    }
    Ok(())
}

/// On CUDA 1/25 of the budget stays free if possible. If only the smallest plan fits, it is taken, and
/// the plan reports the free rest.
#[test]
fn a_share_of_the_gpu_budget_stays_free() -> anyhow::Result<()> {
    let sweep = Sweep::new("Qwen/Qwen3-8B", &rule(LORA, ""), &["run.micro_rows=4"], true)?;
    let (least, most) = (sweep.at(Some(1)), sweep.at(Some(1 << 60)));
    let mut chosen = 0;
    for step in 0..=30 {
        let budget = least.total() + (most.total() - least.total()) * step / 30;
        let p = sweep.at(Some(budget));
        let Some((wanted, left)) = p.kept_back() else { anyhow::bail!("no budget") };
        assert_eq!((wanted, left), (budget / 25, budget - p.total()));
        assert!(p.fits_device() && (left >= wanted || p.total() == least.total()), "{budget}: {left}");
        assert_eq!(p.details(None).contains("less than the"), left < wanted);
        chosen += usize::from(p.execution.recompute.all < least.walked);
    }
    assert!(chosen > 10, "{chosen}");
    let cpu = Sweep::new("Qwen/Qwen3-0.6B", &rule(LORA, ""), &[], false)?.at(Some(64 << 30));
    assert_eq!(cpu.kept_back().map(|k| k.0), Some(0));
    Ok(())
}

/// Answers to `log.samples` are planned, also without evaluation data; short ones take less than training.
#[test]
fn answers_to_samples_are_planned() -> anyhow::Result<()> {
    let with = |samples: &str| {
        let set = format!("log.samples=[{samples}]");
        plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &[&set], false)
    };
    let (none, short) = (with("")?, with("'What colour is the sky?'")?);
    assert_eq!((none.total(), none.peak.phase), (short.total(), short.peak.phase));
    let long = with(&format!("'{}'", "a ".repeat(50_000)))?;
    // keys and values of 8 heads of 128 values in 28 layers, in f32
    assert!(long.peak.bytes.get(Component::Cache) >= 100_000 * 28 * 2 * 8 * 128 * 4);
    // of equal layers the first is the place
    assert_eq!((long.peak.phase, long.peak.unit), (Phase::Evaluate, 1));
    Ok(())
}

/// Stages keep the inputs of recomputed layers on the device.
#[test]
fn stages_keep_inputs_on_the_device() -> anyhow::Result<()> {
    let set = ["parallel.pipeline=2", "memory.budget=60GiB", "memory.host_budget=64GiB"];
    let p = plan("Qwen/Qwen3-8B", &rule(LORA, ""), &set, true)?;
    assert_eq!(p.reasons.inputs, "with parallel.pipeline they stay on the device");
    assert!(!p.execution.inputs.on_host);
    Ok(())
}

/// The rows of a micro-batch are those that the neediest stage has room for, and the plan is that stage's.
#[test]
fn stages_have_micro_batches_of_the_same_rows() -> anyhow::Result<()> {
    for stages in ["parallel.pipeline=2", "parallel.pipeline=3"] {
        let at = |rows: &str| {
            let set = [stages, "run.batch_rows=12", rows];
            anyhow::Ok(Sweep::new("Qwen/Qwen3-0.6B", &full(), &set, true)?.at(Some(24 << 30)))
        };
        let auto = at("run.micro_rows=auto")?;
        let same = at(&format!("run.micro_rows={}", auto.execution.micro_rows))?;
        assert_eq!(auto.execution, same.execution);
        assert_eq!(auto.total(), same.total());
    }
    Ok(())
}

/// Router losses couple the routers of all layers: with them each stage has a backward pass.
#[test]
fn stages_below_the_lowest_trained_layer_have_a_backward_pass_for_router_losses() -> anyhow::Result<()> {
    let top = rule("[\"attention\"]", "layers = \"-4:\"");
    for (losses, lowest) in [([0, 0], 1), ([1, 0], 0), ([0, 1], 0)] {
        let [aux, z] = losses;
        let keys = [format!("router.aux_loss={aux}"), format!("router.z_loss={z}")];
        let sweep = Sweep::new(MIXTRAL, &top, &["parallel.pipeline=2", &keys[0], &keys[1]], true)?;
        let workloads = Workloads::new(Workload::of_recipe);
        let (_, actions) = Plan::with_actions(&sweep.inputs(&workloads, Some(1 << 50)))?;
        assert_eq!(actions.map(|a| a.lowest), Some(lowest), "{losses:?}");
    }
    Ok(())
}

/// On each of its two stages, half of the gradient comes as parts to add, the other half as sums.
#[test]
fn stages_exchange_the_gradient_of_a_table_that_they_share() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen3-0.6B", &full(), &["parallel.pipeline=2"], true)?;
    assert_eq!(p.wire - p.exchanged, 4 * 151_936 * 1024);
    Ok(())
}

/// A stage receives the hidden states of the stage below or their gradient from the one above.
#[test]
fn stages_exchange_hidden_states() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &["parallel.pipeline=2"], true)?;
    assert_eq!(p.exchanged, p.micro_batches * p.workload.train.tokens * 1024 * 2);
    Ok(())
}

#[test]
fn more_tokens_of_a_rank_have_more_indices_on_the_cpu() {
    let whole = Tokens::of(&[64], 63);
    let [none, half] = [Tokens::default(), whole.cut(2)].map(|own| whole.beside(own, &[], false));
    assert_eq!(half - none, (8 + 4) * 32);
}

#[test]
fn the_pass_of_the_reference_takes_its_share_of_a_step() -> anyhow::Result<()> {
    let mut p = plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &[], false)?;
    let work = Some(2.0 * p.step_work());
    p.reference = Some(workload::ReferencePass { other: None, samples: None, work });
    let step = rates::Range { low: 3.0, high: 5.0, source: rates::Source::Measured("") };
    assert_eq!(p.json(Some(step))["reference"]["seconds"], serde_json::json!([6.0, 10.0]));
    Ok(())
}

#[test]
fn components_below_a_hundredth_of_the_peak_are_one_line() -> anyhow::Result<()> {
    use Component::{Adapters, Batch, Gradients, Mlp};
    let mut p = plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &[], false)?;
    p.peak.bytes = Bytes::default();
    for (c, bytes) in [(Mlp, 980), (Adapters, 10), (Gradients, 9), (Batch, 1)] {
        p.peak.bytes.add(c, bytes);
    }
    let text = p.text("", None, &[]);
    for (label, shown) in [("adapters", true), ("gradients", false), ("micro-batch", false), ("other", true)]
    {
        assert_eq!(text.contains(&format!("\n  {label:<24} ")), shown, "{label}: {text}");
    }
    Ok(())
}

/// Bytes of weights, gradients and optimizer states, and of the libraries.
fn states(p: &Plan) -> u64 {
    use Component::*;
    let weights = [Embedding, Attention, Mlp, Norms, Head, Trained, Adapters];
    weights.into_iter().chain([Gradients, Master, Moments, Context]).map(|c| p.peak.bytes.get(c)).sum()
}

/// AdamW on CUDA works in pieces.
#[test]
fn temporaries_of_the_optimizer_are_at_most_400_mib() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen3-8B", &full(), &[], true)?;
    let beside = p.peak.phases[Phase::Step as usize] - states(&p);
    assert!(beside <= 400 << 20, "{beside}");
    Ok(())
}

/// A CUDA process takes more host memory than code and threads.
#[test]
fn cuda_takes_host_memory() -> anyhow::Result<()> {
    for cuda in [false, true] {
        let p = plan("Qwen/Qwen3-8B", &rule(LORA, ""), &[], cuda)?;
        let libraries = p.space.host.iter().find(|(k, _)| *k == "cuda_libraries").map(|(_, b)| *b);
        assert_eq!(libraries.is_some_and(|b| b > 1 << 30), cuda);
        assert_eq!(p.details(None).contains("pytorch issue"), cuda);
    }
    Ok(())
}

/// The plan of a mixture reserves memory for uneven routing and reports it; dense models have no reserve.
#[test]
fn uneven_routing_is_reserved_for() -> anyhow::Result<()> {
    let experts = rule("[\"attention\", \"experts\"]", "");
    let set = ["model.quantize=nf4", "data.max_length=4096", "memory.recompute=all"];
    // on CUDA the peak occurs with all tokens in one place, independent of the routing
    for (source, cuda, some) in
        [(MIXTRAL, false, true), (MIXTRAL, true, false), ("Qwen/Qwen3-30B-A3B", true, false)]
    {
        let p = plan(source, &experts, &set, cuda)?;
        let reserve = p.peak.bytes.get(Component::Routing);
        assert_eq!(reserve > 0, some, "{source}: {reserve}");
        // experts / top-k times one expert's rows are a small part of the total
        assert!(p.engine() + reserve < p.total() && reserve < p.total() / 10, "{source}: {reserve}");
        let said = p.details(None);
        assert!(said.contains("\nrouting  "), "{said}");
        assert_eq!(said.contains("(the routing reserve)"), some, "{said}");
    }
    let dense = plan("Qwen/Qwen3-8B", &rule(LORA, ""), &[], true)?;
    assert_eq!(dense.peak.bytes.get(Component::Routing), 0);
    Ok(())
}

/// Every change of a hint fits, with the planned bytes, when it is made.
#[test]
fn changes_of_hints_fit_with_the_planned_bytes() -> anyhow::Result<()> {
    let full = full();
    for (source, rules, base, cuda) in [
        ("Qwen/Qwen3-0.6B", &full, &["run.device=cpu", "memory.budget=7GiB", "run.micro_rows=4"][..], false),
        ("Qwen/Qwen3-8B", &rule(LORA, ""), &["memory.budget=14GiB", "memory.recompute=none"], true),
        ("Qwen/Qwen3-8B", &full, &["memory.budget=40GiB"], true),
    ] {
        let p = plan(source, rules, base, cuda)?;
        assert!(!p.fits());
        let changes: Vec<_> = p.hints.iter().filter(|h| !h.set.is_empty()).collect();
        assert!(!changes.is_empty(), "{:?}", p.hints);
        for h in changes {
            let set: Vec<&str> = h.set.iter().map(String::as_str).collect();
            let then = plan(source, rules, &[base, &set].concat(), cuda)?;
            assert!(then.fits() && then.total() == h.total, "{}: {}", h.text, then.total());
        }
    }
    Ok(())
}

/// One card with a change, or another recipe, comes before more cards.
#[test]
fn hints_name_one_card_before_many() -> anyhow::Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes"));
    for (name, budget, says) in [
        ("qwen3-8b-qlora", "6GB", "memory.offload = [\"params\"]: 5."),
        ("mixtral-8x7b-qlora-experts", "24GB", "memory.offload = [\"params\"]: 21."),
        ("qwen3-8b-full", "48GB", "the recipe qwen3-8b-48gb-full: 4"),
    ] {
        let set = ["run.device=cuda".into(), format!("memory.budget={budget}")];
        let recipe = Recipe::load_for_plan(&root.join(format!("{name}.toml")), &set)?;
        let (p, _) = of_recipe_in(&recipe, true, &Capacity::UNKNOWN)?;
        let hints: Vec<&str> = p.hints.iter().map(|h| h.text.as_str()).collect();
        let (Some(at), more) = (
            hints.iter().position(|h| h.starts_with(says)),
            hints.iter().position(|h| h.starts_with("parallel.")),
        ) else {
            anyhow::bail!("{name} at {budget}: {hints:#?}");
        };
        assert!(more.is_none_or(|more| at < more), "{hints:#?}");
    }
    Ok(())
}

/// A hint of a shorter length says what becomes of longer samples; there is none if they stop the run.
#[test]
fn hints_of_a_shorter_length_go_by_over_length() -> anyhow::Result<()> {
    for (over, says) in [
        ("truncate", Some("longer samples are cut")),
        ("drop", Some("longer samples are left out")),
        ("error", None),
    ] {
        let over = format!("data.over_length={over}");
        let sweep = Sweep::new("Qwen/Qwen3-0.6B", &rule(LORA, ""), &["data.max_length=32768", &over], true)?;
        let p = sweep.at(Some(sweep.at(Some(1)).total() - 1));
        let hint = p.hints.iter().find(|h| h.text.starts_with("data.max_length"));
        let cost = hint.and_then(|h| h.text.rsplit_once("; ")).map(|(_, cost)| cost);
        assert_eq!(cost, says, "{:#?}", p.hints);
    }
    Ok(())
}

/// A run refuses an adapter to continue with another rank or method than its own: they are no hints.
#[test]
fn hints_keep_rank_and_method_of_an_adapter() -> anyhow::Result<()> {
    let rules = rule("[\"attention\"]", "rank = 64") + &rule("[\"mlp\"]", "method = \"full\"");
    for (set, hinted) in [(&[][..], true), (&["lora.init=me/adapter"], false)] {
        let sweep = Sweep::new("Qwen/Qwen3-0.6B", &rules, set, true)?;
        let p = sweep.at(Some(sweep.at(Some(1)).total() - 1));
        for key in ["train.0.rank=", "train.1.method="] {
            let found = p.hints.iter().flat_map(|h| &h.set).any(|s| s.starts_with(key));
            assert_eq!(found, hinted, "{set:?}, {key}: {:#?}", p.hints);
        }
    }
    Ok(())
}

/// A checkpoint of bitsandbytes takes what `model.quantize = "nf4"` takes, which is no hint for it.
#[test]
fn checkpoints_in_4_bits_are_planned_so() -> anyhow::Result<()> {
    let Some((_, text)) = source::builtin("Qwen/Qwen3-0.6B") else { anyhow::bail!("not built in") };
    let plain: serde_json::Value = serde_json::from_str(text)?;
    let mut stored = plain.clone();
    stored["quantization_config"] = serde_json::json!({"quant_method": "bitsandbytes", "load_in_4bit": true});
    let dir = tempfile::tempdir()?;
    let folder = dir.path().display().to_string();
    for cuda in [false, true] {
        let of = |config: &serde_json::Value, set: &[&str]| -> anyhow::Result<Sweep> {
            std::fs::write(dir.path().join("config.json"), config.to_string())?;
            Sweep::new(&folder, &rule(LORA, ""), set, cuda)
        };
        let (nf4, four_bit) = (of(&plain, &["model.quantize=nf4"])?, of(&stored, &[])?);
        let takes = |s: &Sweep| {
            let p = s.at(None);
            (p.total(), p.step_work(), p.theory)
        };
        assert_eq!(takes(&four_bit), takes(&nf4));
        let least = nf4.at(Some(1)).total();
        assert!(four_bit.at(Some(least)).fits());
        let short = four_bit.at(Some(least - 1));
        assert!(!short.hints.iter().any(|h| h.text.contains("model.quantize")), "{:#?}", short.hints);
    }
    Ok(())
}

/// An adapter's files hold factors subtracted from the base beside the trained ones, and a tied table twice.
#[test]
fn files_of_an_adapter_hold_some_tensors_twice() -> anyhow::Result<()> {
    let result = |rules: &str, init: &str| -> anyhow::Result<u64> {
        let p = plan("Qwen/Qwen3-0.6B", rules, &["lora.rank=8", &format!("lora.init={init}")], true)?;
        Ok(p.space.files.iter().filter(|f| f.name == "result").map(|f| f.bytes).sum())
    };
    let lora = rule(LORA, "");
    let sides = (1024 + 2048) * 2 + (1024 + 1024) * 2 + (1024 + 3072) * 3;
    let plain = result(&lora, "default")?;
    assert_eq!(result(&lora, "pissa")? - plain, 28 * 4 * 8 * sides);
    let tied = result(&(lora + &rule("[\"embedding\"]", "method = \"full\"")), "default")? - plain;
    let table = 4 * 151_936 * 1024;
    // with the entries of the file's header
    assert!((2 * table..2 * table + 1000).contains(&tied), "{tied}");
    Ok(())
}
