//! Several ranks, as threads and as processes: results agree with one rank.

mod axes;
mod context;
mod experts;
mod launched;
mod local;
mod pipeline;
mod ranks;
mod tensor;
