//! Building a model: frozen tensors from a checkpoint (or at random), trained ones in their flat buffers.

use super::adapter::Adapter;
use super::params::{Allocate, Params};
use super::peft;
use super::selection::{Choice, Part, Selection, part_name};
use super::{Error, Trained};
use crate::kernel::Tensor;
use crate::kernel::quantized::QuantizedMatrix;
use crate::kernel::tensor::Real;
use crate::model::embedding::EmbeddingLora;
use crate::model::linear::{Dora, Lora, Weight};
use crate::model::modules::{Group, Kind, Module, modules};
use crate::model::sink::Slot;
use crate::model::{Config, Decoder, decoder::Weights};
use crate::quant::{self, CodeBooks};
use crate::rng::{Purpose, Stream};
use crate::store::TensorFiles;
use candle_core::{DType, Device};
use rayon::prelude::*;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Where the base's tensors come from.
pub enum Base<'a> {
    /// A checkpoint.
    Files(&'a TensorFiles),
    /// A checkpoint and its 4-bit copy (`model.cache`): weights that train in full are read from the first, so that
    /// the copy is the same whatever trains.
    Cached {
        /// The checkpoint.
        original: &'a TensorFiles,
        /// The copy, in which every linear of the decoder is 4-bit.
        four_bit: &'a TensorFiles,
    },
    /// Seeded random numbers of the config's shape.
    Random(u64),
}

impl<'a> Base<'a> {
    /// The files that hold a module's weights; `full` says whether it trains in full.
    fn files(&self, full: bool) -> Option<&'a TensorFiles> {
        match self {
            Base::Files(files) => Some(files),
            Base::Cached { original, four_bit } => Some(if full { original } else { four_bit }),
            Base::Random(_) => None,
        }
    }
}

/// What a build needs.
pub struct Build<'a> {
    /// The model.
    pub config: &'a Config,
    /// What trains.
    pub selection: &'a Selection,
    /// Where the base comes from.
    pub base: Base<'a>,
    /// An adapter to go on from, or to use.
    pub adapter: Option<&'a Adapter>,
    /// Whether linears of the decoder that do not train in full become NF4 while they are loaded (a 4-bit checkpoint
    /// stays as it is).
    pub quantize: bool,
    /// Compute dtype.
    pub dtype: DType,
    /// Where to compute.
    pub device: &'a Device,
    /// Seed of LoRA's initial values.
    pub seed: u64,
    /// What to allocate beside the values that the layers compute with.
    pub allocate: Allocate,
    /// Called after each tensor, with the bytes it took in the checkpoint.
    pub progress: &'a dyn Fn(u64),
}

impl Build<'_> {
    /// Loads the model and allocates what trains.
    ///
    /// # Errors
    /// Tensors that are missing, unexpected or of another shape, all named; an adapter that does not fit.
    pub fn run(&self) -> crate::Result<(Decoder, Params)> {
        let mut loader = self.loader()?;
        let decoder = Decoder::build(self.config, &mut loader)?;
        Ok((decoder, loader.params))
    }

    /// Logits of a few tokens of one document, [t, v] in f32, with one layer in memory at a time.
    ///
    /// # Errors
    /// As [`Build::run`].
    pub fn logits(&self, ids: &[u32]) -> crate::Result<Real> {
        Decoder::logits_by_layer(self.config, &mut self.loader()?, ids, self.device)
    }

    fn loader(&self) -> crate::Result<Loader<'_>> {
        let of_cache = matches!(self.base, Base::Cached { .. }).then(|| self.base.files(true)).flatten();
        for files in of_cache.into_iter().chain(self.base.files(false)) {
            check_tensors(self.config, files)?;
        }
        check_full(self.config, self.selection, &self.base, self.adapter, self.quantize)?;
        let params = Params::new(
            self.selection.trained(),
            self.config.layers + 2,
            self.dtype,
            self.device,
            self.allocate,
        )?;
        if let Some(a) = self.adapter {
            a.check_against(self.selection, &params.tensors)?;
        }
        let books = CodeBooks::new(self.device)?;
        let mut loader = Loader { b: self, params, numbers: HashMap::new(), tensors: HashMap::new(), books };
        for (i, (m, _)) in self.selection.modules.iter().enumerate() {
            loader.numbers.insert(m.name.clone(), i);
        }
        for (i, t) in loader.params.tensors.iter().enumerate() {
            loader.tensors.insert((t.module.clone(), t.part), i);
        }
        Ok(loader)
    }
}

/// How a module's weight becomes 4-bit, if it does: not where it trains in full.
fn four_bit(
    config: &Config,
    base: &Base<'_>,
    quantize: bool,
    m: &Module,
    choice: &Choice,
) -> Option<FourBit> {
    if matches!(choice, Choice::Full { .. }) {
        return None;
    }
    let held = |files| quant::find(files, &weight_name(m)).is_some();
    match config.four_bit && base.files(false).is_some_and(held) {
        true => Some(FourBit::Stored),
        false => (quantize && !config.four_bit && quant::takes(m)).then_some(FourBit::Made),
    }
}

/// Refuses to train in full what the checkpoint has in 4 bits only (an adapter may hold its values), a 4-bit weight
/// that is no linear's, and to quantize where nothing is left to be. `quantize` says whether the decoder's linears
/// become NF4 while they are loaded.
pub fn check_full(
    config: &Config,
    selection: &Selection,
    base: &Base<'_>,
    adapter: Option<&Adapter>,
    quantize: bool,
) -> Result<(), Error> {
    let mut made = false;
    for (m, choice) in &selection.modules {
        let fail = |why: &str| Err(Error::FourBit { module: m.name.clone(), why: why.into() });
        let stored = |files| config.four_bit && quant::find(files, &weight_name(m)).is_some();
        if matches!(choice, Choice::Full { .. })
            && base.files(true).is_some_and(stored)
            && !adapter.is_some_and(|a| a.replaces(&m.name))
        {
            return fail(
                "its weight is 4-bit and cannot train in full\n  hint: method = \"lora\" for it, or model.source \
                 with its original weights (model.quantize = \"nf4\" keeps all others in 4 bits)",
            );
        }
        let how = four_bit(config, base, quantize, m, choice);
        made |= how == Some(FourBit::Made);
        if how.is_some() && !matches!(m.kind, Kind::Linear { .. }) {
            return fail("not built yet: a 4-bit weight of anything but a linear");
        }
    }
    if quantize && !config.four_bit && !made {
        let why =
            "nothing is left to quantize: every linear of the decoder trains in full\n  hint: leave it out";
        return Err(Error::FourBit { module: "model.quantize = \"nf4\"".into(), why: why.into() });
    }
    Ok(())
}

/// Where a 4-bit weight comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FourBit {
    /// The checkpoint has it so.
    Stored,
    /// It is quantized while it is loaded.
    Made,
}

fn weight_name(m: &Module) -> String {
    format!("{}.weight", m.name)
}

/// Compares a checkpoint's tensors with the config: missing, unexpected and mis-shaped ones are all named.
pub fn check_tensors(config: &Config, files: &TensorFiles) -> Result<(), Error> {
    let mut problems = Vec::new();
    let mut expected = BTreeSet::new();
    for m in modules(config) {
        let mut want = vec![(format!("{}.weight", m.name), m.weight_shape())];
        if let Some(n) = m.bias() {
            want.push((format!("{}.bias", m.name), vec![n]));
        }
        for (name, shape) in want {
            expected.insert(name.clone());
            if let (true, &[o, i], Some(parts)) =
                (config.four_bit, shape.as_slice(), quant::find(files, &name))
            {
                problems.extend(quant::problems(files, &name, (o, i)).map(|why| format!("{name}: {why}")));
                expected.extend(parts);
                continue;
            }
            match files.info(&name) {
                None if config.tied && m.group == Group::Head => {}
                None => problems.push(format!("{name}: missing ({shape:?})")),
                Some(i) if i.shape != shape => {
                    problems.push(format!("{name}: {:?} in the file, {shape:?} by config.json", i.shape));
                }
                Some(_) => {}
            }
        }
    }
    for name in files.names() {
        // buffers that old versions of transformers saved
        if !expected.contains(name) && !name.ends_with("rotary_emb.inv_freq") {
            problems.push(format!("{name}: unexpected"));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    let (count, shown) = (problems.len(), 20);
    problems.truncate(shown);
    if count > shown {
        problems.push(format!(".. and {} more", count - shown));
    }
    Err(Error::Tensors {
        dir: files.paths().next().and_then(|p| p.parent()).map_or(String::new(), |p| p.display().to_string()),
        why: format!("{count} tensors do not fit config.json\n  {}", problems.join("\n  ")),
    })
}

struct Loader<'a> {
    b: &'a Build<'a>,
    params: Params,
    /// Number of each module.
    numbers: HashMap<String, usize>,
    /// Index of each trained tensor: a model may have tens of thousands.
    tensors: HashMap<(String, Part), usize>,
    /// Tables of 4-bit types.
    books: CodeBooks,
}

impl Loader<'_> {
    fn stream(&self, m: &Module, purpose: Purpose, part: u64) -> Stream {
        let seed = match (purpose, &self.b.base) {
            (Purpose::Weights, Base::Random(seed)) => *seed,
            _ => self.b.seed,
        };
        Stream::new(seed, purpose, part, self.number(m))
    }

    /// A module's stream of random numbers.
    fn number(&self, m: &Module) -> u64 {
        self.numbers.get(&m.name).map_or(0, |i| *i as u64 + 1)
    }

    fn choice(&self, m: &Module) -> Choice {
        self.numbers.get(&m.name).map_or(Choice::Freeze, |i| self.b.selection.modules[*i].1)
    }

    fn part(&self, m: &Module, part: Part) -> Option<usize> {
        self.tensors.get(&(m.name.clone(), part)).copied()
    }

    /// A tensor of the base, on `device`.
    fn base(&self, m: &Module, part: Part, dtype: DType, device: &Device) -> crate::Result<Real> {
        let name = format!("{}.{}", m.name, part_name(m, part));
        let shape = if part == Part::Bias { vec![m.bias().unwrap_or(0)] } else { m.weight_shape() };
        let full = matches!(self.choice(m), Choice::Full { .. });
        let Some(files) = self.b.base.files(full) else {
            let t = random(m, part, &shape, self.stream(m, Purpose::Weights, part as u64), self.b.config)?;
            (self.b.progress)(4 * t.elem_count() as u64);
            return Ok(t.to_dtype(dtype)?.to_device(device)?);
        };
        let t = files.tensor(&name, dtype, device)?;
        (self.b.progress)(files.info(&name).map_or(0, |i| i.bytes()));
        Ok(t)
    }

    /// The weight of a linear in 4 bits.
    fn blocks(&mut self, m: &Module, how: FourBit) -> crate::Result<QuantizedMatrix> {
        let (name, dtype) = (weight_name(m), self.b.dtype);
        let dims = match m.weight_shape().as_slice() {
            &[o, i] => (o, i),
            other => {
                let why = format!("not built yet: a 4-bit weight of shape {other:?}");
                return Err(Error::FourBit { module: m.name.clone(), why }.into());
            }
        };
        match (how, self.b.base.files(false)) {
            (FourBit::Stored, Some(files)) => {
                let blocks = quant::read(files, &name, dims, dtype, &mut self.books)?;
                let parts = quant::find(files, &name).unwrap_or_default();
                let bytes =
                    parts.iter().chain([&name]).filter_map(|n| files.info(n)).map(|i| i.bytes()).sum();
                (self.b.progress)(bytes);
                Ok(blocks)
            }
            (_, Some(files)) => {
                let encoded = quant::from_files(files, &name)?;
                (self.b.progress)(files.info(&name).map_or(0, |i| i.bytes()));
                Ok(encoded.into_matrix(true, dtype, &mut self.books)?)
            }
            (_, None) => {
                let t = self.base(m, Part::Weight, dtype, &Device::Cpu)?;
                let values = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
                let encoded = quant::Encoded::new(&name, &values, dims, dtype)?;
                Ok(encoded.into_matrix(true, dtype, &mut self.books)?)
            }
        }
    }

    /// A tensor of the base: a frozen one by itself, a trained one in its buffer.
    fn tensor(&mut self, m: &Module, part: Part) -> crate::Result<(Tensor, Option<Slot>)> {
        match self.part(m, part) {
            None => Ok((self.base(m, part, self.b.dtype, self.b.device)?.into(), None)),
            Some(i) => {
                let from_adapter =
                    self.b.adapter.map(|a| a.get(&self.params.tensors[i])).transpose()?.flatten();
                let value = match from_adapter {
                    Some(t) => t,
                    None => self.base(m, part, DType::F32, self.params.home(i)?)?,
                };
                self.params.set(i, &value)?;
                Ok((self.params.view(i)?, self.b.allocate.train.then_some(self.params.slots[i])))
            }
        }
    }

    /// Fills A and B from the adapter or with their initial values.
    fn init_lora(&self, m: &Module, a: usize, b: usize) -> crate::Result<bool> {
        if let Some(adapter) = self.b.adapter {
            let (ta, tb) = (adapter.get(&self.params.tensors[a])?, adapter.get(&self.params.tensors[b])?);
            if let (Some(ta), Some(tb)) = (ta, tb) {
                self.params.set(a, &ta)?;
                self.params.set(b, &tb)?;
                return Ok(true);
            }
        }
        let embedding = matches!(m.kind, Kind::Embedding { .. });
        // PEFT: A Kaiming-uniform with a = sqrt(5), that is uniform within 1 / sqrt(i), and B zero;
        // on an embedding A zero and B standard normal
        let (index, stream) = if embedding { (b, 1) } else { (a, 0) };
        let t = &self.params.tensors[index];
        let s = self.stream(m, Purpose::Adapter, stream);
        let bound = 1.0 / (t.shape[1] as f32).sqrt();
        let n = t.elements() as u64;
        let values: Vec<f32> = (0..n)
            .into_par_iter()
            .map(|i| if embedding { s.normal(i) } else { (2.0 * s.uniform(i) - 1.0) * bound })
            .collect();
        self.params.set(index, &Real::from_vec(values, t.shape.as_slice(), &Device::Cpu)?)?;
        Ok(false)
    }

    /// DoRA's magnitude in f32, where the master weights are on the device: the gain that is made of it is applied in
    /// f32.
    fn magnitude(&self, i: usize) -> candle_core::Result<Tensor> {
        let (view, master) = (self.params.view(i)?, self.params.master(i)?);
        Ok(if master.real()?.device().same_device(view.real()?.device()) { master } else { view })
    }

    fn slots(&self, a: usize, b: usize) -> Option<(Slot, Slot)> {
        self.b.allocate.train.then(|| (self.params.slots[a], self.params.slots[b]))
    }
}

impl Weights for Loader<'_> {
    fn weight(&mut self, m: &Module) -> crate::Result<(Tensor, Option<Slot>)> {
        self.tensor(m, Part::Weight)
    }

    fn matrix(&mut self, m: &Module) -> crate::Result<(Weight, Option<Slot>)> {
        let b = self.b;
        match four_bit(b.config, &b.base, b.quantize, m, &self.choice(m)) {
            Some(how) => Ok((Weight::Nf4(Arc::new(self.blocks(m, how)?)), None)),
            None => {
                let (weight, slot) = self.weight(m)?;
                Ok((Weight::Dense(weight), slot))
            }
        }
    }

    fn bias(&mut self, m: &Module) -> crate::Result<(Tensor, Option<Slot>)> {
        self.tensor(m, Part::Bias)
    }

    fn lora(&mut self, m: &Module, weight: &Weight) -> crate::Result<Option<Lora>> {
        let Choice::Lora { spec, .. } = self.choice(m) else { return Ok(None) };
        let (Some(a), Some(b)) = (self.part(m, Part::A), self.part(m, Part::B)) else { return Ok(None) };
        self.init_lora(m, a, b)?;
        let scale = peft::scale(&spec);
        let mut lora = Lora {
            a: self.params.view(a)?,
            b: self.params.view(b)?,
            slots: self.slots(a, b),
            scale,
            dropout: spec.dropout,
            stream: self.number(m),
            dora: None,
        };
        if !spec.dora
            && let Some(adapter) = self.b.adapter
        {
            // PEFT has one switch for DoRA: an adapter with it has magnitudes for plain LoRA too, and these must
            // be such that they change nothing
            let norms = || lora.norms(weight, &weight.row_squares()?)?.real().cloned();
            adapter.check_neutral(m, &norms)?;
        }
        if let Some(i) = self.part(m, Part::Magnitude) {
            let row_squares = weight.row_squares()?;
            let from_adapter = self.b.adapter.map(|a| a.get(&self.params.tensors[i])).transpose()?.flatten();
            let init = match from_adapter {
                Some(t) => t,
                None => lora.norms(weight, &row_squares)?.real()?.clone(),
            };
            self.params.set(i, &init)?;
            lora.dora = Some(Dora {
                magnitude: self.magnitude(i)?.unsqueeze(0)?,
                slot: self.b.allocate.train.then_some(self.params.slots[i]),
                row_squares,
            });
        }
        Ok(Some(lora))
    }

    fn embedding_lora(&mut self, m: &Module) -> crate::Result<Option<EmbeddingLora>> {
        let Choice::Lora { spec, .. } = self.choice(m) else { return Ok(None) };
        let (Some(a), Some(b)) = (self.part(m, Part::A), self.part(m, Part::B)) else { return Ok(None) };
        self.init_lora(m, a, b)?;
        let (view_a, view_b) = (self.params.view(a)?, self.params.view(b)?);
        Ok(Some(EmbeddingLora { a: view_a, b: view_b, slots: self.slots(a, b), scale: peft::scale(&spec) }))
    }
}

/// Random values of a tensor: norms one, biases zero, matrices normal with the config's `initializer_range`.
fn random(m: &Module, part: Part, shape: &[usize], s: Stream, config: &Config) -> crate::Result<Real> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = match (part, m.kind) {
        (Part::Bias, _) => vec![0.0; n],
        (_, Kind::Norm { .. }) => vec![1.0; n],
        _ => {
            let std = config.initializer_range as f32;
            // eight standard deviations are farther than any value will be
            if !(8.0 * std).is_finite() {
                let why = format!("initializer_range: {std:e} makes weights that are infinite");
                return Err(Error::Tensors { dir: "config.json".into(), why }.into());
            }
            (0..n as u64).into_par_iter().map(|i| s.normal(i) * std).collect()
        }
    };
    Ok(Real::from_vec(values, shape, &Device::Cpu)?)
}

/// The trained tensors that a reached-set leaves out, and the other way round, for the first step's check.
pub fn unreached<'a>(tensors: &'a [Trained], reached: &[bool]) -> Vec<&'a str> {
    tensors.iter().zip(reached).filter(|(_, r)| !**r).map(|(t, _)| t.name.as_str()).collect()
}
