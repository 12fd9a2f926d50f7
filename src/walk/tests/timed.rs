//! Where the time of a step is counted.

use super::super::{Part, Times};
use super::*;
use std::time::Duration;

/// Takes its time around every unit.
struct Slow {
    arrive: Duration,
    leave: Duration,
}

impl Around for Slow {
    fn arrive(&mut self, _: usize, _: Phase) -> candle_core::Result<()> {
        std::thread::sleep(self.arrive);
        Ok(())
    }
    fn leave(&mut self, _: usize, _: Phase) -> candle_core::Result<()> {
        std::thread::sleep(self.leave);
        Ok(())
    }
}

/// What stands around the units has parts of its own, and is not counted as forward or backward.
#[test]
fn gather_and_reduce_have_their_own_time() -> Result<()> {
    let c = cases()?.into_iter().find(|c| c.config.layers == 2).context("a case of two layers")?;
    let batch = Rows::padded(&c)?.batch(&c.config)?;
    let (d, p) = c.build(&everything(&c.config), None)?;
    let grads = p.grads();
    let sink = Sink::new(&grads, p.tensors.len());
    let run = |slow: Option<&mut Slow>| -> Result<Times> {
        let mut times = Times::start(&candle_core::Device::Cpu)?;
        let walk = Walk::new(&d, p.lowest_unit(), 2);
        let walk = match slow {
            Some(s) => walk.around(s),
            None => walk,
        };
        walk.timed(&mut times).train(&batch, 1.0, &sink)?;
        times.settle()?;
        Ok(times)
    };
    let alone = run(None)?;
    assert_eq!((alone.seconds(Part::Gather), alone.seconds(Part::Reduce)), (0.0, 0.0));
    for part in [Part::Forward, Part::Head, Part::Recompute, Part::Backward] {
        assert!(alone.seconds(part) > 0.0, "{part:?}");
    }
    // seven visits: embedding and two layers up, head, two layers and embedding down; three leave upwards
    let (arrive, leave) = (Duration::from_millis(20), Duration::from_millis(30));
    let times = run(Some(&mut Slow { arrive, leave }))?;
    let (gather, reduce) = (times.seconds(Part::Gather), times.seconds(Part::Reduce));
    assert!(gather >= 7.0 * 0.020 + 3.0 * 0.030 && reduce >= 4.0 * 0.030, "{gather} {reduce}");
    let slept = 7.0 * 0.050;
    assert!(times.total() - gather - reduce < slept, "{times:?}");
    Ok(())
}
