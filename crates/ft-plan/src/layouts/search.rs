//! Plans of all layouts of a recipe.

use super::layout::Layout;
use super::predict::{Candidate, Link, sort, time};
use crate::host::{Capacity, card_products};
use crate::model::machine;
use crate::plan::{Model, Plan};
use crate::time::{CostModel, rates};
use ft_kernels::Machine;
use ft_recipe::{MicroRows, Recipe};
use serde::Serialize;

/// Layouts that are kept, fastest first.
const BEST: usize = 5;
/// Work a second of a CPU thread whose rate was not measured.
const CPU: f64 = 30e9;

/// Devices of a search.
#[derive(Clone, Debug)]
pub struct Devices {
    /// Number of ranks, one a device.
    pub count: usize,
    /// Class of the links between them.
    pub link: Link,
    /// Name of the card, or its memory, as `--gpu` has it; `None` for this machine's.
    pub card: Option<String>,
}

/// Rate of the arithmetic of a device, and where it is from.
#[derive(Clone, Debug, Serialize)]
pub struct Arithmetic {
    /// Work (FLOPs of a large product) a second.
    pub rate: f64,
    /// Source in words.
    pub source: String,
}

impl Arithmetic {
    /// The rate measured on this machine, unless another card is named; otherwise an assumption.
    fn of(m: Machine, devices: &Devices, budget: Option<u64>) -> Self {
        let measured = rates::find(m).filter(|r| devices.card.is_none() && r.step > 0.0);
        if let Some(rate) = measured {
            return Self { rate: rate.step, source: "measured by ft bench".into() };
        }
        if !m.cuda {
            let source = "assumed for a thread of a CPU; ft bench measures it".into();
            return Self { rate: CPU * m.threads as f64, source };
        }
        let (name, rate) = card_products(devices.card.as_deref(), budget.unwrap_or(0));
        let source = format!("assumed: {:.0}% of the data sheet of {name}", 100.0 * CostModel::OF_THE_SHEET);
        Self { rate: CostModel::OF_THE_SHEET * rate, source }
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
    /// Number of layouts that fit, of those planned.
    pub fitting: usize,
    pub planned: usize,
    /// Layout and memory of the one that takes the least, if none fits.
    pub least: Option<(Layout, u64)>,
    /// Layouts that the recipe does not allow, with the reason of each kind.
    pub refused: Vec<(usize, String)>,
}

/// Plans every layout of the recipe over the devices, for CUDA if `cuda` is set.
///
/// # Errors
/// As [`crate::of_recipe`].
pub fn layouts_of_recipe(recipe: &Recipe, cuda: bool, devices: Devices) -> ft_base::Result<Layouts> {
    let model = Model::find(recipe)?;
    let room = Capacity::of(machine(recipe, cuda));
    let experts = model.resolved.config.moe.as_ref().map_or(0, |m| m.experts);
    let mut found = Layouts {
        of: format!("{}: {} ({})", recipe.name, recipe.model.source, model.found.from),
        machine: machine(recipe, cuda),
        arithmetic: Arithmetic::of(machine(recipe, cuda), &devices, recipe.memory.budget),
        devices,
        budget: None,
        best: Vec::new(),
        fitting: 0,
        planned: 0,
        least: None,
        refused: Vec::new(),
    };
    for layout in Layout::all(found.devices.count, experts) {
        match applied(recipe, layout) {
            Ok((with, beside)) => {
                let plan = model.plan(&with, cuda, &room)?;
                found.add(layout, beside, &plan);
            }
            Err(why) => found.refuse(why),
        }
    }
    sort(&mut found.best);
    found.best.truncate(BEST);
    Ok(found)
}

/// The recipe in a layout, with other keys that it needs; an error is the reason against it. Micro-batches do not change a
/// result, so that the plan chooses them where the recipe's do not divide.
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
    with(&[]).or_else(|why| if recipe.run.micro_rows == MicroRows::Auto { Err(why) } else { with(&auto).map_err(|_| why) })
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
        let (step_seconds, limit) = time(plan.step_work() / self.arithmetic.rate, wire, self.devices.link);
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
