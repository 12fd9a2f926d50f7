//! Plots as SVG coordinates. The templates draw them and compute nothing.
//!
//! A plot is 480 units wide, for a column of that many pixels or a small screen, with SVG paths. Color is
//! never the only carrier of information: line style, a
//! text summary and a table repeat it.

mod axis;
mod chart;
mod format;
mod heatmap;
mod series;
mod table;

pub use chart::{Chart, Curve, LineStyle, Range};
pub use format::{cut, duration, first_few, grouped, moment, plural, short};
pub use heatmap::{ExpertCounts, HeatMap};
pub use series::Series;
pub use table::{Table, thin_evenly};

#[cfg(test)]
pub(super) use table::evenly;
