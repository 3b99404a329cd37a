//! Plans as files in a directory, one for each process of a job: a ConfigMap or a volume that every node mounts.

use std::path::{Path, PathBuf};

use super::{Plan, Position, format};
use crate::error::chain;

/// How names of plans end; whatever else is in the directory is no plan.
const SUFFIX: &str = ".plan";

/// Why a directory of plans cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It cannot be listed.
    #[error("cannot list {path}")]
    List {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// None of its plans is for this process, and some could not be read.
    #[error("{path}: {why}")]
    Plan {
        /// The first of those.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

fn read(path: &Path) -> Result<Plan, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    format::read(&bytes).map_err(|error| chain(&error))
}

/// The plan of a directory for the process `position` of its job: one that was made for it, else one that was made for no process in particular; of several the last by name. Nothing where there is none:
/// nobody has made one yet, perhaps. All files `*.plan` are read for that.
///
/// # Errors
///
/// It cannot be listed; or none fits, and one cannot be read.
pub fn find(directory: &Path, position: Option<Position>) -> Result<Option<(PathBuf, Plan)>, DirectoryError> {
    let list = |source| DirectoryError::List { path: directory.to_owned(), source };
    let entries = std::fs::read_dir(directory).map_err(list)?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_, _>>().map_err(list)?;
    // What Kubernetes keeps beside what is mounted begins with a dot.
    let is_plan = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(SUFFIX) && !name.starts_with('.')
    };
    paths.retain(is_plan);
    paths.sort_unstable();
    let (mut found, mut wrong): (Option<(u32, PathBuf, Plan)>, _) = (None, None);
    for path in paths {
        match read(&path) {
            Ok(plan) => {
                let rank = match plan.job.position {
                    of if of == position => 2,
                    None => 1,
                    Some(_) => continue,
                };
                if found.as_ref().is_none_or(|(best, ..)| *best <= rank) {
                    found = Some((rank, path, plan));
                }
            }
            Err(why) => wrong = wrong.or(Some(DirectoryError::Plan { path, why })),
        }
    }
    match (found, wrong) {
        (Some((_, path, plan)), _) => Ok(Some((path, plan))),
        (None, Some(wrong)) => Err(wrong),
        (None, None) => Ok(None),
    }
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
    fn one_that_cannot_be_read_is_named_where_no_other_fits() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("broken.plan"), "no plan").unwrap();
        let said = find(dir.path(), None).unwrap_err().to_string();
        assert!(said.contains("broken.plan") && said.contains("plan file"), "{said}");
        write(dir.path(), "all.plan", None);
        assert!(find(dir.path(), None).unwrap().is_some());
        assert!(matches!(find(&dir.path().join("none"), None), Err(DirectoryError::List { .. })));
    }
}
