//! Orders to begin with. Each takes a time that grows with the graph and little more, and none is good everywhere: the deepest first where parts of a graph have nothing to do with each other
//! (micro-batches), what grows least first, a part after the other, those that hold most on their way and leave least behind first, and parts in turn, each from one of its valleys to the next, which
//! on a tree is the best order of all (Liu, An application of generalized tree pebbling to sparse matrix factorization, 1987).

use std::collections::BinaryHeap;

use super::view::View;
use crate::work::Work;

/// Which of those that may run is the next, where none frees as much as it makes.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// The one that could run since the shortest time.
    Newest,
    /// The one that adds least.
    Least,
    /// The one that a walk through parts after parts comes to first.
    ByParts,
}

/// So much of the work that is left, a part of it, goes to stretches from valley to valley at most.
const VALLEYS: u64 = 16;

/// Orders of the graph whose two views these are, until the work is over.
pub(super) fn orders(forward: &View, backward: &View, work: &mut Work) -> Vec<Vec<u32>> {
    let mut orders = Vec::new();
    for (view, is_reversed) in [(forward, false), (backward, true)] {
        if !work.take(2 * view.looks()) {
            break;
        }
        let by_parts = by_parts(view);
        let mut add = |mut order: Vec<u32>| {
            if is_reversed {
                order.reverse();
            }
            orders.push(order);
        };
        for rule in [Rule::Newest, Rule::Least, Rule::ByParts] {
            if !work.take(2 * view.looks()) {
                break;
            }
            add(one_by_one(view, rule, &by_parts));
        }
        add(by_parts);
        work.with(work.left() / VALLEYS, |work| by_valleys(view, work)).into_iter().for_each(add);
    }
    orders
}

/// Always one of those that may run: first whoever frees as much as it makes, and then by the rule.
fn one_by_one(view: &View, rule: Rule, by_parts: &[u32]) -> Vec<u32> {
    let len = view.len();
    let mut rank = vec![0; len];
    by_parts.iter().zip(0_i64..).for_each(|(node, at)| rank[*node as usize] = -at);
    let mut waits: Vec<usize> = view.before.iter().map(Vec::len).collect();
    let mut left: Vec<usize> = view.memory.iter().map(|memory| memory.users.len()).collect();
    let mut has_run = vec![false; len];
    // When each could run, if it can.
    let mut since = vec![0_i64; len];
    let mut heap = BinaryHeap::new();
    let mut now = 0_i64;
    // What each would add, were it to run now.
    let grows = |storages: &Vec<u32>| {
        let of = storages.iter().map(|storage| {
            let memory = &view.memory[*storage as usize];
            let (comes, goes) = (!memory.is_there, memory.users.len() == 1 && !memory.stays);
            (i64::from(comes) - i64::from(goes)) * memory.bytes.cast_signed()
        });
        of.sum::<i64>()
    };
    let mut growth: Vec<i64> = view.storages.iter().map(grows).collect();
    let key = |node: u32, growth: &[i64], since: i64| {
        let growth = growth[node as usize];
        match rule {
            _ if growth <= 0 => (true, -growth, since, node),
            Rule::Newest => (false, since, -growth, node),
            Rule::Least => (false, -growth, since, node),
            Rule::ByParts => (false, rank[node as usize], 0, node),
        }
    };
    let mut to_end = vec![0_u32; len];
    for node in view.given.iter().rev().map(|node| *node as usize) {
        to_end[node] = view.next[node].iter().map(|next| to_end[*next as usize] + 1).max().unwrap_or(0);
    }
    // Of those that can run from the start the newest is the one that most wait for, one after the other, and said first of equal ones.
    let mut starts: Vec<u32> =
        view.given.iter().rev().copied().filter(|node| view.before[*node as usize].is_empty()).collect();
    starts.sort_by_key(|node| to_end[*node as usize]);
    for node in starts {
        now += 1;
        since[node as usize] = now;
        heap.push(key(node, &growth, now));
    }
    let mut touched = Vec::new();
    let mut order = Vec::with_capacity(len);
    // Whoever frees more by now is there twice, and once too often.
    while let Some((.., node)) = heap.pop() {
        if std::mem::replace(&mut has_run[node as usize], true) {
            continue;
        }
        order.push(node);
        for storage in &view.storages[node as usize] {
            let (memory, left_of) = (&view.memory[*storage as usize], &mut left[*storage as usize]);
            *left_of -= 1;
            let is_new = *left_of + 1 == memory.users.len() && !memory.is_there;
            let is_last = *left_of == 1 && !memory.stays;
            // It is there for the others, and the last of them frees it: looked at twice for each memory.
            let less = (i64::from(is_new) + i64::from(is_last)) * memory.bytes.cast_signed();
            if less > 0 {
                for user in memory.users.iter().filter(|user| !has_run[**user as usize]) {
                    growth[*user as usize] -= less;
                    touched.push(*user);
                }
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for user in touched.drain(..).filter(|user| since[*user as usize] > 0) {
            heap.push(key(user, &growth, since[user as usize]));
        }
        let free = view.next[node as usize].iter().copied().filter(|next| {
            waits[*next as usize] -= 1;
            waits[*next as usize] == 0
        });
        let mut free: Vec<u32> = free.collect();
        // The newest is the one that is nearest to an end: what it begins is soon over, and said first of equal ones.
        free.sort_by_key(|next| std::cmp::Reverse((to_end[*next as usize], *next)));
        for next in free {
            now += 1;
            since[next as usize] = now;
            heap.push(key(next, &growth, now));
        }
    }
    order
}

/// A part after the other: before an operator all that it waits for, and of that first what holds most beside what it leaves behind.
fn by_parts(view: &View) -> Vec<u32> {
    let len = view.len();
    // As of a tree: what two wait for counts for both.
    let (mut peak, mut stays) = (vec![0_u64; len], vec![0_u64; len]);
    let mut before = view.before.clone();
    let mut is_made = vec![false; view.memory.len()];
    for node in view.given.iter().map(|node| *node as usize) {
        let first = |part: &u32| std::cmp::Reverse(peak[*part as usize] - stays[*part as usize]);
        before[node].sort_by_key(first);
        let (mut live, mut most) = (0_u64, 0_u64);
        for part in before[node].iter().map(|part| *part as usize) {
            most = most.max(live.saturating_add(peak[part]));
            live = live.saturating_add(stays[part]);
        }
        for storage in view.storages[node].iter().map(|storage| *storage as usize) {
            let memory = &view.memory[storage];
            if !std::mem::replace(&mut is_made[storage], true) && !memory.is_there {
                live = live.saturating_add(memory.bytes);
                stays[node] += if memory.users.len() > 1 || memory.stays { memory.bytes } else { 0 };
            }
        }
        peak[node] = most.max(live.saturating_add(view.workspace[node]));
    }
    let mut ends: Vec<u32> = view.given.iter().copied().filter(|node| view.next[*node as usize].is_empty()).collect();
    ends.sort_by_key(|node| std::cmp::Reverse(peak[*node as usize] - stays[*node as usize]));
    whole(&before, &ends)
}

/// A stretch of a walk, from where little is live to where little is again.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    /// The most that is live in it, beside what is before it.
    hill: i64,
    /// What more is live behind it.
    change: i64,
    /// Its first and its last operator.
    ends: [u32; 2],
}

/// Parts in turn: of all stretches of the parts that an operator waits for first those that go up most and come down most. Nothing where that takes too much work: each operator may have all
/// stretches of those before it.
fn by_valleys(view: &View, work: &mut Work) -> Option<Vec<u32>> {
    let len = view.len();
    // As in the order that is given: who makes what, and after whom it goes.
    let (mut hill, mut change) = (vec![0_i64; len], vec![0_i64; len]);
    let mut left: Vec<usize> = view.memory.iter().map(|memory| memory.users.len()).collect();
    for node in view.given.iter().map(|node| *node as usize) {
        hill[node] = view.workspace[node].cast_signed();
        for storage in view.storages[node].iter().map(|storage| *storage as usize) {
            let (memory, bytes) = (&view.memory[storage], view.memory[storage].bytes.cast_signed());
            if left[storage] == memory.users.len() && !memory.is_there {
                hill[node] += bytes;
                change[node] += bytes;
            }
            left[storage] -= 1;
            if left[storage] == 0 && !memory.stays {
                change[node] -= bytes;
            }
        }
    }
    // Who comes behind whom in a stretch, and the stretches of each part.
    let mut behind = vec![u32::MAX; len];
    let mut parts: Vec<Vec<Stretch>> = vec![Vec::new(); len];
    let mut all: Vec<Stretch> = Vec::new();
    for node in view.given.iter().copied() {
        // A part belongs to the first that waits for it.
        let before = view.before[node as usize].iter().map(|part| std::mem::take(&mut parts[*part as usize]));
        let mut stretches: Vec<Stretch> = before.flatten().collect();
        let looks = view.before[node as usize].len() + view.storages[node as usize].len() + stretches.len();
        if !work.take(1 + looks as u64) {
            return None;
        }
        in_turn(&mut stretches);
        stretches.push(Stretch { hill: hill[node as usize], change: change[node as usize], ends: [node; 2] });
        parts[node as usize] = joined(&stretches, &mut behind);
        if view.next[node as usize].is_empty() {
            all.append(&mut parts[node as usize]);
        }
    }
    in_turn(&mut all);
    let mut order = Vec::with_capacity(len);
    for Stretch { ends: [first, last], .. } in all {
        let mut at = first;
        order.push(at);
        while at != last {
            at = behind[at as usize];
            order.push(at);
        }
    }
    Some(whole(&view.before, &order))
}

/// Those that come down most from their hill first, of one part in their order.
fn in_turn(stretches: &mut [Stretch]) {
    stretches.sort_by_key(|stretch| std::cmp::Reverse(stretch.hill - stretch.change));
}

/// The same walk in as few stretches as can be: each goes to the highest hill that is left, and down to the lowest valley behind it.
fn joined(stretches: &[Stretch], behind: &mut [u32]) -> Vec<Stretch> {
    let mut levels = Vec::with_capacity(stretches.len());
    let mut live = 0;
    for stretch in stretches {
        levels.push((live + stretch.hill, live + stretch.change));
        live += stretch.change;
    }
    // From each on: the last of the highest hills, and of the lowest valleys.
    let (mut highest, mut lowest) = (vec![0; levels.len()], vec![0; levels.len()]);
    for at in (0..levels.len()).rev() {
        let after = (at + 1).min(levels.len() - 1);
        highest[at] = if at < after && levels[highest[after]].0 >= levels[at].0 { highest[after] } else { at };
        lowest[at] = if at < after && levels[lowest[after]].1 <= levels[at].1 { lowest[after] } else { at };
    }
    let (mut joined, mut base, mut from) = (Vec::new(), 0, 0);
    while from < levels.len() {
        let top = highest[from];
        let to = lowest[top];
        for pair in stretches[from..=to].windows(2) {
            behind[pair[0].ends[1] as usize] = pair[1].ends[0];
        }
        let ends = [stretches[from].ends[0], stretches[to].ends[1]];
        joined.push(Stretch { hill: levels[top].0 - base, change: levels[to].1 - base, ends });
        (base, from) = (levels[to].1, to + 1);
    }
    joined
}

/// Operators as wanted, each after all that it waits for, in the order in which that is said.
fn whole(before: &[Vec<u32>], wanted: &[u32]) -> Vec<u32> {
    let (mut order, mut is_begun) = (Vec::with_capacity(before.len()), vec![false; before.len()]);
    // From those that are open to all that they wait for, and back.
    let mut open: Vec<(u32, usize)> = Vec::new();
    for node in wanted {
        if !std::mem::replace(&mut is_begun[*node as usize], true) {
            open.push((*node, 0));
        }
        while let Some((node, at)) = open.last_mut() {
            match before[*node as usize].get(*at) {
                Some(part) => {
                    *at += 1;
                    if !std::mem::replace(&mut is_begun[*part as usize], true) {
                        open.push((*part, 0));
                    }
                }
                None => {
                    order.push(*node);
                    open.pop();
                }
            }
        }
    }
    order
}
