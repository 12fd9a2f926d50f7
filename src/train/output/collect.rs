//! Parts of a result known only to the ranks with the layers or experts: magnitudes without effect for plain LoRA
//! beside DoRA, and the factors subtracted from the base.

use crate::train::job::Job;
use crate::train::step::command::{self, Command};
use crate::train::step::{Gather, TrainContext};
use candle_core::{Device, Tensor};
use ft_engine::adapters::peft;
use ft_engine::load::{Factors, Initials};
use ft_engine::model::modules::Module;
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::{Hooks, Outline, visit};

/// A tensor by name.
type Named = (String, Tensor);

const AT: CollectiveId = CollectiveId::all("the parts of a result");
/// Names of factors, after those of their modules.
const FACTORS: [&str; 2] = [".lora_A", ".lora_B"];

/// Whether a result has such parts.
fn is_wanted(job: &Job, initials: Option<&Initials>) -> bool {
    peft::needs_neutral(&job.selection) || initials.is_some_and(|i| i.how().changes_base())
}

/// On the first rank: neutral magnitudes of all ranks. Factors of other ranks join the first one's.
///
/// # Errors
/// LoRA on an embedding beside DoRA; device errors; lost rank.
pub fn of_all_ranks(cx: &TrainContext<'_>) -> ft_base::Result<Vec<Named>> {
    let (model, initials) = (cx.model, cx.model.params.initials.as_deref());
    if !is_wanted(cx.job, initials) {
        return Ok(Vec::new());
    }
    if !model.params.split.is_of_part() {
        return neutral(cx, &Gather::leading(&model.decoder, &model.params, cx.comm));
    }
    command::announce(cx.comm, &Command::Collect)?;
    let mut all = neutral(cx, &Gather::new(&model.decoder, &model.params, cx.comm))?;
    for rank in 1..cx.comm.world() {
        all.extend(receive(cx.comm, rank)?);
    }
    let Some(initials) = initials else { return Ok(all) };
    let is_factor = |(name, _): &Named| FACTORS.iter().any(|f| name.ends_with(f));
    let (factors, neutral): (Vec<Named>, Vec<Named>) = all.into_iter().partition(is_factor);
    for pair in factors.as_chunks().0 {
        let [(name, a), (_, b)] = pair;
        let factors = Factors { a: a.clone(), b: b.clone() };
        initials.put(name.strip_suffix(FACTORS[0]).unwrap_or(name), factors);
    }
    Ok(neutral)
}

/// On any other rank: sends the parts of the modules of which it holds the first copy.
///
/// # Errors
/// LoRA on an embedding beside DoRA; device errors; lost rank.
pub fn give(cx: &TrainContext<'_>, gather: &Gather<'_>) -> ft_base::Result<()> {
    let mut own = neutral(cx, gather)?;
    if let Some(initials) = &cx.model.params.initials {
        for (m, _) in cx.job.selection.modules.iter().filter(|(m, _)| is_first(cx, m)) {
            let Some(factors) = initials.subtracted(&m.name) else { continue };
            let named = FACTORS.into_iter().zip([&factors.a, &factors.b]);
            own.extend(named.map(|(end, values)| (format!("{}{end}", m.name), values.clone())));
        }
    }
    let header: Vec<(&str, &[usize])> = own.iter().map(|(name, t)| (name.as_str(), t.dims())).collect();
    let mut values: Vec<u8> = Vec::new();
    for (_, t) in &own {
        values.extend(t.flatten_all()?.to_vec1::<f32>()?.into_iter().flat_map(f32::to_ne_bytes));
    }
    let header = serde_json::to_vec(&header).unwrap_or_default();
    let at = (&[0, cx.comm.rank()][..], AT);
    [header, values].iter().try_for_each(|all| cx.comm.all_gather_bytes_among(at, all, true).map(drop))
}

fn receive(comm: &dyn Comm, rank: usize) -> ft_base::Result<Vec<Named>> {
    let take = || comm.all_gather_bytes_among((&[0, rank], AT), &[], true);
    let [header, values] = [take()?, take()?].map(|mut all| all.pop().unwrap_or_default());
    let header: Vec<(String, Vec<usize>)> = serde_json::from_slice(&header).unwrap_or_default();
    let values: Vec<f32> = values.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
    let mut at = 0;
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let n = shape.iter().product::<usize>();
        let own = values.get(at..at + n).unwrap_or_default();
        at += n;
        Ok((name, Tensor::from_slice(own, shape, &Device::Cpu)?))
    };
    header.into_iter().map(tensor).collect()
}

/// Neutral magnitudes of the modules of which this rank holds the first copy.
fn neutral(cx: &TrainContext<'_>, hooks: &dyn Hooks) -> ft_base::Result<Vec<Named>> {
    let (selection, decoder, mut out) = (&cx.job.selection, &cx.model.decoder, Vec::new());
    if peft::needs_neutral(selection) {
        visit::pass(Outline::of(decoder).forward(), hooks, &mut |unit| {
            out.extend(peft::neutral(selection, decoder, unit, &|m| is_first(cx, m))?);
            Ok(())
        })?;
    }
    Ok(out)
}

/// Whether this rank holds the first copy of a module.
fn is_first(cx: &TrainContext<'_>, m: &Module) -> bool {
    cx.model.params.split.is_first(m, cx.job.config.layers)
}
