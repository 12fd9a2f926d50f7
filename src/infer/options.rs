//! Options of verbs with a model, and errors of options.

use crate::train;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ft_recipe::{Dtype, Quantize};

/// How to load a model that answers.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct LoadOptions {
    /// Compute dtype; by default that of a followed run, else bf16 on CUDA, f32 on the CPU
    #[arg(long, value_parser = words(Dtype::WORDS, Dtype::from_word))]
    pub dtype: Option<Dtype>,
    /// Quantization of the base's linears; by default that of the adapter's or followed run
    #[arg(long, value_parser = words(Quantize::WORDS, Quantize::from_word))]
    pub quantize: Option<Quantize>,
}

/// Parser of an option with the values of a recipe key.
pub fn words<T: Clone + Send + Sync + 'static>(
    words: &'static [(&'static str, &'static str)],
    from_word: fn(&str) -> Option<T>,
) -> impl TypedValueParser<Value = T> {
    let names = PossibleValuesParser::new(words.iter().map(|(w, _)| *w));
    names.try_map(move |w| from_word(&w).ok_or("no such value"))
}

/// An invalid command or option.
pub fn usage(message: impl Into<String>) -> ft_base::Error {
    train::Error::Usage(message.into()).into()
}
