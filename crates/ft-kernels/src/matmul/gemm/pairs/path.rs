//! Choice of the implementation.

#[cfg(target_arch = "x86_64")]
use super::panels;
use std::sync::OnceLock;

/// Implementation of bf16 products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Dot-product instructions.
    Dots,
    /// Operands widened to f32.
    Widened,
}

/// Environment variable selecting the path.
const VARIABLE: &str = "FT_BF16";

impl Path {
    /// Value of the environment variable.
    pub fn word(self) -> &'static str {
        match self {
            Path::Dots => "dots",
            Path::Widened => "widened",
        }
    }

    /// Description for users.
    pub fn text(self) -> &'static str {
        match self {
            Path::Dots => "AVX-512 BF16",
            Path::Widened => "widened to f32",
        }
    }

    /// Whether this CPU supports the path.
    pub fn is_here(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Path::Dots => panels::are_here(),
            #[cfg(not(target_arch = "x86_64"))]
            Path::Dots => false,
            Path::Widened => true,
        }
    }

    /// The requested path if supported; by default the fastest supported one.
    pub(super) fn choose(wanted: Option<&str>) -> Result<Self, String> {
        let Some(word) = wanted.filter(|word| !word.is_empty()) else {
            return Ok(if Path::Dots.is_here() { Path::Dots } else { Path::Widened });
        };
        match [Path::Dots, Path::Widened].into_iter().find(|p| p.word() == word) {
            Some(p) if p.is_here() => Ok(p),
            Some(_) => Err(format!(
                "{VARIABLE}=dots: this processor has no AVX-512 BF16\n  hint: {VARIABLE}=widened, or leave it out"
            )),
            None => Err(format!(
                "{VARIABLE}={word}: unknown\n  hint: {VARIABLE}=dots or widened, or leave it out"
            )),
        }
    }
}

/// The path of this process.
///
/// # Errors
/// The path requested in the environment is not supported by this CPU.
pub fn path() -> candle_core::Result<Path> {
    static PATH: OnceLock<Result<Path, String>> = OnceLock::new();
    let chosen = PATH.get_or_init(|| Path::choose(std::env::var(VARIABLE).ok().as_deref()));
    chosen.clone().map_err(candle_core::Error::msg)
}
