//! Plan files: written compactly, read strictly.
//!
//! ```text
//!   "STPLAN"  2 bytes version  8 bytes length of the body  body  4 bytes CRC-32 of all before
//! ```
//!
//! The body is a row of unsigned LEB128 numbers: pool length, entries, start of the cycle, provenance (iteration, lower bound, dynamic requests, work units, length
//! and bytes of the solver's name, requests that vary, those of them in the prologue), the job (fingerprint, world size or 0, and where it is not 0 the rank), 0 or 1 and where the iteration is cut (events, requests, bytes live), then per entry bytes, offset in units of allocation, stream, role of its thread, context, start of its lifetime less the one before
//! (zigzag), ticks, and 0 or 1 with the same for its second lifetime; then per request that varies the entry that it comes before, less that of the one before, stream, role, context, and 0 or
//! 1 with its interval as a lifetime; then how many detours, and per detour the entry that does not come, less that of the one before, the one that comes next, stream, role, how many requests, and for each of those bytes, context, and its offset in units of allocation and one more, or 0. Which spaces are idle in an interval follows from the entries ([`super::ReuseSpaces`]). Fixed numbers are little-endian.
//!
//! A reader takes exactly what the writer gives: numbers in their shortest form, nothing left over, and a plan that passes
//! [`super::validate`]. A version that it does not know is refused by number.

use super::validate::{self, Wrong};
use super::{Detour, DetourRequest, DynamicEntry, Entry, Fingerprint, Job, Lane, Plan, Position, Provenance};
use crate::error::ErrorKind;
use crate::ids::{PlanId, StreamId};
use crate::limits;
use crate::trace::{ContextKey, Cut};
use crate::units::{Bytes, Lifetime, PlanOffset, Tick};

const MAGIC: &[u8; 6] = b"STPLAN";
/// The version that this build writes, and the only one it reads.
pub const VERSION: u16 = 5;
const HEADER_LEN: usize = MAGIC.len() + 2 + 8;
const CHECKSUM_LEN: usize = 4;

/// Why bytes are not a plan.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// It does not begin as a plan does.
    #[error("this is not a plan file, as `stitchd plan` writes them")]
    NotAPlan,
    /// Another version wrote it.
    #[error(
        "the plan is of version {found}, and this build reads version {VERSION}; make it again with `stitchd plan`"
    )]
    Version {
        /// Its version.
        found: u16,
    },
    /// It is shorter or longer than it says.
    #[error("the plan should have {expected} bytes and has {found}")]
    Length {
        /// What it says.
        expected: u64,
        /// What it has.
        found: u64,
    },
    /// Its contents were changed.
    #[error("the plan's checksum is {found:08x} and should be {expected:08x}: the file is damaged")]
    Checksum {
        /// As computed from the contents.
        expected: u32,
        /// As written.
        found: u32,
    },
    /// A number is impossible where it stands.
    #[error("byte {at} of the plan: {what}")]
    Body {
        /// Where.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// The plan itself is wrong.
    #[error("the plan contradicts itself")]
    Wrong(#[from] Wrong),
}

impl FormatError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            FormatError::Version { .. } => ErrorKind::Unsupported,
            _ => ErrorKind::Invalid,
        }
    }
}

/// The plan as bytes.
pub fn write(plan: &Plan) -> Vec<u8> {
    let mut body = Vec::with_capacity(plan.entries.len() * 24 + plan.dynamic.len() * 16);
    let Plan { pool_len, entries, cycle_start, dynamic, dynamic_cycle_start, detours, job, provenance } = plan;
    for number in [
        pool_len.get(),
        entries.len() as u64,
        *cycle_start as u64,
        u64::from(provenance.iteration),
        provenance.lower_bound.get(),
        provenance.dynamic_requests,
        provenance.work_units,
        provenance.solver.len() as u64,
    ] {
        put(&mut body, number);
    }
    body.extend_from_slice(provenance.solver.as_bytes());
    put(&mut body, dynamic.len() as u64);
    put(&mut body, *dynamic_cycle_start as u64);
    put_job(&mut body, job);
    put_cut(&mut body, provenance.cut);
    let mut before = 0;
    for entry in entries {
        put(&mut body, entry.bytes.get());
        put(&mut body, entry.offset.get() / limits::ALLOCATION_ALIGNMENT.get());
        put_lane(&mut body, entry.lane);
        put(&mut body, entry.context.0);
        put_lifetime(&mut body, entry.lifetime, before);
        before = entry.lifetime.start.0;
        put(&mut body, u64::from(entry.again.is_some()));
        if let Some(again) = entry.again {
            put_lifetime(&mut body, again, before);
        }
    }
    let (mut at, mut before) = (0, 0);
    for entry in dynamic {
        put(&mut body, u64::from(entry.before - at));
        at = entry.before;
        put_lane(&mut body, entry.lane);
        put(&mut body, entry.context.0);
        put(&mut body, u64::from(entry.interval.is_some()));
        if let Some(interval) = entry.interval {
            put_lifetime(&mut body, interval, before);
            before = interval.start.0;
        }
    }
    put(&mut body, detours.len() as u64);
    let mut at = 0;
    for detour in detours {
        put(&mut body, u64::from(detour.from - at));
        at = detour.from;
        put(&mut body, u64::from(detour.to));
        put_lane(&mut body, detour.lane);
        put(&mut body, detour.requests.len() as u64);
        for DetourRequest { bytes, context, offset } in &detour.requests {
            put(&mut body, bytes.get());
            put(&mut body, context.0);
            put(&mut body, offset.map_or(0, |offset| offset.get() / limits::ALLOCATION_ALIGNMENT.get() + 1));
        }
    }
    let mut bytes = Vec::with_capacity(HEADER_LEN + body.len() + CHECKSUM_LEN);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&body);
    let checksum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The name of the plan that these bytes are: FNV-1a, 64 bits, over all of them.
pub(super) fn id(bytes: &[u8]) -> PlanId {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    PlanId(bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// The plan in `bytes`, all of them.
pub fn read(bytes: &[u8]) -> Result<Plan, FormatError> {
    let version = bytes.strip_prefix(MAGIC).and_then(|rest| rest.first_chunk::<2>()).ok_or(FormatError::NotAPlan)?;
    let found = u16::from_le_bytes(*version);
    if found != VERSION {
        return Err(FormatError::Version { found });
    }
    check_len(bytes, bytes.len() as u64)?;
    let (contents, checksum) = bytes.split_last_chunk::<CHECKSUM_LEN>().expect("the length was checked");
    let (expected, found) = (crc32fast::hash(contents), u32::from_le_bytes(*checksum));
    if expected != found {
        return Err(FormatError::Checksum { expected, found });
    }
    let plan = Reader { bytes: contents, at: HEADER_LEN }.plan()?;
    validate::check(&plan)?;
    Ok(plan)
}

/// A file of `found` bytes is as long as its beginning says.
pub fn check_len(beginning: &[u8], found: u64) -> Result<(), FormatError> {
    let rest = beginning.strip_prefix(MAGIC).and_then(|rest| rest.get(2..)).ok_or(FormatError::NotAPlan)?;
    let len = rest.first_chunk::<8>().ok_or(FormatError::NotAPlan)?;
    let expected = u64::from_le_bytes(*len).saturating_add((HEADER_LEN + CHECKSUM_LEN) as u64);
    if expected == found { Ok(()) } else { Err(FormatError::Length { expected, found }) }
}

/// So many bytes of a file's beginning say whose it is ([`job_of`]).
pub const BEGINNING_LEN: usize = 4_096;

/// Whose the plan is whose file begins with `beginning`: what the rest of the file is worth [`read`] says.
pub fn job_of(beginning: &[u8]) -> Result<Job, FormatError> {
    let version =
        beginning.strip_prefix(MAGIC).and_then(|rest| rest.first_chunk::<2>()).ok_or(FormatError::NotAPlan)?;
    let found = u16::from_le_bytes(*version);
    if found != VERSION {
        return Err(FormatError::Version { found });
    }
    let mut reader = Reader { bytes: beginning, at: HEADER_LEN };
    for _ in 0..7 {
        reader.number()?;
    }
    let solver_len = reader.bounded(BEGINNING_LEN as u64, "a solver's name is too long")? as usize;
    reader.at += solver_len;
    for _ in 0..2 {
        reader.number()?;
    }
    reader.job()
}

fn put(body: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        body.push(number as u8 | 0x80);
        number >>= 7;
    }
    body.push(number as u8);
}

/// Signed differences as unsigned numbers, small ones staying small.
fn put_difference(body: &mut Vec<u8>, from: u64, to: u64) {
    let difference = to.wrapping_sub(from) as i64;
    put(body, ((difference << 1) ^ (difference >> 63)) as u64);
}

fn put_lifetime(body: &mut Vec<u8>, lifetime: Lifetime, before: u64) {
    put_difference(body, before, lifetime.start.0);
    put(body, lifetime.ticks());
}

fn put_job(body: &mut Vec<u8>, job: &Job) {
    put(body, job.fingerprint.0);
    put(body, job.position.map_or(0, |position| u64::from(position.world_size())));
    if let Some(position) = job.position {
        put(body, u64::from(position.rank()));
    }
}

fn put_cut(body: &mut Vec<u8>, cut: Option<Cut>) {
    put(body, u64::from(cut.is_some()));
    if let Some(Cut { events, requests, live, .. }) = cut {
        for number in [events, requests, live.get()] {
            put(body, number);
        }
    }
}

fn put_lane(body: &mut Vec<u8>, lane: Lane) {
    put(body, lane.stream.0);
    put(body, u64::from(lane.role));
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn error(&self, what: &'static str) -> FormatError {
        FormatError::Body { at: self.at, what }
    }

    fn number(&mut self) -> Result<u64, FormatError> {
        let mut number = 0_u64;
        for shift in (0..).step_by(7) {
            let byte = *self.bytes.get(self.at).ok_or_else(|| self.error("the plan ends in the middle"))?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte holds one bit; a last byte of 0 means that a shorter form exists.
            if shift > 63 || (shift == 63 && bits > 1) || (shift > 0 && byte == 0) {
                return Err(self.error("a number is not in its shortest form"));
            }
            number |= bits << shift;
            self.at += 1;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        unreachable!("the loop ends at the tenth byte")
    }

    fn bounded(&mut self, max: u64, what: &'static str) -> Result<u64, FormatError> {
        let before = self.at;
        let number = self.number()?;
        if number > max { Err(FormatError::Body { at: before, what }) } else { Ok(number) }
    }

    fn bytes_number(&mut self) -> Result<Bytes, FormatError> {
        self.bounded(Bytes::MAX.get(), "a size is impossible").map(Bytes::new)
    }

    fn lifetime(&mut self, before: u64) -> Result<Lifetime, FormatError> {
        let zigzag = self.number()?;
        let difference = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
        let start = before.checked_add_signed(difference).ok_or_else(|| self.error("a tick is impossible"))?;
        let ticks = self.number()?;
        let end = start.checked_add(ticks).ok_or_else(|| self.error("a tick is impossible"))?;
        Ok(Lifetime { start: Tick(start), end: Tick(end) })
    }

    fn plan(mut self) -> Result<Plan, FormatError> {
        let pool_len = self.bytes_number()?;
        let count = self.bounded(limits::PLAN_ENTRIES_MAX as u64, "there are too many entries")? as usize;
        let cycle_start = self.bounded(count as u64, "the cycle begins behind the last entry")? as usize;
        let iteration = self.bounded(u64::from(u32::MAX), "an iteration is impossible")? as u32;
        let lower_bound = self.bytes_number()?;
        let dynamic_requests = self.number()?;
        let work_units = self.number()?;
        let name_len = self.bounded(limits::NAME_LEN_MAX as u64, "a name is too long")? as usize;
        let name =
            self.bytes.get(self.at..self.at + name_len).ok_or_else(|| self.error("the plan ends in the middle"))?;
        let solver = std::str::from_utf8(name).map_err(|_| self.error("a name is not UTF-8"))?.to_owned();
        self.at += name_len;
        let dynamic_count =
            self.bounded(limits::PLAN_ENTRIES_MAX as u64, "there are too many varying requests")? as usize;
        let dynamic_cycle_start =
            self.bounded(dynamic_count as u64, "the cycle begins behind the last varying request")? as usize;
        let job = self.job()?;
        let cut = self.cut(iteration)?;
        // An entry takes at least eight bytes: never reserve more than the file could fill.
        let mut entries = Vec::with_capacity(count.min(self.bytes.len() / 8));
        let mut before = 0;
        for _ in 0..count {
            let entry = self.entry(before)?;
            before = entry.lifetime.start.0;
            entries.push(entry);
        }
        // One of these takes at least five.
        let mut dynamic = Vec::with_capacity(dynamic_count.min(self.bytes.len() / 5));
        let (mut at, mut before) = (0, 0);
        for _ in 0..dynamic_count {
            let entry = self.dynamic_entry(at, before, count)?;
            at = entry.before;
            before = entry.interval.map_or(before, |interval| interval.start.0);
            dynamic.push(entry);
        }
        let detours = self.detours(count)?;
        if self.at != self.bytes.len() {
            return Err(self.error("something stands behind the last detour"));
        }
        let provenance = Provenance { iteration, solver, lower_bound, dynamic_requests, work_units, cut };
        Ok(Plan { pool_len, entries, cycle_start, dynamic, dynamic_cycle_start, detours, job, provenance })
    }

    fn cut(&mut self, iteration: u32) -> Result<Option<Cut>, FormatError> {
        Ok(match self.bounded(1, "neither a cut nor none")? {
            0 => None,
            _ => {
                let (events, requests) = (self.number()?, self.number()?);
                Some(Cut { iteration, events, requests, live: self.bytes_number()? })
            }
        })
    }

    fn lane(&mut self) -> Result<Lane, FormatError> {
        let stream = StreamId(self.number()?);
        let role = self.bounded(u64::from(u32::MAX), "a thread's role is impossible")? as u32;
        Ok(Lane { stream, role })
    }

    fn job(&mut self) -> Result<Job, FormatError> {
        let fingerprint = Fingerprint(self.number()?);
        let most = u64::from(limits::WORLD_SIZE_MAX);
        let position = match self.bounded(most, "a job of more processes than there can be")? as u32 {
            0 => None,
            world_size => {
                let rank = self.bounded(u64::from(world_size - 1), "a rank that the job does not have")? as u32;
                Position::new(rank, world_size)
            }
        };
        Ok(Job { fingerprint, position })
    }

    fn dynamic_entry(&mut self, at: u32, before: u64, entries: usize) -> Result<DynamicEntry, FormatError> {
        let left = (entries as u64).saturating_sub(u64::from(at));
        let comes_before = at + self.bounded(left, "a varying request comes behind the last entry")? as u32;
        let lane = self.lane()?;
        let context = ContextKey(self.number()?);
        let interval = match self.bounded(1, "neither one interval nor none")? {
            0 => None,
            _ => Some(self.lifetime(before)?),
        };
        Ok(DynamicEntry { before: comes_before, lane, context, interval })
    }

    fn detours(&mut self, entries: usize) -> Result<Vec<Detour>, FormatError> {
        let count = self.bounded(limits::PLAN_ENTRIES_MAX as u64, "there are too many detours")? as usize;
        // A detour takes at least five bytes, a request at least three.
        let mut detours = Vec::with_capacity(count.min(self.bytes.len() / 5));
        let mut at = 0;
        for _ in 0..count {
            let left = (entries as u64).saturating_sub(u64::from(at));
            let from = at + self.bounded(left, "a detour begins behind the last entry")? as u32;
            at = from;
            let to = self.bounded(entries as u64, "a detour ends behind the last entry")? as u32;
            let lane = self.lane()?;
            let len = self.bounded(limits::PLAN_ENTRIES_MAX as u64, "a detour is too long")? as usize;
            let mut requests = Vec::with_capacity(len.min(self.bytes.len() / 3));
            for _ in 0..len {
                requests.push(self.detour_request()?);
            }
            detours.push(Detour { lane, from, to, requests });
        }
        Ok(detours)
    }

    fn detour_request(&mut self) -> Result<DetourRequest, FormatError> {
        let bytes = self.bytes_number()?;
        let context = ContextKey(self.number()?);
        let unit = limits::ALLOCATION_ALIGNMENT.get();
        let offset = self.bounded(Bytes::MAX.get() / unit, "an offset is impossible")?;
        Ok(DetourRequest { bytes, context, offset: offset.checked_sub(1).map(|units| PlanOffset::new(units * unit)) })
    }

    fn entry(&mut self, before: u64) -> Result<Entry, FormatError> {
        let bytes = self.bytes_number()?;
        let unit = limits::ALLOCATION_ALIGNMENT.get();
        let offset = self.bounded(Bytes::MAX.get() / unit, "an offset is impossible")? * unit;
        let lane = self.lane()?;
        let context = ContextKey(self.number()?);
        let lifetime = self.lifetime(before)?;
        let again = match self.bounded(1, "neither one lifetime nor two")? {
            0 => None,
            _ => Some(self.lifetime(lifetime.start.0)?),
        };
        Ok(Entry { bytes, offset: PlanOffset::new(offset), lane, context, lifetime, again })
    }
}
