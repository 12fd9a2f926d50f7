//! Test helpers for kernels: seeded tensors, comparison, finite differences.

use crate::Tensor;
use crate::tensor::On;
use candle_core::{DType, Device, Result, Shape};
use ft_base::rng::{Purpose, Stream};
use std::cell::Cell;

thread_local! {
    static COMPOSED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` in a thread pool with the composed operations, used on CUDA without a kernel of our own. CPU
/// kernels with a composed twin use the composition, for tensors and ghosts alike.
pub fn composed<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).start_handler(|_| COMPOSED.set(true));
    threads.build().expect("threads").install(|| {
        assert!(!On::from(&Device::Cpu).is_native(), "the composed operations are not in use");
        f()
    })
}

/// Runs `f` on a pool of `threads` threads.
pub fn on<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(f)
}

/// Whether the current thread runs inside [`composed`].
pub fn is_composed() -> bool {
    COMPOSED.get()
}

/// Standard normal values, determined by the seed.
pub fn randn(seed: u64, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    let shape = shape.into();
    let s = Stream::new(seed, Purpose::Test, 0, 0);
    let mut v = vec![0f32; shape.elem_count()];
    s.normals(0, &mut v);
    Tensor::from_vec(v, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// All values in f64.
pub fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1()).expect("readable tensor")
}

/// Relative L2 distance.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "sizes differ");
    let d: f64 = a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum();
    let n: f64 = b.iter().map(|y| y * y).sum();
    assert!(d.is_finite() && n.is_finite(), "not finite");
    if n == 0.0 { d.sqrt() } else { (d / n).sqrt() }
}

/// Asserts equal shapes and a relative L2 distance of at most `bar`.
#[track_caller]
pub fn close(a: &Tensor, b: &Tensor, bar: f64) {
    assert_eq!(a.dims(), b.dims(), "shapes differ");
    let d = distance(&values(a), &values(b));
    assert!(d <= bar, "{d:.3e} apart, bar {bar:.0e}");
}

/// Asserts that `grad` is the derivative of `sum(f(x) * dy)` at `x`, by central differences in f64.
#[track_caller]
pub fn gradient(what: &str, x: &Tensor, grad: &Tensor, dy: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) {
    assert_eq!(x.dtype(), DType::F64, "finite differences need f64");
    assert_eq!(x.dims(), grad.dims(), "{what}: the gradient has another shape");
    let at = |v: Vec<f64>| -> f64 {
        let x = Tensor::from_vec(v, x.shape(), &Device::Cpu).expect("shape kept");
        let y = f(&x).expect("forward");
        values(&y).iter().zip(values(dy)).map(|(a, b)| a * b).sum()
    };
    let base = values(x);
    let h = 1e-5;
    let numeric: Vec<f64> = (0..base.len())
        .map(|i| {
            let (mut up, mut down) = (base.clone(), base.clone());
            up[i] += h;
            down[i] -= h;
            (at(up) - at(down)) / (2.0 * h)
        })
        .collect();
    let d = distance(&values(grad), &numeric);
    assert!(d <= 1e-7, "{what}: gradient is {d:.3e} from finite differences");
}
