//! A checkpoint in NF4: `ft quantize`, and the cache of `model.quantize`.

use super::Job;
use super::identity::model_hash;
use super::output::write_folder;
use crate::adapt::build::check_tensors;
use crate::adapt::layout;
use crate::log::bytes_bar;
use crate::model::Config;
use crate::model::modules::{Group, Module, modules};
use crate::quant::{self, Error};
use crate::recipe::{Quantize, Weights};
use crate::store::{self, RunLock, TensorFiles};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Says of a folder that `ft` made it as a cache, and of what.
pub(crate) const MARKER: &str = "ft-cache.json";

/// What quantizing a model gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Linears that are 4-bit now.
    pub linears: usize,
    /// Values in them.
    pub values: u64,
    /// Bits a value, codes and scales, the tables apart.
    pub bits: f64,
    /// Bytes of all weights written.
    pub bytes: u64,
}

/// Writes the model of `source` in NF4 to the folder `out`, which must not be there or be empty: linears of the
/// decoder in blocks of 64, their scales in 8 bits with `double`; everything else as it is.
///
/// The model is read twice, for scales and for codes, and is never in memory: only scales are, and one tensor.
///
/// # Errors
/// A model that is 4-bit already, tensors that do not fit the config or are not finite, a disk that is full. The
/// folder appears when it is whole.
pub fn quantize(config: &Config, source: &Path, out: &Path, double: bool) -> crate::Result<Report> {
    if out.is_file() || std::fs::read_dir(out).is_ok_and(|mut d| d.next().is_some()) {
        let why = "is not empty\n  hint: another --out, or remove it".into();
        return Err(Error::Folder { dir: out.display().to_string(), why }.into());
    }
    whole(out, &mut |dir| fill(config, source, dir, double))
}

/// Makes a folder that is whole or absent: filled under another name beside it, then renamed.
fn whole<R>(out: &Path, fill: &mut dyn FnMut(&Path) -> crate::Result<R>) -> crate::Result<R> {
    let Some(name) = out.file_name() else {
        let why = "is not the name of a folder".into();
        return Err(Error::Folder { dir: out.display().to_string(), why }.into());
    };
    let draft = out.with_file_name(format!(".ft-{}.tmp", name.to_string_lossy()));
    let fail = |what, path: &Path| {
        let path = path.to_path_buf();
        move |e| store::Error::write(what, &path, None, e)
    };
    // a process that died in the middle left its draft: the lock says that nobody is at work there
    let lock = RunLock::take(&draft)?;
    let left = std::fs::read_dir(&draft).map_err(fail("list", &draft))?;
    for entry in left.flatten().filter(|e| e.file_name() != ".lock") {
        std::fs::remove_file(entry.path()).map_err(fail("remove", &entry.path()))?;
    }
    let result = fill(&draft)?;
    std::fs::remove_file(draft.join(".lock")).map_err(fail("remove", &draft))?;
    if out.exists() {
        std::fs::remove_dir_all(out).map_err(fail("replace", out))?;
    }
    std::fs::rename(&draft, out).map_err(fail("rename to", out))?;
    drop(lock);
    store::sync_folder(store::folder_of(out))?;
    Ok(result)
}

/// The weights that a module brings to a checkpoint.
fn names(m: &Module) -> impl Iterator<Item = String> {
    let bias = m.bias().map(|_| format!("{}.bias", m.name));
    std::iter::once(format!("{}.weight", m.name)).chain(bias)
}

fn fill(config: &Config, source: &Path, out: &Path, double: bool) -> crate::Result<Report> {
    if config.four_bit {
        return Err(Error::Already { dir: source.display().to_string() }.into());
    }
    let files = layout::open(config, source)?;
    check_tensors(config, &files)?;
    let mut report = Report { linears: 0, values: 0, bits: 0.0, bytes: 0 };
    let (mut entries, mut ready, mut code_and_scale_bytes) = (Vec::new(), HashMap::new(), 0u64);
    let bar = bytes_bar("scales", files.total_bytes());
    for m in modules(config) {
        for name in names(&m).filter(|n| files.info(n).is_some()) {
            let info = files.get(&name)?;
            if !quant::takes(&m) || name.ends_with(".bias") {
                entries.push((name, own_dtype(&files, info)?, info.shape.clone()));
                continue;
            }
            let e = quant::scales(&files, &name)?;
            bar.inc(info.bytes());
            report.linears += 1;
            report.values += info.elements() as u64;
            for part in quant::entries(&name, e.dims, e.source, &e.scales, double)? {
                let table = part.name.ends_with("_map") || part.name.contains(".quant_state.");
                let bytes = part.shape.iter().product::<usize>() * part.dtype.size_in_bytes();
                code_and_scale_bytes += if table { 0 } else { bytes as u64 };
                entries.push((part.name.clone(), part.dtype, part.shape));
                ready.extend(part.value.map(|v| (part.name, v)));
            }
        }
    }
    bar.finish_and_clear();
    report.bits = 8.0 * code_and_scale_bytes as f64 / report.values.max(1) as f64;
    let size =
        |(_, d, s): &(String, DType, Vec<usize>)| (s.iter().product::<usize>() * d.size_in_bytes()) as u64;
    report.bytes = entries.iter().map(size).sum();

    let mut raw = config.raw.clone();
    raw.insert("quantization_config".into(), quantization_config(config, double));
    let dtype = own_dtype(&files, files.get("model.embed_tokens.weight")?)?;
    let codes: HashMap<String, Vec<usize>> =
        entries.iter().filter(|(_, d, _)| *d == DType::U8).map(|(n, _, s)| (n.clone(), s.clone())).collect();
    let bar = bytes_bar("quantizing", files.total_bytes());
    write_folder(source, out, raw, dtype, &entries, &mut |name| {
        if let Some(value) = ready.remove(name) {
            return Ok(value);
        }
        bar.inc(files.get(name)?.bytes());
        match codes.get(name) {
            Some(shape) => {
                let packed = quant::from_files(&files, name)?.packed;
                Ok(Tensor::from_vec(packed, shape.as_slice(), &Device::Cpu)?)
            }
            None => Ok(files.tensor(name, own_dtype(&files, files.get(name)?)?, &Device::Cpu)?),
        }
    })?;
    bar.finish_and_clear();
    Ok(report)
}

/// The dtype that a tensor has in its file.
fn own_dtype(files: &TensorFiles, info: &store::TensorInfo) -> Result<DType, Error> {
    match info.dtype {
        safetensors::Dtype::F64 => Ok(DType::F64),
        safetensors::Dtype::F32 => Ok(DType::F32),
        safetensors::Dtype::F16 => Ok(DType::F16),
        safetensors::Dtype::BF16 => Ok(DType::BF16),
        other => {
            let name = files.names().find(|n| files.info(n) == Some(info)).unwrap_or_default();
            Err(Error::Dtype { name: name.into(), dtype: other.to_string() })
        }
    }
}

/// What transformers reads to load the model with bitsandbytes.
fn quantization_config(config: &Config, double: bool) -> Value {
    // what stays as it is; transformers would leave out the head alone
    let routers = modules(config).into_iter().filter(|m| m.group == Group::Router).map(|m| m.name);
    let skip: Vec<String> = std::iter::once("lm_head".to_string()).chain(routers).collect();
    json!({
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skip,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "quant_method": "bitsandbytes",
    })
}

/// The folder of `model.cache`, made now if it is not there or is of another model; `None` where the recipe
/// names none, or there is nothing to quantize.
pub(super) fn cached(job: &Job) -> crate::Result<Option<PathBuf>> {
    let m = &job.recipe.model;
    let Some(dir) = &m.cache else { return Ok(None) };
    if m.quantize == Quantize::None || m.weights == Weights::Random || job.config.four_bit {
        return Ok(None);
    }
    let dir = job.recipe.resolve(&dir.to_string_lossy());
    let want = json!({"version": 1, "type": "nf4", "double": true, "source": model_hash(job)?});
    let marker = dir.join(MARKER);
    let found = store::read_plain(&marker, store::LARGEST)
        .ok()
        .and_then(|b| serde_json::from_slice::<Value>(&b).ok());
    if found.as_ref() == Some(&want) {
        return Ok(Some(dir));
    }
    if found.is_none() && (dir.is_file() || std::fs::read_dir(&dir).is_ok_and(|mut d| d.next().is_some())) {
        let why = format!("is not empty and has no {MARKER}\n  hint: model.cache names a folder of its own");
        return Err(Error::Folder { dir: dir.display().to_string(), why }.into());
    }
    whole(&dir, &mut |draft| {
        let report = fill(&job.config, &job.model.dir, draft, true)?;
        let text = format!("{want:#}\n");
        store::write_atomic(&draft.join(MARKER), text.as_bytes())?;
        crate::log::tell(&format!("{} linears in 4 bits are kept in {}", report.linears, dir.display()));
        Ok(())
    })?;
    Ok(Some(dir))
}

#[cfg(test)]
#[path = "quantize_tests.rs"]
mod tests;
