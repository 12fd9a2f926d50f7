//! Ranks in other processes, as seen by the first rank.

use super::inputs::RunInputs;
use ft_engine::comm::Comm;

/// Ranks in other processes, as seen by the first rank.
pub trait RemoteRanks {
    /// Collectives of the ranks.
    fn comm(&self) -> &dyn Comm;

    /// Reports that the recipe is resolved and the run folder is locked. Other ranks then look for them.
    ///
    /// # Errors
    /// Lost rank.
    fn opened(&self) -> ft_base::Result<()>;

    /// Reports that the run begins. Other ranks then load the model.
    ///
    /// # Errors
    /// Lost rank; a rank with other settings or data.
    fn begin(&self, inputs: &RunInputs) -> ft_base::Result<()>;
}
