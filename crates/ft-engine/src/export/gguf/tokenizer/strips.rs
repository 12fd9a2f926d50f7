//! Special tokens taking the spaces around them (`lstrip`, `rstrip`), known to llama.cpp by the model's name.

use serde_json::{Map, Value};

/// llama.cpp lets all special tokens of a model so named take the spaces behind them, these aside.
const NAMES: [&str; 2] = ["phi-3", "phi3"];
const TAKE_NONE: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];
/// Looked up by llama.cpp in these models, like the three tokens above.
const END: &str = "</s>";

fn takes_spaces_behind(token: &Value) -> bool {
    token["rstrip"] == true
}

/// Whether the tokens are those of Phi-3.
fn as_phi3(added: &[&Value]) -> bool {
    let text = |t: &Value| t["content"].as_str().unwrap_or_default().to_string();
    let there = |wanted: &&str| added.iter().any(|t| text(t) == **wanted);
    let fits =
        |t: &&Value| t["lstrip"] != true && takes_spaces_behind(t) != TAKE_NONE.contains(&text(t).as_str());
    TAKE_NONE.iter().all(there) && there(&END) && added.iter().all(fits)
}

/// Name of the model with which llama.cpp reads texts as the tokenizer does, or nearly so.
pub(super) fn title(name: &str, file: &Map<String, Value>) -> String {
    let added: Vec<&Value> = super::entries(file).collect();
    let lower = name.to_ascii_lowercase();
    let named = NAMES.iter().find_map(|n| lower.find(n).map(|at| (at, n.len())));
    match (as_phi3(&added), named) {
        (true, Some(_)) | (false, None) => name.into(),
        (true, None) => format!("{name} (phi-3)"),
        // llama.cpp cannot load the file under this name if a token is missing.
        (false, Some((at, len))) => title(&[&name[..at], "Phi 3", &name[at + len..]].concat(), file),
    }
}

/// Tokens taking spaces, but not in llama.cpp.
pub(super) fn unstripped(file: &Map<String, Value>) -> Vec<&str> {
    let added: Vec<&Value> = super::entries(file).collect();
    if as_phi3(&added) {
        return Vec::new();
    }
    let takes = |t: &&&Value| t["lstrip"] == true || takes_spaces_behind(t);
    added.iter().filter(takes).filter_map(|t| t["content"].as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_title_names_phi_3_by_its_tokens() {
        let file = |tokens: &[(&str, bool)]| -> Map<String, Value> {
            let added: Vec<Value> =
                tokens.iter().map(|(t, rstrip)| json!({"content": t, "rstrip": rstrip})).collect();
            [("added_tokens".to_string(), json!(added))].into_iter().collect()
        };
        let own =
            [("<unk>", false), ("<s>", false), ("</s>", true), ("<|endoftext|>", false), ("<|end|>", true)];
        let phi3 = file(&own);
        assert_eq!(title("tuned", &phi3), "tuned (phi-3)");
        assert_eq!(title("Phi-3-mini", &phi3), "Phi-3-mini");
        assert!(unstripped(&phi3).is_empty());
        let other = file(&own[3..]);
        assert_eq!(title("Phi-3.5 of phi3", &other), "Phi 3.5 of Phi 3");
        assert_eq!(title("tuned", &other), "tuned");
        assert_eq!(unstripped(&other), ["<|end|>"]);
    }
}
