//! Journals: what a daemon that was killed has left behind.

use std::path::Path;

use stitchd::ids::{ChunkId, DeviceUuid, RangeId, SessionId};
use stitchd::journal::{Book, Header, Journal, Process, PublishedRange, Record, SessionRecord, Whose, read_bytes};
use stitchd::ledger::Terms;
use stitchd::units::Bytes;

const HEADER: Header = Header { boot: [7; 16], journal: [9; 16] };

pub(super) fn read(bytes: &[u8]) {
    let Ok(read) = read_bytes(bytes, Path::new("journal"), &HEADER.boot) else { return };
    read.book.invariants().unwrap();
    let mut again = Book::default();
    again.apply_all(&read.book.records()).unwrap();
    assert_eq!(again, read.book);
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let mut journal = Journal::begin(&path, HEADER, Book::default()).unwrap();
    let (session, chunk, range) = (SessionId(1), ChunkId(2), RangeId(3));
    let opened = SessionRecord {
        session,
        secret: [4; 16],
        process: Process { pid: 5, pidfs: 6, start: 7 },
        name: "job".into(),
        tenant: "web".into(),
        terms: Terms::new(Bytes::gib(1), 0),
        guarantee_max: Bytes::ZERO,
        opened_s: 10,
    };
    let published = PublishedRange {
        range,
        name: "weights".into(),
        tenant: "web".into(),
        version: 8,
        key: Vec::new(),
        content: Bytes::new(9),
        is_writable: false,
        is_sealed: true,
        publisher: session,
        linger_ms: 10,
        chunks: vec![chunk],
    };
    let steps = [
        vec![Record::Opened(opened)],
        vec![
            Record::Created { chunk, device: DeviceUuid([1; 16]), len: Bytes::mib(2) },
            Record::Granted { chunk, whose: Whose::Session(session) },
        ],
        vec![Record::Published(published)],
        vec![Record::Attached { range, session }, Record::Left { range, session }],
        vec![Record::Withdrawn { range }, Record::Ended { session }, Record::RangeGone { range }],
    ];
    let mut seeds = vec![std::fs::read(&path).unwrap()];
    for step in steps {
        journal.append(&step).unwrap();
        seeds.push(std::fs::read(&path).unwrap());
    }
    seeds
}
