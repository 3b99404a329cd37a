//! Plans that are made while a job runs, on synthetic jobs: they must not cost it memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use stitchd::replay::{AutoOptions, PoolName, Setup};

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
        let job = stitchd::trace::csv::read_file(&path).unwrap();
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
