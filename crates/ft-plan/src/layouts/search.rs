//! Plans of all layouts of a recipe.

use super::layout::Layout;
use super::predict::{Candidate, sort, time};
use crate::host::Capacity;
use crate::model::{Target, machine};
use crate::plan::{Model, Plan};
use crate::resolve::{check_model, cuts};
use crate::time::links::Link;
use crate::time::rates;
use ft_kernels::Machine;
use ft_recipe::{MicroRows, Recipe};
use serde::Serialize;

/// Number of layouts to print.
const BEST: usize = 5;
/// Card in place of an unknown one, and work a second of an unmeasured CPU thread.
const CARD: &str = "A100-80";
const CPU: f64 = 30e9;
/// Work to ask a rate for.
const WORK: f64 = 1e15;

/// Devices of a search.
#[derive(Clone, Debug)]
pub struct Devices {
    /// Number of ranks, one a device.
    pub count: usize,
    /// The links between them.
    pub link: Link,
}

impl Devices {
    /// So many devices, with links of a class, or without one as they were measured for such devices.
    pub fn new(count: usize, target: Target, class: Option<&str>) -> Self {
        Self { count, link: Link::find(class, target) }
    }

    /// The links in words.
    pub fn words(&self) -> String {
        let Link { gather, exchange, source } = &self.link;
        let exchanges =
            if gather == exchange { String::new() } else { format!(", {:.1} in exchanges", exchange / 1e9) };
        format!("links of {:.1} GB a second to each device{exchanges} ({source})", gather / 1e9)
    }
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
    /// The measured rate, else the rate of the card's data sheet, else an assumption. Ranks on the CPU share it.
    fn of(m: Machine, ranks: usize) -> Self {
        let Self { rate, source } = Self::of_device(m);
        if m.cuda { Self { rate, source } } else { Self { rate: rate / ranks as f64, source } }
    }

    fn of_device(m: Machine) -> Self {
        let rate = |m| rates::predict(m, WORK).map(|r| (2.0 * WORK / (r.low + r.high), r.sheet));
        match rate(m) {
            Some((rate, None)) => Self { rate, source: "measured by ft bench".into() },
            Some((rate, Some(card))) => Self { rate, source: format!("by the data sheet of {card}") },
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
    /// The best ones that fit, fastest first.
    pub best: Vec<Candidate>,
    /// Number of fitting layouts, and of planned ones.
    pub fitting: usize,
    pub planned: usize,
    /// The layout with the smallest memory.
    pub least: Option<(Layout, u64)>,
    /// Numbers of layouts that the recipe does not allow, by reason.
    pub refused: Vec<(usize, String)>,
}

/// Plans every layout of the recipe over the devices, for such devices.
///
/// # Errors
/// As [`crate::of_recipe`].
pub fn layouts_of_recipe(recipe: &Recipe, target: Target, devices: Devices) -> ft_base::Result<Layouts> {
    let model = Model::find(recipe)?;
    let room = Capacity::of(machine(recipe, target));
    let layers = model.resolved.config.layers;
    let experts = model.resolved.config.moe.as_ref().map_or(0, |m| m.experts);
    let mut found = Layouts {
        of: format!("{}: {} ({})", recipe.name, recipe.model.source, model.found.from),
        machine: machine(recipe, target),
        arithmetic: Arithmetic::of(machine(recipe, target), devices.count),
        devices,
        budget: None,
        best: Vec::new(),
        fitting: 0,
        planned: 0,
        least: None,
        refused: Vec::new(),
    };
    let cuts = |n: usize| cuts(recipe, &model.resolved, n);
    for layout in Layout::all(found.devices.count, layers, experts, cuts) {
        match applied(recipe, layout) {
            Ok((with, _)) if check_model(&with, &model.resolved.config).is_err() => {
                let why = if with.parallel.context > 1 && model.resolved.config.delta.is_some() {
                    "parallel.context is not built for linear attention"
                } else {
                    "parallel.pipeline is not built for layers that share inputs, keys and values"
                };
                found.refuse(why.into());
            }
            Ok((with, beside)) => {
                let plan = model.plan(&with, target, &room)?;
                found.add(layout, beside, &plan);
            }
            Err(why) => found.refuse(why),
        }
    }
    sort(&mut found.best);
    found.best.truncate(BEST);
    Ok(found)
}

/// The recipe in a layout, and further keys for it, or the reason against it. The plan chooses micro-batches if those
/// of the recipe do not divide: they do not change results.
fn applied(recipe: &Recipe, layout: Layout) -> Result<(Recipe, Vec<String>), String> {
    let set = layout.settings();
    let with = |more: &[String]| match recipe.with(&[&set[..], more].concat()) {
        Ok(r) => match r.not_built.first() {
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
    fn add(&mut self, layout: Layout, beside: Vec<String>, plan: &Plan) {
        self.planned += 1;
        self.budget = plan.budget;
        let memory = plan.total();
        if self.least.is_none_or(|(_, least)| memory < least) {
            self.least = Some((layout, memory));
        }
        if !(plan.fits_device() && plan.space.host_fits()) {
            return;
        }
        self.fitting += 1;
        let wire = [plan.wire - plan.exposed, plan.exposed];
        let compute = plan.step_work() / self.arithmetic.rate;
        let (step_seconds, limit) = time(compute, wire, &self.devices.link, self.machine.cuda);
        self.best.push(Candidate {
            layout,
            beside,
            memory,
            wire_bytes_a_step: plan.wire,
            step_seconds,
            limit,
            how: plan.how(),
        });
    }

    fn refuse(&mut self, why: String) {
        match self.refused.iter_mut().find(|(_, known)| *known == why) {
            Some((count, _)) => *count += 1,
            None => self.refused.push((1, why)),
        }
    }
}
