//! pBlocks and sBlocks, which of them are idle, and who shows whom.
//!
//! Where neighbours merge, two idle pBlocks that were one before they were split are one again, unless an sBlock shows one of them.
//!
//! Invariants: chunks belong to one pBlock; a pBlock serves one allocation at a time, itself or through one sBlock; an sBlock is idle when all its pBlocks are.

use std::collections::BTreeSet;

use crate::ids::StreamId;
use crate::units::{Bytes, DeviceAddress};

/// A pBlock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct PBlockId(u32);

/// An sBlock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct SBlockId(u32);

/// What an allocation is served by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Member {
    P(PBlockId),
    S(SBlockId),
}

#[derive(Clone, Debug)]
struct PBlock {
    len: Bytes,
    stream: StreamId,
    address: DeviceAddress,
    is_active: bool,
    /// sBlocks that show it.
    shown_by: Vec<SBlockId>,
    /// What was split off before and behind it.
    prev: Option<PBlockId>,
    next: Option<PBlockId>,
}

impl PBlock {
    /// It is idle, and nobody shows it.
    fn may_merge(&self) -> bool {
        !self.is_active && self.shown_by.is_empty()
    }
}

#[derive(Clone, Debug)]
struct SBlock {
    len: Bytes,
    stream: StreamId,
    address: DeviceAddress,
    parts: Vec<PBlockId>,
    /// How many of them are active.
    active: usize,
    used: u64,
}

/// All blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks {
    /// Those that were split leave a hole.
    p: Vec<Option<PBlock>>,
    /// Those that were freed leave a hole.
    s: Vec<Option<SBlock>>,
    stitches: usize,
    /// Bytes of addresses of all sBlocks: many show the same bytes.
    stitched: u128,
    /// Idle blocks by stream and size.
    idle: BTreeSet<(StreamId, Bytes, Member)>,
    /// Idle pBlocks alone.
    idle_p: BTreeSet<(StreamId, Bytes, PBlockId)>,
    /// Idle sBlocks by when they were last used.
    idle_s: BTreeSet<(u64, SBlockId)>,
    clock: u64,
    /// Idle neighbours become one.
    merges: bool,
}

impl Blocks {
    pub(super) fn new(merges: bool) -> Blocks {
        Blocks { merges, ..Blocks::default() }
    }

    fn p(&self, id: PBlockId) -> &PBlock {
        self.p[id.0 as usize].as_ref().expect("nobody keeps the name of a pBlock that was split")
    }

    fn p_mut(&mut self, id: PBlockId) -> &mut PBlock {
        self.p[id.0 as usize].as_mut().expect("nobody keeps the name of a pBlock that was split")
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

    pub(super) fn address_of(&self, id: PBlockId) -> DeviceAddress {
        self.p(id).address
    }

    pub(super) fn stitches(&self) -> usize {
        self.stitches
    }

    pub(super) fn stitched(&self) -> u128 {
        self.stitched
    }

    pub(super) fn census(&self) -> (Vec<Bytes>, Vec<(Bytes, usize)>) {
        let p = self.p.iter().flatten().map(|block| block.len);
        let s = self.s.iter().flatten().map(|block| (block.len, block.parts.len()));
        (p.collect(), s.collect())
    }

    /// An idle block of exactly this size.
    pub(super) fn exact(&self, stream: StreamId, len: Bytes) -> Option<Member> {
        let first = (stream, len, Member::P(PBlockId(0)));
        let found = self.idle.range(first..).next()?;
        Some(found.2).filter(|_| (found.0, found.1) == (stream, len))
    }

    /// The smallest idle pBlock that is larger, and large enough to be split.
    pub(super) fn best_fit(&self, stream: StreamId, len: Bytes, frag_limit: Bytes) -> Option<PBlockId> {
        let from = (stream, len.max(frag_limit), PBlockId(0));
        let found = self.idle_p.range(from..).find(|(_, found, _)| *found > len)?;
        Some(found.2).filter(|_| found.0 == stream)
    }

    /// Idle pBlocks that may be stitched.
    pub(super) fn largest_first(&self, stream: StreamId, frag_limit: Bytes) -> impl Iterator<Item = PBlockId> + '_ {
        let of_stream = self.idle_p.range((stream, frag_limit, PBlockId(0))..=(stream, Bytes::MAX, PBlockId(u32::MAX)));
        of_stream.rev().map(|(.., id)| *id)
    }

    pub(super) fn add_p(&mut self, stream: StreamId, len: Bytes, address: DeviceAddress) -> PBlockId {
        let id = PBlockId(self.p.len() as u32);
        let (prev, next) = (None, None);
        self.p.push(Some(PBlock { len, stream, address, is_active: false, shown_by: Vec::new(), prev, next }));
        self.list_p(id);
        id
    }

    /// An sBlock over idle pBlocks, or over some of which the first is about to be used.
    pub(super) fn add_s(&mut self, stream: StreamId, parts: &[PBlockId], address: DeviceAddress) -> SBlockId {
        let id = SBlockId(self.s.len() as u32);
        let len: Bytes = parts.iter().map(|part| self.p(*part).len).sum();
        let active = parts.iter().filter(|part| self.p(**part).is_active).count();
        self.clock += 1;
        self.s.push(Some(SBlock { len, stream, address, parts: parts.to_vec(), active, used: self.clock }));
        self.stitches += 1;
        self.stitched += u128::from(len.get());
        for part in parts {
            self.p_mut(*part).shown_by.push(id);
        }
        if active == 0 {
            self.list_s(id);
        }
        id
    }

    /// Two pBlocks where an idle one was. Whoever showed it shows both.
    pub(super) fn split(
        &mut self,
        id: PBlockId,
        len: Bytes,
        (first, second): (DeviceAddress, DeviceAddress),
    ) -> (PBlockId, PBlockId) {
        self.unlist_p(id);
        let whole = self.p[id.0 as usize].take().expect("it was just taken from a list");
        let front = self.add_p(whole.stream, len, first);
        let rest = self.add_p(whole.stream, whole.len - len, second);
        for shown_by in &whole.shown_by {
            let parts = &mut self.s_mut(*shown_by).parts;
            let at = parts.iter().position(|part| *part == id).expect("both sides know of it");
            parts.splice(at..=at, [front, rest]);
        }
        self.link(whole.prev, Some(front));
        self.link(Some(front), Some(rest));
        self.link(Some(rest), whole.next);
        self.p_mut(front).shown_by.clone_from(&whole.shown_by);
        self.p_mut(rest).shown_by = whole.shown_by;
        (front, rest)
    }

    fn link(&mut self, prev: Option<PBlockId>, next: Option<PBlockId>) {
        if let Some(prev) = prev {
            self.p_mut(prev).next = next;
        }
        if let Some(next) = next {
            self.p_mut(next).prev = prev;
        }
    }

    /// Makes an idle pBlock one with the idle neighbour behind it, if nobody shows either. Says whether it did.
    fn merge(&mut self, front: PBlockId, rest: PBlockId) -> bool {
        if !self.merges || !self.p(front).may_merge() || !self.p(rest).may_merge() {
            return false;
        }
        self.unlist_p(front);
        self.unlist_p(rest);
        let taken = self.p[rest.0 as usize].take().expect("it was just taken from a list");
        self.p_mut(front).len += taken.len;
        self.link(Some(front), taken.next);
        self.list_p(front);
        true
    }

    /// The same with all its neighbours: of those before and behind several may have become free at once.
    fn merge_around(&mut self, id: PBlockId) {
        let mut first = id;
        while let Some(prev) = self.p(first).prev
            && self.merge(prev, first)
        {
            first = prev;
        }
        while let Some(next) = self.p(first).next
            && self.merge(first, next)
        {}
    }

    /// An allocation is served by it.
    pub(super) fn take(&mut self, member: Member) -> DeviceAddress {
        self.clock += 1;
        match member {
            Member::P(id) => {
                self.activate(id);
                self.p(id).address
            }
            Member::S(id) => {
                let used = self.clock;
                for part in self.s(id).parts.clone() {
                    self.activate(part);
                }
                let block = self.s_mut(id);
                block.used = used;
                block.address
            }
        }
    }

    /// The allocation is over.
    pub(super) fn give_back(&mut self, member: Member) {
        match member {
            Member::P(id) => self.deactivate(id),
            Member::S(id) => {
                for part in self.s(id).parts.clone() {
                    self.deactivate(part);
                }
            }
        }
    }

    fn activate(&mut self, id: PBlockId) {
        self.unlist_p(id);
        self.p_mut(id).is_active = true;
        let showing = std::mem::take(&mut self.p_mut(id).shown_by);
        for shown_by in &showing {
            if self.s(*shown_by).active == 0 {
                self.unlist_s(*shown_by);
            }
            self.s_mut(*shown_by).active += 1;
        }
        self.p_mut(id).shown_by = showing;
    }

    fn deactivate(&mut self, id: PBlockId) {
        self.p_mut(id).is_active = false;
        self.list_p(id);
        let showing = std::mem::take(&mut self.p_mut(id).shown_by);
        for shown_by in &showing {
            self.s_mut(*shown_by).active -= 1;
            if self.s(*shown_by).active == 0 {
                self.list_s(*shown_by);
            }
        }
        self.p_mut(id).shown_by = showing;
        self.merge_around(id);
    }

    /// Drops the idle sBlock that was used longest ago, but not `kept`; says how long it was.
    pub(super) fn free_least_recent(&mut self, kept: SBlockId) -> Option<Bytes> {
        let (_, id) = *self.idle_s.iter().find(|(_, id)| *id != kept)?;
        self.unlist_s(id);
        let freed = self.s[id.0 as usize].take().expect("it was just taken from a list");
        self.stitches -= 1;
        self.stitched -= u128::from(freed.len.get());
        for part in &freed.parts {
            self.p_mut(*part).shown_by.retain(|shown_by| *shown_by != id);
        }
        for part in freed.parts {
            // One of them may be a part of its neighbour by now.
            if self.p[part.0 as usize].is_some() {
                self.merge_around(part);
            }
        }
        Some(freed.len)
    }

    fn list_p(&mut self, id: PBlockId) {
        let (stream, len) = (self.p(id).stream, self.p(id).len);
        self.idle_p.insert((stream, len, id));
        self.idle.insert((stream, len, Member::P(id)));
    }

    fn unlist_p(&mut self, id: PBlockId) {
        let (stream, len) = (self.p(id).stream, self.p(id).len);
        self.idle_p.remove(&(stream, len, id));
        self.idle.remove(&(stream, len, Member::P(id)));
    }

    fn list_s(&mut self, id: SBlockId) {
        let (stream, len, used) = (self.s(id).stream, self.s(id).len, self.s(id).used);
        self.idle_s.insert((used, id));
        self.idle.insert((stream, len, Member::S(id)));
    }

    fn unlist_s(&mut self, id: SBlockId) {
        let (stream, len, used) = (self.s(id).stream, self.s(id).len, self.s(id).used);
        self.idle_s.remove(&(used, id));
        self.idle.remove(&(stream, len, Member::S(id)));
    }

    /// Says what is wrong; nothing, unless there is a bug.
    #[cfg(test)]
    pub(super) fn invariants(&self) -> Result<(), String> {
        let stitched: u128 = self.s.iter().flatten().map(|block| u128::from(block.len.get())).sum();
        if stitched != self.stitched {
            return Err(format!("{stitched} bytes are stitched, and {} are counted", self.stitched));
        }
        for (at, block) in self.s.iter().enumerate() {
            let Some(block) = block else { continue };
            let id = SBlockId(at as u32);
            let parts: Bytes = block.parts.iter().map(|part| self.p(*part).len).sum();
            let active = block.parts.iter().filter(|part| self.p(**part).is_active).count();
            let is_listed = self.idle.contains(&(block.stream, block.len, Member::S(id)));
            if parts != block.len || active != block.active || is_listed != (active == 0) {
                return Err(format!("{block:?}: {parts} in its parts, {active} of them active, listed: {is_listed}"));
            }
        }
        for (at, block) in self.p.iter().enumerate() {
            let Some(block) = block else { continue };
            let id = PBlockId(at as u32);
            let is_listed = self.idle_p.contains(&(block.stream, block.len, id));
            if is_listed == block.is_active {
                return Err(format!("{block:?} is listed: {is_listed}"));
            }
            let Some(next) = block.next.map(|next| self.p(next)) else { continue };
            if next.prev != Some(id) || (self.merges && block.may_merge() && next.may_merge()) {
                return Err(format!("{block:?} stands before {next:?}"));
            }
        }
        Ok(())
    }
}
