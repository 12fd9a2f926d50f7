//! Limits on the sizes in a config.

/// Limit on decoder layers.
pub(super) const LAYERS: usize = 1024;
/// Limit on experts per layer.
pub(super) const EXPERTS: usize = 16_384;
/// Limit on experts over all layers.
pub(super) const ALL_EXPERTS: usize = 65_536;
/// Limit on the width of the residual stream.
pub(super) const HIDDEN: usize = 1 << 20;
/// Limit on the inner width of a feed-forward layer or expert.
pub(super) const INNER: usize = 1 << 22;
/// Limit on heads and on channels per head.
pub(super) const HEADS: usize = 4096;
/// Limit on vocabulary size.
pub(super) const VOCAB: usize = 1 << 26;
/// Limit on positions.
pub(super) const POSITIONS: usize = 1 << 30;
/// Limit on parameters; keeps byte and operation counts within 64 bits.
pub(super) const PARAMETERS: u128 = 1 << 46;
/// Limit on activation values per token over all layers.
pub(super) const VALUES: u128 = 1 << 28;
