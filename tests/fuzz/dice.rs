//! Random numbers of a case. All choices follow from the seed.

/// A splitmix64 generator.
pub struct Dice(u64);

impl Dice {
    /// The generator for case `seed` of the input `name`.
    pub fn new(name: &str, seed: u64) -> Self {
        let start = name.bytes().fold(seed, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
        let mut d = Self(start);
        d.next();
        d
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A random number below `n`; 0 for `n` = 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// True with probability 1/`n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// A random word of a text.
    pub fn word(&mut self, words: &'static str) -> &'static str {
        let n = words.split_whitespace().count();
        words.split_whitespace().nth(self.below(n)).unwrap_or_default()
    }

    /// A random range of at most `most` indices within `0..len`.
    pub fn range(&mut self, len: usize, most: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        start..(start + self.below(most + 1)).min(len)
    }
}
