//! What the fields of a snapshot say, typed and checked: segments, their blocks, the entries of the record, settings.
//!
//! Not for: what happened (`history`). Keys are looked up by name and unknown ones left alone, because every version of PyTorch adds some.
//!
//! Invariant: each list and dictionary is read at one place only, so that a short file that mentions one object a million times is refused, not unfolded.

use std::collections::BTreeMap;

use super::super::pickle::{Pickle, Value};
use super::AllocatorSettings;
use super::error::{Place, SnapshotError, SnapshotFault};
use crate::units::Bytes;

/// Keys whose values are call stacks or concern other memory: not read, and not kept while the file is.
pub(super) const PASSED_OVER: [&str; 6] =
    ["frames", "forward_frames", "history", "host_segments", "host_traces", "user_metadata"];

/// A whole snapshot.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) segments: Vec<Segment>,
    /// Of all segments.
    pub(super) blocks: Vec<Block>,
    /// The record of each device, in file order.
    pub(super) records: Vec<Vec<Entry>>,
    /// When each step of the profiler began, in microseconds, in order.
    pub(super) steps: Vec<i64>,
    pub(super) settings: Option<AllocatorSettings>,
    /// The first kind of entry that nobody knew, and how many of such there are.
    pub(super) unknown: Option<(String, u64)>,
    /// The first annotation that is no step of a profiler, and how many such begin.
    pub(super) labels: Option<(String, u64)>,
}

/// A segment as it was at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) device: u32,
    pub(super) address: u64,
    pub(super) bytes: Bytes,
    pub(super) stream: i64,
    pub(super) is_private: bool,
}

impl Segment {
    /// First address behind it.
    fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes.get())
    }
}

/// The addresses of segments.
#[derive(Debug)]
pub(super) struct Ranges {
    /// Device, first address, and the one behind the last, in order.
    sorted: Vec<(u32, u64, u64)>,
}

impl Ranges {
    pub(super) fn of<'s>(segments: impl Iterator<Item = &'s Segment>) -> Ranges {
        let mut sorted: Vec<_> = segments.map(|segment| (segment.device, segment.address, segment.end())).collect();
        sorted.sort_unstable();
        Ranges { sorted }
    }

    /// True for an address inside.
    pub(super) fn hold(&self, device: u32, address: u64) -> bool {
        let after = self.sorted.partition_point(|(of, start, _)| (*of, *start) <= (device, address));
        let before = after.checked_sub(1).and_then(|before| self.sorted.get(before));
        before.is_some_and(|(of, _, end)| *of == device && address < *end)
    }
}

/// A block as it was at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Index of its segment.
    pub(super) segment: usize,
    pub(super) address: u64,
    /// As asked for.
    pub(super) bytes: Bytes,
    pub(super) state: BlockState,
}

/// What a block was at the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BlockState {
    Idle,
    Live,
    /// Given back, and still in use by another stream.
    Pending,
}

/// An entry of the record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) action: Action,
    pub(super) address: u64,
    pub(super) bytes: Bytes,
    /// What the device had free when the request was refused; nothing for any other entry.
    pub(super) device_free: Option<Bytes>,
    pub(super) stream: i64,
    /// In microseconds; old versions have none.
    pub(super) time: Option<i64>,
    /// The pool is a private one; old versions do not say.
    pub(super) is_private: Option<bool>,
    /// PyTorch's own bookkeeping around an allocation at a wished address.
    pub(super) is_padding: bool,
}

/// What an entry records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    /// A segment was allocated, or a piece of one mapped.
    SegmentGrown,
    /// A segment was freed, or a piece of one unmapped.
    SegmentShrunk,
    OutOfMemory,
    /// An earlier snapshot, or something of a later version.
    Nothing,
}

type Found<T> = Result<T, SnapshotError>;

/// Reads all of `pickle`.
pub(super) fn read(pickle: &Pickle<'_>) -> Found<Fields> {
    let containers = pickle.containers();
    let mut reader = Reader {
        pickle,
        lists_read: vec![false; containers],
        dicts_read: vec![false; containers],
        fields: Fields::default(),
    };
    reader.whole()?;
    Ok(reader.fields)
}

struct Reader<'p, 'a> {
    pickle: &'p Pickle<'a>,
    lists_read: Vec<bool>,
    dicts_read: Vec<bool>,
    fields: Fields,
}

impl<'p> Reader<'p, '_> {
    fn whole(&mut self) -> Found<()> {
        let root = self.pickle.root();
        if let Value::List(_) = root {
            // What torch.cuda.memory_snapshot() gives: segments alone.
            return self.segments(Place::Whole, root);
        }
        let keys = ["segments", "device_traces", "allocator_settings", "external_annotations"];
        let [segments, records, settings, annotations] = self.keys(Place::Whole, root, keys)?;
        self.segments(Place::Under("segments"), needed(Place::Whole, "segments", segments)?)?;
        if let Some(records) = records {
            self.records(records)?;
        }
        if let Some(settings) = settings {
            self.settings(settings)?;
        }
        if let Some(annotations) = annotations {
            self.annotations(annotations)?;
        }
        Ok(())
    }

    /// The items of a list that nobody has read before.
    fn list(&mut self, place: Place, value: Value) -> Found<&'p [Value]> {
        let (Value::List(number), Some(items)) = (value, self.pickle.items(value)) else {
            return Err(place.fault(SnapshotFault::Kind { found: self.shown(value), expected: "a list" }));
        };
        // An empty one says the same wherever it is.
        let is_again = self.lists_read.get_mut(number as usize).is_none_or(|read| std::mem::replace(read, true));
        if is_again && !items.is_empty() {
            return Err(place.fault(SnapshotFault::Again));
        }
        Ok(items)
    }

    /// The entries of a dictionary that nobody has read before.
    fn dict(&mut self, place: Place, value: Value) -> Found<&'p [(Value, Value)]> {
        let (Value::Dict(number), Some(entries)) = (value, self.pickle.entries(value)) else {
            return Err(place.fault(SnapshotFault::Kind { found: self.shown(value), expected: "a dictionary" }));
        };
        if self.dicts_read.get_mut(number as usize).is_none_or(|read| std::mem::replace(read, true)) {
            return Err(place.fault(SnapshotFault::Again));
        }
        Ok(entries)
    }

    /// What a dictionary has under each of `keys`.
    fn keys<const N: usize>(&mut self, place: Place, value: Value, keys: [&str; N]) -> Found<[Option<Value>; N]> {
        let mut found = [None; N];
        for (key, value) in self.dict(place, value)? {
            let Some(name) = self.pickle.text(*key) else { continue };
            for (key, found) in keys.iter().zip(&mut found) {
                if key.as_bytes() == name {
                    *found = Some(*value);
                }
            }
        }
        Ok(found)
    }

    fn segments(&mut self, place: Place, value: Value) -> Found<()> {
        for (index, segment) in self.list(place, value)?.iter().enumerate() {
            self.segment(index, *segment)?;
        }
        Ok(())
    }

    fn segment(&mut self, index: usize, value: Value) -> Found<()> {
        let place = Place::Segment(index);
        let keys = ["device", "address", "total_size", "stream", "segment_pool_id", "blocks"];
        let [device, address, bytes, stream, pool, blocks] = self.keys(place, value, keys)?;
        let device = self.number(place, "device", device)?;
        let segment = Segment {
            device: u32::try_from(device).map_err(|_| self.field(place, "device", Value::Large(device), "a device"))?,
            address: self.number(place, "address", address)?,
            bytes: self.bytes(place, "total_size", bytes)?,
            stream: self.stream(place, stream)?,
            is_private: pool.and_then(|pool| self.is_private(pool)).unwrap_or(false),
        };
        self.fields.segments.push(segment);
        // Old versions give no addresses; blocks lie one behind the other.
        let mut next = segment.address;
        let blocks = needed(place, "blocks", blocks)?;
        for (at, block) in self.list(place, blocks)?.iter().enumerate() {
            next = self.block(Place::Block(index, at), *block, index, next)?;
        }
        Ok(())
    }

    /// The address behind it.
    fn block(&mut self, place: Place, value: Value, segment: usize, next: u64) -> Found<u64> {
        let [address, size, asked, state] = self.keys(place, value, ["address", "size", "requested_size", "state"])?;
        let size = self.bytes(place, "size", size)?;
        let address = address.map_or(Ok(next), |address| self.number(place, "address", Some(address)))?;
        let state = needed(place, "state", state)?;
        let state = match self.pickle.text(state) {
            Some(b"inactive") => BlockState::Idle,
            Some(b"active_allocated") => BlockState::Live,
            Some(b"active_pending_free" | b"active_awaiting_free") => BlockState::Pending,
            _ => return Err(self.field(place, "state", state, "a state of a block")),
        };
        if state != BlockState::Idle {
            let bytes = asked.map_or(Ok(size), |asked| self.bytes(place, "requested_size", Some(asked)))?;
            self.fields.blocks.push(Block { segment, address, bytes, state });
        }
        Ok(address.saturating_add(size.get()))
    }

    fn records(&mut self, value: Value) -> Found<()> {
        for (device, record) in self.list(Place::Under("device_traces"), value)?.iter().enumerate() {
            let entries = self.list(Place::Device(device), *record)?;
            // The list may mention one entry a million times, and then it is refused.
            let mut record = Vec::new();
            for (index, entry) in entries.iter().enumerate() {
                record.push(self.entry(Place::Entry(device, index), *entry)?);
            }
            self.fields.records.push(record);
        }
        Ok(())
    }

    fn entry(&mut self, place: Place, value: Value) -> Found<Entry> {
        let keys = ["action", "addr", "size", "stream", "time_us", "pool_id", "internal_metadata", "device_free"];
        let [action, address, size, stream, time, pool, internal, free] = self.keys(place, value, keys)?;
        let action = self.action(place, action)?;
        let mut entry = Entry {
            action,
            address: 0,
            bytes: Bytes::ZERO,
            device_free: None,
            stream: 0,
            time: time.map(|time| self.signed(place, "time_us", time)).transpose()?,
            is_private: pool.and_then(|pool| self.is_private(pool)),
            is_padding: internal.and_then(|text| self.pickle.text(text)) == Some(b"mallocWithAddress"),
        };
        if action != Action::Nothing {
            entry.bytes = self.bytes(place, "size", size)?;
            entry.stream = self.stream(place, stream)?;
        }
        if action == Action::OutOfMemory {
            entry.device_free = free.map(|free| self.bytes(place, "device_free", Some(free))).transpose()?;
        } else if action != Action::Nothing {
            entry.address = self.number(place, "addr", address)?;
        }
        Ok(entry)
    }

    fn action(&mut self, place: Place, value: Option<Value>) -> Found<Action> {
        let value = needed(place, "action", value)?;
        let Some(name) = self.pickle.text(value) else {
            return Err(self.field(place, "action", value, "a name"));
        };
        Ok(match name {
            b"alloc" => Action::Alloc,
            b"free_requested" => Action::FreeRequested,
            b"free_completed" => Action::FreeCompleted,
            b"segment_alloc" | b"segment_map" => Action::SegmentGrown,
            b"segment_free" | b"segment_unmap" => Action::SegmentShrunk,
            b"oom" => Action::OutOfMemory,
            b"snapshot" | b"annotate" => Action::Nothing,
            _ => {
                let mut unknown = self.fields.unknown.take().unwrap_or_else(|| (self.shown(value), 0));
                unknown.1 += 1;
                self.fields.unknown = Some(unknown);
                Action::Nothing
            }
        })
    }

    fn settings(&mut self, value: Value) -> Found<()> {
        let place = Place::Under("allocator_settings");
        let entries = self.dict(place, value)?;
        let mut settings = AllocatorSettings::default();
        let mut text = Value::None;
        for &(key, value) in entries {
            match self.pickle.text(key).unwrap_or_default() {
                b"expandable_segments" => settings.expandable_segments = value == Value::Bool(true),
                // −1 for none.
                b"max_split_size" => {
                    settings.max_split_len = whole(value).map(Bytes::new).filter(|max| *max <= Bytes::MAX)
                }
                b"garbage_collection_threshold" => {
                    settings.garbage_collection_threshold = match value {
                        Value::Float(threshold) => Some(threshold).filter(|threshold| *threshold > 0.0),
                        _ => None,
                    }
                }
                b"roundup_power2_divisions" => settings.roundup_divisions = self.divisions(value)?,
                // Named for the vendor, or for none.
                name if name.starts_with(b"PYTORCH_") && name.ends_with(b"ALLOC_CONF") => text = value,
                _ => {}
            }
        }
        settings.text = String::from_utf8_lossy(self.pickle.text(text).unwrap_or_default()).into_owned();
        self.fields.settings = Some(settings);
        Ok(())
    }

    /// Sizes in MiB, as text, and into how many steps each power of two from there on is divided.
    fn divisions(&mut self, value: Value) -> Found<Vec<(u64, u64)>> {
        let mut divisions = Vec::new();
        for &(size, count) in self.dict(Place::Under("allocator_settings"), value)? {
            let size = self.pickle.text(size).and_then(decimal);
            divisions.extend(size.zip(whole(count)));
        }
        divisions.sort_unstable();
        Ok(divisions)
    }

    fn annotations(&mut self, value: Value) -> Found<()> {
        let mut steps: BTreeMap<u64, i64> = BTreeMap::new();
        for (index, annotation) in self.list(Place::Under("external_annotations"), value)?.iter().enumerate() {
            let place = Place::Annotation(index);
            let [name, stage, time] = self.keys(place, *annotation, ["name", "stage", "time_us"])?;
            let text = |value: Option<Value>| value.and_then(|value| self.pickle.text(value)).unwrap_or_default();
            if text(stage) != b"START" {
                continue;
            }
            if let Some(step) = text(name).strip_prefix(b"ProfilerStep#").and_then(decimal) {
                let time = self.signed(place, "time_us", needed(place, "time_us", time)?)?;
                let begin = steps.entry(step).or_insert(time);
                *begin = time.min(*begin);
            } else if let Some(name) = name {
                let labels = self.fields.labels.take();
                let (label, count) = labels.unwrap_or_else(|| (self.shown(name), 0));
                self.fields.labels = Some((label, count + 1));
            }
        }
        self.fields.steps = steps.into_values().collect();
        self.fields.steps.sort_unstable();
        Ok(())
    }

    fn field(&self, place: Place, key: &'static str, value: Value, expected: &'static str) -> SnapshotError {
        place.fault(SnapshotFault::Field { key, found: self.shown(value), expected })
    }

    fn number(&self, place: Place, key: &'static str, value: Option<Value>) -> Found<u64> {
        let value = needed(place, key, value)?;
        whole(value).ok_or_else(|| self.field(place, key, value, "a whole number"))
    }

    fn signed(&self, place: Place, key: &'static str, value: Value) -> Found<i64> {
        match value {
            Value::Int(number) => Ok(number),
            _ => Err(self.field(place, key, value, "a whole number")),
        }
    }

    fn bytes(&self, place: Place, key: &'static str, value: Option<Value>) -> Found<Bytes> {
        let value = needed(place, key, value)?;
        let bytes = whole(value).map(Bytes::new).filter(|bytes| *bytes <= Bytes::MAX);
        bytes.ok_or_else(|| self.field(place, key, value, "a number of bytes"))
    }

    /// A handle of the driver, with or without a sign.
    fn stream(&self, place: Place, value: Option<Value>) -> Found<i64> {
        match needed(place, "stream", value)? {
            Value::Int(stream) => Ok(stream),
            Value::Large(stream) => Ok(stream.cast_signed()),
            other => Err(self.field(place, "stream", other, "a whole number")),
        }
    }

    /// The pool belongs to a graph or was made by the job; `None` where the value does not say.
    fn is_private(&self, pool: Value) -> Option<bool> {
        match self.pickle.items(pool)? {
            [one, other] => Some((*one, *other) != (Value::Int(0), Value::Int(0))),
            _ => None,
        }
    }

    /// A value as an error shows it.
    fn shown(&self, value: Value) -> String {
        const SHOWN: usize = 40;
        match value {
            Value::None => "None".into(),
            Value::Bool(yes) => if yes { "True" } else { "False" }.into(),
            Value::Int(number) => number.to_string(),
            Value::Large(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::List(_) => "a list".into(),
            Value::Tuple(_) => "a tuple".into(),
            Value::Dict(_) => "a dictionary".into(),
            Value::Other => "bytes or a number beyond 64 bits".into(),
            Value::Text(_) => {
                let text = self.pickle.text(value).unwrap_or_default();
                let cut = text.get(..SHOWN).unwrap_or(text);
                let dots = if cut.len() < text.len() { "…" } else { "" };
                format!("\"{}{dots}\"", cut.escape_ascii())
            }
        }
    }
}

fn needed(place: Place, key: &'static str, value: Option<Value>) -> Found<Value> {
    value.ok_or_else(|| place.fault(SnapshotFault::Missing(key)))
}

fn whole(value: Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(number).ok(),
        Value::Large(number) => Some(number),
        _ => None,
    }
}

/// A number as text. The length first: hostile files mention one long text a million times.
fn decimal(text: &[u8]) -> Option<u64> {
    const DIGITS_MAX: usize = 20;
    if text.len() > DIGITS_MAX {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}
