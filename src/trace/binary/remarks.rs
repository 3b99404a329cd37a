//! What a recording says of itself: what it lacks, and what was made up to fill it. A block of numbers in a binary trace of version 2.
//!
//! Invariant: each block counts from the beginning of the recording, so that the last one that can be read says it all.

use crate::limits;
use crate::trace::{Ending, Flaw};
use crate::units::{Bytes, counted};

/// What there is to say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Remarks {
    /// Events for which the recorder had no room.
    pub dropped: u64,
    /// Frees that were dropped: made up where the same address was allocated again.
    pub lost_frees: u64,
    /// Events of allocations that are not in the recording; left out.
    pub unknown: u64,
    /// Requests for which there was no memory; as if served, and given back at once.
    pub refused: u64,
    /// The largest of those.
    pub refused_largest: Bytes,
    /// Events whose context could not be kept.
    pub nameless: u64,
    /// Requests that private pools served, as while a graph is captured; left out, with their frees.
    pub private: u64,
    /// Why it goes no further.
    pub stopped: Option<Stopped>,
    /// Where the file was cut: whatever is whole ends before this byte.
    pub cut: Option<u64>,
}

/// Why a recording goes no further than it does, though the job did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stopped {
    /// More events than a trace can have, or than there was to be.
    Events,
    /// More bytes than a file of a recorder may have.
    Length,
    /// More live allocations than a recorder keeps books on.
    Live,
    /// The file took no more.
    File,
}

impl Stopped {
    const ALL: [Stopped; 4] = [Stopped::Events, Stopped::Length, Stopped::Live, Stopped::File];

    /// What to tell people.
    pub fn words(self) -> String {
        match self {
            Stopped::Events => "there are as many events as it may have".to_owned(),
            Stopped::Length => format!("the file is as long as it may be, {}", Bytes::new(limits::RECORD_FILE_LEN_MAX)),
            Stopped::Live => format!("more than {} allocations live at one time", limits::RECORD_LIVE_MAX),
            Stopped::File => "the file took no more".to_owned(),
        }
    }
}

impl Remarks {
    /// The numbers that are not 0, each behind its code; in the order of codes, which never change their meaning.
    pub(super) fn numbers(&self) -> impl Iterator<Item = (u64, u64)> {
        let stopped = self.stopped.map_or(0, |stopped| stopped as u64 + 1);
        let numbers = [
            (1, self.dropped),
            (2, self.lost_frees),
            (3, self.unknown),
            (4, self.refused),
            (5, self.refused_largest.get()),
            (6, self.nameless),
            (7, stopped),
            (8, self.private),
        ];
        numbers.into_iter().filter(|(_, number)| *number != 0)
    }

    /// Takes a number over.
    pub(super) fn note(&mut self, code: u64, number: u64) -> Result<(), Flaw> {
        let wrong = Flaw::Value { what: "there is no such remark" };
        match code {
            1 => self.dropped = number,
            2 => self.lost_frees = number,
            3 => self.unknown = number,
            4 => self.refused = number,
            5 => self.refused_largest = Bytes::new(number),
            6 => self.nameless = number,
            7 => {
                let at = usize::try_from(number.wrapping_sub(1)).unwrap_or(usize::MAX);
                self.stopped = Some(*Stopped::ALL.get(at).ok_or(wrong)?);
            }
            8 => self.private = number,
            _ => return Err(wrong),
        }
        Ok(())
    }

    /// What it says of its end.
    pub fn ending(&self) -> Ending {
        let refused = Some(self.refused_largest).filter(|_| self.refused > 0);
        Ending { refused, is_cut: self.cut.is_some() || self.stopped.is_some() }
    }

    /// A sentence for each.
    pub fn sentences(&self) -> Vec<String> {
        let Remarks { dropped, lost_frees, unknown, refused, refused_largest, nameless, private, stopped, cut } = *self;
        let counts = [
            (
                dropped,
                "event",
                "for which the recorder had no room: allocations among them are missing, and what was freed in them seems live",
            ),
            (lost_frees, "free", "made up where an address was allocated again"),
            (unknown, "event", "left out of allocations that the recording does not have"),
            (nameless, "event", "without a context: it could not be kept"),
            (private, "request", "left out that private pools served, as while a graph is captured: no plan has them"),
        ];
        let counts = counts.into_iter().filter(|(count, ..)| *count > 0);
        let mut sentences: Vec<String> =
            counts.map(|(count, what, why)| format!("{} {why}", counted(count, what))).collect();
        if refused > 0 {
            let refused = counted(refused, "request");
            sentences.push(format!(
                "memory ran out: {refused} refused, the largest of {refused_largest}; in the trace as if served"
            ));
        }
        sentences.extend(stopped.map(|why| format!("the recording stopped: {}", why.words())));
        let is_cut = "its process ended without notice, or still runs; what came last is missing";
        sentences.extend(cut.map(|at| format!("the recording is cut at byte {at}: {is_cut}")));
        sentences
    }
}
