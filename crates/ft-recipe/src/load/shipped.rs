//! The recipes embedded in the binary.

use super::error::Error;
use crate::check::nearest;

/// A recipe in `recipes/`.
#[derive(Debug, Clone, Copy)]
pub struct Shipped {
    /// File stem.
    pub name: &'static str,
    /// File contents.
    pub text: &'static str,
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        &[$(Shipped { name: $name, text: include_str!(concat!("../../../../recipes/", $name, ".toml")) }),*]
    };
}

/// All shipped recipes. A test compares the list with the folder.
pub const SHIPPED: &[Shipped] = shipped![
    "quickstart",
    "quickstart-dpo",
    "quickstart-kto",
    "quickstart-distill",
    "quickstart-reward",
    "quickstart-classify",
    "pretrain-quickstart",
    "qwen3-0.6b-lora",
    "qwen3-0.6b-full",
    "qwen3-8b-lora",
    "qwen3-8b-full",
    "qwen3-8b-48gb-full",
    "qwen2.5-7b-lora",
    "qwen2.5-7b-full",
    "llama-3.1-8b-lora",
    "llama-3.1-8b-full",
    "qwen3-8b-qlora",
    "qwen3-14b-qlora",
    "qwen3-32b-qlora",
    "qwen2.5-7b-qlora",
    "llama-3.1-8b-qlora",
    "llama-3.3-70b-qlora",
    "mixtral-8x7b-router-only",
    "mixtral-8x7b-6layers-2experts",
    "mixtral-8x7b-qlora-experts",
    "qwen3-30b-a3b-qlora",
    "qwen3-30b-a3b-24gb-qlora",
    "qwen3.5-9b-qlora",
    "qwen3.5-27b-qlora",
    "qwen3.5-35b-a3b-qlora",
    "gemma-3-12b-qlora",
    "gemma-3-27b-qlora",
    "gemma-4-e4b-qlora",
    "gemma-4-31b-qlora",
    "gemma-4-26b-a4b-qlora",
    "gpt-oss-20b-lora",
];

impl Shipped {
    /// The first line of the header comment, without the `#`.
    pub fn title(&self) -> &'static str {
        self.text.lines().next().unwrap_or("").trim_start_matches('#').trim()
    }

    /// The header comment's part on the recipe's needs.
    pub fn needs(&self) -> String {
        let of = |line: &&str, word: &str| line.trim_start().starts_with(word);
        let header = self.text.lines().map_while(|line| line.strip_prefix('#'));
        let needs = header.skip_while(|line| !of(line, "needs ")).take_while(|line| !of(line, "start "));
        needs.collect::<Vec<_>>().join("\n")
    }

    /// Finds the recipe `name`, with or without `.toml`.
    ///
    /// # Errors
    /// [`Error::NoSuchRecipe`], with the nearest name.
    pub fn find(name: &str) -> Result<&'static Shipped, Error> {
        let wanted = name.strip_suffix(".toml").unwrap_or(name);
        SHIPPED.iter().find(|s| s.name == wanted).ok_or_else(|| {
            let hint = match nearest(wanted, SHIPPED.iter().map(|s| s.name)) {
                Some(near) => format!("did you mean {near}?"),
                None => "`ft recipes` lists them".into(),
            };
            Error::NoSuchRecipe { name: name.into(), hint }
        })
    }
}
