//! `ft plan`: a recipe's memory plan.

use crate::cli::args::RecipeArgs;
use crate::cli::console::{print, print_wrapped};
use crate::cli::quickstart;
use crate::infer::usage;
use crate::train::{self, job, sources};
use clap::builder::PossibleValuesParser;
use ft_base::terminal::warn;
use ft_hub::Settings;
use ft_kernels::gemm;
use ft_plan::links::{self, Network};
use ft_plan::{Devices, Layout, Target, card, card_names, card_too_old, rates, resolve};
use ft_recipe::{Device, Recipe};

/// Arguments of `ft plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Card or memory of the device, such as A100-80, 4090 or 48GB; sets run.device and memory.budget
    #[arg(long, value_name = "CARD")]
    gpu: Option<String>,
    /// Print the whole plan: reasons of each choice, host, disks, the textbook's arithmetic
    #[arg(long, conflicts_with = "json")]
    verbose: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Plan layouts over this many devices, and print the fastest that fit: memory, bytes, time, recipe lines
    #[arg(long, value_name = "N", conflicts_with = "verbose", value_parser = clap::value_parser!(u32).range(1..=1024))]
    devices: Option<u32>,
    /// With --devices: the class of the links between them (nvlink 200 GB/s, ib 50, pcie 20, tcp 1); by default as
    /// ft bench --ranks measured them, else pcie
    #[arg(long, value_name = "CLASS", requires = "devices", value_parser = link_names())]
    link: Option<String>,
    /// With --devices: number of cards of a machine [default: 8]
    #[arg(long, value_name = "N", requires = "devices", value_parser = clap::value_parser!(u32).range(1..))]
    machine: Option<u32>,
    /// With --devices: the class of the links of a card to those of other machines [default: ib]
    #[arg(long, value_name = "CLASS", requires = "devices", value_parser = link_names())]
    network: Option<String>,
}

fn link_names() -> PossibleValuesParser {
    PossibleValuesParser::new(links::CLASSES.map(|(name, ..)| name))
}

/// Prints the plan of a recipe; returns an error if it does not fit.
pub fn run(args: &Args) -> ft_base::Result<()> {
    gemm::read_caches_ahead();
    let mut set = args.recipe.set.clone();
    let planned = args.gpu.as_deref().map(|card| gpu("--gpu", card)).transpose()?;
    if let Some((_, budget)) = &planned {
        set.extend(["run.device=cuda".into(), format!("memory.budget={budget}")]);
    }
    let mut recipe = Recipe::load_for_plan(&args.recipe.recipe, &set)?;
    quickstart::provide(&args.recipe.recipe, &recipe, false)?;
    // a plan needs no data: missing sources are ignored
    let unknown = sources::resolve(&Settings { offline: true, ..Settings::from_env() }, &mut recipe, false);
    let mut notes: Vec<String> = recipe.not_built.iter().map(|d| format!("ft run: {}", d.message)).collect();
    // device presence affects free memory and rates only, not the plan
    let here = job::device(recipe.run.device).map(|d| Target::of(&d));
    if recipe.auto_layout && args.devices.is_none() {
        if planned.is_none() && here.is_ok() {
            train::choose_layout(&mut recipe, false)?;
        } else {
            warn(&format!(
                "{}: parallel = \"auto\": this plan is of one card\n  hint: --devices N plans the layouts of N cards",
                recipe.place("parallel")
            ));
        }
    }
    let target = match (&planned, recipe.run.device) {
        (Some((card, _)), _) => Target { cuda: true, card: *card },
        (None, Device::Auto) => here.unwrap_or_default(),
        (None, Device::Cpu) => Target::default(),
        (None, Device::Cuda) => here.unwrap_or(Target::from(true)),
    };
    if let Some(count) = args.devices {
        return layouts(args, &recipe, target, count as usize);
    }
    let cuda = target.cuda;
    notes.extend(train::carries_nothing(&recipe, cuda).map(|(what, _)| format!("ft run: {what}")));
    let (plan, found) = ft_plan::of_recipe(&recipe, target)?;
    found.notes.iter().for_each(|n| warn(n));
    let compute = (cuda, resolve::dtype(recipe.model.dtype, cuda));
    job::tell_idle(&recipe, Some(compute), Some(&found.config), unknown.is_empty());
    let range = rates::predict(plan.machine, found.config.family.model_type, plan.step_work());
    if args.json {
        print(&format!("{:#}\n", plan.json(range)))?;
    } else {
        let of = format!("{}: {} ({})", recipe.name, recipe.model.source, found.from);
        let text = plan.text(&of, range, &notes);
        let details = if args.verbose { format!("\n{}", plan.details(range)) } else { String::new() };
        print_wrapped(&(text + &details))?;
    }
    if plan.fits() { Ok(()) } else { Err(plan.verdict().into()) }
}

/// Prints the fastest layouts over `count` devices.
fn layouts(args: &Args, recipe: &Recipe, target: Target, count: usize) -> ft_base::Result<()> {
    for (key, n) in Layout::of(&recipe.parallel).keys() {
        let key = format!("parallel.{key}");
        let place = recipe.place(&key);
        warn(&format!(
            "{place}: {key} = {n} is not used: --devices {count} searches all layouts of {count} ranks\n  \
             hint: without --devices, ft plan plans the recipe's own layout"
        ));
    }
    let machine = args.machine.map(|n| n as usize);
    let network = Network::find(target, args.link.as_deref(), args.network.as_deref(), machine);
    let found = ft_plan::layouts_of_recipe(recipe, target, Devices { count, network })?;
    if args.json {
        print(&format!("{:#}\n", found.json()))?;
    } else {
        print_wrapped(&found.text())?;
    }
    Ok(found.first().map(drop)?)
}

/// A card given to an option by name or by memory in gigabytes: the name, if known, and the value of `memory.budget`.
pub(super) fn gpu(option: &str, gpu: &str) -> ft_base::Result<(Option<&'static str>, String)> {
    if let Some(why) = card_too_old(gpu) {
        return Err(usage(format!(
            "{option} {gpu}: {why}\n  hint: run.device=cpu, or one of {}",
            card_names()
        )));
    }
    if let Some((name, bytes)) = card(gpu) {
        return Ok((Some(name), bytes.to_string()));
    }
    let digits = gpu.find(|c: char| !c.is_ascii_digit()).unwrap_or(gpu.len());
    match (&gpu[..digits], gpu[digits..].to_ascii_lowercase().as_str()) {
        (n, "gib") if !n.is_empty() => Ok((None, format!("{n}GiB"))),
        (n, "" | "g" | "gb") if n.parse().is_ok_and(|n: u32| (1..1000).contains(&n)) => {
            Ok((None, format!("{n}GB")))
        }
        _ => Err(usage(format!(
            "{option} {gpu}: no such card\n  hint: its memory, such as 48GB, or one of {}",
            card_names()
        ))),
    }
}
