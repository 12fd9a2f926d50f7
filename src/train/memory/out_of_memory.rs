//! Out-of-memory reports: the failed allocation, the bytes wanted and free, and the figures of the plan.
//!
//! On CUDA, a failed allocation returns an error without a size, so the report takes the size from the
//! allocations listed in the plan. On the CPU, the standard library would abort the process without a
//! message, so the allocator calls a hook of this module. An overcommitting system kills the process from
//! outside, without any chance to report; plans therefore stay within available memory.

use ft_base::device_error::DeviceError;
use ft_base::error::{Error, ExitCode};
use ft_base::memory;
use ft_base::memory::place;
use ft_base::terminal::tell;
use ft_plan::{Allocation, Component, Phase, Plan, report};
use std::fmt::Write;
use std::sync::{Arc, Mutex};

/// Plan of the current run, for the allocator hook.
static PLANNED: Mutex<Option<Arc<Planned>>> = Mutex::new(None);

/// A plan with the list of allocations.
#[derive(Debug)]
pub struct Planned {
    pub(super) plan: Plan,
    listed: Vec<Allocation>,
}

/// Reports failed allocations of this process and exits with an error code, in place of an abort.
pub fn tell_failures() {
    memory::on_failure(failed);
}

/// Stores a plan for reports of later allocation failures.
pub fn remember(plan: Plan, listed: Vec<Allocation>) -> Arc<Planned> {
    let planned = Arc::new(Planned { plan, listed });
    if let Ok(mut p) = PLANNED.lock() {
        *p = Some(Arc::clone(&planned));
    }
    planned
}

/// Allocator hook: reports a failed allocation of `wanted` bytes and exits.
fn failed(wanted: u64) -> ! {
    let planned = PLANNED.try_lock().ok().and_then(|p| p.clone());
    let free = memory::available_bytes();
    let text = match planned {
        Some(p) => {
            let at = place::now();
            p.say(at, p.nearest(at, Some(wanted), free), Some(wanted), free)
        }
        None => wanted_of(wanted, "", free),
    };
    tell(&format!("error: {text}"));
    ExitCode::DoesNotFit.end_process()
}

fn wanted_of(wanted: u64, what: &str, free: Option<u64>) -> String {
    let free = free.map_or(String::new(), |f| format!(", and {} are free", report::bytes(f)));
    format!("out of memory: {} were wanted{what}{free}", report::bytes(wanted))
}

impl Planned {
    /// Adds the figures of the plan to an out-of-memory error, and the place in the walk to another error of a device.
    pub fn explain(&self, e: Error) -> Error {
        let at = place::now();
        let fault = e.of::<DeviceError>();
        if let Some(fault) = fault {
            fault.set_place(report::place_of(at.0, at.1, self.plan.layers));
        }
        // Skips errors already explained, here or on another rank.
        let explained = e.of::<ft_plan::Error>().is_some() || e.of::<ft_engine::ranks::Error>().is_some();
        if e.exit_code() != ExitCode::DoesNotFit || explained {
            return e;
        }
        let free = ft_kernels::cuda::cuda_memory().map(|(free, _)| free);
        let found = self.nearest(at, None, free).filter(|_| !fault.is_some_and(DeviceError::is_of_library));
        let said = self.say(at, found, None, free);
        ft_plan::Error::DoesNotFit(format!("{said}\n  the device said: {e}")).into()
    }

    /// Describes a failed allocation at a phase and unit, most likely `found` of the plan.
    fn say(
        &self,
        at: (Phase, usize),
        found: Option<Allocation>,
        wanted: Option<u64>,
        free: Option<u64>,
    ) -> String {
        let plan = &self.plan;
        let place = report::place_of(at.0, at.1, plan.layers);
        let what = match found {
            Some(l) => format!(" for {} in {place}", l.component.label()),
            None => format!(" in {place}"),
        };
        let mut s = match (wanted, found) {
            (Some(n), _) => wanted_of(n, &what, free),
            (None, Some(l)) => wanted_of(l.bytes, &format!("{what}, by the plan"), free),
            (None, None) => {
                let free = free.map_or(String::new(), |f| format!("; {} are free", report::bytes(f)));
                format!("out of memory{what}{free}")
            }
        };
        let _ = write!(
            s,
            "\nthe plan had said {} at its peak, in {}; {} in this phase",
            report::bytes(plan.total()),
            report::place(&plan.peak, plan.layers),
            report::bytes(plan.peak.phases[at.0 as usize]),
        );
        let mut parts: Vec<(Component, u64)> = plan.peak.bytes.iter().collect();
        parts.sort_by_key(|(_, b)| std::cmp::Reverse(*b));
        for (c, b) in parts.iter().take(4) {
            let _ = write!(s, "\n  {}: {}", c.label(), report::bytes(*b));
        }
        let largest = parts.first().map(|p| p.0);
        if let Some(c) = found.map(|l| l.component).or(largest) {
            let _ = write!(s, "\nhint: to change: {}", c.keys_to_change());
        }
        if plan.execution.recompute.all < plan.walked {
            s.push_str(
                "\nhint: memory.recompute=all keeps the least; memory.budget says what there really is",
            );
        }
        s
    }

    /// Finds the most likely entry of the plan for a failed allocation. If the size is known, this is the
    /// nearest size within 10%; otherwise the smallest one larger than the free memory, or else the
    /// largest.
    fn nearest(&self, at: (Phase, usize), wanted: Option<u64>, free: Option<u64>) -> Option<Allocation> {
        let here = || self.listed.iter().filter(|l| (l.phase, l.unit) == at).copied();
        match (wanted, free) {
            (Some(n), _) => {
                let near = here().min_by_key(|l| l.bytes.abs_diff(n))?;
                // Sizes more than 10% apart belong to another allocation.
                (near.bytes.abs_diff(n) <= n / 10).then_some(near)
            }
            (None, Some(free)) => {
                let over = here().filter(|l| l.bytes > free).min_by_key(|l| l.bytes);
                over.or_else(|| here().max_by_key(|l| l.bytes))
            }
            (None, None) => here().max_by_key(|l| l.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_recipe::Recipe;

    fn planned() -> anyhow::Result<Planned> {
        let text = "[model]\nsource = \"Qwen/Qwen3-0.6B\"\n[[train]]\nmodules = [\"mlp\"]\n\
                    [[data.train]]\nsource = \"d.jsonl\"\nformat = \"text\"\n";
        let set = ["memory.recompute=none".to_string(), "memory.budget=1TiB".into()];
        let recipe = Recipe::parse(text, "r.toml", &set)?;
        let (plan, _) = ft_plan::of_recipe(&recipe, true)?;
        let listed = |unit, component, bytes| Allocation { phase: Phase::Forward, unit, component, bytes };
        let list = vec![
            listed(3, Component::Activations, 1 << 20),
            listed(3, Component::Workspace, 5 << 20),
            listed(3, Component::Logits, 9 << 20),
            listed(4, Component::Batch, 5 << 20),
        ];
        Ok(Planned { plan, listed: list })
    }

    #[test]
    fn a_failed_allocation_is_named_by_its_size_and_place() -> anyhow::Result<()> {
        let p = planned()?;
        let at = (Phase::Forward, 3);
        let say = |wanted, free| p.say(at, p.nearest(at, Some(wanted), free), Some(wanted), free);
        let text = say((5 << 20) + 100, Some(2 << 20));
        for said in [
            "5.00 MiB were wanted for workspace in forward of layer 2, and 2.00 MiB are free",
            "the plan had said",
            "hint: to change: data.max_length or run.micro_rows",
            "memory.recompute=all",
        ] {
            assert!(text.contains(said), "{said:?} is not in {text}");
        }
        // No listed allocation has this size.
        assert!(say(3 << 20, None).contains("3.00 MiB were wanted in forward of layer 2\n"));
        Ok(())
    }

    #[test]
    fn an_allocation_of_unknown_size_is_explained_by_the_plan() -> anyhow::Result<()> {
        let p = planned()?;
        let at = (Phase::Forward, 3);
        assert_eq!(p.nearest(at, None, Some(4 << 20)).map(|l| l.component), Some(Component::Workspace));
        assert_eq!(p.nearest(at, None, Some(90 << 20)).map(|l| l.component), Some(Component::Logits));
        assert!(p.nearest((Phase::Step, 0), None, None).is_none());
        let e = Error::from(candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)".into()));
        // Training tests move the position of the process; a rank other than 0 has its own.
        let explain = || {
            place::follow();
            place::enter(Phase::Forward, 4);
            p.explain(e)
        };
        let e = std::thread::scope(|s| s.spawn(explain).join()).expect("no panic");
        assert_eq!(e.exit_code(), ExitCode::DoesNotFit);
        assert!(e.to_string().contains("5.00 MiB were wanted for micro-batch in forward of layer 3"), "{e}");
        let other = p.explain(Error::from(candle_core::Error::Msg("shapes".into())));
        assert_eq!(other.exit_code(), ExitCode::Internal);
        Ok(())
    }
}
