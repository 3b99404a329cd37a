//! Plans as files in a directory, one for each process of a job: a ConfigMap or a volume that every node mounts.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::{Fingerprint, Job, Plan, Position, format};
use crate::error::chain;
use crate::limits;

/// How names of plans end; whatever else is in the directory is no plan.
const SUFFIX: &str = ".plan";

/// What a directory has for a process.
#[derive(Debug, Default)]
pub struct Found {
    /// Its plan, and where that is.
    pub plan: Option<(PathBuf, Plan)>,
    /// There is a plan for such a process, and others of other jobs, or of who knows whom: what it does first tells which is its own ([`find_of`]).
    pub is_of_several_jobs: bool,
    /// A file that is called a plan and cannot be used, and why: the job's own may be meant.
    pub unusable: Option<String>,
}

/// A file that was opened, and how it begins.
struct Opened {
    file: File,
    beginning: Vec<u8>,
    len: u64,
}

impl Opened {
    /// Never waits, whatever it is.
    fn open(path: &Path) -> std::io::Result<Opened> {
        // Whoever opens a pipe waits.
        let mut file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(std::io::Error::other("it is no file"));
        }
        let mut beginning = Vec::with_capacity(format::BEGINNING_LEN);
        (&mut file).take(format::BEGINNING_LEN as u64).read_to_end(&mut beginning)?;
        Ok(Opened { file, beginning, len: metadata.len() })
    }

    /// It is as long as a plan is that begins so: the rest need not be read to know that.
    fn check_len(&self) -> Result<(), String> {
        if self.len > limits::PLAN_FILE_LEN_MAX {
            return Err(format!("it has {} bytes, and a plan at most {}", self.len, limits::PLAN_FILE_LEN_MAX));
        }
        format::check_len(&self.beginning, self.len).map_err(|error| chain(&error))
    }
}

/// Whose plan a file has; and then what is wrong with it, as far as its length and its beginning tell.
fn job_in(path: &Path) -> Result<(Job, Option<String>), String> {
    let opened = Opened::open(path).map_err(|error| error.to_string())?;
    let job = format::job_of(&opened.beginning).map_err(|error| chain(&error))?;
    Ok((job, opened.check_len().err()))
}

/// The plan of one file, or what is wrong with it.
///
/// # Errors
///
/// It cannot be read, or is none.
pub fn read(path: &Path) -> Result<Plan, String> {
    let mut opened = Opened::open(path).map_err(|error| error.to_string())?;
    // What is no plan at all, or of another version, says so below.
    if opened.beginning.len() == format::BEGINNING_LEN {
        opened.check_len()?;
        opened.file.take(limits::PLAN_FILE_LEN_MAX).read_to_end(&mut opened.beginning).map_err(|e| e.to_string())?;
    }
    format::read(&opened.beginning).map_err(|error| chain(&error))
}

/// The plan of a directory for the process `position` of its job: one that was made for it, else one that was made for no process in particular; of several the last by name. Nothing where there is none:
/// nobody has made one yet, perhaps; or where the plans in the directory, whosever they are, are of several jobs. Of all other files `*.plan` only the beginning is read.
///
/// # Errors
///
/// The directory cannot be listed.
pub fn find(directory: &Path, position: Option<Position>) -> std::io::Result<Found> {
    let Fitting { fit, jobs, unusable } = fitting(directory, position)?;
    if !fit.is_empty() && jobs.len() > 1 {
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
    let Fitting { mut fit, unusable, .. } = fitting(directory, position)?;
    fit.retain(|(_, of, _)| *of == job);
    Ok(best(fit, unusable))
}

/// What a directory has for processes at one position.
#[derive(Default)]
struct Fitting {
    /// Plans that may be a process's: how well they fit, of which job and where.
    fit: Vec<(u8, Fingerprint, PathBuf)>,
    /// Of which jobs there are plans, at whatever position; nothing stands for one that nobody can tell.
    jobs: BTreeSet<Option<Fingerprint>>,
    unusable: Option<String>,
}

/// What a directory has, whosever it is.
#[derive(Debug, Default)]
pub struct Listed {
    /// So many plans, as far as their lengths and beginnings tell.
    pub usable: usize,
    /// Files that are called plans and cannot be used, and why.
    pub unusable: Vec<(PathBuf, String)>,
}

/// Looks through a directory before anybody's plan is looked for in it.
///
/// # Errors
///
/// The directory cannot be listed.
pub fn listed(directory: &Path) -> std::io::Result<Listed> {
    let mut listed = Listed::default();
    for path in paths(directory)? {
        match job_in(&path) {
            Ok((_, None)) => listed.usable += 1,
            Ok((_, Some(why))) | Err(why) => listed.unusable.push((path, why)),
        }
    }
    Ok(listed)
}

/// Its files that are called plans, by name.
fn paths(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory)?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    // What Kubernetes keeps beside what is mounted begins with a dot.
    let is_plan = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(SUFFIX) && !name.starts_with('.')
    };
    paths.retain(is_plan);
    paths.sort_unstable();
    Ok(paths)
}

fn fitting(directory: &Path, position: Option<Position>) -> std::io::Result<Fitting> {
    let mut found = Fitting::default();
    for path in paths(directory)? {
        let (job, wrong) = match job_in(&path) {
            Ok((job, wrong)) => (Some(job), wrong),
            Err(why) => (None, Some(why)),
        };
        found.jobs.insert(job.map(|job| job.fingerprint));
        match (job, wrong) {
            (_, Some(why)) => note(&mut found.unusable, &path, &why),
            (Some(job), None) if job.position == position => found.fit.push((1, job.fingerprint, path)),
            (Some(job), None) if job.position.is_none() => found.fit.push((0, job.fingerprint, path)),
            (Some(_) | None, None) => {}
        }
    }
    Ok(found)
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
        // One that fits alone is no better: the others are for other processes of who knows which job.
        let found = find(dir.path(), None).unwrap();
        assert!(found.plan.is_none() && found.is_of_several_jobs);
        // Who has none there has none, whosever they are.
        std::fs::remove_file(dir.path().join("two.plan")).unwrap();
        let found = find(dir.path(), of(1, 4)).unwrap();
        assert!(found.plan.is_none() && !found.is_of_several_jobs);
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
        // What nobody can tell whose it is may be his own.
        let found = find(dir.path(), Position::new(1, 2)).unwrap();
        assert!(found.plan.is_none() && found.is_of_several_jobs && found.unusable.is_some());
        for name in ["broken.plan", "z.plan"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        std::fs::remove_dir(dir.path().join("old.plan")).unwrap();
        // One that is whole at its beginning only: the next best is taken.
        let whole = std::fs::read(dir.path().join("one.plan")).unwrap();
        std::fs::write(dir.path().join("two.plan"), &whole[..whole.len() - 1]).unwrap();
        let found = find(dir.path(), Position::new(1, 2)).unwrap();
        assert!(
            found.plan.unwrap().0.ends_with("one.plan")
                && found.unusable.unwrap().contains("two.plan: the plan should have")
        );
        assert!(find(&dir.path().join("none"), None).is_err());
        // What is far too long is not read, and nobody waits for a pipe.
        let long = dir.path().join("two.plan");
        File::options().write(true).open(&long).unwrap().set_len(limits::PLAN_FILE_LEN_MAX + 1).unwrap();
        assert!(read(&long).unwrap_err().contains("a plan at most"));
        std::fs::write(&long, vec![0; format::BEGINNING_LEN + 1]).unwrap();
        assert!(read(&long).unwrap_err().contains("not a plan file"));
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(read(&pipe), Err("it is no file".to_owned()));
    }
}
