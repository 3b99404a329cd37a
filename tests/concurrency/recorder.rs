//! The ring of a recorder: one puts in, one takes out, and neither waits.

use shuttle::thread;
use stitchd::record::ring::{self, Words};

use crate::in_many_orders;

const COUNT: u64 = 6;

fn record(n: u64) -> Words {
    std::array::from_fn(|at| 100 * n + at as u64)
}

#[test]
fn records_are_whole_and_in_order_and_what_is_missing_is_counted() {
    in_many_orders(|| {
        let (mut inlet, mut outlet) = ring::ring(2);
        let writer = thread::spawn(move || (0..COUNT).for_each(|n| inlet.put(&record(n))));
        let mut taken: Vec<u64> = Vec::new();
        loop {
            // Before the last look: what was put in before the end is seen.
            let is_over = outlet.is_ended();
            while let Some(words) = outlet.take() {
                let n = words[0] / 100;
                assert_eq!(words, record(n));
                assert!(taken.last().is_none_or(|last| *last < n), "{n} after {taken:?}");
                taken.push(n);
            }
            if is_over {
                break;
            }
            thread::yield_now();
        }
        writer.join().unwrap();
        assert_eq!(taken.len() as u64 + outlet.dropped(), COUNT);
        assert!(taken.starts_with(&[0, 1]), "there was room for two: {taken:?}");
    });
}

#[test]
fn after_the_end_of_who_takes_nobody_waits_and_nothing_is_counted() {
    in_many_orders(|| {
        let (mut inlet, mut outlet) = ring::ring(2);
        let reader = thread::spawn(move || {
            let first = outlet.take();
            outlet.close();
            let dropped = outlet.dropped();
            thread::yield_now();
            (first, dropped, outlet.dropped() <= COUNT)
        });
        (0..COUNT).for_each(|n| inlet.put(&record(n)));
        let (first, dropped, is_bounded) = reader.join().unwrap();
        assert!(first.is_none_or(|first| first == record(0)) && dropped <= COUNT && is_bounded);
    });
}
