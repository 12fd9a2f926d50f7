//! What each operation of `kernel` allocates: one function an operation, named as there.
//!
//! On the CPU these are the sizes of the vectors in `kernel/*.rs`, byte for byte, the packing buffers of the
//! matrix product among them. On CUDA they are those of the compositions of candle's operations, counted by
//! the tensors that are alive at once where a composition has most of them.

use super::ledger::{Component, Held, Ledger};

/// Query rows of a block in `kernel::attention`.
const BLOCK: u64 = 64;
/// Scores of a composed attention block.
const SCORES: u64 = 64 << 20;

/// Where and in what type the engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// CUDA instead of the CPU.
    pub cuda: bool,
    /// Bytes of a value in the compute dtype.
    pub width: u64,
    /// Threads of the CPU.
    pub threads: u64,
}

impl Machine {
    /// Whether values are f32.
    pub fn wide(&self) -> bool {
        self.width == 4
    }
}

/// Rows of a chunk of the head.
pub fn chunk_rows(vocab: u64) -> u64 {
    crate::model::head::Head::chunk_rows(vocab as usize) as u64
}

/// The operations on a ledger.
#[derive(Clone, Debug)]
pub struct Ops {
    /// Where it is written down.
    pub ledger: Ledger,
    /// Where it would run.
    pub machine: Machine,
}

use Component::Workspace;

impl Ops {
    /// A tensor of `n` values in the compute dtype.
    pub fn tensor(&self, c: Component, n: u64) -> Held {
        self.ledger.hold(c, n * self.machine.width)
    }

    /// A tensor of `n` values in f32.
    pub fn f32(&self, c: Component, n: u64) -> Held {
        self.ledger.hold(c, 4 * n)
    }

    /// Temporaries that go again at once.
    fn touch(&self, bytes: u64) {
        drop(self.ledger.hold(Workspace, bytes));
    }

    /// A CPU kernel: half-precision inputs are widened, the result is f32 and rounded at the end.
    fn cpu(&self, inputs: u64, extra: u64, c: Component, out: u64) -> Held {
        if self.machine.wide() {
            let y = self.ledger.hold(c, 4 * out);
            self.touch(extra);
            return y;
        }
        let _views = self.f32(Workspace, inputs);
        let _wide = self.f32(Workspace, out);
        self.touch(extra);
        self.tensor(c, out)
    }

    /// A composition on CUDA with `per` bytes a value at its most crowded, beside the result.
    fn composed(&self, per: u64, n: u64, c: Component, out: u64) -> Held {
        let _t = self.ledger.hold(Workspace, per * n);
        self.tensor(c, out)
    }

    /// `kernel::gemm::matmul`: [m, k] x [k, n]; `t` where the first operand is read transposed.
    pub fn matmul(&self, c: Component, m: u64, k: u64, n: u64) -> Held {
        if self.machine.cuda {
            return self.tensor(c, m * n);
        }
        self.cpu(m * k + k * n, packing(m, k, n), c, m * n)
    }

    /// `Blocks::forward` and `Decoded::forward` on the CPU, [m, k] x [k, n]: panels are made (`panels`) or are there.
    pub fn by_panels(&self, c: Component, (m, k, n): (u64, u64, u64), panels: bool, backward: bool) -> Held {
        if self.machine.wide() {
            let y = self.ledger.hold(c, 4 * m * n);
            self.panels((m, k, n), panels, backward);
            return y;
        }
        let _views = self.f32(Workspace, m * k + if panels { 0 } else { k * n });
        let _wide = self.f32(Workspace, m * n);
        self.panels((m, k, n), panels, backward);
        self.tensor(c, m * n)
    }

    /// What the threads of such a product hold: a panel each, if they make it, and forward its packed copy; backward
    /// the product reads the panel as it is, and rows of the other operand always.
    pub fn panels(&self, (m, k, n): (u64, u64, u64), made: bool, backward: bool) {
        let width = crate::kernel::blocks::panel_width(k as usize) as u64;
        let workers = self.machine.threads.min(n.div_ceil(width)).max(1);
        let _panels = self.ledger.hold(Component::InFlight, if made { workers * panel(k, n) } else { 0 });
        self.touch(if backward { 0 } else { workers * packing_left(m, k, width.min(n)) });
    }

    /// `kernel::gemm::matmul_acc` into a tensor of the compute dtype (`wide` false) or of f32.
    pub fn matmul_acc(&self, m: u64, k: u64, n: u64, wide: bool) {
        let w = self.machine.width;
        if !self.machine.cuda && (wide || self.machine.wide()) {
            let views = if self.machine.wide() { 0 } else { 4 * (m * k + k * n) };
            self.touch(views + packing(m, k, n));
            return;
        }
        // cuBLAS adds to what is there
        if self.machine.cuda {
            return;
        }
        // the sum is made in f32, and rounded
        let _sum = self.f32(Workspace, m * n);
        self.touch(4 * (m * k + k * n) + packing(m, k, n));
        self.touch(w * m * n);
    }

    /// `kernel::norm::forward` of `rows` rows of `d`.
    pub fn norm(&self, c: Component, rows: u64, d: u64) -> Held {
        if self.machine.cuda {
            self.composed(8, rows * d, c, rows * d)
        } else {
            self.cpu(rows * d, 0, c, rows * d)
        }
    }

    /// `kernel::norm::backward`.
    pub fn norm_backward(&self, rows: u64, d: u64) -> Held {
        if self.machine.cuda {
            self.composed(24, rows * d, Workspace, rows * d)
        } else {
            self.cpu(2 * rows * d, 0, Workspace, rows * d)
        }
    }

    /// `kernel::rope::apply` to `n` values.
    pub fn rope(&self, c: Component, n: u64) -> Held {
        if self.machine.cuda { self.composed(12, n, c, n) } else { self.cpu(n, 0, c, n) }
    }

    /// `kernel::swiglu::forward`.
    pub fn swiglu(&self, c: Component, n: u64) -> Held {
        if self.machine.cuda { self.composed(16, n, c, n) } else { self.cpu(2 * n, 0, c, n) }
    }

    /// `kernel::swiglu::backward`: the gradients of gate and up.
    pub fn swiglu_backward(&self, n: u64) -> (Held, Held) {
        if self.machine.cuda {
            let _t = self.ledger.hold(Workspace, 28 * n);
            return (self.tensor(Workspace, n), self.tensor(Workspace, n));
        }
        if self.machine.wide() {
            return (self.tensor(Workspace, n), self.tensor(Workspace, n));
        }
        let _views = self.f32(Workspace, 3 * n);
        let _second = self.f32(Workspace, n);
        let first = {
            let _wide = self.f32(Workspace, n);
            self.tensor(Workspace, n)
        };
        (first, self.tensor(Workspace, n))
    }

    /// `kernel::attention::forward`: output [t, h, c] and the logarithms of the sums [t, h].
    pub fn attention(&self, c: Component, a: &Attend) -> (Held, Held) {
        let n = a.tokens * a.heads * a.head_dim;
        if self.machine.cuda {
            let _scores = self.ledger.hold(Workspace, 18 * a.scores());
            let o = self.tensor(c, n);
            let _parts = self.tensor(Workspace, n);
            return (o, self.f32(c, a.tokens * a.heads));
        }
        let lse = self.f32(c, a.tokens * a.heads);
        let blocks = a.tokens.div_ceil(BLOCK).min(self.machine.threads);
        let p = 4 * blocks * BLOCK.min(a.tokens) * a.keys_seen;
        (self.cpu(n + 2 * a.tokens * a.kv_heads * a.head_dim, p, c, n), lse)
    }

    /// `kernel::attention::backward`: the gradients of q, k and v.
    pub fn attention_backward(&self, a: &Attend) -> (Held, Held, Held) {
        let one = a.tokens * a.head_dim;
        let (q, kv) = (one * a.heads, one * a.kv_heads);
        if self.machine.cuda {
            let _scores = self.ledger.hold(Workspace, 26 * a.scores());
            let _sums = self.f32(Workspace, 2 * kv);
            let dq = self.tensor(Workspace, q);
            let _parts = self.tensor(Workspace, q);
            return (dq, self.tensor(Workspace, kv), self.tensor(Workspace, kv));
        }
        let _views = (!self.machine.wide()).then(|| self.f32(Workspace, 3 * q + 2 * kv));
        // each head has its own three buffers until all are summed
        let heads = self.f32(Workspace, 3 * q);
        let running = a.heads.min(self.machine.threads);
        self.touch(4 * running * 2 * BLOCK.min(a.tokens) * a.keys_seen);
        let (dq, dk, dv) = (self.f32(Workspace, q), self.f32(Workspace, kv), self.f32(Workspace, kv));
        if self.machine.wide() {
            drop(heads);
            return (dq, dk, dv);
        }
        (self.tensor(Workspace, q), self.tensor(Workspace, kv), self.tensor(Workspace, kv))
    }

    /// `kernel::dropout::mask`, made in f32 on the host.
    pub fn dropout_mask(&self, rows: u64, width: u64) -> Held {
        if self.machine.wide() || self.machine.cuda {
            return self.tensor(Workspace, rows * width);
        }
        let _f32 = self.f32(Workspace, rows * width);
        self.tensor(Workspace, rows * width)
    }

    /// `kernel::loss::cross_entropy` of a chunk: the logits become their gradient; `backward` as there.
    pub fn cross_entropy(&self, logits: Held, rows: u64, vocab: u64, backward: bool) -> Option<Held> {
        if !self.machine.cuda {
            return backward.then_some(logits);
        }
        let n = rows * vocab;
        if !backward {
            let _e = self.ledger.hold(Component::Logits, 8 * n);
            return None;
        }
        let p = self.ledger.hold(Component::Logits, 4 * n);
        self.ledger.hold(Component::Logits, 8 * n);
        drop(p);
        drop(logits);
        Some(self.ledger.hold(Component::Logits, 4 * n))
    }

    /// `kernel::optimizer::adamw` over a stretch of `n` values.
    pub fn adamw(&self, n: u64) {
        if self.machine.cuda {
            self.touch(20 * n);
        }
    }
}

/// Sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// Tokens of the micro-batch.
    pub tokens: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Channels of a head.
    pub head_dim: u64,
    /// Longest document.
    pub longest: u64,
    /// Most keys that a block of queries sees.
    pub keys_seen: u64,
}

impl Attend {
    /// Scores of one composed block.
    fn scores(&self) -> u64 {
        let row = (self.heads * self.longest).max(1);
        row * (SCORES / row).clamp(1, self.longest.max(1))
    }
}

/// Bytes of one panel of a 4-bit matrix [k, n] on the CPU.
pub fn panel(k: u64, n: u64) -> u64 {
    4 * k * n.min(crate::kernel::blocks::panel_width(k as usize) as u64)
}

/// Bytes of the largest panel of a 4-bit matrix that takes `whole` bytes when it is decoded, on CUDA.
pub fn cuda_panel(whole: u64) -> u64 {
    whole.min(crate::kernel::blocks::panels::MOST as u64)
}

/// Bytes that the `gemm` crate keeps: a slab of the size of the second cache for each thread.
pub fn slabs(m: Machine) -> u64 {
    m.threads * slab()
}

/// A slab of [`slabs`].
pub fn slab() -> u64 {
    gemm_common::cache::CACHE_INFO[1].cache_bytes as u64
}

/// Whether the `gemm` crate computes a product of so many multiplications on the thread that asks for it, which then
/// keeps a slab too.
pub fn is_small(product: u64) -> bool {
    product < gemm_common::gemm::DEFAULT_THREADING_THRESHOLD as u64
}

/// Panel sizes of the `gemm` crate's AVX-512 kernel; others have smaller ones.
const MR: usize = 48;
const NR: usize = 8;

/// Bytes that the `gemm` crate takes to pack the operands of an f32 product [m, k] x [k, n].
///
/// It computes the transposed product (our results are row-major), packs what is then the right operand a
/// cache-sized block at a time, and the left one where it is short.
fn packing(m: u64, k: u64, n: u64) -> u64 {
    if m == 0 || n == 0 || k == 0 {
        return 0;
    }
    let p = gemm_common::cache::kernel_params(n as usize, m as usize, k as usize, MR, NR, 4);
    let nc = if p.nc > 0 { p.nc } else { (m as usize).next_multiple_of(NR) };
    let right = if n as usize > 2 * MR { p.kc * nc } else { 0 };
    4 * right as u64 + packing_left(m, k, n)
}

/// The left operand's part of [`packing`].
fn packing_left(m: u64, k: u64, n: u64) -> u64 {
    if m == 0 || n == 0 || k == 0 {
        return 0;
    }
    let p = gemm_common::cache::kernel_params(n as usize, m as usize, k as usize, MR, NR, 4);
    if n as usize <= 2 * p.mc { 4 * (p.kc * (n as usize).next_multiple_of(MR)) as u64 } else { 0 }
}
