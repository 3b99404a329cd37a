//! Stitching: a place for a request that no free run is long enough for.
//!
//! The place is put together from runs of free memory that start or end at a chunk's edge. Where
//! whole idle chunks suffice they are used alone, the largest first. Otherwise the place begins with
//! the tail of the arena and new chunks behind it, or with a longer run that ends at a chunk's edge,
//! and may end with a run that begins at one.

use std::cmp::Reverse;
use std::sync::Arc;

use super::arena::Arena;
use super::place::{Piece, Place};
use super::{At, Live, PagePool, UNIT, bytes_of, units_of};
use crate::ids::StreamId;
use crate::memory::{Chunk, Mapping, MemoryError};
use crate::units::{Bytes, DeviceAddress};

/// Slots of all places together: each is a mapping of the process. Above it the places go that were
/// used least recently.
const SHOWN_SLOTS_MAX: usize = 1 << 15;

/// The free runs that a place will be made of, in the order of its addresses.
#[derive(Clone, Debug)]
pub struct Pieces {
    before: Vec<Piece>,
    /// New memory stands between the two; it continues the tail if `before` is that.
    after: Vec<Piece>,
}

/// What stitching a request takes.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// New bytes, a multiple of the granule.
    pub lacks: Bytes,
    /// The free runs that are used beside them.
    pub pieces: Pieces,
}

/// Free runs of an arena, cut at the edges of chunks.
#[derive(Default)]
struct Runs {
    /// Whole chunks, the largest first.
    whole: Vec<Piece>,
    /// From inside a chunk to its end.
    ends: Vec<Piece>,
    /// From a chunk's start to somewhere inside it.
    begins: Vec<Piece>,
}

impl Runs {
    fn of_arena(arena: &Arena, least: u64) -> Runs {
        let mut runs = Runs::default();
        arena.free.at_least(least).for_each(|(start, len)| {
            for (home, chunk, piece) in arena.pieces_in(start, start + len) {
                match (piece.start == home, piece.start + piece.units == home + chunk.units) {
                    (true, true) => runs.whole.push(piece),
                    (false, true) => runs.ends.push(piece),
                    (true, false) => runs.begins.push(piece),
                    (false, false) => {}
                }
            }
        });
        runs.whole.sort_unstable_by_key(|piece| (Reverse(piece.units), piece.start));
        runs
    }

    fn whole_units(&self) -> u64 {
        self.whole.iter().map(|piece| piece.units).sum()
    }
}

fn longest(pieces: &[Piece], may: impl Fn(&Piece) -> bool) -> Option<Piece> {
    pieces.iter().filter(|piece| may(piece)).max_by_key(|piece| (piece.units, Reverse(piece.start))).copied()
}

fn overlap(one: &Piece, other: &Piece) -> bool {
    one.start < other.start + other.units && other.start < one.start + one.units
}

/// Pieces that together have `units`, as few as can be, the one that is used in part last. All of
/// them where they are too few. `whole` has the largest first.
fn pick(whole: &[Piece], units: u64) -> Vec<Piece> {
    let mut picked: Vec<Piece> = Vec::new();
    let mut sum = 0;
    for piece in whole {
        if sum >= units {
            break;
        }
        picked.push(*piece);
        sum += piece.units;
    }
    // The last one may have made others unnecessary.
    picked.retain(|piece| {
        let is_spare = sum - piece.units >= units;
        sum -= if is_spare { piece.units } else { 0 };
        !is_spare
    });
    if sum > units
        && let Some(last) = picked.iter().min_by_key(|piece| piece.units).copied()
    {
        // A smaller one may do in place of the smallest.
        let needed = units - (sum - last.units);
        let fits = |piece: &&Piece| piece.units >= needed && piece.units < last.units && !picked.contains(piece);
        let smaller = whole.iter().filter(fits).min_by_key(|piece| (piece.units, piece.start)).copied();
        picked.retain(|piece| *piece != last);
        picked.sort_unstable();
        picked.push(smaller.unwrap_or(last));
    } else {
        picked.sort_unstable();
    }
    picked
}

impl PagePool {
    /// What a request lacks that is stitched. `None` where nothing idle would be used: then it
    /// lacks what it lacks at the end. Where memory `is_scarce`, shorter runs are used.
    pub fn shortage(&self, bytes: Bytes, stream: StreamId, is_scarce: bool) -> Option<Shortage> {
        if !self.policy.stitches || !self.device.capabilities().alias {
            return None;
        }
        let arena = &self.arenas[self.arena_of(stream)?];
        let units = units_of(bytes);
        let piece_min = if is_scarce { self.policy.scarce_piece_min() } else { self.policy.piece_min };
        let least = piece_min.get().min(self.policy.granule.get()) / UNIT;
        let runs = Runs::of_arena(arena, least);
        if runs.whole_units() >= units {
            let pieces = Pieces { before: pick(&runs.whole, units), after: Vec::new() };
            return Some(Shortage { lacks: Bytes::ZERO, pieces });
        }
        self.shortage_with_new(arena, units, runs, piece_min.get() / UNIT)
    }

    /// All idle chunks are used, and new memory beside them.
    fn shortage_with_new(&self, arena: &Arena, units: u64, mut runs: Runs, piece_min: u64) -> Option<Shortage> {
        let in_tail = arena.tail(units, self.policy.granule);
        let tail = Piece { start: in_tail.start, units: (in_tail.end - in_tail.start).min(units) };
        let is_in_tail = |piece: &Piece| in_tail.contains(&piece.start);
        runs.whole.retain(|piece| !is_in_tail(piece));
        let saves = |units: u64, other: u64| units >= other + piece_min;
        // New chunks continue the tail, unless a run elsewhere is longer.
        let front = longest(&runs.ends, |piece| !is_in_tail(piece)).filter(|piece| saves(piece.units, tail.units));
        let first = front.unwrap_or(tail);
        let mut left = units.saturating_sub(first.units);
        let picked = pick(&runs.whole, left);
        left = left.saturating_sub(picked.iter().map(|piece| piece.units).sum());
        let may_end = |piece: &Piece| !overlap(piece, &first) && (front.is_some() || !is_in_tail(piece));
        let last = longest(&runs.begins, may_end).filter(|piece| left > 0 && saves(piece.units, 0));
        left = left.saturating_sub(last.map_or(0, |piece| piece.units));
        if front.is_none() && last.is_none() && picked.is_empty() {
            return None;
        }
        let lacks = bytes_of(left).round_up(self.policy.granule)?;
        let pieces = if front.is_some() {
            Pieces { before: [first].into_iter().chain(picked).collect(), after: last.into_iter().collect() }
        } else {
            let before = Some(first).filter(|piece| piece.units > 0);
            Pieces { before: before.into_iter().collect(), after: picked.into_iter().chain(last).collect() }
        };
        Some(Shortage { lacks, pieces })
    }

    /// Makes a place for a request, of these pieces and of new chunks, and serves it there. The new
    /// chunks are mapped at home first. `None` where the pieces are not free any more, or are too
    /// few: then the chunks serve at home.
    ///
    /// # Errors
    ///
    /// A mapping failed; with the error come the chunks that could not be mapped at home.
    pub fn stitch(
        &mut self,
        pieces: &Pieces,
        chunks: &[Arc<Chunk>],
        bytes: Bytes,
        stream: StreamId,
    ) -> Result<Option<DeviceAddress>, (Vec<Arc<Chunk>>, MemoryError)> {
        let at = self.arena_for(stream);
        let from = self.arenas[at].end_unit();
        self.extend(chunks, stream).map_err(|error| (chunks.to_vec(), error))?;
        let arena = &self.arenas[at];
        let units = units_of(bytes);
        let mut runs = pieces.before.clone();
        let new: u64 = chunks.iter().map(|chunk| chunk.len().get() / UNIT).sum();
        if let Some(end) = arena.end_unit().filter(|_| new > 0) {
            match runs.last_mut().filter(|last| Some(last.start + last.units) == from && from == Some(end - new)) {
                Some(tail) => tail.units += new,
                None => runs.push(Piece { start: end - new, units: new }),
            }
        }
        runs.extend(&pieces.after);
        // Chunks that left since the pieces were chosen may have come back as the new ones.
        let is_free = runs.iter().all(|run| arena.free.covers(run.start, run.units));
        if !is_free
            || !are_disjoint(&runs)
            || !meet_at_edges(arena, &runs)
            || runs.iter().map(|run| run.units).sum::<u64>() < units
        {
            return Ok(None);
        }
        if let [run] = runs[..] {
            return Ok(Some(self.serve_run(at, run.start, bytes)));
        }
        let place = place_of(arena, &runs, units).map_err(|error| (Vec::new(), error))?;
        let id = self.arenas[at].add_place(place);
        self.uses += 1;
        let address = self.arenas[at].occupy_place(id, units, self.uses);
        self.counts.new_places += 1;
        self.counts.stitched_bytes += bytes;
        let live = Live { bytes, arena: at as u32, at: At::Place(id as u32) };
        Ok(Some(self.note_live(address, units, live)))
    }

    fn serve_run(&mut self, at: usize, start: u64, bytes: Bytes) -> DeviceAddress {
        let units = units_of(bytes);
        self.arenas[at].free.take(start, units);
        self.counts.home += 1;
        self.note_live(super::address_of(start), units, Live { bytes, arena: at as u32, at: At::Home })
    }

    /// Drops idle places that were used least recently while there are too many. Unmapping waits for
    /// the device.
    pub fn drop_old_places(&mut self) {
        let most =
            SHOWN_SLOTS_MAX.min(usize::try_from(self.device.capabilities().mappings_max / 2).unwrap_or(usize::MAX));
        for arena in &mut self.arenas {
            while arena.shown_slots > most {
                let idle = arena.places.iter().filter(|(_, place)| !place.is_live);
                let Some(oldest) = idle.min_by_key(|(_, place)| place.used).map(|(id, _)| id) else { break };
                if arena.cut_place(oldest, 0).is_err() {
                    break;
                }
                self.counts.dropped_places += 1;
            }
        }
    }
}

fn are_disjoint(runs: &[Piece]) -> bool {
    let mut sorted = runs.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).all(|pair| !overlap(&pair[0], &pair[1]))
}

/// Whether runs can be shown side by side: each but the first begins where a chunk does, and each but the
/// last ends where one does. Chunks may have changed since the runs were chosen.
fn meet_at_edges(arena: &Arena, runs: &[Piece]) -> bool {
    let begins = |run: &Piece| arena.chunks.contains_key(&run.start);
    let ends = |run: &Piece| {
        let last = arena.home_at(run.start + run.units - 1);
        last.is_some_and(|(home, chunk)| home + chunk.units == run.start + run.units)
    };
    runs.windows(2).all(|pair| ends(&pair[0]) && begins(&pair[1]))
}

/// Maps the chunks that some runs lie in, side by side: the last of them as far as `units` reach.
fn place_of(arena: &Arena, runs: &[Piece], units: u64) -> Result<Place, MemoryError> {
    let (mut pieces, mut homes, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
    let mut left = units;
    for run in runs {
        let end = run.start + run.units.min(left);
        left -= end - run.start;
        for (home, chunk, piece) in arena.pieces_in(run.start, end) {
            pieces.push(piece);
            homes.push(home);
            chunks.push(Arc::clone(arena.chunk(home, chunk)));
        }
    }
    let mapping = Mapping::stitch(&chunks)?;
    Ok(Place { mapping, pieces, homes, is_live: false, used: 0, busy: (0, 0), next: None })
}
