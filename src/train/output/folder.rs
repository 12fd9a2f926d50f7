//! Files of a result: a model, or an adapter.

use crate::train::job::Job;
use candle_core::Tensor;
use ft_base::store;
use ft_base::terminal::warn;
use ft_data::Tokenizer;
use ft_engine::adapters::peft::{self, Values};
use ft_engine::adapters::{self, Selection};
use ft_engine::adapters::{Part, Trained};
use ft_engine::files::{TOKENIZER, TOKENIZER_FILES};
use ft_engine::load::layout;
use ft_engine::model::modules::{Group, modules};
use ft_kernels::to_host;
use ft_recipe::{Decomposition, Quantize, Weights};
use std::path::Path;

/// Writes an adapter: PEFT config, tensors, and files of the tokenizer.
pub fn save_adapter(
    job: &Job,
    selection: &Selection,
    what: (&[Trained], &Values<'_>, Vec<(String, Tensor)>),
    out: &Path,
) -> ft_base::Result<()> {
    let revision = job.model.revision.as_deref();
    // No quantization is recorded if the base is 4-bit on disk, because the name of the base implies it, or
    // if the adapter took initial values from the base, because it then applies to the base as published.
    let quantize = if job.config.is_bitsandbytes() || changes_base(job) {
        Quantize::None
    } else {
        job.recipe.model.quantize
    };
    for file in TOKENIZER_FILES {
        match store::copy_inside(&job.model.dir, file, out) {
            // Optional here: the base folder has the tokenizer too.
            Err(e @ (store::Error::Unsafe { .. } | store::Error::Read { .. })) => {
                warn(&format!("not kept with the adapter: {e}"));
            }
            copied => copied?,
        }
    }
    if let Some((file, _)) = job.tokenizer.as_deref().and_then(Tokenizer::with_added) {
        store::write_atomic(&out.join(TOKENIZER), file)?;
    }
    peft::save(out, selection, what, &job.model.source, revision, quantize)
}

/// Returns true if the initial values of the adapter were subtracted from the base.
pub fn changes_base(job: &Job) -> bool {
    job.recipe.lora.init.decomposition().is_some_and(Decomposition::changes_base)
}

/// Writes a whole model: config, companion files, and sharded weights in the compute dtype.
pub fn write_model(
    job: &Job,
    (trained, values): (&[Trained], &Values<'_>),
    out: &Path,
) -> ft_base::Result<()> {
    let find = |name: &str| trained.iter().position(|t| t.name == name);
    let mut entries = Vec::new();
    for m in modules(&job.config) {
        if job.config.tied && m.group == Group::Head {
            continue;
        }
        for part in [Part::Weight, Part::Bias] {
            let name = adapters::tensor_name(&m, part);
            if let Some(i) = find(&name) {
                entries.push((name, job.dtype, trained[i].shape.clone()));
            }
        }
    }
    let load = job.recipe.model.weights == Weights::Load;
    let files = load.then(|| layout::open(&job.config, &job.model.dir)).transpose()?;
    let (folders, raw) = ((job.model.dir.as_path(), out), job.config.raw.clone());
    layout::write((&job.config, files.as_ref()), folders, raw, job.dtype, entries, &mut |name| match find(
        name,
    ) {
        Some(i) => Ok(to_host(&values(i)?)?.to_dtype(job.dtype)?),
        None => Err(candle_core::Error::Msg(format!("{name} does not train")).into()),
    })
}
