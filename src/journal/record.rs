//! What a journal is made of, and how it is written: protobuf messages of its own, so that a newer daemon may say more than an older one wrote.

use prost::Message;

use super::Mark;
use super::book::Nonsense;
use crate::ids::{ChunkId, DeviceUuid, PlanId, RangeId, SessionId};
use crate::ledger::Terms;
use crate::units::Bytes;

/// A fact that holds from now on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// There is a session.
    Opened(SessionRecord),
    /// Its terms are these.
    Termed {
        /// Whose.
        session: SessionId,
        /// Which.
        terms: Terms,
        /// How often they were changed.
        revision: u64,
        /// It gets nothing more.
        is_evicted: bool,
    },
    /// It is guaranteed so much of a device.
    Guaranteed {
        /// Who.
        session: SessionId,
        /// Where.
        device: DeviceUuid,
        /// How much.
        bytes: Bytes,
    },
    /// It is over: what it had is gone, or nobody's.
    Ended {
        /// Which.
        session: SessionId,
    },
    /// There is a chunk, which nobody has.
    Created {
        /// Which.
        chunk: ChunkId,
        /// Where.
        device: DeviceUuid,
        /// How large.
        len: Bytes,
    },
    /// It is somebody's.
    Granted {
        /// Which.
        chunk: ChunkId,
        /// Whose.
        whose: Whose,
    },
    /// It is no more, or is to be no more.
    Gone {
        /// Which.
        chunk: ChunkId,
    },
    /// Chunks of a session are a shared range.
    Published(PublishedRange),
    /// A session holds a range once more.
    Attached {
        /// Which.
        range: RangeId,
        /// Who.
        session: SessionId,
    },
    /// Or once less.
    Left {
        /// Which.
        range: RangeId,
        /// Who.
        session: SessionId,
    },
    /// Nobody can write a range any more, by the driver's doing.
    Sealed {
        /// Which.
        range: RangeId,
    },
    /// A range has no name any more.
    Withdrawn {
        /// Which.
        range: RangeId,
    },
    /// A range is no more, and its chunks are nobody's.
    RangeGone {
        /// Which.
        range: RangeId,
    },
    /// Nothing more of a device is leased, or it is again.
    Drained {
        /// Which.
        device: DeviceUuid,
        /// Whether nothing is.
        is_draining: bool,
    },
    /// The sizes of chunks that sessions were told of.
    Dealt {
        /// From small to large.
        ladder: Vec<Bytes>,
    },
    /// These numbers were given before: none is given twice.
    Counted {
        /// The largest of a session.
        sessions: u64,
        /// Of a chunk.
        chunks: u64,
        /// Of a range.
        ranges: u64,
        /// Of a range's version.
        versions: u64,
    },
}

/// Who has a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whose {
    /// Nobody: it lies with the daemon.
    Nobodys,
    /// A session has leased it.
    Session(SessionId),
    /// It is reserved for a plan.
    Plan(PlanId),
    /// It is of a shared range.
    Range(RangeId),
}

/// What tells a process from all others, as far as the kernel does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Process {
    /// Its number, for people.
    pub pid: i32,
    /// The inode of its pidfd; 0 where the kernel has none.
    pub pidfs: u64,
    /// When it began, in clock ticks since boot; 0 where that is not known.
    pub start: u64,
}

/// A session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionRecord {
    /// Its number.
    pub session: SessionId,
    /// What proves a call to be its own.
    pub secret: Mark,
    /// Whose it is.
    pub process: Process,
    /// What people call it.
    pub name: String,
    /// Whose memory it is.
    pub tenant: String,
    /// What it may have.
    pub terms: Terms,
    /// The most that it can be guaranteed of a device.
    pub guarantee_max: Bytes,
    /// When it was opened, in seconds since 1970; 0 where that is not known.
    pub opened_s: u64,
}

impl SessionRecord {
    /// One that is not there any more, to say what it published.
    pub(super) fn nobody(session: SessionId) -> SessionRecord {
        SessionRecord {
            session,
            secret: Mark::default(),
            process: Process::default(),
            name: String::new(),
            tenant: String::new(),
            terms: Terms::new(Bytes::LARGEST, 0),
            guarantee_max: Bytes::ZERO,
            opened_s: 0,
        }
    }
}

/// A shared range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublishedRange {
    /// Its number.
    pub range: RangeId,
    /// What it is found by.
    pub name: String,
    /// Whose it is.
    pub tenant: String,
    /// One that came later has a larger one.
    pub version: u64,
    /// Who has this may attach it; where it is empty the tenant may.
    pub key: Vec<u8>,
    /// Bytes that its publisher says mean something.
    pub content: Bytes,
    /// Whoever attaches it may write it.
    pub is_writable: bool,
    /// The driver lets nobody write it.
    pub is_sealed: bool,
    /// Who published it; it need not be there any more.
    pub publisher: SessionId,
    /// How long it outlives its last holder, in milliseconds.
    pub linger_ms: u64,
    /// In the order of its addresses.
    pub chunks: Vec<ChunkId>,
}

/// As written.
mod v1 {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Step {
        #[prost(message, repeated, tag = "1")]
        pub(super) records: Vec<Record>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Record {
        #[prost(oneof = "What", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16")]
        pub(super) what: Option<What>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum What {
        #[prost(message, tag = "1")]
        Opened(Session),
        #[prost(message, tag = "2")]
        Termed(Termed),
        #[prost(message, tag = "3")]
        Guaranteed(Guaranteed),
        #[prost(uint64, tag = "4")]
        Ended(u64),
        #[prost(message, tag = "5")]
        Created(Created),
        #[prost(message, tag = "6")]
        Granted(Granted),
        #[prost(uint64, tag = "7")]
        Gone(u64),
        #[prost(message, tag = "8")]
        Published(Published),
        #[prost(message, tag = "9")]
        Attached(Hold),
        #[prost(message, tag = "10")]
        Left(Hold),
        #[prost(uint64, tag = "11")]
        Withdrawn(u64),
        #[prost(uint64, tag = "12")]
        RangeGone(u64),
        #[prost(message, tag = "13")]
        Counted(Counted),
        #[prost(uint64, tag = "14")]
        Sealed(u64),
        #[prost(message, tag = "15")]
        Drained(Drained),
        #[prost(message, tag = "16")]
        Dealt(Dealt),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Drained {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) device: Vec<u8>,
        #[prost(bool, tag = "2")]
        pub(super) is_draining: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Dealt {
        #[prost(uint64, repeated, tag = "1")]
        pub(super) ladder: Vec<u64>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Session {
        #[prost(uint64, tag = "1")]
        pub(super) session: u64,
        #[prost(bytes = "vec", tag = "2")]
        pub(super) secret: Vec<u8>,
        #[prost(int32, tag = "3")]
        pub(super) pid: i32,
        #[prost(uint64, tag = "4")]
        pub(super) pidfs: u64,
        #[prost(uint64, tag = "5")]
        pub(super) start: u64,
        #[prost(string, tag = "6")]
        pub(super) name: String,
        #[prost(string, tag = "7")]
        pub(super) tenant: String,
        #[prost(message, tag = "8")]
        pub(super) terms: Option<Terms>,
        #[prost(uint64, tag = "9")]
        pub(super) guarantee_max: u64,
        #[prost(uint64, tag = "10")]
        pub(super) opened_s: u64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Terms {
        #[prost(uint64, tag = "1")]
        pub(super) limit: u64,
        #[prost(uint32, tag = "2")]
        pub(super) priority: u32,
        #[prost(bool, tag = "3")]
        pub(super) lends: bool,
        #[prost(bool, tag = "4")]
        pub(super) answers: bool,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Termed {
        #[prost(uint64, tag = "1")]
        pub(super) session: u64,
        #[prost(message, optional, tag = "2")]
        pub(super) terms: Option<Terms>,
        #[prost(uint64, tag = "3")]
        pub(super) revision: u64,
        #[prost(bool, tag = "4")]
        pub(super) is_evicted: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Guaranteed {
        #[prost(uint64, tag = "1")]
        pub(super) session: u64,
        #[prost(bytes = "vec", tag = "2")]
        pub(super) device: Vec<u8>,
        #[prost(uint64, tag = "3")]
        pub(super) bytes: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Created {
        #[prost(uint64, tag = "1")]
        pub(super) chunk: u64,
        #[prost(bytes = "vec", tag = "2")]
        pub(super) device: Vec<u8>,
        #[prost(uint64, tag = "3")]
        pub(super) len: u64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Granted {
        #[prost(uint64, tag = "1")]
        pub(super) chunk: u64,
        #[prost(oneof = "Whose", tags = "2, 3, 4, 5")]
        pub(super) whose: Option<Whose>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Oneof)]
    pub(super) enum Whose {
        #[prost(bool, tag = "2")]
        Nobodys(bool),
        #[prost(uint64, tag = "3")]
        Session(u64),
        #[prost(uint64, tag = "4")]
        Plan(u64),
        #[prost(uint64, tag = "5")]
        Range(u64),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Published {
        #[prost(uint64, tag = "1")]
        pub(super) range: u64,
        #[prost(string, tag = "2")]
        pub(super) name: String,
        #[prost(string, tag = "3")]
        pub(super) tenant: String,
        #[prost(uint64, tag = "4")]
        pub(super) version: u64,
        #[prost(bytes = "vec", tag = "5")]
        pub(super) key: Vec<u8>,
        #[prost(uint64, tag = "6")]
        pub(super) content: u64,
        #[prost(bool, tag = "7")]
        pub(super) is_writable: bool,
        #[prost(bool, tag = "8")]
        pub(super) is_sealed: bool,
        #[prost(uint64, tag = "9")]
        pub(super) publisher: u64,
        #[prost(uint64, tag = "10")]
        pub(super) linger_ms: u64,
        #[prost(uint64, repeated, tag = "11")]
        pub(super) chunks: Vec<u64>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Hold {
        #[prost(uint64, tag = "1")]
        pub(super) range: u64,
        #[prost(uint64, tag = "2")]
        pub(super) session: u64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Counted {
        #[prost(uint64, tag = "1")]
        pub(super) sessions: u64,
        #[prost(uint64, tag = "2")]
        pub(super) chunks: u64,
        #[prost(uint64, tag = "3")]
        pub(super) ranges: u64,
        #[prost(uint64, tag = "4")]
        pub(super) versions: u64,
    }
}

/// A step as bytes.
pub(super) fn write(step: &[Record]) -> Vec<u8> {
    v1::Step { records: step.iter().map(|record| v1::Record { what: Some(written(record)) }).collect() }.encode_to_vec()
}

/// Bytes as a step.
///
/// # Errors
///
/// What in it makes no sense.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<Record>, Nonsense> {
    let step = v1::Step::decode(bytes).map_err(|error| Nonsense(format!("a step that cannot be read: {error}")))?;
    let what = |record: v1::Record| record.what.ok_or_else(|| nonsense("a record of a kind that is not known"));
    step.records.into_iter().map(|record| known(what(record)?)).collect()
}

fn nonsense(what: &str) -> Nonsense {
    Nonsense(what.to_owned())
}

fn written(record: &Record) -> v1::What {
    let terms = |terms: &Terms| v1::Terms {
        limit: terms.limit.get(),
        priority: terms.priority,
        lends: terms.lends,
        answers: terms.answers,
    };
    match record {
        Record::Opened(of) => v1::What::Opened(v1::Session {
            session: of.session.0,
            secret: of.secret.to_vec(),
            pid: of.process.pid,
            pidfs: of.process.pidfs,
            start: of.process.start,
            name: of.name.clone(),
            tenant: of.tenant.clone(),
            terms: Some(terms(&of.terms)),
            guarantee_max: of.guarantee_max.get(),
            opened_s: of.opened_s,
        }),
        Record::Termed { session, terms: now, revision, is_evicted } => v1::What::Termed(v1::Termed {
            session: session.0,
            terms: Some(terms(now)),
            revision: *revision,
            is_evicted: *is_evicted,
        }),
        Record::Guaranteed { session, device, bytes } => {
            v1::What::Guaranteed(v1::Guaranteed { session: session.0, device: device.0.to_vec(), bytes: bytes.get() })
        }
        Record::Ended { session } => v1::What::Ended(session.0),
        Record::Created { chunk, device, len } => {
            v1::What::Created(v1::Created { chunk: chunk.0, device: device.0.to_vec(), len: len.get() })
        }
        Record::Granted { chunk, whose } => {
            let whose = match whose {
                Whose::Nobodys => v1::Whose::Nobodys(true),
                Whose::Session(session) => v1::Whose::Session(session.0),
                Whose::Plan(plan) => v1::Whose::Plan(plan.0),
                Whose::Range(range) => v1::Whose::Range(range.0),
            };
            v1::What::Granted(v1::Granted { chunk: chunk.0, whose: Some(whose) })
        }
        Record::Gone { chunk } => v1::What::Gone(chunk.0),
        Record::Published(of) => v1::What::Published(v1::Published {
            range: of.range.0,
            name: of.name.clone(),
            tenant: of.tenant.clone(),
            version: of.version,
            key: of.key.clone(),
            content: of.content.get(),
            is_writable: of.is_writable,
            is_sealed: of.is_sealed,
            publisher: of.publisher.0,
            linger_ms: of.linger_ms,
            chunks: of.chunks.iter().map(|chunk| chunk.0).collect(),
        }),
        Record::Attached { range, session } => v1::What::Attached(v1::Hold { range: range.0, session: session.0 }),
        Record::Left { range, session } => v1::What::Left(v1::Hold { range: range.0, session: session.0 }),
        Record::Sealed { range } => v1::What::Sealed(range.0),
        Record::Withdrawn { range } => v1::What::Withdrawn(range.0),
        Record::RangeGone { range } => v1::What::RangeGone(range.0),
        Record::Drained { device, is_draining } => {
            v1::What::Drained(v1::Drained { device: device.0.to_vec(), is_draining: *is_draining })
        }
        Record::Dealt { ladder } => {
            v1::What::Dealt(v1::Dealt { ladder: ladder.iter().map(|step| step.get()).collect() })
        }
        Record::Counted { sessions, chunks, ranges, versions } => v1::What::Counted(v1::Counted {
            sessions: *sessions,
            chunks: *chunks,
            ranges: *ranges,
            versions: *versions,
        }),
    }
}

fn known(what: v1::What) -> Result<Record, Nonsense> {
    let device = |bytes: Vec<u8>| {
        Mark::try_from(bytes).map(DeviceUuid).map_err(|_| nonsense("a device whose name has not sixteen bytes"))
    };
    let terms = |terms: Option<v1::Terms>| {
        let terms = terms.ok_or_else(|| nonsense("a session without terms"))?;
        let (limit, priority) = (Bytes::new(terms.limit), terms.priority);
        Ok(Terms { limit, priority, lends: terms.lends, answers: terms.answers })
    };
    Ok(match what {
        v1::What::Opened(of) => Record::Opened(SessionRecord {
            session: SessionId(of.session),
            secret: Mark::try_from(of.secret).map_err(|_| nonsense("a secret that has not sixteen bytes"))?,
            process: Process { pid: of.pid, pidfs: of.pidfs, start: of.start },
            name: of.name,
            tenant: of.tenant,
            terms: terms(of.terms)?,
            guarantee_max: Bytes::new(of.guarantee_max),
            opened_s: of.opened_s,
        }),
        v1::What::Termed(of) => Record::Termed {
            session: SessionId(of.session),
            terms: terms(of.terms)?,
            revision: of.revision,
            is_evicted: of.is_evicted,
        },
        v1::What::Guaranteed(of) => Record::Guaranteed {
            session: SessionId(of.session),
            device: device(of.device)?,
            bytes: Bytes::new(of.bytes),
        },
        v1::What::Ended(session) => Record::Ended { session: SessionId(session) },
        v1::What::Created(of) => {
            Record::Created { chunk: ChunkId(of.chunk), device: device(of.device)?, len: Bytes::new(of.len) }
        }
        v1::What::Granted(of) => {
            let whose = match of.whose.ok_or_else(|| nonsense("a chunk that is whose nobody says"))? {
                v1::Whose::Nobodys(_) => Whose::Nobodys,
                v1::Whose::Session(session) => Whose::Session(SessionId(session)),
                v1::Whose::Plan(plan) => Whose::Plan(PlanId(plan)),
                v1::Whose::Range(range) => Whose::Range(RangeId(range)),
            };
            Record::Granted { chunk: ChunkId(of.chunk), whose }
        }
        v1::What::Gone(chunk) => Record::Gone { chunk: ChunkId(chunk) },
        v1::What::Published(of) => Record::Published(PublishedRange {
            range: RangeId(of.range),
            name: of.name,
            tenant: of.tenant,
            version: of.version,
            key: of.key,
            content: Bytes::new(of.content),
            is_writable: of.is_writable,
            is_sealed: of.is_sealed,
            publisher: SessionId(of.publisher),
            linger_ms: of.linger_ms,
            chunks: of.chunks.into_iter().map(ChunkId).collect(),
        }),
        v1::What::Attached(of) => Record::Attached { range: RangeId(of.range), session: SessionId(of.session) },
        v1::What::Left(of) => Record::Left { range: RangeId(of.range), session: SessionId(of.session) },
        v1::What::Sealed(range) => Record::Sealed { range: RangeId(range) },
        v1::What::Withdrawn(range) => Record::Withdrawn { range: RangeId(range) },
        v1::What::RangeGone(range) => Record::RangeGone { range: RangeId(range) },
        v1::What::Drained(of) => Record::Drained { device: device(of.device)?, is_draining: of.is_draining },
        v1::What::Dealt(of) => Record::Dealt { ladder: of.ladder.into_iter().map(Bytes::new).collect() },
        v1::What::Counted(of) => {
            Record::Counted { sessions: of.sessions, chunks: of.chunks, ranges: of.ranges, versions: of.versions }
        }
    })
}
