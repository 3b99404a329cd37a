//! Ids for allocations that a trace does not have. Not for ids that are used up: no trace has so many events.

use std::collections::HashSet;

use crate::trace::Trace;

/// Ids that no event of a trace has, each of them once.
#[derive(Clone, Debug)]
pub(super) struct FreshIds {
    next: u64,
    /// Those that a file uses, where it has gone so far up that there may be too few above.
    used: HashSet<u64>,
}

impl FreshIds {
    pub(super) fn of(trace: &Trace) -> FreshIds {
        let ids = || trace.events.iter().map(|event| event.id);
        match ids().max().map_or(0, |last| last.saturating_add(1)) {
            next @ 0..ROOM_FROM => FreshIds { next, used: HashSet::new() },
            _ => FreshIds { next: 0, used: ids().collect() },
        }
    }

    pub(super) fn take(&mut self) -> u64 {
        while self.used.contains(&self.next) {
            self.next += 1;
        }
        self.next += 1;
        self.next - 1
    }
}

/// Below this there is room above.
const ROOM_FROM: u64 = 1 << 63;

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(ids: &[u64]) -> Vec<u64> {
        let rows: String = ids.iter().map(|id| format!("0,alloc,{id},1\n")).collect();
        let trace = crate::trace::csv::read(format!("tick,event,id,bytes\n{rows}").as_bytes()).unwrap();
        let mut fresh = FreshIds::of(&trace);
        (0..3).map(|_| fresh.take()).collect()
    }

    #[test]
    fn ids_come_behind_those_of_the_trace_or_between_them_where_there_is_no_room() {
        assert_eq!(taken(&[7, 3]), [8, 9, 10]);
        assert_eq!(taken(&[u64::MAX, 0, 2]), [1, 3, 4]);
        assert_eq!(taken(&[ROOM_FROM - 1]), [0, 1, 2]);
    }
}
