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
    Compared { name: name.into(), nanos: median(&mut subjects), floor: median(&mut floors) }
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
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
                serde_json::json!({ "name": row.name, "ns": row.nanos, "floor_ns": row.floor, "ratio": row.ratio() })
            })
            .collect();
        println!("{}", serde_json::json!({ "measurements": rows }));
        return;
    }
    println!("{:<48} {:>10} {:>10} {:>7}", "", unit, "floor", "ratio");
    for row in compared {
        println!("{:<48} {:>10.1} {:>10.1} {:>6.2}x", row.name, row.nanos / scale, row.floor / scale, row.ratio());
    }
}
