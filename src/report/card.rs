//! Model card (README.md on the hub) of an adapter or a model.

use super::read::{Metrics, text};
use ft_base::store;
use ft_base::terminal::escape;
use ft_data::holds_rows;
use ft_recipe::{Data, Init, Recipe};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Contents of a card, gathered from a folder and its run.
struct About {
    adapter: bool,
    /// Base model as named in the files.
    base: Option<String>,
    /// Prompt form of the training data.
    form: Option<String>,
    /// Training recipe without local paths.
    recipe: Option<Recipe>,
    metrics: Option<Metrics>,
    license: Option<String>,
}

/// Model card of the adapter or model in `folder`, for hub repository `repository`. Training facts come
/// from the run folder `run`, if given.
///
/// # Errors
/// A recipe or metrics file that exists but cannot be read.
pub fn card(folder: &Path, run: Option<&Path>, repository: &str) -> ft_base::Result<String> {
    let about = About::read(folder, run)?;
    Ok(about.render(repository))
}

/// File name of the card.
pub const CARD: &str = "README.md";
/// Start of the last line of a generated card; the hash of the text above follows.
const MADE: &str = "<!-- made by ft, ";

/// Writes the card of a run's result into `folder`, soon to be renamed to `target`. A user-edited card in
/// `target` is kept.
///
/// # Errors
/// As [`card`]; a file that cannot be written.
pub fn leave_card(folder: &Path, run: &Path, name: &str, target: &Path) -> ft_base::Result<()> {
    let there = store::read_plain_text(&target.join(CARD), store::LARGEST).ok();
    let text = match there.filter(|text| !is_untouched(text)) {
        Some(changed) => changed,
        None => {
            let text = card(folder, Some(run), &format!("OWNER/{name}"))?;
            let hash = blake3::hash(text.as_bytes()).to_hex();
            format!("{text}{MADE}{hash} -->\n")
        }
    };
    Ok(store::write_atomic(&folder.join(CARD), text.as_bytes())?)
}

/// Whether a card is unchanged since [`leave_card`] wrote it.
pub fn is_untouched(text: &str) -> bool {
    text.rsplit_once(MADE).is_some_and(|(text, rest)| {
        rest.trim_end().strip_suffix(" -->") == Some(&*blake3::hash(text.as_bytes()).to_hex())
    })
}

/// Whether a source is a hub repository, not a local path.
pub fn is_hub_id(source: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    source.split_once('/').is_some_and(|(owner, name)| plain(owner) && plain(name))
        && !holds_rows(Path::new(source))
        && !Path::new(source).exists()
}

fn json_of(path: &Path) -> Value {
    let bytes = store::read_plain(path, store::LARGEST).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or(Value::Null)
}

impl About {
    fn read(folder: &Path, run: Option<&Path>) -> ft_base::Result<Self> {
        let config = json_of(&folder.join("adapter_config.json"));
        let adapter = config.is_object();
        let recipe = match run.map(|r| r.join("recipe.toml")).filter(|p| p.is_file()) {
            Some(path) => Some(Recipe::load(&path, &[])?),
            None => None,
        };
        let base = match text(&config, "base_model_name_or_path") {
            "" => recipe.as_ref().map(|r| r.model.source.clone()),
            base => Some(base.to_string()),
        };
        let metrics = match run.map(|r| r.join("metrics.jsonl")).filter(|p| p.is_file()) {
            Some(path) => Some(Metrics::read(&path)?),
            None => None,
        };
        let license = base.as_deref().and_then(|b| license(Path::new(b)));
        let form = json_of(&folder.join("ft.json"))["form"].as_str().map(str::to_string);
        Ok(Self { adapter, base, form, recipe: recipe.map(without_paths), metrics, license })
    }

    fn render(&self, repository: &str) -> String {
        // JSON strings are valid YAML
        let quoted = |s: &str| json!(s).to_string();
        let hub_base = self.base.as_deref().filter(|b| is_hub_id(b));
        let mut out = String::from("---\n");
        if let Some(base) = hub_base {
            let _ = writeln!(out, "base_model: {}", quoted(base));
            let relation = if self.adapter { "adapter" } else { "finetune" };
            let _ = writeln!(out, "base_model_relation: {relation}");
        }
        let _ = writeln!(out, "library_name: {}", if self.adapter { "peft" } else { "transformers" });
        out.push_str("pipeline_tag: text-generation\n");
        if let Some(license) = &self.license {
            let _ = writeln!(out, "license: {}", quoted(license));
        }
        let data: Vec<&str> =
            self.recipe.iter().flat_map(|r| &r.data.train).map(|s| s.source.as_str()).collect();
        let datasets: Vec<&&str> = data.iter().filter(|d| is_hub_id(d)).collect();
        if !datasets.is_empty() {
            out.push_str("datasets:\n");
            for d in datasets {
                let _ = writeln!(out, "- {}", quoted(d));
            }
        }
        out.push_str("tags:\n- ft\n");
        out.push_str(if self.adapter { "- lora\n" } else { "" });
        let name = repository.rsplit('/').next().unwrap_or(repository);
        let _ = writeln!(out, "---\n\n# {name}\n");
        let what = if self.adapter { "An adapter (PEFT)" } else { "A model" };
        // a local path is useless to other people
        let of = hub_base.map_or(String::new(), |b| format!(" of [{b}](https://huggingface.co/{b})"));
        let _ = writeln!(out, "{what}{of}, trained with ft {}.\n", env!("CARGO_PKG_VERSION"));
        if !data.is_empty() {
            let shown = |d: &&str| match is_hub_id(d) {
                true => format!("[{d}](https://huggingface.co/datasets/{d})"),
                false => format!("`{}`", escape(d).replace('`', "")),
            };
            let all: Vec<String> = data.iter().map(shown).collect();
            let _ = writeln!(out, "Trained on {}.\n", all.join(", "));
        }
        self.results(&mut out);
        self.usage(&mut out, repository, hub_base);
        if let Some(recipe) = &self.recipe {
            let recipe = recipe.to_toml();
            // longer than any backtick run in the recipe
            let fence = "`".repeat(3 + longest_run(&recipe, '`'));
            let _ = writeln!(out, "## Recipe\n\n{fence}toml\n{}\n{fence}", escape(recipe.trim_end()));
        }
        out
    }

    fn results(&self, out: &mut String) {
        let Some(m) = &self.metrics else { return };
        let _ = writeln!(out, "## Results\n\n| | |\n|---|---|");
        let row = |out: &mut String, what: &str, value: String| {
            let _ = writeln!(out, "| {what} | {value} |");
        };
        row(out, "steps", m.last_step().to_string());
        let tokens: f64 = m.steps.values().map(|s| s.tokens).filter(|n| n.is_finite()).sum();
        row(out, "tokens", format!("{tokens:.0}"));
        if let Some((_, s)) = m.steps.last_key_value().filter(|(_, s)| s.loss.is_finite()) {
            row(out, "training loss of the last step", format!("{:.4}", s.loss));
        }
        let evals: Vec<(&u64, &f64)> = m.evals.iter().filter(|(_, l)| l.is_finite()).collect();
        let mut ends = vec![evals.first(), evals.last().filter(|_| evals.len() > 1)];
        ends.retain(Option::is_some);
        for (step, loss) in ends.into_iter().flatten() {
            let value = format!("{loss:.4} (perplexity {:.2})", loss.exp());
            row(out, &format!("evaluation loss after step {step}"), value);
        }
        out.push('\n');
    }

    fn usage(&self, out: &mut String, repository: &str, base: Option<&str>) {
        let id = json!(repository);
        let _ = writeln!(out, "## Use\n");
        if self.adapter {
            let named = base.unwrap_or("BASE");
            let base = json!(named);
            let _ = writeln!(
                out,
                "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
                 model = AutoModelForCausalLM.from_pretrained({base})\nmodel = PeftModel.from_pretrained(model, {id})\n\
                 tokenizer = AutoTokenizer.from_pretrained({base})\n```\n"
            );
            let _ = writeln!(out, "Or with ft: `ft chat {named} --adapter {repository}`\n");
        } else {
            let _ = writeln!(
                out,
                "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
                 model = AutoModelForCausalLM.from_pretrained({id})\ntokenizer = AutoTokenizer.from_pretrained({id})\n```\n"
            );
            let _ = writeln!(out, "Or with ft: `ft chat {repository}`\n");
        }
        match self.form.as_deref() {
            Some("chat") => out.push_str("It was trained with the chat template.\n\n"),
            Some("alpaca") => out.push_str("It was trained on Alpaca's prompts: ask it in that form.\n\n"),
            Some("text") => out.push_str("It was trained on plain text, which it continues.\n\n"),
            _ => {}
        }
    }
}

/// Replaces local paths in a recipe by their last component, for privacy, and resets the output folder,
/// so that equal runs have equal cards.
fn without_paths(mut recipe: Recipe) -> Recipe {
    let source = |s: &mut String| {
        if !is_hub_id(s) {
            *s = file_name(Path::new(s)).display().to_string();
        }
    };
    source(&mut recipe.model.source);
    if let Init::Adapter(a) = &mut recipe.lora.init {
        source(a);
    }
    let Data { train, eval, .. } = &mut recipe.data;
    train.iter_mut().chain(eval).for_each(|s| source(&mut s.source));
    if let Some(path) = &mut recipe.data.chat_template {
        *path = file_name(path);
    }
    recipe.model.cache = None;
    recipe.run.output = "runs/{name}".into();
    recipe
}

fn file_name(path: &Path) -> PathBuf {
    path.file_name().map_or_else(|| "local".into(), PathBuf::from)
}

fn longest_run(text: &str, c: char) -> usize {
    text.split(|x| x != c).map(str::len).max().unwrap_or(0)
}

/// License named in the model card of the base folder.
fn license(base: &Path) -> Option<String> {
    let card = store::read_plain_text(&base.join("README.md"), 1 << 20).ok()?;
    let head = card.strip_prefix("---\n")?.split("\n---").next()?;
    let line = head.lines().find_map(|l| l.strip_prefix("license:"))?;
    Some(line.trim().trim_matches(['"', '\'']).to_string()).filter(|l| !l.is_empty())
}
