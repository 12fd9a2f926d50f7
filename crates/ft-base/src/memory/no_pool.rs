//! Where the system is not Linux, all blocks are the C library's: see `pool.rs`.

use std::ptr;

/// No block is this large.
pub const LARGE: usize = usize::MAX;

/// Nothing is kept.
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
