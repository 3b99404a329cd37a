//! Raw records become events of a trace: addresses become ids, keys become contexts.
//!
//! Not for: where the events go ([`Sink`]).
//!
//! Invariant: what it gives to a sink is what a [`crate::trace::builder::Builder`] takes, whatever was dropped before. An allocation whose record was dropped has no free; one whose free was dropped is
//! freed when its address comes again.

use std::collections::HashMap;
use std::sync::Arc;

use super::sink::{Sink, Stop};
use super::tap::{Kind, Record};
use crate::context;
use crate::limits;
use crate::pool::AddressMap;
use crate::trace::binary::{Remarks, Stopped};
use crate::trace::{Context, ContextKey, Event, EventKind};
use crate::units::{Bytes, DeviceAddress, Tick};

/// The events so far, as far as later ones need them.
#[derive(Debug)]
pub(super) struct Transcript {
    device: u32,
    /// Ids of live allocations, and of those whose free waits for other streams.
    live: AddressMap<u64>,
    waiting: AddressMap<u64>,
    next: u64,
    events: u64,
    /// Bytes ever asked for: a trace cannot have more than a number holds.
    asked: u64,
    modules: Vec<String>,
    module_numbers: HashMap<Arc<str>, u32>,
    /// Contexts that came before; `None` where nobody knows the key.
    contexts: HashMap<ContextKey, Option<Context>>,
    remarks: Remarks,
}

impl Transcript {
    /// Of what happens on `device`.
    pub(super) fn new(device: u32) -> Transcript {
        Transcript {
            device,
            live: AddressMap::default(),
            waiting: AddressMap::default(),
            next: 0,
            events: 0,
            asked: 0,
            modules: vec![String::new()],
            module_numbers: HashMap::from([(Arc::from(""), 0)]),
            contexts: HashMap::from([(ContextKey::UNKNOWN, Some(Context::default()))]),
            remarks: Remarks::default(),
        }
    }

    /// The addresses of live allocations that it has seen come, and their ids.
    pub(super) fn live(&self) -> impl Iterator<Item = (DeviceAddress, u64)> + '_ {
        self.live.iter().map(|(address, id)| (*address, *id))
    }

    pub(super) fn modules(&self) -> &[String] {
        &self.modules
    }

    /// What is missing from the events, and what was made up.
    pub(super) fn remarks(&self) -> Remarks {
        self.remarks
    }

    /// Gives the events of a record to `sink`.
    pub(super) fn take(&mut self, record: &Record, sink: &mut impl Sink) -> Result<(), Stop> {
        match record.kind {
            Kind::Alloc => self.alloc(record, sink),
            Kind::Free => self.free(record, sink).map(drop),
            Kind::FreeWaits => {
                if let Some(id) = self.free(record, sink)? {
                    self.waiting.insert(record.address, id);
                }
                Ok(())
            }
            Kind::FreeCompleted => match self.waiting.remove(&record.address) {
                Some(id) => self.give(record, EventKind::FreeCompleted, id, sink),
                None => self.unknown(),
            },
            Kind::RecordStream => match self.live.get(&record.address).copied() {
                Some(id) => self.give(record, EventKind::RecordStream, id, sink),
                None => self.unknown(),
            },
            Kind::Mark => self.give(record, EventKind::Mark, 0, sink),
            Kind::Refused => self.refused(record, sink),
            Kind::Private => {
                self.remarks.private += 1;
                Ok(())
            }
        }
    }

    fn alloc(&mut self, record: &Record, sink: &mut impl Sink) -> Result<(), Stop> {
        // Its bytes are somebody's again, so they were free: the word of it was dropped.
        self.waiting.remove(&record.address);
        if let Some(id) = self.live.remove(&record.address) {
            self.remarks.lost_frees += 1;
            self.give(record, EventKind::Free, id, sink)?;
        }
        if self.live.len() + self.waiting.len() >= limits::RECORD_LIVE_MAX {
            return Err(Stop::Limit(Stopped::Live));
        }
        let id = self.new_id(record, sink)?;
        self.live.insert(record.address, id);
        Ok(())
    }

    /// The id that was freed, if it is one that came before.
    fn free(&mut self, record: &Record, sink: &mut impl Sink) -> Result<Option<u64>, Stop> {
        let Some(id) = self.live.remove(&record.address) else {
            self.unknown()?;
            return Ok(None);
        };
        self.give(record, EventKind::Free, id, sink)?;
        Ok(Some(id))
    }

    /// Its allocation was dropped, or is older than the recording.
    fn unknown(&mut self) -> Result<(), Stop> {
        self.remarks.unknown += 1;
        Ok(())
    }

    /// As if it had been served and given back at once: what was asked for is what the job would have taken.
    fn refused(&mut self, record: &Record, sink: &mut impl Sink) -> Result<(), Stop> {
        self.remarks.refused += 1;
        self.remarks.refused_largest = self.remarks.refused_largest.max(record.bytes);
        // More than any process has addresses for tells nothing of the job.
        if record.bytes > limits::ADDRESS_BYTES_MAX {
            return Ok(());
        }
        let id = self.new_id(record, sink)?;
        self.give(record, EventKind::Free, id, sink)
    }

    fn new_id(&mut self, record: &Record, sink: &mut impl Sink) -> Result<u64, Stop> {
        let asked = self.asked.checked_add(record.bytes.get());
        self.asked = asked.ok_or(Stop::Limit(Stopped::Events))?;
        let id = self.next;
        self.next += 1;
        self.give(record, EventKind::Alloc, id, sink)?;
        Ok(id)
    }

    fn give(&mut self, record: &Record, kind: EventKind, id: u64, sink: &mut impl Sink) -> Result<(), Stop> {
        if self.events >= limits::RECORD_EVENTS_MAX as u64 {
            return Err(Stop::Limit(Stopped::Events));
        }
        self.events += 1;
        let event = Event {
            tick: Tick(record.tick),
            kind,
            id,
            bytes: if kind == EventKind::Alloc { record.bytes } else { Bytes::ZERO },
            stream: record.stream,
            iteration: record.iteration,
            context: self.context(record.context),
            is_dynamic: record.is_dynamic && kind == EventKind::Alloc,
            device: self.device,
            thread: record.thread,
        };
        sink.push(&event, &self.modules)
    }

    fn context(&mut self, key: ContextKey) -> Context {
        let known = match self.contexts.get(&key) {
            Some(known) => *known,
            None => self.look_up(key),
        };
        known.unwrap_or_else(|| {
            self.remarks.nameless += 1;
            Context::default()
        })
    }

    fn look_up(&mut self, key: ContextKey) -> Option<Context> {
        let named = context::named(key);
        let context = named.map(|named| {
            let module = self.module(&named.module);
            Context { phase: named.phase, microbatch: named.microbatch, chunk: named.chunk, module }
        });
        if self.contexts.len() < limits::CONTEXTS_MAX {
            self.contexts.insert(key, context);
        }
        context
    }

    fn module(&mut self, name: &Arc<str>) -> u32 {
        if let Some(number) = self.module_numbers.get(name) {
            return *number;
        }
        let number = self.modules.len() as u32;
        self.modules.push(name.to_string());
        self.module_numbers.insert(Arc::clone(name), number);
        number
    }
}
