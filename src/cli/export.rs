//! `ft export`: an adapter in the layout of another program.

use crate::adapt::adapter::Adapter;
use crate::adapt::build::{Base, Build};
use crate::adapt::export::{Export, Target, read_fused};
use crate::adapt::params::Allocate;
use crate::adapt::{self, Choice, Selection, layout};
use crate::hub::{self, Settings, Want};
use crate::log::{bytes_bar, tell};
use crate::model::decoder::HostBatch;
use crate::model::{Batch, Config, Decoder};
use crate::store::{self, TensorFiles};
use crate::train::{self, logits_apart};
use crate::walk::Walk;
use candle_core::{DType, Device, Tensor};
use serde_json::Map;
use std::collections::HashMap;
use std::path::PathBuf;

/// Relative L2 distance of logits that counts as equal.
const BAR: f64 = 1e-5;
/// Tokens that the logits are compared on.
const PROBE: u32 = 48;

/// Arguments of `ft export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The PEFT adapter: a folder, or a hub id
    adapter: String,
    /// peft-fused: PEFT 0.19 and later with transformers 5; vllm
    #[arg(long, value_parser = ["peft-fused", "vllm"])]
    to: String,
    /// Where the export goes: a folder that is new or empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The base, a folder or a hub id, if it is not where the adapter's config says
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
}

/// Writes the export, reads it back, compares its logits, and prints the folder.
///
/// # Errors
/// A base or adapter that cannot be found or does not fit; something that the target cannot hold; a folder that is
/// not empty; an export that computes something else.
pub fn run(args: &Args) -> crate::Result<()> {
    let target = if args.to == "vllm" { Target::Vllm } else { Target::PeftFused };
    if std::fs::read_dir(&args.out).is_ok_and(|mut d| d.next().is_some()) {
        let why = format!("--out {}: is not empty\n  hint: another folder", args.out.display());
        return Err(train::Error::Usage(why).into());
    }
    let settings = Settings::from_env();
    let adapter = Adapter::open(&hub::fetch_adapter_with(&settings, &args.adapter, "main", true)?)?;
    let model = super::merge::base_of(&settings, &adapter, args.base.as_deref(), Want::Weights)?;
    let config = Config::load(&model.dir, &Map::new())?;
    let selection = adapter.selection(&config)?;
    let export = Export::new(&config, &adapter, &selection)?;
    export.write(target, &args.out)?;

    let files = layout::open(&config, &model.dir)?;
    adapter.check_base(&files, config.tied)?;
    let check = Check { config: &config, files: &files };
    let before = check.logits(&selection, Some(&adapter), None)?;
    let after = match target {
        Target::PeftFused => {
            let (selection, values) = read_fused(&config, &args.out)?;
            check.logits(&selection, None, Some(&values))?
        }
        Target::Vllm => {
            let written = Adapter::open(&args.out)?;
            check.logits(&written.selection(&config)?, Some(&written), None)?
        }
    };
    let apart = logits_apart(&after, &before)?;
    if apart > BAR {
        // nobody should find it and use it
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let path = args.out.join(file);
            std::fs::remove_file(&path).map_err(|e| store::Error::write("remove", &path, None, e))?;
        }
        return Err(train::Error::Readback { path: args.out.display().to_string(), apart, bar: BAR }.into());
    }
    if selection.modules.iter().any(|(_, c)| matches!(c, Choice::Lora { spec, .. } if spec.dropout > 0.0)) {
        tell(&format!("its lora_dropout is 0: {} takes no other, and it matters in training only", args.to));
    }
    tell(&format!("read back, its logits are {apart:.1e} from those of the adapter (at most {BAR:.0e})"));
    super::print(&format!("{}\n", args.out.display()))
}

/// Base and adapter on the CPU in f32: exact, and there on every machine.
struct Check<'a> {
    config: &'a Config,
    files: &'a TensorFiles,
}

impl Check<'_> {
    /// Logits on a fixed row of tokens, with an adapter, or with values by the names of trained tensors.
    fn logits(
        &self,
        selection: &Selection,
        adapter: Option<&Adapter>,
        values: Option<&HashMap<String, Tensor>>,
    ) -> crate::Result<Tensor> {
        let bar = bytes_bar("checking", self.files.total_bytes());
        let (decoder, params) = Build {
            config: self.config,
            selection,
            base: Base::Files(self.files),
            adapter,
            quantize: false,
            dtype: DType::F32,
            device: &Device::Cpu,
            seed: 0,
            allocate: Allocate::default(),
            progress: &|n| bar.inc(n),
        }
        .run()?;
        bar.finish_and_clear();
        for (i, t) in params.tensors.iter().enumerate() {
            match values.map(|v| v.get(&t.name)) {
                None => {}
                Some(Some(value)) => params.set(i, value)?,
                Some(None) => {
                    let why = format!("read back: {} is missing", t.name);
                    return Err(adapt::Error::Peft { file: t.module.clone(), why }.into());
                }
            }
        }
        probe(self.config, &decoder)
    }
}

fn probe(config: &Config, decoder: &Decoder) -> crate::Result<Tensor> {
    // any tokens do, as long as they are many: experts that none of them chooses would go unseen
    let ids: Vec<u32> = (0..PROBE).map(|i| (i * 7919 + 17) % config.vocab.max(1) as u32).collect();
    let positions: Vec<u32> = (0..PROBE).collect();
    let docs = [PROBE as usize];
    let host = HostBatch { ids: &ids, positions: &positions, docs: &docs, targets: &[] };
    let batch = Batch::new(config, host, (0, 0), None, &Device::Cpu)?;
    Ok(Walk::new(decoder, None, 0).logits(&batch)?)
}
