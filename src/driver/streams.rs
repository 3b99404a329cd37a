//! Simulated streams: queues of work that run in order, each at its own pace, with events between them.
//!
//! Nothing runs on its own: queued work goes on whenever somebody asks ([`Streams::pump`]), as far as it can. So the order is real
//! (work behind an incomplete event stays undone), the timing is the test's to choose, and no threads exist that a fork
//! would lose. A *stall* stands for a kernel that runs for long: until it ends, nothing behind it in its stream happens.
//!
//! Not for: memory. What a fill does is the driver's business, through the closure given to `pump`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Cause, EventId};
use crate::ids::{DeviceId, StreamId};
use crate::units::AddressSpan;

enum Work {
    Fill { span: AddressSpan, value: u8 },
    Complete(EventId),
    Await(EventId),
    Stall(Arc<AtomicBool>),
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Work::Fill { span, value } => write!(f, "fill {span} with {value}"),
            Work::Complete(event) => write!(f, "complete {event:?}"),
            Work::Await(event) => write!(f, "await {event:?}"),
            Work::Stall(over) => write!(f, "stall, over: {}", over.load(Ordering::Relaxed)),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Only streams with work, and those that [`Streams::create`] made. Any other stream is idle by definition: a caller may
    /// hand us streams of its own making.
    queues: BTreeMap<(DeviceId, StreamId), VecDeque<Work>>,
    created: BTreeMap<StreamId, DeviceId>,
    /// Whether each event is complete.
    events: HashMap<EventId, bool>,
    next: u64,
}

/// A stream that is busy until this is dropped.
#[derive(Debug)]
pub struct Stall {
    over: Arc<AtomicBool>,
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

impl Streams {
    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn create(&mut self, device: DeviceId) -> StreamId {
        let stream = StreamId(self.next());
        self.created.insert(stream, device);
        stream
    }

    pub(super) fn destroy(&mut self, stream: StreamId) -> Result<(), Cause> {
        self.created.remove(&stream).map(|_| ()).ok_or(Cause::UnknownStream(stream))
    }

    /// The device of a stream that was made here; any other stream counts as one of `fallback`.
    fn device(&self, stream: StreamId, fallback: DeviceId) -> DeviceId {
        self.created.get(&stream).copied().unwrap_or(fallback)
    }

    fn push(&mut self, device: DeviceId, stream: StreamId, work: Work) {
        let device = self.device(stream, device);
        self.queues.entry((device, stream)).or_default().push_back(work);
    }

    pub(super) fn fill(&mut self, device: DeviceId, stream: StreamId, span: AddressSpan, value: u8) {
        self.push(device, stream, Work::Fill { span, value });
    }

    pub(super) fn stall(&mut self, device: DeviceId, stream: StreamId) -> Stall {
        let over = Arc::new(AtomicBool::new(false));
        self.push(device, stream, Work::Stall(Arc::clone(&over)));
        Stall { over }
    }

    pub(super) fn record(&mut self, device: DeviceId, stream: StreamId) -> EventId {
        let event = EventId(self.next());
        self.events.insert(event, false);
        self.push(device, stream, Work::Complete(event));
        event
    }

    pub(super) fn wait(&mut self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), Cause> {
        match self.events.get(&event) {
            None => Err(Cause::UnknownEvent(event)),
            Some(true) => Ok(()),
            Some(false) => {
                self.push(device, stream, Work::Await(event));
                Ok(())
            }
        }
    }

    pub(super) fn query(&self, event: EventId) -> Result<bool, Cause> {
        self.events.get(&event).copied().ok_or(Cause::UnknownEvent(event))
    }

    pub(super) fn forget(&mut self, event: EventId) -> Result<(), Cause> {
        self.events.remove(&event).map(|_| ()).ok_or(Cause::UnknownEvent(event))
    }

    /// Runs queued work as far as it can go.
    pub(super) fn pump(&mut self, mut fill: impl FnMut(AddressSpan, u8)) {
        // An event that completes may let a stream go on that was already looked at, so go round until nothing moves.
        loop {
            let mut moved = false;
            for queue in self.queues.values_mut() {
                while let Some(work) = queue.front() {
                    match work {
                        Work::Fill { span, value } => fill(*span, *value),
                        // A forgotten event has nobody who asks.
                        Work::Complete(event) => {
                            self.events.entry(*event).and_modify(|complete| *complete = true);
                        }
                        Work::Await(event) if !self.events.get(event).copied().unwrap_or(true) => break,
                        Work::Stall(over) if !over.load(Ordering::Acquire) => break,
                        Work::Await(_) | Work::Stall(_) => {}
                    }
                    queue.pop_front();
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        self.queues.retain(|_, queue| !queue.is_empty());
    }

    /// True when nothing is queued on the device.
    pub(super) fn is_idle(&self, device: DeviceId) -> bool {
        self.queues.range((device, StreamId(0))..=(device, StreamId(u64::MAX))).next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{Bytes, DeviceAddress, Span};

    const DEVICE: DeviceId = DeviceId(0);

    fn span_at(start: u64) -> AddressSpan {
        Span::new(DeviceAddress::new(start), Bytes::new(1)).unwrap()
    }

    fn pumped(streams: &mut Streams) -> Vec<u64> {
        let mut done = Vec::new();
        streams.pump(|span, _| done.push(span.start().get()));
        done
    }

    #[test]
    fn work_behind_a_stall_waits_and_other_streams_go_on() {
        let mut streams = Streams::default();
        let (one, two) = (streams.create(DEVICE), streams.create(DEVICE));
        let stall = streams.stall(DEVICE, one);
        streams.fill(DEVICE, one, span_at(1), 0);
        streams.fill(DEVICE, two, span_at(2), 0);
        assert_eq!(pumped(&mut streams), [2]);
        assert!(!streams.is_idle(DEVICE));
        drop(stall);
        assert_eq!(pumped(&mut streams), [1]);
        assert!(streams.is_idle(DEVICE));
    }

    #[test]
    fn a_stream_that_waits_for_an_event_goes_on_after_it() {
        let mut streams = Streams::default();
        let (one, two) = (streams.create(DEVICE), streams.create(DEVICE));
        let stall = streams.stall(DEVICE, two);
        let event = streams.record(DEVICE, two);
        streams.wait(DEVICE, one, event).unwrap();
        streams.fill(DEVICE, one, span_at(1), 0);
        assert_eq!(pumped(&mut streams), [0u64; 0]);
        assert_eq!(streams.query(event), Ok(false));
        drop(stall);
        assert_eq!(pumped(&mut streams), [1]);
        assert_eq!(streams.query(event), Ok(true));
        streams.forget(event).unwrap();
        assert_eq!(streams.query(event), Err(Cause::UnknownEvent(event)));
    }
}
