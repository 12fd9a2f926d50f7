//! Random permutations, in memory or computed on demand for large sets.

use ft_base::rng::Stream;

/// Longest permutation held in memory; entries of a longer one are computed on access.
pub(super) const MAX_IN_MEMORY: usize = 1 << 20;
/// Rounds of the Feistel network of a computed permutation. Four suffice to look random; the rest is cheap.
const ROUNDS: usize = 8;

/// A random permutation of `0..n`.
#[derive(Debug)]
pub(super) enum Permutation {
    /// A short permutation, by Fisher-Yates.
    Held(Vec<u32>),
    /// A long permutation, computed on access.
    Computed(Feistel),
}

/// A Feistel network over `a * b >= n` pairs of digits below `a` and `b`, with cycle walking for values
/// beyond `n` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
#[derive(Debug)]
pub(super) struct Feistel {
    n: u64,
    a: u64,
    b: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// Draws a permutation from a stream. Permutations of up to `most` entries are held in memory.
    pub fn new(stream: Stream, n: usize, most: usize) -> Self {
        match u32::try_from(n) {
            Ok(short) if n <= most => Permutation::Held(stream.permutation(short)),
            _ => Permutation::Computed(Feistel::new(stream, n as u64)),
        }
    }

    /// The value at position `i < n`.
    pub fn at(&self, i: usize) -> usize {
        match self {
            Permutation::Held(order) => order[i] as usize,
            Permutation::Computed(rounds) => rounds.at(i as u64) as usize,
        }
    }

    /// Returns a membership test for a random subset of size `k`: the first `k` values if held, else the
    /// values mapped to positions below `k`.
    pub fn choose(self, k: usize) -> Box<dyn Fn(usize) -> bool> {
        match self {
            Permutation::Held(order) => {
                let mut chosen = vec![false; order.len()];
                order.iter().take(k).for_each(|i| chosen[*i as usize] = true);
                Box::new(move |i| chosen[i])
            }
            Permutation::Computed(rounds) => Box::new(move |i| rounds.at(i as u64) < k as u64),
        }
    }

    /// Memory of a permutation of `n` entries, in bytes.
    pub fn bytes(n: u64) -> u64 {
        if n <= MAX_IN_MEMORY as u64 { 4 * n } else { 0 }
    }
}

impl Feistel {
    fn new(stream: Stream, n: u64) -> Self {
        let a = ((n as f64).sqrt().ceil() as u64).max(1);
        let key = |i: usize| {
            let words = stream.block(i as u64 / 2 + 1);
            let half = i % 2 * 2;
            u64::from(words[half]) << 32 | u64::from(words[half + 1])
        };
        Self { n, a, b: n.div_ceil(a).max(1), keys: std::array::from_fn(key) }
    }

    fn at(&self, mut i: u64) -> u64 {
        loop {
            let (mut low, mut high) = (i % self.a, i / self.a);
            for (round, key) in self.keys.iter().enumerate() {
                match round % 2 {
                    0 => low = (low + below(self.a, high.wrapping_add(*key))) % self.a,
                    _ => high = (high + below(self.b, low.wrapping_add(*key))) % self.b,
                }
            }
            i = high * self.a + low;
            // cycle walking ends at a value below n, at the latest at the start
            if i < self.n {
                return i;
            }
        }
    }
}

/// A pseudorandom number below `n`: the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable
/// pseudorandom number generators", OOPSLA 2014).
fn below(n: u64, mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^= x >> 31;
    ((u128::from(x) * u128::from(n)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::rng::Purpose;

    fn order(seed: u64, n: usize, most: usize) -> Vec<usize> {
        let order = Permutation::new(Stream::new(seed, Purpose::Test, 0, 0), n, most);
        (0..n).map(|i| order.at(i)).collect()
    }

    #[test]
    fn orders_hold_each_once_and_choose_as_many_as_asked() {
        for n in (0..70).chain([1000, 4096, 4097, 65_535, 100_003]) {
            for most in [0, n] {
                let all = order(3, n, most);
                let mut sorted = all.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..n).collect::<Vec<_>>());
                assert!(n < 60 || (all != sorted && all != order(4, n, most)), "{n}");
                let stream = Stream::new(3, Purpose::Test, 0, 0);
                let chosen = Permutation::new(stream, n, most).choose(n / 3);
                assert_eq!((0..n).filter(|i| chosen(*i)).count(), n / 3);
            }
        }
        // far beyond available memory
        let most = Permutation::new(Stream::new(3, Purpose::Test, 0, 0), 1 << 40, MAX_IN_MEMORY);
        let places: std::collections::BTreeSet<usize> = (0..1000).map(|i| most.at(i)).collect();
        assert!(places.len() == 1000 && places.iter().all(|p| *p < 1 << 40));
    }

    /// Chi-squared test, also on pairs of nearby positions. Expected for a uniform permutation: 255 +- 23.
    #[test]
    fn computed_orders_are_even() {
        let n = 1 << 16;
        for seed in 0..20 {
            let all = order(seed, n, 0);
            for distance in [0, 1, 2, 256, 257] {
                let mut counts = [0f64; 256];
                for i in (0..n - distance).step_by(3) {
                    // sixteenths of the range: of one value, of the inverse, or of a pair
                    let from = if distance == 0 { i } else { all[i + distance] };
                    counts[all[i] * 16 / n * 16 + from * 16 / n] += 1.0;
                }
                let mean = counts.iter().sum::<f64>() / 256.0;
                let chi: f64 = counts.iter().map(|c| (c - mean).powi(2) / mean).sum();
                assert!((120.0..400.0).contains(&chi), "{seed} {distance}: {chi}");
            }
        }
    }
}
