//! Parallel execution of experts on the CPU.

use crate::gemm;
use crate::tensor::On;
use candle_core::Result;
use rayon::prelude::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether to run the `runs` experts in parallel, one thread each, instead of sequentially with
/// multi-threaded products. Results are identical.
pub fn side_by_side<'a>(runs: usize, on: impl Into<On<'a>>) -> bool {
    let threads = match on.into() {
        on if !on.is_native() => return false,
        On::Real(_) => rayon::current_num_threads(),
        On::Ghost(l) => l.machine().threads as usize,
    };
    runs >= 2 * threads && threads > 1
}

/// Applies `f` to every item in parallel, one thread per item, large items first. Results are in item
/// order. Ghosts (`on`) run sequentially.
///
/// # Errors
/// The first error in item order.
pub fn each<'a, I: Send, R: Send>(
    on: impl Into<On<'a>>,
    items: Vec<I>,
    size: impl Fn(&I) -> usize,
    f: impl Fn(I) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    if matches!(on.into(), On::Ghost(_)) {
        return items.into_iter().map(|item| gemm::serial(|| f(item))).collect();
    }
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(size(&items[*i])));
    let work: Vec<Mutex<Option<I>>> = items.into_iter().map(|i| Mutex::new(Some(i))).collect();
    let done: Vec<Mutex<Option<Result<R>>>> = work.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    // one task per thread, drawing from a shared queue: stack depth does not grow with the number of
    // items
    (0..rayon::current_num_threads()).into_par_iter().with_max_len(1).for_each(|_| {
        while let Some(i) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            let item = work[*i].lock().ok().and_then(|mut w| w.take());
            let result = item.map(|item| gemm::serial(|| f(item)));
            if let Ok(mut d) = done[*i].lock() {
                *d = result;
            }
        }
    });
    done.into_iter()
        .map(|d| match d.into_inner() {
            Ok(Some(r)) => r,
            _ => candle_core::bail!("an expert was left out"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn each_gives_results_in_order_and_the_first_error() -> Result<()> {
        let square = |x: usize| Ok(x * x);
        let items: Vec<usize> = (0..100).collect();
        assert_eq!(
            each(&Device::Cpu, items, |x| *x, square)?,
            (0..100).map(|x| x * x).collect::<Vec<usize>>()
        );
        let fails = |x: usize| if x % 7 == 3 { candle_core::bail!("item {x}") } else { Ok(x) };
        let e = each(&Device::Cpu, (0..100).collect(), |x| *x, fails).expect_err("items that fail");
        assert!(e.to_string().starts_with("item 3"), "{e}");
        Ok(())
    }
}
