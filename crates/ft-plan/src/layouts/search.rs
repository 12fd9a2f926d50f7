//! Plans of the layouts of a recipe.

use super::bounds::{Bounds, Model as Whole, Sums};
use super::layout::Layout;
use super::predict::{Candidate, Rates, predict, sort};
use crate::host::Capacity;
use crate::model::{Target, machine, quantization};
use crate::plan::Model;
use crate::resolve::{cuts, split_dropout, unsuited};
use crate::time::links::{Link, Network};
use crate::time::rates::{self, Source};
use ft_kernels::Machine;
use ft_recipe::{Launch, MicroRows, Recipe};
use serde::Serialize;

/// Number of layouts to print.
const BEST: usize = 5;
/// Card in place of an unknown one, and work a second of an unmeasured CPU thread.
const CARD: &str = "A100-80";
const CPU: f64 = 30e9;
/// Times within this factor are equal: memory decides then.
const WITHIN: f64 = 1.01;
/// Work to ask a rate for.
const WORK: f64 = 1e15;

/// Devices of a search.
#[derive(Clone, Debug)]
pub struct Devices {
    /// Number of ranks, one a device.
    pub count: usize,
    /// The links between them.
    pub network: Network,
}

impl Devices {
    /// Whether the devices are on several machines.
    pub fn on_several(&self) -> bool {
        self.count > self.network.machine
    }

    /// The links in words.
    pub fn words(&self) -> String {
        let Network { within, between, machine } = &self.network;
        let far = match self.on_several() {
            true => format!("; between machines of {machine}: {}", words(between)),
            false => String::new(),
        };
        format!("links of {}{far}", words(within))
    }
}

/// A link in words.
fn words(link: &Link) -> String {
    let gb = |rate: f64| format!("{:.1}", rate / 1e9);
    let others = match link.gather == link.exchange && link.gather == link.sum {
        true => String::new(),
        false => format!(", {} in sums, {} in exchanges", gb(link.sum), gb(link.exchange)),
    };
    format!("{} GB a second to each device{others} ({})", gb(link.gather), link.source)
}

/// Ranks sharing the processors of this process; 1 under a launcher.
fn sharing(ranks: usize) -> usize {
    if Launch::of_env().is_some() { 1 } else { ranks }
}

/// Rate of the arithmetic of a device, and the source of the number.
#[derive(Clone, Debug, Serialize)]
pub struct Arithmetic {
    /// Work (FLOPs of a large product) a second.
    pub rate: f64,
    /// Source in words.
    pub source: String,
}

impl Arithmetic {
    /// The measured rate, else the rate of the card's probe or data sheet, else a rate of another family, else an
    /// assumption. Ranks on the CPU share the threads: a rank's rate was measured with as many, or is a share of the
    /// rate of all.
    fn of(m: Machine, family: &str, ranks: usize) -> Self {
        let sharing = sharing(ranks) as u64;
        if m.cuda || sharing == 1 {
            return Self::of_device(m, family);
        }
        let own = Machine { threads: (m.threads / sharing).max(1), ..m };
        let source = |m| rates::predict(m, family, WORK).map(|r| r.source);
        let from = match (source(own), source(m)) {
            (Some(Source::OtherFamily(_)), Some(Source::Measured(_))) | (None, _) => m,
            _ => own,
        };
        let Self { rate, source } = Self::of_device(from, family);
        // threads of the machine per rank, over the threads of the rate
        let share = m.threads as f64 / (sharing * from.threads) as f64;
        Self { rate: rate * share.min(1.0), source }
    }

    fn of_device(m: Machine, family: &str) -> Self {
        let rate = |m| rates::predict(m, family, WORK).map(|r| (2.0 * WORK / (r.low + r.high), r.source));
        match rate(m) {
            Some((rate, source)) => Self { rate, source: source.words() },
            None if m.cuda => {
                let like = Machine { card: Some(CARD), width: 2, stored: 2, ..m };
                let rate = rate(like).map_or(0.0, |r| r.0);
                Self { rate, source: format!("assumed: a card like {CARD}; --gpu with a name has its own") }
            }
            None => {
                let source = "assumed for the threads of this machine; ft bench measures it".into();
                Self { rate: CPU * m.threads as f64, source }
            }
        }
    }
}

/// Layouts of a recipe over devices.
#[derive(Clone, Debug)]
pub struct Layouts {
    /// Recipe and model.
    pub of: String,
    pub devices: Devices,
    pub machine: Machine,
    pub arithmetic: Arithmetic,
    /// Usable device bytes of a rank, if known.
    pub budget: Option<u64>,
    /// Planned layouts that fit, fastest first. No other is faster than the first five.
    pub fitting: Vec<Candidate>,
    /// Number of layouts allowed by the recipe.
    pub allowed: usize,
    /// The planned layout with the smallest memory.
    pub least: Option<(Layout, u64)>,
    /// Numbers of unlisted layouts, by reason.
    pub others: Vec<(usize, String)>,
}

/// A layout that the recipe allows.
struct Allowed {
    layout: Layout,
    recipe: Recipe,
    /// Further keys for it.
    beside: Vec<String>,
    bounds: Bounds,
}

/// Finds the fastest layouts of the recipe over the devices, for such devices.
///
/// # Errors
/// As [`crate::of_recipe`].
pub fn layouts_of_recipe(recipe: &Recipe, target: Target, devices: Devices) -> ft_base::Result<Layouts> {
    let model = Model::find(recipe)?;
    // all threads, if the recipe shares them already
    let machine = Machine { threads: rayon::current_num_threads() as u64, ..machine(recipe, target) };
    let room = Capacity::of(machine);
    let mut found = Layouts {
        of: format!("{}: {} ({})", recipe.name, recipe.model.source, model.found.from),
        machine,
        arithmetic: Arithmetic::of(machine, model.found.config.family.model_type, devices.count),
        devices,
        budget: None,
        fitting: Vec::new(),
        allowed: 0,
        least: None,
        others: Vec::new(),
    };
    let mut open = found.allow(recipe, &model, target, &room)?;
    found.allowed = open.len();
    open.sort_by(|a, b| a.bounds.seconds.total_cmp(&b.bounds.seconds));
    let (mut slower, mut larger) = (0, Vec::new());
    for one in open {
        let time = |c: &Candidate| c.step_seconds;
        if found.fitting.get(BEST - 1).is_some_and(|last| one.bounds.seconds > WITHIN * time(last)) {
            slower += 1;
        } else if found.budget.is_some_and(|budget| one.bounds.memory > budget) {
            larger.push(one);
        } else {
            found.plan(&one, &model, target, &room)?;
        }
    }
    found.count(slower, "by arithmetic and bytes alone slower than these");
    if found.fitting.is_empty() {
        // the error names the least
        let least = larger.iter().min_by_key(|one| one.bounds.memory);
        least.map_or(Ok(()), |one| found.plan(one, &model, target, &room))?;
    }
    found.count(larger.len(), "weights, gradients and optimizer alone do not fit");
    Ok(found)
}

/// The recipe in a layout, and further keys for it, or the reason against it. The plan chooses micro-batches if the
/// recipe's do not divide: results do not depend on them.
fn applied(recipe: &Recipe, layout: Layout) -> Result<(Recipe, Vec<String>), String> {
    let set = layout.settings();
    let with = |more: &[String]| match recipe.with(&[&set[..], more].concat()) {
        Ok(r) => match &r.not_built {
            Some(problem) => Err(problem.message.clone()),
            None => Ok((r, more.to_vec())),
        },
        Err(e) => Err(e.problems().first().map_or_else(|| e.to_string(), |p| p.message.clone())),
    };
    let auto = ["run.micro_rows=auto".to_string()];
    with(&[]).or_else(|why| {
        if recipe.run.micro_rows == MicroRows::Auto { Err(why) } else { with(&auto).map_err(|_| why) }
    })
}

impl Layouts {
    /// The layouts that the recipe allows.
    fn allow(
        &mut self,
        recipe: &Recipe,
        model: &Model,
        target: Target,
        room: &Capacity<'_>,
    ) -> ft_base::Result<Vec<Allowed>> {
        let config = &model.resolved.config;
        let experts = config.moe.as_ref().map_or(0, |m| m.experts);
        let cuts = |n: usize| cuts(recipe, &model.resolved, n);
        self.budget = recipe.memory.budget;
        let mut allowed = Vec::new();
        for layout in Layout::all(self.devices.count, config.layers, experts, cuts) {
            let suited = applied(recipe, layout).and_then(|found| {
                let dropout = || split_dropout(&found.0, &model.resolved.selection, target.cuda);
                match unsuited(&found.0, config).or_else(dropout) {
                    Some(key) => Err(key.reason()),
                    None => Ok(found),
                }
            });
            match suited {
                Ok((with, beside)) => {
                    let bounds = Bounds { seconds: 0.0, memory: 0 };
                    allowed.push(Allowed { layout, recipe: with, beside, bounds });
                }
                Err(why) => self.count(1, &why),
            }
        }
        // a rank with the whole model tells the work of a row
        let whole = allowed.iter().find(|one| one.layout.data == self.devices.count);
        let (row, most_rows) = match whole {
            Some(one) => model.least_work(&one.recipe, target, room)?,
            None => (0.0, recipe.run.batch_rows),
        };
        let quantize = quantization(config, recipe.model.quantize);
        let sums = Sums::of(quantize, &model.resolved.selection, self.machine);
        let sizes = Whole { sums, row, width: self.machine.width as f64, most_rows };
        for one in &mut allowed {
            one.bounds = sizes.bounds(&one.recipe, one.layout, self.rates());
        }
        Ok(allowed)
    }

    /// Plans a layout, and lists it if it fits.
    fn plan(
        &mut self,
        one: &Allowed,
        model: &Model,
        target: Target,
        room: &Capacity<'_>,
    ) -> ft_base::Result<()> {
        let (plan, actions) = model.plan(&one.recipe, target, room)?;
        self.budget = plan.budget;
        let memory = plan.total();
        if self.least.is_none_or(|(_, least)| memory < least) {
            self.least = Some((one.layout, memory));
        }
        let Some(actions) = actions else {
            self.count(1, "they do not fit");
            return Ok(());
        };
        let step = predict(&actions, self.rates());
        self.fitting.push(Candidate {
            layout: one.layout,
            beside: one.beside.clone(),
            memory,
            wire_bytes_a_step: plan.wire,
            wire_bytes_between: step.bytes[1] as u64,
            step_seconds: step.seconds,
            bubble: step.bubble,
            limit: step.limit,
            how: plan.how(),
            actions,
        });
        sort(&mut self.fitting);
        Ok(())
    }

    /// The layouts to print.
    pub fn best(&self) -> &[Candidate] {
        &self.fitting[..self.fitting.len().min(BEST)]
    }

    /// Rates of the devices.
    pub fn rates(&self) -> Rates<'_> {
        let alone = match self.machine.cuda {
            true => 1.0,
            false => (sharing(self.devices.count) as f64 / self.machine.threads as f64).max(1.0),
        };
        Rates {
            rate: self.arithmetic.rate,
            network: &self.devices.network,
            engines: self.machine.cuda,
            alone,
        }
    }

    fn count(&mut self, layouts: usize, why: &str) {
        match self.others.iter_mut().find(|(_, known)| *known == why) {
            Some((count, _)) => *count += layouts,
            None if layouts > 0 => self.others.push((layouts, why.into())),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card;
    use std::path::Path;

    /// No layout is faster than its bound or takes less memory, thus layouts left out are not among the fastest. The
    /// nearest bound is at least half of the time.
    fn bounds_are_below_plans(name: &str, devices: usize, keys: &[&str]) -> ft_base::Result<()> {
        let (card, bytes) = card("H100").unwrap_or_default();
        let keys = keys.iter().map(|k| k.to_string());
        let keys: Vec<String> =
            keys.chain([format!("memory.budget={bytes}"), "run.device=cuda".into()]).collect();
        let recipe = Recipe::load_for_plan(Path::new(name), &keys)?;
        let target = Target { cuda: true, card: Some(card) };
        let network = Network::find(target, Some("pcie"), None, None);
        let devices = Devices { count: devices, network };
        let best = layouts_of_recipe(&recipe, target, devices.clone())?;
        let (model, room) = (Model::find(&recipe)?, Capacity::of(machine(&recipe, target)));
        let mut all = Layouts { fitting: Vec::new(), others: Vec::new(), ..best.clone() };
        let mut nearest = 0_f64;
        for one in all.allow(&recipe, &model, target, &room)? {
            let before = all.fitting.len();
            all.least = None;
            all.plan(&one, &model, target, &room)?;
            let memory = all.least.map_or(0, |(_, memory)| memory);
            assert!(one.bounds.memory <= memory, "{name}: {:?}", one.layout);
            if all.fitting.len() > before {
                let planned = all.fitting.iter().find(|c| c.layout == one.layout);
                let seconds = planned.map_or(0.0, |c| c.step_seconds);
                assert!(one.bounds.seconds <= seconds, "{name}: {:?} {seconds}", one.layout);
                nearest = nearest.max(one.bounds.seconds / seconds);
            }
        }
        assert!(nearest > 0.5, "{name}: {nearest}");
        let names = |l: &Layouts| l.best().iter().map(Candidate::words).collect::<Vec<_>>();
        assert_eq!(names(&best), names(&all), "{name}");
        Ok(())
    }

    /// Layouts at odds with a model are counted with the reason.
    #[test]
    fn layouts_that_a_model_excludes_are_counted_with_the_reason() -> ft_base::Result<()> {
        let (card, bytes) = card("H100").unwrap_or_default();
        for (name, key, why) in [
            ("qwen3.5-9b-qlora", "run.seed=1", "parallel.context: not built for linear attention, of which "),
            (
                "gemma-4-e4b-qlora",
                "log.samples=['a']",
                "log.samples: not built with parallel.pipeline where ",
            ),
            (
                "qwen3-30b-a3b-qlora",
                "lora.dropout=0.1",
                "parallel.context: not built yet: dropout in adapters of experts ",
            ),
        ] {
            let keys = [format!("memory.budget={bytes}"), "run.device=cuda".into(), key.into()];
            let recipe = Recipe::load_for_plan(Path::new(name), &keys)?;
            let target = Target { cuda: true, card: Some(card) };
            let network = Network::find(target, Some("pcie"), None, None);
            let found = layouts_of_recipe(&recipe, target, Devices { count: 2, network })?;
            let others = &found.others;
            assert!(others.iter().any(|(_, reason)| reason.starts_with(why)), "{name}: {others:?}");
            assert!(found.first().is_ok(), "{name}: {others:?}");
            // the most frequent reason is told
            let others = vec![(1, "rare".into()), (3, "usual".into())];
            let none = Layouts { fitting: Vec::new(), least: None, others, ..found };
            let told = none.first().map(drop).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(told.contains("suits the recipe: usual"), "{told}");
        }
        Ok(())
    }

    #[test]
    fn bounds_are_below_plans_in_full() -> ft_base::Result<()> {
        bounds_are_below_plans("llama-3.1-8b-full", 16, &["run.batch_rows=64"])
    }

    #[test]
    fn bounds_are_below_plans_of_mixtures() -> ft_base::Result<()> {
        bounds_are_below_plans("qwen3-30b-a3b-qlora", 8, &["run.batch_rows=32", "run.micro_rows=2"])
    }

    #[test]
    fn bounds_are_below_plans_with_updates_in_backward() -> ft_base::Result<()> {
        let data = ["parallel.data=4", "run.batch_rows=4", "run.micro_rows=1"];
        let updates = ["optimizer.in_backward=true", "run.clip=0"];
        bounds_are_below_plans("qwen3-8b-full", 4, &[&data[..], &updates].concat())
    }
}
