//! Copies between devices, sums over ranks, and time stamps in the work of a device.

pub mod crossing;
pub mod moment;
pub mod sum;
