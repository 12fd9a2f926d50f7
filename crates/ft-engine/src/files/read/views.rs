//! Tensors in another form than in the file: other names, parts, transposes, 8-bit matrices with scales, MXFP4. No data
//! is read here.

use super::{Scale, TensorFiles, TensorInfo};
use crate::files::{Error, MXFP4_BLOCK};
use safetensors::Dtype;

/// A tensor of the file, read as parts.
#[derive(Clone, Debug)]
pub struct SplitTensor {
    /// Name in the file.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Names of the parts, in the order of the values.
    pub parts: Vec<String>,
}

impl TensorFiles {
    /// Presents tensors under the names returned by `new`, all distinct; before any other change.
    pub fn rename(&mut self, new: impl Fn(&str) -> Option<String>) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        self.tensors = tensors.map(|(name, info)| (new(&name).unwrap_or(name), info)).collect();
    }

    /// Replaces a tensor by parts under other names, each a contiguous range of elements with a new
    /// shape.
    ///
    /// `parts` has name, first element and shape.
    ///
    /// # Errors
    /// [`Error::NoTensor`]; [`Error::Rows`] for elements out of range.
    pub fn split(
        &mut self,
        name: &str,
        parts: impl IntoIterator<Item = (String, usize, Vec<usize>)>,
    ) -> Result<(), Error> {
        let whole = self.get(name)?.clone();
        let bits = whole.dtype.bitsize();
        let mut split = Vec::new();
        for (part, start, shape) in parts {
            let count = shape.iter().try_fold(1usize, |n, s| n.checked_mul(*s));
            let end = count.and_then(|n| start.checked_add(n)).filter(|end| *end <= whole.elements());
            let (Some(end), 0) = (end, bits % 8) else {
                return Err(whole.outside(name, start, end.unwrap_or(usize::MAX)));
            };
            let at = |element: usize| whole.place.start + (element * (bits / 8)) as u64;
            split.push((part, TensorInfo { shape, place: at(start)..at(end), ..whole.clone() }));
        }
        self.tensors.remove(name);
        let parts = split.iter().map(|(part, _)| part.clone()).collect();
        self.splits.push(SplitTensor { name: name.to_string(), shape: whole.shape, parts });
        self.tensors.extend(split);
        Ok(())
    }

    /// Reads a matrix as the transpose of the one in the file; its shape turns too.
    ///
    /// # Errors
    /// [`Error::NoTensor`]; [`Error::Rows`] for a tensor that is no matrix of whole bytes.
    pub fn transpose(&mut self, name: &str) -> Result<(), Error> {
        let info = self.get(name)?;
        if info.shape.len() != 2 || info.dtype.bitsize() % 8 != 0 {
            return Err(info.outside(name, 0, info.elements()));
        }
        if let Some(info) = self.tensors.get_mut(name) {
            info.shape.reverse();
            info.transposed = !info.transposed;
        }
        Ok(())
    }

    /// Scales the 8-bit matrix `name` by the tensor `scale`, one value a block, and hides `scale`. Nothing happens
    /// unless both exist, with matching shapes.
    pub fn scale(&mut self, name: &str, scale: &str, block: [usize; 2]) {
        let (Some(of), Some(info)) = (self.tensors.get(name), self.tensors.get(scale)) else { return };
        let number = matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
        let fits = match (of.shape.as_slice(), info.shape.as_slice()) {
            (&[o, i], &[so, si]) => [so, si] == [o.div_ceil(block[0]), i.div_ceil(block[1])],
            _ => false,
        };
        if of.dtype != Dtype::F8_E4M3 || !number || !fits {
            return;
        }
        if let Some(info) = self.tensors.remove(scale) {
            self.scales.insert(name.to_string(), Scale { name: scale.to_string(), info, block });
        }
    }

    /// Presents the MXFP4 tensors `blocks` `[o, i / 32, 16]` and `scales` `[o, i / 32]`, u8, as the matrix `name`
    /// `[o, i]` in BF16, exact but for overflow. Nothing happens unless both exist, with matching shapes.
    pub fn decode(&mut self, name: &str, [blocks, scales]: [&str; 2]) {
        let [of_blocks, of_scales] = [blocks, scales].map(|n| self.tensors.get(n).cloned());
        let (Some(of_blocks), Some(of_scales)) = (of_blocks, of_scales) else { return };
        let (&[o, n, half], true) = (of_blocks.shape.as_slice(), of_scales.dtype == Dtype::U8) else {
            return;
        };
        if of_blocks.dtype != Dtype::U8 || 2 * half != MXFP4_BLOCK || of_scales.shape != [o, n] {
            return;
        }
        let shape = vec![o, n * MXFP4_BLOCK];
        let bytes = (2 * shape[0] * shape[1]) as u64;
        let info = TensorInfo { dtype: Dtype::BF16, shape, place: 0..bytes, ..of_blocks.clone() };
        [blocks, scales].iter().for_each(|n| drop(self.tensors.remove(*n)));
        self.tensors.insert(name.to_string(), info);
        let parts = [(blocks.to_string(), of_blocks), (scales.to_string(), of_scales)];
        self.decoded.insert(name.to_string(), parts);
    }

    /// Whether a tensor is in 8 bits, with scales.
    pub fn is_scaled(&self, name: &str) -> bool {
        self.scales.contains_key(name)
    }

    /// Tensors of the files, read as parts.
    pub fn splits(&self) -> &[SplitTensor] {
        &self.splits
    }
}
