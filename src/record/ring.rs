//! A ring of fixed records between the one thread that holds a runtime's lock and the one that writes them down.
//!
//! Not for: what a record means ([`super::tap`] makes them, [`super::transcript`] reads them).
//!
//! Invariant: what comes out is what went in, whole and in order, without what found no room: that is counted. Putting in never waits, never allocates and makes no system call; who
//! takes out wakes up by itself. The numbers in a place are written before `head` passes them, and read before `tail` does.

use std::sync::Arc;

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Numbers in a record.
pub const WORDS: usize = 6;
/// A record as it lies in the ring.
pub type Words = [u64; WORDS];

/// On cache lines of its own: the two sides write different ones.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Apart<T>(T);

#[derive(Debug)]
struct Shared {
    places: Box<[[AtomicU64; WORDS]]>,
    /// Records that were put in, ever.
    head: Apart<AtomicU64>,
    /// Records that were taken out, ever.
    tail: Apart<AtomicU64>,
    /// Records for which there was no room.
    dropped: Apart<AtomicU64>,
    /// Nothing more is put in.
    is_ended: AtomicBool,
    /// Nothing more is taken out.
    is_closed: AtomicBool,
}

impl Shared {
    fn place(&self, at: u64) -> &[AtomicU64; WORDS] {
        // A power of two of them.
        let mask = self.places.len() as u64 - 1;
        &self.places[(at & mask) as usize]
    }
}

/// The side that puts in. There is one.
#[derive(Debug)]
pub struct Inlet {
    shared: Arc<Shared>,
    head: u64,
    /// What was free when it last looked: more may be now.
    free: u64,
}

/// The side that takes out. There is one.
#[derive(Debug)]
pub struct Outlet {
    shared: Arc<Shared>,
    tail: u64,
    head: u64,
}

/// A ring with room for this many records, which is a power of two.
pub fn ring(room: usize) -> (Inlet, Outlet) {
    assert!(room.is_power_of_two(), "places are found by a mask");
    let shared = Arc::new(Shared {
        places: (0..room).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect(),
        head: Apart::default(),
        tail: Apart::default(),
        dropped: Apart::default(),
        is_ended: AtomicBool::new(false),
        is_closed: AtomicBool::new(false),
    });
    let inlet = Inlet { shared: Arc::clone(&shared), head: 0, free: room as u64 };
    (inlet, Outlet { shared, tail: 0, head: 0 })
}

impl Inlet {
    /// Puts a record in, or counts that there is no room.
    #[inline]
    pub fn put(&mut self, words: &Words) {
        if self.free == 0 && !self.has_room() {
            return;
        }
        for (cell, word) in self.shared.place(self.head).iter().zip(words) {
            cell.store(*word, Ordering::Relaxed);
        }
        self.head += 1;
        self.free -= 1;
        self.shared.head.0.store(self.head, Ordering::Release);
    }

    #[cold]
    fn has_room(&mut self) -> bool {
        let taken = self.shared.tail.0.load(Ordering::Acquire);
        self.free = self.shared.places.len() as u64 - (self.head - taken);
        if self.free == 0 && !self.shared.is_closed.load(Ordering::Relaxed) {
            // Not a read-modify-write: there is one writer.
            let dropped = &self.shared.dropped.0;
            dropped.store(dropped.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        self.free > 0
    }
}

impl Drop for Inlet {
    fn drop(&mut self) {
        self.shared.is_ended.store(true, Ordering::Release);
    }
}

impl Outlet {
    /// The next record; `None` where there is none yet.
    pub fn take(&mut self) -> Option<Words> {
        if self.tail == self.head {
            self.head = self.shared.head.0.load(Ordering::Acquire);
            if self.tail == self.head {
                return None;
            }
        }
        let place = self.shared.place(self.tail);
        let words = std::array::from_fn(|at| place[at].load(Ordering::Relaxed));
        self.tail += 1;
        self.shared.tail.0.store(self.tail, Ordering::Release);
        Some(words)
    }

    /// Nothing more will be put in: what can still be taken is all.
    pub fn is_ended(&self) -> bool {
        self.shared.is_ended.load(Ordering::Acquire)
    }

    /// Takes no more: what is put in from now on is nobody's, and is not counted.
    pub fn close(&mut self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
    }

    /// Records for which there was no room.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.0.load(Ordering::Relaxed)
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(n: u64) -> Words {
        std::array::from_fn(|at| n * 10 + at as u64)
    }

    #[test]
    fn records_come_out_in_order_also_around_the_end() {
        let (mut inlet, mut outlet) = ring(4);
        assert_eq!(outlet.take(), None);
        for round in 0..10 {
            (0..3).for_each(|n| inlet.put(&record(3 * round + n)));
            (0..3).for_each(|n| assert_eq!(outlet.take(), Some(record(3 * round + n))));
            assert_eq!((outlet.take(), outlet.dropped()), (None, 0));
        }
        assert!(!outlet.is_ended());
        drop(inlet);
        assert!(outlet.is_ended());
    }

    #[test]
    fn what_finds_no_room_is_counted_and_changes_nothing() {
        let (mut inlet, mut outlet) = ring(4);
        (0..7).for_each(|n| inlet.put(&record(n)));
        assert_eq!((outlet.take(), outlet.dropped()), (Some(record(0)), 3));
        (7..9).for_each(|n| inlet.put(&record(n)));
        let rest: Vec<_> = std::iter::from_fn(|| outlet.take()).collect();
        assert_eq!((rest, outlet.dropped()), ([1, 2, 3, 7].map(record).to_vec(), 4));
        outlet.close();
        (0..9).for_each(|n| inlet.put(&record(n)));
        assert_eq!(outlet.dropped(), 4);
    }

    #[test]
    fn two_threads_lose_nothing_but_what_is_counted() {
        const COUNT: u64 = 200_000;
        let (mut inlet, mut outlet) = ring(64);
        let writer = std::thread::spawn(move || (0..COUNT).for_each(|n| inlet.put(&record(n))));
        let (mut seen, mut last) = (0, None);
        loop {
            let is_over = outlet.is_ended();
            while let Some(words) = outlet.take() {
                assert!(words == record(words[0] / 10) && last < Some(words[0]), "{words:?} after {last:?}");
                (seen, last) = (seen + 1, Some(words[0]));
            }
            if is_over {
                break;
            }
        }
        writer.join().unwrap();
        assert_eq!(seen + outlet.dropped(), COUNT);
    }
}
