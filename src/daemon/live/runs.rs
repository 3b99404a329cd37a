//! Chunks in a row that are the same to who looks.

use std::collections::BTreeMap;

use crate::ids::DeviceId;
use crate::ledger::{ChunkIs, ChunkView};
use crate::wire::v1;
use v1::chunk_run::State;

/// A device has at most so many: nobody sees more, and a reply has a size.
const RUNS_MAX: usize = 4_096;

/// The runs of each device, in the order of the chunks' numbers.
pub(super) fn of(mut chunks: Vec<ChunkView>) -> BTreeMap<DeviceId, Vec<v1::ChunkRun>> {
    chunks.sort_unstable_by_key(|view| (view.device, view.chunk));
    let by_device = chunks.chunk_by(|one, next| one.device == next.device);
    let runs = |chunks: &[ChunkView]| (chunks[0].device, of_device(chunks));
    by_device.map(runs).collect()
}

fn of_device(chunks: &[ChunkView]) -> Vec<v1::ChunkRun> {
    let runs: Vec<v1::ChunkRun> = chunks.chunk_by(|one, next| one.is == next.is).map(run).collect();
    if runs.len() <= RUNS_MAX {
        return runs;
    }
    // As many chunks together as it takes, each group as what most of its bytes are.
    let together = chunks.len().div_ceil(RUNS_MAX);
    let mut coarse: Vec<v1::ChunkRun> = Vec::new();
    for group in chunks.chunks(together) {
        let mut by_kind: BTreeMap<ChunkIs, u64> = BTreeMap::new();
        group.iter().for_each(|view| *by_kind.entry(view.is).or_default() += view.len.get());
        let most = by_kind.into_iter().max_by_key(|(_, bytes)| *bytes).map_or(group[0].is, |(is, _)| is);
        let all: Vec<ChunkView> = group.iter().map(|view| ChunkView { is: most, ..*view }).collect();
        let next = run(&all);
        match coarse.last_mut() {
            Some(last) if (last.state, last.session_id) == (next.state, next.session_id) => {
                last.len_bytes += next.len_bytes;
                last.chunks += next.chunks;
            }
            _ => coarse.push(next),
        }
    }
    coarse
}

fn run(chunks: &[ChunkView]) -> v1::ChunkRun {
    let (state, session_id) = match chunks[0].is {
        ChunkIs::Creating => (State::Creating, 0),
        ChunkIs::Idle => (State::Idle, 0),
        ChunkIs::Reserved => (State::Reserved, 0),
        ChunkIs::Leased(session) => (State::Leased, session.0),
        ChunkIs::Shared => (State::Shared, 0),
        ChunkIs::Quarantined => (State::Quarantined, 0),
    };
    let len_bytes = chunks.iter().map(|view| view.len.get()).sum();
    v1::ChunkRun { state: state.into(), session_id, len_bytes, chunks: chunks.len() as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ChunkId, SessionId};
    use crate::units::Bytes;

    fn chunk(number: u64, device: u32, is: ChunkIs) -> ChunkView {
        ChunkView { chunk: ChunkId(number), device: DeviceId(device), len: Bytes::mib(2), is }
    }

    #[test]
    fn neighbours_that_are_alike_are_one_run_and_devices_are_apart() {
        let of_one = |number, session| chunk(number, 0, ChunkIs::Leased(SessionId(session)));
        let runs = of(vec![
            of_one(5, 2),
            of_one(1, 1),
            chunk(3, 1, ChunkIs::Idle),
            of_one(2, 1),
            chunk(6, 0, ChunkIs::Shared),
            of_one(4, 1),
        ]);
        let shown = |device| -> Vec<(i32, u64, u64)> {
            runs[&DeviceId(device)].iter().map(|run| (run.state, run.session_id, run.chunks)).collect()
        };
        let leased = State::Leased.into();
        assert_eq!(shown(0), [(leased, 1, 3), (leased, 2, 1), (State::Shared.into(), 0, 1)]);
        assert_eq!(shown(1), [(State::Idle.into(), 0, 1)]);
    }

    #[test]
    fn of_very_many_neighbours_are_put_together_and_no_byte_is_lost() {
        let is =
            |number: u64| if number.is_multiple_of(3) { ChunkIs::Idle } else { ChunkIs::Leased(SessionId(number % 7)) };
        let chunks: Vec<ChunkView> = (0..50_000).map(|number| chunk(number, 0, is(number))).collect();
        let runs = &of(chunks)[&DeviceId(0)];
        assert!(runs.len() <= RUNS_MAX, "{}", runs.len());
        assert_eq!(runs.iter().map(|run| run.len_bytes).sum::<u64>(), Bytes::mib(100_000).get());
        assert_eq!(runs.iter().map(|run| run.chunks).sum::<u64>(), 50_000);
    }
}
