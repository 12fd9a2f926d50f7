//! `ft export`: an adapter or a model in another program's format.

use super::gguf;
use crate::cli::console::print;
use crate::infer::base::{BASE_OPTION, base_of, open_adapter, quantized, refuse_scores, warn_of_change};
use crate::infer::{Source, usage, words};
use crate::train::{self, compare, logits_apart};
use clap::builder::{PossibleValue, PossibleValuesParser};
use ft_base::store::AtomicFolder;
use ft_base::terminal::{tell, warn};
use ft_data::PromptConfig;
use ft_engine::adapters::{Adapter, Part, Selection};
use ft_engine::export::{Export, Target};
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_engine::model::modules::Group;
use ft_engine::params::build::Build;
use ft_engine::walk;
use ft_hub::Want;
use ft_recipe::{Dtype, Quantize};
use serde_json::Map;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Number of tokens in the logit comparison.
const PROBE: u32 = 48;

/// Arguments of `ft export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The PEFT adapter: a folder (its own, of a run or of a checkpoint), or a hub id; with --to gguf also
    /// a whole model
    adapter: String,
    /// peft-fused: PEFT 0.19 and later with transformers 5; vllm; gguf: llama.cpp
    #[arg(long, value_parser = targets())]
    to: String,
    /// Where the export goes: a folder that is new or empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The base, a folder or a hub id, if it is not where the adapter's config says
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Quantization of the base in the comparison; by default that of the adapter's run
    #[arg(long, value_parser = words(Quantize::WORDS, Quantize::from_word))]
    quantize: Option<Quantize>,
    /// With --to gguf: dtype of the matrices; by default the model's own, of an adapter f32
    #[arg(long, value_parser = words(Dtype::WORDS, Dtype::from_word))]
    dtype: Option<Dtype>,
    /// With --to gguf: llama.cpp's name of the tokenizer's way to split texts, where ft does not know it
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
}

/// Values of `--to`. `peft` is answered by [`run`]: a similar value would be suggested for it otherwise.
fn targets() -> PossibleValuesParser {
    let shown = ["peft-fused", "vllm", "gguf"].map(PossibleValue::new);
    PossibleValuesParser::new(shown.into_iter().chain([PossibleValue::new("peft").hide(true)]))
}

/// Writes the export, reads it back, compares logits, renames it into place, and prints the folder.
///
/// # Errors
/// A missing or mismatched base or adapter; features the target does not support; a
/// nonempty folder; an export with different logits.
pub fn run(args: &Args) -> ft_base::Result<()> {
    if args.to == "peft" {
        return Err(usage(
            "--to peft: an adapter is in PEFT's layout as it is: nothing to export\n  \
            hint: PEFT loads the folder; --to peft-fused is for experts in transformers 5",
        ));
    }
    if args.to == "gguf" {
        if args.quantize.is_some() {
            return Err(usage("--quantize: the file is not compared with a base"));
        }
        let (base, pre) = (args.base.as_deref(), args.pre.as_deref());
        return gguf::run(&args.adapter, &args.out, base, args.dtype, pre);
    }
    let of_gguf = [("--dtype", args.dtype.is_some()), ("--pre", args.pre.is_some())];
    if let Some((option, _)) = of_gguf.iter().find(|(_, given)| *given) {
        return Err(usage(format!("{option}: belongs to --to gguf")));
    }
    let target = if args.to == "vllm" { Target::Vllm } else { Target::PeftFused };
    let new = AtomicFolder::begin_named(&args.out)?;
    new.refuse_occupied("another folder")?;
    let out = new.path();
    let source = Source::find(&args.adapter)?;
    let adapter = open_adapter(&source.name)?;
    let run = source.run.as_deref();
    let model = base_of(&adapter, run, args.base.as_deref(), BASE_OPTION, Want::Weights)?;
    if args.base.is_none() {
        warn_of_change(run, &model);
    }
    let config = adapter.config_of(Config::load(&model.dir, &Map::new())?)?;
    refuse_scores(&config)?;
    let selection = adapter.selection(&config)?;
    let nf4 = quantized(args.quantize, Some(&adapter), &config)?;
    let base = Base::open(config, &model.dir)?.in_nf4(nf4);
    compare::fits(&base, &selection, "comparing the export with the adapter")?;
    if let Some(files) = base.files() {
        adapter.check_base(files, &base.config)?;
    }
    Export::new(&base.config, &adapter, &selection)?.write(target, &out)?;
    PromptConfig::copy(&adapter.dir, &out)?;
    let (apart, bar) = distance(&base, &adapter, &selection, &out)?;
    if apart > bar {
        let path = args.out.display().to_string();
        return Err(train::Error::Readback { path, apart, bar }.into());
    }
    new.commit()?;
    notes(target, &args.to, &base.config, &selection);
    tell(&format!("read back, its logits are {apart:.1e} from those of the adapter (at most {bar:.0e})"));
    print(&format!("{}\n", args.out.display()))
}

/// Relative L2 distance between the logits of the adapter and of the export in `out`, and its tolerance.
fn distance(
    base: &Base,
    adapter: &Adapter,
    selection: &Selection,
    out: &Path,
) -> ft_base::Result<(f64, f64)> {
    // any tokens will do, but many: experts without tokens would go unchecked
    let ids: Vec<u32> = (0..PROBE).map(|i| (i * 7919 + 17) % base.config.vocab.max(1) as u32).collect();
    let logits = |base: &Base, selection: &Selection, adapter: &Adapter| {
        let new = Build::new(base, selection);
        Build { adapter: Some(adapter), shown: Some("checking"), ..new }.logits(&ids)
    };
    let before = logits(base, selection, adapter)?;
    walk::finite(&before, "base and adapter", "hint: the adapter has diverged, or it is of another base")?;
    let written = Adapter::open(out)?;
    let mut other = base.clone();
    other.config = written.config_of(other.config)?;
    let apart = logits_apart(&logits(&other, &written.selection(&other.config)?, &written)?, &before)?;
    let moved = |seed: u64| -> ft_base::Result<f64> {
        Ok(logits_apart(&logits(base, selection, &perturbed(adapter, selection, seed)?)?, &before)?)
    };
    Ok((apart, compare::tolerance(apart, compare::BAR, &moved)?))
}

/// The adapter with perturbed values: [`compare::perturbed`].
fn perturbed(adapter: &Adapter, selection: &Selection, seed: u64) -> ft_base::Result<Adapter> {
    let [head, embedding] = [Group::Head, Group::Embedding].map(|group| selection.name_of(group));
    let mut values = HashMap::new();
    for (number, t) in selection.trained().into_iter().enumerate() {
        let Some(value) = adapter.get(&t)? else { continue };
        let value = match t.part {
            Part::A | Part::B => compare::perturbed(&value, seed, number as u64)?,
            _ => value,
        };
        if selection.tied_in_full() && t.module == embedding {
            values.insert(format!("{head}.weight"), value.clone());
        }
        values.insert(t.name, value);
    }
    Ok(adapter.with_values(values))
}

/// Prints differences between training and the target program.
fn notes(target: Target, to: &str, config: &Config, selection: &Selection) {
    if selection.loras().any(|(_, spec)| spec.dropout > 0.0) {
        tell(&format!("its lora_dropout is 0: {to} takes no other, and it matters in training only"));
    }
    let routers = selection.loras().any(|(m, _)| m.group == Group::Router);
    if target == Target::Vllm && routers && config.family.model_type == "qwen3_moe" {
        warn(
            "vLLM 0.32 computes Qwen3-MoE's routers without their adapters, and does not say so, unless experts are \
             left out of --lora-target-modules (then only experts without adapters are right)\n  hint: ft merge",
        );
    }
}
