//! The curve of a pool, thinned out to as many steps as a page can carry, with every peak kept.

use std::io;

use super::columns::Columns;
use crate::replay::record::Point;

/// A stretch of time, up to the next step, and between what the bytes were in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Step {
    /// Its first event.
    pub(super) event: u32,
    /// Bytes live: least and most.
    pub(super) live: (u64, u64),
    /// Bytes reserved: least and most.
    pub(super) reserved: (u64, u64),
}

impl Step {
    fn of(point: &Point) -> Step {
        let (live, reserved) = (point.live.get(), point.reserved.get());
        Step { event: point.event, live: (live, live), reserved: (reserved, reserved) }
    }

    fn widen(&mut self, point: &Step) {
        let both = |a: (u64, u64), b: (u64, u64)| (a.0.min(b.0), a.1.max(b.1));
        self.live = both(self.live, point.live);
        self.reserved = both(self.reserved, point.reserved);
    }
}

/// The curve in at most `steps_max` steps, which is at least 1: every point where that is enough, else equal stretches of time.
pub(super) fn thin_out(curve: &[Point], steps_max: usize) -> Vec<Step> {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return Vec::new() };
    if curve.len() <= steps_max {
        return curve.iter().map(Step::of).collect();
    }
    let width = (u64::from(last.event.saturating_sub(first.event)) + 1).div_ceil(steps_max as u64).max(1);
    let mut steps: Vec<Step> = Vec::new();
    let mut before = Step::of(first);
    let mut stretch_of_last = None;
    for point in curve.iter().map(Step::of) {
        let stretch = u64::from(point.event.saturating_sub(first.event)) / width;
        match steps.last_mut().filter(|_| stretch_of_last == Some(stretch)) {
            Some(step) => step.widen(&point),
            None => {
                // What it was before lasts into the stretch, unless that begins with this very point.
                let start = first.event + (stretch * width) as u32;
                let mut step = Step { event: start, ..point };
                if start < point.event {
                    step.widen(&before);
                }
                // A stretch without points lies between: there it was as before, throughout.
                if stretch_of_last.is_some_and(|last| last + 1 < stretch) {
                    let event = first.event + ((stretch_of_last.unwrap_or(0) + 1) * width) as u32;
                    steps.push(Step { event, ..before });
                }
                steps.push(step);
            }
        }
        stretch_of_last = Some(stretch);
        before = point;
    }
    steps
}

/// Writes steps, as `readCurve` of `plot.js` reads them.
pub(super) fn write(steps: &[Step], columns: &mut Columns) -> io::Result<()> {
    columns.number(steps.len() as u64)?;
    columns.differences(steps.iter().map(|step| u64::from(step.event)))?;
    columns.differences(steps.iter().map(|step| step.live.0))?;
    columns.numbers(steps.iter().map(|step| step.live.1 - step.live.0))?;
    columns.differences(steps.iter().map(|step| step.reserved.0))?;
    columns.numbers(steps.iter().map(|step| step.reserved.1 - step.reserved.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::mix;
    use crate::units::Bytes;

    fn point(event: u32, live: u64, reserved: u64) -> Point {
        Point { event, live: Bytes::new(live), reserved: Bytes::new(reserved) }
    }

    #[test]
    fn a_short_curve_is_kept_as_it_is() {
        assert_eq!(thin_out(&[], 8), []);
        let curve = [point(0, 1, 2), point(5, 3, 4), point(5, 2, 4)];
        let steps = thin_out(&curve, 3);
        assert_eq!(steps.iter().map(|step| step.event).collect::<Vec<_>>(), [0, 5, 5]);
        assert_eq!(steps[1].live, (3, 3));
    }

    #[test]
    fn a_long_curve_is_inside_its_steps_everywhere_and_touches_their_edges() {
        let mut curve: Vec<Point> = Vec::new();
        let mut event = 3;
        for seed in 0..5000_u64 {
            curve.push(point(event, mix(seed) % 1000, 1000 + mix(seed + 9) % 1000));
            event += 1 + if mix(seed).is_multiple_of(50) { 400 } else { mix(seed + 1) as u32 % 3 };
        }
        for steps_max in [1, 2, 7, 100, 1000] {
            let steps = thin_out(&curve, steps_max);
            assert!(steps.len() <= steps_max, "{} of {steps_max}", steps.len());
            assert!(steps.windows(2).all(|pair| pair[0].event < pair[1].event));
            let (mut at, mut touched) = (0, vec![(u64::MAX, 0); steps.len()]);
            for now in curve[0].event..=curve[curve.len() - 1].event {
                at += usize::from(curve.get(at + 1).is_some_and(|next| next.event == now));
                let step = steps.partition_point(|step| step.event <= now) - 1;
                let live = curve[at].live.get();
                assert!(steps[step].live.0 <= live && live <= steps[step].live.1, "event {now}");
                touched[step] = (touched[step].0.min(live), touched[step].1.max(live));
            }
            assert_eq!(touched, steps.iter().map(|step| step.live).collect::<Vec<_>>());
        }
    }
}
