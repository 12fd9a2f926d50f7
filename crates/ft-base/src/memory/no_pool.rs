//! Stub of `pool.rs` for systems other than Linux, which use the C library's allocator for all blocks.

use std::ptr;

/// Larger than any block.
pub const LARGE: usize = usize::MAX;

/// Does nothing.
pub fn keep_within(_: u64) {}

/// Never called.
pub fn alloc(_: usize, _: bool, _: u64) -> *mut u8 {
    ptr::null_mut()
}

/// Never called.
///
/// # Safety
/// Does nothing.
pub unsafe fn dealloc(_: *mut u8, _: usize, _: u64) {}

/// Never called.
///
/// # Safety
/// Does nothing.
pub unsafe fn realloc(_: *mut u8, _: usize, _: usize, _: u64) -> *mut u8 {
    ptr::null_mut()
}
