//! Writes a model as a GGUF file, one tensor at a time.

use super::checks::stored;
use super::entries::{Keys, MXFP4, file_type};
use super::names::{MappedTensor, architecture, map_tensors};
use super::{Error, keys, mxfp4, refuse, tokenizer};
use crate::files::{Entry, GgufValue, write_gguf};
use crate::load::Base;
use crate::model::modules::Module;
use crate::quant::{CodeTables, MXFP4_BLOCK};
use candle_core::{DType, Device, Tensor};
use ft_base::terminal::{tell, warn};
use std::collections::HashMap;
use std::path::Path;

/// Source of a tensor of the file.
struct Source<'a> {
    mapped: &'a MappedTensor,
    bias: bool,
    dtype: DType,
}

/// Writes the model in `dir`, opened as `base`, to `path`. Matrices are written in `dtype`, or in MXFP4 if the model
/// has them so; norms, biases and routers in f32, as llama.cpp requires. `pre` overrides llama.cpp's name of the
/// pre-tokenizer. `progress` receives the bytes of every tensor.
///
/// # Errors
/// A model or tokenizer that llama.cpp reads differently; values beyond f16's range; a full disk.
pub fn write_model(
    base: &Base,
    dir: &Path,
    name: &str,
    dtype: DType,
    pre: Option<&str>,
    path: &Path,
    progress: &dyn Fn(u64),
) -> ft_base::Result<()> {
    base.check()?;
    let config = &base.config;
    let mapped = map_tensors(config)?;
    let architecture = architecture(config)?;
    stored(config, architecture)?;
    let (of_config, divisors) = keys::of_config(config)?;
    let (title, of_tokenizer) = tokenizer::keys(dir, config, (name, pre))?;
    let mut all: Keys = vec![
        ("general.architecture".into(), architecture.into()),
        ("general.type".into(), "model".into()),
        ("general.name".into(), GgufValue::Text(title)),
        (
            "general.file_type".into(),
            GgufValue::U32(file_type(if config.is_mxfp4() { MXFP4 } else { dtype })),
        ),
        ("general.quantization_version".into(), GgufValue::U32(2)),
    ];
    all.extend(keys::of_sampling(&keys::object(dir, "generation_config.json")?));
    all.extend(of_config);
    all.extend(of_tokenizer);
    let window = keys::context(config);
    if window < config.max_positions {
        warn(&format!(
            "llama.cpp has no sliding windows for this family: the context in the file is {window} tokens, the window, \
             up to which it makes no difference"
        ));
    }

    let (mut entries, sources) = tensors(base, &mapped, dtype);
    entries.extend(divisors.iter().map(|(name, all)| ((*name).into(), DType::F32, vec![all.len()])));
    let mut books = CodeTables::new(&Device::Cpu)?;
    write_gguf(path, &all, &entries, |name| {
        let tensor = match (sources.get(name), divisors.iter().find(|(own, _)| *own == name)) {
            (Some(source), _) => tensor(base, source, &mut books)?,
            (None, Some((_, all))) => Tensor::new(all.as_slice(), &Device::Cpu)?,
            (None, None) => return Err(candle_core::Error::Msg(format!("{name} has no source")).into()),
        };
        progress((tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64);
        Ok(tensor)
    })?;
    tell(&format!("{} tensors, {} keys", entries.len(), all.len()));
    Ok(())
}

/// Entries of the tensors of the file, and their sources by name.
fn tensors<'a>(
    base: &Base,
    mapped: &'a [MappedTensor],
    dtype: DType,
) -> (Vec<Entry>, HashMap<String, Source<'a>>) {
    let mut entries: Vec<Entry> = Vec::new();
    let mut sources = HashMap::new();
    let lacks =
        |m: &Module| m.is_constant() && base.files().is_none_or(|f| f.info(&m.weight_name()).is_none());
    for p in mapped {
        let Some(first) = p.modules.first().filter(|m| !lacks(m)) else { continue };
        let stacked = |shape: Vec<usize>| match p.modules.len() {
            1 if first.expert.is_none() => shape,
            n => [vec![n], shape].concat(),
        };
        let of = match p.in_f32 {
            true => DType::F32,
            false if first.is_mxfp4() => MXFP4,
            false => dtype,
        };
        let mut shape = p.shape(first.weight_shape());
        if of == MXFP4 {
            shape.iter_mut().skip(1).for_each(|n| *n = *n / MXFP4_BLOCK * mxfp4::BYTES);
        }
        entries.push((p.full_name(false), of, stacked(shape)));
        sources.insert(p.full_name(false), Source { mapped: p, bias: false, dtype: of });
        if let Some(n) = first.bias() {
            entries.push((p.full_name(true), DType::F32, stacked(p.shape(vec![n]))));
            sources.insert(p.full_name(true), Source { mapped: p, bias: true, dtype: DType::F32 });
        }
    }
    (entries, sources)
}

fn tensor(base: &Base, source: &Source<'_>, books: &mut CodeTables) -> ft_base::Result<Tensor> {
    let parts: Vec<Tensor> = source
        .mapped
        .modules
        .iter()
        .map(|m| match base.files() {
            Some(files) if source.dtype == MXFP4 => mxfp4::blocks(files, m, &source.mapped.changes),
            _ => Ok(source.mapped.changed(&read(base, m, source, books)?)?),
        })
        .collect::<ft_base::Result<_>>()?;
    match &parts[..] {
        [one] if source.mapped.modules[0].expert.is_none() => Ok(one.clone()),
        all => Ok(Tensor::stack(all, 0)?),
    }
}

/// Reads a weight or bias, dequantized if 4-bit.
fn read(base: &Base, m: &Module, source: &Source<'_>, books: &mut CodeTables) -> ft_base::Result<Tensor> {
    let dtype = source.dtype;
    let name = if source.bias { m.bias_name() } else { m.weight_name() };
    let Some(files) = base.files() else {
        return Err(Error { place: name, why: "a model of random weights has no files".into() }.into());
    };
    let value = match base.four_bit(m).filter(|_| !source.bias) {
        Some(how) => {
            base.codes((m, 0), how, DType::F32, books)?.dequantize()?.to_dtype(dtype)?.real()?.clone()
        }
        // Values beyond f16's range are finite in the file.
        None if dtype == DType::F16 => files.tensor(&name, DType::F32, &Device::Cpu)?.to_dtype(dtype)?,
        None => files.tensor(&name, dtype, &Device::Cpu)?,
    };
    if dtype == DType::F16 {
        let most = value.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?;
        if !most.is_finite() {
            return Ok(refuse(name, "has values beyond f16's range\n  hint: --dtype bf16, or f32")?);
        }
    }
    Ok(value)
}
