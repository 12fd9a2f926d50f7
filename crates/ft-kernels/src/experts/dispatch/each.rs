//! Parallel execution of experts on the CPU.

use crate::tensor::On;
use crate::{cpu, gemm};
use candle_core::Result;

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
    let mut items: Vec<(usize, I)> = items.into_iter().enumerate().collect();
    items.sort_by_key(|(_, item)| std::cmp::Reverse(size(item)));
    let mut done = cpu::map(items.into_iter(), |(i, item)| (i, gemm::serial(|| f(item))));
    done.sort_unstable_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
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
