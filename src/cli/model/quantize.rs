//! `ft quantize`: writes a model in NF4.

use super::original::{SOURCE_KEY, same_folder};
use crate::cli::console::print;
use crate::infer::usage;
use ft_base::terminal::tell;
use ft_engine::model::Config;
use ft_hub::Want;
use std::path::PathBuf;

/// Arguments of `ft quantize`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a hub id, or a local folder
    model: String,
    /// Output folder: new or empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Branch, tag or commit on the hub
    #[arg(long, default_value = "main")]
    revision: String,
    /// Keep the scales of blocks in f32 (4.5 bits a value, not 4.13)
    #[arg(long)]
    no_double_quant: bool,
}

/// Writes the checkpoint and prints the folder.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let model = ft_hub::fetch_model(&args.model, &args.revision, Want::Weights, true)?;
    if same_folder(&model.dir, &args.out) {
        let out = args.out.display();
        return Err(usage(format!("--out {out}: holds what is quantized\n  hint: another folder")));
    }
    let mut config = Config::load(&model.dir, &serde_json::Map::new())?;
    // for `ft merge`, to find the original weights of an adapter's base
    let source = match model.revision {
        Some(_) => model.source.clone(),
        None => model.dir.canonicalize().unwrap_or_else(|_| model.dir.clone()).display().to_string(),
    };
    config.raw.insert(SOURCE_KEY.into(), source.into());
    let r = ft_engine::load::quantize(&config, &model.dir, &args.out, !args.no_double_quant)?;
    tell(&format!(
        "{} linears of {:.1} M values in NF4, {:.3} bits a value; {:.2} GB of weights",
        r.linears,
        r.values as f64 / 1e6,
        r.bits,
        r.bytes as f64 / 1e9
    ));
    print(&format!("{}\n", args.out.display()))
}
