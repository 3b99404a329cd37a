//! Buffers that fill a stretch of time and of memory without a gap, and are one buffer to all others: tiles, and tiles of tiles.
//!
//! At a moment at which as many bytes begin as end, those that begin can lie where those that end did. If they all begin at one moment and the others all end at one, they
//! are a rectangle together; so are those around a few such moments, of which none begins before all or ends behind all of them. What is found is placed inside, and is one tile from then on. A job that
//! wastes nothing at all, and in which no search decides in what order thousands of buffers lie, comes to one tile in as many steps as it has buffers.
//!
//! Not for: proof. That buffers are a rectangle in some answer does not say that they are in the best.

use std::collections::{BTreeMap, VecDeque};

use super::search;
use super::sections::Sections;
use crate::units::Lifetime;
use crate::work::Work;

/// Moments inside of a tile.
const INSIDE_MAX: usize = 6;
/// Tiles in a tile: all that were cut from one on both sides of a moment.
const PARTS_MAX: usize = 4_096;
/// Of so many that begin or end at a moment it is looked which belong together: two to the power of it.
const CHOSEN_FROM: usize = 12;
/// Units in which tiles are looked for, for each buffer: some twenty are enough where there is nothing else.
const JOINED_IN: u64 = 400;
/// Units of a search inside of a tile, for each part of it.
const PLACED_IN: u64 = 2_000;
/// Of what is left in proportion to what there was: few enough for an exact search, where a pass is not enough.
const FEW: usize = 4;

/// The lowest stacking below `limit` of the tiles that are found; none where none are and another pass would do the same. What it says of answers below is of no tile, and so nothing.
pub(super) fn place(lifetimes: &[Lifetime], lens: &[u64], limit: u64, work: &mut Work) -> search::Answer {
    let nothing = search::Answer { found: None, low: 0 };
    let sum = lens.iter().try_fold(0_u64, |sum, len| sum.checked_add(*len));
    let Some(sum) = sum.filter(|sum| *sum <= u64::MAX / 8) else { return nothing };
    let mut tiling = Tiling::of(lifetimes, lens);
    let some = (work.left() / 4).min(JOINED_IN * lens.len() as u64);
    work.with(some, |work| tiling.join(work));
    let outer = tiling.outer();
    if outer.len() == lens.len() && limit <= sum {
        return nothing;
    }
    let lifetime = |at: &u32| {
        let tile = &tiling.tiles[*at as usize];
        Lifetime::new(tile.start.into(), tile.end.into())
    };
    let outer_lifetimes: Vec<Lifetime> = outer.iter().map(lifetime).collect();
    let outer_lens: Vec<u64> = outer.iter().map(|at| tiling.tiles[*at as usize].len).collect();
    let how = if outer.len() * FEW <= lens.len() { search::search } else { search::dive };
    let share = work.left() / 4;
    let answer = work.with(share, |work| how(&outer_lifetimes, &outer_lens, limit, work));
    let found = answer.found.map(|found| {
        let offsets = tiling.spread(outer.iter().copied().zip(found.offsets), lens.len());
        search::Found { offsets, ..found }
    });
    search::Answer { found, low: 0 }
}

/// A buffer, or some that are a rectangle.
#[derive(Debug)]
struct Tile {
    start: u32,
    end: u32,
    len: u64,
    /// Of what it consists, and how far from its own offset those lie. A buffer consists of nothing else.
    parts: Vec<(u32, u64)>,
}

/// Tiles by when they begin and end. The first are the buffers.
///
/// A moment is where a section of time begins, and the last is behind them all: what ends between two births ends with the later one.
#[derive(Debug)]
struct Tiling {
    tiles: Vec<Tile>,
    /// They are a part of another.
    is_part: Vec<bool>,
    /// Of each moment, those that begin there, and that end.
    begins: Vec<Touching>,
    ends: Vec<Touching>,
}

/// Tiles that begin at a moment, or that end there. Those that have become a part of another are taken out when somebody looks: a moment at which many begin would be gone over for each of them.
#[derive(Clone, Debug, Default)]
struct Touching {
    tiles: Vec<u32>,
    /// Those that are no part.
    count: usize,
}

impl Touching {
    fn add(&mut self, tile: u32) {
        self.tiles.push(tile);
        self.count += 1;
    }
}

impl Tiling {
    fn of(lifetimes: &[Lifetime], lens: &[u64]) -> Tiling {
        let sections = Sections::of(lifetimes);
        let tile = |(at, len): (usize, &u64)| {
            let (start, end) = sections.of_lifetime(at);
            Tile { start: start as u32, end: end as u32, len: *len, parts: Vec::new() }
        };
        let tiles: Vec<Tile> = lens.iter().enumerate().map(tile).collect();
        let moments = sections.count() + 1;
        let (mut begins, mut ends) = (vec![Touching::default(); moments], vec![Touching::default(); moments]);
        for (tile, at) in tiles.iter().zip(0..) {
            begins[tile.start as usize].add(at);
            ends[tile.end as usize].add(at);
        }
        Tiling { is_part: vec![false; tiles.len()], tiles, begins, ends }
    }

    /// Those that are no part of another.
    fn outer(&self) -> Vec<u32> {
        (0..self.tiles.len() as u32).filter(|at| !self.is_part[*at as usize]).collect()
    }

    /// Offsets of the buffers, where those of the outer tiles are known.
    fn spread(&self, outer: impl Iterator<Item = (u32, u64)>, buffers: usize) -> Vec<u64> {
        let mut offsets = vec![0; buffers];
        let mut placed: Vec<(u32, u64)> = outer.collect();
        while let Some((at, offset)) = placed.pop() {
            match offsets.get_mut(at as usize) {
                Some(of_buffer) => *of_buffer = offset,
                None => placed.extend(self.tiles[at as usize].parts.iter().map(|(part, from)| (*part, offset + from))),
            }
        }
        offsets
    }

    /// Makes tiles until there are no more, or no more work. Where all that begins and ends at a moment is of one tile there is nothing to choose: that comes first.
    fn join(&mut self, work: &mut Work) {
        let count = self.begins.len();
        let (mut plain, mut chosen) = (Turns::of(count), Turns::of(count));
        (0..count as u32).for_each(|moment| plain.add(moment));
        while !work.is_over() {
            let (moment, is_plain) = match plain.next() {
                Some(moment) => (moment, true),
                None => match chosen.next() {
                    Some(moment) => (moment, false),
                    None => return,
                },
            };
            let parts = match is_plain {
                true => self.around(moment, &[], false, work),
                false => self.chosen_at(moment, work),
            };
            match parts.and_then(|parts| self.tile_of(parts, work)) {
                Some(tile) => {
                    [tile.start, tile.end, moment].into_iter().for_each(|moment| plain.add(moment));
                    self.add(tile);
                }
                None if is_plain && !self.is_bare(moment) => chosen.add(moment),
                None => {}
            }
        }
    }

    /// Nothing begins there, or nothing ends.
    fn is_bare(&self, moment: u32) -> bool {
        self.begins[moment as usize].count == 0 || self.ends[moment as usize].count == 0
    }

    fn add(&mut self, tile: Tile) {
        let at = self.tiles.len() as u32;
        for (part, _) in &tile.parts {
            let Tile { start, end, .. } = self.tiles[*part as usize];
            self.begins[start as usize].count -= 1;
            self.ends[end as usize].count -= 1;
            self.is_part[*part as usize] = true;
        }
        self.begins[tile.start as usize].add(at);
        self.ends[tile.end as usize].add(at);
        self.is_part.push(false);
        self.tiles.push(tile);
    }

    /// What ends and what begins at a moment is as it is now.
    fn look_at(&mut self, moment: u32) {
        for touching in [&mut self.ends[moment as usize], &mut self.begins[moment as usize]] {
            if touching.tiles.len() > touching.count {
                touching.tiles.retain(|tile| !self.is_part[*tile as usize]);
            }
        }
    }

    fn sum(&self, of: &[u32]) -> u64 {
        of.iter().map(|at| self.tiles[*at as usize].len).sum()
    }

    /// What is a rectangle with those of `first` and with what begins and ends at a moment: at each moment inside of it as many bytes begin as end. Of what is at a moment all, or the fewest that will do.
    fn around(&mut self, moment: u32, first: &[u32], are_chosen: bool, work: &mut Work) -> Option<Vec<u32>> {
        let mut parts = first.to_vec();
        loop {
            let tiles = || parts.iter().map(|at| &self.tiles[*at as usize]);
            let start = tiles().map(|tile| tile.start).min().unwrap_or(moment);
            let end = tiles().map(|tile| tile.end).max().unwrap_or(moment);
            let ends = tiles().flat_map(|tile| [tile.start, tile.end]);
            let mut inside: Vec<u32> = ends.filter(|at| start < *at && *at < end).chain([moment]).collect();
            inside.sort_unstable();
            inside.dedup();
            if inside.len() > INSIDE_MAX || parts.len() > PARTS_MAX {
                return None;
            }
            let before = parts.len();
            for at in inside {
                let more = self.balanced(at, &parts, are_chosen, work)?;
                parts.extend(more);
                parts.sort_unstable();
                parts.dedup();
            }
            if parts.len() == before {
                return Some(parts);
            }
        }
    }

    /// What ends and what begins at a moment, as many bytes of each, with those of `parts` that do.
    fn balanced(&mut self, moment: u32, parts: &[u32], are_chosen: bool, work: &mut Work) -> Option<Vec<u32>> {
        if self.is_bare(moment) {
            return None;
        }
        self.look_at(moment);
        let (ends, begins) = (&self.ends[moment as usize].tiles, &self.begins[moment as usize].tiles);
        let count = ends.len() + begins.len();
        let choices = if are_chosen && count <= CHOSEN_FROM { 1 << ends.len() | 1 << begins.len() } else { 1 };
        // Not with the last of it.
        let choices = if choices < work.left() / 4 { choices } else { 1 };
        if !work.take((count + parts.len()) as u64 / 8 + choices) {
            return None;
        }
        if choices == 1 || ends.len() == 1 || begins.len() == 1 {
            let is_so = self.sum(ends) == self.sum(begins);
            return is_so.then(|| [ends.as_slice(), begins].concat());
        }
        let (of_ends, of_begins) = (self.choices(ends, parts), self.choices(begins, parts));
        let both = of_ends.into_iter().filter_map(|(sum, ends)| Some((ends, *of_begins.get(&sum)?)));
        let (of_ends, of_begins) = both.min_by_key(|(ends, begins)| ends.count_ones() + begins.count_ones())?;
        let chosen = |of: &[u32], mask: u32| {
            let is_chosen = |place: &usize| mask >> place & 1 == 1;
            (0..of.len()).filter(is_chosen).map(|place| of[place]).collect::<Vec<u32>>()
        };
        Some([chosen(ends, of_ends), chosen(begins, of_begins)].concat())
    }

    /// The fewest of `of` with each sum that some of them have, all that are of `parts` among them: a bit for each.
    fn choices(&self, of: &[u32], parts: &[u32]) -> BTreeMap<u64, u32> {
        let bit = |(place, at): (usize, &u32)| u32::from(parts.binary_search(at).is_ok()) << place;
        let needed: u32 = of.iter().enumerate().map(bit).sum();
        let mut choices: BTreeMap<u64, u32> = BTreeMap::new();
        for mask in (1..1_u32 << of.len()).filter(|mask| mask & needed == needed) {
            let lens = of.iter().enumerate().filter(|(place, _)| mask >> place & 1 == 1);
            let sum = lens.map(|(_, at)| self.tiles[*at as usize].len).sum();
            let fewest = choices.entry(sum).or_insert(mask);
            if mask.count_ones() < fewest.count_ones() {
                *fewest = mask;
            }
        }
        choices
    }

    /// Some of what begins and ends at a moment, where not all of it is of one tile: all that come from one moment and all that go to one, or the fewest around one that ends.
    fn chosen_at(&mut self, moment: u32, work: &mut Work) -> Option<Vec<u32>> {
        self.look_at(moment);
        let (ends, begins) = (&self.ends[moment as usize].tiles, &self.begins[moment as usize].tiles);
        if !work.take((ends.len() + begins.len()) as u64 / 8 + 1) {
            return None;
        }
        let few: Vec<u32> = ends.iter().copied().filter(|_| ends.len() + begins.len() <= CHOSEN_FROM).collect();
        let (mut from, mut to) = (BTreeMap::<u32, Vec<u32>>::new(), BTreeMap::<u32, Vec<u32>>::new());
        ends.iter().for_each(|at| from.entry(self.tiles[*at as usize].start).or_default().push(*at));
        begins.iter().for_each(|at| to.entry(self.tiles[*at as usize].end).or_default().push(*at));
        let by_sum: BTreeMap<u64, &Vec<u32>> = to.values().map(|begin| (self.sum(begin), begin)).collect();
        let both = |end: &Vec<u32>| by_sum.get(&self.sum(end)).map(|begin| [end.as_slice(), begin].concat());
        let of_one = from.values().find_map(both);
        let mut parts = of_one.or_else(|| few.into_iter().find_map(|end| self.around(moment, &[end], true, work)))?;
        parts.sort_unstable();
        Some(parts)
    }

    /// The rectangle that some are, with where each lies in it.
    fn tile_of(&self, parts: Vec<u32>, work: &mut Work) -> Option<Tile> {
        let tiles: Vec<&Tile> = parts.iter().map(|at| &self.tiles[*at as usize]).collect();
        let start = tiles.iter().map(|tile| tile.start).min()?;
        let end = tiles.iter().map(|tile| tile.end).max()?;
        let len = tiles.iter().filter(|tile| tile.start == start).map(|tile| tile.len).sum();
        let cut = if tiles[0].start == start { tiles[0].end } else { tiles[0].start };
        let is_of_two = |tile: &&Tile| (tile.start, tile.end) == (start, cut) || (tile.start, tile.end) == (cut, end);
        let offsets = if tiles.iter().all(is_of_two) {
            // One above the other, on both sides of the moment.
            let mut next = [0; 2];
            let stacked = tiles.iter().map(|tile| {
                let next = &mut next[usize::from(tile.start == cut)];
                let offset = *next;
                *next += tile.len;
                offset
            });
            stacked.collect()
        } else {
            let lifetimes: Vec<Lifetime> =
                tiles.iter().map(|tile| Lifetime::new(tile.start.into(), tile.end.into())).collect();
            let lens: Vec<u64> = tiles.iter().map(|tile| tile.len).collect();
            let units = PLACED_IN * parts.len() as u64;
            work.with(units, |work| search::within(&lifetimes, &lens, len, work))?
        };
        Some(Tile { start, end, len, parts: parts.into_iter().zip(offsets).collect() })
    }
}

/// Moments that are to be looked at, each once at a time.
#[derive(Debug)]
struct Turns {
    moments: VecDeque<u32>,
    is_in: Vec<bool>,
}

impl Turns {
    fn of(count: usize) -> Turns {
        Turns { moments: VecDeque::new(), is_in: vec![false; count] }
    }

    fn add(&mut self, moment: u32) {
        if !std::mem::replace(&mut self.is_in[moment as usize], true) {
            self.moments.push_back(moment);
        }
    }

    fn next(&mut self) -> Option<u32> {
        let moment = self.moments.pop_front()?;
        self.is_in[moment as usize] = false;
        Some(moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::work::Budget;

    type Problem = (Vec<Lifetime>, Vec<u64>);

    fn work() -> Work {
        Work::of(&Budget::of(16_000_000))
    }

    /// Where they lie, if none is in another's way: how high they are.
    fn top((lifetimes, lens): &Problem, offsets: &[u64]) -> u64 {
        let mut order: Vec<usize> = (0..lens.len()).collect();
        order.sort_by_key(|at| lifetimes[*at].start);
        for (place, one) in order.iter().enumerate() {
            let together = order[place + 1..].iter().take_while(|other| lifetimes[**other].start < lifetimes[*one].end);
            for other in together {
                let apart =
                    offsets[*one] + lens[*one] <= offsets[*other] || offsets[*other] + lens[*other] <= offsets[*one];
                assert!(apart, "{one} and {other}");
            }
        }
        offsets.iter().zip(lens).map(|(offset, len)| offset + len).max().unwrap()
    }

    /// A rectangle that is cut again and again, the largest piece first, in two or into four blades around a middle, in no order.
    fn cut(rng: &mut Rng, count: usize, ticks: u64, height: u64, in_five: u64) -> Problem {
        let mut pieces = vec![(0, ticks, height)];
        while pieces.len() < count {
            let draws: Vec<usize> = (0..4).map(|_| rng.index(pieces.len())).collect();
            let area = |at: &usize| (pieces[*at].1 - pieces[*at].0) * pieces[*at].2;
            let at = draws.into_iter().max_by_key(area).unwrap();
            let (start, end, len) = pieces.swap_remove(at);
            if rng.chance(in_five) && end - start > 2 && len > 2 {
                let ticks = 1 + rng.below((end - start - 1) / 2);
                let blade = 1 + rng.below((len - 1) / 2);
                let (left, right) = (start + ticks, end - ticks);
                pieces.extend([(start, right, blade), (left, end, blade)]);
                pieces.extend([(start, left, len - blade), (right, end, len - blade)]);
                if left < right {
                    pieces.push((left, right, len - 2 * blade));
                }
            } else if rng.chance(500) && end - start > 1 {
                let at = start + 1 + rng.below(end - start - 1);
                pieces.extend([(start, at, len), (at, end, len)]);
            } else if len > 1 {
                let low = 1 + rng.below(len - 1);
                pieces.extend([(start, end, low), (start, end, len - low)]);
            } else {
                pieces.push((start, end, len));
            }
        }
        for at in (1..pieces.len()).rev() {
            pieces.swap(at, rng.index(at + 1));
        }
        pieces.into_iter().map(|(start, end, len)| (Lifetime::new(start, end), len)).unzip()
    }

    #[test]
    fn what_wastes_nothing_is_put_together_again_in_whatever_order_it_comes() {
        for seed in 0..60 {
            let mut rng = Rng::new(seed);
            let count = [5, 50, 500, 3_000][seed as usize % 4];
            let problem = cut(&mut rng, count, 1 << 20, 1 << 30, [0, 200, 1000][seed as usize % 3]);
            let mut work = work();
            let found = place(&problem.0, &problem.1, u64::MAX, &mut work).found;
            let found = found.unwrap_or_else(|| panic!("seed {seed}: nothing for {count}"));
            assert_eq!((top(&problem, &found.offsets), found.top), (1 << 30, 1 << 30), "seed {seed}");
            // Near to as many steps as there are buffers.
            assert!(work.done() < 400 * problem.1.len() as u64, "seed {seed}: {} for {count}", work.done());
        }
    }

    #[test]
    fn where_many_are_cut_at_one_moment_it_is_found_which_belong_together() {
        let mut met = 0;
        for seed in 0..100 {
            let mut rng = Rng::new(seed);
            let problem = cut(&mut rng, 400, 150, 1 << 30, 300);
            let found = place(&problem.0, &problem.1, u64::MAX, &mut work()).found.unwrap();
            assert_eq!(top(&problem, &found.offsets), found.top, "seed {seed}");
            met += u32::from(found.top == 1 << 30);
        }
        assert!(met > 50, "{met} of 100");
    }

    #[test]
    fn what_has_gaps_is_placed_around_them() {
        let (mut joined, mut none) = (0, 0);
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let count = 2 + rng.index(60);
            let lifetime = |rng: &mut Rng| {
                let start = rng.below(20);
                Lifetime::new(start, start + 1 + rng.below(20 - start))
            };
            let problem: Problem = (0..count).map(|_| (lifetime(&mut rng), 1 + rng.below(4))).unzip();
            let found = place(&problem.0, &problem.1, u64::MAX, &mut work()).found.unwrap();
            assert_eq!(top(&problem, &found.offsets), found.top, "seed {seed}");
            let mut tiling = Tiling::of(&problem.0, &problem.1);
            tiling.join(&mut work());
            joined += u32::from(tiling.outer().len() < count);
            // With an answer there is no use for one that a pass gives as well.
            let again = place(&problem.0, &problem.1, found.top + 1, &mut work());
            assert_eq!(again.found.is_some(), tiling.outer().len() < count, "seed {seed}");
            none += u32::from(again.found.is_none());
            assert_eq!(again.low, 0);
        }
        assert!(joined > 100 && none > 20, "{joined} had tiles, {none} had none");
    }

    #[test]
    fn nothing_is_found_without_work_or_where_sums_have_no_room() {
        let problem = cut(&mut Rng::new(1), 50, 1000, 1000, 0);
        assert_eq!(place(&problem.0, &problem.1, 1001, &mut Work::of(&Budget::of(1))).found, None);
        let lifetimes = [Lifetime::new(0, 1), Lifetime::new(1, 2)];
        assert_eq!(place(&lifetimes, &[u64::MAX / 4; 2], u64::MAX, &mut work()).found, None);
    }
}
