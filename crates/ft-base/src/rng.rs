//! Counter-based random numbers.
//!
//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11):
//! `value = f(seed, purpose, step, layer, index)`. Values are identical on every device and for any
//! split over threads or ranks, and the seed is the only state to save.

/// The use of a stream. Streams with different purposes are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Random initialization of a model.
    Weights = 1,
    /// Initialization of adapters.
    Adapter = 2,
    /// Order of rows.
    Shuffle = 3,
    /// Order of samples before packing.
    Pack = 4,
    /// LoRA dropout.
    Dropout = 5,
    /// Sampling of generated tokens.
    Sample = 6,
    /// Mixing of data sources.
    Mix = 7,
    /// Noise on embeddings.
    Noise = 8,
    /// Random projections of gradients.
    Projection = 9,
    /// Split of training data into training and evaluation samples.
    Split = 10,
    /// Stochastic rounding of weights to 16 bits.
    Rounding = 11,
    /// Tests only.
    Test = 99,
}

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// Ten rounds of Philox4x32: maps a 128-bit counter and a 64-bit key to four 32-bit words.
pub fn philox4x32(mut ctr: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key[0] = key[0].wrapping_add(W0);
            key[1] = key[1].wrapping_add(W1);
        }
        let p0 = u64::from(M0) * u64::from(ctr[0]);
        let p1 = u64::from(M1) * u64::from(ctr[2]);
        ctr =
            [(p1 >> 32) as u32 ^ ctr[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ ctr[3] ^ key[1], p0 as u32];
    }
    ctr
}

/// A random stream with fixed seed, purpose, step and layer, addressed by index.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: [u32; 2],
    high: [u32; 2],
}

impl Stream {
    /// A placeholder for code paths without random draws.
    pub const NONE: Self = Self { key: [0; 2], high: [0; 2] };

    /// The stream of `purpose` at `step` in `layer`. `layer` may be any number that distinguishes streams.
    ///
    /// `step` must be below 2^32 and `layer` below 2^24.
    pub fn new(seed: u64, purpose: Purpose, step: u64, layer: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            high: [step as u32, (layer as u32) << 8 | purpose as u32],
        }
    }

    /// Key (two words) and upper half of the counter (two words), for kernels with the same generator.
    pub fn words(&self) -> [u32; 4] {
        [self.key[0], self.key[1], self.high[0], self.high[1]]
    }

    /// The four random words of counter value `block`.
    pub fn block(&self, block: u64) -> [u32; 4] {
        philox4x32([block as u32, (block >> 32) as u32, self.high[0], self.high[1]], self.key)
    }

    /// The random word at `index`.
    pub fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// A uniform number in [0, 1) with 24 random bits, at `index`.
    pub fn uniform(&self, index: u64) -> f32 {
        unit(self.word(index))
    }

    /// Calls `take(i, value)` with the uniform number at index `start + i`, for `i` in `0..count`.
    /// Computes each block of four words once.
    pub fn uniforms(&self, start: u64, count: usize, mut take: impl FnMut(usize, f32)) {
        let (mut at, end) = (start, start + count as u64);
        while at < end {
            let words = self.block(at / 4);
            let next = (at / 4 * 4 + 4).min(end);
            for i in at..next {
                take((i - start) as usize, unit(words[(i % 4) as usize]));
            }
            at = next;
        }
    }

    /// A standard normal number at `index` (Box-Muller on the pair of words around `index`).
    pub fn normal(&self, index: u64) -> f32 {
        let b = self.block(index / 4);
        let pair = ((index % 4) / 2 * 2) as usize;
        let (r, a) = polar(b[pair], b[pair + 1]);
        (if index.is_multiple_of(2) { r * a.cos() } else { r * a.sin() }) as f32
    }

    /// Fills `values` with the normal numbers from index `start` on. Computes each block of four words, and the polar
    /// coordinates of each pair, once.
    pub fn normals(&self, start: u64, values: &mut [f32]) {
        let (mut at, end) = (start, start + values.len() as u64);
        while at < end {
            let words = self.block(at / 4);
            let next = (at / 4 * 4 + 4).min(end);
            while at < next {
                let pair = (at % 4 / 2 * 2) as usize;
                let (r, a) = polar(words[pair], words[pair + 1]);
                if at.is_multiple_of(2) {
                    values[(at - start) as usize] = (r * a.cos()) as f32;
                    at += 1;
                }
                if at < next && !at.is_multiple_of(2) {
                    // Sine and cosine of one argument would be one call of libm, whose last bits differ.
                    values[(at - start) as usize] = (r * std::hint::black_box(a).sin()) as f32;
                    at += 1;
                }
            }
        }
    }

    /// A random permutation of `0..n` (Fisher-Yates; 64-bit words keep the bias under 2^-32).
    pub fn permutation(&self, n: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n).collect();
        for i in (1..u64::from(n)).rev() {
            let b = self.block(i);
            let word = u64::from(b[0]) << 32 | u64::from(b[1]);
            let j = (u128::from(word) * (u128::from(i) + 1)) >> 64;
            order.swap(i as usize, j as usize);
        }
        order
    }
}

/// Polar coordinates of a point of the plane with a normal distribution, from two words.
fn polar(radius: u32, angle: u32) -> (f64, f64) {
    // In (0, 1], so that the logarithm is finite.
    let u = (f64::from(radius) + 1.0) / 4_294_967_296.0;
    let v = f64::from(angle) / 4_294_967_296.0;
    ((-2.0 * u.ln()).sqrt(), std::f64::consts::TAU * v)
}

/// Maps the upper 24 bits of a word to [0, 1).
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known-answer vectors for philox4x32-10, from Random123.
    #[test]
    fn philox_has_the_known_answers_of_random123() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn permutation_holds_each_once_and_differs_by_step() {
        let a = Stream::new(7, Purpose::Shuffle, 0, 0).permutation(1000);
        let b = Stream::new(7, Purpose::Shuffle, 1, 0).permutation(1000);
        let mut sorted = a.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
        assert_ne!(a, b);
    }

    #[test]
    fn numbers_drawn_together_are_those_drawn_one_by_one() {
        let s = Stream::new(5, Purpose::Test, 3, 1);
        for (start, count) in [(0, 0), (0, 9), (3, 1), (5, 2), (7, 30), (u64::from(u32::MAX) * 4 - 1, 6)] {
            let mut all = vec![f32::NAN; count];
            s.uniforms(start, count, |i, x| all[i] = x);
            let one_by_one: Vec<f32> = (0..count).map(|i| s.uniform(start + i as u64)).collect();
            assert_eq!(all, one_by_one, "{count} from {start}");
        }
        for (start, count) in [(0, 0), (0, 4096), (1, 1), (1, 2), (2, 1), (3, 1), (5, 2), (6, 6), (7, 1029)] {
            let mut all = vec![f32::NAN; count];
            s.normals(start, &mut all);
            let bits = |x: f32| x.to_bits();
            let one_by_one: Vec<u32> = (0..count).map(|i| bits(s.normal(start + i as u64))).collect();
            assert_eq!(all.into_iter().map(bits).collect::<Vec<_>>(), one_by_one, "{count} from {start}");
        }
    }

    #[test]
    fn normal_and_uniform_numbers_have_their_moments() {
        let s = Stream::new(1, Purpose::Test, 0, 0);
        let n = 40_000u64;
        let mean = (0..n).map(|i| f64::from(s.normal(i))).sum::<f64>() / n as f64;
        let var = (0..n).map(|i| f64::from(s.normal(i)).powi(2)).sum::<f64>() / n as f64;
        let uni = (0..n).map(|i| f64::from(s.uniform(i))).sum::<f64>() / n as f64;
        assert!(
            mean.abs() < 0.02 && (var - 1.0).abs() < 0.03 && (uni - 0.5).abs() < 0.01,
            "{mean} {var} {uni}"
        );
    }
}
