//! Memory between processes: who keeps it, and when it comes back after a process is gone.

use std::os::fd::AsFd as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Answer, Found, RETURN_MAX, Subject, figures, memory, millis};
use crate::cli::selftest::helper::{Helper, Watched};
use crate::cli::selftest::probe::{self, Role, memory_in_words};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::DriverName;
use crate::ids::DeviceId;
use crate::units::Bytes;

/// Where the driver's figures are of this process alone nothing can be said about others'.
const ALONE: &str = "this driver does not know what other processes have";

/// Works so long before it is killed: so much is queued by then that there is a middle.
const AT_WORK: Duration = Duration::from_millis(30);

/// With a child alive the bytes may never return: this long is waited before the child is ended.
const WITH_CHILD_MAX: Duration = Duration::from_secs(2);

pub(super) fn exporter_gone(subject: &Subject) -> Found {
    subject.needs_contents()?;
    let (len, before) = (subject.len()?, subject.free()?);
    let mut helper = Helper::start(subject.name, subject.device.id(), Role::Hold, len)?;
    let (_, mut fds) = helper.hear()?;
    let fd = fds.pop().ok_or("no descriptor came")?;
    let is_seen = subject.free()? < before;
    helper.kill()?;
    let copy = fd.try_clone().map_err(|error| error.to_string())?;
    let (imports, is_there) = match memory::import(subject, copy, len) {
        Ok(chunk) => {
            let seen = probe::look(&subject.device, subject.stitch(&[chunk])?.span())?;
            (json!(true), seen.whole == seen.places)
        }
        Err(error) => (json!(error), false),
    };
    let kept = before.saturating_sub(subject.free()?);
    drop(fd);
    // What else came and went meanwhile is not these bytes.
    let back = before.saturating_sub(kept) + len;
    let returned = if is_seen { subject.wait_for_free(back, RETURN_MAX)? } else { None };
    Ok((
        Answer::of(is_there),
        figures([
            ("chunk_bytes", json!(len.get())),
            ("kept_bytes", json!(kept.get())),
            ("imports", imports),
            ("bytes_are_there", json!(is_there)),
            ("returned_after_the_last_descriptor_ms", if is_seen { millis(returned) } else { json!(ALONE) }),
        ]),
    ))
}

pub(super) fn released_while_mapped(subject: &Subject) -> Found {
    subject.needs_contents()?;
    let len = subject.len()?;
    let helper = Helper::start(subject.name, subject.device.id(), Role::Show, len)?;
    let chunk = subject.chunk(len)?;
    let fd = chunk.export().map_err(memory_in_words)?;
    helper.tell(&[fd.as_fd()])?;
    helper.hear()?;
    let mapping = subject.stitch(&[chunk])?;
    probe::mark(&subject.device, mapping.span())?;
    let held = subject.free()?;
    // The chunk's handle goes with its mapping here; the other process has both.
    drop((mapping, fd));
    let released = subject.free()?;
    helper.tell(&[])?;
    let (said, _) = helper.hear()?;
    let is_there = said["is_there"] == true;
    Ok((
        Answer::of(is_there),
        figures([
            ("chunk_bytes", json!(len.get())),
            ("bytes_are_there", json!(is_there)),
            ("returned_at_release_bytes", json!(released.saturating_sub(held).get())),
        ]),
    ))
}

/// A process that is killed in the middle of its work: how long until it is gone, and when its bytes are back.
fn kill_at_work(subject: &Subject, role: Role) -> Found {
    subject.needs_contents()?;
    let (len, before) = (subject.len()?, subject.free()?);
    let mut helper = Helper::start(subject.name, subject.device.id(), role, len)?;
    let (said, _) = helper.hear()?;
    let child = said["child"].as_i64().map(|pid| Watched::of(pid as i32)).transpose()?;
    std::thread::sleep(AT_WORK);
    let held = subject.free()?;
    if held >= before {
        return Err(ALONE.to_owned());
    }
    let (socket_ended, gone) = helper.kill_and_watch()?;
    let limit = if child.is_some() { WITH_CHILD_MAX } else { RETURN_MAX };
    // The chunk's bytes first; a context's may take longer.
    let chunk_back = subject.wait_for_free((held + len).min(before), limit)?;
    let all_back = if chunk_back.is_some() { subject.wait_for_free(before, limit)? } else { None };
    let after_child = match &child {
        Some(child) => {
            child.kill();
            child.wait()?;
            millis(subject.wait_for_free(before, RETURN_MAX)?)
        }
        None => Value::Null,
    };
    let mut found = figures([
        ("chunk_bytes", json!(len.get())),
        ("held_bytes", json!(before.saturating_sub(held).get())),
        // Null: it had not when the process was gone.
        ("socket_ended_after_kill_ms", millis(socket_ended)),
        ("gone_after_kill_ms", millis(Some(gone))),
        ("chunk_returned_after_gone_ms", millis(chunk_back)),
        ("all_returned_after_that_ms", millis(all_back)),
    ]);
    if child.is_some() {
        found.insert("all_returned_after_the_child_ms".to_owned(), after_child);
    } else if all_back.is_none() {
        found.insert("missing_bytes".to_owned(), json!(missing(subject, before)?.get()));
    }
    Ok((Answer::of(chunk_back.is_some()), found))
}

fn missing(subject: &Subject, before: Bytes) -> Result<Bytes, String> {
    Ok(before.saturating_sub(subject.free()?))
}

pub(super) fn killed(subject: &Subject) -> Found {
    kill_at_work(subject, Role::Fill)
}

pub(super) fn killed_with_child(subject: &Subject) -> Found {
    kill_at_work(subject, Role::FillForked)
}

/// Work is looked at for so long before the kill, until it is seen, and after it.
const LOOK_MAX: Duration = Duration::from_secs(2);
const LOOK_AFTER: Duration = Duration::from_millis(500);

/// Whether work that a process has queued goes on once it is gone: fills of a long range, each with another value, seen through another process's mapping of its last bytes. A kernel would
/// take a compiler; the device does both by the same queues.
fn look_on(subject: &Subject, role: Role) -> Found {
    subject.needs_contents()?;
    let len = subject.len()?;
    let mut helper = Helper::start(subject.name, subject.device.id(), role, len)?;
    let (said, mut fds) = helper.hear()?;
    let child = said["child"].as_i64().map(|pid| Watched::of(pid as i32)).transpose()?;
    let fd = fds.pop().ok_or("no descriptor came")?;
    let mapping = subject.stitch(&[memory::import(subject, fd, len)?])?;
    let last = probe::marks(mapping.span(), subject.granularity()).last().ok_or("there is nothing to look at")?;
    let look = || {
        let mut byte = [0];
        subject.driver().read(last, &mut byte).map_err(probe::in_words).map(|()| byte[0])
    };
    let mut seen = look()?;
    let (mut before, mut after, mut last_change) = (0_u64, 0_u64, None);
    let clock = SystemClock::new();
    while clock.now() < AT_WORK || (before == 0 && clock.now() < LOOK_MAX) {
        let now = look()?;
        before += u64::from(now != seen);
        seen = now;
    }
    let (_, gone) = helper.kill_and_watch()?;
    let clock = SystemClock::new();
    // What was done until it was gone is no work that went on.
    seen = look()?;
    while clock.now() < LOOK_AFTER {
        let now = look()?;
        if now != seen {
            after += 1;
            last_change = Some(clock.now());
        }
        seen = now;
    }
    if let Some(child) = &child {
        child.kill();
        child.wait()?;
    }
    if before == 0 {
        return Err("its work was not seen through another process's mapping".to_owned());
    }
    Ok((
        Answer::of(after > 0),
        figures([
            ("chunk_bytes", json!(len.get())),
            ("changes_before_the_kill", json!(before)),
            ("gone_after_kill_ms", millis(Some(gone))),
            ("changes_after_it_was_gone", json!(after)),
            ("last_change_after_it_was_gone_ms", millis(last_change)),
        ]),
    ))
}

pub(super) fn work_goes_on(subject: &Subject) -> Found {
    look_on(subject, Role::Fill)
}

pub(super) fn work_goes_on_with_child(subject: &Subject) -> Found {
    look_on(subject, Role::FillForked)
}

/// A size that every device has, for whoever does not know the device.
const ALONE_LEN: Bytes = Bytes::mib(16);
/// Nobody has the driver open for so long.
const ALONE_TIME: Duration = Duration::from_secs(1);

/// Asked before this process opens the driver: for a while nobody has it open, and one process, which never had, has a descriptor.
pub(super) fn descriptor_alone(name: DriverName, device: DeviceId) -> Found {
    let mut holder = Helper::start(name, device, Role::Hold, ALONE_LEN)?;
    let (_, mut fds) = holder.hear()?;
    let fd = fds.pop().ok_or("no descriptor came")?;
    holder.kill()?;
    std::thread::sleep(ALONE_TIME);
    let finder = Helper::start(name, device, Role::Show, ALONE_LEN)?;
    finder.tell(&[fd.as_fd()])?;
    let found = finder.hear().and_then(|_| {
        finder.tell(&[])?;
        finder.hear()
    });
    let (is_there, imports) = match found {
        Ok((said, _)) => (said["is_there"] == true, json!(true)),
        Err(error) => (false, json!(error)),
    };
    Ok((
        Answer::of(is_there),
        figures([
            ("chunk_bytes", json!(ALONE_LEN.get())),
            ("alone_ms", millis(Some(ALONE_TIME))),
            ("imports", imports),
            ("bytes_are_there", json!(is_there)),
        ]),
    ))
}
