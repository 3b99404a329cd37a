//! What the allocator that was recorded did, where a file says so, to be held against what models of it make of the same job.

use super::record::{Point, Record};
use crate::trace::import::Reserved;
use crate::trace::{EventKind, Trace};
use crate::units::Bytes;

/// Bytes live and reserved on `device` over the whole of `trace`, with what the file says of the second; nothing where it says nothing. Where allocations lay is not told.
pub fn recorded(trace: &Trace, device: u32, reserved: &[Reserved]) -> Option<Record> {
    let mut changes = reserved.iter().filter(|change| change.device == device).peekable();
    changes.peek()?;
    let (mut live, mut now) = (Bytes::ZERO, Bytes::ZERO);
    let mut sizes = std::collections::HashMap::new();
    let mut record = Record::default();
    for (at, event) in trace.events.iter().enumerate() {
        // A segment is made for a request: it is there when the request is served.
        let mut has_changed = false;
        while let Some(change) = changes.next_if(|change| change.events <= at) {
            now = change.bytes;
            has_changed = true;
        }
        let is_ours = event.device == device;
        match event.kind {
            EventKind::Alloc if is_ours => {
                sizes.insert(event.id, event.bytes);
                live += event.bytes;
            }
            EventKind::Free if is_ours => live -= sizes.remove(&event.id).unwrap_or(Bytes::ZERO),
            _ if !has_changed => continue,
            _ => {}
        }
        record.curve.push(Point { event: u32::try_from(at).unwrap_or(u32::MAX), live, reserved: now });
    }
    // Segments that went after the last event.
    if let (Some(last), Some(change)) = (record.curve.last().copied(), changes.last()) {
        record.curve.push(Point { reserved: change.bytes, ..last });
    }
    Some(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StreamId;
    use crate::trace::{Context, Event};
    use crate::units::Tick;

    #[test]
    fn what_was_reserved_is_told_with_what_was_live() {
        let (tick, stream, context) = (Tick(0), StreamId::DEFAULT, Context::default());
        let event = |kind, id, bytes, device| {
            let bytes = Bytes::new(bytes);
            Event { tick, kind, id, bytes, stream, iteration: 0, context, is_dynamic: false, device, thread: 0 }
        };
        let events = vec![
            event(EventKind::Alloc, 1, 512, 0),
            event(EventKind::Alloc, 2, 4096, 1),
            event(EventKind::Free, 1, 0, 0),
            event(EventKind::FreeCompleted, 1, 0, 0),
        ];
        let trace = Trace { events, ..Trace::default() };
        let change = |events, device, mib| Reserved { events, device, bytes: Bytes::mib(mib) };
        let changes = [change(0, 0, 0), change(0, 0, 2), change(1, 1, 20), change(4, 0, 0)];
        let curve = recorded(&trace, 0, &changes).unwrap().curve;
        let points: Vec<_> = curve.iter().map(|point| (point.event, point.live.get(), point.reserved.get())).collect();
        assert_eq!(points, [(0, 512, 2 << 20), (2, 0, 2 << 20), (2, 0, 0)]);
        assert!(recorded(&trace, 7, &changes).is_none());
    }
}
