//! Timing for benches: subject and floor in turns, so that both meet the same machine, and the median of each.

use std::hint::black_box;
use std::time::Duration;

use stitchd::clock::{Clock as _, SystemClock};

/// One measurement beside its floor.
pub(crate) struct Compared {
    /// What is measured.
    pub(crate) name: String,
    /// Median, in nanoseconds per operation.
    pub(crate) nanos: f64,
    /// The same of the floor.
    pub(crate) floor: f64,
    /// What 99 of 100 rounds stay below.
    pub(crate) p99: f64,
    /// The same of the floor.
    pub(crate) floor_p99: f64,
}

impl Compared {
    /// How often the floor fits in.
    pub(crate) fn ratio(&self) -> f64 {
        self.nanos / self.floor
    }
}

/// Runs `subject` and `floor` in turns; each says how long it took for how many operations. The first round of both is not counted.
pub(crate) fn compare(
    name: impl Into<String>,
    rounds: usize,
    mut subject: impl FnMut() -> (Duration, u64),
    mut floor: impl FnMut() -> (Duration, u64),
) -> Compared {
    let per_operation = |(time, operations): (Duration, u64)| time.as_nanos() as f64 / operations as f64;
    let (mut subjects, mut floors) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (one, other) = (per_operation(subject()), per_operation(floor()));
        if round > 0 {
            subjects.push(one);
            floors.push(other);
        }
    }
    subjects.sort_by(f64::total_cmp);
    floors.sort_by(f64::total_cmp);
    Compared {
        name: name.into(),
        nanos: subjects[subjects.len() / 2],
        floor: floors[floors.len() / 2],
        p99: subjects[(subjects.len() - 1) * 99 / 100],
        floor_p99: floors[(floors.len() - 1) * 99 / 100],
    }
}

/// Words on the command line choose: all of them must be in the name.
pub(crate) fn is_wanted(name: &str) -> bool {
    std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).all(|word| name.contains(&word))
}

/// How long `work` takes.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let clock = SystemClock::new();
    let started = clock.now();
    black_box(work());
    clock.now() - started
}

/// One line per measurement, or with `--json` one object.
pub(crate) fn print(unit: (&str, f64), compared: &[Compared]) {
    let (unit, scale) = unit;
    if std::env::args().any(|argument| argument == "--json") {
        let rows: Vec<_> = compared
            .iter()
            .map(|row| {
                serde_json::json!({
                    "name": row.name, "ns": row.nanos, "floor_ns": row.floor, "ratio": row.ratio(),
                    "p99_ns": row.p99, "floor_p99_ns": row.floor_p99,
                })
            })
            .collect();
        println!("{}", serde_json::json!({ "measurements": rows }));
        return;
    }
    println!("{:<48} {:>10} {:>10} {:>7} {:>10} {:>10}", "", unit, "floor", "ratio", "p99", "floor p99");
    for row in compared {
        println!(
            "{:<48} {:>10.1} {:>10.1} {:>6.2}x {:>10.1} {:>10.1}",
            row.name,
            row.nanos / scale,
            row.floor / scale,
            row.ratio(),
            row.p99 / scale,
            row.floor_p99 / scale
        );
    }
}
