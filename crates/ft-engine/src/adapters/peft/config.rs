//! Reads PEFT's `adapter_config.json` with an allow-list of keys, value types and values.
//!
//! A key is either supported, or without effect on the numbers, or must be off. Everything else is refused
//! by name, including values of a wrong type, which Python would coerce or fail on. The list covers
//! `LoraConfig` of PEFT 0.18 to 0.21; PEFT writes `null` for most unused keys.

use super::format::{alone, current};
use crate::adapters::Error;
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module};
use fancy_regex::{Regex, RegexBuilder};
use ft_base::store;
use ft_base::store::json::{object, short};
use ft_recipe::LoraSpec;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

/// Accepted values of a key, besides `null`.
#[derive(Clone, Copy)]
enum Accepted {
    /// Interpreted by [`PeftConfig::parse`].
    Read,
    /// Any value of a type, by a test and in words; without effect on the numbers.
    Any(fn(&Value) -> bool, &'static str),
    /// One of these strings.
    Word(&'static [&'static str]),
    /// Only values by a test: others would change the numbers.
    Only(fn(&Value) -> bool),
}

const TEXT: Accepted = Accepted::Any(Value::is_string, "a text");
const FLAG: Accepted = Accepted::Any(Value::is_boolean, "true or false");
const COUNT: Accepted = Accepted::Any(Value::is_u64, "a whole number");
const OBJECT: Accepted = Accepted::Any(Value::is_object, "an object");
const FALSE: Accepted = Accepted::Only(|v| *v == Value::Bool(false));
const EMPTY: Accepted = Accepted::Only(is_empty);
/// PEFT enables the feature even for an empty list or `false`.
const NULL: Accepted = Accepted::Only(Value::is_null);

/// Whether a value is an empty list or object.
fn is_empty(v: &Value) -> bool {
    v.as_array().is_some_and(Vec::is_empty) || v.as_object().is_some_and(Map::is_empty)
}

/// All keys of PEFT's `LoraConfig`.
const KEYS: &[(&str, Accepted)] = &[
    ("alora_invocation_tokens", NULL),
    ("alpha_pattern", Accepted::Read),
    ("arrow_config", NULL),
    ("auto_mapping", OBJECT),
    ("base_model_name_or_path", TEXT),
    ("bias", Accepted::Word(&["none"])),
    // PEFT reads the next four configs only under the init_lora_weights of the same name.
    ("corda_config", OBJECT),
    ("eva_config", OBJECT),
    ("loftq_config", OBJECT),
    ("lora_ga_config", OBJECT),
    ("ensure_weight_tying", Accepted::Read),
    ("exclude_modules", Accepted::Read),
    // PEFT resets it for `nn.Linear`, and reads it for no embedding.
    ("fan_in_fan_out", FLAG),
    ("inference_mode", FLAG),
    ("init_lora_weights", Accepted::Read),
    ("kasa_config", NULL),
    ("layer_replication", EMPTY),
    ("layers_pattern", Accepted::Read),
    ("layers_to_transform", Accepted::Read),
    ("lora_alpha", Accepted::Read),
    ("lora_bias", FALSE),
    ("lora_dropout", Accepted::Read),
    ("megatron_config", EMPTY),
    ("megatron_core", TEXT),
    ("modules_to_save", Accepted::Read),
    ("monteclora_config", NULL),
    ("peft_type", Accepted::Read),
    ("peft_version", TEXT),
    ("qalora_group_size", COUNT),
    ("r", Accepted::Read),
    ("rank_pattern", Accepted::Read),
    ("revision", TEXT),
    ("runtime_config", OBJECT),
    ("target_modules", Accepted::Read),
    ("target_parameters", Accepted::Read),
    (
        "task_type",
        Accepted::Word(&[
            "CAUSAL_LM",
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]),
    ),
    ("trainable_token_indices", Accepted::Read),
    ("use_bdlora", NULL),
    ("use_dora", Accepted::Read),
    ("use_qalora", FALSE),
    ("use_rslora", Accepted::Read),
    ("velora_config", NULL),
];

/// Hint for adapters unsupported by `ft`.
pub(super) const MERGE: &str =
    "merge it into its base with PEFT (merge_and_unload), and name the merged model in model.source";

/// Hint for adapters whose initialization changes the base on loading.
const CONVERT: &str = "save it again with PEFT's save_pretrained(.., path_initial_model_for_weight_conversion = ..), \
                       which makes it an adapter of the unchanged base; or merge it with PEFT (merge_and_unload)";

/// Largest LoRA rank.
const RANK: u64 = ft_recipe::MAX_RANK;

/// Range of |alpha|: the range in recipes, widened by the adjustment for partial rsLoRA.
const ALPHA: RangeInclusive<f64> = 1e-12..=1e12;

/// Most steps of backtracking in one name, of all expressions of a key together. Names are short.
const BACKTRACKS: usize = 10_000;

/// Group of the layer's number in an expression of `layers_pattern`.
const LAYER: &str = "layer";

/// Token ids by module-name suffix.
type Lists = Vec<(String, Arc<Vec<u32>>)>;

/// A parsed `adapter_config.json`.
#[derive(Clone, Debug)]
pub struct PeftConfig {
    /// Path, for error messages.
    pub file: String,
    base: Option<String>,
    revision: Option<String>,
    /// Modules with LoRA.
    targets: Targets,
    /// Parameters with LoRA, by suffixes of their names.
    pub(super) parameters: Vec<String>,
    saves: Vec<String>,
    spec: LoraSpec,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
    tokens: Lists,
    /// Whether a saved or adapted embedding of a tied model is the head as well (`ensure_weight_tying`).
    pub ties: bool,
    /// Whether names are as in the text model alone, also for a base within a vision checkpoint; `None` for a config
    /// without tensors.
    pub(super) alone: Option<bool>,
}

impl PeftConfig {
    /// Reads `adapter_config.json` of an adapter folder.
    ///
    /// # Errors
    /// A missing or malformed file; an unsupported key with an effect on the numbers, or an invalid value,
    /// by name.
    pub fn load(dir: &Path) -> Result<Self, Error> {
        let file = dir.join("adapter_config.json").display().to_string();
        let fail = |why: String| Error::Peft { file: file.clone(), why: format!("cannot be read: {why}") };
        let bytes = store::read_inside(dir, "adapter_config.json", store::LARGEST);
        let bytes = bytes.map_err(|e| match e {
            store::Error::Read { source, .. } => fail(source.to_string()),
            e => fail(e.to_string()),
        })?;
        let text = String::from_utf8(bytes).map_err(|_| fail("it is not UTF-8".into()))?;
        let raw = object(&text).map_err(|why| Error::Peft { file: file.clone(), why })?;
        Self::parse(file, &raw)
    }

    /// Parses a JSON object; `file` is the name in errors.
    ///
    /// # Errors
    /// As [`PeftConfig::load`].
    pub fn parse(file: String, raw: &Map<String, Value>) -> Result<Self, Error> {
        let keys = Keys { file: &file, raw };
        keys.kind()?;
        raw.iter().try_for_each(|(key, v)| keys.allow(key, v))?;
        keys.init()?;
        let text = |key| keys.get(key).and_then(Value::as_str).filter(|s| !s.is_empty()).map(str::to_string);
        let (base, revision, targets) = (text("base_model_name_or_path"), text("revision"), keys.targets()?);
        let saves = keys.list("modules_to_save")?.unwrap_or_default();
        let parameters = keys.list("target_parameters")?.unwrap_or_default();
        let spec = LoraSpec {
            rank: keys.required("r", 8, |v| keys.rank("r", v))?,
            alpha: keys.required("lora_alpha", 8.0, |v| keys.alpha("lora_alpha", v))?,
            dropout: keys.required("lora_dropout", 0.0, |v| keys.dropout(v))?,
            rslora: keys.flag("use_rslora")?,
            dora: keys.flag("use_dora")?,
        };
        let ranks = keys.patterns("rank_pattern", |key, v| keys.rank(key, v))?;
        let alphas = keys.patterns("alpha_pattern", |key, v| keys.alpha(key, v))?;
        let (ties, tokens) = (keys.flag("ensure_weight_tying")?, keys.tokens()?);
        Ok(Self {
            base,
            revision,
            targets,
            parameters,
            saves,
            spec,
            ranks,
            alphas,
            tokens,
            ties,
            alone: None,
            file,
        })
    }

    /// Base model of the adapter, and the revision on the hub.
    pub fn base(&self) -> Option<(&str, Option<&str>)> {
        Some((self.base.as_deref()?, self.revision.as_deref()))
    }

    /// Possible names of a module or parameter in this adapter: as released, as in transformers 5, as in the text
    /// model alone.
    pub(super) fn spellings<'a>(&self, name: &'a str) -> Vec<Cow<'a, str>> {
        let mut names = match self.alone {
            Some(true) => vec![alone(name)],
            Some(false) => vec![Cow::Borrowed(name), current(name)],
            None => vec![Cow::Borrowed(name), current(name), alone(name)],
        };
        names.dedup();
        names
    }

    /// Whether a module has LoRA.
    pub(super) fn chooses(&self, m: &Module) -> Result<bool, Error> {
        self.targets.matches(m, &self.spellings(&m.name))
    }

    /// Whether LoRA on the table of a tied model is of embedding and head, as PEFT decides by the targets.
    pub(super) fn ties_lora(&self) -> Result<bool, Error> {
        let mut named = false;
        for table in ["embed_tokens", "lm_head"] {
            named |= match &self.targets.target {
                Target::Regex(r) => r.is_match(table)?,
                Target::List(l) => l.iter().any(|t| is_suffix(t, table)),
                Target::AllLinear => false,
            };
        }
        Ok(self.ties && named)
    }

    /// Gives `config` the layout of this adapter: of all experts of a layer at once, as in transformers 5, if it adapts
    /// parameters.
    pub fn set_layout(&self, config: &mut Config) {
        if let Some(moe) = config.moe.as_mut().filter(|_| !self.parameters.is_empty()) {
            moe.fused = true;
        }
    }

    /// Whether `target_parameters` includes a parameter.
    pub fn adapts(&self, parameter: &str) -> bool {
        self.parameters.iter().any(|t| is_suffix(parameter, t))
    }

    /// Whether `modules_to_save` includes a module: PEFT matches suffixes of the module's name or of an
    /// enclosing module's.
    pub fn saves(&self, name: &str) -> bool {
        let mut around = Some(name);
        while let Some(n) = around {
            if self.saves.iter().any(|t| n.ends_with(t.as_str())) {
                return true;
            }
            around = n.rsplit_once('.').map(|(a, _)| a);
        }
        false
    }

    /// Token ids of trained rows, by module-name suffix.
    pub fn tokens(&self) -> &[(String, Arc<Vec<u32>>)] {
        &self.tokens
    }

    /// Whether rows of the embedding train, so that new tokens can be of the adapter: some, or all.
    pub fn trains_tokens(&self) -> bool {
        !self.tokens.is_empty() || self.saves.iter().any(|name| name.ends_with("embed_tokens"))
    }

    /// LoRA settings of a module, or of the parameter adapted by PEFT in its place.
    ///
    /// # Errors
    /// An expression in `rank_pattern` or `alpha_pattern` taking too long.
    pub fn spec_of(&self, m: &Module) -> Result<LoraSpec, Error> {
        self.spec(&self.spellings(m.parameter.as_ref().map_or(&m.name, |p| &p.name)))
    }

    /// LoRA settings under the names of a module.
    pub(crate) fn spec(&self, names: &[Cow<'_, str>]) -> Result<LoraSpec, Error> {
        Ok(LoraSpec {
            rank: self.ranks.find(names)?.unwrap_or(self.spec.rank),
            alpha: self.alphas.find(names)?.unwrap_or(self.spec.alpha),
            ..self.spec
        })
    }
}

/// Typed access to the keys; errors name the file and the key.
struct Keys<'a> {
    file: &'a str,
    raw: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Peft { file: self.file.into(), why: format!("{key}: {}", why.into()) }
    }

    fn wanted(&self, key: &str, v: &Value, what: &str) -> Error {
        self.bad(key, format!("{}; {what} is wanted", short(v)))
    }

    /// Checked first, since methods other than LoRA have other keys.
    fn kind(&self) -> Result<(), Error> {
        match self.raw.get("peft_type") {
            Some(Value::String(s)) if s == "LORA" => Ok(()),
            Some(v) => {
                Err(self.bad("peft_type", format!("{}; LORA is what ft reads\n  hint: {MERGE}", short(v))))
            }
            None => Err(self.bad("peft_type", "missing; LORA is wanted")),
        }
    }

    /// Checks a key and value against [`KEYS`].
    fn allow(&self, key: &str, v: &Value) -> Result<(), Error> {
        let Some((_, says)) = KEYS.iter().find(|(k, _)| *k == key) else {
            let off = v.is_null() || *v == Value::Bool(false) || is_empty(v);
            let why = format!(
                "{}; ft does not know this key, and it may change the numbers\n  hint: {MERGE}",
                short(v)
            );
            return if off { Ok(()) } else { Err(self.bad(key, why)) };
        };
        let fits = match says {
            Accepted::Read => true,
            Accepted::Any(fits, _) | Accepted::Only(fits) => fits(v),
            Accepted::Word(words) => v.as_str().is_some_and(|w| words.contains(&w)),
        };
        match says {
            _ if fits || v.is_null() => Ok(()),
            Accepted::Any(_, what) => Err(self.wanted(key, v, what)),
            Accepted::Word(words) if words.len() > 1 => {
                Err(self.wanted(key, v, &format!("one of {}", words.join(", "))))
            }
            _ => {
                let why = format!("{}; it changes the numbers and is not built\n  hint: {MERGE}", short(v));
                Err(self.bad(key, why))
            }
        }
    }

    /// Checks `init_lora_weights`. A and B are read from the file, but PEFT initializes them first, and
    /// some methods modify the base.
    fn init(&self) -> Result<(), Error> {
        let Some(v) = self.get("init_lora_weights").filter(|v| !v.is_boolean()) else { return Ok(()) };
        let word = v.as_str().unwrap_or_default().to_lowercase();
        let changes_base = |w: &str| {
            ["olora", "loftq", "lora_ga"].contains(&w) || w.starts_with("pissa") || w.starts_with("corda")
        };
        let why = match word.as_str() {
            "gaussian" | "eva" | "orthogonal" => return Ok(()),
            w if changes_base(w) => {
                format!("it changes the base too, and is not built\n  hint: {CONVERT}")
            }
            "mica" => format!("it freezes B, and is not built\n  hint: {MERGE}"),
            _ => "true, false, \"gaussian\", \"eva\" or \"orthogonal\" is wanted".into(),
        };
        Err(self.bad("init_lora_weights", format!("{}; {why}", short(v))))
    }

    /// A boolean, false if absent. Strings and numbers are refused; Python would take `"false"` and 1 for
    /// true.
    fn flag(&self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(self.wanted(key, v, "true or false, without quotes,")),
        }
    }

    /// A number with a default in PEFT, but invalid as `null`.
    fn required<T>(
        &self,
        key: &str,
        default: T,
        read: impl Fn(&Value) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.raw.get(key).map_or(Ok(default), read)
    }

    fn rank(&self, key: &str, v: &Value) -> Result<usize, Error> {
        let rank = v.as_u64().filter(|r| (1..=RANK).contains(r)).map(|r| r as usize);
        rank.ok_or_else(|| self.wanted(key, v, &format!("a whole number from 1 to {RANK}")))
    }

    fn alpha(&self, key: &str, v: &Value) -> Result<f64, Error> {
        let alpha = v.as_f64().filter(|a| ALPHA.contains(&a.abs()));
        alpha.ok_or_else(|| self.wanted(key, v, "a number of a size from 1e-12 to 1e12"))
    }

    fn dropout(&self, v: &Value) -> Result<f64, Error> {
        let dropout = v.as_f64().filter(|p| (0.0..1.0).contains(p));
        dropout.ok_or_else(|| self.wanted("lora_dropout", v, "a number from 0 to below 1"))
    }

    /// A list of strings.
    fn list(&self, key: &str) -> Result<Option<Vec<String>>, Error> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let names = |l: &Vec<Value>| l.iter().map(|s| s.as_str().map(str::to_string)).collect();
        v.as_array().and_then(names).map(Some).ok_or_else(|| self.wanted(key, v, "a list of names"))
    }

    /// `trainable_token_indices`: a list for the embedding, or lists by module.
    fn tokens(&self) -> Result<Lists, Error> {
        let key = "trainable_token_indices";
        let list = |v: &Value| {
            let ids = v.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok());
            let ids: Vec<u32> = ids.collect::<Option<_>>()?;
            let once: HashSet<&u32> = ids.iter().collect();
            (once.len() == ids.len()).then_some(Arc::new(ids))
        };
        let Some(v) = self.get(key) else { return Ok(Vec::new()) };
        let lists: Option<Vec<_>> = match v {
            Value::Object(map) => map.iter().map(|(m, v)| Some((m.clone(), list(v)?))).collect(),
            v => list(v).map(|ids| vec![("embed_tokens".into(), ids)]),
        };
        match lists {
            Some(lists) => Ok(lists.into_iter().filter(|(_, ids)| !ids.is_empty()).collect()),
            None => Err(self.wanted(key, v, "a list of tokens, each once, or such lists by module,")),
        }
    }

    /// Regular expression for a whole name, as Python's `re.fullmatch`.
    fn regex(&self, key: &str, pattern: &str) -> Result<Pattern, Error> {
        self.compiled(key, pattern, &format!("^(?:{pattern})$"), 1)
    }

    /// The expression `whole`, made of `pattern` in the file; it has its share of the backtracking of `among`
    /// expressions.
    fn compiled(&self, key: &str, pattern: &str, whole: &str, among: usize) -> Result<Pattern, Error> {
        let place = format!("{key}: {}", short(&Value::from(pattern)));
        match RegexBuilder::new(whole).backtrack_limit(BACKTRACKS / among.max(1)).build() {
            Ok(regex) => Ok(Pattern { file: self.file.into(), place, regex }),
            Err(e) => Err(unusable(self.file, &place, &e)),
        }
    }

    /// A list of names or one regular expression; `all` permits `"all-linear"`.
    fn target(&self, key: &str, all: bool) -> Result<Option<Target>, Error> {
        Ok(match self.get(key) {
            Some(Value::String(s)) if all && s.eq_ignore_ascii_case("all-linear") => Some(Target::AllLinear),
            Some(Value::String(s)) => Some(Target::Regex(self.regex(key, s)?)),
            _ => self.list(key)?.map(|l| Target::List(l.into_iter().collect())),
        })
    }

    /// Modules with LoRA.
    fn targets(&self) -> Result<Targets, Error> {
        let alone = || self.list("target_parameters").is_ok_and(|l| l.is_some_and(|l| !l.is_empty()));
        let Some(target) =
            self.target("target_modules", true)?.or_else(|| alone().then(|| Target::List(HashSet::new())))
        else {
            return Err(self.bad("target_modules", "missing; a list of names is wanted"));
        };
        let exclude = self.target("exclude_modules", false)?;
        let layers = self.layers()?;
        let patterns = match self.get("layers_pattern") {
            Some(Value::String(s)) if s.is_empty() => Vec::new(),
            Some(Value::String(s)) => vec![s.clone()],
            _ => self.list("layers_pattern")?.unwrap_or_default(),
        };
        for key in ["layers_to_transform", "layers_pattern"] {
            if let (Some(v), false) = (self.get(key), matches!(target, Target::List(_))) {
                let why = "; only a list in target_modules goes with it, to PEFT as to ft";
                return Err(self.bad(key, format!("{}{why}", short(v))));
            }
        }
        if layers.is_none() && !patterns.is_empty() {
            return Err(self.bad("layers_pattern", "it means nothing without layers_to_transform"));
        }
        // Of several numbers in a name, PEFT takes the first, from 0.20 on: in experts, the layer.
        let any = [r"[^.]*".to_string()];
        let patterns = if patterns.is_empty() { &any[..] } else { &patterns };
        let expression = |p: &String| {
            // Compiled alone first: unbalanced parentheses would change the surrounding expression.
            self.regex("layers_pattern", p)?;
            let whole = format!(r"^(?:(?:^|.*?\.){p}\.(?P<{LAYER}>\d+)\.)");
            self.compiled("layers_pattern", p, &whole, patterns.len())
        };
        let layers = match layers {
            None => None,
            Some(indices) => Some((indices, patterns.iter().map(expression).collect::<Result<_, _>>()?)),
        };
        Ok(Targets { target, exclude, layers })
    }

    /// `layers_to_transform`: a number or a list. An empty list means all layers, as in PEFT.
    fn layers(&self) -> Result<Option<HashSet<u64>>, Error> {
        let key = "layers_to_transform";
        let Some(v) = self.get(key) else { return Ok(None) };
        let numbers = match v {
            Value::Array(l) => l.iter().map(Value::as_u64).collect(),
            v => v.as_u64().map(|n| HashSet::from([n])),
        };
        let numbers: HashSet<u64> =
            numbers.ok_or_else(|| self.wanted(key, v, "a list of layers, from 0,"))?;
        Ok(Some(numbers).filter(|n| !n.is_empty()))
    }

    /// `rank_pattern` or `alpha_pattern`: values by regular expressions on suffixes of module names.
    fn patterns<T>(
        &self,
        key: &str,
        read: impl Fn(&str, &Value) -> Result<T, Error>,
    ) -> Result<Patterns<T>, Error> {
        let mut out = Patterns { exact: HashMap::new(), others: Vec::new() };
        let map = match self.get(key) {
            None => return Ok(out),
            Some(Value::Object(map)) => map,
            Some(v) => return Err(self.wanted(key, v, "an object of names and numbers")),
        };
        let among = map.keys().filter(|p| backtracks(p)).count();
        for (i, (pattern, v)) in map.iter().enumerate() {
            let value = read(&format!("{key}.{pattern}"), v)?;
            match exact(pattern) {
                Some(name) => {
                    out.exact.entry(name).or_insert((i, value));
                }
                None => {
                    self.regex(key, pattern)?;
                    let whole = format!(r"^(?:.*\.)?(?:{pattern})$");
                    let suffix = self.compiled(key, pattern, &whole, among)?;
                    out.others.push((i, suffix, value));
                }
            }
        }
        Ok(out)
    }
}

/// Whether the library matches a pattern by backtracking: one with look-around, atomic groups or back references.
fn backtracks(pattern: &str) -> bool {
    let refers = |pair: &[u8]| pair[0] == b'\\' && (pair[1].is_ascii_digit() || pair[1] == b'k');
    ["(?=", "(?!", "(?<", "(?>"].iter().any(|part| pattern.contains(part))
        || pattern.as_bytes().windows(2).any(refers)
}

/// The only module name matched by a pattern of the form `^model\.layers\.0\.mlp`.
fn exact(pattern: &str) -> Option<String> {
    let name = pattern.strip_prefix('^')?.replace(r"\.", "\0");
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '\0';
    name.chars().all(plain).then(|| name.replace('\0', "."))
}

/// Whether `end` is a name, or its last components.
pub fn is_suffix(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// A regular expression, in Python's syntax.
#[derive(Clone, Debug)]
struct Pattern {
    file: String,
    /// Key and expression, for error messages.
    place: String,
    regex: Regex,
}

impl Pattern {
    fn is_match(&self, name: &str) -> Result<bool, Error> {
        self.regex.is_match(name).map_err(|e| unusable(&self.file, &self.place, &e))
    }

    /// The number of the layer in a name, for an expression of `layers_pattern`.
    fn layer(&self, name: &str) -> Result<Option<u64>, Error> {
        let found = self.regex.captures(name).map_err(|e| unusable(&self.file, &self.place, &e))?;
        Ok(found.and_then(|c| c.name(LAYER)?.as_str().parse().ok()))
    }
}

/// The error for an invalid expression, or one backtracking too often.
fn unusable(file: &str, place: &str, e: &fancy_regex::Error) -> Error {
    let why = match e {
        // without the position, which counts the anchors added here
        fancy_regex::Error::ParseError(_, why) => why.to_string(),
        e => e.to_string(),
    };
    let why = format!("{place}: {why}\n  hint: list the names of the modules instead");
    Error::Peft { file: file.into(), why }
}

/// Values by pattern; the first match wins (`peft.utils.other.get_pattern_key`).
#[derive(Clone, Debug)]
struct Patterns<T> {
    /// Exact names, hashed: there may be one per module, too many to try in turn.
    exact: HashMap<String, (usize, T)>,
    others: Vec<(usize, Pattern, T)>,
}

impl<T: Copy> Patterns<T> {
    fn find(&self, names: &[Cow<'_, str>]) -> Result<Option<T>, Error> {
        for name in names {
            let mut first = self.exact.get(&**name).copied();
            for (i, pattern, v) in &self.others {
                if first.is_some_and(|(exact, _)| exact < *i) {
                    break;
                }
                if pattern.is_match(name)? {
                    first = Some((*i, *v));
                    break;
                }
            }
            if let Some((_, v)) = first {
                return Ok(Some(v));
            }
        }
        Ok(None)
    }
}

/// Modules with LoRA, as described by an adapter config.
#[derive(Clone, Debug)]
struct Targets {
    target: Target,
    exclude: Option<Target>,
    /// Layer indices, and regular expressions for a module's layer.
    layers: Option<(HashSet<u64>, Vec<Pattern>)>,
}

#[derive(Clone, Debug)]
enum Target {
    Regex(Pattern),
    List(HashSet<String>),
    AllLinear,
}

impl Target {
    fn matches(&self, m: &Module, name: &str) -> Result<bool, Error> {
        Ok(match self {
            Target::Regex(r) => r.is_match(name)?,
            // The full name, or a suffix after a dot.
            Target::List(l) => {
                l.contains(name) || name.match_indices('.').any(|(i, _)| l.contains(&name[i + 1..]))
            }
            Target::AllLinear => matches!(m.kind, Kind::Linear { .. }) && m.group != Group::Head,
        })
    }
}

impl Targets {
    /// Whether a module is selected under one of its names and excluded under none, following
    /// `peft.tuners.tuners_utils.check_target_module_exists`.
    fn matches(&self, m: &Module, names: &[Cow<'_, str>]) -> Result<bool, Error> {
        for name in names {
            if let Some(exclude) = &self.exclude
                && exclude.matches(m, name)?
            {
                return Ok(false);
            }
        }
        for name in names {
            if self.target.matches(m, name)? && self.has_layer(name)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the layer in a name is one of `layers_to_transform`.
    fn has_layer(&self, name: &str) -> Result<bool, Error> {
        let Some((indices, patterns)) = &self.layers else { return Ok(true) };
        // An exact name matches in any layer.
        if matches!(&self.target, Target::List(list) if list.contains(name)) {
            return Ok(true);
        }
        for pattern in patterns {
            if let Some(layer) = pattern.layer(name)? {
                return Ok(indices.contains(&layer));
            }
        }
        Ok(false)
    }
}
