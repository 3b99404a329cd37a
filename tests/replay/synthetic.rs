//! Plans that are made while a job runs, on synthetic jobs: they must not cost it memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use stitchd::replay::{AutoOptions, PoolName, Setup};
use stitchd::trace::{Trace, csv};

use super::production::{run, setup};

/// Two jobs of each of 45 kinds hold about as much with such plans as without. Their contexts end with the
/// recording, as those of PyTorch do.
#[test]
fn plans_that_are_made_while_a_job_runs_cost_little_memory() {
    const JOBS: usize = 90;
    let directory = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/synthetic/make.py");
    let made = Command::new("python3")
        .args([&script, Path::new("--all"), directory.path(), Path::new("--seeds"), Path::new("0,1")])
        .output();
    let Ok(made) = made else { return println!("SKIP: python3 cannot be started") };
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let entries = std::fs::read_dir(directory.path()).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert_eq!(paths.len(), JOBS);
    let auto = AutoOptions { contexts_end: true, ..AutoOptions::default() };
    let (mut sum, mut planned) = (0.0, 0);
    for path in paths {
        let job = csv::read_file(&path).unwrap();
        let without = run(PoolName::Stitchd, &job, None, &setup(false));
        let with = run(PoolName::Stitchd, &job, None, &Setup { auto, ..setup(true) });
        let name = path.file_stem().unwrap().display();
        let ratio = with.peak_reserved.get() as f64 / without.peak_reserved.get() as f64;
        planned += usize::from(with.more.auto.as_ref().is_some_and(|auto| auto.installed > 0));
        sum += ratio;
        if ratio > 1.0 {
            println!("{name}: {ratio:.4} times as much with plans");
        }
        assert!(ratio <= 1.02, "{name}: {ratio}");
    }
    let mean = sum / JOBS as f64;
    println!("mean {mean:.4}, {planned} of {JOBS} jobs have plans");
    assert!(mean <= 1.001 && planned * 2 > JOBS, "{mean}, {planned}");
}

/// A job that gathers the weights of each layer on a second stream, and scatters gradients there; each
/// iteration of a length of its own, in hundredths.
struct Gathering {
    rows: String,
    tick: u64,
    allocations: u64,
}

impl Gathering {
    const LAYERS: u64 = 24;

    fn row(&mut self, event: &str, id: u64, bytes: u64, at: (u64, usize, &str, u64)) {
        let (stream, iteration, phase, layer) = at;
        let row = format!("{},{event},{id},{bytes},{stream},{iteration},{phase},,,layers.{layer},0\n", self.tick);
        self.rows.push_str(&row);
        self.tick += 1;
    }

    fn alloc(&mut self, bytes: u64, at: (u64, usize, &str, u64)) -> u64 {
        self.allocations += 1;
        self.row("alloc", self.allocations, bytes, at);
        self.allocations
    }

    fn iteration(&mut self, number: usize, length: u64) {
        let mib = |hundredths: u64| ((hundredths * length) << 20) / 100;
        let mut saved = Vec::new();
        for layer in 0..Gathering::LAYERS {
            let at = |stream| (stream, number, "forward", layer);
            let weights = self.alloc(96 << 20, at(1));
            let work = self.alloc(mib(60), at(0));
            saved.push(self.alloc(mib(30) + 512 * layer, at(0)));
            self.row("free", work, 0, at(0));
            self.row("free", weights, 0, at(1));
        }
        for layer in (0..Gathering::LAYERS).rev() {
            let at = |stream| (stream, number, "backward", layer);
            let (weights, work) = (self.alloc(96 << 20, at(1)), self.alloc(mib(80), at(0)));
            let scattered = self.alloc(mib(96), at(1));
            self.row("free", work, 0, at(0));
            self.row("free", saved.pop().unwrap(), 0, at(0));
            self.row("free", weights, 0, at(1));
            self.row("free", scattered, 0, at(1));
        }
    }

    fn trace(lengths: &[u64]) -> Trace {
        let head = "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic\n";
        let mut job = Gathering { rows: head.to_owned(), tick: 0, allocations: 0 };
        for layer in 0..Gathering::LAYERS {
            job.alloc(40 << 20, (0, 0, "init", layer));
        }
        lengths.iter().enumerate().for_each(|(number, length)| job.iteration(number, *length));
        csv::read(job.rows.as_bytes()).unwrap()
    }
}

/// A plan of several streams, that other lengths come on top of.
#[test]
fn a_job_of_several_streams_that_leaves_its_plan_holds_no_more_than_without_one() {
    let auto = AutoOptions { contexts_end: true, ..AutoOptions::default() };
    let of = |parts: &[(usize, u64)]| -> Vec<u64> {
        parts.iter().flat_map(|(count, length)| std::iter::repeat_n(*length, *count)).collect()
    };
    let alternating: Vec<u64> = of(&[(2, 100)]).into_iter().chain([70, 100].repeat(6)).collect();
    for (name, lengths) in [
        ("one is shorter", of(&[(10, 100), (1, 70), (5, 100)])),
        ("longer from then on", of(&[(10, 100), (8, 140)])),
        ("shorter from then on", of(&[(10, 100), (8, 60)])),
        ("now longer, now shorter", alternating),
    ] {
        let job = Gathering::trace(&lengths);
        let without = run(PoolName::Stitchd, &job, None, &setup(false));
        let with = run(PoolName::Stitchd, &job, None, &Setup { auto, ..setup(true) });
        let ratio = with.peak_reserved.get() as f64 / without.peak_reserved.get() as f64;
        println!("{name}: {ratio:.4} times what it takes without a plan");
        assert_eq!(with.more.auto.as_ref().unwrap().installed, 1, "{name}");
        assert!(ratio <= 1.01, "{name}: {ratio}");
    }
}
