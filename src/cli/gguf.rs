//! `ft export --to gguf`: a model or an adapter for llama.cpp.

use super::base::base_of;
use super::given::Given;
use crate::train::job;
use candle_core::{DType, Device};
use ft_base::store::{self, AtomicFolder};
use ft_base::terminal::{bytes_bar, tell, warn};
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_engine::adapt::Adapter;
use ft_engine::gguf;
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_recipe::Dtype;
use serde_json::Map;
use std::path::Path;

/// Options of the export.
pub(super) struct Gguf<'a> {
    /// Folder or hub id of an adapter or a model.
    pub source: &'a str,
    pub out: &'a Path,
    pub base: Option<&'a str>,
    pub dtype: Option<&'a str>,
    pub pre: Option<&'a str>,
}

enum Found {
    Adapter(Box<Adapter>),
    Model(ModelDir),
}

/// Writes `adapter.gguf` or `model.gguf` into a new folder, reads the header back, and prints the file.
///
/// # Errors
/// A missing source; features unsupported by llama.cpp; a nonempty folder.
pub(super) fn run(args: &Gguf<'_>) -> ft_base::Result<()> {
    let new = AtomicFolder::begin_named(args.out)?;
    new.refuse_occupied("another folder")?;
    let settings = Settings::from_env();
    let dtype = args.dtype.and_then(Dtype::from_word).map(|d| job::dtype(Some(d), &Device::Cpu));
    let given = Given::find(args.source)?;
    let name = match find(&settings, &given.name)? {
        Found::Adapter(adapter) => {
            if args.pre.is_some() {
                return Err(super::usage("--pre: an adapter's file has no tokenizer"));
            }
            let model = base_of(&settings, &adapter, args.base, Want::Config)?;
            let config = Config::load(&model.dir, &Map::new())?;
            let selection = adapter.selection(&config)?;
            let (name, dtype) = ("adapter.gguf", dtype.unwrap_or(DType::F32));
            gguf::write_adapter(&config, &adapter, &selection, dtype, &new.path().join(name))?;
            name
        }
        Found::Model(model) => {
            if args.base.is_some() {
                return Err(super::usage(format!("--base: {} is a whole model", args.source)));
            }
            let base = Base::open(job::config(&model.dir, &Map::new())?, &model.dir)?;
            let own = base.files().and_then(|f| f.info("model.embed_tokens.weight")).map(|i| i.dtype);
            let dtype = dtype.unwrap_or(match own {
                Some(safetensors::Dtype::BF16) => DType::BF16,
                Some(safetensors::Dtype::F16) => DType::F16,
                _ => DType::F32,
            });
            if base.is_4bit() {
                tell("the model is 4-bit: its weights are dequantized");
            }
            let title = Path::new(&model.source)
                .file_name()
                .map_or(model.source.clone().into(), |n| n.to_string_lossy());
            let (name, bar) = ("model.gguf", bytes_bar("writing", base.bytes()));
            let path = new.path().join(name);
            gguf::write_model(&base, &model.dir, &title, dtype, args.pre, &path, &|n| bar.inc(n))?;
            bar.finish_and_clear();
            name
        }
    };
    check(&new.path().join(name))?;
    new.commit()?;
    super::print(&format!("{}\n", args.out.join(name).display()))
}

/// Resolves a source: an adapter if the folder or the hub has one under this name, else a model.
fn find(settings: &Settings, source: &str) -> ft_base::Result<Found> {
    let dir = Path::new(source);
    let is_adapter = dir.join("adapter_config.json").is_file();
    if is_adapter || !dir.is_dir() {
        match hub::fetch_adapter_with(settings, source, "main", true) {
            Ok(dir) => return Ok(Found::Adapter(Box::new(Adapter::open(&dir)?))),
            Err(e) if is_adapter => return Err(e.into()),
            Err(_) => {}
        }
    }
    let model = hub::fetch_model_with(settings, source, "main", Want::Weights, true)?;
    model.notes.iter().for_each(|n| warn(n));
    Ok(Found::Model(model))
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
