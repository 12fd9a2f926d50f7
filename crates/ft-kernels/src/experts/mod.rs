//! Mixtures of experts: routing, dispatch of tokens to experts, grouped products.

pub mod dispatch;
pub mod grouped;
pub mod route;
pub mod spread;
