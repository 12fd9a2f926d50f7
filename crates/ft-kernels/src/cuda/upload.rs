//! Collects the per-micro-batch lists needed on a device, and uploads them in one step; see `staging`.

use crate::Tensor;
use candle_core::{Device, Result};

/// Alignment of lists in values: 16 bytes.
const ALIGN: usize = 4;

/// Lists of integers, concatenated, and of floats, which are the larger ones and stay apart.
#[derive(Debug, Default)]
pub struct Lists {
    ints: Vec<u32>,
    floats: Vec<Vec<f32>>,
}

/// Position of a list.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    at: usize,
    len: usize,
}

/// Length of a list with padding, so that the next one is aligned. An empty one takes a slot too, since zero-sized
/// memory has no address.
fn padded(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGN)
}

impl Lists {
    /// Appends integers.
    pub fn ints(&mut self, list: &[u32]) -> Place {
        let place = Place { at: self.ints.len(), len: list.len() };
        self.ints.extend(list);
        self.ints.resize(place.at + padded(place.len), 0);
        place
    }

    /// Appends floats.
    pub fn floats(&mut self, mut list: Vec<f32>) -> Place {
        let place = Place { at: self.floats.iter().map(Vec::len).sum(), len: list.len() };
        list.resize(padded(place.len), 0.0);
        self.floats.push(list);
        place
    }

    /// Uploads all lists.
    ///
    /// # Errors
    /// Device failure.
    pub fn send(self, device: &Device) -> Result<Sent> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let [ints, floats] = super::staging::upload(device, &self.ints, &self.floats)?.map(Tensor::Real);
            return Ok(Sent { ints, floats });
        }
        Ok(Sent { ints: Tensor::new(self.ints, device)?, floats: Tensor::new(self.floats.concat(), device)? })
    }
}

/// Lists on the device.
#[derive(Debug)]
pub struct Sent {
    ints: Tensor,
    floats: Tensor,
}

impl Sent {
    /// A list of integers `[n]`.
    pub fn ints(&self, p: Place) -> Result<Tensor> {
        self.ints.narrow(0, p.at, p.len)
    }

    /// A list of floats `[n]`.
    pub fn floats(&self, p: Place) -> Result<Tensor> {
        self.floats.narrow(0, p.at, p.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploaded_lists_are_aligned_and_disjoint() -> Result<()> {
        let mut lists = Lists::default();
        let (a, none, b) = (lists.ints(&[1, 2, 3, 4, 5]), lists.ints(&[]), lists.ints(&[6]));
        let (c, d) = (lists.floats(vec![0.5]), lists.floats(vec![1.5, 2.5]));
        assert!([a, none, b, c, d].iter().all(|p| p.at % ALIGN == 0) && none.at < b.at);
        let sent = lists.send(&Device::Cpu)?;
        assert_eq!(sent.ints(a)?.to_vec1::<u32>()?, [1, 2, 3, 4, 5]);
        assert_eq!((sent.ints(none)?.dims(), sent.ints(b)?.to_vec1::<u32>()?), ([0].as_slice(), vec![6]));
        assert_eq!(sent.floats(d)?.to_vec1::<f32>()?, [1.5, 2.5]);
        Ok(())
    }
}
