//! What the recorded allocator had reserved at every moment: the segments at the end, and the way back from them over what the record says was allocated
//! and freed.
//!
//! Not for: private pools, which are left out everywhere.
//!
//! Invariant: a curve ends at what the file says is reserved; one that cannot be right is not given.

use std::collections::BTreeMap;

use super::error::{Place, SnapshotError, SnapshotFault};
use super::fields::{Action, Entry, Fields, Ranges};
use crate::trace::import::Reserved;
use crate::units::Bytes;

/// The curves of all devices.
#[derive(Debug)]
pub(super) struct Curves {
    devices: BTreeMap<u32, Curve>,
    /// Of the end.
    segments: Ranges,
    /// Device, how many steps of the trace came before, and bytes more or less, in order of time.
    changes: Vec<(u32, usize, i64)>,
}

#[derive(Debug, Default)]
struct Curve {
    /// In the segments at the end.
    end: Bytes,
    /// What all changes add up to.
    sum: i64,
    /// The record has segments that shrink.
    shrinks: bool,
    /// A block was allocated where there is no segment at the end.
    has_stranger: bool,
}

impl Curve {
    /// What was reserved before the record, if it can be told.
    fn start(&self) -> Option<i64> {
        // A segment went, and the record does not say when.
        let is_lost = self.has_stranger && !self.shrinks;
        let end = i64::try_from(self.end.get()).ok().filter(|_| !is_lost)?;
        end.checked_sub(self.sum).filter(|start| *start >= 0)
    }
}

impl Curves {
    /// Where the curves of `fields` end.
    pub(super) fn of(fields: &Fields) -> Result<Curves, SnapshotError> {
        let mut devices: BTreeMap<u32, Curve> = BTreeMap::new();
        for (index, segment) in fields.segments.iter().enumerate().filter(|(_, segment)| !segment.is_private) {
            let curve = devices.entry(segment.device).or_default();
            let sum = curve.end.checked_add(segment.bytes);
            curve.end = sum.ok_or_else(|| Place::Segment(index).fault(SnapshotFault::Bytes))?;
        }
        let segments = Ranges::of(fields.segments.iter().filter(|segment| !segment.is_private));
        Ok(Curves { devices, segments, changes: Vec::new() })
    }

    /// A block was allocated at `address`.
    pub(super) fn saw(&mut self, device: u32, address: u64) {
        if !self.segments.hold(device, address) {
            self.devices.entry(device).or_default().has_stranger = true;
        }
    }

    /// A segment grew or shrank after `step` steps; `None` past what any machine has.
    pub(super) fn change(&mut self, device: u32, step: usize, entry: &Entry) -> Option<()> {
        let bytes = i64::try_from(entry.bytes.get()).ok()?;
        let curve = self.devices.entry(device).or_default();
        let shrinks = entry.action == Action::SegmentShrunk;
        let change = if shrinks { -bytes } else { bytes };
        curve.shrinks |= shrinks;
        curve.sum = curve.sum.checked_add(change)?;
        self.changes.push((device, step, change));
        Some(())
    }

    /// The points of all curves, for a trace that has `before` events before the first step; and the devices whose curves cannot be told.
    pub(super) fn finish(self, before: usize) -> (Vec<Reserved>, Vec<u32>) {
        let starts = self.devices.iter().filter_map(|(device, curve)| Some((*device, curve.start()?)));
        let mut now: BTreeMap<u32, i64> = starts.collect();
        let mut points: Vec<Reserved> = now.iter().map(|(device, start)| point(0, *device, *start)).collect();
        for (device, step, change) in self.changes {
            let Some(reserved) = now.get_mut(&device) else { continue };
            match reserved.checked_add(change).filter(|sum| *sum >= 0) {
                Some(sum) => {
                    *reserved = sum;
                    points.push(point(before + step, device, sum));
                }
                None => drop(now.remove(&device)),
            }
        }
        points.retain(|point| now.contains_key(&point.device));
        (points, self.devices.into_keys().filter(|device| !now.contains_key(device)).collect())
    }
}

fn point(events: usize, device: u32, bytes: i64) -> Reserved {
    Reserved { events, device, bytes: Bytes::new(bytes.unsigned_abs()) }
}
