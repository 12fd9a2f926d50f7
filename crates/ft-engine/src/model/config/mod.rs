//! Reads `config.json` of transformers 4 and 5 into one [`Config`].
//!
//! Unsupported keys with an effect on the numbers are refused by name. Unknown keys are listed in
//! [`Config::unknown`], so nothing is ignored silently.

mod keys;
mod rules;
#[cfg(test)]
mod tests;

pub use keys::Keys;

use super::family::{Bias, Family, find};
use super::rope::Rope;
use super::{Error, Result};
use ft_base::store::json::{object, short};
use serde_json::{Map, Value};
use std::path::Path;

/// Limit on decoder layers.
const LAYERS: usize = 1024;
/// Limit on experts per layer.
const EXPERTS: usize = 16_384;
/// Limit on experts over all layers.
const ALL_EXPERTS: usize = 65_536;
/// Limit on the width of the residual stream.
const HIDDEN: usize = 1 << 20;
/// Limit on the inner width of a feed-forward layer or expert.
const INNER: usize = 1 << 22;
/// Limit on heads and on channels per head.
const HEADS: usize = 4096;
/// Limit on vocabulary size.
const VOCAB: usize = 1 << 26;
/// Limit on positions.
const POSITIONS: usize = 1 << 30;
/// Limit on parameters; keeps byte and operation counts within 64 bits.
const PARAMETERS: u128 = 1 << 46;
/// Limit on activation values per token over all layers.
const VALUES: u128 = 1 << 28;

/// Architecture of a model, as read from `config.json`.
#[derive(Clone, Debug)]
pub struct Config {
    /// Row of the family table.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of dense feed-forward layers.
    pub intermediate: usize,
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Vocabulary size: rows of the embedding.
    pub vocab: usize,
    /// Epsilon of RMSNorm.
    pub eps: f64,
    /// Whether the head shares the embedding's weight.
    pub tied: bool,
    pub rope: Rope,
    /// `max_position_embeddings`; 2048 if missing.
    pub max_positions: usize,
    /// Sliding window of each layer, in tokens; `None` is full attention.
    pub windows: Vec<Option<usize>>,
    pub biases: Biases,
    /// Mixture-of-experts settings; `None` for dense models.
    pub moe: Option<Moe>,
    /// Standard deviation of randomly initialized weights.
    pub initializer_range: f64,
    /// Whether the checkpoint holds 4-bit weights in the format of bitsandbytes.
    pub four_bit: bool,
    /// Keys of the file unknown to `ft` and ignored.
    pub unknown: Vec<String>,
    /// The JSON object of the file, with overrides applied.
    pub raw: Map<String, Value>,
}

/// Which linears have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub struct Biases {
    /// Query, key and value projections.
    pub qkv: bool,
    /// Attention's output projection.
    pub o: bool,
    /// Feed-forward linears.
    pub mlp: bool,
}

/// Mixture-of-experts settings.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// Whether the top-k gates are normalized to sum to one.
    pub normalise: bool,
    /// For every layer, whether it has experts; otherwise it is dense.
    pub sparse: Vec<bool>,
    /// Inner width of the shared expert; 0 if none.
    pub shared: usize,
}

impl Config {
    /// Bytes per matrix value in the published checkpoint.
    pub fn stored_width(&self) -> u64 {
        let named = ["dtype", "torch_dtype"].iter().find_map(|k| self.raw.get(*k)?.as_str());
        if named == Some("float32") { 4 } else { 2 }
    }

    /// Reads `config.json` of a model folder, with `overrides` replacing keys.
    ///
    /// # Errors
    /// A missing or malformed file, an unknown architecture, or a key that is missing, out of range or
    /// unsupported; the error names the file and the key.
    pub fn load(dir: &Path, overrides: &Map<String, Value>) -> Result<Self> {
        let path = dir.join("config.json");
        let file = path.display().to_string();
        let bytes = ft_base::store::read_plain(&path, ft_base::store::LARGEST)
            .map_err(|e| Error::Read { file: file.clone(), source: e })?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::Syntax {
            file: file.clone(),
            why: format!("not UTF-8 at byte {}", e.valid_up_to()),
        })?;
        let raw = object(text).map_err(|why| Error::Syntax { file: file.clone(), why })?;
        Self::overridden(&file, raw, overrides)
    }

    /// Parses a JSON object after replacing keys by `overrides`; `file` is the name in errors.
    ///
    /// # Errors
    /// As [`Config::load`], with a hint if the offending key comes from an override.
    pub fn overridden(
        file: &str,
        mut raw: Map<String, Value>,
        overrides: &Map<String, Value>,
    ) -> Result<Self> {
        raw.extend(overrides.iter().map(|(k, v)| (k.clone(), v.clone())));
        Self::parse(file, raw).map_err(|e| match e {
            Error::Key { file, key, why }
                if overrides.contains_key(key.split('.').next().unwrap_or(&key)) =>
            {
                let why = format!("{why}\n  hint: the value is model.override's");
                Error::Key { file, key, why }
            }
            e => e,
        })
    }

    /// Parses a JSON object; `file` is the name in errors.
    pub fn parse(file: &str, raw: Map<String, Value>) -> Result<Self> {
        let keys = Keys::new(file, &raw);
        let model_type = keys.string("model_type")?.unwrap_or_default();
        let Some(family) = find(model_type) else {
            return Err(Error::Architecture {
                file: file.into(),
                found: if model_type.is_empty() { "no model_type".into() } else { model_type.into() },
                known: super::family::FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", "),
            });
        };
        if let Some(a) = raw.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str)
            && a != family.architecture
        {
            return Err(
                keys.bad("architectures", format!("{a}; {model_type} is built as {}", family.architecture))
            );
        }
        keys.refuse_unsupported(family)?;
        let hidden = keys.size("hidden_size", HIDDEN)?;
        let layers = keys.size("num_hidden_layers", LAYERS)?;
        let heads = keys.size("num_attention_heads", HEADS)?;
        let kv_heads = keys.some("num_key_value_heads", HEADS)?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(keys
                .bad("num_key_value_heads", format!("{kv_heads}; {heads} heads must be a multiple of it")));
        }
        let head_dim = match keys.some("head_dim", HEADS)?.or(family.default_head_dim) {
            Some(d) => d,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(keys
                    .bad("hidden_size", format!("{hidden}, no multiple of {heads} heads, and no head_dim")));
            }
        };
        if head_dim == 0 || head_dim % 2 != 0 || head_dim > HEADS {
            let why = format!("{head_dim}; rotary embedding needs an even number, up to {HEADS}");
            return Err(keys.bad("head_dim", why));
        }
        let max_positions = keys.some("max_position_embeddings", POSITIONS)?.unwrap_or(2048);
        let bias = |b: Bias| -> Result<bool> {
            match b {
                Bias::Never => Ok(false),
                Bias::Always => Ok(true),
                Bias::Key(k) => Ok(keys.flag(k)?.unwrap_or(false)),
                Bias::Unless(k) => Ok(keys.flag(k)?.unwrap_or(true)),
            }
        };
        let biases =
            Biases { qkv: bias(family.qkv_bias)?, o: bias(family.o_bias)?, mlp: bias(family.mlp_bias)? };
        let moe = keys.moe(family, layers)?;
        let intermediate = match &moe {
            Some(m) if m.sparse.iter().all(|s| *s) => {
                keys.some("intermediate_size", INNER)?.unwrap_or(m.width)
            }
            _ => keys.size("intermediate_size", INNER)?,
        };
        let config = Self {
            family,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: keys.size("vocab_size", VOCAB)?,
            eps: keys.number("rms_norm_eps", 1e-30..=1.0)?.unwrap_or(family.default_eps),
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            rope: Rope::parse(&keys, family.default_theta, max_positions)?,
            max_positions,
            windows: keys.windows(family, layers)?,
            biases,
            moe,
            initializer_range: keys.number("initializer_range", 1e-30..=1e3)?.unwrap_or(0.02),
            four_bit: keys.four_bit()?,
            unknown: keys.unknown(),
            raw: Map::new(),
        };
        keys.token_ids(config.vocab)?;
        config.check_size(&keys)?;
        Ok(Self { raw, ..config })
    }

    /// Refuses sizes that are valid one by one but too large in total, before byte counts can overflow 64
    /// bits.
    fn check_size(&self, keys: &Keys<'_>) -> Result<()> {
        let of = |n: usize| n as u128;
        let (d, layers) = (of(self.hidden), of(self.layers));
        let inner = of(self.heads + 2 * self.kv_heads) * of(self.head_dim);
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
        let dense = (layers - sparse) * of(self.intermediate);
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
