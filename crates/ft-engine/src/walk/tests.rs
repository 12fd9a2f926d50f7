//! Logits, losses and every gradient against PyTorch, on the cases in `tests/fixtures/reference`.

use super::{Dequantize, Execution, Inputs, Recomputed, RouterLosses, Walk};
use crate::adapters::Adapter;
use crate::adapters::{Choice, Selection};
use crate::export::{Export, Target};
use crate::files::TensorFiles;
use crate::load::Base;
use crate::model::batch::HostBatch;
use crate::model::grad_accumulator::GradAccumulator;
use crate::model::layer::{FeedForward, Level};
use crate::model::linear::{Linear, Weight};
use crate::model::modules::{Group, Module, constants, modules};
use crate::model::{Batch, Config, Decoder};
use crate::params::Allocate;
use crate::params::Params;
use crate::params::build::Build;
use anyhow::{Context as _, Result};
use candle_core::{DType, Device};
use ft_base::memory::place::Phase;
use ft_data::Micro;
use ft_kernels::Tensor;
use ft_kernels::check::{distance, on, values};
use ft_kernels::loss;
use ft_recipe::LoraSpec;
use serde_json::Map;
use std::path::{Path, PathBuf};

mod among;
mod composed;
mod context;
mod experts;
mod families;
mod four_bit;
mod four_bit_full;
mod levels;
mod rows;
mod stored;
mod tensor;
mod timed;

/// Tolerance of logits and gradients, relative L2. Ten times that for key biases, which softmax nearly
/// cancels.
const BAR: f64 = 1e-5;
const CPU: &Device = &Device::Cpu;
/// The same recompute level for every layer.
const FEED_FORWARD: Recomputed = Recomputed { all: 0, feed_forward: usize::MAX, norms: 0 };
const NORMS: Recomputed = Recomputed { all: 0, feed_forward: 0, norms: usize::MAX };

struct Case {
    dir: PathBuf,
    config: Config,
    base: Base,
}

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures"))
}

/// Folders of all cases.
fn folders() -> Result<Vec<PathBuf>> {
    let mut dirs = Vec::new();
    for folder in ["reference", "families"] {
        let root = fixtures().join(folder);
        dirs.extend(std::fs::read_dir(&root)?.map(|e| Ok(e?.path())).collect::<Result<Vec<_>>>()?);
    }
    dirs.sort();
    Ok(dirs)
}

/// All cases.
fn cases() -> Result<Vec<Case>> {
    folders()?.iter().map(|dir| Case::of(dir, &dir.join("model"))).collect()
}

/// The case of a name.
fn case(name: &str) -> Result<Case> {
    let dir = folders()?.into_iter().find(|dir| dir.ends_with(name)).context("a case")?;
    Case::of(&dir, &dir.join("model"))
}

impl Case {
    /// The case in `dir`, of a model.
    fn of(dir: &Path, model: &Path) -> Result<Self> {
        let config = Config::load(model, &Map::new())?;
        let base = Base::open(config.clone(), model)?;
        Ok(Self { dir: dir.into(), config, base })
    }

    fn name(&self) -> String {
        self.dir.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned())
    }

    fn open(&self, file: &str) -> Result<TensorFiles> {
        TensorFiles::open_file(&self.dir.join(file)).with_context(|| format!("{} of {}", file, self.name()))
    }

    fn build(&self, selection: &Selection, adapter: Option<&Adapter>) -> Result<(Decoder, Params)> {
        build(&self.base, selection, adapter)
    }

    /// Builds the same model in NF4.
    fn build_nf4(&self, selection: &Selection) -> Result<(Decoder, Params)> {
        build(&self.nf4(), selection, None)
    }

    fn nf4(&self) -> Base {
        self.base.clone().in_nf4(true)
    }

    fn files(&self) -> Result<&TensorFiles> {
        self.base.files().context("files")
    }

    /// An adapter folder, and the selection of its config.
    fn adapter(&self, name: &str) -> Result<(Adapter, Selection)> {
        let adapter = Adapter::open(&self.dir.join(name))?;
        let selection = Selection::from_peft(&self.config, &adapter.config)?;
        Ok((adapter, selection))
    }

    /// Prefixes of the adapter folders.
    fn adapters(&self) -> Result<Vec<String>> {
        let mut out: Vec<String> = std::fs::read_dir(&self.dir)?
            .filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix("adapter_init").map(String::from))
            .collect();
        out.sort();
        Ok(out)
    }
}

fn build(base: &Base, selection: &Selection, adapter: Option<&Adapter>) -> Result<(Decoder, Params)> {
    let allocate = Allocate { train: true, ..Allocate::default() };
    Ok(Build { adapter, allocate, ..Build::new(base, selection) }.run()?)
}

/// Trains every module.
fn everything(config: &Config) -> Selection {
    in_full(Selection::frozen(config), |_| true)
}

/// Trains the `chosen` modules in full as well.
fn in_full(mut s: Selection, chosen: impl Fn(&Module) -> bool) -> Selection {
    for (_, choice) in s.modules.iter_mut().filter(|(m, _)| chosen(m)) {
        *choice = Choice::Full { lr_scale: 1.0 };
    }
    s
}

fn ints(t: &TensorFiles, name: &str) -> Result<Vec<i64>> {
    Ok(t.tensor(name, DType::I64, CPU)?.flatten_all()?.to_vec1()?)
}

/// A micro-batch of the reference without padding; `real` lists the indices of real tokens
/// among the `rows * 24` padded ones.
#[derive(Default)]
struct Rows {
    micro: Micro,
    real: Vec<u32>,
}

impl Rows {
    fn padded(case: &Case) -> Result<Self> {
        let b = case.open("batches.safetensors")?;
        let at = |what: &str| ints(&b, &format!("batch0.micro0.{what}"));
        let (ids, labels, mask) = (at("input_ids")?, at("labels")?, at("attention_mask")?);
        let width = b.info("batch0.micro0.input_ids").context("batch")?.shape[1];
        let lengths: Vec<usize> = mask.chunks(width).map(|r| r.iter().sum::<i64>() as usize).collect();
        Ok(Self::new(&ids, &labels, &lengths, width))
    }

    fn packed(case: &Case) -> Result<Self> {
        Self::of_documents(case, "packed.")
    }

    /// The row of documents with this prefix.
    fn of_documents(case: &Case, prefix: &str) -> Result<Self> {
        Self::of_file(&case.open("expected.safetensors")?, prefix)
    }

    /// As [`Rows::of_documents`], of a file.
    fn of_file(e: &TensorFiles, prefix: &str) -> Result<Self> {
        let of = |what: &str| ints(e, &format!("{prefix}{what}"));
        let (ids, labels, positions) = (of("input_ids")?, of("labels")?, of("position_ids")?);
        let mut lengths: Vec<usize> = Vec::new();
        for p in positions {
            if p == 0 {
                lengths.push(0);
            }
            *lengths.last_mut().context("a first document")? += 1;
        }
        // one row of several documents; as separate rows they would start elsewhere
        let mut out = Self::default();
        let mut start = 0;
        for n in lengths {
            out.document(&ids[start..start + n], &labels[start..start + n], start);
            start += n;
        }
        Ok(out)
    }

    fn new(ids: &[i64], labels: &[i64], lengths: &[usize], width: usize) -> Self {
        let mut out = Self::default();
        for (row, &n) in lengths.iter().enumerate() {
            let at = row * width;
            out.document(&ids[at..at + n], &labels[at..at + n], at);
        }
        out
    }

    fn document(&mut self, ids: &[i64], labels: &[i64], at: usize) {
        let base = self.micro.ids.len();
        for (i, label) in labels.iter().enumerate().skip(1) {
            if *label >= 0 {
                self.micro.targets.push(((base + i - 1) as u32, *label as u32));
            }
        }
        self.micro.ids.extend(ids.iter().map(|i| *i as u32));
        self.micro.positions.extend(0..ids.len() as u32);
        self.micro.docs.push(ids.len());
        self.real.extend((at..at + ids.len()).map(|i| i as u32));
    }

    fn batch(&self, config: &Config) -> Result<Batch<'static>> {
        self.batch_at(config, None)
    }

    /// With the dropout of a seed and a step.
    fn batch_at(&self, config: &Config, random: Option<(u64, u64)>) -> Result<Batch<'static>> {
        Ok(Batch::new(config, (&self.micro).into(), (0, 0), random, CPU)?)
    }

    /// Selects the logits of real tokens from expected logits `[1.., rows, width, v]`.
    fn select(&self, logits: &Tensor) -> Result<Tensor> {
        let v = logits.dims()[logits.dims().len() - 1];
        let index = Tensor::new(self.real.as_slice(), CPU)?;
        Ok(logits.reshape(((), v))?.index_select(&index, 0)?)
    }
}

/// A training walk with gradients in `p`: returns the losses, and for each tensor whether a gradient reached it.
fn train(walk: &mut Walk<'_>, p: &Params, batch: &Batch<'_>, scale: f64) -> Result<(Vec<Tensor>, Vec<bool>)> {
    let grads = p.grads();
    let accum = GradAccumulator::new(&grads, p.tensors.len()).over(p.new_sums());
    let losses = walk.train(batch, scale, &accum)?;
    accum.settle(None)?;
    Ok((losses, accum.reached()))
}

/// The gradient of a tensor after [`train`].
fn gradient(p: &Params, i: usize) -> Result<Vec<f64>> {
    Ok(values(&p.grad(i)?.context("a gradient")?))
}

/// The gradients of all tensors after [`train`].
fn gradients(p: &Params) -> Result<Vec<Vec<f64>>> {
    (0..p.tensors.len()).map(|i| gradient(p, i)).collect()
}

/// Forward and backward pass: returns the mean loss, and for each tensor whether a gradient reached it.
fn backward(d: &Decoder, p: &Params, batch: &Batch, recompute: usize) -> Result<(f64, Vec<bool>)> {
    let scale = 1.0 / batch.target_count as f64;
    let (losses, reached) = train(&mut Walk::new(d, p.lowest_unit(), recompute), p, batch, scale)?;
    Ok((loss::total(&losses)? * scale, reached))
}

/// Loss and gradients of a step, by tensor.
fn step(
    d: &Decoder,
    p: &Params,
    batch: &Batch,
    e: &Execution,
    losses: RouterLosses,
) -> Result<(f64, Vec<Vec<f64>>)> {
    let mut walk = Walk::chosen(d, p.lowest_unit(), e).router_losses(losses);
    let (sums, _) = train(&mut walk, p, batch, 1.0)?;
    Ok((loss::total(&sums)?, gradients(p)?))
}

/// Adapters of LoRA rank 4 with dropout on the linear modules of the given groups.
fn adapters(config: &Config, dora: bool, groups: &[Group]) -> Selection {
    let spec = LoraSpec { rank: 4, alpha: 8.0, dropout: 0.1, rslora: false, dora };
    let mut s = Selection::frozen(config);
    for (m, choice) in &mut s.modules {
        if groups.contains(&m.group) {
            *choice = Choice::Lora { spec, lr_scale: 1.0 };
        }
    }
    s
}

/// Relative distance of the logits from a tensor of a file.
fn logits_apart(d: &Decoder, rows: &Rows, expected: &TensorFiles, name: &str) -> Result<f64> {
    let logits = Walk::new(d, None, 0).logits(&rows.batch(&d.config)?)?;
    let want = rows.select(&expected.tensor(name, DType::F32, CPU)?.into())?;
    Ok(distance(&values(&logits), &values(&want)))
}

/// Compares logits, loss and gradients with tensors of a file; returns the number of gradients compared.
fn compare(
    what: &str,
    d: &Decoder,
    p: &Params,
    rows: &Rows,
    expected: &TensorFiles,
    prefix: &str,
) -> Result<usize> {
    let get = |n: &str| expected.tensor(n, DType::F32, CPU).map(Tensor::Real);
    let apart = logits_apart(d, rows, expected, &format!("{prefix}logits"))?;
    assert!(apart <= BAR, "{what}: logits {apart:.1e} apart");
    let (loss, reached) = backward(d, p, &rows.batch(&d.config)?, 0)?;
    let want = values(&get(&format!("{prefix}loss"))?)[0];
    assert!((loss - want).abs() <= 1e-6 * want, "{what}: loss {loss}, PyTorch {want}");
    assert!(reached.iter().all(|r| *r), "{what}: not every tensor was reached");
    let mut compared = 0;
    for (i, t) in p.tensors.iter().enumerate() {
        let last = t.name.strip_prefix(&t.module).unwrap_or_default();
        let spellings = [
            format!("{prefix}grad.{}", t.name),
            format!("{prefix}grad.base_model.model.{}", t.name),
            format!("{prefix}grad.base_model.model.{}.weight", t.name),
            format!("{prefix}grad.base_model.model.{}.modules_to_save{last}", t.module),
        ];
        let got = gradient(p, i)?;
        if let Some(want) = families::slice_of_whole(expected, t, &format!("{prefix}grad."))? {
            let apart = distance(&got, &want);
            assert!(apart <= BAR, "{what}: gradient of {} is {apart:.1e} from PyTorch's", t.name);
            compared += 1;
            continue;
        }
        let Some(name) = spellings.iter().find(|n| expected.info(n).is_some()) else {
            // PyTorch has no gradient for an expert without tokens
            compared += usize::from(t.name.contains(".experts.") && got.iter().all(|g| *g == 0.0));
            continue;
        };
        let apart = distance(&got, &values(&get(name)?));
        // Float32 itself is uncertain where a norm of nearly nothing follows.
        let uncertain = t.name.ends_with("k_proj.bias") || t.name.contains("linear_attn");
        // PyTorch's own float32 is up to 9e-6 from float64 on gemma4, whose norms follow one another.
        let twice = if what.contains("gemma4") { 2.0 } else { 1.0 };
        let bar = if uncertain { 10.0 * BAR } else { twice * BAR };
        assert!(apart <= bar, "{what}: gradient of {} is {apart:.1e} from PyTorch's", t.name);
        compared += 1;
    }
    Ok(compared)
}

#[test]
fn full_training_has_pytorchs_gradients() -> Result<()> {
    let cases = cases()?;
    assert!(cases.len() >= 12, "only {} cases", cases.len());
    for c in &cases {
        let (d, p) = c.build(&everything(&c.config), None)?;
        let expected = c.open("expected.safetensors")?;
        let n = compare(&c.name(), &d, &p, &Rows::padded(c)?, &expected, "")?;
        assert_eq!(n, p.tensors.len(), "{}: every gradient has a counterpart", c.name());
        let packed = format!("{}, packed", c.name());
        let n = compare(&packed, &d, &p, &Rows::packed(c)?, &expected, "packed.")?;
        assert!(n > 8, "{packed}: only {n} gradients");
    }
    Ok(())
}

/// Compares the gradients of a router loss with tensors of a file; returns the number of gradients compared.
fn compare_router_loss(c: &Case, losses: RouterLosses, value: f64, prefix: &str) -> Result<usize> {
    let what = format!("{} {prefix}", c.name());
    let (d, p) = c.build(&everything(&c.config), None)?;
    let expected = c.open("expected.safetensors")?;
    let get = |n: &str| expected.tensor(n, DType::F32, CPU).map(Tensor::Real);
    let want = values(&get(&format!("{prefix}_loss"))?)[0];
    assert!((value - want).abs() <= 1e-6 * want, "{what}: {value}, PyTorch {want}");
    let batch = Rows::padded(c)?.batch(&c.config)?;
    let mut compared = 0;
    for recompute in [0, usize::MAX] {
        let mut walk = Walk::new(&d, p.lowest_unit(), recompute).router_losses(losses);
        train(&mut walk, &p, &batch, 0.0)?;
        for (i, t) in p.tensors.iter().enumerate() {
            let name = format!("{prefix}_grad.{}", t.name);
            if expected.info(&name).is_none() {
                continue;
            }
            let apart = distance(&gradient(&p, i)?, &values(&get(&name)?));
            let bar = if t.name.ends_with("k_proj.bias") { 10.0 * BAR } else { BAR };
            assert!(apart <= bar, "{what}: gradient of {} is {apart:.1e} from PyTorch's", t.name);
            compared += 1;
        }
    }
    Ok(compared)
}

#[test]
fn losses_on_routers_have_pytorchs_values_and_gradients() -> Result<()> {
    let mut mixtures = 0;
    for c in cases()?.iter().filter(|c| c.config.moe.is_some()) {
        if c.open("expected.safetensors")?.info("z_loss").is_none() {
            continue;
        }
        let (d, p) = c.build(&everything(&c.config), None)?;
        let batch = Rows::padded(c)?.batch(&c.config)?;
        let both = RouterLosses { aux: 0.01, z: 0.001 };
        let mut walk = Walk::new(&d, p.lowest_unit(), 0).router_losses(both);
        train(&mut walk, &p, &batch, 1.0)?;
        let (aux, z) = walk.routing().read()?.losses()?;
        let n = compare_router_loss(c, RouterLosses { aux: 1.0, z: 0.0 }, aux, "aux")?;
        assert!(n > 10, "{}: only {n} gradients", c.name());
        let n = compare_router_loss(c, RouterLosses { aux: 0.0, z: 1.0 }, z, "z")?;
        assert!(n > 10, "{}: only {n} gradients", c.name());
        mixtures += 1;
    }
    assert!(mixtures >= 5, "only {mixtures} mixtures");
    Ok(())
}

#[test]
fn adapters_have_pytorchs_gradients_and_end() -> Result<()> {
    let mut adapters = 0;
    for c in &cases()? {
        for prefix in c.adapters()? {
            let what = format!("{} {prefix}adapter", c.name());
            let (init, selection) = c.adapter(&format!("{prefix}adapter_init"))?;
            let (d, p) = c.build(&selection, Some(&init))?;
            let rows = Rows::padded(c)?;
            let expected = c.open(&format!("{prefix}lora_expected.safetensors"))?;
            assert_eq!(compare(&what, &d, &p, &rows, &expected, "")?, p.tensors.len(), "{what}");
            // the trained adapter, unmerged, against PEFT's merged model
            let end = Adapter::open(&c.dir.join(format!("{prefix}adapter_final")))?;
            let (d, _) = c.build(&selection, Some(&end))?;
            let merged = c.open(&format!("{prefix}merged_logits.safetensors"))?;
            let apart = logits_apart(&d, &rows, &merged, "logits")?;
            assert!(apart <= BAR, "{what}: merged logits {apart:.1e} apart");
            adapters += 1;
        }
    }
    assert!(adapters >= 16, "only {adapters} adapters");
    Ok(())
}

/// An export of `ft export`, read back, has the logits of the merged model.
#[test]
fn exports_have_pytorchs_logits() -> Result<()> {
    let (mut fused, mut vllm, mut refused) = (0, 0, 0);
    // Adapters of the others are fused as they are, or hold no experts.
    let split = |c: &&Case| c.config.family.experts.is_some_and(|x| !x.fused) && c.config.delta.is_none();
    for c in cases()?.iter().filter(split) {
        for prefix in c.adapters()? {
            let what = format!("{} {prefix}adapter", c.name());
            let (end, selection) = c.adapter(&format!("{prefix}adapter_final"))?;
            let export = Export::new(&c.config, &end, &selection)?;
            let rows = Rows::padded(c)?;
            let merged = c.open(&format!("{prefix}merged_logits.safetensors"))?;
            let out = tempfile::tempdir()?;
            match export.write(Target::PeftFused, out.path()) {
                Err(e) if prefix == "dora_" => {
                    assert!(e.to_string().contains("DoRA"), "{e}");
                    refused += 1;
                }
                written => {
                    written?;
                    let read = Adapter::open(out.path())?;
                    let mut base = c.base.clone();
                    base.config = read.config_of(c.config.clone())?;
                    let selection = read.selection(&base.config)?;
                    read.check_against(&selection, &selection.trained())?;
                    let (d, _) = build(&base, &selection, Some(&read))?;
                    let apart = logits_apart(&d, &rows, &merged, "logits")?;
                    assert!(apart <= BAR, "{what}: fused logits {apart:.1e} apart");
                    fused += 1;
                }
            }
            let out = tempfile::tempdir()?;
            match export.write(Target::Vllm, out.path()) {
                Err(e) if !prefix.is_empty() => {
                    assert!(e.to_string().contains("vLLM"), "{e}");
                    refused += 1;
                }
                written => {
                    written?;
                    let read = Adapter::open(out.path())?;
                    let (d, _) = c.build(&Selection::from_peft(&c.config, &read.config)?, Some(&read))?;
                    let apart = logits_apart(&d, &rows, &merged, "logits")?;
                    assert!(apart <= BAR, "{what}: vLLM's logits {apart:.1e} apart");
                    vllm += 1;
                }
            }
        }
    }
    assert_eq!((fused, vllm, refused), (6, 3, 5));
    Ok(())
}

#[test]
fn recomputing_changes_no_bit() -> Result<()> {
    for c in &cases()? {
        let (d, p) = c.build(&everything(&c.config), None)?;
        let batch = Rows::padded(c)?.batch(&c.config)?;
        let run = |n| -> Result<_> {
            let (loss, _) = backward(&d, &p, &batch, n)?;
            let grads: Vec<Vec<f64>> = p.grads().iter().flatten().map(values).collect();
            Ok((loss.to_bits(), grads))
        };
        let none = run(0)?;
        assert!(none == run(1)? && none == run(usize::MAX)?, "{}", c.name());
        // the number of threads has no effect either, though it decides whether experts run concurrently
        for threads in [1, 2, 3] {
            assert!(on(threads, || run(0))? == none, "{}: {threads} threads", c.name());
        }
    }
    Ok(())
}

#[test]
fn configs_of_transformers_5_mean_the_same() -> Result<()> {
    let mut compared = 0;
    for c in &cases()? {
        let path = c.dir.join("config.transformers5.json");
        if !path.exists() {
            continue;
        }
        let mut raw: Map<String, serde_json::Value> = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
        let strip = |c: &Config| format!("{:?}", Config { raw: Map::new(), unknown: vec![], ..c.clone() });
        // first in the format of transformers 5.17, then of 5.19
        for _ in 0..2 {
            let five = Config::parse("config.json", raw.clone())?;
            assert_eq!(strip(&five), strip(&c.config), "{}", c.name());
            assert!(five.unknown.is_empty(), "{:?}", five.unknown);
            if let Some(experts) = raw.remove("num_experts") {
                raw.insert("num_local_experts".into(), experts);
            }
        }
        compared += 1;
    }
    assert!(compared >= 10, "only {compared} configs");
    Ok(())
}

/// Unit 0 is the embedding, then the layers, then the head; the backward pass stops
/// at the lowest unit that trains.
#[test]
fn the_walk_visits_units_forward_then_in_reverse() -> Result<()> {
    let written = |phase: Option<Phase>, unit: usize| match phase {
        Some(Phase::Forward) => format!("f{unit} "),
        Some(_) => format!("b{unit} "),
        None => format!("{unit} "),
    };
    let c = cases()?.into_iter().find(|c| c.config.layers == 2).context("a case of two layers")?;
    let batch = Rows::padded(&c)?.batch(&c.config)?;
    let trace = |choose: &dyn Fn(Option<usize>, Group) -> bool| -> Result<String> {
        let s = in_full(Selection::frozen(&c.config), |m| choose(m.layer, m.group));
        let (d, p) = c.build(&s, None)?;
        let mut seen = String::new();
        let mut watch = |phase, unit| seen += &written(phase, unit);
        train(&mut Walk::new(&d, p.lowest_unit(), 2).watched(&mut watch), &p, &batch, 1.0)?;
        Ok(seen)
    };
    let up = "f0 f1 f2 ";
    assert_eq!(trace(&|_, _| true)?, format!("{up}b3 b2 b1 b0 "));
    assert_eq!(trace(&|_, g| g == Group::Attention)?, format!("{up}b3 b2 b1 "));
    assert_eq!(trace(&|l, _| l == Some(1))?, format!("{up}b3 b2 "));
    assert_eq!(trace(&|l, g| l.is_none() && g == Group::Norms)?, format!("{up}b3 "));
    let (d, _) = c.build(&Selection::frozen(&c.config), None)?;
    let mut seen = String::new();
    let mut watch = |phase, unit| seen += &written(phase, unit);
    Walk::new(&d, None, 0).watched(&mut watch).eval(&batch)?;
    assert_eq!(seen, "0 1 2 3 ");
    Ok(())
}

/// Logits of one document.
fn logits_of(d: &Decoder, ids: &[u32]) -> Result<Tensor> {
    let (positions, docs) = ((0..ids.len() as u32).collect::<Vec<_>>(), [ids.len()]);
    let host = HostBatch { ids, positions: &positions, docs: &docs, targets: &[], weights: &[] };
    Ok(Walk::new(d, None, 0).logits(&Batch::new(&d.config, host, (0, 0), None, CPU)?)?)
}

/// The most likely tokens, one after another with a KV cache, are those of full forward passes.
#[test]
fn greedy_tokens_are_those_of_the_whole_sequence() -> Result<()> {
    let most =
        |logits: &[f64]| logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i as u32);
    for c in &cases()? {
        let (d, _) = c.build(&Selection::frozen(&c.config), None)?;
        let mut ids: Vec<u32> = (0..9).map(|i| (5 * i + 2) % c.config.vocab as u32).collect();
        let mut reader = super::generate::Reader::new(&d, CPU);
        let mut next = most(&values(&reader.read_document(&ids)?.into()));
        for _ in 0..8 {
            let last = values(&logits_of(&d, &ids)?.real()?.get(ids.len() - 1)?.into());
            assert_eq!(next, most(&last), "{} after {ids:?}", c.name());
            ids.extend(next);
            next = most(&values(&reader.read(&ids[ids.len() - 1..])?.into()));
        }
    }
    Ok(())
}

/// A case whose documents of more than 8 tokens each have a rotary embedding by their length.
fn dynamic() -> Result<Case> {
    let dir = fixtures().join("reference/qwen3-dense");
    let set = serde_json::json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 8});
    let config = Config::load(&dir.join("model"), set.as_object().context("an object")?)?;
    let base = Base::open(config.clone(), &dir.join("model"))?;
    Ok(Case { dir, config, base })
}

/// Generation with a KV cache gives the logits of a full forward pass, also where longer documents have another rotary
/// embedding.
#[test]
fn cached_generation_has_the_logits_of_the_whole_sequence() -> Result<()> {
    for c in cases()?.iter().chain([&dynamic()?]) {
        let (d, _) = c.build(&Selection::frozen(&c.config), None)?;
        let ids: Vec<u32> = (0..11).map(|i| (7 * i + 3) % c.config.vocab as u32).collect();
        let mut reader = super::generate::Reader::new(&d, CPU);
        // another document first; only the common prefix stays cached
        reader.read_document(&[&ids[..5], &[9, 9, 9]].concat())?;
        reader.read_document(&ids[..7])?;
        assert_eq!(reader.len(), 7);
        for (i, id) in ids.iter().enumerate().skip(7) {
            let step = values(&reader.read(&[*id])?.into());
            let whole = logits_of(&d, &ids[..i + 1])?;
            let apart = distance(&step, &values(&whole.real()?.get(i)?.into()));
            assert!(apart <= BAR, "{}: token {i} is {apart:.1e} apart", c.name());
        }
    }
    Ok(())
}
