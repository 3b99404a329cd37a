//! Idle memory that goes to and fro between the stitching pool and the packed pool.
//!
//! Without a plan each of the two takes from the other what lies idle there before it grows, so together they hold what the job needs at its peak, and no more. Where both want the same chunks in every iteration that never ends, and
//! each move is some driver calls and the loss of what was stitched over them. A little more memory ends it.

use crate::units::Bytes;

/// So much of what is held has to have moved since the last time: what moves while a job begins does not count for much.
const MOVED_PART: u64 = 16;
/// And so many times what would be asked for.
const TIMES: u64 = 4;
/// All that is asked for so is at most so many thousandths of what is held: 1 % for opt-13b, whose moves end with it. (Of it, it takes 0.1 %.)
const SHARE_PER_MILLE: u64 = 10;

/// What has moved, and what was asked for in its place.
#[derive(Debug, Default)]
pub(super) struct BackAndForth {
    moved: Bytes,
    grown: Bytes,
    /// Of `grown`, what nobody knows yet whether it comes.
    asked: Bytes,
}

impl BackAndForth {
    /// So much has moved from one pool to the other, or within one.
    pub(super) fn note_moved(&mut self, bytes: Bytes) {
        self.moved += bytes;
        self.asked = Bytes::ZERO;
    }

    /// There was no memory: what was asked for last did not come.
    pub(super) fn note_refused(&mut self) {
        self.grown -= self.asked;
        self.asked = Bytes::ZERO;
    }

    /// Whether new memory is better than moving so much once more. If so it counts as asked for.
    pub(super) fn rather_grow(&mut self, lacks: Bytes, held: Bytes) -> bool {
        let is_much = self.moved.get() >= (held.get() / MOVED_PART).max(lacks.get().saturating_mul(TIMES));
        let may = u128::from((self.grown + lacks).get()) * 1000 <= u128::from(held.get()) * u128::from(SHARE_PER_MILLE);
        if is_much && may {
            self.moved = Bytes::ZERO;
            self.grown += lacks;
            self.asked = lacks;
        }
        is_much && may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_again_and_again_is_grown_for_within_a_hundredth() {
        let (mut between, held) = (BackAndForth::default(), Bytes::mib(1600));
        assert!(!between.rather_grow(Bytes::mib(2), held));
        between.note_moved(Bytes::mib(99));
        assert!(!between.rather_grow(Bytes::mib(2), held));
        between.note_moved(Bytes::mib(1));
        assert!(!between.rather_grow(Bytes::mib(26), held), "four times that has not moved");
        assert!(between.rather_grow(Bytes::mib(10), held));
        assert!(!between.rather_grow(Bytes::mib(2), held), "the next has to be earned anew");
        between.note_moved(Bytes::mib(1000));
        assert!(!between.rather_grow(Bytes::mib(8), held), "more than a hundredth in all");
        assert!(between.rather_grow(Bytes::mib(6), held));
        between.note_refused();
        between.note_refused();
        between.note_moved(Bytes::mib(1000));
        assert!(between.rather_grow(Bytes::mib(6), held), "what did not come does not count");
    }
}
