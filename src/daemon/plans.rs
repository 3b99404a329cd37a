//! Plans that the daemon stores: for each a file, named by the checksum of its contents, and a note beside it with what people call it and how late it came.
//!
//! Not for: what a plan is good for. Who asks for a job's plan gets the newest, and checks it.
//!
//! Invariant: what [`PlanStore::put`] has answered is there, note and all, whenever the daemon or the machine stops. A file has its name only when it is whole.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dashmap::DashMap;

use crate::error::{ErrorKind, chain};
use crate::ids::PlanId;
use crate::limits;
use crate::plan::format::{self, FormatError};
use crate::plan::{Job, Plan, Position};
use crate::units::Bytes;
use crate::wire::convert::{self, WantedPlans};

/// Bytes of a note that are read: a number and a name.
const NOTE_LEN_MAX: u64 = limits::NAME_LEN_MAX as u64 + 32;
/// Endings of the two files, and of each while it is written.
const PLAN: &str = "plan";
const NOTE: &str = "name";
const DRAFT: &str = "draft";

/// What is known of a stored plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) job: Job,
    pub(super) pool_len: Bytes,
    pub(super) requests: u64,
    /// Bytes of its file.
    len: u64,
    /// How late it came: a newer one has a larger number.
    number: u64,
}

/// The plans in a directory.
#[derive(Debug)]
pub(super) struct PlanStore {
    directory: PathBuf,
    /// Bytes that all may have.
    most: Bytes,
    plans: DashMap<PlanId, Stored>,
    /// The number of the next plan that comes. Whoever writes in the directory has it.
    next: Mutex<u64>,
}

/// Why a plan is not stored, or not found.
#[derive(Debug, thiserror::Error)]
pub enum PlanStoreError {
    /// The directory or a file in it cannot be used.
    #[error("cannot use {path}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no plan.
    #[error("this is no plan that can be used")]
    Format(#[from] FormatError),
    /// It is longer than a plan may be.
    #[error("a plan has at most {max} bytes, and this one {0}", max = limits::GRPC_MESSAGE_LEN_MAX)]
    TooLong(u64),
    /// There is no such plan.
    #[error("there is no plan {}", .0.to_hex())]
    NoPlan(PlanId),
    /// There is none for this job.
    #[error("there is no plan for this job")]
    NoPlanFor,
    /// There are as many as there may be.
    #[error("{} plans are stored, as many as there may be; delete some", limits::PLANS_MAX)]
    Full,
    /// They are as long as they may be.
    #[error("the plans that are stored have {stored} bytes, and may have {most} (plans_max); delete some")]
    FullOfBytes {
        /// Those that are there.
        stored: u64,
        /// As many as there may be.
        most: Bytes,
    },
}

impl PlanStoreError {
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            PlanStoreError::File { .. } => ErrorKind::Broken,
            PlanStoreError::Format(error) => error.kind(),
            PlanStoreError::TooLong(_) => ErrorKind::Invalid,
            PlanStoreError::NoPlan(_) | PlanStoreError::NoPlanFor => ErrorKind::NotFound,
            PlanStoreError::Full | PlanStoreError::FullOfBytes { .. } => ErrorKind::Exhausted,
        }
    }
}

fn file(path: &Path) -> impl FnOnce(io::Error) -> PlanStoreError {
    let path = path.to_owned();
    move |source| PlanStoreError::File { path, source }
}

impl Stored {
    fn of(plan: &Plan, name: String, len: u64, number: u64) -> Stored {
        let requests = plan.entries.len() as u64;
        Stored { name, job: plan.job, pool_len: plan.pool_len, requests, len, number }
    }

    /// Whether it is wanted, and then whether it is for no particular process though one asks.
    fn fits(&self, wanted: &WantedPlans) -> Option<bool> {
        let is_other = |wanted: Option<u32>, has: fn(Position) -> u32| {
            wanted.zip(self.job.position.map(has)).is_some_and(|(wanted, has)| wanted != has)
        };
        let is_wanted = wanted.fingerprint.is_none_or(|wanted| wanted == self.job.fingerprint.0)
            && !is_other(wanted.rank, Position::rank)
            && !is_other(wanted.world_size, Position::world_size);
        is_wanted.then_some(wanted.rank.is_some() && self.job.position.is_none())
    }
}

impl PlanStore {
    /// Opens a directory, made if it is not there. What a crash left half written is removed; other files that are no plans are left alone and said so.
    pub(super) fn open(directory: PathBuf, most: Bytes) -> Result<PlanStore, PlanStoreError> {
        if !directory.is_dir() {
            fs::create_dir_all(&directory).map_err(file(&directory))?;
            let above = directory.parent().filter(|path| !path.as_os_str().is_empty());
            above.map_or(Ok(()), sync_directory)?;
        }
        let store = PlanStore { directory, most, plans: DashMap::new(), next: Mutex::new(0) };
        for entry in fs::read_dir(&store.directory).map_err(file(&store.directory))? {
            let entry = entry.map_err(file(&store.directory))?;
            // What is no file may keep whoever reads it for ever.
            if entry.file_type().map_err(file(&entry.path()))?.is_file() {
                store.find(&entry.path());
            }
        }
        let newest = store.plans.iter().map(|stored| stored.number.saturating_add(1)).max();
        *store.writing() = newest.unwrap_or(0);
        Ok(store)
    }

    /// Takes a file of the directory for what it is.
    fn find(&self, path: &Path) {
        let part = |part: Option<&std::ffi::OsStr>| part.and_then(|part| part.to_str()).unwrap_or_default().to_owned();
        let Some(id) = PlanId::from_hex(&part(path.file_stem())) else { return };
        let extension = part(path.extension());
        let is_left_over = extension.starts_with(DRAFT) || (extension == NOTE && !self.path(id, PLAN).exists());
        if is_left_over && let Err(error) = fs::remove_file(path) {
            tracing::warn!(path = %path.display(), error = %error, "half written, and cannot be removed");
        }
        if extension != PLAN {
            return;
        }
        match self.read(path) {
            Ok((plan, len)) if plan.id() == id => match self.room_for(id, len) {
                Ok(()) => {
                    let (number, name) = read_note(&self.path(id, NOTE));
                    self.plans.insert(id, Stored::of(&plan, name, len, number));
                }
                Err(error) => tracing::warn!(path = %path.display(), error = %chain(&error), "too many; left alone"),
            },
            Ok(_) => tracing::warn!(path = %path.display(), "not the plan that its name says; left alone"),
            Err(error) => tracing::warn!(path = %path.display(), error = %chain(&error), "no plan; left alone"),
        }
    }

    fn read(&self, path: &Path) -> Result<(Plan, u64), PlanStoreError> {
        let bytes = read_at_most(path, limits::GRPC_MESSAGE_LEN_MAX as u64).map_err(file(path))?;
        let len = check_len(&bytes)?;
        Ok((format::read(&bytes)?, len))
    }

    fn path(&self, id: PlanId, extension: &str) -> PathBuf {
        self.directory.join(id.to_hex()).with_extension(extension)
    }

    fn writing(&self) -> MutexGuard<'_, u64> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn room_for(&self, id: PlanId, len: u64) -> Result<(), PlanStoreError> {
        if self.plans.contains_key(&id) {
            return Ok(());
        }
        if self.plans.len() >= limits::PLANS_MAX {
            return Err(PlanStoreError::Full);
        }
        let stored: u64 = self.plans.iter().map(|stored| stored.len).sum();
        if stored.saturating_add(len) > self.most.get() {
            return Err(PlanStoreError::FullOfBytes { stored, most: self.most });
        }
        Ok(())
    }

    /// Stores a plan, if it is one. The same plan twice is the same plan, with the later name, and the newest.
    pub(super) fn put(&self, bytes: &[u8], name: String) -> Result<PlanId, PlanStoreError> {
        let len = check_len(bytes)?;
        let plan = format::read(bytes)?;
        let id = plan.id();
        let mut next = self.writing();
        self.room_for(id, len)?;
        let number = *next;
        self.write(id, NOTE, format!("{number}\n{name}\n").as_bytes())?;
        // Last, so that a plan that is there has its note.
        self.write(id, PLAN, bytes)?;
        sync_directory(&self.directory)?;
        *next = number.saturating_add(1);
        self.plans.insert(id, Stored::of(&plan, name, len, number));
        Ok(id)
    }

    /// Writes a file that is there whole or not at all.
    fn write(&self, id: PlanId, extension: &str, bytes: &[u8]) -> Result<(), PlanStoreError> {
        let (draft, path) = (self.path(id, &format!("{DRAFT}-{extension}")), self.path(id, extension));
        let written = File::create(&draft).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&draft, &path)
        });
        if written.is_err() {
            // It is of no use, and removed when the directory is opened if not now.
            let _ = fs::remove_file(&draft);
        }
        written.map_err(file(&path))
    }

    pub(super) fn get(&self, id: PlanId) -> Result<Vec<u8>, PlanStoreError> {
        if !self.plans.contains_key(&id) {
            return Err(PlanStoreError::NoPlan(id));
        }
        let path = self.path(id, PLAN);
        fs::read(&path).map_err(file(&path))
    }

    /// The best plan for a job: the first that [`PlanStore::list`] gives.
    pub(super) fn best(&self, wanted: &WantedPlans) -> Result<PlanId, PlanStoreError> {
        self.list(wanted).first().map(|(id, _)| *id).ok_or(PlanStoreError::NoPlanFor)
    }

    pub(super) fn stored(&self, id: PlanId) -> Result<Stored, PlanStoreError> {
        self.plans.get(&id).map(|stored| stored.clone()).ok_or(PlanStoreError::NoPlan(id))
    }

    /// Those that are wanted: first those for the process that asks, of them the newest first.
    pub(super) fn list(&self, wanted: &WantedPlans) -> Vec<(PlanId, Stored)> {
        let fits = self.plans.iter().filter_map(|plan| Some((plan.fits(wanted)?, *plan.key(), plan.value().clone())));
        let mut plans: Vec<_> = fits.collect();
        plans.sort_by_key(|(is_for_any, id, stored)| (*is_for_any, std::cmp::Reverse(stored.number), *id));
        plans.into_iter().map(|(_, id, stored)| (id, stored)).collect()
    }

    pub(super) fn delete(&self, id: PlanId) -> Result<(), PlanStoreError> {
        let _writing = self.writing();
        self.stored(id)?;
        let path = self.path(id, PLAN);
        fs::remove_file(&path).or_else(not_there).map_err(file(&path))?;
        self.plans.remove(&id);
        // Without its plan it is nothing, and removed when the directory is opened if not now.
        let _ = fs::remove_file(self.path(id, NOTE));
        sync_directory(&self.directory)
    }
}

fn check_len(bytes: &[u8]) -> Result<u64, PlanStoreError> {
    let len = bytes.len() as u64;
    if len > limits::GRPC_MESSAGE_LEN_MAX as u64 { Err(PlanStoreError::TooLong(len)) } else { Ok(len) }
}

/// One byte more than `most` where there are more.
fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A note: number and name. One that cannot be read says nothing: a plan without a name is still a plan.
fn read_note(path: &Path) -> (u64, String) {
    let bytes = read_at_most(path, NOTE_LEN_MAX).unwrap_or_default();
    let text = String::from_utf8(bytes).unwrap_or_default();
    let mut lines = text.lines();
    let number = lines.next().and_then(|number| number.parse().ok()).unwrap_or(0);
    (number, convert::name("name", lines.next().unwrap_or_default()).unwrap_or_default())
}

fn not_there(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Has the names in a directory outlive the machine's power.
fn sync_directory(path: &Path) -> Result<(), PlanStoreError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(file(path))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::plan::Fingerprint;

    fn plan(fingerprint: u64, position: Option<(u32, u32)>, pool: u64) -> Vec<u8> {
        let position = position.map(|(rank, world_size)| Position::new(rank, world_size).unwrap());
        let job = Job { fingerprint: Fingerprint(fingerprint), position };
        format::write(&Plan { pool_len: Bytes::kib(pool), job, ..Plan::default() })
    }

    const MOST: Bytes = Bytes::mib(64);

    fn open(dir: &TempDir) -> PlanStore {
        PlanStore::open(dir.path().join("a/plans"), MOST).unwrap()
    }

    fn names(store: &PlanStore) -> Vec<String> {
        store.list(&WantedPlans::default()).into_iter().map(|(_, stored)| stored.name).collect()
    }

    fn wanted(fingerprint: u64, rank: Option<u32>, world_size: Option<u32>) -> WantedPlans {
        WantedPlans { fingerprint: Some(fingerprint), rank, world_size }
    }

    #[test]
    fn the_newest_plan_for_a_job_wins_and_its_own_process_before_any() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        let put = |fingerprint, position, pool| {
            store.put(&plan(fingerprint, position, pool), format!("{fingerprint} {pool}")).unwrap()
        };
        let own = put(1, Some((2, 4)), 1);
        let for_any = put(1, None, 2);
        let other = put(1, Some((3, 4)), 3);
        let smaller = put(1, Some((2, 3)), 4).0;
        let best = |store: &PlanStore, wanted: WantedPlans| store.best(&wanted).ok();
        for store in [&store, &open(&dir)] {
            assert_eq!(best(store, wanted(1, Some(2), Some(4))), Some(own));
            assert_eq!(best(store, wanted(1, Some(3), None)), Some(other));
            assert_eq!(best(store, wanted(1, Some(1), Some(4))), Some(for_any));
            assert_eq!(best(store, wanted(1, None, None)).map(|id| id.0), Some(smaller));
            assert_eq!(best(store, wanted(2, None, None)), None);
            let of_rank = store.list(&WantedPlans { fingerprint: None, rank: Some(2), world_size: None });
            assert_eq!(of_rank.iter().map(|(_, plan)| plan.name.as_str()).collect::<Vec<_>>(), ["1 4", "1 1", "1 2"]);
        }
        // Put again it is the newest, and newer than what comes to a store that was opened anew.
        store.put(&plan(1, Some((2, 4)), 1), "again".into()).unwrap();
        let store = open(&dir);
        assert_eq!(best(&store, wanted(1, None, None)), Some(own));
        store.put(&plan(1, None, 9), "last".into()).unwrap();
        assert_eq!(names(&open(&dir)), ["last", "again", "1 4", "1 3", "1 2"]);
    }

    #[test]
    fn what_was_stored_is_found_again_and_what_was_deleted_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        let bytes = plan(7, None, 5);
        let id = store.put(&bytes, "a name with spaces".into()).unwrap();
        let again = open(&dir);
        assert_eq!(again.stored(id).unwrap(), store.stored(id).unwrap());
        assert_eq!(again.get(id).unwrap(), bytes);
        again.delete(id).unwrap();
        assert!(matches!(again.delete(id), Err(PlanStoreError::NoPlan(_))));
        assert!(matches!(again.get(id), Err(PlanStoreError::NoPlan(_))));
        assert_eq!(fs::read_dir(dir.path().join("a/plans")).unwrap().count(), 0);
        assert!(names(&open(&dir)).is_empty());
        // Somebody removed the file: there is nothing left to delete, and that is no failure.
        let id = store.put(&bytes, String::new()).unwrap();
        fs::remove_file(store.path(id, PLAN)).unwrap();
        assert!(matches!(store.get(id), Err(PlanStoreError::File { .. })));
        store.delete(id).unwrap();
    }

    #[test]
    fn what_a_crash_left_is_removed_and_what_is_no_plan_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        let id = store.put(&plan(7, None, 5), "kept".into()).unwrap();
        let other = PlanId(0x1234);
        let left_over = ["draft-plan", "draft-name", "draft0", "name"];
        left_over.iter().for_each(|extension| fs::write(store.path(other, extension), "STPLAN").unwrap());
        fs::write(store.path(id, "draft-plan"), "STPLAN").unwrap();
        let directory = dir.path().join("a/plans");
        let broken = [
            ("0000000000000001.plan", plan(7, None, 5)),
            ("0000000000000001.name", b"5\nbroken\n".to_vec()),
            ("0000000000000002.plan", Vec::new()),
            ("0000000000000003.plan", plan(7, None, 5)[..20].to_vec()),
            ("7.plan", plan(7, None, 5)),
            ("readme.draft-plan", b"not ours".to_vec()),
            ("0000000000000004.other", b"not ours".to_vec()),
        ];
        for (name, bytes) in &broken {
            fs::write(directory.join(name), bytes).unwrap();
        }
        // Whoever opens one of these to read it waits for a writer, or reads for ever.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            directory.join("0000000000000005.plan"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        std::os::unix::fs::symlink("/dev/zero", directory.join("0000000000000006.plan")).unwrap();
        fs::create_dir(directory.join("0000000000000007.plan")).unwrap();
        let store = open(&dir);
        assert_eq!(names(&store), ["kept"]);
        for extension in left_over {
            assert!(!store.path(other, extension).exists(), "{extension}");
        }
        assert!(!store.path(id, "draft-plan").exists());
        for (name, _) in &broken {
            assert!(directory.join(name).exists(), "{name}");
        }
    }

    #[test]
    fn a_note_that_says_nothing_leaves_a_plan_without_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        let id = store.put(&plan(7, None, 5), "named".into()).unwrap();
        let notes: [(&[u8], u64, &str); 6] = [
            (b"", 0, ""),
            (b"\xff\n\xff", 0, ""),
            (b"-3\nname", 0, "name"),
            (b"18446744073709551615\nlate\x1b\n", u64::MAX, "late\u{fffd}"),
            (b"3", 3, ""),
            (&[b'7'; 100_000], 0, ""),
        ];
        for (note, number, name) in notes {
            fs::write(store.path(id, NOTE), note).unwrap();
            let stored = open(&dir).stored(id).unwrap();
            assert_eq!((stored.number, stored.name.as_str()), (number, name));
        }
        fs::remove_file(store.path(id, NOTE)).unwrap();
        assert_eq!(names(&open(&dir)), [""]);
        // Behind the last number there is none, and plans are stored all the same.
        fs::write(store.path(id, NOTE), "18446744073709551615\nlate\n").unwrap();
        let store = open(&dir);
        store.put(&plan(8, None, 5), "later".into()).unwrap();
        assert_eq!(names(&store).len(), 2);
    }

    #[test]
    fn there_are_so_many_plans_and_bytes_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        let long = vec![0; limits::GRPC_MESSAGE_LEN_MAX + 1];
        assert!(matches!(store.put(&long, String::new()), Err(PlanStoreError::TooLong(_))));
        let first = plan(0, None, 1);
        let id = store.put(&first, String::new()).unwrap();
        store.plans.alter(&id, |_, stored| Stored { len: MOST.get() - 1, ..stored });
        let refused = store.put(&plan(1, None, 1), String::new());
        assert!(matches!(refused, Err(PlanStoreError::FullOfBytes { .. })), "{refused:?}");
        assert_eq!(fs::read_dir(dir.path().join("a/plans")).unwrap().count(), 2, "nothing is left of it");
        // What is there already takes no more room.
        store.put(&first, String::new()).unwrap();
        for number in 1..limits::PLANS_MAX {
            let stored = Stored { number: number as u64, ..store.stored(id).unwrap() };
            store.plans.insert(PlanId(number as u64), stored);
        }
        assert!(matches!(store.put(&plan(1, None, 1), String::new()), Err(PlanStoreError::Full)));
        store.put(&first, String::new()).unwrap();
    }

    #[test]
    fn a_directory_that_takes_nothing_is_an_error_and_the_plan_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        fs::remove_dir_all(&store.directory).unwrap();
        assert!(matches!(store.put(&plan(1, None, 1), String::new()), Err(PlanStoreError::File { .. })));
        assert!(names(&store).is_empty());
    }
}
