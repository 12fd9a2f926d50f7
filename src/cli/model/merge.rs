//! `ft merge`: base and adapter as one model.

use super::original::{original, same_folder};
use crate::cli::console::print;
use crate::infer::base::{BASE_OPTION, base_of, open_adapter, warn_of_change};
use crate::infer::{Source, usage, words};
use crate::train::{compare, job, merge::Merged, merge::Merging};
use candle_core::Device;
use ft_base::store::AtomicFolder;
use ft_base::terminal::{bytes_bar, tell, warn};
use ft_engine::adapters::Adapter;
use ft_engine::load::Base;
use ft_hub::{ModelDir, Want};
use ft_recipe::{Dtype, Quantize};
use serde_json::Map;
use std::path::{Path, PathBuf};

/// Arguments of `ft merge`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The PEFT adapter: a folder (its own, of a run or of a checkpoint), or a hub id
    adapter: String,
    /// Where the merged model goes
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The base, a folder or a hub id, if it is not where the adapter's config says
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Where the adapter was trained on a 4-bit base: merge into its original weights, or into those dequantized from 4
    /// bits
    #[arg(long, default_value = "original", value_parser = ["original", "4bit"])]
    onto: String,
    /// Dtype of the merged weights; the base's by default
    #[arg(long, value_parser = words(Dtype::WORDS, Dtype::from_word))]
    dtype: Option<Dtype>,
    /// Replace the model that is in --out; other files there stay
    #[arg(long)]
    overwrite: bool,
}

fn open(model: &ModelDir, adapter: &Adapter) -> ft_base::Result<Base> {
    let config = adapter.config_of(job::config(&model.dir, &Map::new())?)?;
    Ok(Base::open(config, &model.dir)?)
}

/// Weights to merge into.
struct Target {
    base: Base,
    /// Folder of the base.
    dir: PathBuf,
    /// Base of the training, if different.
    trained: Option<Base>,
}

/// Merges, compares logits, and prints the folder.
///
/// # Errors
/// A missing or mismatched base or adapter; a nonempty folder; a merged model with
/// different logits.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let source = Source::find(&args.adapter)?;
    let adapter = open_adapter(&source.name)?;
    let run = source.run.as_deref();
    let model = base_of(&adapter, run, args.base.as_deref(), BASE_OPTION, Want::Weights)?;
    if args.base.is_none() {
        warn_of_change(run, &model);
    }
    let Target { base, dir, trained } = target(args, &model, &adapter)?;
    let selection = adapter.selection(&base.config)?;
    compare::fits(&base, &selection, "comparing the merged model")?;
    let out = &args.out;
    let new = output_folder(out, &[&dir, &model.dir, &adapter.dir], args.overwrite)?;

    let dtype = args.dtype.map(|d| job::dtype(Some(d), &Device::Cpu));
    let bar = bytes_bar("merging", base.bytes());
    let merging = Merging {
        dir: &dir,
        base: &base,
        adapter: &adapter,
        selection: &selection,
        trained: trained.as_ref(),
    };
    let merged = merging.write(new, dtype, &|n| bar.inc(n))?;
    bar.finish_and_clear();
    report(&merged);
    print(&format!("{}\n", out.display()))
}

/// Chooses the weights to merge into, and prints the choice.
fn target(args: &Args, model: &ModelDir, adapter: &Adapter) -> ft_base::Result<Target> {
    let base = open(model, adapter)?;
    let four_bit = base.config.holds_4bit();
    let trained_in_nf4 = adapter.quantize()? == Quantize::Nf4;
    let option = if args.base.is_some() { "--base" } else { "adapter_config.json" };
    let name = format!("{} ({option})", model.source);
    let of_model = |base, trained| Ok(Target { base, dir: model.dir.clone(), trained });
    if args.onto == "4bit" {
        tell(&if four_bit {
            format!("merging into the weights of {name}, dequantized from 4 bits")
        } else {
            format!("merging into the weights of {name} as they are in NF4")
        });
        return of_model(base.in_nf4(true), None);
    }
    if !four_bit {
        if !trained_in_nf4 {
            tell(&format!("merging into the weights of {name}"));
            return of_model(base, None);
        }
        tell(&format!("merging into the original weights of {name}, which were NF4 in training"));
        return of_model(base.clone(), Some(base.in_nf4(true)));
    }
    if let Some(source) = original(model, &base.config)? {
        tell(&format!(
            "merging into the weights of {}, of which {name} says that it was made, and whose 4-bit codes it has",
            source.source
        ));
        return Ok(Target { base: open(&source, adapter)?, dir: source.dir, trained: Some(base) });
    }
    warn(&format!(
        "{name} is 4-bit and does not say what it was made from: merging into its dequantized weights\n  \
         hint: --base MODEL merges into the original's"
    ));
    of_model(base, None)
}

/// Prints the measured deviations.
fn report(m: &Merged) {
    if m.untied {
        tell(
            "head and embedding are two tensors now: the adapter moves one of them (tie_word_embeddings = false)",
        );
    }
    tell(&format!(
        "logits of the merged weights in f32 are {:.1e} from those of base and adapter (at most {:.0e}); the adapter \
         moves them by {:.1e}",
        m.exact, m.bar, m.effect
    ));
    if m.rounding > 0.0 {
        tell(&format!(
            "rounded to what is written, weights are {:.1e} off, each to the bit, and logits {:.1e}",
            m.rounding, m.apart
        ));
    }
    if let Some(trained) = m.trained {
        tell(&format!(
            "logits are {trained:.1e} from those of the 4-bit base with the adapter, as it was trained"
        ));
    }
    if let Some(cost) = m.cost {
        tell(&format!(
            "the base is 4-bit: rounding the merged weights to bf16 errs by {:.1}% of the update, quantizing them \
             again by {:.0}%{}",
            100.0 * cost.bf16_of_update(),
            100.0 * cost.nf4_of_update(),
            m.again.map_or(String::new(), |a| format!(" (logits {a:.1e} off)"))
        ));
    }
    if m.effect > 0.0 && m.apart > 0.3 * m.effect {
        warn("rounding takes a good part of what the adapter changes; --dtype f32 keeps it");
    }
}

/// Creates the output folder. Refuses an input folder, and a nonempty folder without `overwrite`.
fn output_folder(out: &Path, inputs: &[&Path], overwrite: bool) -> ft_base::Result<AtomicFolder> {
    if let Some(input) = inputs.iter().find(|input| same_folder(input, out)) {
        let input = input.display();
        return Err(usage(format!("--out {input}: holds what is merged\n  hint: another folder")));
    }
    let new = AtomicFolder::begin_named(out)?;
    if !overwrite {
        new.refuse_occupied("another folder, or --overwrite")?;
    }
    Ok(new)
}
