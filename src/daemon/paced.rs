//! Pages that take long to make, for anybody who reaches the port: one is made at a time, for all who wait for it, on a thread that serves nobody else, and after each there is a rest of as long as it took.
//! So whoever looks as often as they can takes no more than half of a core, and no request for memory waits behind them.
//!
//! Not for: what is on the pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, IntoResponseParts, Response};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::clock::Clock;

/// A page as an answer.
pub(super) fn answer(headers: impl IntoResponseParts, page: Option<Bytes>) -> Response {
    match page {
        Some(page) => (headers, page).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n").into_response(),
    }
}

/// Which page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Page {
    /// Metrics as Prometheus text.
    Text,
    /// Metrics as OpenMetrics.
    OpenMetrics,
    /// The figures of the live page.
    Live,
}

const PAGES: usize = 3;

/// See above.
#[derive(Debug)]
pub(super) struct Paced {
    /// How many have asked, and how many of them wait.
    asked: AtomicU64,
    waiting: AtomicU64,
    last: Arc<Mutex<Last>>,
    clock: Arc<dyn Clock>,
}

/// What was made last, as far as somebody may still wait for it.
#[derive(Debug, Default)]
struct Last {
    /// The page, and how many had asked when it was begun.
    made: [Option<(u64, Bytes)>; PAGES],
    /// When the next one may be begun.
    rested: Duration,
}

impl Paced {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Paced {
        Paced { asked: AtomicU64::new(0), waiting: AtomicU64::new(0), last: Arc::default(), clock }
    }

    /// The page as it is now or will be in a moment, never as it was before; nothing where the daemon ends meanwhile.
    pub(super) async fn get(&self, page: Page, make: impl FnOnce() -> String + Send + 'static) -> Option<Bytes> {
        let _waits = Waits::at(&self.waiting);
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((begun, made)) = &last.made[page as usize]
            && *begun >= number
        {
            let made = made.clone();
            self.forget(last);
            return Some(made);
        }
        tokio::time::sleep(last.rested.saturating_sub(self.clock.now())).await;
        let begun = self.asked.load(Ordering::Relaxed);
        let clock = Arc::clone(&self.clock);
        // The thread has the lock, also where nobody waits any more: there is no second one before it is done.
        let made = tokio::task::spawn_blocking(move || {
            let from = clock.now();
            let made = Bytes::from(make());
            let to = clock.now();
            last.rested = to + to.saturating_sub(from);
            last.made[page as usize] = Some((begun, made.clone()));
            (last, made)
        });
        let (last, made) = made.await.ok()?;
        self.forget(last);
        Some(made)
    }

    /// A page that nobody waits for takes no memory.
    fn forget(&self, mut last: OwnedMutexGuard<Last>) {
        if self.waiting.load(Ordering::Relaxed) == 1 {
            last.made = Default::default();
        }
    }
}

/// Somebody who waits for a page, until he has it or has gone.
struct Waits<'a>(&'a AtomicU64);

impl Waits<'_> {
    fn at(waiting: &AtomicU64) -> Waits<'_> {
        waiting.fetch_add(1, Ordering::Relaxed);
        Waits(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::clock::SystemClock;

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
        let first = paced.get(Page::Text, {
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
            tokio::join!(get(Page::Text), get(Page::Text), get(Page::Live), get(Page::Text), async {
                goes_on.send(()).unwrap();
            })
        };
        let (first, others) = tokio::join!(first, others);
        let said = [first, others.0, others.1, others.3, others.2].map(Option::unwrap);
        assert_eq!(said, ["0", "1", "1", "1", "2"], "the page of the live figures is another");
        assert!(paced.last.lock().await.made.iter().all(Option::is_none), "nobody waits");
    }

    #[tokio::test]
    async fn of_those_who_ask_and_go_none_has_a_page_made_beside_another() {
        let (paced, at_once) = (paced(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..8 {
            let at_once = Arc::clone(&at_once);
            let asks = paced.get(Page::Text, move || {
                assert_eq!(at_once.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                std::thread::sleep(Duration::from_millis(10));
                at_once.fetch_sub(1, Ordering::SeqCst);
                String::new()
            });
            let _ = tokio::time::timeout(Duration::from_millis(2), asks).await;
        }
        assert_eq!(paced.get(Page::Text, || "last".into()).await.unwrap(), "last");
    }
}
