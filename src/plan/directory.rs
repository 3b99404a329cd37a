//! Plans as files in a directory, one for each process of a job: a ConfigMap or a volume that every node mounts.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::{Fingerprint, Job, Plan, Position, format};
use crate::error::chain;

/// How names of plans end; whatever else is in the directory is no plan.
const SUFFIX: &str = ".plan";

/// What a directory has for a process.
#[derive(Debug, Default)]
pub struct Found {
    /// Its plan, and where that is.
    pub plan: Option<(PathBuf, Plan)>,
    /// Plans of several jobs are for such a process: what it does first tells which is its own ([`find_of`]).
    pub is_of_several_jobs: bool,
    /// A file that is called a plan and is none, and why: the job's own may be meant.
    pub unusable: Option<String>,
}

/// Whose plan a file has.
fn job_in(path: &Path) -> Result<Job, String> {
    // Before it is opened: whoever opens a pipe waits.
    if !std::fs::metadata(path).map_err(|error| error.to_string())?.is_file() {
        return Err("it is no file".to_owned());
    }
    let mut beginning = Vec::with_capacity(format::BEGINNING_LEN);
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    file.take(format::BEGINNING_LEN as u64).read_to_end(&mut beginning).map_err(|error| error.to_string())?;
    format::job_of(&beginning).map_err(|error| chain(&error))
}

/// The plan of one file, or what is wrong with it.
///
/// # Errors
///
/// It cannot be read, or is none.
pub fn read(path: &Path) -> Result<Plan, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    format::read(&bytes).map_err(|error| chain(&error))
}

/// The plan of a directory for the process `position` of its job: one that was made for it, else one that was made for no process in particular; of several the last by name. Nothing where there is none:
/// nobody has made one yet, perhaps; or where such plans are of several jobs. Of all other files `*.plan` only the beginning is read.
///
/// # Errors
///
/// The directory cannot be listed.
pub fn find(directory: &Path, position: Option<Position>) -> std::io::Result<Found> {
    let (fit, unusable) = fitting(directory, position)?;
    let mut jobs: Vec<Fingerprint> = fit.iter().map(|(_, job, _)| *job).collect();
    jobs.sort_unstable();
    jobs.dedup();
    if jobs.len() > 1 {
        return Ok(Found { is_of_several_jobs: true, unusable, ..Found::default() });
    }
    Ok(best(fit, unusable))
}

/// The same for a process that does first what `job` says.
///
/// # Errors
///
/// As of [`find`].
pub fn find_of(directory: &Path, position: Option<Position>, job: Fingerprint) -> std::io::Result<Found> {
    let (mut fit, unusable) = fitting(directory, position)?;
    fit.retain(|(_, of, _)| *of == job);
    Ok(best(fit, unusable))
}

/// Plans that may be a process's, with how well they fit, of which job and where; and a file that is none.
type Fitting = (Vec<(u8, Fingerprint, PathBuf)>, Option<String>);

fn fitting(directory: &Path, position: Option<Position>) -> std::io::Result<Fitting> {
    let entries = std::fs::read_dir(directory)?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    // What Kubernetes keeps beside what is mounted begins with a dot.
    let is_plan = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(SUFFIX) && !name.starts_with('.')
    };
    paths.retain(is_plan);
    paths.sort_unstable();
    let (mut fit, mut unusable) = (Vec::new(), None);
    for path in paths {
        match job_in(&path) {
            Ok(job) if job.position == position => fit.push((1, job.fingerprint, path)),
            Ok(job) if job.position.is_none() => fit.push((0, job.fingerprint, path)),
            Ok(_) => {}
            Err(why) => note(&mut unusable, &path, &why),
        }
    }
    Ok((fit, unusable))
}

fn note(unusable: &mut Option<String>, path: &Path, why: &str) {
    unusable.get_or_insert_with(|| format!("{}: {why}", path.display()));
}

/// The best that can be read.
fn best(mut fit: Vec<(u8, Fingerprint, PathBuf)>, mut unusable: Option<String>) -> Found {
    // It is the last.
    fit.sort_by_key(|(rank, ..)| *rank);
    while let Some((.., path)) = fit.pop() {
        match read(&path) {
            Ok(plan) => return Found { plan: Some((path, plan)), unusable, ..Found::default() },
            Err(why) => note(&mut unusable, &path, &why),
        }
    }
    Found { unusable, ..Found::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Job;

    fn write(directory: &Path, name: &str, position: Option<Position>) {
        let plan = Plan { job: Job { position, ..Job::default() }, ..Plan::default() };
        std::fs::write(directory.join(name), format::write(&plan)).unwrap();
    }

    #[test]
    fn each_process_has_its_own_and_who_has_none_has_that_of_all() {
        let dir = tempfile::tempdir().unwrap();
        let chosen = |position| {
            find(dir.path(), position)
                .unwrap()
                .plan
                .map(|(path, _)| path.file_name().unwrap().to_string_lossy().into_owned())
        };
        assert_eq!(chosen(None), None);
        let of = Position::new;
        write(dir.path(), "a-0.plan", of(0, 2));
        write(dir.path(), "a-1.plan", of(1, 2));
        write(dir.path(), "other.plan", of(1, 4));
        assert_eq!(
            [of(0, 2), of(1, 2), of(2, 4), None].map(chosen),
            [Some("a-0.plan".into()), Some("a-1.plan".into()), None, None]
        );
        write(dir.path(), "all.plan", None);
        assert_eq!(
            [of(1, 2), of(2, 4), None].map(chosen),
            [Some("a-1.plan".into()), Some("all.plan".into()), Some("all.plan".into())]
        );
        // The last of several, and nothing that is no plan.
        write(dir.path(), "b-1.plan", of(1, 2));
        write(dir.path(), "..2026.plan", of(1, 2));
        std::fs::create_dir(dir.path().join("..data")).unwrap();
        std::fs::write(dir.path().join("README"), "no plan").unwrap();
        assert_eq!(chosen(of(1, 2)), Some("b-1.plan".into()));
    }

    #[test]
    fn plans_of_several_jobs_are_told_apart_by_what_a_job_does_first() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, job: u64, position| {
            let job = Job { fingerprint: Fingerprint(job), position };
            std::fs::write(dir.path().join(name), format::write(&Plan { job, ..Plan::default() })).unwrap();
        };
        let of = Position::new;
        let chosen = |position, job| {
            let found = find_of(dir.path(), position, Fingerprint(job)).unwrap();
            found.plan.map(|(path, _)| path.file_name().unwrap().to_string_lossy().into_owned())
        };
        write("one-0.plan", 1, of(0, 2));
        write("one-1.plan", 1, of(1, 2));
        assert!(find(dir.path(), of(0, 2)).unwrap().plan.is_some(), "of one job");
        write("two-0.plan", 2, of(0, 2));
        write("two.plan", 2, None);
        let found = find(dir.path(), of(0, 2)).unwrap();
        assert!(found.plan.is_none() && found.is_of_several_jobs);
        assert_eq!(
            [chosen(of(0, 2), 1), chosen(of(0, 2), 2), chosen(of(1, 2), 2), chosen(of(0, 2), 3)],
            [Some("one-0.plan".into()), Some("two-0.plan".into()), Some("two.plan".into()), None]
        );
        // One that is of nobody else's job is taken at once.
        assert!(find(dir.path(), None).unwrap().plan.is_some());
    }

    #[test]
    fn what_cannot_be_read_is_said_and_keeps_nobody_from_his_own() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("broken.plan"), "no plan").unwrap();
        std::fs::create_dir(dir.path().join("old.plan")).unwrap();
        std::os::unix::fs::symlink("/nowhere", dir.path().join("z.plan")).unwrap();
        let found = find(dir.path(), None).unwrap();
        assert!(found.plan.is_none() && found.unusable.unwrap().contains("broken.plan: this is not a plan file"));
        write(dir.path(), "all.plan", None);
        write(dir.path(), "one.plan", Position::new(1, 2));
        // One that is whole at its beginning only: the next best is taken.
        let whole = std::fs::read(dir.path().join("one.plan")).unwrap();
        std::fs::write(dir.path().join("two.plan"), &whole[..whole.len() - 1]).unwrap();
        let found = find(dir.path(), Position::new(1, 2)).unwrap();
        assert!(found.plan.unwrap().0.ends_with("one.plan"));
        assert!(find(&dir.path().join("none"), None).is_err());
    }
}
