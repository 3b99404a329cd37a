//! What a daemon takes over from one that was killed, or has made way for it: the facts of its journal, as far as they can be trusted, and the descriptors of its keeper.
//!
//! | journal | keeper | what is taken over |
//! |---|---|---|
//! | whole, or torn in its last step | holds its chunks | everything: sessions, their chunks, shared ranges, what is reserved and what lies idle |
//! | whole, or torn | gone | sessions and their chunks, which only they have mapped still; shared ranges as long as somebody holds them, for nobody more |
//! | damaged, older than the keeper knows, or none | whatever | nothing: sessions register what they have mapped, as it is theirs |
//! | of another boot | | nothing, and nothing is left |
//! | of a newer version | | the daemon does not start |
//!
//! A torn step was told to nobody. What a damaged journal says may have changed since, so nothing of it is believed: what it calls idle could be mapped by somebody.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::DaemonError;
use super::registry::random_token;
use crate::error::chain;
use crate::ids::{ChunkId, DeviceId, DeviceUuid, RangeId, SessionId};
use crate::journal::{self, Book, Ended, Header, Journal, JournalError, Mark, Record, Whose, Witnessed};
use crate::keeper::Key;
use crate::keeper::link::has_ended;
use crate::ladder::Ladder;
use crate::ledger::{Command, Ledger};
use crate::mortal::moment;
use crate::steward;
use crate::store::Store;
use crate::units::Bytes;

pub use crate::keeper::JOURNAL_NAME;

/// What was left.
#[derive(Debug)]
pub struct Left {
    path: PathBuf,
    boot: Mark,
    /// What is believed.
    book: Book,
    /// The number of the last frame that anybody may have heard of.
    last: u64,
    /// The journal that goes on, if one does.
    mark: Option<Mark>,
    chunks: BTreeMap<ChunkId, OwnedFd>,
    processes: BTreeMap<SessionId, OwnedFd>,
    /// What the keeper holds and nobody needs any more.
    useless: Vec<Key>,
}

/// What a daemon begins with beside its ledger.
#[derive(Debug)]
pub struct Begun {
    /// Goes on from what was left.
    pub journal: Journal,
    /// The processes of sessions that were kept.
    pub processes: BTreeMap<SessionId, OwnedFd>,
    /// What the keeper is to let go of, before anything new has such a name.
    pub useless: Vec<Key>,
    /// What it is to hold from here on.
    pub witness: OwnedFd,
}

/// A device of the daemon that follows.
#[derive(Clone, Copy, Debug)]
pub struct Following {
    /// What it calls it.
    pub id: DeviceId,
    /// What everybody does.
    pub uuid: DeviceUuid,
    /// What the daemon is to have of it, which may be less than is there.
    pub total: Bytes,
}

/// Nothing of a book but its numbers: those at least are not given again.
fn numbers_of(book: &Book) -> Book {
    let (sessions, chunks, ranges, versions) = book.last_numbers();
    let mut numbers = Book::default();
    // Nothing can be wrong with that.
    let _ = numbers.apply_all(&[Record::Counted { sessions, chunks, ranges, versions }]);
    numbers
}

/// What of a journal is believed, the number of the last frame that anybody may have heard of, and which journal that is, where it is believed.
fn believed(path: &Path, boot: &Mark, witnessed: Witnessed) -> Result<(Book, u64, Option<Mark>), JournalError> {
    let Witnessed { last: witnessed, journal } = witnessed;
    // A doubt is no number to go on from.
    let heard = if witnessed == journal::DOUBT { 0 } else { witnessed };
    let recovered = match journal::read(path, boot) {
        Ok(recovered) => recovered,
        Err(JournalError::System { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            if witnessed > 0 {
                tracing::error!(
                    "the journal of the daemon before is gone: its sessions register what they have mapped"
                );
            }
            return Ok((Book::default(), heard, None));
        }
        Err(error @ JournalError::Version { .. }) => return Err(error),
        Err(error @ JournalError::Foreign { .. }) => {
            tracing::info!(error = %chain(&error), "nothing is taken over");
            return Ok((Book::default(), heard, None));
        }
        // Nothing is known of it: neither that it is damaged nor that it is not. What it says is worth more than a start.
        Err(JournalError::System { source, action, path })
            if source.kind() != std::io::ErrorKind::PermissionDenied && source.raw_os_error() != Some(libc::ELOOP) =>
        {
            return Err(JournalError::System { action, path, source });
        }
        Err(error) => {
            tracing::error!(error = %chain(&error), "the journal of the daemon before cannot be read: its sessions register what they have mapped");
            return Ok((Book::default(), heard, None));
        }
    };
    let why = match &recovered.ended {
        Ended::Damaged { why, at } => Some(format!("at byte {at}: {why}")),
        Ended::Whole | Ended::Torn { .. } if witnessed == journal::DOUBT => {
            Some("a step could not be written to it".to_owned())
        }
        Ended::Whole | Ended::Torn { .. } if journal.is_some_and(|journal| journal != recovered.header.journal) => {
            Some("it is another journal than the one that the daemon had written".to_owned())
        }
        Ended::Whole | Ended::Torn { .. } if recovered.last < witnessed => {
            Some(format!("it ends with step {}, and the daemon had written step {witnessed}", recovered.last))
        }
        Ended::Whole | Ended::Torn { .. } => None,
    };
    let last = recovered.last.max(heard);
    let Some(why) = why else { return Ok((recovered.book, last, Some(recovered.header.journal))) };
    tracing::error!(path = %path.display(), why, "the journal of the daemon before is damaged, and nothing of it is believed: its sessions register what they have mapped");
    Ok((numbers_of(&recovered.book), last, None))
}

impl Left {
    /// Looks for what was left in a runtime directory.
    ///
    /// # Errors
    ///
    /// A journal of a newer version, or one that could not be read just now.
    pub fn find(runtime_dir: &Path, held: Vec<(Key, OwnedFd)>) -> Result<Left, JournalError> {
        let path = runtime_dir.join(JOURNAL_NAME);
        let system = |source| JournalError::System {
            action: "learn of which start of the machine is",
            path: path.clone(),
            source,
        };
        let boot = journal::boot_mark().map_err(system)?;
        let (mut chunks, mut processes, mut useless) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let mut witness = None;
        for (key, fd) in held {
            match key {
                Key::Chunk(chunk) => drop(chunks.insert(chunk, fd)),
                Key::Process(session) => drop(processes.insert(session, fd)),
                Key::Witness => witness = Some(fd),
                // Nodes are opened anew; what a newer daemon had held is nothing to this one.
                Key::Node(_) | Key::Other(..) => useless.push(key),
            }
        }
        let witnessed = witness.as_ref().and_then(|witness| journal::witnessed(witness).ok()).unwrap_or_default();
        let (book, last, mark) = believed(&path, &boot, witnessed)?;
        let mut left = Left { path, boot, book, last, mark, chunks, processes, useless };
        left.clear_up();
        Ok(left)
    }

    /// Takes out of the book what nobody has any more, and finds what of the keeper's it does not know.
    fn clear_up(&mut self) {
        let lost: BTreeSet<ChunkId> =
            self.book.chunks().keys().filter(|chunk| !self.chunks.contains_key(chunk)).copied().collect();
        let of_nobody = |chunk: &&ChunkId| matches!(self.book.chunks()[chunk].whose, Whose::Nobodys | Whose::Plan(_));
        let gone: Vec<Record> = lost.iter().filter(of_nobody).map(|chunk| Record::Gone { chunk: *chunk }).collect();
        if !gone.is_empty() {
            let bytes: Bytes = lost.iter().filter(of_nobody).map(|chunk| self.book.chunks()[chunk].len).sum();
            tracing::warn!(
                chunks = gone.len(),
                bytes = bytes.get(),
                "nobody has kept these chunks, and nobody else has them: what lay idle, or was reserved for a plan, is gone"
            );
        }
        self.apply(&gone);
        // A range whose chunks nobody can hand on is for nobody more.
        let is_lost =
            |(_, known): &(&RangeId, &journal::KnownRange)| known.of.chunks.iter().any(|chunk| lost.contains(chunk));
        let ranges: Vec<(RangeId, bool)> =
            self.book.ranges().iter().filter(is_lost).map(|(range, known)| (*range, known.holds.is_empty())).collect();
        let fate = |(range, is_unheld): (RangeId, bool)| {
            if is_unheld { Record::RangeGone { range } } else { Record::Withdrawn { range } }
        };
        let fates: Vec<Record> = ranges.into_iter().map(fate).collect();
        self.apply(&fates);
        self.drop_unknown();
    }

    /// Closes what of the keeper's descriptors the book does not know.
    fn drop_unknown(&mut self) {
        let Left { book, chunks, processes, useless, .. } = self;
        chunks.retain(|chunk, _| {
            let is_known = book.chunks().contains_key(chunk);
            if !is_known {
                useless.push(Key::Chunk(*chunk));
            }
            is_known
        });
        processes.retain(|session, _| {
            let is_known = book.sessions().contains_key(session);
            if !is_known {
                useless.push(Key::Process(*session));
            }
            is_known
        });
    }

    fn apply(&mut self, step: &[Record]) {
        if let Err(error) = self.book.apply_all(step) {
            debug_assert!(false, "{error}");
            tracing::error!(%error, "what was left does not fit together");
        }
    }

    /// What is there of devices that this daemon has not is nothing to it: their chunks, and the ranges that are made of them.
    fn drop_other_devices(&mut self, uuids: &BTreeSet<DeviceUuid>) {
        let is_other =
            |chunk: &ChunkId| self.book.chunks().get(chunk).is_some_and(|known| !uuids.contains(&known.device));
        let mut step = Vec::new();
        for (range, known) in self.book.ranges().iter().filter(|(_, known)| known.of.chunks.iter().any(is_other)) {
            for (session, times) in &known.holds {
                step.extend((0..*times).map(|_| Record::Left { range: *range, session: *session }));
            }
            step.push(Record::RangeGone { range: *range });
        }
        let others = self.book.chunks().iter().filter(|(_, known)| !uuids.contains(&known.device));
        let others = others.filter(|(_, known)| !matches!(known.whose, Whose::Range(_)));
        step.extend(others.map(|(chunk, _)| Record::Gone { chunk: *chunk }));
        for (session, known) in self.book.sessions() {
            let others = known.guarantees.keys().filter(|uuid| !uuids.contains(uuid));
            step.extend(others.map(|device| Record::Guaranteed {
                session: *session,
                device: *device,
                bytes: Bytes::ZERO,
            }));
        }
        if !step.is_empty() {
            tracing::warn!("memory of devices that this daemon does not have is left to whoever has it mapped");
            self.apply(&step);
        }
        self.drop_unknown();
    }

    /// How many sessions have leased chunks of a device, whose processes live.
    pub fn sessions_on(&self, uuid: DeviceUuid) -> usize {
        let chunks = self.book.chunks().values().filter(|known| known.device == uuid);
        let leased =
            chunks.filter_map(|known| if let Whose::Session(session) = known.whose { Some(session) } else { None });
        let leased: BTreeSet<SessionId> = leased.collect();
        leased.iter().filter(|session| self.processes.get(session).is_some_and(|pidfd| !has_ended(pidfd))).count()
    }

    /// The sizes of chunks that sessions which are there still were told of.
    pub fn ladder(&self) -> Option<Vec<Bytes>> {
        let is_dealt = !self.book.sessions().is_empty() && !self.book.ladder().is_empty();
        is_dealt.then(|| self.book.ladder().to_vec())
    }

    /// Puts what was left into the store, and begins a journal that goes on from it.
    ///
    /// # Errors
    ///
    /// The system's; the store has something already.
    pub fn begin(mut self, devices: &[Following], ladder: &Ladder, store: &Store) -> Result<Begun, DaemonError> {
        let ids: BTreeMap<DeviceUuid, DeviceId> = devices.iter().map(|device| (device.uuid, device.id)).collect();
        self.drop_other_devices(&ids.keys().copied().collect());
        if let Err(error) = check(&self.book, devices, &ids) {
            tracing::error!(
                error,
                "what the daemon before has left cannot be, and nothing of it is believed: its sessions register what they have mapped"
            );
            self.book = numbers_of(&self.book);
            self.mark = None;
            self.drop_unknown();
        }
        self.apply(&[Record::Dealt { ladder: ladder.steps().to_vec() }]);
        let known: Vec<_> = self.book.chunks().iter().map(|(chunk, known)| (*chunk, *known)).collect();
        for (chunk, known) in known {
            if let Some(device) = ids.get(&known.device) {
                store.adopt(chunk, *device, known.len, self.chunks.remove(&chunk))?;
            }
        }
        moment();
        let broken = |error: rustix::io::Errno| {
            DaemonError::Journal(JournalError::System {
                action: "begin",
                path: self.path.clone(),
                source: error.into(),
            })
        };
        // One that goes on is the same: an older copy of it is told by its numbers, and of another there is nothing to believe.
        let mark = self.mark.map_or_else(random_token, Ok).map_err(broken)?;
        let witness = journal::new_witness().map_err(broken)?;
        let kept = witness.try_clone().map_err(|error| {
            DaemonError::Journal(JournalError::System { action: "begin", path: self.path.clone(), source: error })
        })?;
        let header = Header { boot: self.boot, journal: mark };
        let journal = Journal::begin_at(&self.path, header, self.book, self.last)?.with_witness(witness)?;
        Ok(Begun { journal, processes: self.processes, useless: self.useless, witness: kept })
    }
}

/// Whether a ledger can begin with what a book says.
fn check(book: &Book, devices: &[Following], ids: &BTreeMap<DeviceUuid, DeviceId>) -> Result<(), String> {
    book.invariants()?;
    let mut ledger = Ledger::new();
    for device in devices {
        let add = Command::AddDevice { device: device.id, total: device.total, chunks_max: u64::MAX };
        ledger.step(add).map_err(|error| error.to_string())?;
    }
    ledger.begin_with(&steward::facts(book, ids, |_| false)).map_err(|error| chain(&error))?;
    ledger.invariants()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::driver::Driver;
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::journal::{Process, SessionRecord};
    use crate::ledger::Terms;
    use crate::memory::Device;

    #[test]
    fn a_journal_in_doubt_is_not_believed_and_its_numbers_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(JOURNAL_NAME);
        let header = Header { boot: journal::boot_mark().unwrap(), journal: [1; 16] };
        let mut journal = Journal::begin(&path, header, Book::default()).unwrap();
        let opened = Record::Opened(SessionRecord {
            session: SessionId(7),
            secret: [1; 16],
            process: Process::default(),
            name: String::new(),
            tenant: String::new(),
            terms: Terms::new(Bytes::mib(2), 0),
            guarantee_max: Bytes::ZERO,
            opened_s: 0,
        });
        journal.append(&[opened]).unwrap();
        drop(journal);
        let witness = journal::new_witness().unwrap();
        rustix::io::pwrite(&witness, &journal::DOUBT.to_le_bytes(), 0).unwrap();
        let held = vec![(Key::Witness, witness)];
        let left = Left::find(dir.path(), held).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(8)])));
        let device = Device::open(driver, DeviceId(0)).unwrap();
        let following = Following { id: device.id(), uuid: device.uuid(), total: Bytes::mib(8) };
        let begun = left.begin(&[following], &Ladder::standard(), &Store::new(vec![device])).unwrap();
        let book = begun.journal.book();
        assert!(book.sessions().is_empty());
        assert_eq!(book.last_numbers().0, 7, "no number is given twice");
        // The next daemon believes this one.
        drop(begun.journal);
        let witnessed = journal::witnessed(&begun.witness).unwrap();
        let (book, last, mark) = believed(&path, &header.boot, witnessed).unwrap();
        assert_eq!((book.last_numbers().0, last, mark), (7, witnessed.last, witnessed.journal));
        assert_ne!(mark, Some(header.journal), "what goes on from nothing is another journal");
        assert_eq!(book.ladder(), Ladder::standard().steps());
    }

    #[test]
    fn a_journal_of_larger_numbers_is_not_believed_where_the_witness_is_anothers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(JOURNAL_NAME);
        let header = Header { boot: journal::boot_mark().unwrap(), journal: [1; 16] };
        drop(Journal::begin_at(&path, header, Book::default(), 486).unwrap());
        let of = |journal: Mark, last: u64| Witnessed { last, journal: Some(journal) };
        let seen = |witnessed| believed(&path, &header.boot, witnessed).unwrap().2;
        // The one that was written since is gone; this is from before both daemon and keeper had died.
        assert_eq!(seen(of([2; 16], 1)), None);
        assert_eq!(seen(of([1; 16], 488)), None);
        assert_eq!(seen(of([1; 16], 487)), Some([1; 16]));
        // A witness of an earlier build has a number only.
        assert_eq!(seen(Witnessed { last: 487, journal: None }), Some([1; 16]));
    }
}
