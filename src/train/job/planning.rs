//! Memory plans of a job.

use super::job::Job;
use crate::train::Error;
use candle_core::Device;
use ft_base::memory;
use ft_kernels::fp8;
use ft_plan::{Allocation, Capacity, Inputs, Plan, Resolved, Target, Workload, Workloads};
use ft_recipe::{Products, Recipe};

/// Refuses products of 8-bit floats on a card or driver without them. The plan refuses those of the CPU.
pub fn check_products(recipe: &Recipe, device: &Device) -> Result<(), Error> {
    if recipe.memory.products != Products::Fp8 || device.is_cpu() {
        return Ok(());
    }
    fp8::check(device).map_err(|why| {
        let why = format!("memory.products = \"fp8\": {why}\n  hint: memory.products = \"dtype\"");
        Error::at(recipe, "memory.products", why)
    })
}

impl Job {
    fn plan_inputs<'a>(&'a self, workloads: &'a Workloads<'a>) -> ft_base::Result<Inputs<'a>> {
        let place = (Target::of(&self.device), Some(self.model.dir.as_path()));
        let model = (&self.config, &self.selection);
        check_products(&self.recipe, &self.device)?;
        Resolved::inputs(&self.recipe, model, place, workloads, memory::reach_bytes())
    }

    /// Plans this job. `count` computes the workload for a recipe, as [`Workload::of_data`] does.
    pub fn plan(&self, count: impl Fn(&Recipe) -> Workload) -> ft_base::Result<Plan> {
        self.planned(&Workloads::new(count), true)
    }

    /// Plans the same workload with less memory than `plan`, by one sixteenth if possible. Returns `None`
    /// if no execution needs less.
    pub fn smaller(&self, plan: &Plan) -> Option<Plan> {
        let workload = plan.workload;
        let workloads = Workloads::new(|_| workload);
        let less = plan.total() - plan.total() / 16;
        let found = Plan::new(&Inputs { budget: Some(less), ..self.plan_inputs(&workloads).ok()? }).ok()?;
        // The new plan may offload layer inputs to the host.
        let (budget, mut space) = (plan.budget, plan.space.clone());
        space.host.clone_from(&found.space.host);
        (found.total() < plan.total()).then_some(Plan { budget, space, hints: Vec::new(), ..found })
    }

    /// As [`Job::plan`], for runs without checkpoints and result.
    pub fn plan_without_files(&self, count: impl Fn(&Recipe) -> Workload) -> ft_base::Result<Plan> {
        self.planned(&Workloads::new(count), false)
    }

    fn planned(&self, workloads: &Workloads<'_>, writes: bool) -> ft_base::Result<Plan> {
        let inputs = self.plan_inputs(workloads)?;
        let mut plan = Plan::new(&inputs)?;
        if !writes {
            plan.space.files.clear();
        }
        plan.space.model(&self.recipe, &self.config, &self.selection, true);
        let room = Capacity::of(inputs.machine);
        plan.advise(&inputs, &room);
        plan.look(&self.recipe, &room);
        Ok(plan)
    }

    /// Lists the planned allocations by phase and unit.
    pub fn allocations(&self, plan: &Plan) -> Vec<Allocation> {
        let planned = plan.workload;
        // Only used in out-of-memory reports, so errors of the plan are ignored.
        let workloads = Workloads::new(|_| planned);
        let inputs = self.plan_inputs(&workloads);
        inputs.and_then(|i| ft_plan::allocations(&i, &plan.execution)).unwrap_or_default()
    }
}
