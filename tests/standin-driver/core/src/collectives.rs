//! The library for collectives (NCCL, RCCL): one thread that stands for all ranks adds bytes up, in a group, each rank on its own device.
//!
//! Codes are that library's own: 1 for a failure of the device, 2 for one of the system, 4 for an argument, 5 for calls that do not go together.

use std::collections::HashMap;

use crate::conf::Collectives;
use crate::process::State;
use crate::{Called, Process, code};

/// What it says its version is.
pub const VERSION: i32 = 22_703;

const DEVICE_ERROR: i32 = 1;
const SYSTEM_ERROR: i32 = 2;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;

/// `ncclUint8` and `ncclSum`: no other is known here.
const BYTES_SUMMED: (i32, i32) = (1, 0);

/// One rank's part.
#[derive(Clone, Copy, Debug)]
pub struct AllReduce {
    /// What it gives.
    pub from: u64,
    /// Where it wants the sum.
    pub to: u64,
    /// Bytes.
    pub len: u64,
    /// On which of its device's streams.
    pub stream: u64,
}

/// What one process has of them.
#[derive(Debug, Default)]
pub(crate) struct Communicators {
    /// By number: of which set, and of which device.
    ranks: HashMap<u64, (u64, usize)>,
    /// What a group has so far.
    group: Option<Vec<(u64, AllReduce)>>,
}

/// What the driver refuses is one failure to this library.
fn failed(_: i32) -> i32 {
    DEVICE_ERROR
}

impl Process {
    fn collectives(&self) -> Called<std::sync::MutexGuard<'_, State>> {
        self.lock().map_err(failed)
    }

    /// A communicator for each of these devices, of which none may come twice.
    pub fn communicators(&self, ordinals: &[i32]) -> Called<Vec<u64>> {
        let devices: Vec<usize> =
            ordinals.iter().map(|ordinal| self.seen(*ordinal)).collect::<Called<_>>().map_err(|_| INVALID_ARGUMENT)?;
        let is_twice = |at: usize| devices[..at].contains(&devices[at]);
        if devices.is_empty() || (0..devices.len()).any(is_twice) {
            return Err(INVALID_USAGE);
        }
        devices.iter().try_for_each(|device| self.check(*device)).map_err(failed)?;
        let mut state = self.collectives()?;
        let set = state.next();
        let number = |device| {
            let number = 0x7d00_0000_0000 | state.next() << 8;
            self.machine().note("communicators-made");
            state.communicators.ranks.insert(number, (set, device));
            number
        };
        Ok(devices.into_iter().map(number).collect())
    }

    /// Ends one.
    pub fn end_communicator(&self, communicator: u64) -> Called<()> {
        self.collectives()?.communicators.ranks.remove(&communicator).map(drop).ok_or(INVALID_ARGUMENT)
    }

    /// What comes until the end of the group is one.
    pub fn group_start(&self) -> Called<()> {
        let mut state = self.collectives()?;
        let begun = state.communicators.group.replace(Vec::new());
        if begun.is_some() { Err(INVALID_USAGE) } else { Ok(()) }
    }

    /// One rank's part, inside a group: without one a single thread would wait for ever for the other ranks.
    pub fn all_reduce(&self, communicator: u64, wanted: AllReduce, kind: (i32, i32)) -> Called<()> {
        let mut state = self.collectives()?;
        let (_, device) = *state.communicators.ranks.get(&communicator).ok_or(INVALID_ARGUMENT)?;
        if kind != BYTES_SUMMED || state.streams.device_of(wanted.stream) != Some(device) {
            return Err(INVALID_ARGUMENT);
        }
        let group = state.communicators.group.as_mut().ok_or(INVALID_USAGE)?;
        group.push((communicator, wanted));
        Ok(())
    }

    /// Does what the group has: every rank of a set, once.
    pub fn group_end(&self) -> Called<()> {
        let mut state = self.collectives()?;
        let group = state.communicators.group.take().ok_or(INVALID_USAGE)?;
        let Some((first, AllReduce { len, .. })) = group.first().copied() else { return Ok(()) };
        let (set, _) = state.communicators.ranks[&first];
        let mut missing: Vec<u64> =
            state.communicators.ranks.iter().filter(|(_, (of, _))| *of == set).map(|(number, _)| *number).collect();
        for (communicator, wanted) in &group {
            let at = missing.iter().position(|number| number == communicator).ok_or(INVALID_USAGE)?;
            missing.swap_remove(at);
            if wanted.len != len {
                return Err(INVALID_ARGUMENT);
            }
        }
        if !missing.is_empty() {
            return Err(INVALID_USAGE);
        }
        match self.machine().conf.collectives {
            // What such a library lacks it looks for with the first collective.
            Collectives::Broken => return Err(SYSTEM_ERROR),
            Collectives::Nothing => return Ok(()),
            _ => {}
        }
        let group: Vec<(usize, AllReduce)> = group
            .into_iter()
            .map(|(communicator, wanted)| (state.communicators.ranks[&communicator].1, wanted))
            .collect();
        let reduced = self.reduce(&mut state, &group, len);
        state.used(reduced).map_err(failed)
    }

    /// Piece by piece: a range may be long. Chunks are whole pieces.
    fn reduce(&self, state: &mut State, group: &[(usize, AllReduce)], len: u64) -> Called<()> {
        const PIECE: u64 = 1 << 20;
        state.pump()?;
        let is_busy = |(device, _): &(usize, AllReduce)| !state.streams.is_idle(*device);
        if group.iter().any(is_busy) {
            // Work that waits would have to be waited for: no test needs that.
            return Err(code::NOT_READY);
        }
        let first = |(_, wanted): &(usize, AllReduce)| state.addresses.until_end_of_mapping(wanted.from);
        let first = group.iter().map(first).collect::<Called<Vec<u64>>>()?.into_iter().fold(len, u64::min);
        let does = self.machine().conf.collectives;
        let len = match does {
            Collectives::Refused if first < len => return Err(code::INVALID_VALUE),
            Collectives::Ends if first < len => std::process::abort(),
            Collectives::FirstChunk => first,
            _ => len,
        };
        for at in (0..len).step_by(PIECE as usize) {
            let piece = PIECE.min(len - at) as usize;
            let read_at = if does == Collectives::FirstChunkAgain { at % first } else { at };
            let mut sums = vec![0_u8; piece];
            let mut bytes = vec![0_u8; piece];
            for (device, wanted) in group {
                state.addresses.read(*device, wanted.from + read_at, &mut bytes)?;
                sums.iter_mut().zip(&bytes).for_each(|(sum, byte)| *sum = sum.wrapping_add(*byte));
            }
            group.iter().try_for_each(|(device, wanted)| state.addresses.write(*device, wanted.to + at, &sums))?;
        }
        Ok(())
    }
}
