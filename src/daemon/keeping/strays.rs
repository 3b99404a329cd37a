//! Keepers of before, as long as they may hold anything.
//!
//! Invariant: none of them that the next daemon could find is told to let go of anything, or ended, before another has everything.

use std::time::Duration;

use crate::clock::{Clock as _, SystemClock};
use crate::ids::ChunkId;
use crate::keeper::Link;
use crate::keeper::link::has_ended;
use crate::wire::peer::Peer;

/// One that is told to let go has done so within this, or does not do what it is told.
const LET_GO_MAX: Duration = Duration::from_secs(10);

/// One that has lost its place, and is beside a daemon, has let go of everything by itself within this.
const LET_GO_BY_ITSELF: Duration = Duration::from_secs(20);

/// How one ends that another has been found for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It is told to let go of everything: whoever has started it may wait for its end, and does not find it killed.
    Told,
    /// It does not do what it is told, or nobody waits for it.
    Killed,
}

/// A keeper that is none any more, and goes on with what it holds.
#[derive(Debug)]
struct Stray {
    link: Link,
    process: Peer,
    /// Chunks up to this one may be among it.
    last: ChunkId,
    end: End,
    /// The next daemon finds it, or might: until another has everything it is worth what it holds.
    is_needed: bool,
    /// Somebody else has started it: it goes on, and is found anew, where it has hung up.
    stays: bool,
    /// A clock that began when it was first to end.
    ending: Option<SystemClock>,
    was_told: bool,
    was_killed: bool,
    has_hung_up: bool,
    /// That it cannot be was said.
    is_said: bool,
}

impl Stray {
    /// It has gone, with everything. Waits for nothing.
    fn has_gone(&self) -> bool {
        self.process.pidfd.as_ref().is_some_and(has_ended)
    }

    /// Ends it, now that another has everything, and says whether it holds nothing any more. Waits for nothing.
    fn is_over(&mut self) -> bool {
        if self.ending.get_or_insert_with(SystemClock::new).now() >= LET_GO_MAX {
            self.end = End::Killed;
        }
        if self.end == End::Killed && !self.was_killed {
            // One that could not be killed for want of a descriptor can be a moment later.
            self.was_killed = self.link.say_kill();
            if !self.was_killed && !std::mem::replace(&mut self.is_said, true) {
                tracing::error!(
                    pid = self.process.pid,
                    "a keeper of before cannot be ended from here (it may be in another pid namespace): what it should let go of is not free until it does or ends"
                );
            }
        }
        // One that is behind may read again.
        if !self.was_told && !self.link.is_behind() {
            self.was_told = self.link.say_end().is_ok();
        }
        let (has_ended, has_hung_up) = self.link.hear_end();
        self.has_hung_up |= has_hung_up;
        if has_hung_up && !self.stays {
            // There is nothing more to hear, and it may not have heard.
            self.end = End::Killed;
        }
        // Where its end cannot be seen that is all there is to know; one that goes on lets go by itself, or is called again before.
        let is_long = !self.stays || self.ending.as_ref().is_some_and(|since| since.now() >= LET_GO_BY_ITSELF);
        has_ended || has_hung_up && self.process.pidfd.is_none() && is_long
    }

    /// It has not heard that it is to end, perhaps, and may hear it where it listens anew.
    fn is_out_of_hearing(&self) -> bool {
        self.has_hung_up && self.stays && !self.has_gone()
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Strays(Vec<Stray>);

impl Strays {
    /// One more: chunks up to `last` may be among what it holds. Its process has been asked anew, perhaps, and did first what it was told before.
    pub(super) fn note(&mut self, link: Link, last: ChunkId, end: End, is_needed: bool, stays: bool) {
        self.forget(&link);
        let process = link.process();
        self.0.push(Stray {
            link,
            process,
            last,
            end,
            is_needed,
            stays,
            ending: None,
            was_told: false,
            was_killed: false,
            has_hung_up: false,
            is_said: false,
        });
    }

    /// This process holds what it should, and nothing else.
    pub(super) fn forget(&mut self, link: &Link) {
        self.0.retain(|stray| !stray.link.is_same(link));
    }

    /// Somebody is to be asked anew ([`Strays::hear_again`]).
    pub(super) fn any_out_of_hearing(&self) -> bool {
        self.0.iter().any(Stray::is_out_of_hearing)
    }

    /// A keeper that listens has been called: where it is one of those that had hung up it is told over this.
    pub(super) fn hear_again(&mut self, link: Link) {
        let stray = self.0.iter_mut().find(|stray| stray.is_out_of_hearing() && stray.link.is_same(&link));
        if let Some(stray) = stray {
            (stray.link, stray.has_hung_up, stray.was_told) = (link, false, false);
        }
    }

    /// Hears of all, and ends them where another `has_everything`. Those that hold nothing any more are none.
    pub(super) fn hear(&mut self, has_everything: bool) {
        let over =
            self.0.extract_if(.., |stray| stray.has_gone() || (has_everything || !stray.is_needed) && stray.is_over());
        for stray in over {
            tracing::info!(pid = stray.process.pid, "a keeper of before holds nothing any more");
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One of them may hold this chunk: numbers grow, so that whatever was created since is not theirs.
    pub(super) fn may_hold(&self, chunk: ChunkId) -> bool {
        self.0.iter().any(|stray| chunk <= stray.last)
    }
}
