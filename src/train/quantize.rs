//! Checkpoints in NF4: `ft quantize`, and the cache of `model.quantize`.

use super::Job;
use super::identity::model_hash;
use super::output::{is_of_model, write_folder};
use candle_core::{DType, Device, Tensor};
use ft_base::store::{self, NewFolder, hash};
use ft_base::terminal::{bytes_bar, tell, warn};
use ft_engine::base::{check_tensors, layout};
use ft_engine::files::{FileHash, TensorFiles};
use ft_engine::model::Config;
use ft_engine::model::modules::{Group, Module, modules};
use ft_engine::quant::{self, CACHE_MARKER, Error};
use ft_recipe::{Quantize, Weights};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Result of a quantization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Number of quantized linear layers.
    pub linears: usize,
    /// Number of values in quantized layers.
    pub values: u64,
    /// Bits per value, for codes and scales, without tables.
    pub bits: f64,
    /// Size of all weights written, in bytes.
    pub bytes: u64,
}

/// Quantizes the model in `source` to NF4 and writes it to `out`, a missing or empty folder. Linear layers
/// of the decoder are quantized in blocks of 64, with 8-bit scales if `double`; other tensors are copied.
///
/// Reads the model twice, once for scales and once for codes. Memory holds all scales and one tensor.
///
/// # Errors
/// Model in 4 bits already; misshaped or non-finite tensors; full disk. On error, `out` is not created.
pub fn quantize(config: &Config, source: &Path, out: &Path, double: bool) -> ft_base::Result<Report> {
    let new = NewFolder::begin_named(out)?;
    new.refuse_occupied("another --out, or remove it")?;
    let report = fill(config, source, &new.path(), double)?;
    new.commit()?;
    Ok(report)
}

/// Names of the tensors of a module in a checkpoint.
fn names(m: &Module) -> impl Iterator<Item = String> {
    let bias = m.bias().map(|_| format!("{}.bias", m.name));
    std::iter::once(format!("{}.weight", m.name)).chain(bias)
}

fn fill(config: &Config, source: &Path, out: &Path, double: bool) -> ft_base::Result<Report> {
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

/// Dtype of a tensor on disk.
fn own_dtype(files: &TensorFiles, info: &ft_engine::files::TensorInfo) -> Result<DType, Error> {
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

/// The `quantization_config` read by transformers and bitsandbytes.
fn quantization_config(config: &Config, double: bool) -> Value {
    // Modules to skip. By default, transformers skips only the head.
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

/// Contents of [`CACHE_MARKER`]: source and files of a cache.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Made {
    version: u32,
    #[serde(rename = "type")]
    kind: String,
    double: bool,
    /// Hash of the source model.
    source: String,
    /// Name, size and BLAKE3 hash of config and weight files, sorted.
    files: Vec<FileHash>,
}

/// The 4-bit copy of a model, loaded from the files that were hashed.
type Cached = (Config, TensorFiles);

/// State of a cache folder.
enum Found {
    /// A whole copy of this model.
    Whole(Box<Cached>),
    /// A modified or truncated cache, with the reason.
    Damaged(String),
    /// No cache, or a cache of another model or version.
    None,
}

impl Made {
    /// Marker for a new cache, with an empty list of files.
    fn new(source: String) -> Self {
        Self { version: 2, kind: "nf4".into(), double: true, source, files: Vec::new() }
    }

    /// Opens the cache in a folder if it was made from this model.
    ///
    /// # Errors
    /// A folder with other contents.
    fn find(&self, dir: &Path, overrides: &Map<String, Value>) -> ft_base::Result<Found> {
        let is_there = |path: &Path| path.symlink_metadata().is_ok();
        if !is_there(&dir.join(CACHE_MARKER)) {
            let empty = std::fs::read_dir(dir).is_ok_and(|mut d| d.next().is_none());
            if empty || !is_there(dir) {
                return Ok(Found::None);
            }
            let why = format!(
                "is not empty and has no {CACHE_MARKER}\n  hint: model.cache names a folder of its own"
            );
            return Err(Error::Folder { dir: dir.display().to_string(), why }.into());
        }
        let bytes = match store::read_inside(dir, CACHE_MARKER, MARKER_BYTES) {
            Ok(bytes) => bytes,
            Err(e) => return Ok(Found::Damaged(e.to_string())),
        };
        let Ok(made) = serde_json::from_slice::<Value>(&bytes) else {
            return Ok(Found::Damaged(format!("{CACHE_MARKER} is not what was written")));
        };
        let other = |key: &str, want: Value| made[key] != want;
        if other("version", json!(self.version))
            || other("type", json!(self.kind))
            || other("double", json!(self.double))
            || other("source", json!(self.source))
        {
            return Ok(Found::None);
        }
        let Ok(made) = serde_json::from_value::<Made>(made) else {
            return Ok(Found::Damaged(format!("{CACHE_MARKER} is not what was written")));
        };
        Ok(match open_copy(dir, overrides) {
            Ok((copy, files)) if files == made.files => Found::Whole(Box::new(copy)),
            Ok((_, files)) => {
                let wrong = files.iter().find(|f| !made.files.contains(f)).map_or("a file", |f| f.0.as_str());
                Found::Damaged(format!("{wrong} is not what was written (its hash differs)"))
            }
            Err(e) => Found::Damaged(e.to_string()),
        })
    }
}

/// Maximum size of a marker, with one line per weight file.
const MARKER_BYTES: u64 = 16 << 20;

/// Opens a copy and hashes the files.
fn open_copy(dir: &Path, overrides: &Map<String, Value>) -> ft_base::Result<(Cached, Vec<FileHash>)> {
    const CONFIG: &str = "config.json";
    let (hash, bytes) = hash::of_inside(dir, CONFIG)?;
    let config = Config::load(dir, overrides)?;
    let files = TensorFiles::open_model(dir)?;
    let mut all = files.hashes()?;
    all.push((CONFIG.into(), bytes, hash));
    all.sort();
    Ok(((config, files), all))
}

/// Opens the 4-bit copy of the model in `model.cache`, and writes it first if it is missing, damaged, or of
/// another model. Returns `None` without a cache in the recipe or if nothing is quantized. With several
/// processes, one writes and the others wait.
pub(super) fn cached(job: &Job) -> ft_base::Result<Option<Cached>> {
    let m = &job.recipe.model;
    let Some(dir) = &m.cache else { return Ok(None) };
    if m.quantize == Quantize::None || m.weights == Weights::Random || job.config.four_bit {
        return Ok(None);
    }
    let dir = job.recipe.resolve(&dir.to_string_lossy());
    let shown = dir.display();
    // Removes drafts of killed processes.
    NewFolder::sweep_beside(&dir);
    let mut made = Made::new(model_hash(job)?);
    if let Found::Whole(copy) = made.find(&dir, &m.overrides)? {
        return Ok(Some(*copy));
    }
    let new = NewFolder::begin_in_turn(&dir, &|holder| {
        let who = holder.map_or(String::new(), |h| format!(" ({h})"));
        tell(&format!("waiting for another ft process{who}, which is writing {shown}"));
    })?;
    match made.find(&dir, &m.overrides)? {
        Found::Whole(copy) => return Ok(Some(*copy)),
        Found::Damaged(why) => warn(&format!("{shown}: {why}\n  it is made again from the model")),
        Found::None => {}
    }
    let report = fill(&job.config, &job.model.dir, &new.path(), true)?;
    let (copy, files) = open_copy(&new.path(), &m.overrides)?;
    made.files = files;
    let text = serde_json::to_string_pretty(&made).unwrap_or_default() + "\n";
    store::write_atomic(&new.path().join(CACHE_MARKER), text.as_bytes())?;
    new.replace(&is_of_model)?;
    tell(&format!("{} linears in 4 bits are kept in {shown}", report.linears));
    Ok(Some(copy))
}

#[cfg(test)]
#[path = "quantize_tests.rs"]
mod tests;
