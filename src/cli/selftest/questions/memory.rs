//! What a chunk takes, what it holds when it is new, and where it shows.

use std::sync::Arc;

use serde_json::json;

use super::{Answer, Found, Subject, figures};
use crate::cli::selftest::helper::Helper;
use crate::cli::selftest::probe::{self, MARK, Role, Seen, in_words, memory_in_words};
use crate::driver::Access;
use crate::error::chain;
use crate::ids::ChunkId;
use crate::memory::Chunk;
use crate::units::{Bytes, Span};

pub(super) fn device(subject: &Subject) -> Found {
    let capabilities = subject.capabilities();
    Ok((
        Answer::Figures,
        figures([
            ("granularity_bytes", json!(capabilities.granularity.get())),
            ("total_bytes", json!(subject.description.total.get())),
            ("free_bytes", json!(subject.free()?.get())),
            ("rdma", json!(capabilities.rdma)),
            ("fabric", json!(capabilities.fabric)),
            ("mps", json!(capabilities.mps)),
        ]),
    ))
}

/// By a process that has no context: this one has, since its checks.
pub(super) fn overhead(subject: &Subject) -> Found {
    let (len, before) = (subject.len()?, subject.free()?);
    let helper = Helper::start(subject.name, subject.device.id(), Role::Bare, len)?;
    let (said, _) = helper.hear()?;
    let free = |name: &str| said[name].as_u64().ok_or(format!("the other process did not say {name}"));
    let (opened, with_chunk, with_context) = (free("before")?, free("with_chunk")?, free("with_context")?);
    let taken = opened.saturating_sub(with_chunk);
    Ok((
        Answer::of(taken > len.get()),
        figures([
            ("chunk_bytes", json!(len.get())),
            ("taken_bytes", json!(taken)),
            ("opening_the_driver_bytes", json!(before.get().saturating_sub(opened))),
            ("context_bytes", json!(with_chunk.saturating_sub(with_context))),
        ]),
    ))
}

/// The largest amount that is dirtied and looked at: a copy for every granule of it.
const LOOK_MAX: Bytes = Bytes::gib(64);
/// In chunks of this size.
const LOOK_LEN: Bytes = Bytes::mib(64);

/// Marks most of what is free, or takes what is free and looks.
fn in_new_memory(subject: &Subject, marks: bool) -> Result<(Bytes, Seen), String> {
    let len = LOOK_LEN.min(subject.len()?);
    let room = Bytes::new(subject.free()?.get() / 10 * 9).min(LOOK_MAX);
    let mut seen = Seen::default();
    let mut held = Vec::new();
    for _ in 0..room.get() / len.get() {
        // Somebody else may have become quicker.
        let Ok(chunk) = subject.chunk(len) else { break };
        let mapping = subject.stitch(&[chunk])?;
        let one = probe::look(&subject.device, mapping.span())?;
        seen = Seen { places: seen.places + one.places, whole: seen.whole + one.whole, dirty: seen.dirty + one.dirty };
        if marks {
            probe::mark(&subject.device, mapping.span())?;
        }
        held.push(mapping);
    }
    Ok((Bytes::new(len.get() * held.len() as u64), seen))
}

/// Three looks: at what others have left, at what this process has left, and at what a process has left that was killed.
pub(super) fn clearing(subject: &Subject) -> Found {
    subject.needs_contents()?;
    let (_, others) = in_new_memory(subject, true)?;
    let (looked_at, own) = in_new_memory(subject, false)?;
    let mut helper = Helper::start(subject.name, subject.device.id(), Role::Hold, subject.len()?)?;
    helper.hear()?;
    helper.kill()?;
    let (_, killed) = in_new_memory(subject, false)?;
    Ok((
        Answer::of(others.dirty + own.dirty + killed.dirty == 0),
        figures([
            ("looked_at_bytes", json!(looked_at.get())),
            ("places", json!(own.places)),
            ("dirty_at_first", json!(others.dirty)),
            ("dirty_after_own_release", json!(own.dirty)),
            ("with_own_mark", json!(own.whole)),
            ("dirty_after_a_killed_process", json!(killed.dirty)),
            ("with_the_killed_ones_mark", json!(killed.whole)),
        ]),
    ))
}

pub(super) fn alias(subject: &Subject) -> Found {
    subject.needs_contents()?;
    if !subject.capabilities().alias {
        return Err("this driver maps a chunk only once".to_owned());
    }
    let (driver, id) = (subject.driver(), subject.device.id());
    let chunk = subject.chunk(subject.granularity())?;
    let (one, other) = (subject.stitch(&[Arc::clone(&chunk)])?, subject.stitch(&[chunk])?);
    let stream = driver.create_stream(id).map_err(in_words)?;
    driver.fill(id, stream, one.span(), MARK).map_err(in_words)?;
    driver.synchronize(id).map_err(in_words)?;
    let seen = probe::look(&subject.device, other.span())?;
    driver.destroy_stream(stream).map_err(in_words)?;
    Ok((Answer::of(seen.whole == seen.places), figures([("after", json!("a fill and a synchronize"))])))
}

pub(super) fn part(subject: &Subject) -> Found {
    let (driver, id, granule) = (subject.driver(), subject.device.id(), subject.granularity());
    let whole = subject.chunk(Bytes::new(2 * granule.get()))?;
    let fd = whole.export().map_err(memory_in_words)?;
    let half = match driver.import(id, fd, granule) {
        Ok(half) => half,
        Err(error) => return Ok((Answer::No, figures([("import", json!(chain(&error)))]))),
    };
    let start = driver.reserve(id, granule, granule).map_err(in_words)?;
    let span = Span::new(start, granule).expect("a reserved span fits");
    let mapped = driver.map(start, half);
    let usable = mapped.clone().and_then(|()| driver.set_access(span, id, Access::ReadWrite));
    let answer = Answer::of(usable.is_ok());
    let refusal = usable.err().map(|error| chain(&error));
    if mapped.is_ok() {
        driver.unmap(span).map_err(in_words)?;
    }
    driver.unreserve(span).map_err(in_words)?;
    driver.release(half).map_err(in_words)?;
    Ok((answer, figures([("refusal", json!(refusal))])))
}

/// The chunk behind a descriptor.
pub(super) fn import(subject: &Subject, fd: std::os::fd::OwnedFd, len: Bytes) -> Result<Arc<Chunk>, String> {
    Chunk::import(&subject.device, ChunkId(0), fd, len).map(Arc::new).map_err(memory_in_words)
}
