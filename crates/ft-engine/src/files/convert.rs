//! Parallel conversion of bytes in a file to tensors of a requested dtype, in small pieces.
//!
//! Only the result is held in memory as a whole: pieces are read, converted and discarded. Narrowing
//! rounds to nearest, ties to even, like `Tensor::to_dtype`.

use candle_core::{DType, Device, Tensor, WithDType};
use ft_kernels::cpu;
use half::{bf16, f16};
use safetensors::Dtype;

use super::{Error, wrong};
use std::convert::identity;
use std::ops::{BitOr, Range};
use std::path::Path;

/// Elements read and converted per task: 4 MiB in f32.
const PIECE: usize = 1 << 20;

/// Reads the bytes at an offset within a tensor.
type Fetch<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), Error> + Sync + 'a;

/// A number with its little-endian encoding in safetensors.
trait Stored: Copy + Default + Send + Sync {
    const BYTES: usize;
    /// Type of the finiteness flag; flags of several values are combined by bitwise or.
    type Over: Copy + Default + BitOr<Output = Self::Over>;
    fn from_le(bytes: &[u8]) -> Self;
    /// A word with the highest bit set if the value is NaN or infinite: the bits of the largest finite
    /// magnitude minus the bits of this magnitude. Loops over this are vectorized, and cheap next to reading.
    fn over(self) -> Self::Over;
    /// Whether combined flags contain a NaN or infinite value.
    fn is_over(over: Self::Over) -> bool;
}

macro_rules! stored {
    ($($t:ty, $bits:ty, |$x:ident| $over:expr;)*) => {$(
        impl Stored for $t {
            const BYTES: usize = size_of::<$t>();
            type Over = $bits;
            #[inline(always)]
            fn from_le(bytes: &[u8]) -> Self {
                let mut word = [0u8; size_of::<$t>()];
                word.copy_from_slice(bytes);
                <$t>::from_le_bytes(word)
            }
            #[inline(always)]
            fn over(self) -> $bits {
                let $x = self;
                $over
            }
            fn is_over(over: $bits) -> bool {
                over >> (<$bits>::BITS - 1) == 1
            }
        }
    )*};
}
stored! {
    u8, u8, |_x| 0;
    u32, u8, |_x| 0;
    i64, u8, |_x| 0;
    f16, u16, |x| 0x7bff_u16.wrapping_sub(x.to_bits() & 0x7fff);
    bf16, u16, |x| 0x7f7f_u16.wrapping_sub(x.to_bits() & 0x7fff);
    f32, u32, |x| 0x7f7f_ffff_u32.wrapping_sub(x.to_bits() & 0x7fff_ffff);
    f64, u64, |x| 0x7fef_ffff_ffff_ffff_u64.wrapping_sub(x.to_bits() & 0x7fff_ffff_ffff_ffff);
}

/// Target of a conversion. Widening to f32 or f64 is exact; narrowing rounds once.
trait Float: Stored + WithDType {
    fn of_f32(x: f32) -> Self;
    fn of_f64(x: f64) -> Self;
}

macro_rules! float {
    ($($t:ty, $from_f32:expr, $from_f64:expr;)*) => {$(
        impl Float for $t {
            #[inline(always)]
            fn of_f32(x: f32) -> Self {
                ($from_f32)(x)
            }
            #[inline(always)]
            fn of_f64(x: f64) -> Self {
                ($from_f64)(x)
            }
        }
    )*};
}
float! {
    f16, f16::from_f32, f16::from_f64;
    bf16, bf16::from_f32, bf16::from_f64;
    f32, identity, |x| x as f32;
    f64, f64::from, identity;
}

/// Scales of an 8-bit matrix, one a block.
pub struct Scales {
    /// Row by row.
    pub values: Vec<f32>,
    /// Blocks in a row.
    pub width: usize,
    /// Rows and columns of a block.
    pub block: [usize; 2],
}

/// The value of an e4m3 code: 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-6),
        _ => (1.0 + mantissa) * 2f32.powi(exponent - 7),
    };
    if code > 127 { -size } else { size }
}

/// A range of elements of a tensor in a file, to be read.
pub struct Load<'a> {
    /// The file.
    pub path: &'a Path,
    /// Name of the tensor.
    pub name: &'a str,
    /// Shape of the tensor.
    pub shape: &'a [usize],
    /// The elements.
    pub elements: Range<usize>,
    /// Device of the result.
    pub device: &'a Device,
    pub fetch: &'a Fetch<'a>,
}

impl Load<'_> {
    /// Builds a flat tensor of `dtype` from elements stored as `from`.
    ///
    /// # Errors
    /// [`Error::Unread`] for an unsupported pair of types; [`Error::NotFinite`] for a NaN or infinite value;
    /// errors of `fetch`.
    pub fn tensor(&self, from: Dtype, dtype: DType) -> Result<Tensor, Error> {
        match (from, dtype) {
            (Dtype::BF16, DType::BF16) => self.run::<bf16, bf16>(|x| x),
            (Dtype::F16, DType::F16) => self.run::<f16, f16>(|x| x),
            (Dtype::U8, DType::U8) => self.run::<u8, u8>(|x| x),
            (Dtype::U32, DType::U32) => self.run::<u32, u32>(|x| x),
            (Dtype::I64, DType::I64) => self.run::<i64, i64>(|x| x),
            (_, DType::F32) => self.run_to::<f32>(from),
            (_, DType::BF16) => self.run_to::<bf16>(from),
            (_, DType::F16) => self.run_to::<f16>(from),
            (_, DType::F64) => self.run_to::<f64>(from),
            _ => Err(self.refuse(from, dtype)),
        }
    }

    /// Builds a flat tensor of `dtype` from elements of an 8-bit matrix (e4m3, without infinities) with scales: their
    /// product in f32, rounded once.
    ///
    /// # Errors
    /// As [`Load::tensor`].
    pub fn scaled(&self, scales: &Scales, dtype: DType) -> Result<Tensor, Error> {
        let table: Vec<f32> = (0..=u8::MAX).map(e4m3).collect();
        let cols = self.shape.last().copied().unwrap_or(1).max(1);
        let of = |code: u8, at: usize| {
            let (row, col) = (at / cols / scales.block[0], at % cols / scales.block[1]);
            table[usize::from(code)] * scales.values[row * scales.width + col]
        };
        match dtype {
            DType::F32 => self.run_at(of),
            DType::BF16 => self.run_at(|code, at| bf16::of_f32(of(code, at))),
            DType::F16 => self.run_at(|code, at| f16::of_f32(of(code, at))),
            DType::F64 => self.run_at(|code, at| f64::of_f32(of(code, at))),
            _ => Err(self.refuse(Dtype::F8_E4M3, dtype)),
        }
    }

    fn refuse(&self, from: Dtype, to: DType) -> Error {
        let (path, name) = (self.path.to_path_buf(), self.name.to_string());
        Error::Unread { path, name, from: from.to_string(), to: to.as_str().to_uppercase() }
    }

    /// The error for a non-finite value at flat element `index`.
    fn not_finite(&self, mut index: usize, dtype: DType) -> Error {
        let mut at = vec![0; self.shape.len()];
        for (at, size) in at.iter_mut().zip(self.shape).rev() {
            (*at, index) = (index % size.max(&1), index / size.max(&1));
        }
        let dtype = dtype.as_str().to_uppercase();
        Error::NotFinite { path: self.path.to_path_buf(), name: self.name.to_string(), dtype, at }
    }

    /// Converts from any floating-point type.
    fn run_to<D: Float>(&self, from: Dtype) -> Result<Tensor, Error> {
        match from {
            Dtype::F32 => self.run(D::of_f32),
            Dtype::BF16 => self.run(|x: bf16| D::of_f32(x.to_f32())),
            Dtype::F16 => self.run(|x: f16| D::of_f32(x.to_f32())),
            Dtype::F64 => self.run(D::of_f64),
            _ => Err(self.refuse(from, D::DTYPE)),
        }
    }

    fn run<S: Stored, D: WithDType + Stored>(
        &self,
        convert: impl Fn(S) -> D + Sync,
    ) -> Result<Tensor, Error> {
        self.run_at(|x, _| convert(x))
    }

    /// Converts with the index of the element in the tensor.
    fn run_at<S: Stored, D: WithDType + Stored>(
        &self,
        convert: impl Fn(S, usize) -> D + Sync,
    ) -> Result<Tensor, Error> {
        // The header check bounds the count by the file size.
        let (first, count) = (self.elements.start, self.elements.len());
        let mut out = vec![D::default(); count];
        let of_piece = |bytes: &mut Vec<u8>, piece: usize, out: &mut [D]| {
            let begin = first + piece * PIECE;
            bytes.resize(out.len() * S::BYTES, 0);
            (self.fetch)((begin * S::BYTES) as u64, bytes)?;
            for (i, (to, from)) in out.iter_mut().zip(bytes.chunks_exact(S::BYTES)).enumerate() {
                *to = convert(S::from_le(from), begin + i);
            }
            // A separate loop: both loops are vectorized, a fused one would not be.
            let over = out.iter().fold(D::Over::default(), |over, x| over | x.over());
            if !D::is_over(over) {
                return Ok(());
            }
            let bad = out.iter().position(|x| D::is_over(x.over()));
            Err(self.not_finite(begin + bad.unwrap_or(0), D::DTYPE))
        };
        let pieces = out.chunks_mut(PIECE).enumerate();
        let read: Vec<Result<(), Error>> =
            cpu::map_with(pieces, Vec::new, |bytes, (piece, out)| of_piece(bytes, piece, out));
        read.into_iter().collect::<Result<(), Error>>()?;
        Tensor::from_vec(out, count, self.device).map_err(|e| wrong(self.name, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest value, the smallest ones, and NaN, of the format's definition.
    #[test]
    fn eight_bit_codes_have_their_values() {
        for (code, value) in [
            (0x7e, 448.0),
            (0xfe, -448.0),
            (0x38, 1.0),
            (0x01, 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0, 0.0),
        ] {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }
}
