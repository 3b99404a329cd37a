//! Pages that take long to make, for anybody who reaches the port: one is made at a time, for all who wait for it, on a thread that serves nobody else, and after each there is a rest of as long as it took.
//! So whoever looks as often as they can takes no more than half of a core, and no request for memory waits behind them.
//!
//! Not for: what is on the pages.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, IntoResponseParts, Response};
use tokio::sync::Mutex as AsyncMutex;

use super::metrics::Format;
use crate::clock::Clock;

/// A page as an answer.
pub(super) fn answer(headers: impl IntoResponseParts, page: Option<Bytes>) -> Response {
    match page {
        Some(page) => (headers, page).into_response(),
        None => {
            let text = "there is no page: the daemon ends, or has a bug, which its log tells of\n";
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        }
    }
}

/// Which page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Page {
    Metrics(Format),
    /// The figures of the live page.
    Live,
}

impl Page {
    fn at(self) -> usize {
        match self {
            Page::Metrics(Format::Text) => 0,
            Page::Metrics(Format::OpenMetrics) => 1,
            Page::Live => 2,
        }
    }
}

const PAGES: usize = 3;
/// Where more than so many wait the page that was made last is good enough: who waited would be in the way of others, as there are only so many connections.
const WAITING_MAX: u64 = 8;

/// See above.
#[derive(Debug)]
pub(super) struct Paced {
    /// How many have asked.
    asked: AtomicU64,
    shown: Arc<Shown>,
    /// Who has it makes a page; until then it rests.
    rests_until: Arc<AsyncMutex<Duration>>,
    clock: Arc<dyn Clock>,
}

/// Pages that were made last, while somebody waits: how many had asked when each was begun.
#[derive(Debug, Default)]
struct Shown {
    waiting: AtomicU64,
    pages: Mutex<[Option<(u64, Bytes)>; PAGES]>,
}

impl Shown {
    fn pages(&self) -> MutexGuard<'_, [Option<(u64, Bytes)>; PAGES]> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was begun when so many had asked, or later.
    fn since(&self, page: Page, number: u64) -> Option<Bytes> {
        self.pages()[page.at()].as_ref().filter(|(begun, _)| *begun >= number).map(|(_, made)| made.clone())
    }

    fn show(&self, page: Page, begun: u64, made: Bytes) {
        let mut pages = self.pages();
        if self.waiting.load(Ordering::SeqCst) > 0 {
            pages[page.at()] = Some((begun, made));
        }
    }
}

/// Somebody who waits for a page, until he has it or has gone. With the last of them what was made takes no memory any more.
struct Waits(Arc<Shown>);

impl Waits {
    fn at(shown: &Arc<Shown>) -> Waits {
        shown.waiting.fetch_add(1, Ordering::SeqCst);
        Waits(Arc::clone(shown))
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let mut pages = self.0.pages();
        if self.0.waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
            *pages = Default::default();
        }
    }
}

impl Paced {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Paced {
        Paced { asked: AtomicU64::new(0), shown: Arc::default(), rests_until: Arc::default(), clock }
    }

    /// The page as it is now or will be in a moment, and where many ask at once as it was a moment ago; nothing where it cannot be made.
    pub(super) async fn get(&self, page: Page, make: impl FnOnce() -> String + Send + 'static) -> Option<Bytes> {
        let _waits = Waits::at(&self.shown);
        let number = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        if self.shown.waiting.load(Ordering::SeqCst) > WAITING_MAX
            && let Some(made) = self.shown.since(page, 0)
        {
            return Some(made);
        }
        let mut rests_until = Arc::clone(&self.rests_until).lock_owned().await;
        if let Some(made) = self.shown.since(page, number) {
            return Some(made);
        }
        let rest = rests_until.saturating_sub(self.clock.now());
        // A timer takes a millisecond, however short it is.
        if !rest.is_zero() {
            tokio::time::sleep(rest).await;
        }
        let begun = self.asked.load(Ordering::SeqCst);
        let (clock, shown) = (Arc::clone(&self.clock), Arc::clone(&self.shown));
        // The thread has the lock, also where nobody waits any more: there is no second one before it is done.
        let made = tokio::task::spawn_blocking(move || {
            let from = clock.now();
            let made = std::panic::catch_unwind(AssertUnwindSafe(make)).ok().map(Bytes::from);
            let to = clock.now();
            *rests_until = to + to.saturating_sub(from);
            if let Some(made) = &made {
                shown.show(page, begun, made.clone());
            }
            made
        });
        made.await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::clock::SystemClock;

    const TEXT: Page = Page::Metrics(Format::Text);

    fn paced() -> Paced {
        Paced::new(Arc::new(SystemClock::new()))
    }

    #[tokio::test]
    async fn who_asks_while_a_page_is_made_has_the_next_one_with_all_others_who_do() {
        let (paced, made) = (paced(), Arc::new(AtomicUsize::new(0)));
        let make = || {
            let made = Arc::clone(&made);
            move || made.fetch_add(1, Ordering::Relaxed).to_string()
        };
        let (begins, begun) = tokio::sync::oneshot::channel();
        let (goes_on, waits) = std::sync::mpsc::channel::<()>();
        let first = paced.get(TEXT, {
            let make = make();
            move || {
                begins.send(()).unwrap();
                waits.recv().unwrap();
                make()
            }
        });
        let others = async {
            begun.await.unwrap();
            let get = |page| paced.get(page, make());
            // The last one, when all the others have asked.
            tokio::join!(get(TEXT), get(TEXT), get(Page::Live), get(TEXT), async {
                goes_on.send(()).unwrap();
            })
        };
        let (first, others) = tokio::join!(first, others);
        let said = [first, others.0, others.1, others.3, others.2].map(Option::unwrap);
        assert_eq!(said, ["0", "1", "1", "1", "2"], "the page of the live figures is another");
        assert!(paced.shown.pages().iter().all(Option::is_none), "nobody waits");
    }

    #[tokio::test]
    async fn of_those_who_ask_and_go_none_has_a_page_made_beside_another() {
        let (paced, at_once) = (paced(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..8 {
            let at_once = Arc::clone(&at_once);
            let asks = paced.get(TEXT, move || {
                assert_eq!(at_once.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                std::thread::sleep(Duration::from_millis(10));
                at_once.fetch_sub(1, Ordering::SeqCst);
                String::new()
            });
            let _ = tokio::time::timeout(Duration::from_millis(2), asks).await;
        }
        assert_eq!(paced.get(TEXT, || "last".into()).await.unwrap(), "last");
    }

    #[tokio::test]
    async fn where_many_wait_the_last_page_is_good_enough_and_one_that_cannot_be_made_is_none() {
        let (paced, made) = (Arc::new(paced()), Arc::new(AtomicUsize::new(0)));
        let (goes_on, waits) = std::sync::mpsc::channel::<()>();
        let waits = Arc::new(Mutex::new(waits));
        let ask = || {
            let (paced, made, waits) = (Arc::clone(&paced), Arc::clone(&made), Arc::clone(&waits));
            tokio::spawn(async move {
                let make = move || {
                    waits.lock().unwrap().recv().unwrap();
                    made.fetch_add(1, Ordering::Relaxed).to_string()
                };
                paced.get(TEXT, make).await.unwrap()
            })
        };
        let all: Vec<_> = (0..WAITING_MAX + 3).map(|_| ask()).collect();
        while paced.shown.waiting.load(Ordering::Relaxed) < WAITING_MAX + 3 {
            tokio::task::yield_now().await;
        }
        goes_on.send(()).unwrap();
        while paced.shown.since(TEXT, 0).is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The others wait for the second, which nobody lets go on yet.
        let late = tokio::time::timeout(Duration::from_secs(20), ask()).await.expect("nobody is waited for");
        assert_eq!(late.unwrap(), "0");
        goes_on.send(()).unwrap();
        let mut answers = Vec::new();
        for asked in all {
            answers.push(asked.await.unwrap());
        }
        assert!(answers.iter().all(|answer| answer == "0" || answer == "1"), "{answers:?}");
        assert!(paced.get(TEXT, || panic!("a bug")).await.is_none());
        assert_eq!(paced.get(TEXT, || "again".to_owned()).await.unwrap(), "again");
        assert!(paced.shown.pages().iter().all(Option::is_none), "nobody waits");
    }
}
