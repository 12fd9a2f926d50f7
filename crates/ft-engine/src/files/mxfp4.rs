//! Values of MXFP4 (OCP Microscaling Formats v1.0).

use half::bf16;

/// Number of values of MXFP4 per scale.
pub const MXFP4_BLOCK: usize = 32;

/// Magnitudes of the codes of MXFP4; bit 3 is the sign.
pub const MXFP4_MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Value of a 4-bit code times `2^(scale - 127)`, exact in bf16 within its range; NaN for the scale 255.
pub fn value(code: u8, scale: u8) -> bf16 {
    let magnitude = MXFP4_MAGNITUDES[usize::from(code & 7)];
    let signed = if code & 8 == 0 { magnitude } else { -magnitude };
    let power = if scale == u8::MAX { f64::NAN } else { 2f64.powi(i32::from(scale) - 127) };
    bf16::from_f64(f64::from(signed) * power)
}
