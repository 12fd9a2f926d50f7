//! Experts in MXFP4 as llama.cpp holds them: of each block the scale, then sixteen bytes, with value j in the low and
//! value `j + 16` in the high half of byte j.

use super::changes::Change;
use crate::files::TensorFiles;
use crate::model::modules::Module;
use crate::quant::{MXFP4_BLOCK, MXFP4_PARTS};
use candle_core::{Device, Tensor};

/// Bytes of a block.
pub(super) const BYTES: usize = 1 + MXFP4_BLOCK / 2;

/// The blocks of a matrix, `[o, i / 32 * 17]` u8.
///
/// # Errors
/// Unreadable files.
pub(super) fn blocks(files: &TensorFiles, m: &Module, changes: &[Change]) -> ft_base::Result<Tensor> {
    let (rows, each) = (m.rows(), m.cols() / MXFP4_BLOCK);
    let [codes, scales] = MXFP4_PARTS.map(|part| format!("{}.{part}", m.weight_name()));
    let scales = files.read_part(&scales, 0..rows * each)?;
    let codes = files.read_part(&codes, 0..rows * each * (BYTES - 1))?;
    let mut out = Vec::with_capacity(rows * each * BYTES);
    for (scale, own) in scales.iter().zip(codes.chunks(BYTES - 1)) {
        let code = |v: usize| own[v / 2] >> (4 * (v % 2)) & 15;
        out.push(*scale);
        out.extend((0..BYTES - 1).map(|j| code(j) | code(j + BYTES - 1) << 4));
    }
    let all = Tensor::from_vec(out, (rows, each * BYTES), &Device::Cpu)?;
    Ok(changes.iter().try_fold(all, |t, change| change.apply(&t))?)
}
