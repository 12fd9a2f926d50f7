//! Parsing of a config.

use super::defaults::{completed, is_default};
use super::error::{Error, Result};
use super::family::{Bias, FAMILIES, Family, find, find_nested};
use super::keys::Keys;
use super::layers::TYPES;
use super::limits::{ALL_EXPERTS, HEADS, HIDDEN, INNER, LAYERS, PARAMETERS, POSITIONS, VALUES, VOCAB};
use super::rope;
use super::rules::{CAP, NOISE, OF_SOME, idle_override, is_noise};
use super::spelling::default_body;
use super::types::{Biases, Config, LayerAttention, Moe, PROBLEM};
use ft_base::store;
use ft_base::store::json::{object, short};
use ft_recipe::{MAX_LABELS, numbered};
use serde_json::{Map, Value};
use std::path::Path;

impl Config {
    /// Reads `config.json` of a model folder, with `overrides` replacing keys.
    ///
    /// # Errors
    /// A missing or malformed file, an unknown architecture, or a missing, out-of-range or unsupported key; an override
    /// tying a head unlike the embedding. The error names the file and the key.
    pub fn load(dir: &Path, overrides: &Map<String, Value>) -> Result<Self> {
        let file = dir.join("config.json").display().to_string();
        let bytes = store::read_inside(dir, "config.json", store::LARGEST).map_err(|e| {
            let source = match e {
                store::Error::Read { source, .. } => source,
                e => std::io::Error::other(e),
            };
            Error::Read { file: file.clone(), source }
        })?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::Syntax {
            file: file.clone(),
            why: format!("not UTF-8 at byte {}", e.valid_up_to()),
        })?;
        let raw = object(text).map_err(|why| Error::Syntax { file: file.clone(), why })?;
        Self::overridden(&file, raw, overrides)?.spelled_as_in(dir).untied_as_in(dir, &file, overrides)
    }

    /// Parses a JSON object after replacing keys by `overrides`, in the text model if nested; `file` is the name in
    /// errors.
    ///
    /// # Errors
    /// As [`Config::load`], with a hint if the offending key comes from an override.
    pub fn overridden(
        file: &str,
        mut raw: Map<String, Value>,
        overrides: &Map<String, Value>,
    ) -> Result<Self> {
        rope::refuse(&Keys::new(file, overrides))?;
        name_ministral(&mut raw, overrides);
        let nested = raw.get(Self::TEXT).is_some_and(Value::is_object);
        let of_whole = |key: &str| nested && OF_WHOLE.contains(&key);
        let (whole, own): (Map<String, Value>, Map<String, Value>) =
            overrides.clone().into_iter().partition(|(key, _)| of_whole(key));
        raw.extend(whole);
        if nested {
            raw.extend(overrides.get(TIED).map(|tied| (TIED.to_string(), tied.clone())));
        }
        let name = overrides.get("model_type").filter(|_| !nested).or(raw.get("model_type"));
        let family = named(name.and_then(Value::as_str).unwrap_or_default(), nested);
        let text = match raw.get_mut(Self::TEXT) {
            Some(Value::Object(text)) => text,
            _ => &mut raw,
        };
        match family {
            Some((family, _)) => rope::replace(text, &own, family),
            None => text.extend(own),
        }
        let origin = |key: &str| {
            let text = raw.get(Self::TEXT).and_then(Value::as_object).unwrap_or(&raw);
            let top = key.split('.').find(|part| *part != Self::TEXT).unwrap_or(key);
            if rope::is_changed(key, overrides) {
                "\n  hint: the value is model.override's"
            } else if family.is_some_and(|(family, _)| is_default(family, text, top)) {
                "\n  hint: the file has no value for it: the value is the default of its class"
            } else {
                ""
            }
        };
        match Self::read(file, &raw, overrides) {
            Ok(mut config) => {
                config.unknown.retain(|key| !rope::is_changed(key, overrides));
                Ok(Self { raw, idle_override: idle_override(overrides, config.family), ..config })
            }
            Err(Error::Key { file, key, why }) => Err(Error::Key { file, why: why + origin(&key), key }),
            Err(e) => Err(e),
        }
    }

    /// Parses a JSON object; `file` is the name in errors.
    pub fn parse(file: &str, raw: Map<String, Value>) -> Result<Self> {
        Self::overridden(file, raw, &Map::new())
    }

    /// Reads a JSON object with these overrides in it, which is not yet the config's `raw`.
    fn read(file: &str, raw: &Map<String, Value>, overrides: &Map<String, Value>) -> Result<Self> {
        let whole = Keys::new(file, raw);
        let text = whole.table(Self::TEXT)?;
        let nested = text.is_some();
        let family = family_of(file, &whole, nested)?;
        let scores = scores_of(&whole, family)?;
        let own = text.as_ref().unwrap_or(&whole);
        let mut all = completed(family, own.raw);
        rope::settle(&mut all, family);
        let keys = own.over(&all);
        keys.refuse_unsupported(family)?;
        let layers = keys.size("num_hidden_layers", LAYERS)?;
        let [hidden, heads, kv_heads, head_dim] = attention_sizes(&keys)?;
        let vocab = keys.size("vocab_size", VOCAB)?;
        let max_positions = keys.size("max_position_embeddings", POSITIONS)?;
        // By the outer key of a vision checkpoint, as in transformers.
        let tied = whole.flag(TIED)?.unwrap_or(family.default_tied);
        let biases = biases(&keys, family)?;
        let moe = keys.moe(family, layers)?;
        let attention = keys.attention(family, layers, (heads, kv_heads, head_dim))?;
        let ropes = rope::read(&keys, family, &attention, (head_dim, max_positions))?;
        let unread = rope::unread((own, &keys), family, &ropes, overrides)?;
        let notes = notes(&keys, (family, nested, tied), &attention, overrides)?;
        let of_ids = keys.token_ids(vocab, overrides)?;
        let format = whole.weight_format(family)?;
        let config = Self {
            family,
            body: default_body(raw.contains_key(Self::TEXT)),
            hidden,
            intermediate: intermediate(&keys, family, moe.as_ref())?,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab,
            pad: keys.pad(vocab),
            eps: keys.required("rms_norm_eps", 1e-30..=1e6)?,
            tied: tied && scores.is_none(),
            scores,
            ropes,
            max_positions,
            notes: unread.into_iter().chain(notes).chain(of_ids).collect(),
            attention,
            glu: keys.glu(family)?,
            embedding_scale: if family.scales_embedding { (hidden as f64).sqrt() } else { 1.0 },
            logit_cap: if family.reads(CAP, nested) { keys.number(CAP, 1e-6..=1e9)? } else { None },
            biases,
            delta: keys.delta(family, layers)?,
            layer_inputs: keys.layer_inputs(family)?,
            double_wide: keys.flag("use_double_wide_mlp")? == Some(true),
            moe,
            initializer_range: keys.number("initializer_range", 1e-30..=1e3)?.unwrap_or(0.02),
            format,
            unknown: whole.unknown(),
            idle_override: None,
            raw: Map::new(),
        };
        config.check_size(&keys)?;
        Ok(config)
    }

    /// Refuses sizes that are valid one by one but too large in total, before byte counts can overflow 64
    /// bits.
    fn check_size(&self, keys: &Keys<'_>) -> Result<()> {
        let of = |n: usize| n as u128;
        let (d, layers) = (of(self.hidden), of(self.layers));
        let inner = self.attention.iter().map(|a| of(self.heads + 2 * a.kv_heads) * of(a.head_dim)).max();
        let inner = inner.unwrap_or(0);
        let inputs = self.layer_inputs.map_or(0, |i| of(i.width));
        let rows = self.layer_inputs.map_or(0, |i| of(i.vocab));
        let (sparse, width, all, used, shared) = match &self.moe {
            None => (0, 0, 0, 0, 0),
            Some(m) => {
                let sparse = m.sparse.iter().filter(|s| **s).count();
                if sparse * m.experts > ALL_EXPERTS {
                    let key = self.family.experts.map_or("num_experts", |x| x.count_key);
                    let why = format!(
                        "{} experts in each of {sparse} layers; ft takes up to {ALL_EXPERTS} in all",
                        m.experts
                    );
                    return Err(keys.bad(key, why));
                }
                (of(sparse), of(m.width), of(m.experts), of(m.top_k), of(m.shared))
            }
        };
        let dense = if self.family.is_beside() { layers } else { layers - sparse };
        let dense = dense * of(self.intermediate) * if self.double_wide { 2 } else { 1 };
        let linear = self.delta.as_ref().map_or(0, |l| {
            let each = of(l.heads.channels()) + 2 * of(l.heads.value_width()) + 2 * of(l.heads.values);
            of(l.is_linear.iter().filter(|is| **is).count()) * each
        });
        let parts = [
            ("vocab_size", 2 * of(self.vocab) * d, 0),
            ("num_attention_heads", 2 * layers * inner * d, layers * 2 * inner),
            ("intermediate_size", 3 * dense * d, 3 * dense),
            (
                "moe_intermediate_size",
                3 * sparse * (all * width + shared) * d,
                3 * sparse * (used * width + shared),
            ),
            ("num_hidden_layers", 4 * layers * d, 8 * layers * d),
            ("linear_num_value_heads", linear * (d + 64), 2 * linear),
            ("hidden_size_per_layer_input", layers * inputs * (rows + 3 * d), 4 * layers * inputs),
        ];
        let parameters: u128 = parts.iter().map(|p| p.1).sum();
        let values: u128 = parts.iter().map(|p| p.2).sum();
        let (key, what, n, most) = if parameters > PARAMETERS {
            (parts.iter().max_by_key(|p| p.1), "parameters", parameters, PARAMETERS)
        } else if values > VALUES {
            (parts.iter().max_by_key(|p| p.2), "values of a token in all layers", values, VALUES)
        } else {
            return Ok(());
        };
        let key = key.map_or("hidden_size", |p| p.0);
        let key = if keys.raw.contains_key(key) { key } else { "intermediate_size" };
        let shown = keys.raw.get(key).map(short).unwrap_or_default();
        let why = format!("{shown}; with the other sizes this makes {n} {what}, and ft takes up to {most}");
        Err(keys.bad(key, why))
    }
}

/// Inner width of dense feed-forward layers; that of an expert if the model has none and the config names none.
fn intermediate(keys: &Keys<'_>, family: &Family, moe: Option<&Moe>) -> Result<usize> {
    const KEY: &str = "intermediate_size";
    match moe {
        Some(m) if m.sparse.iter().all(|s| *s) && !family.is_beside() => {
            Ok(keys.some(KEY, INNER)?.unwrap_or(m.width))
        }
        _ => keys.size(KEY, INNER),
    }
}

fn biases(keys: &Keys<'_>, family: &Family) -> Result<Biases> {
    let bias = |b: Bias| -> Result<bool> {
        match b {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Key(k) => Ok(keys.flag(k)?.unwrap_or(false)),
            Bias::Unless(k) => Ok(keys.flag(k)?.unwrap_or(true)),
        }
    };
    Ok(Biases { qkv: bias(family.qkv_bias)?, o: bias(family.o_bias)?, mlp: bias(family.mlp_bias)? })
}

/// Keys of a vision checkpoint absent from the text model.
const OF_WHOLE: [&str; 2] = ["architectures", "quantization_config"];

/// Key of a head tied to the embedding.
pub(super) const TIED: &str = "tie_word_embeddings";

/// Renames a Mistral with [`TYPES`], not read by its class, to Ministral, as transformers' `AutoConfig` does.
fn name_ministral(raw: &mut Map<String, Value>, overrides: &Map<String, Value>) {
    let lists = raw.contains_key(TYPES) || overrides.contains_key(TYPES);
    if !lists || raw.get("model_type").is_none_or(|name| name != "mistral") {
        return;
    }
    raw.insert("model_type".into(), "ministral".into());
    for class in raw.get_mut("architectures").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(of) = class.as_str().and_then(|name| name.strip_prefix("MistralFor")) {
            *class = format!("MinistralFor{of}").into();
        }
    }
}

/// Notes on keys without effect: [`TIED`] in the text model of a vision checkpoint, where the whole decides, keys of
/// other classes, and windows.
fn notes(
    keys: &Keys<'_>,
    (family, nested, tied): (&Family, bool, bool),
    attention: &[LayerAttention],
    overrides: &Map<String, Value>,
) -> Result<Vec<String>> {
    let other = keys.flag(TIED)?.filter(|own| *own != tied);
    let of_tied = |own: bool| {
        let path = format!("{}.{TIED}", Config::TEXT);
        format!("{path}: {own} has no effect, as in transformers: {TIED} of the whole is {tied}")
    };
    let mut notes: Vec<String> = other.map(of_tied).into_iter().collect();
    let class = family.nested.filter(|_| nested).map_or(family.architecture, |(_, class)| class);
    let noise = NOISE.into_iter().filter(|key| is_noise(keys.get(key)));
    let given = OF_SOME.into_iter().filter(|key| keys.get(key).is_some()).chain(noise);
    for key in given.filter(|key| !family.reads(key, nested)) {
        let why = format!("{class} does not read it");
        notes.push(keys.without_effect(key, &why, overrides.contains_key(key))?);
    }
    notes.extend(keys.unread_windows(family, attention, overrides)?);
    Ok(notes)
}

/// Family of this name and the name of its class, `nested` if within a vision checkpoint.
fn named(model_type: &str, nested: bool) -> Option<(&'static Family, &'static str)> {
    if nested { find_nested(model_type) } else { find(model_type).map(|f| (f, f.architecture)) }
}

/// Family of a config, by the `model_type` of the whole, `nested` if the text model has keys of its own.
fn family_of(file: &str, keys: &Keys<'_>, nested: bool) -> Result<&'static Family> {
    let model_type = keys.string("model_type")?.unwrap_or_default();
    let Some((family, architecture)) = named(model_type, nested) else {
        if let Some((other, _)) = named(model_type, !nested) {
            let why = match nested {
                true => format!("{model_type} has none; its keys stand beside model_type"),
                false => format!("missing; {model_type} has its keys there, {} has none", other.model_type),
            };
            return Err(keys.bad(Config::TEXT, why));
        }
        return Err(Error::Architecture {
            file: file.into(),
            found: if model_type.is_empty() { "no model_type".into() } else { short(&model_type.into()) },
            known: FAMILIES.iter().flat_map(Family::names).collect::<Vec<_>>().join(", "),
        });
    };
    match keys.raw.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str) {
        Some(a) if a != architecture && (nested || Some(a) != family.classifier) => {
            let why = format!("{a}; {model_type} is built as {architecture}");
            Err(keys.bad("architectures", why))
        }
        _ => Ok(family),
    }
}

/// Names of the outputs of a sequence classifier: `id2label`, or as many as `num_labels` says, 2 by default. A problem
/// with another loss is refused; one output is a number.
fn scores_of(keys: &Keys<'_>, family: &Family) -> Result<Option<Vec<String>>> {
    let class = keys.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    if class.is_none() || class != family.classifier {
        return Ok(None);
    }
    let names = label_names(keys)?;
    let built = if names.len() == 1 { "regression" } else { "single_label_classification" };
    match keys.string(PROBLEM)?.filter(|problem| *problem != built) {
        Some(other) => {
            let hint = format!(
                "hint: override = {{ {PROBLEM} = \"{built}\" }} under [model], if its head is of that"
            );
            Err(keys.bad(PROBLEM, format!("{other}; {built} is wanted for this number of outputs\n  {hint}")))
        }
        None => Ok(Some(names)),
    }
}

fn label_names(keys: &Keys<'_>) -> Result<Vec<String>> {
    let number = keys.some("num_labels", MAX_LABELS)?;
    let Some(labels) = keys.get("id2label").and_then(Value::as_object) else {
        return Ok(numbered(number.unwrap_or(2)));
    };
    let names: Option<Vec<String>> =
        (0..labels.len()).map(|i| Some(labels.get(&i.to_string())?.as_str()?.to_string())).collect();
    let wanted = || keys.bad("id2label", "names by number, from \"0\" without gaps, are wanted");
    names.filter(|n| (1..=MAX_LABELS).contains(&n.len())).ok_or_else(wanted)
}

/// Width of the residual stream, query heads, key/value heads, channels per head.
fn attention_sizes(keys: &Keys<'_>) -> Result<[usize; 4]> {
    let hidden = keys.size("hidden_size", HIDDEN)?;
    let heads = keys.size("num_attention_heads", HEADS)?;
    let kv_heads = keys.some("num_key_value_heads", HEADS)?.unwrap_or(heads);
    if heads % kv_heads != 0 {
        let why = format!("{kv_heads}; {heads} heads must be a multiple of it");
        return Err(keys.bad("num_key_value_heads", why));
    }
    let head_dim = match keys.some("head_dim", HEADS)? {
        Some(d) => d,
        None if hidden % heads == 0 => hidden / heads,
        None => {
            let why = format!("{hidden}, no multiple of {heads} heads, and no head_dim");
            return Err(keys.bad("hidden_size", why));
        }
    };
    if head_dim % 2 != 0 || head_dim > HEADS {
        let why = format!("{head_dim}; rotary embedding needs an even number, up to {HEADS}");
        return Err(keys.bad("head_dim", why));
    }
    Ok([hidden, heads, kv_heads, head_dim])
}
