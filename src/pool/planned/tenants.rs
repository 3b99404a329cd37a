//! What is in the way inside the planned pool: allocations that the plan's own order says nothing about,
//! and parts that are not the pool's now: they are *lent* to the page pool, or have no memory.
//!
//! They are one list in the order of addresses. Each slot of 64 KiB knows the first of those that begin in it, and a tree of bits says which slots have one: so the neighbours of an address are a look at
//! the bits and a few steps along the list, as many as begin in one slot.

use super::bits::Bits;
use super::starts::Starts;
use crate::limits;
use crate::units::{Bytes, PlanOffset, PlanSpan, Span};

/// Bytes in one cell: as the smallest chunk.
pub(super) const CELL: u64 = 2 << 20;

/// What stands for the bytes of a part that is lent: no request is so large.
pub(super) const LENT: Bytes = Bytes::MAX;

/// Bytes in one slot.
const SLOT: u64 = 64 << 10;

#[derive(Clone, Copy, Debug)]
struct Tenant {
    start: u64,
    end: u64,
    /// What was asked for, or [`LENT`] where a part of the pool is lent to somebody elsewhere.
    bytes: Bytes,
    /// Its neighbours in the list.
    before: u32,
    after: u32,
}

/// The tenant with this number is none: it is before the first and after the last, and ends and begins accordingly.
const NONE: u32 = 0;

/// Spans that are taken.
#[derive(Debug)]
pub(super) struct Tenants {
    /// Of the pool.
    len: Bytes,
    tenants: Vec<Tenant>,
    /// Numbers that nobody has.
    unused: Vec<u32>,
    /// The first of those that begin in each slot, or none.
    firsts: Vec<u32>,
    /// Slots in which one begins.
    begins: Starts,
    /// Cells that a tenant has a byte of. A gigabyte is eight words.
    busy: Bits,
}

impl Tenants {
    pub(super) fn new(len: Bytes) -> Tenants {
        let cells = len.get().div_ceil(CELL) as usize;
        let none = Tenant { start: u64::MAX, end: 0, bytes: Bytes::ZERO, before: NONE, after: NONE };
        Tenants {
            len,
            tenants: vec![none],
            unused: Vec::new(),
            firsts: vec![NONE; len.get().div_ceil(SLOT) as usize],
            begins: Starts::default(),
            busy: Bits::new(cells),
        }
    }

    /// Nothing is in the way.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.tenants.len() == self.unused.len() + 1
    }

    /// `span` is the pool's, and no tenant has a byte of it.
    pub(super) fn is_clear(&self, span: PlanSpan) -> bool {
        if !self.busy.any_of(cells(span)) {
            return true;
        }
        // Of those that begin before its end the last reaches furthest.
        let after = self.at(self.from(span.end().get()));
        self.at(after.before).end <= span.start().get()
    }

    #[inline]
    fn at(&self, number: u32) -> &Tenant {
        &self.tenants[number as usize]
    }

    /// The first that begins at `start` or behind it.
    #[inline]
    fn from(&self, start: u64) -> u32 {
        let slot = start / SLOT;
        // The end of the pool may be the end of its last slot.
        let mut found = self.firsts.get(slot as usize).copied().unwrap_or(NONE);
        if found == NONE {
            return self.begins.first_from(slot + 1).map_or(NONE, |slot| self.firsts[slot as usize]);
        }
        while self.at(found).start < start {
            found = self.at(found).after;
        }
        found
    }

    /// Those from one on.
    fn walk(&self, first: u32) -> impl Iterator<Item = &Tenant> {
        let one = |number: u32| Some(self.at(number)).filter(|_| number != NONE);
        std::iter::successors(one(first), move |tenant| one(tenant.after))
    }

    /// Where in `space`, which is aligned, the smallest stretch begins that nobody has and that is at least `len` long from an aligned place on.
    pub(super) fn gap(&self, space: PlanSpan, len: Bytes) -> Option<PlanOffset> {
        let (start, end, len) = (space.start().get(), space.end().get(), len.get());
        // As many whole cells lie in each stretch of the length.
        let whole = (len / CELL).saturating_sub(1) as u32;
        if whole > 0 && !self.busy.has_clear(cells(space), whole) {
            return None;
        }
        let mut after = self.at(self.from(start + 1));
        let mut at = start.max(aligned(self.at(after.before).end));
        let (mut best, mut shortest) = (None, u64::MAX);
        // Where what is left is too short, whoever is there need not be looked up.
        while at + len <= end {
            let to = after.start.min(end);
            let room = to.saturating_sub(at);
            if room >= len && room < shortest {
                (best, shortest) = (Some(PlanOffset::new(at)), room);
            }
            if to == end {
                break;
            }
            at = aligned(after.end);
            after = self.at(after.after);
        }
        best
    }

    pub(super) fn insert(&mut self, span: PlanSpan, bytes: Bytes) {
        let (start, end) = (span.start().get(), span.end().get());
        let after = self.from(start);
        let before = self.at(after).before;
        let is_free = self.at(before).end <= start && end <= self.at(after).start;
        assert!(is_free, "two tenants never overlap");
        assert!(end <= self.len.get(), "tenants are inside the pool");
        let new = Tenant { start, end, bytes, before, after };
        let number = match self.unused.pop() {
            Some(number) => {
                self.tenants[number as usize] = new;
                number
            }
            None => {
                self.tenants.push(new);
                (self.tenants.len() - 1) as u32
            }
        };
        self.tenants[before as usize].after = number;
        self.tenants[after as usize].before = number;
        let first = &mut self.firsts[(start / SLOT) as usize];
        if *first == NONE {
            self.begins.set(start / SLOT);
        }
        if *first == NONE || *first == after {
            *first = number;
        }
        self.busy.set_all(cells(span));
    }

    /// Takes out the tenant that begins at `start`, if there is one, and says how many bytes it had asked for.
    pub(super) fn remove(&mut self, start: PlanOffset) -> Option<Bytes> {
        let number = self.served_at(start)?;
        let bytes = self.at(number).bytes;
        self.take_out(number);
        Some(bytes)
    }

    /// Who begins at `start`.
    fn begins_at(&self, start: PlanOffset) -> Option<u32> {
        let number = self.from(start.get());
        (number != NONE && self.at(number).start == start.get()).then_some(number)
    }

    /// The tenant that begins at `start`, if that is no part that is lent.
    fn served_at(&self, start: PlanOffset) -> Option<u32> {
        self.begins_at(start).filter(|number| self.at(*number).bytes != LENT)
    }

    /// A part of `span` is not the pool's.
    pub(super) fn has_lent(&self, span: PlanSpan) -> bool {
        self.busy.any_of(cells(span)) && self.lent_in(span).next().is_some()
    }

    /// What of `span` is not the pool's, in the order of offsets.
    pub(super) fn lent_in(&self, span: PlanSpan) -> impl Iterator<Item = PlanSpan> + '_ {
        let (start, end) = (span.start().get(), span.end().get());
        let lent = self.meeting(span).filter(|tenant| tenant.bytes == LENT);
        lent.map(move |tenant| from_to(tenant.start.max(start), tenant.end.min(end)))
    }

    /// `span`, of which no tenant has a byte, is not the pool's from now on.
    pub(super) fn lend(&mut self, span: PlanSpan) {
        let mut whole = span;
        let after = self.from(span.start().get());
        for number in [self.at(after).before, after] {
            let beside = *self.at(number);
            if beside.bytes == LENT && (beside.end == whole.start().get() || beside.start == whole.end().get()) {
                self.take_out(number);
                whole = from_to(beside.start.min(whole.start().get()), beside.end.max(whole.end().get()));
            }
        }
        self.insert(whole, LENT);
    }

    /// `span`, which was lent, is the pool's again.
    pub(super) fn take_back(&mut self, span: PlanSpan) {
        let (start, end) = (span.start().get(), span.end().get());
        let lent = self.meeting(span).next().copied().filter(|tenant| tenant.bytes == LENT);
        let lent = lent.filter(|lent| lent.start <= start && end <= lent.end).expect("only what is lent is taken back");
        let number = self.begins_at(lent.span().start()).expect("it is a tenant");
        self.take_out(number);
        for (from, to) in [(lent.start, start), (end, lent.end)].into_iter().filter(|(from, to)| from < to) {
            self.insert(from_to(from, to), LENT);
        }
    }

    fn take_out(&mut self, number: u32) {
        let gone = *self.at(number);
        self.tenants[gone.before as usize].after = gone.after;
        self.tenants[gone.after as usize].before = gone.before;
        self.unused.push(number);
        let slot = gone.start / SLOT;
        let (before, after) = (*self.at(gone.before), *self.at(gone.after));
        if self.firsts[slot as usize] == number {
            let is_of_slot = after.start / SLOT == slot;
            self.firsts[slot as usize] = if is_of_slot { gone.after } else { NONE };
            if !is_of_slot {
                self.begins.clear(slot);
            }
        }
        // Only its neighbours can have bytes of its first and last cells.
        let mut free = cells(gone.span());
        free.start += u32::from(before.end > u64::from(free.start) * CELL);
        free.end -= u32::from(after.start < u64::from(free.end) * CELL);
        if free.start < free.end {
            self.busy.clear_all(free);
        }
    }

    /// Bytes of the tenant that begins at `start`.
    pub(super) fn len_at(&self, start: PlanOffset) -> Option<Bytes> {
        self.served_at(start).map(|number| self.at(number).span().len())
    }

    fn all(&self) -> impl Iterator<Item = &Tenant> {
        self.walk(self.at(NONE).after)
    }

    pub(super) fn spans(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.all().map(Tenant::span)
    }

    /// The tenants, with the bytes that were asked for.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PlanSpan, Bytes)> + '_ {
        self.all().map(|tenant| (tenant.span(), tenant.bytes))
    }

    /// Tenants that have bytes of `span`.
    pub(super) fn overlapping(&self, span: PlanSpan) -> impl Iterator<Item = PlanSpan> + '_ {
        self.meeting(span).map(Tenant::span)
    }

    fn meeting(&self, span: PlanSpan) -> impl Iterator<Item = &Tenant> {
        let (start, end) = (span.start().get(), span.end().get());
        let first = self.from(start);
        let before = Some(self.at(self.at(first).before)).filter(|before| before.end > start);
        before.into_iter().chain(self.walk(first).take_while(move |tenant| tenant.start < end))
    }

    pub(super) fn invariants(&self) -> Result<(), String> {
        let known = self.tenants.len() - 1 - self.unused.len();
        let mut number = NONE;
        for count in 0..=known {
            let after = self.at(number).after;
            if self.at(after).before != number {
                return Err(format!("tenant {after} comes after {number}, and does not know it"));
            }
            if (after == NONE) != (count == known) {
                return Err(format!("{known} tenants are known, and the list is shorter or longer"));
            }
            number = after;
        }
        let spans: Vec<PlanSpan> = self.spans().collect();
        if let Some(pair) = spans.windows(2).find(|pair| pair[0].end() > pair[1].start()) {
            return Err(format!("tenants overlap or are out of order: {pair:?}"));
        }
        let mut taken = vec![false; (self.firsts.len() as u64 * SLOT).div_ceil(CELL) as usize];
        spans.iter().flat_map(|span| cells(*span)).for_each(|cell| taken[cell as usize] = true);
        for (cell, is_taken) in (0..).zip(taken) {
            if self.busy.is_set(cell) != is_taken {
                return Err(format!("cell {cell} is taken or not, and its bit says otherwise"));
            }
        }
        let mut firsts = vec![NONE; self.firsts.len()];
        let mut number = self.at(NONE).before;
        while number != NONE {
            firsts[(self.at(number).start / SLOT) as usize] = number;
            number = self.at(number).before;
        }
        for (slot, first) in (0..).zip(&firsts) {
            let has_bit = self.begins.first_from(slot) == Some(slot);
            if self.firsts[slot as usize] != *first || has_bit != (*first != NONE) {
                return Err(format!("slot {slot} has tenant {first} first, and knows another or none"));
            }
        }
        Ok(())
    }
}

impl Tenant {
    fn span(&self) -> PlanSpan {
        from_to(self.start, self.end)
    }
}

fn from_to(start: u64, end: u64) -> PlanSpan {
    Span::new(PlanOffset::new(start), Bytes::new(end - start)).expect("it lies in the pool")
}

/// The first place from there on where an allocation may begin.
fn aligned(at: u64) -> u64 {
    at.next_multiple_of(limits::ALLOCATION_ALIGNMENT.get())
}

/// The bytes of a cell.
pub(super) fn whole_cell(cell: u32) -> PlanSpan {
    Span::new(PlanOffset::new(u64::from(cell) * CELL), Bytes::new(CELL)).expect("a cell of a pool")
}

/// The cells that a span, not empty, touches.
fn cells(span: PlanSpan) -> std::ops::Range<u32> {
    (span.start().get() / CELL) as u32..((span.end().get() - 1) / CELL) as u32 + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Where the smallest stretch of `space` begins that nobody has and that holds so much from an aligned place on, said the slow way.
    fn slow_gap(list: &[PlanSpan], holes: &[PlanSpan], space: PlanSpan, len: u64) -> Option<u64> {
        let taken = list.iter().chain(holes).filter(|other| other.overlaps(space));
        let mut inside: Vec<(u64, u64)> = taken.map(|span| (span.start().get(), span.end().get())).collect();
        inside.push((space.end().get(), u64::MAX));
        inside.sort_unstable();
        let (mut at, mut gaps) = (space.start().get(), Vec::new());
        for (start, end) in inside {
            let (from, to) = (at.next_multiple_of(512), start.min(space.end().get()));
            if from + len <= to {
                gaps.push((to - from, from));
            }
            at = at.max(end);
        }
        gaps.into_iter().min().map(|(_, start)| start)
    }

    /// So many tenants at most in a pool of so many bytes, each of up to `1 << shift_max` bytes.
    fn agrees_with_a_plain_list(pool: Bytes, live_max: usize, shift_max: u64) {
        let mut rng = Rng::new(1);
        let mut tenants = Tenants::new(pool);
        let mut list: Vec<PlanSpan> = Vec::new();
        let (mut holes, mut clear, mut found) = (Vec::new(), 0, 0);
        for step in 0..20_000 {
            if step == 10_000 {
                // From here on parts of the pool are lent, of which two that meet are one.
                let empty = (0..pool.get() / CELL).map(|cell| whole_cell(cell as u32));
                holes.extend(empty.filter(|cell| !list.iter().any(|one| one.overlaps(*cell))).step_by(3));
                for hole in &holes {
                    let (start, end) = (hole.start().get(), hole.end().get());
                    tenants.lend(from_to(start + CELL / 2, end));
                    tenants.lend(from_to(start, start + CELL / 2));
                    assert_eq!(tenants.lent_in(*hole).collect::<Vec<_>>(), [*hole]);
                    tenants.take_back(from_to(start + 512, start + 1024));
                    assert_eq!(tenants.lent_in(*hole).count(), 2);
                    tenants.lend(from_to(start + 512, start + 1024));
                }
            }
            let shift = 10 + rng.below(shift_max - 9);
            let len = 512 + rng.below((1 << shift) - 512) / 512 * 512;
            let start = rng.below((pool.get() - len) / 512 + 1) * 512;
            let span = Span::new(PlanOffset::new(start), Bytes::new(len)).unwrap();
            let expected = !list.iter().chain(&holes).any(|other| other.overlaps(span));
            assert_eq!(tenants.is_clear(span), expected, "{span}");
            let wanted = 512 + rng.below(len) / 512 * 512;
            let gap = tenants.gap(span, Bytes::new(wanted));
            assert_eq!(gap.map(PlanOffset::get), slow_gap(&list, &holes, span, wanted), "{span}");
            found += usize::from(gap.is_some_and(|_| !expected));
            if expected {
                clear += 1;
                // Whom the plan does not know may begin and end anywhere.
                let shorter = rng.below(2) * rng.below(512);
                let span = Span::new(PlanOffset::new(span.start().get() + shorter), span.len() - Bytes::new(shorter));
                let span = span.unwrap();
                tenants.insert(span, span.len());
                list.push(span);
            }
            if step % 1000 == 0 {
                tenants.invariants().unwrap();
                let all = list.iter().chain(&holes).copied();
                let mut inside: Vec<PlanSpan> = all.filter(|other| other.overlaps(span)).collect();
                inside.sort_unstable_by_key(|span| span.start());
                assert_eq!(tenants.overlapping(span).collect::<Vec<_>>(), inside);
            }
            if list.len() > live_max {
                let gone = list.swap_remove(rng.index(list.len()));
                assert_eq!(tenants.len_at(gone.start()), Some(gone.len()));
                assert_eq!(tenants.remove(gone.start()), Some(gone.len()));
            }
        }
        tenants.invariants().unwrap();
        assert!(clear > 1000 && found > 1000 && list.len() >= live_max, "{clear}, {found}");
    }

    #[test]
    fn look_ups_agree_with_a_plain_list() {
        agrees_with_a_plain_list(Bytes::mib(400), 20, 25);
        // Many begin in one slot.
        agrees_with_a_plain_list(Bytes::mib(4), 1000, 12);
    }
}
