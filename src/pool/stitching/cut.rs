//! Serving without the driver: splitting a larger block, joining idle neighbours.

use std::ops::Bound;

use super::blocks::{BlockId, PBlock, PBlockId, Place, SBlock, SBlockId, Seat};
use super::{StitchingPool, tape};
use crate::ids::StreamId;
use crate::units::{Bytes, Place as _};

/// Parts of SBlocks in place above which some of those are forgotten: a cut goes through the parts of all that show it, and sizes that are never asked for again would make that a walk over
/// the square of their number.
pub(super) const SHOWN_PARTS_MAX: usize = 1 << 16;

impl StitchingPool {
    /// S2, and the same over several idle neighbours: an idle block of exactly `len`.
    #[cold]
    pub(super) fn cut(&mut self, len: Bytes, stream: StreamId) -> Option<BlockId> {
        self.forget_surplus();
        if let Some(larger) = self.find_larger(len, stream) {
            self.split_and_remember(larger, len);
            self.counts.split += 1;
            return Some(BlockId::P(larger));
        }
        let run = self.find_run(len, stream)?;
        self.counts.joined += 1;
        Some(self.join(run, len))
    }

    /// The smallest larger PBlock that is idle.
    fn find_larger(&mut self, len: Bytes, stream: StreamId) -> Option<PBlockId> {
        let mut smaller = len;
        loop {
            let larger = (Bound::Excluded(smaller), Bound::Unbounded);
            let (of, class) = self.class_of.range(larger).next().map(|(of, class)| (*of, *class as usize))?;
            let is_usable = |pool: &StitchingPool, block| matches!(block, BlockId::P(id) if pool.is_usable(id, stream));
            if let Some(BlockId::P(id)) = self.oldest_idle(class, usize::MAX, is_usable) {
                return Some(id);
            }
            smaller = of;
        }
    }

    /// Splits a block in place and remembers the whole as an SBlock of the same age, S2's extra stitch.
    fn split_and_remember(&mut self, block: PBlockId, len: Bytes) {
        let birth = self.pblock(block).birth;
        let rest = self.split(block, len);
        self.insert_sblock(vec![block, rest], Place::InRange, birth);
    }

    /// Cuts an idle PBlock after `len` bytes, a multiple of the granule; it keeps the front, and the answer is the rest. Both are new, as far as their age goes.
    /// Addresses stay, so SBlocks over it stay right once they list both.
    pub(super) fn split(&mut self, id: PBlockId, len: Bytes) -> PBlockId {
        let (front_birth, rest_birth) = (self.next_birth(), self.next_birth());
        let block = self.pblock(id);
        assert!(!self.is_busy(id) && len < block.len && !len.is_zero(), "only a larger idle block is split");
        let cut = block.slots.start + (len.get() >> self.granule_shift) as u32;
        let rest = PBlock {
            range: block.range,
            slots: cut..block.slots.end,
            address: block.address.checked_add(len).expect("the cut lies in the block"),
            len: block.len - len,
            seat: Seat::Ready,
            stream: block.stream,
            sblocks: block.sblocks.clone(),
            class: 0,
            birth: rest_birth,
            card: 0,
            before: Some(id),
            after: block.after,
        };
        let (after, sblocks) = (rest.after, rest.sblocks.clone());
        let idle_since = self.card(BlockId::P(id)).idle_since;
        self.resize(id, len, cut, front_birth);
        let rest = self.insert_pblock(rest, idle_since);
        self.pblock_mut(id).after = Some(rest);
        self.note_owner(rest);
        if let Some(after) = after {
            self.pblock_mut(after).before = Some(rest);
        }
        for of in sblocks {
            let parts = &mut self.sblock_mut(of).parts;
            let at = parts.iter().position(|part| *part == id).expect("a part is listed by its SBlock");
            parts.insert(at + 1, rest);
            self.shown_parts += usize::from(self.sblocks[of].place.is_in_range());
            self.cards.get_mut(self.sblocks[of].card).parts.insert(rest);
        }
        rest
    }

    /// Gives an idle PBlock another length, and so another class.
    fn resize(&mut self, id: PBlockId, len: Bytes, slots_end: u32, birth: u64) {
        self.unlist(BlockId::P(id));
        // Its card is another block's now.
        self.tape.forget();
        let class = self.class_or_new(len);
        let block = self.pblock_mut(id);
        block.len = len;
        block.slots.end = slots_end;
        block.class = class;
        block.birth = birth;
        let granules = (len.get() >> self.granule_shift) as u32;
        let card = self.cards.get_mut(self.pblocks[id].card);
        (card.mark, card.granules) = (tape::mark(birth), granules);
        self.list(BlockId::P(id));
    }

    /// The shortest run of idle neighbours that holds `len` bytes.
    fn find_run(&self, len: Bytes, stream: StreamId) -> Option<Vec<PBlockId>> {
        // A device full of live blocks is not walked over for each request.
        if self.idle_bytes() < len {
            return None;
        }
        let mut best: Option<(Bytes, Vec<PBlockId>)> = None;
        for (_, range) in &self.ranges {
            if range.mapping.span().len() < len {
                continue;
            }
            let mut run: Vec<PBlockId> = Vec::new();
            let mut run_len = Bytes::ZERO;
            // One more step than there are blocks, to look at the last run.
            for block in self.blocks_of(range).map(Some).chain([None]) {
                let idle = block.filter(|id| self.is_idle_for(*id, stream));
                let goes_on =
                    idle.is_some_and(|id| run.last().is_none_or(|last| self.end_of(*last) == self.pblock(id).address));
                if !goes_on {
                    if run_len >= len && best.as_ref().is_none_or(|(best, _)| run_len < *best) {
                        best = Some((run_len, std::mem::take(&mut run)));
                    }
                    run.clear();
                    run_len = Bytes::ZERO;
                }
                // A block that ends one run may begin the next.
                if let Some(id) = idle {
                    run.push(id);
                    run_len += self.pblock(id).len;
                }
            }
        }
        best.map(|(_, run)| run)
    }

    /// Makes one block of `len` bytes of the front of a run of idle neighbours: an SBlock in place, so that its parts stay what other SBlocks know.
    fn join(&mut self, mut run: Vec<PBlockId>, len: Bytes) -> BlockId {
        let mut sum = Bytes::ZERO;
        let count = run.iter().take_while(|block| {
            let is_needed = sum < len;
            sum += if is_needed { self.pblock(**block).len } else { Bytes::ZERO };
            is_needed
        });
        let count = count.count();
        run.truncate(count);
        if sum > len {
            let last = *run.last().expect("a run is not empty");
            let keep = self.pblock(last).len - (sum - len);
            self.split(last, keep);
        }
        let birth = self.next_birth();
        BlockId::S(self.insert_sblock(run, Place::InRange, birth))
    }

    /// Forgets SBlocks in place above what may be remembered, a quarter of them at a time, the least recently used first; cuts that nobody remembers any more
    /// heal.
    fn forget_surplus(&mut self) {
        if self.sblocks.len() < self.config.remembered_max && self.shown_parts < SHOWN_PARTS_MAX {
            return;
        }
        let idle = self.least_recently_used(|block| block.place.is_in_range());
        let count = self.sblocks.len().min(self.config.remembered_max).div_ceil(4);
        for oldest in idle.into_iter().take(count) {
            let parts = self.remove_sblock(oldest);
            self.heal(parts);
        }
    }

    /// SBlocks of one kind that serve nobody, the least recently used first: by when they last became idle, or were made.
    pub(super) fn least_recently_used(&self, is_of_kind: impl Fn(&SBlock) -> bool) -> Vec<SBlockId> {
        let of_kind = self.sblocks.iter().filter(|(id, block)| is_of_kind(block) && !self.is_serving(BlockId::S(*id)));
        let used = |block: &SBlock| block.made.max(self.cards.get(block.card).idle_since);
        let mut idle: Vec<(u64, SBlockId)> = of_kind.map(|(id, block)| (used(block), id)).collect();
        idle.sort_unstable();
        idle.into_iter().map(|(_, id)| id).collect()
    }

    /// Merges those of `parts` that are idle neighbours in one range and that every SBlock shows side by side or not at all.
    pub(super) fn heal(&mut self, parts: Vec<PBlockId>) {
        let mut front: Option<PBlockId> = None;
        for part in parts {
            let merges = front.is_some_and(|front| self.can_merge(front, part));
            match front {
                Some(front) if merges => self.merge(front, part),
                _ => front = Some(part),
            }
        }
    }

    fn can_merge(&self, front: PBlockId, rest: PBlockId) -> bool {
        let (a, b) = (self.pblock(front), self.pblock(rest));
        let both_idle = !self.is_busy(front) && !self.is_busy(rest);
        let neighbours = a.after == Some(rest) && self.end_of(front) == b.address;
        // Whoever used one of them last must not matter for the other.
        let same_past = a.stream == b.stream || self.has_passed(front) && self.has_passed(rest);
        // An SBlock at addresses of its own may show them in another order, or with others in between.
        let is_whole_in = |of: &SBlockId| self.sblock(*of).parts.windows(2).any(|pair| pair == [front, rest]);
        both_idle && neighbours && same_past && a.sblocks == b.sblocks && a.sblocks.iter().all(is_whole_in)
    }

    fn merge(&mut self, front: PBlockId, rest: PBlockId) {
        self.unlist(BlockId::P(rest));
        let gone = self.pblocks.remove(rest);
        let of_gone = self.discard(gone.card);
        for of in gone.sblocks {
            self.sblock_mut(of).parts.retain(|part| *part != rest);
            self.shown_parts -= usize::from(self.sblocks[of].place.is_in_range());
            self.cards.get_mut(self.sblocks[of].card).parts.remove(rest);
        }
        let block = &mut self.pblocks[front];
        block.after = gone.after;
        let card = self.cards.get_mut(block.card);
        if of_gone.idle_since > card.idle_since {
            card.idle_since = of_gone.idle_since;
            block.stream = gone.stream;
        }
        let (len, birth) = (block.len + gone.len, block.birth.min(gone.birth));
        if let Some(after) = gone.after {
            self.pblock_mut(after).before = Some(front);
        }
        self.resize(front, len, gone.slots.end, birth);
        self.note_owner(front);
    }
}
