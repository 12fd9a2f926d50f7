//! Timing of the parts of a step.

use super::super::{Part, Times};
use super::*;

/// Each part of a training walk takes time, and the parts sum to the time of the walk.
#[test]
fn every_part_of_a_walk_is_timed() -> Result<()> {
    let c = cases()?.into_iter().find(|c| c.config.layers == 2).context("a case of two layers")?;
    let batch = Rows::padded(&c)?.batch(&c.config)?;
    let (d, p) = c.build(&everything(&c.config), None)?;
    let mut times = Times::start(CPU)?;
    train(&mut Walk::new(&d, p.lowest_unit(), 2).timed(&mut times), &p, &batch, 1.0)?;
    times.settle()?;
    for part in [Part::Forward, Part::Head, Part::Recompute, Part::Backward] {
        assert!(times.seconds(part) > 0.0, "{part:?}");
    }
    assert_eq!(times.seconds(Part::Step), 0.0, "the optimizer is not the walk's");
    Ok(())
}
