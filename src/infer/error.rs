//! Usage errors.

use crate::train;

/// An invalid command or option.
pub fn usage(message: impl Into<String>) -> ft_base::Error {
    train::Error::Usage(message.into()).into()
}
