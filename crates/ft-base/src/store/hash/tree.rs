//! The BLAKE3 tree of a file, hashed in parallel.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

/// Bytes hashed at once: a subtree of the BLAKE3 tree (hence a power of two), sized to fit in a core's
/// L2 cache.
pub(super) const BLOCK: u64 = 64 << 10;
/// Bytes per task; also a subtree.
pub(super) const PIECE: u64 = 1 << 20;

/// Hashes a whole file, independent of the file position. Reads and hashes subtrees of the BLAKE3 tree
/// in parallel.
pub fn whole(file: &File) -> io::Result<blake3::Hash> {
    Tree { file, bytes: file.metadata()?.len(), known: None }.hash()
}

/// The BLAKE3 tree of a file.
pub(super) struct Tree<'a> {
    pub(super) file: &'a File,
    pub(super) bytes: u64,
    /// Blocks hashed earlier, if any.
    pub(super) known: Option<&'a KnownBlocks>,
}

impl Tree<'_> {
    pub(super) fn hash(&self) -> io::Result<blake3::Hash> {
        let mut buffer = Vec::new();
        if self.bytes <= BLOCK {
            return Ok(self.block(0, self.bytes, &mut buffer)?.finalize());
        }
        let (left, right) = self.halves(0, self.bytes, &mut buffer)?;
        Ok(merge_subtrees_root(&left, &right, Mode::Hash))
    }

    fn halves(
        &self,
        at: u64,
        bytes: u64,
        buffer: &mut Vec<u8>,
    ) -> io::Result<(ChainingValue, ChainingValue)> {
        let left = left_subtree_len(bytes);
        if bytes <= PIECE {
            return Ok((self.subtree(at, left, buffer)?, self.subtree(at + left, bytes - left, buffer)?));
        }
        let half = |at, bytes| move || self.subtree(at, bytes, &mut Vec::new());
        let halves = rayon::join(half(at, left), half(at + left, bytes - left));
        Ok((halves.0?, halves.1?))
    }

    fn subtree(&self, at: u64, bytes: u64, buffer: &mut Vec<u8>) -> io::Result<ChainingValue> {
        if bytes > BLOCK {
            let (left, right) = self.halves(at, bytes, buffer)?;
            return Ok(merge_subtrees_non_root(&left, &right, Mode::Hash));
        }
        match self.known.and_then(|k| k.0.get((at / BLOCK) as usize)?.get()) {
            Some(known) => Ok(*known),
            None => Ok(self.block(at, bytes, buffer)?.finalize_non_root()),
        }
    }

    /// Reads and hashes a block, through a buffer that stays in the CPU cache.
    fn block(&self, at: u64, bytes: u64, buffer: &mut Vec<u8>) -> io::Result<blake3::Hasher> {
        buffer.resize(bytes as usize, 0);
        self.file.read_exact_at(buffer, at)?;
        Ok(hashed(at, buffer))
    }
}

/// BLAKE3 state after a subtree starting at byte `at`.
fn hashed(at: u64, bytes: &[u8]) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(at);
    hasher.update(bytes);
    hasher
}

/// Chaining values of the whole blocks hashed so far.
#[derive(Debug)]
pub(super) struct KnownBlocks(Box<[OnceLock<ChainingValue>]>);

impl KnownBlocks {
    /// No blocks yet, for a file of `bytes` bytes.
    pub(super) fn new(bytes: u64) -> Self {
        Self((0..bytes / BLOCK).map(|_| OnceLock::new()).collect())
    }

    /// Hashes the whole, aligned blocks in `bytes`, which start at offset `at` of the file.
    pub(super) fn update(&self, at: u64, bytes: &[u8]) {
        let (before, blocks) = bytes.split_at(bytes.len().min((at.next_multiple_of(BLOCK) - at) as usize));
        let first = (at + before.len() as u64) / BLOCK;
        for (number, block) in (first..).zip(blocks.chunks_exact(BLOCK as usize)) {
            if let Some(known) = self.0.get(number as usize) {
                known.get_or_init(|| hashed(number * BLOCK, block).finalize_non_root());
            }
        }
    }
}
