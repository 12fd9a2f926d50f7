//! Checks a checkpoint's tensors against the config.

use super::error::Error;
use crate::files::TensorFiles;
use crate::model::Config;
use crate::model::modules::{Group, Module, constants, modules};
use crate::quant;
use safetensors::Dtype;
use std::collections::BTreeSet;

/// Compares the tensors of a checkpoint with the config. With a score head, it may lack that, and hold the
/// vocabulary's.
///
/// # Errors
/// [`Error`] listing missing, unexpected and misshapen tensors.
pub fn check_tensors(config: &Config, files: &TensorFiles) -> Result<(), Error> {
    let mut problems = Vec::new();
    let mut expected = BTreeSet::new();
    for m in modules(config).into_iter().chain(constants(config)) {
        let mut want = vec![(m.weight_name(), m.weight_shape())];
        if let Some(n) = m.bias() {
            want.push((m.bias_name(), vec![n]));
        }
        for (name, shape) in want {
            expected.insert(name.clone());
            if let (true, &[o, i], Some(parts)) =
                (config.holds_4bit(), shape.as_slice(), quant::find(files, &name))
            {
                problems.extend(quant::problems(files, &name, (o, i)).map(|why| format!("{name}: {why}")));
                expected.extend(parts);
                continue;
            }
            match files.info(&name) {
                None if (config.tied && m.group == Group::Head) || m.is_score() || m.is_constant() => {}
                None if m.group == Group::Head && config.is_tied_inside() => problems.push(format!(
                    "{name}: missing ({shape:?}); tie_word_embeddings of the whole is false\n    \
                     hint: override = {{ tie_word_embeddings = true }} under [model]"
                )),
                None => problems.push(format!("{name}: missing ({shape:?})")),
                Some(i) if i.shape != shape => {
                    problems.push(format!("{name}: {:?} in the file, {shape:?} by config.json", i.shape));
                }
                Some(_) if files.is_scaled(&name) => {}
                Some(i) if i.dtype == Dtype::F8_E4M3 => {
                    problems.push(format!("{name}: F8_E4M3 in the file, without scales that fit it"));
                }
                Some(i) if !matches!(i.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64) => {
                    problems.push(format!("{name}: {} in the file, F32, F16, BF16 or F64 are read", i.dtype));
                }
                Some(_) => {}
            }
        }
    }
    if config.scores.is_some() {
        expected.insert(format!("{}.weight", config.vocabulary_name()));
    }
    for name in files.names() {
        // Buffers saved by old versions of transformers.
        if !expected.contains(name) && !name.ends_with("rotary_emb.inv_freq") && !config.passes(name) {
            problems.push(format!("{name}: unexpected"));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    let (count, shown) = (problems.len(), 20);
    problems.truncate(shown);
    if count > shown {
        problems.push(format!(".. and {} more", count - shown));
    }
    Err(Error {
        place: files.folder(),
        why: format!(
            "{} config.json\n  {}",
            if count == 1 { "1 tensor does not fit".into() } else { format!("{count} tensors do not fit") },
            problems.join("\n  ")
        ),
    })
}

/// Checks a checkpoint of bitsandbytes, by the config, for 4-bit tensors.
///
/// # Errors
/// It has none.
pub(super) fn check_quantized(config: &Config, files: &TensorFiles) -> Result<(), Error> {
    let is_4bit = |m: &Module| quant::find(files, &m.weight_name()).is_some();
    if !config.is_bitsandbytes() || modules(config).iter().any(is_4bit) {
        return Ok(());
    }
    let why = "config.json: quantization_config: bitsandbytes, and no tensor is in 4 bits\n  hint: take the key out of \
               config.json, or fetch the checkpoint in 4 bits";
    Err(Error { place: files.folder(), why: why.into() })
}
