//! Model card (README.md on the hub) of an adapter or a model.

use super::metrics::{Eval, Metrics, text};
use super::render::render;
use ft_base::store;
use ft_base::terminal::escape;
use ft_data::{Drops, holds_rows};
use ft_engine::files::TensorFiles;
use ft_engine::model::family;
use ft_hub::{Settings, Want};
use ft_recipe::{Data, Init, Recipe, Reference};
use minijinja::context;
use minijinja::value::Serde;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Model card of the adapter or model in `folder`, for hub repository `repository`. Training facts come
/// from the run folder `run`, if given.
///
/// # Errors
/// A recipe or metrics file that exists but cannot be read.
pub fn card(folder: &Path, run: Option<&Path>, repository: &str) -> ft_base::Result<String> {
    let config = json_of(folder, "adapter_config.json");
    let adapter = config.is_object();
    let file = |name: &str| run.map(|r| r.join(name)).filter(|p| p.is_file());
    let recipe = file("recipe.toml").map(|path| Recipe::load(&path, &[])).transpose()?;
    let metrics = file("metrics.jsonl").map(|path| Metrics::read(&path)).transpose()?;
    let base = match text(&config, "base_model_name_or_path") {
        "" => recipe.as_ref().map(|r| r.model.source.clone()),
        base => Some(base.to_string()),
    };
    let license = base.as_deref().and_then(license);
    let base = base.filter(|b| is_hub_id(b));
    let outputs = recipe.as_ref().and_then(|r| r.data.scores.labels()).map(|labels| labels.len());
    let recipe = recipe.map(without_paths);
    let sources = recipe.iter().flat_map(|r| &r.data.train).map(|s| s.source.as_str());
    // JSON strings are valid YAML and Python: values in the card's head and code are quoted, values in the text are
    // not.
    let quoted = |s: &str| json!(s).to_string();
    let files = TensorFiles::open_file(&folder.join("adapter_model.safetensors")).ok();
    let names: Vec<&str> = files.iter().flat_map(TensorFiles::names).collect();
    let model_type = metrics.as_ref().and_then(|m| m.start["model"]["family"].as_str()).unwrap_or_default();
    let needs = needs(&names, model_type, config["use_dora"].as_bool() == Some(true) || outputs.is_some());
    let (id, first) = match needs {
        Needs::Nothing => (quoted(repository), None),
        Needs::Fusing => {
            (quoted("fused"), Some(format!("ft export {repository} --to peft-fused --out fused")))
        }
        Needs::Merging => (quoted("merged"), Some(format!("ft merge {repository} --out merged"))),
    };
    let peft = adapter && needs != Needs::Merging;
    let load = if peft { quoted(base.as_deref().unwrap_or("BASE")) } else { id.clone() };
    let shown = recipe.as_ref().map(|r| given_keys(r, metrics.as_ref()));
    let trained = json_of(folder, "ft.json");
    let view = context! {
        adapter,
        outputs,
        peft,
        first,
        nested => peft && names.iter().any(|name| name.contains(".language_model.")),
        base_yaml => base.as_deref().map(quoted),
        license => license.as_deref().map(quoted),
        datasets => sources.clone().filter(|s| is_hub_id(s)).map(quoted).collect::<Vec<_>>(),
        sources => sources.map(link).collect::<Vec<_>>().join(", "),
        name => repository.rsplit('/').next().unwrap_or(repository),
        version => env!("CARGO_PKG_VERSION"),
        results => Serde(metrics.as_ref().map(results).unwrap_or_default()),
        // longer than any backtick run in the recipe
        fence => "`".repeat(3 + shown.as_deref().map_or(0, |r| longest_run(r, '`'))),
        recipe => shown.map(|r| escape(r.trim_end()).into_owned()),
        repository,
        form => trained["form"].as_str(),
        // rows of other forms beside it
        mixed => trained["also"].is_array(),
        base,
        load,
        id,
    };
    Ok(render("card.md", view, false)?)
}

/// What PEFT needs to compute the same as `ft`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// All experts of a layer in one tensor.
    Fusing,
    Merging,
}

/// What an adapter with these tensors needs with transformers 5, whose mixtures hold all experts of a layer in one
/// tensor; `unfusable` if `ft export` would refuse it.
fn needs(names: &[&str], model_type: &str, unfusable: bool) -> Needs {
    let is_lora = |name: &str| name.contains(".lora_");
    let is_expert = |name: &str| {
        name.split_once(".experts.").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    // PEFT takes LoRA on any gate_proj, up_proj or down_proj of these families for LoRA on experts.
    let by_expert = family::find(model_type).and_then(|f| f.experts).is_some_and(|x| !x.fused);
    let is_mistaken = |name: &str| by_expert && name.contains(".mlp.") && name.contains("_proj.");
    // transformers 5 has another name for Mixtral's mixtures.
    let is_lost = |name: &str| is_expert(name) || name.contains(".block_sparse_moe.");
    let in_full = names.iter().any(|name| !is_lora(name) && is_lost(name));
    let by_lora = names.iter().any(|name| is_lora(name) && (is_expert(name) || is_mistaken(name)));
    if in_full || (by_lora && unfusable) {
        Needs::Merging
    } else if by_lora {
        Needs::Fusing
    } else {
        Needs::Nothing
    }
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
    let there = text_of(target, CARD);
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

/// A text file of a folder, if it can be read.
pub fn text_of(folder: &Path, name: &str) -> Option<String> {
    String::from_utf8(store::read_inside(folder, name, store::LARGEST).ok()?).ok()
}

/// A JSON file of a folder; null if it cannot be read.
pub fn json_of(folder: &Path, name: &str) -> Value {
    text_of(folder, name).and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null)
}

/// A data source as text of a card.
fn link(source: &str) -> String {
    if is_hub_id(source) {
        format!("[{source}](https://huggingface.co/datasets/{source})")
    } else {
        format!("`{}`", escape(source).replace('`', ""))
    }
}

/// The keys of a recipe set by the user, as TOML; all keys, if they are not recorded.
fn given_keys(recipe: &Recipe, metrics: Option<&Metrics>) -> String {
    let Some(given) = metrics.and_then(|m| m.start["given"].as_array()) else { return recipe.to_toml() };
    let given = given.iter().filter_map(|key| key.as_str()).filter(|key| *key != "run.output");
    recipe.to_toml_of(&given.map(String::from).collect::<Vec<_>>())
}

/// Rows of the table of results.
fn results(m: &Metrics) -> Vec<(String, String)> {
    let mut rows = vec![
        ("steps".to_string(), m.last_step().to_string()),
        ("tokens".to_string(), format!("{:.0}", m.sum(|s| s.tokens))),
    ];
    let left = &m.start["data"]["left_out"];
    if let Ok(left) = serde_json::from_value::<Drops>(left.clone())
        && let Some(read) = m.start["data"]["rows_read"].as_u64()
        && let Some(told) = left.told(read as usize)
    {
        rows.push(("training data".into(), told));
    }
    if let Some((_, s)) = m.steps.last_key_value().filter(|(_, s)| s.loss.is_finite()) {
        rows.push(("training loss of the last step".into(), format!("{:.4}", s.loss)));
    }
    let evals: Vec<(&u64, &Eval)> = m.evals.iter().filter(|(_, e)| e.loss.is_finite()).collect();
    let last = evals.last().filter(|_| evals.len() > 1);
    for (step, Eval { loss, perplexity, scores: [.., accuracy, f1] }) in evals.first().into_iter().chain(last)
    {
        let more = [("perplexity", perplexity, 2), ("accuracy", accuracy, 4), ("F1", f1, 4)];
        let more = more.iter().filter(|(_, n, _)| n.is_finite());
        let more: Vec<_> = more.map(|(name, n, digits)| format!("{name} {n:.digits$}")).collect();
        let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join(", ")) };
        rows.push((format!("evaluation loss after step {step}"), format!("{loss:.4}{more}")));
    }
    rows
}

/// Replaces local paths in a recipe by their last component and leaves out the tracking server, for privacy,
/// and resets the output folder.
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
    if let Reference::Other(other) = &mut recipe.preference.reference {
        source(other);
    }
    let Data { train, eval, .. } = &mut recipe.data;
    train.iter_mut().chain(eval).for_each(|s| source(&mut s.source));
    if let Some(path) = &mut recipe.data.chat_template {
        *path = file_name(path);
    }
    recipe.model.cache = None;
    recipe.log.mlflow = None;
    recipe.run.output = "runs/{name}".into();
    recipe
}

fn file_name(path: &Path) -> PathBuf {
    path.file_name().map_or_else(|| "local".into(), PathBuf::from)
}

fn longest_run(text: &str, c: char) -> usize {
    text.split(|x| x != c).map(str::len).max().unwrap_or(0)
}

/// License named in the model card of the base: a folder, or a repository in the hub cache.
fn license(base: &str) -> Option<String> {
    let settings = Settings { offline: true, ..Settings::from_env() };
    let cached = || Some(ft_hub::fetch_model_with(&settings, base, "main", Want::Config, false).ok()?.dir);
    let folder = Some(PathBuf::from(base)).filter(|dir| dir.is_dir()).or_else(cached)?;
    let card = text_of(&folder, CARD)?;
    let head = card.strip_prefix("---\n")?.split("\n---").next()?;
    let line = head.lines().find_map(|l| l.strip_prefix("license:"))?;
    Some(line.trim().trim_matches(['"', '\'']).to_string()).filter(|l| !l.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor};
    use ft_engine::files::write_file;

    /// Class and commands by what PEFT 0.21 loads right with transformers 5.
    #[test]
    fn the_code_of_a_card_loads_the_trained_model() -> anyhow::Result<()> {
        const AS_IS: &str = "PeftModel.from_pretrained(model, \"me/it\")";
        const FUSED: &str = "ft export me/it --to peft-fused --out fused";
        const MERGED: &str = "ft merge me/it --out merged";
        for (tensor, family, dora, code) in [
            ("layers.0.self_attn.q_proj.lora_A", "qwen3_moe", true, AS_IS),
            ("layers.0.mlp.up_proj.lora_A", "qwen3", false, AS_IS),
            ("layers.0.mlp.up_proj.lora_A", "qwen3_moe", false, FUSED),
            ("layers.0.mlp.gate.lora_A", "qwen3_moe", false, AS_IS),
            ("layers.0.mlp.gate", "qwen3_moe", false, AS_IS),
            ("layers.0.mlp.experts.1.up_proj.lora_A", "qwen3_moe", false, FUSED),
            ("layers.0.mlp.experts.1.up_proj.lora_A", "", false, FUSED),
            ("layers.0.mlp.experts.1.up_proj.lora_A", "qwen3_moe", true, MERGED),
            ("layers.0.mlp.experts.1.up_proj", "qwen3_moe", false, MERGED),
            ("layers.0.mlp.experts.lora_A", "qwen3_moe", false, AS_IS),
            ("layers.0.mlp.shared_expert.up_proj.lora_A", "qwen3_next", false, FUSED),
            ("layers.0.mlp.shared_expert_gate.lora_A", "qwen3_next", false, AS_IS),
            ("layers.0.block_sparse_moe.gate.lora_A", "mixtral", false, AS_IS),
            ("layers.0.block_sparse_moe.gate", "mixtral", false, MERGED),
            ("language_model.layers.0.mlp.shared_expert.up_proj.lora_A", "qwen3_5_moe_text", false, AS_IS),
        ] {
            let dir = tempfile::tempdir()?;
            let write = |name: &str, text: Value| std::fs::write(dir.path().join(name), text.to_string());
            write("adapter_config.json", json!({ "use_dora": dora }))?;
            write("metrics.jsonl", json!({"event": "start", "model": {"family": family}}))?;
            let values = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
            let tensors = [(format!("base_model.model.model.{tensor}.weight"), values)];
            write_file(&dir.path().join("adapter_model.safetensors"), &tensors, &[])?;
            let card = card(dir.path(), Some(dir.path()), "me/it")?;
            for text in [AS_IS, FUSED, MERGED] {
                assert_eq!(card.contains(text), text == code, "{tensor} of {family}: {card}");
            }
            let class = if tensor.starts_with("language_model") { "ImageTextToText" } else { "CausalLM" };
            let loaded = match code {
                MERGED => format!("AutoModelFor{class}.from_pretrained(\"merged\")"),
                _ => format!("AutoModelFor{class}.from_pretrained(\"BASE\")"),
            };
            assert!(card.contains(&loaded), "{tensor} of {family}: {card}");
            assert_eq!(card.contains("PeftModel.from_pretrained(model, \"fused\")"), code == FUSED, "{card}");
            assert_eq!(card.contains("PeftModel"), code != MERGED, "{tensor} of {family}: {card}");
        }
        Ok(())
    }

    #[test]
    fn the_recipe_of_a_card_has_no_paths() -> anyhow::Result<()> {
        let text = "task = \"dpo\"\n[model]\nsource = \"/private/base\"\n[lora]\ninit = \"/private/adapter\"\n\
                    [preference]\nreference = \"/private/reference\"\n[data]\npack = false\n\
                    train = [{ source = \"/private/pairs.jsonl\", format = \"preference\" }]\n\
                    [run]\noutput = \"/private/run\"\n";
        let shown = without_paths(Recipe::parse(text, "r.toml", &[])?).to_toml();
        assert!(shown.contains("\"reference\"") && !shown.contains("private"), "{shown}");
        Ok(())
    }

    /// Losses of whole documents have no perplexity; distillation reports the perplexity of the labels.
    #[test]
    fn results_have_the_numbers_of_the_task() -> anyhow::Result<()> {
        for (of_task, shown) in [
            ("", "0.5000 (perplexity 1.65)"),
            (r#", "kd": 0.25, "ce": 1.5"#, "0.5000 (perplexity 4.48)"),
            (r#", "kl": 0.0"#, "0.5000"),
            (r#", "margins": 0.1, "kl": 0.0, "exact_match": 0.5"#, "0.5000"),
            (r#", "accuracy": 0.75, "f1": 0.5"#, "0.5000 (accuracy 0.7500, F1 0.5000)"),
        ] {
            let file = tempfile::NamedTempFile::new()?;
            std::fs::write(
                file.path(),
                format!("{{\"event\": \"eval\", \"step\": 1, \"loss\": 0.5{of_task}}}\n"),
            )?;
            let rows = results(&Metrics::read(file.path())?);
            assert_eq!(rows.last().map(|(_, value)| value.as_str()), Some(shown), "{of_task}");
        }
        Ok(())
    }
}
