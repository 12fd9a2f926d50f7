//! Memory beyond tensors: process, libraries, allocator.

use ft_kernels::Machine;

/// CUDA context, cuBLAS and the cuBLAS workspace.
pub(super) const CUDA_CONTEXT: u64 = 600 << 20;

/// Device buffers of NCCL for channels and peers. An estimate: 1.6 GB are reported for one communicator (NVIDIA/nccl
/// issue 864); fewer channels take less.
pub(super) const NCCL: u64 = 1600 << 20;

/// Bytes of an `ft` process besides tensors: code, tokenizer, threads.
pub const PROCESS: u64 = 128 << 20;

/// Host memory of the CUDA driver, context and libraries. Not measured with ft: a PyTorch process grew by
/// 1,123 MiB with the context and by 594 MiB with its first convolution (pytorch/pytorch issue 12873);
/// newer drivers load kernels lazily and stay below.
pub const CUDA_HOST: u64 = 1792 << 20;

/// Freed blocks kept for reuse on the CPU, as a fraction 1/40 of engine bytes (`memory/pool.rs` of `ft-base`).
const KEPT_PART: u64 = 40;

/// Small blocks, their gaps, and lazily loaded code on the CPU: a constant, plus a fraction 1/64 of
/// engine bytes (`benches/memory.py`).
const SMALL_BLOCKS: (u64, u64) = (6 << 20, 64);

/// Buffers of the checkpoint writer on the CPU.
pub const WRITER: u64 = 1 << 20;

/// Allocator overhead on top of `engine` bytes. On CUDA an assumed 2% (unconfirmed on GPUs); on the CPU
/// [`reuse`] plus small blocks.
pub fn overhead(machine: Machine, engine: u64) -> u64 {
    if machine.cuda { engine / 50 } else { reuse(engine) + SMALL_BLOCKS.0 + engine / SMALL_BLOCKS.1 }
}

/// Freed bytes the CPU allocator may keep for reuse at a peak of `engine` bytes.
pub fn reuse(engine: u64) -> u64 {
    engine / KEPT_PART
}
