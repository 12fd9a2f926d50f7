//! Reads adapter folders in PEFT's format.

use super::config::{MERGE, PeftConfig};
use super::format::{BASE_QUANTIZE, LABELS, PREFIX, alone, current, scale};
use crate::adapters::{Choice, Error, Part, Selection, Trained};
use crate::files::TensorFiles;
use crate::model::modules::{Group, Kind, Module, SCORE};
use crate::model::{Config, TOWERS};
use candle_core::{DType, Device, Tensor};
use ft_recipe::{MAX_LABELS, Quantize, numbered};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Relative tolerance of a neutral DoRA magnitude against the row norm.
const NEUTRAL: f32 = 1e-4;

/// Relative tolerance when scales are compared: an alpha computed from a scale is rounded.
const SCALE: f64 = 1e-6;

/// Largest relative error of a rounding to bf16, and the smallest positive value of f16.
const ROUNDING: f64 = 1.0 / 256.0;
const SMALLEST: f64 = 1.0 / 16_777_216.0;

/// An opened adapter folder.
#[derive(Debug)]
pub struct Adapter {
    pub dir: PathBuf,
    pub config: PeftConfig,
    tensors: Tensors,
    /// Tensors of all experts of the layer read last, one matrix an expert.
    fused: Mutex<HashMap<String, Tensor>>,
}

/// Storage of an adapter's tensors.
#[derive(Debug)]
enum Tensors {
    File(TensorFiles),
    /// Tensors by file key.
    Memory(HashMap<String, Tensor>),
}

impl Tensors {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Tensors::File(f) => Box::new(f.names()),
            Tensors::Memory(m) => Box::new(m.keys().map(String::as_str)),
        }
    }

    /// Name of a held tensor: the key itself, or as in transformers 5 or in the text model alone.
    fn name_of<'a>(&self, key: &'a str) -> Option<Cow<'a, str>> {
        let holds = |name: &str| match self {
            Tensors::File(f) => f.info(name).is_some(),
            Tensors::Memory(m) => m.contains_key(name),
        };
        [Cow::Borrowed(key), current(key), alone(key)].into_iter().find(|name| holds(name))
    }

    fn shape(&self, key: &str) -> Option<&[usize]> {
        let name = self.name_of(key)?;
        match self {
            Tensors::File(f) => f.info(&name).map(|i| i.shape.as_slice()),
            Tensors::Memory(m) => m.get(&*name).map(|t| t.dims()),
        }
    }

    /// Reads a tensor as f32 on the CPU.
    fn tensor(&self, key: &str) -> ft_base::Result<Tensor> {
        let name = self.name_of(key).unwrap_or(Cow::Borrowed(key));
        match self {
            Tensors::File(f) => Ok(f.tensor(&name, DType::F32, &Device::Cpu)?),
            Tensors::Memory(m) => match m.get(&*name) {
                Some(t) => Ok(t.to_dtype(DType::F32)?),
                None => Err(candle_core::Error::Msg(format!("{key} is not held")).into()),
            },
        }
    }
}

impl Adapter {
    /// Opens `adapter_config.json` and `adapter_model.safetensors` in a folder.
    pub fn open(dir: &Path) -> ft_base::Result<Self> {
        let mut config = PeftConfig::load(dir)?;
        let files = TensorFiles::open_file(&dir.join("adapter_model.safetensors"))?;
        config.alone = Some(!files.names().any(|name| name.contains("language_model")));
        Ok(Self { dir: dir.to_path_buf(), config, tensors: Tensors::File(files), fused: Mutex::default() })
    }

    /// The same adapter with other values, given by names of trained tensors.
    pub fn with_values(&self, values: HashMap<String, Tensor>) -> Self {
        let values = values.into_iter().map(|(name, t)| (format!("{PREFIX}{name}"), t)).collect();
        let (dir, config) = (self.dir.clone(), self.config.clone());
        Self { dir, config, tensors: Tensors::Memory(values), fused: Mutex::default() }
    }

    /// `model.quantize` of this adapter's training run. [`Quantize::None`] for adapters of other programs: their 4-bit
    /// bases are 4-bit checkpoints.
    ///
    /// # Errors
    /// An unknown value.
    pub fn quantize(&self) -> Result<Quantize, Error> {
        let Tensors::File(files) = &self.tensors else { return Ok(Quantize::None) };
        let Some(word) = files.metadata().get(BASE_QUANTIZE) else { return Ok(Quantize::None) };
        Quantize::from_word(word).ok_or_else(|| {
            self.fail(format!(
                "metadata {BASE_QUANTIZE}: {word:?} is not known\n  hint: a newer version of ft"
            ))
        })
    }

    /// Names of the outputs of the adapter's score head, if any; transformers' default names for adapters of other
    /// programs.
    ///
    /// # Errors
    /// A tensor of another shape than a head's.
    pub fn scores(&self) -> Result<Option<Vec<String>>, Error> {
        let Some(key) = self.whole(SCORE) else { return Ok(None) };
        let outputs = match self.tensors.shape(&key) {
            Some(&[outputs, _]) if (1..=MAX_LABELS).contains(&outputs) => outputs,
            shape => {
                let shape = shape.unwrap_or_default();
                return Err(
                    self.fail(format!("{key}: {shape:?}; a matrix of 1 to {MAX_LABELS} rows is wanted"))
                );
            }
        };
        let named = match &self.tensors {
            Tensors::File(files) => {
                files.metadata().get(LABELS).and_then(|list| serde_json::from_str(list).ok())
            }
            Tensors::Memory(_) => None,
        };
        let named = named.filter(|names: &Vec<String>| names.len() == outputs);
        Ok(Some(named.unwrap_or_else(|| numbered(outputs))))
    }

    /// The config of a base with this adapter: with the adapter's layout of experts, and with its score head, if any.
    ///
    /// # Errors
    /// Another number of outputs than the base's score head, or as [`Adapter::scores`].
    pub fn config_of(&self, mut base: Config) -> Result<Config, Error> {
        self.config.set_layout(&mut base);
        match (self.scores()?, &base.scores) {
            (Some(own), Some(there)) if own.len() != there.len() => Err(self.fail(format!(
                "{SCORE}: {} outputs in the adapter, {} in the base",
                own.len(),
                there.len()
            ))),
            (Some(_), None) if base.is_nested() => Err(self
                .fail(format!("{SCORE}: not built yet: a score head on a vision checkpoint's text model"))),
            (Some(own), None) => {
                let name = base.family.model_type;
                let why = || format!("{SCORE}: transformers has no sequence classifier of {name}");
                base.with_scores(own).ok_or_else(|| self.fail(why()))
            }
            _ => Ok(base),
        }
    }

    fn fail(&self, why: String) -> Error {
        Error::Peft { file: self.dir.join("adapter_model.safetensors").display().to_string(), why }
    }

    /// Possible keys of a trained tensor in PEFT files.
    fn keys(t: &Trained) -> Vec<String> {
        if t.part == Part::Magnitude {
            return Self::magnitude_keys(&t.module).into();
        }
        let mut keys = vec![format!("{PREFIX}{}", t.name)];
        keys.extend(t.fused.as_ref().map(|f| format!("{PREFIX}{}", f.name(t.part))));
        if matches!(t.part, Part::Weight | Part::Bias) {
            let last = if t.part == Part::Weight { "weight" } else { "bias" };
            keys.push(format!("{PREFIX}{}.modules_to_save.{last}", t.module));
        }
        keys
    }

    fn magnitude_keys(module: &str) -> [String; 2] {
        let key = format!("{PREFIX}{module}.lora_magnitude_vector");
        [key.clone(), key + ".weight"]
    }

    /// Refuses a DoRA magnitude on a module trained by plain LoRA, unless it equals the row norms and so
    /// has no effect. `norms` is only called if a magnitude exists.
    pub fn check_neutral(
        &self,
        m: &Module,
        norms: &dyn Fn() -> candle_core::Result<Tensor>,
    ) -> ft_base::Result<()> {
        let Some(key) = Self::magnitude_keys(&m.name).into_iter().find(|k| self.tensors.shape(k).is_some())
        else {
            return Ok(());
        };
        let held = self.tensors.tensor(&key)?.flatten_all()?;
        let norms = norms()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let neutral = held.dims() == norms.dims() && {
            let apart = ((held - &norms)?.abs()? / norms)?.max_all()?.to_scalar::<f32>()?;
            apart <= NEUTRAL
        };
        if neutral {
            return Ok(());
        }
        let why = format!("{key}: a magnitude that changes the numbers, but {} trains without DoRA", m.name);
        Err(self.fail(why + "\n  hint: dora = true in its rule").into())
    }

    /// Key of a trained tensor in this adapter.
    fn find(&self, t: &Trained) -> Result<Option<String>, Error> {
        let Some((key, shape)) =
            Self::keys(t).into_iter().find_map(|k| self.tensors.shape(&k).map(|s| (k.clone(), s)))
        else {
            return Ok(None);
        };
        let want = fused_shape(t, &key).unwrap_or_else(|| t.shape.clone());
        if shape != want {
            let why = format!("{key}: {shape:?} in the adapter, {want:?} by the recipe and the model");
            return Err(self.fail(why));
        }
        Ok(Some(key))
    }

    /// Whether the adapter holds the full weight of a module, replacing the base's.
    pub fn replaces(&self, module: &str) -> bool {
        self.whole(module).is_some()
    }

    /// Key of the full weight of a module, if the adapter holds one.
    fn whole(&self, module: &str) -> Option<String> {
        let keys = ["weight", "modules_to_save.weight"].map(|last| format!("{PREFIX}{module}.{last}"));
        keys.into_iter().find(|key| self.tensors.shape(key).is_some())
    }

    /// Reads every tensor, to find NaN and infinite values before anything is written.
    ///
    /// # Errors
    /// `store::Error::NotFinite`.
    pub fn check_values(&self) -> ft_base::Result<()> {
        self.tensors.names().try_for_each(|name| self.tensors.tensor(name).map(|_| ()))
    }

    /// Values of a trained tensor, f32 on the CPU, if the adapter holds them.
    pub fn get(&self, t: &Trained) -> ft_base::Result<Option<Tensor>> {
        match self.find(t)? {
            None => Ok(None),
            Some(key) if fused_shape(t, &key).is_some() => self.slice_of(t, &key).map(Some),
            Some(key) => Ok(Some(self.tensors.tensor(&key)?)),
        }
    }

    /// A or B of an expert's linear, from the tensor of all experts.
    fn slice_of(&self, t: &Trained, key: &str) -> ft_base::Result<Tensor> {
        let place = t.fused.as_ref().and_then(|f| Some((f.expert, f.parameter.slice.as_ref()?)));
        let Some((expert, slice)) = place else { return self.tensors.tensor(key) };
        let mut held = self.fused.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.contains_key(key) {
            // The parameters of a layer have two tensors each.
            if held.len() >= 4 {
                held.clear();
            }
            let all = self.tensors.tensor(key)?;
            let by_expert = if t.part == Part::A {
                all.reshape((slice.experts, t.shape[0], t.shape[1]))?
            } else {
                all.reshape((slice.rows, t.shape[1], slice.experts))?.permute((2, 0, 1))?.contiguous()?
            };
            held.insert(key.to_string(), by_expert);
        }
        let own = held[key].get(expert)?;
        if t.part == Part::A {
            return Ok(own.contiguous()?);
        }
        if slice.step == 1 {
            return Ok(own.narrow(0, slice.first, t.shape[0])?.contiguous()?);
        }
        let rows: Vec<u32> = (0..t.shape[0]).map(|i| (slice.first + i * slice.step) as u32).collect();
        Ok(own.index_select(&Tensor::new(rows, &Device::Cpu)?, 0)?)
    }

    /// Selection described by the adapter's config; all tensors must be present, except those of Qwen2-MoE's experts.
    ///
    /// # Errors
    /// A config that does not match the model; missing tensors.
    pub fn selection(&self, config: &Config) -> ft_base::Result<Selection> {
        let mut selection = Selection::from_peft(config, &self.config)?;
        self.freeze_experts(config, &mut selection);
        self.check_head_alone(&selection)?;
        let mut missing = Vec::new();
        for t in selection.trained() {
            if self.find(&t)?.is_none() {
                missing.push(t.name);
            }
        }
        let Some(first) = missing.first() else { return Ok(selection) };
        let why = match missing.len() {
            1 => format!("{first} is missing, and adapter_config.json chooses it"),
            n => format!("{first} and {} more tensors that adapter_config.json chooses are missing", n - 1),
        };
        Err(self.fail(why).into())
    }

    /// Freezes the experts of Qwen2-MoE, if the adapter has tensors of other modules alone. In transformers 5 experts
    /// are parameters, not modules; PEFT then adapts the parameters in other mixtures, but nothing in this one.
    fn freeze_experts(&self, config: &Config, selection: &mut Selection) {
        let others = || selection.modules.iter().any(|(m, c)| m.expert.is_none() && *c != Choice::Freeze);
        let held = || self.tensors.names().any(|name| name.contains(".experts."));
        if config.family.model_type != "qwen2_moe" || held() || !others() {
            return;
        }
        let mut frozen = false;
        let is_module = |m: &Module| m.expert.is_some() && m.parameter.is_none();
        for (_, choice) in selection.modules.iter_mut().filter(|(m, _)| is_module(m)) {
            frozen |= *choice != Choice::Freeze;
            *choice = Choice::Freeze;
        }
        if frozen {
            selection.notes.push(format!(
                "{}: its config names experts and it holds no tensor of any, as PEFT writes Qwen2-MoE with \
                 transformers 5: the experts stay as in the base",
                self.dir.display()
            ));
        }
    }

    /// Checks the adapter against a selection: refuses untrained tensors, shape mismatches, A without B or
    /// vice versa, a tied head unlike the embedding, and, of a file, another scale.
    pub fn check_against(&self, selection: &Selection, trained: &[Trained]) -> ft_base::Result<()> {
        let mut known: HashSet<String> = HashSet::new();
        for t in trained {
            self.find(t)?;
            known.extend(Self::keys(t));
        }
        for (m, _) in selection.loras().filter(|(m, _)| !matches!(m.kind, Kind::Embedding { .. })) {
            // Plain LoRA in an adapter with DoRA: see check_neutral.
            known.extend(Self::magnitude_keys(&m.name));
        }
        self.check_tokens(selection, trained)?;
        if selection.tied_in_full() {
            self.check_tied(selection, trained)?;
            known.insert(format!("{PREFIX}{}.weight", selection.name_of(Group::Head)));
        }
        self.check_extra(&known.iter().filter_map(|key| self.tensors.name_of(key)).collect())?;
        let mut halves: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
        let shares = |t: &Trained| {
            t.fused.as_ref().and_then(|f| f.parameter.slice.as_ref()).is_some_and(|s| s.a_of.is_some())
        };
        for t in trained.iter().filter(|t| matches!(t.part, Part::A | Part::B) && !shares(t)) {
            halves.entry(&t.module).or_default()[usize::from(t.part == Part::B)] = self.find(t)?.is_some();
        }
        if let Some((m, _)) = halves.iter().find(|(_, [a, b])| a != b) {
            return Err(self.fail(format!("{m}: has one of lora_A and lora_B")).into());
        }
        self.check_scales(selection, trained)
    }

    /// Refuses untrained tensors, except frozen weights of the base and LoRA without effect on a tower.
    fn check_extra(&self, known: &HashSet<Cow<'_, str>>) -> ft_base::Result<()> {
        let mut extra = Vec::new();
        for name in self.tensors.names().filter(|n| !known.contains(*n) && !is_frozen(n)) {
            if !self.is_idle(name)? {
                extra.push(name);
            }
        }
        extra.sort_unstable();
        let Some(first) = extra.first() else { return Ok(()) };
        let count =
            if extra.len() == 1 { "a tensor".to_string() } else { format!("{} tensors", extra.len()) };
        let hint = if is_of_tower(first) {
            format!("ft computes the text model alone: {MERGE}")
        } else if self.config.ties {
            // Without the head's tensors, the adapter would be another one.
            "add a [[train]] rule that chooses it".into()
        } else {
            "add a [[train]] rule that chooses it, or take it out of the adapter".into()
        };
        Err(self.fail(format!("{first}: {count} in the adapter that nothing trains\n  hint: {hint}")).into())
    }

    /// Whether a tensor is of LoRA on a tower with a B of zeros, as after training on text alone.
    fn is_idle(&self, name: &str) -> ft_base::Result<bool> {
        let Some((module, _)) = name.split_once(".lora_").filter(|_| is_of_tower(name)) else {
            return Ok(false);
        };
        let b = format!("{module}.lora_B.weight");
        if self.tensors.shape(&b).is_none() {
            return Ok(false);
        }
        Ok(self.tensors.tensor(&b)?.flatten_all()?.to_vec1::<f32>()?.iter().all(|x| *x == 0.0))
    }

    /// The scales of a file's LoRA must be those of the selection: another one would rescale the updates.
    fn check_scales(&self, selection: &Selection, trained: &[Trained]) -> ft_base::Result<()> {
        // Values given by name have the scales of the selection.
        if matches!(self.tensors, Tensors::Memory(_)) {
            return Ok(());
        }
        let mut held = HashSet::new();
        for t in trained.iter().filter(|t| t.part == Part::B) {
            if self.find(t)?.is_some() {
                held.insert(t.module.as_str());
            }
        }
        for (m, own) in selection.loras().filter(|(m, _)| held.contains(m.name.as_str())) {
            let theirs = self.config.spec_of(m)?;
            let scales = [scale(own), scale(&theirs)];
            if (scales[0] - scales[1]).abs() > SCALE * scales[1].abs() {
                let why = format!(
                    "{}: its scale is {} in the adapter, {} by the recipe\n  hint: rank = {}, alpha = {} and \
                     rslora = {} in its rule, as in the adapter",
                    m.name, scales[1], scales[0], theirs.rank, theirs.alpha, theirs.rslora
                );
                return Err(self.fail(why).into());
            }
        }
        Ok(())
    }

    /// Token rows must match the trained tokens, in the same order.
    fn check_tokens(&self, selection: &Selection, trained: &[Trained]) -> ft_base::Result<()> {
        for t in trained.iter().filter(|t| t.part == Part::Rows) {
            let ours = selection.tokens.of(&t.module);
            let names = self.config.spellings(&t.module);
            let is = |m: &str| names.iter().any(|name| name.ends_with(m));
            let held = self.config.tokens().iter().find(|(m, _)| is(m));
            let same = held.is_none_or(|(_, ids)| *ids == ours || ours.is_empty());
            if self.find(t)?.is_some() && !same {
                let why = format!(
                    "{}: its rows are of other tokens than train, or in another order\n  hint: the tokens of \
                     trainable_token_indices in adapter_config.json, in that order",
                    t.module
                );
                return Err(self.fail(why).into());
            }
        }
        Ok(())
    }

    /// A tied head must not be without the embedding.
    fn check_head_alone(&self, selection: &Selection) -> Result<(), Error> {
        let [head, embedding] =
            [Group::Head, Group::Embedding].map(|group| self.whole(selection.name_of(group)));
        match head.filter(|_| selection.tied_in_full() && embedding.is_none()) {
            None => Ok(()),
            Some(key) => Err(self.fail(format!(
                "{key} without embed_tokens, but the model's head and embedding are one tensor \
                 (tie_word_embeddings): PEFT trains a copy and leaves the embedding as it was\n  hint: {MERGE}"
            ))),
        }
    }

    /// A tied head's copy must equal the embedding.
    fn check_tied(&self, selection: &Selection, trained: &[Trained]) -> ft_base::Result<()> {
        self.check_head_alone(selection)?;
        let head = format!("{PREFIX}{}.weight", selection.name_of(Group::Head));
        let embedding = selection.name_of(Group::Embedding);
        let Some(t) = trained.iter().find(|t| t.module == embedding) else { return Ok(()) };
        if self.tensors.shape(&head).is_none() {
            return match self.find(t)? {
                Some(key) if !self.config.ties => {
                    let why = format!(
                        "{key} without lm_head, but the model's head and embedding are one tensor \
                         (tie_word_embeddings): PEFT would train a copy and leave the head as it was\n  hint: \
                         ensure_weight_tying = true in adapter_config.json, if the adapter was trained so; or merge \
                         it with PEFT (merge_and_unload)"
                    );
                    Err(self.fail(why).into())
                }
                _ => Ok(()),
            };
        }
        let Some(embedding) = self.get(t)? else { return Ok(()) };
        let head_values = self.tensors.tensor(&head)?;
        let same = head_values.dims() == embedding.dims()
            && (head_values - embedding)?.abs()?.max_all()?.to_scalar::<f32>()? == 0.0;
        if same {
            return Ok(());
        }
        let why = format!(
            "{head} is not the embedding, but the model's head and embedding are one tensor (tie_word_embeddings)\n  \
             hint: {MERGE}"
        );
        Err(self.fail(why).into())
    }

    /// Compares `*.base_layer.*` tensors, saved by PEFT for adapters of a tied head, with the base. The names of either
    /// may follow transformers 5, a release, or the text model alone.
    pub fn check_base(&self, base: &TensorFiles, config: &Config) -> ft_base::Result<()> {
        let [head, embedding] = [config.vocabulary_name().to_string(), config.embedding_name()]
            .map(|m| alone(&format!("{m}.weight")).into_owned());
        for name in self.tensors.names().filter(|n| is_frozen(n)) {
            let own =
                name.trim_start_matches(PREFIX).replace(".token_adapter.", ".").replace(".base_layer.", ".");
            let own = alone(&own);
            let tied = (config.tied && *own == head).then_some(embedding.as_str());
            let mut found = [Some(&*own), tied].into_iter().flatten();
            let Some(own) = found.find_map(|own| base.names().find(|n| alone(n) == own)) else {
                return Err(self.fail(format!("{name}: the base has no {own}")).into());
            };
            let (a, b) = (self.tensors.tensor(name)?, base.tensor(own, DType::F32, &Device::Cpu)?);
            let same = a.dims() == b.dims() && {
                let allowed = ((b.abs()? * ROUNDING)? + SMALLEST)?;
                ((a - b)?.abs()? - allowed)?.max_all()?.to_scalar::<f32>()? <= 0.0
            };
            if !same {
                return Err(self
                    .fail(format!("{name}: differs from the base's {own}: the adapter is of another model"))
                    .into());
            }
        }
        Ok(())
    }
}

/// Whether a tensor is a frozen weight of the base, saved by PEFT with adapters of embedding and head.
fn is_frozen(name: &str) -> bool {
    name.contains(".base_layer.") && !name.contains(".base_layer.lora_")
}

/// Whether a tensor is of a tower of a vision checkpoint.
fn is_of_tower(name: &str) -> bool {
    name.split('.').any(|part| TOWERS.contains(&part))
}

/// Shape of the tensor of all experts, if named by `key`.
fn fused_shape(t: &Trained, key: &str) -> Option<Vec<usize>> {
    let fused = t.fused.as_ref().filter(|f| key == format!("{PREFIX}{}", f.name(t.part)))?;
    let slice = fused.parameter.slice.as_ref()?;
    Some(match t.part {
        Part::A => vec![slice.experts * t.shape[0], t.shape[1]],
        _ => vec![slice.rows, t.shape[1] * slice.experts],
    })
}
