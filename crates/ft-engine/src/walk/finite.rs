//! Check of logits.

use candle_core::DType;
use ft_base::error::{ExitCode, Failure};
use ft_kernels::{Real, Tensor, optimizer, to_host};

/// NaN or infinite logits.
#[derive(Debug, thiserror::Error)]
#[error("{what}: the logits are not finite\n  {hint}")]
pub struct NotFinite {
    /// Source of the logits.
    pub what: String,
    /// Line with a hint for the user.
    pub hint: &'static str,
}

impl Failure for NotFinite {
    fn exit_code(&self) -> ExitCode {
        ExitCode::NonFinite
    }
}

/// Returns an error if logits are NaN or infinite; `what` names their source.
///
/// # Errors
/// [`NotFinite`].
pub fn finite(logits: &Real, what: &str, hint: &'static str) -> ft_base::Result<()> {
    let logits = Tensor::Real(to_host(&logits.to_dtype(DType::F32)?)?);
    if optimizer::finite(&logits)? { Ok(()) } else { Err(NotFinite { what: what.into(), hint }.into()) }
}
