//! Selection of the collectives for a device.

use super::Comm;
use candle_core::Device;
use std::time::Duration;

/// Runs `f` with collectives suited to tensors on `device`. CUDA tensors go through NCCL; objects and
/// liveness checks stay on `comm`. If the group has aborted, returns the cause of the abort.
///
/// # Errors
/// Errors of `f` or NCCL; a lost rank.
pub fn on_device<R>(
    comm: &dyn Comm,
    device: &Device,
    timeout: Duration,
    f: impl FnOnce(&dyn Comm) -> ft_base::Result<R>,
) -> ft_base::Result<R> {
    #[cfg(feature = "cuda")]
    if comm.world() > 1 && device.is_cuda() {
        return super::nccl::with(comm, device, timeout, f);
    }
    let _ = (device, timeout);
    f(comm)
}
