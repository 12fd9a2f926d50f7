//! `ft merge`: base and adapter as one model.

use super::base::{base_of, original};
use super::given::Given;
use super::words;
use crate::train::{compare, job, merge::Merged, merge::Merging};
use candle_core::Device;
use ft_base::store::AtomicFolder;
use ft_base::terminal::{bytes_bar, tell, warn};
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_engine::adapt::Adapter;
use ft_engine::load::Base;
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
    #[arg(long, value_parser = words(Dtype::WORDS))]
    dtype: Option<String>,
    /// Replace the model that is in --out; other files there stay
    #[arg(long)]
    overwrite: bool,
}

fn open(model: &ModelDir) -> ft_base::Result<Base> {
    Ok(Base::open(job::config(&model.dir, &Map::new())?, &model.dir)?)
}

/// Merges, compares logits, and prints the folder.
///
/// # Errors
/// A missing or mismatched base or adapter; a nonempty folder; a merged model with
/// different logits.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let settings = Settings::from_env();
    let given = Given::find(&args.adapter)?;
    let adapter = Adapter::open(&hub::fetch_adapter_with(&settings, &given.name, "main", true)?)?;
    let model = base_of(&settings, &adapter, args.base.as_deref(), Want::Weights)?;
    let base = open(&model)?;
    let made_4bit = adapter.quantize()? == Quantize::Nf4 && !base.config.four_bit;
    let named = if args.base.is_some() { "--base" } else { "adapter_config.json" };
    let what = &model.source;
    // target of the merge, its folder, and the base of the training if different
    let as_is = |base: &Base| (base.clone(), model.dir.clone(), None);
    let (onto, dir, trained) = match (args.onto.as_str(), base.config.four_bit) {
        ("4bit", four_bit) => {
            tell(&match four_bit {
                true => format!("merging into the weights of {what} ({named}), dequantized from 4 bits"),
                false => format!("merging into the weights of {what} ({named}) as they are in NF4"),
            });
            as_is(&base.clone().in_nf4(true))
        }
        (_, false) if made_4bit => {
            tell(&format!(
                "merging into the original weights of {what} ({named}), which were NF4 in training"
            ));
            (base.clone(), model.dir.clone(), Some(base.in_nf4(true)))
        }
        (_, false) => as_is(&base),
        (_, true) => match original(&settings, &model, &base.config)? {
            Some(source) => {
                tell(&format!(
                    "merging into the weights of {}, of which {what} ({named}) says that it was made, and whose \
                     4-bit codes it has",
                    source.source
                ));
                (open(&source)?, source.dir, Some(base))
            }
            None => {
                warn(&format!(
                    "{what} ({named}) is 4-bit and does not say what it was made from: merging into its dequantized \
                     weights\n  hint: --base MODEL merges into the original's"
                ));
                as_is(&base)
            }
        },
    };
    let selection = adapter.selection(&onto.config)?;
    compare::fits(&onto, &selection, "comparing the merged model")?;
    let out = &args.out;
    let new = make_room(out, &[&dir, &model.dir, &adapter.dir], args.overwrite)?;

    let dtype = args.dtype.as_deref().and_then(Dtype::from_word);
    let dtype = dtype.map(|d| job::dtype(Some(d), &Device::Cpu));
    let bar = bytes_bar("merging", onto.bytes());
    let (base, trained) = (&onto, trained.as_ref());
    let merging = Merging { dir: &dir, base, adapter: &adapter, selection: &selection, trained };
    let merged = merging.write(new, dtype, &|n| bar.inc(n))?;
    bar.finish_and_clear();
    report(&merged);
    super::print(&format!("{}\n", out.display()))
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
fn make_room(out: &Path, inputs: &[&Path], overwrite: bool) -> ft_base::Result<AtomicFolder> {
    let same =
        |input: &&&Path| matches!((input.canonicalize(), out.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if let Some(input) = inputs.iter().find(same) {
        let what = input.display();
        return Err(super::usage(format!("--out {what}: holds what is merged\n  hint: another folder")));
    }
    let new = AtomicFolder::begin_named(out)?;
    if !overwrite {
        new.refuse_occupied("another folder, or --overwrite")?;
    }
    Ok(new)
}
