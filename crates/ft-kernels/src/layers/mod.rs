//! Operations of decoder layers, embedding and head.

pub mod bias;
pub mod embed;
pub mod gate;
pub mod loss;
pub mod noise;
pub mod norm;
pub mod rope;
pub mod swiglu;
