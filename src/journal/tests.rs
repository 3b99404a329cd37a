//! Journals that are whole, cut, damaged, foreign and full.

use std::collections::BTreeSet;
use std::path::Path;

use super::book::Nonsense;
use super::*;
use crate::ids::{ChunkId, DeviceUuid, PlanId, RangeId, SessionId};
use crate::ledger::Terms;
use crate::rng::Rng;
use crate::units::Bytes;

const HEADER: Header = Header { boot: [7; 16], journal: [9; 16] };
const DEVICES: [DeviceUuid; 2] = [DeviceUuid([1; 16]), DeviceUuid([2; 16])];

fn session(number: u64) -> Record {
    Record::Opened(SessionRecord {
        session: SessionId(number),
        secret: [number as u8; 16],
        process: Process { pid: number as i32, pidfs: 1_000 + number, start: 5 },
        name: format!("job {number}"),
        tenant: "web".into(),
        terms: Terms { answers: true, ..Terms::new(Bytes::gib(number), 3) },
        guarantee_max: Bytes::mib(number),
        opened_s: 1_700_000_000 + number,
    })
}

fn published(range: u64, publisher: SessionId, chunks: Vec<ChunkId>) -> PublishedRange {
    PublishedRange {
        range: RangeId(range),
        name: format!("weights {range}"),
        tenant: "web".into(),
        version: range + 100,
        key: vec![range as u8; 16],
        content: Bytes::new(77),
        is_writable: range.is_multiple_of(2),
        is_sealed: range.is_multiple_of(3),
        publisher,
        linger_ms: 60_000,
        chunks,
    }
}

/// A step that may follow: what a daemon would do, and now and then what none does.
fn random_step(book: &Book, rng: &mut Rng) -> Vec<Record> {
    let (last_session, last_chunk, last_range, _) = book.last_numbers();
    let sessions: Vec<SessionId> = book.sessions().keys().copied().collect();
    let ranges: Vec<RangeId> = book.ranges().keys().copied().collect();
    let some_session = |rng: &mut Rng| {
        if sessions.is_empty() { SessionId(rng.below(9)) } else { sessions[rng.index(sessions.len())] }
    };
    let some_range =
        |rng: &mut Rng| if ranges.is_empty() { RangeId(rng.below(3)) } else { ranges[rng.index(ranges.len())] };
    let of = |wanted: fn(&Whose) -> bool| {
        let chunks = book.chunks().iter().filter(move |(_, known)| wanted(&known.whose));
        chunks.map(|(chunk, known)| (*chunk, *known)).collect::<Vec<_>>()
    };
    match rng.below(12) {
        0 if sessions.len() < 6 => vec![session(last_session + 1)],
        1 => vec![Record::Ended { session: some_session(rng) }],
        2 | 3 => {
            // A lease.
            let whose = Whose::Session(some_session(rng));
            let device = DEVICES[rng.index(2)];
            let chunks = (1..=1 + rng.below(5)).map(|more| ChunkId(last_chunk + more));
            let records = chunks.flat_map(|chunk| {
                [Record::Created { chunk, device, len: Bytes::mib(2) }, Record::Granted { chunk, whose }]
            });
            records.collect()
        }
        4 => vec![Record::Created { chunk: ChunkId(last_chunk + 1), device: DEVICES[0], len: Bytes::mib(32) }],
        5 => match of(|whose| matches!(whose, Whose::Nobodys | Whose::Plan(_))).first() {
            Some((chunk, _)) if rng.below(2) == 0 => {
                vec![Record::Granted { chunk: *chunk, whose: Whose::Plan(PlanId(rng.below(3))) }]
            }
            Some((chunk, _)) => vec![Record::Granted { chunk: *chunk, whose: Whose::Session(some_session(rng)) }],
            None => vec![Record::Gone { chunk: ChunkId(rng.below(9)) }],
        },
        6 => of(|whose| !matches!(whose, Whose::Range(_)))
            .iter()
            .filter(|_| rng.below(4) == 0)
            .map(|(chunk, _)| Record::Gone { chunk: *chunk })
            .collect(),
        7 => {
            let publisher = some_session(rng);
            let its = book.chunks().iter().filter(|(_, known)| known.whose == Whose::Session(publisher));
            let chunks: Vec<ChunkId> = its.map(|(chunk, _)| *chunk).take(3).collect();
            vec![Record::Published(published(last_range + 1, publisher, chunks))]
        }
        8 => vec![Record::Attached { range: some_range(rng), session: some_session(rng) }],
        9 => vec![Record::Left { range: some_range(rng), session: some_session(rng) }],
        10 if rng.below(2) == 0 => vec![Record::Withdrawn { range: some_range(rng) }],
        10 if rng.below(4) == 0 => {
            vec![Record::Drained { device: DEVICES[rng.index(2)], is_draining: rng.below(2) == 0 }]
        }
        10 if rng.below(4) == 0 => vec![Record::Dealt { ladder: vec![Bytes::mib(2 << rng.below(3))] }],
        10 if rng.below(3) == 0 => vec![Record::Sealed { range: some_range(rng) }],
        10 => vec![Record::RangeGone { range: some_range(rng) }],
        _ if rng.below(2) == 0 => vec![Record::Termed {
            session: some_session(rng),
            terms: Terms::new(Bytes::mib(rng.below(99)), 1),
            revision: rng.below(9),
            is_evicted: rng.below(2) == 0,
        }],
        _ => vec![Record::Guaranteed {
            session: some_session(rng),
            device: DEVICES[rng.index(2)],
            bytes: Bytes::mib(rng.below(3)),
        }],
    }
}

/// What is in a file that was written in some steps, with the book after each.
fn written(path: &Path, header: Header, steps: u64, seed: u64) -> Vec<Book> {
    let mut rng = Rng::new(seed);
    let mut journal = Journal::begin(path, header, Book::default()).unwrap();
    // The file begins with what there was: nothing.
    let mut books = vec![Book::default(), journal.book().clone()];
    while books.len() < steps as usize + 2 {
        let step = random_step(journal.book(), &mut rng);
        let before = journal.book().clone();
        match journal.append(&step) {
            Ok(()) => {
                journal.book().invariants().unwrap();
                books.push(journal.book().clone());
            }
            Err(JournalError::Nonsense(_)) => {
                assert_eq!(*journal.book(), before, "{step:?} was refused, and left something")
            }
            Err(error) => panic!("{error}"),
        }
    }
    books
}

fn of(bytes: &[u8]) -> Result<Recovered, JournalError> {
    file::read_bytes(bytes, Path::new("j"), &HEADER.boot)
}

#[test]
fn what_was_written_is_what_is_read_and_a_book_comes_to_the_same_when_it_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    for seed in 0..20 {
        let books = written(&path, HEADER, 300, seed);
        let last = books.last().unwrap();
        let read = read(&path, &HEADER.boot).unwrap();
        assert_eq!((read.header, &read.book, &read.ended), (HEADER, last, &Ended::Whole), "seed {seed}");
        assert_eq!(read.frames, 301);
        for book in &books[1..] {
            let mut again = Book::default();
            again.apply_all(&book.records()).unwrap();
            assert_eq!(again, *book, "seed {seed}");
        }
        let anew = Journal::begin(&path, HEADER, last.clone()).unwrap();
        assert_eq!(super::read(&path, &HEADER.boot).unwrap().book, *last);
        assert!(anew.len() > HEADER_LEN as u64);
    }
}

#[test]
fn a_journal_that_is_cut_anywhere_says_what_it_said_before_the_step_that_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let books = written(&path, HEADER, 40, 3);
    let bytes = std::fs::read(&path).unwrap();
    let mut seen = BTreeSet::new();
    for len in 0..=bytes.len() {
        if len < HEADER_LEN {
            assert!(matches!(of(&bytes[..len]), Err(JournalError::NotAJournal { .. })), "{len}");
            continue;
        }
        let read = of(&bytes[..len]).unwrap();
        assert_eq!(read.book, books[read.frames as usize], "cut after {len} bytes");
        match read.ended {
            Ended::Whole => drop(seen.insert(read.frames)),
            Ended::Torn { at } => assert!((at as usize) < len),
            Ended::Damaged { .. } => panic!("cut after {len} bytes: {read:?}"),
        }
    }
    assert_eq!(seen.len(), books.len(), "it may end behind each step");
}

#[test]
fn no_bit_that_is_turned_makes_a_journal_say_what_it_never_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let books = written(&path, HEADER, 25, 5);
    let bytes = std::fs::read(&path).unwrap();
    let mut damaged = 0;
    for bit in 0..bytes.len() * 8 {
        let mut turned = bytes.clone();
        turned[bit / 8] ^= 1 << (bit % 8);
        match of(&turned) {
            Err(JournalError::NotAJournal { .. }) => assert!(bit / 8 < HEADER_LEN),
            Err(error) => panic!("bit {bit}: {error}"),
            Ok(read) => {
                assert_ne!(read.ended, Ended::Whole, "bit {bit} is not missed");
                assert_eq!(read.book, books[read.frames as usize], "bit {bit}");
                damaged += u64::from(matches!(read.ended, Ended::Damaged { .. }));
            }
        }
    }
    assert!(damaged as usize > bytes.len() * 7, "most is known to be damage, and not a write that was cut: {damaged}");
}

#[test]
fn frames_that_are_replayed_moved_left_out_or_another_journals_are_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let books = written(&path, HEADER, 30, 11);
    let bytes = std::fs::read(&path).unwrap();
    let mut frames: Vec<&[u8]> = Vec::new();
    let mut rest = &bytes[HEADER_LEN..];
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize + 16;
        frames.push(&rest[..len]);
        rest = &rest[len..];
    }
    assert_eq!(frames.len(), 31);
    let with = |frames: &[&[u8]]| of(&[&bytes[..HEADER_LEN], &frames.concat()].concat()).unwrap();
    let mut twice = frames.clone();
    twice.insert(6, frames[5]);
    let mut moved = frames.clone();
    moved.swap(5, 6);
    let mut out = frames.clone();
    out.remove(6);
    let at_the_end: Vec<&[u8]> = frames.iter().copied().chain([frames[2]]).collect();
    for (changed, whole) in [(twice, 6), (moved, 5), (out, 6), (at_the_end, 31)] {
        let read = with(&changed);
        assert_eq!((read.frames, &read.book), (whole, &books[whole as usize]), "{:?}", read.ended);
        assert!(matches!(read.ended, Ended::Damaged { .. }));
    }
    // The same steps, in a journal of the same boot that somebody else began.
    let other_path = dir.path().join("other");
    written(&other_path, Header { journal: [8; 16], ..HEADER }, 30, 11);
    let other = std::fs::read(&other_path).unwrap();
    let spliced = [&bytes[..HEADER_LEN + frames[0].len()], &other[HEADER_LEN + frames[0].len()..]].concat();
    let read = of(&spliced).unwrap();
    assert_eq!((read.frames, &read.book), (1, &books[1]));
    assert!(matches!(read.ended, Ended::Damaged { .. }), "{:?}", read.ended);
}

#[test]
fn journals_of_another_boot_or_version_and_other_files_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    written(&path, HEADER, 3, 1);
    let error = read(&path, &[8; 16]).unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().contains("before the machine was started")),
        (ErrorKind::NotFound, true)
    );
    // A newer one, whole as far as its header goes.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[8..12].copy_from_slice(&2_u32.to_le_bytes());
    let checksum = crc32fast::hash(&bytes[..52]).to_le_bytes();
    bytes[52..56].copy_from_slice(&checksum);
    let error = of(&bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("version 2") && error.to_string().contains("this daemon knows 1"), "{error}");
    for other in [&b""[..], b"STITCHJ", b"{\"not\": \"a journal\"}, and long enough to be one, whatever it says there"]
    {
        assert_eq!(of(other).unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert!(matches!(read(&dir.path().join("none"), &HEADER.boot), Err(JournalError::System { action: "read", .. })));
}

#[test]
fn steps_that_cannot_be_are_refused_whole() {
    let mut book = Book::default();
    let (one, two) = (SessionId(1), SessionId(2));
    book.apply_all(&[session(1), session(2)]).unwrap();
    let lease = |chunk: u64, session: SessionId| {
        let chunk = ChunkId(chunk);
        let created = Record::Created { chunk, device: DEVICES[0], len: Bytes::mib(2) };
        [created, Record::Granted { chunk, whose: Whose::Session(session) }]
    };
    book.apply_all(&lease(1, one)).unwrap();
    book.apply_all(&[lease(2, two), lease(3, two)].concat()).unwrap();
    book.apply_all(&[Record::Published(published(1, two, vec![ChunkId(2)]))]).unwrap();
    let cases: [(Record, &str); 15] = [
        (Record::Sealed { range: RangeId(2) }, "range 2 is not there"),
        (session(1), "session 1 is opened twice"),
        (Record::Ended { session: SessionId(9) }, "session 9 is not there"),
        (lease(1, two)[0].clone(), "chunk 1 is created twice"),
        (lease(1, two)[1].clone(), "chunk 1 goes from one holder to another"),
        (Record::Granted { chunk: ChunkId(1), whose: Whose::Nobodys }, "chunk 1 goes from one holder to another"),
        (lease(9, two)[1].clone(), "chunk 9 is granted and is not there"),
        (Record::Gone { chunk: ChunkId(9) }, "chunk 9 goes and is not there"),
        (Record::Gone { chunk: ChunkId(2) }, "chunk 2 goes without range 1"),
        (Record::Published(published(1, one, vec![ChunkId(1)])), "range 1 is published twice"),
        (Record::Published(published(2, one, vec![ChunkId(3)])), "range 2 has chunk 3, which is not its publisher's"),
        (
            Record::Published(published(2, one, vec![ChunkId(1); 2])),
            "range 2 has chunk 1, which is not its publisher's",
        ),
        (Record::Published(published(2, one, Vec::new())), "range 2 has no chunk"),
        (Record::Left { range: RangeId(1), session: one }, "session 1 does not hold range 1"),
        (Record::RangeGone { range: RangeId(1) }, "range 1 goes while somebody holds it"),
    ];
    for (record, expected) in cases {
        let before = book.clone();
        // Behind something that could be.
        let Err(Nonsense(said)) = book.apply_all(&[lease(50, one).to_vec(), vec![record]].concat()) else {
            panic!("{expected}: it was taken")
        };
        assert!(said.starts_with(expected), "{said}");
        assert_eq!(book, before, "{expected}: it has left something");
    }
    // Whoever ends takes its own with it, and leaves what it shared.
    book.apply_all(&[Record::Attached { range: RangeId(1), session: one }, Record::Ended { session: two }]).unwrap();
    assert_eq!(book.chunks().keys().map(|chunk| chunk.0).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(book.ranges()[&RangeId(1)].holds.keys().collect::<Vec<_>>(), [&one]);
    book.apply_all(&[Record::Ended { session: one }, Record::RangeGone { range: RangeId(1) }]).unwrap();
    assert!(book.chunks().is_empty() && book.ranges().is_empty() && !book.is_empty());
    assert_eq!(book.last_numbers(), (2, 3, 1, 101), "no number is given twice");
}

#[test]
fn one_that_could_not_be_written_to_is_written_anew_with_the_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let mut journal = Journal::begin(&path, HEADER, Book::default()).unwrap();
    journal.append(&[session(1)]).unwrap();
    // A descriptor that takes nothing.
    journal.file = std::fs::File::open(&path).unwrap();
    let error = journal.append(&[session(2)]).unwrap_err();
    assert!(matches!(error, JournalError::System { action: "write to", .. }), "{error}");
    assert_eq!(read(&path, &HEADER.boot).unwrap().book.sessions().len(), 1);
    journal.append(&[session(3)]).unwrap();
    let read = read(&path, &HEADER.boot).unwrap();
    assert_eq!((read.book.sessions().len(), read.ended), (3, Ended::Whole));
}

#[test]
fn one_that_tells_mostly_of_what_is_no_more_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let mut journal = Journal::begin(&path, HEADER, Book::default()).unwrap();
    journal.append(&[session(1)]).unwrap();
    let mut longest = 0;
    for number in 1..200_000 {
        let chunk = ChunkId(number);
        let created = Record::Created { chunk, device: DEVICES[0], len: Bytes::mib(2) };
        journal.append(&[created, Record::Granted { chunk, whose: Whose::Session(SessionId(1)) }]).unwrap();
        journal.append(&[Record::Gone { chunk }]).unwrap();
        longest = longest.max(journal.len());
    }
    assert!(longest > limits::JOURNAL_SLACK_LEN / 2 && longest < 2 * limits::JOURNAL_SLACK_LEN, "{longest}");
    let read = read(&path, &HEADER.boot).unwrap();
    assert_eq!((read.book.last_numbers(), read.book.chunks().len()), ((1, 199_999, 0, 0), 0));
    assert_eq!(read.ended, Ended::Whole);
}

#[test]
fn a_witness_knows_of_each_step_that_somebody_may_have_heard_of() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let witness = new_witness().unwrap();
    assert_eq!(witnessed(&witness).unwrap().last, 0);
    let journal = Journal::begin_at(&path, HEADER, Book::default(), 700).unwrap();
    let mut journal = journal.with_witness(witness.try_clone().unwrap()).unwrap();
    let mut cut = Vec::new();
    for number in 1..=20 {
        journal.append(&[session(number)]).unwrap();
        let read = read(&path, &HEADER.boot).unwrap();
        assert_eq!((read.last, read.frames), (701 + number, 1 + number));
        assert_eq!(witnessed(&witness).unwrap().last, read.last);
        // Its numbers go on where it is written anew.
        if number == 10 {
            cut = std::fs::read(&path).unwrap();
            journal.write_anew().unwrap();
            assert_eq!(witnessed(&witness).unwrap().last, super::read(&path, &HEADER.boot).unwrap().last);
            journal.append(&[Record::Ended { session: SessionId(10) }, session(100)]).unwrap();
            journal.append(&[Record::Ended { session: SessionId(100) }, session(99)]).unwrap();
            journal.append(&[Record::Ended { session: SessionId(99) }]).unwrap();
            break;
        }
    }
    assert_eq!(witnessed(&witness).unwrap().journal, Some(HEADER.journal));
    // An older file in its place is whole by itself, and ends before what was heard of.
    let older = of(&cut).unwrap();
    assert_eq!(older.ended, Ended::Whole);
    assert!(older.last < witnessed(&witness).unwrap().last);
}

#[test]
fn a_start_of_the_machine_has_a_mark() {
    let mark = boot_mark().unwrap();
    assert_eq!(mark, boot_mark().unwrap());
    assert_ne!(mark, [0; 16], "this machine's kernel says which start it is");
}

#[test]
fn a_step_that_could_not_be_written_is_known_to_be_missing_until_the_journal_was_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let witness = new_witness().unwrap();
    let journal = Journal::begin(&path, HEADER, Book::default()).unwrap();
    let mut journal = journal.with_witness(witness.try_clone().unwrap()).unwrap();
    journal.append(&[session(1)]).unwrap();
    journal.file = std::fs::File::open(&path).unwrap();
    journal.append(&[session(2)]).unwrap_err();
    // Whole by itself: and somebody may have heard of session 2.
    let whole = read(&path, &HEADER.boot).unwrap();
    assert_eq!((whole.ended, whole.book.sessions().len()), (Ended::Whole, 1));
    assert!(whole.last < witnessed(&witness).unwrap().last);
    journal.append(&[session(3)]).unwrap();
    let read = read(&path, &HEADER.boot).unwrap();
    assert_eq!((read.book.sessions().len(), read.last), (3, witnessed(&witness).unwrap().last));
}

#[test]
fn what_others_may_have_written_is_not_read() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    written(&path, HEADER, 3, 1);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    let error = read(&path, &HEADER.boot).unwrap_err();
    assert!(crate::error::chain(&error).contains("of mode 666"), "{error}");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(matches!(read(&link, &HEADER.boot), Err(JournalError::System { .. })));
}

/// A journal that has one of each record that version 1 has.
fn of_each_kind() -> Vec<Vec<Record>> {
    let (one, two) = (SessionId(1), SessionId(2));
    let created = |chunk| Record::Created { chunk: ChunkId(chunk), device: DEVICES[0], len: Bytes::mib(2) };
    let granted = |chunk, whose| Record::Granted { chunk: ChunkId(chunk), whose };
    vec![
        vec![Record::Counted { sessions: 0, chunks: 40, ranges: 3, versions: 9 }],
        vec![Record::Dealt { ladder: vec![Bytes::mib(2), Bytes::mib(32)] }],
        vec![session(1), session(2)],
        vec![Record::Termed { session: two, terms: Terms::new(Bytes::gib(3), 2), revision: 4, is_evicted: true }],
        vec![Record::Guaranteed { session: one, device: DEVICES[1], bytes: Bytes::gib(1) }],
        vec![created(41), granted(41, Whose::Session(one)), created(42), granted(42, Whose::Session(one))],
        vec![created(43), granted(43, Whose::Plan(PlanId(0xfeed))), created(44), created(45)],
        vec![Record::Gone { chunk: ChunkId(45) }],
        vec![Record::Published(published(4, one, vec![ChunkId(42)]))],
        vec![Record::Sealed { range: RangeId(4) }, Record::Attached { range: RangeId(4), session: two }],
        vec![Record::Left { range: RangeId(4), session: one }, Record::Withdrawn { range: RangeId(4) }],
        vec![Record::Drained { device: DEVICES[1], is_draining: true }],
        vec![
            session(3),
            created(46),
            granted(46, Whose::Session(SessionId(3))),
            Record::Ended { session: SessionId(3) },
        ],
    ]
}

#[test]
fn a_journal_of_the_first_version_is_read_as_it_was_written() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/journal/version-1");
    let mut expected = Book::default();
    let mut steps = of_each_kind();
    for record in steps.iter_mut().flatten() {
        // That was not written yet.
        if let Record::Opened(of) = record {
            of.opened_s = 0;
        }
    }
    steps.iter().for_each(|step| expected.apply_all(step).unwrap());
    let read = of(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((read.header, read.book, read.ended), (HEADER, expected, Ended::Whole));
    assert_eq!((read.frames, read.last), (14, 14));
}
