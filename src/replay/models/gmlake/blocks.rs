//! pBlocks and sBlocks, which of them are idle, and who shows what.
//!
//! An sBlock knows stretches of chunks, not pBlocks: these are split and merge under it. A chunk is known by where it was mapped first, which no split changes; between what was created at different
//! times there is a gap, so that neighbours are of one creation.
//!
//! Whether an sBlock is idle is found out when somebody asks: to keep count would be work for every sBlock that shows a pBlock whenever that is taken. One that is found busy waits at a pBlock that keeps it so.
//!
//! Invariants: chunks belong to one pBlock; a pBlock serves one allocation at a time, itself or through one sBlock; an sBlock that serves none is listed, or waits at an active pBlock that it shows.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::StreamId;
use crate::units::{Bytes, DeviceAddress};

/// A pBlock. Names are used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct PBlockId(u32);

/// An sBlock. Names are used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct SBlockId(u32);

/// What an allocation is served by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Member {
    P(PBlockId),
    S(SBlockId),
}

#[derive(Clone, Debug)]
struct PBlock {
    len: Bytes,
    stream: StreamId,
    address: DeviceAddress,
    /// Where its chunks were mapped first.
    start: u64,
    is_active: bool,
    /// sBlocks that show it and are busy at least as long as it is active.
    waiting: Vec<SBlockId>,
}

impl PBlock {
    fn end(&self) -> u64 {
        self.start + self.len.get()
    }
}

/// Chunks that follow each other.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    start: u64,
    end: u64,
    /// The pBlock that began there once; most still do, and need no search.
    first: PBlockId,
}

#[derive(Clone, Debug)]
struct SBlock {
    len: Bytes,
    stream: StreamId,
    address: DeviceAddress,
    stretches: Vec<Stretch>,
    used: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In the lists of those that may be idle.
    Listed,
    /// This active pBlock keeps it busy.
    Waiting(PBlockId),
    /// It serves an allocation with its first so many bytes.
    Active(Bytes),
    /// The same, and chunks that it did not use were given back under it: it goes when it is free.
    Doomed(Bytes),
}

/// All blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks {
    p: Vec<Option<PBlock>>,
    unused_p: Vec<PBlockId>,
    s: Vec<Option<SBlock>>,
    unused_s: Vec<SBlockId>,
    /// Bytes of addresses of all sBlocks: many show the same bytes.
    stitched: u128,
    /// pBlocks by their first chunk.
    by_start: BTreeMap<u64, PBlockId>,
    /// Idle pBlocks by stream, size and address.
    idle_p: BTreeSet<(StreamId, Bytes, DeviceAddress, PBlockId)>,
    /// sBlocks that may be idle, alike.
    listed: BTreeSet<(StreamId, Bytes, DeviceAddress, SBlockId)>,
    /// The same by when they were last used.
    by_use: BTreeSet<(u64, SBlockId)>,
    clock: u64,
    /// Idle neighbours become one.
    merges: bool,
}

/// What was given back.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Released {
    /// Sizes of pBlocks.
    pub(super) p: Vec<Bytes>,
    /// Sizes of sBlocks that showed them.
    pub(super) s: Vec<Bytes>,
}

impl Blocks {
    pub(super) fn new(merges: bool) -> Blocks {
        Blocks { merges, ..Blocks::default() }
    }

    fn p(&self, id: PBlockId) -> &PBlock {
        self.p[id.0 as usize].as_ref().expect("nobody keeps the name of a pBlock that is gone")
    }

    fn p_mut(&mut self, id: PBlockId) -> &mut PBlock {
        self.p[id.0 as usize].as_mut().expect("nobody keeps the name of a pBlock that is gone")
    }

    fn s(&self, id: SBlockId) -> &SBlock {
        self.s[id.0 as usize].as_ref().expect("nobody keeps the name of an sBlock that was freed")
    }

    fn s_mut(&mut self, id: SBlockId) -> &mut SBlock {
        self.s[id.0 as usize].as_mut().expect("nobody keeps the name of an sBlock that was freed")
    }

    pub(super) fn len_of(&self, id: PBlockId) -> Bytes {
        self.p(id).len
    }

    pub(super) fn stitched_len_of(&self, id: SBlockId) -> Bytes {
        self.s(id).len
    }

    pub(super) fn stitches(&self) -> usize {
        self.s.len() - self.unused_s.len()
    }

    pub(super) fn stitched(&self) -> u128 {
        self.stitched
    }

    pub(super) fn census(&self) -> (Vec<Bytes>, Vec<(Bytes, usize)>) {
        let p = self.by_start.values().map(|id| self.p(*id).len);
        let mut s: Vec<&SBlock> = self.s.iter().flatten().collect();
        s.sort_by_key(|block| block.address);
        let shown = |block: &SBlock| block.stretches.iter().flat_map(|stretch| self.within(*stretch)).count();
        (p.collect(), s.iter().map(|block| (block.len, shown(block))).collect())
    }

    /// The idle pBlock of at least this size that is the smallest, and of those the lowest.
    pub(super) fn smallest_p(&self, stream: StreamId, len: Bytes) -> Option<PBlockId> {
        let found = self.idle_p.range((stream, len, FIRST, PBlockId(0))..).next()?;
        Some(found.3).filter(|_| found.0 == stream)
    }

    /// The idle sBlock that is the smallest of those of at least `len` and at most `most`, and of those the lowest.
    pub(super) fn smallest_s(&mut self, stream: StreamId, len: Bytes, most: Bytes) -> Option<SBlockId> {
        loop {
            let (of, found, _, id) = *self.listed.range((stream, len, FIRST, SBlockId(0))..).next()?;
            if of != stream || found > most {
                return None;
            }
            if self.is_idle(id) {
                return Some(id);
            }
        }
    }

    /// Idle pBlocks of at least this size, from the largest down, of equal ones from the highest.
    pub(super) fn largest_first(&self, stream: StreamId, min: Bytes) -> impl Iterator<Item = PBlockId> + '_ {
        let last = (stream, Bytes::MAX, DeviceAddress::new(u64::MAX), PBlockId(u32::MAX));
        self.idle_p.range((stream, min, FIRST, PBlockId(0))..=last).rev().map(|(.., id)| *id)
    }

    /// A pBlock of new chunks. `address` is beyond all that were given before, and not next to them.
    pub(super) fn add_p(&mut self, stream: StreamId, len: Bytes, address: DeviceAddress) -> PBlockId {
        let start = address.get();
        self.insert_p(PBlock { len, stream, address, start, is_active: false, waiting: Vec::new() })
    }

    fn insert_p(&mut self, block: PBlock) -> PBlockId {
        let id = self.unused_p.pop().unwrap_or_else(|| {
            self.p.push(None);
            PBlockId(self.p.len() as u32 - 1)
        });
        self.by_start.insert(block.start, id);
        self.p[id.0 as usize] = Some(block);
        self.list_p(id);
        id
    }

    /// Takes an idle pBlock out of all lists.
    fn remove_p(&mut self, id: PBlockId) -> PBlock {
        self.unlist_p(id);
        let block = self.p[id.0 as usize].take().expect("it was just taken from a list");
        self.by_start.remove(&block.start);
        self.unused_p.push(id);
        block
    }

    /// An sBlock over idle pBlocks.
    pub(super) fn add_s(&mut self, stream: StreamId, parts: &[PBlockId], address: DeviceAddress) -> SBlockId {
        let mut stretches: Vec<Stretch> = Vec::with_capacity(parts.len());
        for id in parts {
            let (start, end) = (self.p(*id).start, self.p(*id).end());
            match stretches.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => stretches.push(Stretch { start, end, first: *id }),
            }
        }
        let len: Bytes = parts.iter().map(|part| self.p(*part).len).sum();
        self.clock += 1;
        let id = self.unused_s.pop().unwrap_or_else(|| {
            self.s.push(None);
            SBlockId(self.s.len() as u32 - 1)
        });
        self.s[id.0 as usize] =
            Some(SBlock { len, stream, address, stretches, used: self.clock, state: State::Listed });
        self.stitched += u128::from(len.get());
        self.list_s(id);
        id
    }

    /// Two pBlocks where an idle one was. The first keeps its name.
    pub(super) fn split(
        &mut self,
        id: PBlockId,
        len: Bytes,
        (first, second): (DeviceAddress, DeviceAddress),
    ) -> (PBlockId, PBlockId) {
        self.unlist_p(id);
        let block = self.p_mut(id);
        let rest = PBlock { len: block.len - len, address: second, start: block.start + len.get(), ..block.clone() };
        (block.len, block.address) = (len, first);
        self.list_p(id);
        (id, self.insert_p(rest))
    }

    /// The same where the pBlock is, without new addresses.
    pub(super) fn split_in_place(&mut self, id: PBlockId, len: Bytes) -> (PBlockId, PBlockId) {
        let address = self.p(id).address;
        self.split(id, len, (address, DeviceAddress::new(address.get() + len.get())))
    }

    /// The pBlock that a chunk belongs to, unless it was given back.
    fn of_chunk(&self, chunk: u64) -> Option<PBlockId> {
        let (_, id) = self.by_start.range(..=chunk).next_back()?;
        Some(*id).filter(|id| chunk < self.p(*id).end())
    }

    /// pBlocks that have chunks of a stretch: none, if they were given back.
    fn within(&self, Stretch { start, end, first }: Stretch) -> impl Iterator<Item = PBlockId> + '_ {
        let is_there = self.p[first.0 as usize].as_ref().is_some_and(|block| block.start == start);
        let first = if is_there { Some(first) } else { self.of_chunk(start) };
        let behind = move |id: &PBlockId| {
            let at = self.p(*id).end();
            if at < end { self.by_start.get(&at).copied() } else { None }
        };
        std::iter::successors(first, behind)
    }

    /// Puts a border between pBlocks there.
    fn cut(&mut self, chunk: u64) {
        let Some(id) = self.of_chunk(chunk) else { return };
        let front = chunk - self.p(id).start;
        if front > 0 {
            self.split_in_place(id, Bytes::new(front));
        }
    }

    /// Whether nobody uses a chunk of it. One that is busy waits until it may be idle.
    fn is_idle(&mut self, id: SBlockId) -> bool {
        let shown = |stretch: &Stretch| self.within(*stretch).find(|part| self.p(*part).is_active);
        let Some(keeper) = self.s(id).stretches.iter().find_map(shown) else { return true };
        self.unlist_s(id);
        self.s_mut(id).state = State::Waiting(keeper);
        self.p_mut(keeper).waiting.push(id);
        false
    }

    /// An allocation of `len` bytes is served by it: all of a pBlock, or the first bytes of an idle sBlock, whose pBlocks end there then.
    pub(super) fn take(&mut self, member: Member, len: Bytes) -> DeviceAddress {
        self.clock += 1;
        match member {
            Member::P(id) => {
                self.activate(id);
                self.p(id).address
            }
            Member::S(id) => {
                self.unlist_s(id);
                for stretch in first_bytes(&self.s(id).stretches, len) {
                    // Most are one pBlock still, and are not cut.
                    let fits = |id| (self.p(id).start, self.p(id).end()) == (stretch.start, stretch.end);
                    if !self.within(stretch).next().is_some_and(fits) {
                        self.cut(stretch.start);
                        self.cut(stretch.end);
                    }
                    let parts: Vec<PBlockId> = self.within(stretch).collect();
                    parts.into_iter().for_each(|part| self.activate(part));
                }
                let used = self.clock;
                let block = self.s_mut(id);
                (block.used, block.state) = (used, State::Active(len));
                block.address
            }
        }
    }

    /// The allocation is over. Says how long an sBlock was that goes with it.
    pub(super) fn give_back(&mut self, member: Member) -> Option<Bytes> {
        let id = match member {
            Member::P(id) => {
                self.deactivate(id);
                return None;
            }
            Member::S(id) => id,
        };
        let state = self.s(id).state;
        let (State::Active(len) | State::Doomed(len)) = state else { return None };
        for stretch in first_bytes(&self.s(id).stretches, len) {
            // Those that merge with their neighbours are idle: the others keep their names.
            let parts: Vec<PBlockId> = self.within(stretch).collect();
            parts.into_iter().for_each(|part| self.deactivate(part));
        }
        self.list_s(id);
        matches!(state, State::Doomed(_)).then(|| self.remove_s(id))
    }

    fn activate(&mut self, id: PBlockId) {
        self.unlist_p(id);
        self.p_mut(id).is_active = true;
    }

    fn deactivate(&mut self, id: PBlockId) {
        let block = self.p_mut(id);
        block.is_active = false;
        for waiting in std::mem::take(&mut block.waiting) {
            self.list_s(waiting);
        }
        if self.merges {
            self.merge_around(id);
        }
        self.list_p(id);
    }

    /// Makes a pBlock that is in no list one with its idle neighbours.
    fn merge_around(&mut self, id: PBlockId) {
        let (start, end) = (self.p(id).start, self.p(id).end());
        if let Some(next) = self.by_start.get(&end).copied().filter(|next| !self.p(*next).is_active) {
            let next = self.remove_p(next);
            self.p_mut(id).len += next.len;
        }
        let before = self.by_start.range(..start).next_back().map(|(_, id)| *id);
        if let Some(prev) = before.filter(|prev| !self.p(*prev).is_active && self.p(*prev).end() == start) {
            let prev = self.remove_p(prev);
            self.by_start.remove(&start);
            self.by_start.insert(prev.start, id);
            let block = self.p_mut(id);
            (block.start, block.address) = (prev.start, prev.address);
            block.len += prev.len;
        }
    }

    /// Drops the idle sBlock that was used longest ago, but not `kept`; says how long it was.
    pub(super) fn free_least_recent(&mut self, kept: SBlockId) -> Option<Bytes> {
        loop {
            let (_, id) = *self.by_use.iter().find(|(_, id)| *id != kept)?;
            if self.is_idle(id) {
                return Some(self.remove_s(id));
            }
        }
    }

    /// Drops all sBlocks that serve no allocation, those included whose chunks others use, but not `kept`; says how long they were.
    pub(super) fn free_unused(&mut self, kept: SBlockId) -> Vec<Bytes> {
        let is_unused = |block: &SBlock| matches!(block.state, State::Listed | State::Waiting(_));
        let unused: Vec<SBlockId> = self.all_s().filter(|id| *id != kept && is_unused(self.s(*id))).collect();
        unused.into_iter().map(|id| self.remove_s(id)).collect()
    }

    /// Drops all idle pBlocks that are as they were created, and the sBlocks that show them.
    pub(super) fn release(&mut self) -> Released {
        let is_whole = |id: &PBlockId| {
            let block = self.p(*id);
            let before = self.by_start.range(..block.start).next_back();
            !self.by_start.contains_key(&block.end()) && before.is_none_or(|(_, id)| self.p(*id).end() != block.start)
        };
        let whole: Vec<PBlockId> = self.idle_p.iter().map(|(.., id)| *id).filter(is_whole).collect();
        let mut released = Released::default();
        released.p.extend(whole.into_iter().map(|id| self.remove_p(id).len));
        if released.p.is_empty() {
            return released;
        }
        // What is given back is all of one creation, and so all of a stretch.
        let has_lost = |id: &SBlockId| self.s(*id).stretches.iter().any(|lost| self.within(*lost).next().is_none());
        let losers: Vec<SBlockId> = self.all_s().filter(has_lost).collect();
        for id in losers {
            let block = self.s_mut(id);
            if let State::Active(len) = block.state {
                block.stretches = first_bytes(&block.stretches, len);
                block.state = State::Doomed(len);
            } else {
                released.s.push(self.remove_s(id));
            }
        }
        released
    }

    fn all_s(&self) -> impl Iterator<Item = SBlockId> + '_ {
        let names = self.s.iter().enumerate();
        names.filter(|(_, block)| block.is_some()).map(|(at, _)| SBlockId(at as u32))
    }

    /// Drops an sBlock that serves no allocation; says how long it was.
    fn remove_s(&mut self, id: SBlockId) -> Bytes {
        match self.s(id).state {
            State::Waiting(keeper) => self.p_mut(keeper).waiting.retain(|waiting| *waiting != id),
            _ => self.unlist_s(id),
        }
        let freed = self.s[id.0 as usize].take().expect("its state was just read");
        self.unused_s.push(id);
        self.stitched -= u128::from(freed.len.get());
        freed.len
    }

    fn list_p(&mut self, id: PBlockId) {
        let PBlock { stream, len, address, .. } = *self.p(id);
        self.idle_p.insert((stream, len, address, id));
    }

    fn unlist_p(&mut self, id: PBlockId) {
        let PBlock { stream, len, address, .. } = *self.p(id);
        self.idle_p.remove(&(stream, len, address, id));
    }

    fn list_s(&mut self, id: SBlockId) {
        let block = self.s_mut(id);
        block.state = State::Listed;
        let SBlock { stream, len, address, used, .. } = *block;
        self.by_use.insert((used, id));
        self.listed.insert((stream, len, address, id));
    }

    fn unlist_s(&mut self, id: SBlockId) {
        let SBlock { stream, len, address, used, .. } = *self.s(id);
        self.by_use.remove(&(used, id));
        self.listed.remove(&(stream, len, address, id));
    }

    /// How many blocks of both kinds there is room for.
    #[cfg(test)]
    pub(super) fn names(&self) -> usize {
        self.p.len() + self.s.len()
    }

    /// Says what is wrong; nothing, unless there is a bug.
    #[cfg(test)]
    pub(super) fn invariants(&self) -> Result<(), String> {
        let stitched: u128 = self.s.iter().flatten().map(|block| u128::from(block.len.get())).sum();
        if stitched != self.stitched {
            return Err(format!("{stitched} bytes are stitched, and {} are counted", self.stitched));
        }
        for id in self.all_s() {
            let block = self.s(id);
            let shown: u64 = block.stretches.iter().map(|stretch| stretch.end - stretch.start).sum();
            let parts: Vec<PBlockId> = block.stretches.iter().flat_map(|stretch| self.within(*stretch)).collect();
            let is_listed = self.listed.contains(&(block.stream, block.len, block.address, id));
            let is_right = match block.state {
                State::Listed => shown == block.len.get(),
                State::Waiting(keeper) => {
                    self.p(keeper).is_active && self.p(keeper).waiting.contains(&id) && parts.contains(&keeper)
                }
                State::Active(len) => {
                    let used = first_bytes(&block.stretches, len);
                    used.iter().all(|stretch| self.within(*stretch).all(|part| self.p(part).is_active))
                }
                State::Doomed(len) => shown == len.get() && parts.iter().all(|part| self.p(*part).is_active),
            };
            if !is_right || is_listed != (block.state == State::Listed) {
                return Err(format!("{block:?} with {parts:?} is listed: {is_listed}"));
            }
        }
        let mut before: Option<&PBlock> = None;
        for (start, id) in &self.by_start {
            let block = self.p(*id);
            let is_listed = self.idle_p.contains(&(block.stream, block.len, block.address, *id));
            if *start != block.start || is_listed == block.is_active || (is_listed && !block.waiting.is_empty()) {
                return Err(format!("{block:?} is listed: {is_listed}"));
            }
            if let Some(before) = before
                && (before.end() > block.start
                    || (self.merges && before.end() == block.start && !before.is_active && !block.is_active))
            {
                return Err(format!("{before:?} stands before {block:?}"));
            }
            before = Some(block);
        }
        let lost = self.p.len() - self.unused_p.len() - self.by_start.len();
        if lost != 0 { Err(format!("{lost} pBlocks stand nowhere")) } else { Ok(()) }
    }
}

/// Where searches begin.
const FIRST: DeviceAddress = DeviceAddress::new(0);

/// The first `len` bytes of all stretches.
fn first_bytes(stretches: &[Stretch], len: Bytes) -> Vec<Stretch> {
    let mut left = len.get();
    let mut first = Vec::with_capacity(stretches.len());
    for stretch in stretches {
        if left == 0 {
            break;
        }
        let taken = left.min(stretch.end - stretch.start);
        first.push(Stretch { end: stretch.start + taken, ..*stretch });
        left -= taken;
    }
    first
}
