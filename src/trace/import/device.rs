//! One device's part of what came out of a file.

use super::Imported;

impl Imported {
    /// The device that a job allocates on first; 0 where it never does.
    pub fn first_device(&self) -> u32 {
        let first = self.trace.events.iter().find(|event| event.kind == crate::trace::EventKind::Alloc);
        first.map_or(0, |event| event.device)
    }

    /// Leaves out what happened on other devices, and says how many events that were. Marks are everybody's.
    pub fn keep_device(&mut self, device: u32) -> usize {
        let is_kept = |event: &crate::trace::Event| event.device == device || !event.kind.has_id();
        let before = self.trace.events.len();
        // How many of the events before each place stay.
        let mut kept_before = Vec::with_capacity(before + 1);
        let mut kept = 0;
        for event in &self.trace.events {
            kept_before.push(kept);
            kept += usize::from(is_kept(event));
        }
        kept_before.push(kept);
        self.reserved.retain(|point| point.device == device);
        for point in &mut self.reserved {
            point.events = kept_before.get(point.events).copied().unwrap_or(kept);
        }
        self.trace.events.retain(is_kept);
        before - kept
    }
}

#[cfg(test)]
mod tests {
    use crate::trace::import::{Reserved, read};
    use crate::units::Bytes;

    #[test]
    fn what_happened_on_other_devices_is_left_out_and_curves_keep_their_place() {
        let text = "tick,event,id,bytes,device\n1,alloc,1,8,1\n2,alloc,2,16,0\n3,mark,,,0\n4,free,1,,1\n5,free,2,,0\n";
        let mut imported = read(text.as_bytes()).unwrap();
        assert_eq!(imported.first_device(), 1);
        let point = |events, device| Reserved { events, device, bytes: Bytes::mib(2) };
        imported.reserved = vec![point(0, 0), point(1, 0), point(2, 1), point(5, 0)];
        assert_eq!(imported.keep_device(0), 2);
        let ticks: Vec<u64> = imported.trace.events.iter().map(|event| event.tick.0).collect();
        assert_eq!(ticks, [2, 3, 5]);
        assert_eq!(imported.reserved, [point(0, 0), point(0, 0), point(3, 0)]);
        assert_eq!(imported.keep_device(0), 0);
    }
}
