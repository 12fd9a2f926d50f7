//! `ft export --to gguf`: a model or an adapter for llama.cpp.

use crate::cli::console::print;
use crate::infer::base::{BASE_OPTION, base_of, fetch_model, refuse_scores};
use crate::infer::{Source, usage};
use crate::train::job;
use candle_core::{DType, Device};
use ft_base::store::{self, AtomicFolder};
use ft_base::terminal::{bytes_bar, tell};
use ft_engine::adapters::Adapter;
use ft_engine::export::gguf;
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_hub::{ModelDir, Want};
use ft_recipe::Dtype;
use serde_json::Map;
use std::path::Path;

/// Writes `adapter.gguf` or `model.gguf` into a new folder, reads the header back, and prints the file.
///
/// # Errors
/// A missing source; features unsupported by llama.cpp; a nonempty folder.
pub(super) fn run(
    named: &str,
    out: &Path,
    base: Option<&str>,
    dtype: Option<Dtype>,
    pre: Option<&str>,
) -> ft_base::Result<()> {
    let new = AtomicFolder::begin_named(out)?;
    new.refuse_occupied("another folder")?;
    let dtype = dtype.map(|d| job::dtype(Some(d), &Device::Cpu));
    let source = Source::find(named)?;
    let name = match find_adapter(&source.name)? {
        Some(adapter) => {
            if pre.is_some() {
                return Err(usage("--pre: an adapter's file has no tokenizer"));
            }
            let model = base_of(&adapter, source.run.as_deref(), base, BASE_OPTION, Want::Config)?;
            let config = adapter.config_of(Config::load(&model.dir, &Map::new())?)?;
            refuse_scores(&config)?;
            let selection = adapter.selection(&config)?;
            let (name, dtype) = ("adapter.gguf", dtype.unwrap_or(DType::F32));
            let path = new.path().join(name);
            gguf::write_adapter(&config, &adapter, &selection, dtype, &path)?;
            check(&path)?;
            name
        }
        None => {
            let model = fetch_model(&source.name, "main", Want::Weights)?;
            if base.is_some() {
                return Err(usage(format!("--base: {named} is a whole model")));
            }
            let name = "model.gguf";
            write_model(&model, dtype, pre, &new.path().join(name))?;
            name
        }
    };
    new.commit()?;
    print(&format!("{}\n", out.join(name).display()))
}

/// Writes a whole model, by default in the dtype of the embedding.
fn write_model(
    model: &ModelDir,
    dtype: Option<DType>,
    pre: Option<&str>,
    path: &Path,
) -> ft_base::Result<()> {
    let base = Base::open(job::config(&model.dir, &Map::new())?, &model.dir)?;
    refuse_scores(&base.config)?;
    let own = base
        .files()
        .and_then(|f| f.info(&format!("{}.weight", base.config.embedding_name())))
        .map(|i| i.dtype);
    let dtype = dtype.unwrap_or(match own {
        Some(safetensors::Dtype::BF16) => DType::BF16,
        Some(safetensors::Dtype::F16) => DType::F16,
        _ => DType::F32,
    });
    if base.config.is_mxfp4() {
        tell("the experts stay in MXFP4");
    } else if base.is_4bit() {
        tell("the model is 4-bit: its weights are dequantized");
    }
    let title = Path::new(&model.source).file_name();
    let title = title.map_or(model.source.clone().into(), |n| n.to_string_lossy());
    let bar = bytes_bar("writing", base.bytes());
    gguf::write_model(&base, &model.dir, &title, dtype, pre, path, &|n| bar.inc(n))?;
    bar.finish_and_clear();
    // candle's reader does not know MXFP4.
    if base.config.is_mxfp4() { Ok(()) } else { check(path) }
}

/// The adapter in a folder or on the hub under this name; `None` if it is a model.
fn find_adapter(source: &str) -> ft_base::Result<Option<Adapter>> {
    let dir = Path::new(source);
    let is_adapter = dir.join("adapter_config.json").is_file();
    if !is_adapter && dir.is_dir() {
        return Ok(None);
    }
    match ft_hub::fetch_adapter(source, "main", true) {
        Ok(dir) => Ok(Some(Adapter::open(&dir)?)),
        Err(e) if is_adapter => Err(e.into()),
        Err(_) => Ok(None),
    }
}

/// Reads the file back with candle's reader and checks that every tensor lies within the file.
fn check(path: &Path) -> ft_base::Result<()> {
    let mut file = std::fs::File::open(path).map_err(|e| store::Error::read(path, e))?;
    let bytes = file.metadata().map_err(|e| store::Error::read(path, e))?.len();
    let content = candle_core::quantized::gguf_file::Content::read(&mut file)?;
    for (name, info) in &content.tensor_infos {
        let end = content.tensor_data_offset
            + info.offset
            + (info.shape.elem_count() * info.ggml_dtype.type_size() / info.ggml_dtype.block_size()) as u64;
        if end > bytes {
            let why = format!("read back: the file ends within {name}");
            return Err(gguf::Error { place: path.display().to_string(), why }.into());
        }
    }
    Ok(())
}
