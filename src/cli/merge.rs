//! `ft merge`: base and adapter as one model.

use super::words;
use crate::adapt::layout;
use crate::adapt::{self, Adapter};
use crate::hub::{self, ModelDir, Settings, Want};
use crate::log::{bytes_bar, tell, warn};
use crate::recipe::Dtype;
use crate::store;
use crate::train::{job, merge::Merging, output::COMPANIONS};
use candle_core::Device;
use serde_json::Map;
use std::path::{Path, PathBuf};

/// Arguments of `ft merge`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The PEFT adapter: a folder, or a hub id
    adapter: String,
    /// Where the merged model goes
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The base, a folder or a hub id, if it is not where the adapter's config says
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Dtype of the merged weights; the base's by default
    #[arg(long, value_parser = words(Dtype::WORDS))]
    dtype: Option<String>,
    /// Replace the model that is in --out
    #[arg(long)]
    overwrite: bool,
}

/// Merges, compares, and prints the folder.
///
/// # Errors
/// A base or adapter that cannot be found or does not fit; a folder that is not empty; a merged model that
/// computes something else.
pub fn run(args: &Args) -> crate::Result<()> {
    let settings = Settings::from_env();
    let adapter = Adapter::open(&hub::fetch_adapter_with(&settings, &args.adapter, "main", true)?)?;
    let base = base_of(&settings, &adapter, args.base.as_deref(), Want::Weights)?;
    let config = job::config(&base.dir, &Map::new())?;
    let selection = adapter.selection(&config)?;
    let files = layout::open(&config, &base.dir)?;
    let out = &args.out;
    make_room(out, &[&base.dir, &adapter.dir], args.overwrite)?;

    let dtype = args.dtype.as_deref().and_then(Dtype::from_word);
    let dtype = dtype.map(|d| job::dtype(Some(d), &Device::Cpu));
    let bar = bytes_bar("merging", files.total_bytes());
    let merging =
        Merging { base: &base.dir, config: &config, files: &files, adapter: &adapter, selection: &selection };
    let merged = merging.write(out, dtype, &|n| bar.inc(n))?;
    bar.finish_and_clear();
    if merged.untied {
        tell(
            "head and embedding are two tensors now: the adapter moves one of them (tie_word_embeddings = false)",
        );
    }
    tell(&format!(
        "logits of the merged model are {:.1e} from those of base and adapter (at most {:.0e}); the adapter moves them by {:.1e}",
        merged.apart, merged.bar, merged.effect
    ));
    if let Some(cost) = merged.cost {
        tell(&format!(
            "the base is 4-bit: rounding the merged weights to bf16 errs by {:.1}% of the update, quantizing them again by {:.0}%",
            100.0 * cost.bf16_of_update(),
            100.0 * cost.nf4_of_update()
        ));
    }
    if merged.effect > 0.0 && merged.apart > 0.3 * merged.effect {
        warn("rounding takes a good part of what the adapter changes; --dtype f32 keeps it");
    }
    super::print(&format!("{}\n", out.display()))
}

/// The base that an adapter was trained on, or the one that was named.
///
/// # Errors
/// A base that cannot be found.
pub(super) fn base_of(
    settings: &Settings,
    adapter: &Adapter,
    named: Option<&str>,
    want: Want,
) -> crate::Result<ModelDir> {
    let (source, revision) = match (named, adapter.config.base()) {
        (Some(base), _) => (base, None),
        (None, Some(base)) => base,
        (None, None) => {
            let why = "base_model_name_or_path: names no base\n  hint: --base MODEL".to_string();
            return Err(adapt::Error::Peft { file: adapter.config.file.clone(), why }.into());
        }
    };
    let found = hub::fetch_model_with(settings, source, revision.unwrap_or("main"), want, true);
    let model = found.map_err(|e| match (named, e) {
        (None, e @ hub::Error::Missing { .. }) => {
            let why = format!(
                "base_model_name_or_path: {e}\n  hint: --base MODEL, or run it where that path leads to it"
            );
            adapt::Error::Peft { file: adapter.config.file.clone(), why }.into()
        }
        (_, e) => crate::Error::from(e),
    })?;
    model.notes.iter().for_each(|n| warn(n));
    Ok(model)
}

/// Makes sure that a folder can take a model: new, empty, or with a model that may be replaced.
fn make_room(out: &Path, inputs: &[&Path], overwrite: bool) -> crate::Result<()> {
    let names = match std::fs::read_dir(out) {
        Ok(entries) => entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect::<Vec<_>>(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(store::Error::write("use", out, None, e).into()),
    };
    let same =
        |input: &&&Path| matches!((input.canonicalize(), out.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if let Some(input) = inputs.iter().find(same) {
        let what = input.display();
        return Err(super::usage(format!("--out {what}: holds what is merged\n  hint: another folder")));
    }
    if names.is_empty() {
        return Ok(());
    }
    if !overwrite {
        let what = out.display();
        return Err(super::usage(format!(
            "--out {what}: is not empty\n  hint: another folder, or --overwrite"
        )));
    }
    // only what a merge writes: shards of an older model would stay beside the new index
    let weights = |n: &str| {
        n.starts_with("model") && (n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json"))
    };
    for name in names.iter().filter(|n| *n == "config.json" || weights(n) || COMPANIONS.contains(&n.as_str()))
    {
        let path = out.join(name);
        std::fs::remove_file(&path).map_err(|e| store::Error::write("remove", &path, None, e))?;
    }
    Ok(())
}
