//! Memory by tag: what a thread allocates under a tag lies apart, so that it can be put to sleep and woken without the rest.
//!
//! A tag is a runtime of its own for each device, made at the first allocation under it, there until the process ends. Where no tag was ever used all this is one load.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stitchd::error::chain;
use stitchd::ids::StreamId;
use stitchd::runtime::{NotLive, Runtime, SleepError};
use stitchd::session::fork;
use stitchd::units::{Bytes, DeviceAddress};

use crate::admission;
use crate::process;

/// Tags of a process: each is a set of pools of its own.
const TAGS_MAX: usize = 64;

static USED: AtomicBool = AtomicBool::new(false);
static TAGS: Mutex<Vec<Tag>> = Mutex::new(Vec::new());

thread_local! {
    /// What this thread is under, the innermost last.
    static UNDER: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

struct Tag {
    name: String,
    /// Its contents are kept while it sleeps, unless somebody says otherwise.
    keeps: bool,
    runtimes: Vec<(i32, &'static Runtime)>,
}

/// What of a tag, or of everything, is put to sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Keep {
    /// Whatever its tag says; what has none is kept.
    AsTagged,
    /// The contents.
    Contents,
    /// Nothing.
    Nothing,
}

fn tags() -> MutexGuard<'static, Vec<Tag>> {
    TAGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtimes of all tags, each with its device.
fn all() -> Vec<(i32, &'static Runtime)> {
    tags().iter().flat_map(|tag| tag.runtimes.clone()).collect()
}

/// The runtimes of all tags on a device.
pub(crate) fn of_device(device: i32) -> Vec<&'static Runtime> {
    if !USED.load(Ordering::Relaxed) || fork::is_child() {
        return Vec::new();
    }
    all().into_iter().filter(|(of, _)| *of == device).map(|(_, runtime)| runtime).collect()
}

/// What this thread allocates from now on is under this tag, until [`pop`].
pub(crate) fn push(name: &str, keeps: bool) -> Result<(), String> {
    process::check_child()?;
    let at = {
        let mut tags = tags();
        match tags.iter().position(|tag| tag.name == name) {
            Some(at) => {
                tags[at].keeps = keeps;
                at
            }
            None if tags.len() == TAGS_MAX => {
                return Err(format!("this process has {TAGS_MAX} tags, as many as it may have"));
            }
            None => {
                tags.push(Tag { name: name.to_owned(), keeps, runtimes: Vec::new() });
                tags.len() - 1
            }
        }
    };
    USED.store(true, Ordering::Release);
    let pushed = UNDER.try_with(|under| under.borrow_mut().push(at));
    pushed.map_err(|_| "this thread is at its end, where it can be under no tag any more".to_owned())
}

pub(crate) fn pop() -> Result<(), String> {
    let popped = UNDER.try_with(|under| under.borrow_mut().pop()).ok().flatten();
    popped.map(drop).ok_or_else(|| "this thread is under no tag".to_owned())
}

/// The runtime that this thread allocates from on a device.
#[inline]
pub(crate) fn runtime(device: i32) -> Result<&'static Runtime, String> {
    if USED.load(Ordering::Relaxed) { tagged(device) } else { process::runtime(device) }
}

#[cold]
fn tagged(device: i32) -> Result<&'static Runtime, String> {
    // At the very end of a thread it is under nothing.
    let under = UNDER.try_with(|under| under.borrow().last().copied()).ok().flatten();
    let Some(at) = under else { return process::runtime(device) };
    process::check_child()?;
    let known = |tag: &Tag| tag.runtimes.iter().find(|(of, _)| *of == device).map(|(_, runtime)| *runtime);
    if let Some(runtime) = known(&tags()[at]) {
        return Ok(runtime);
    }
    // Not under the lock: it may wait for a guarantee, and others free meanwhile.
    let made = process::another_runtime(device)?;
    let mut tags = tags();
    // Another thread may have made one meanwhile.
    if let Some(runtime) = known(&tags[at]) {
        return Ok(runtime);
    }
    let runtime: &'static Runtime = Box::leak(Box::new(made));
    tags[at].runtimes.push((device, runtime));
    Ok(runtime)
}

/// Takes back an allocation that is not in the device's own pools.
#[cold]
pub(crate) fn free(device: i32, address: DeviceAddress, stream: StreamId) -> Result<(), NotLive> {
    of_device(device).into_iter().find_map(|runtime| runtime.free(address, stream).ok()).ok_or(NotLive(address))
}

/// Does something with every runtime of every tag.
pub(crate) fn each(with: impl FnMut(&'static Runtime)) {
    // In a child somebody may have had the lock when it was forked.
    if USED.load(Ordering::Relaxed) && !fork::is_child() {
        all().into_iter().map(|(_, runtime)| runtime).for_each(with);
    }
}

/// The runtimes of a tag, or all there are, and whether their contents are kept.
fn of(name: Option<&str>) -> Result<Vec<(&'static Runtime, bool)>, String> {
    process::check_child()?;
    let mut found = Vec::new();
    if name.is_none() {
        process::each_untagged(|runtime| found.push((runtime, true)));
    }
    let tags = tags();
    let mut is_known = name.is_none();
    for tag in tags.iter().filter(|tag| name.is_none_or(|name| tag.name == name)) {
        is_known = true;
        found.extend(tag.runtimes.iter().map(|(_, runtime)| (*runtime, tag.keeps)));
    }
    if is_known { Ok(found) } else { Err(format!("nothing was allocated under a tag '{}'", name.unwrap_or_default())) }
}

/// Puts what is under a tag to sleep, or everything: what sleeps already sleeps on. Says how many bytes of device memory went back.
pub(crate) fn sleep(name: Option<&str>, keep: Keep) -> Result<Bytes, String> {
    // Waiting for a device breaks whatever is captured on it, by whichever pools.
    if process::is_capturing() {
        return Err(chain(&SleepError::Capturing));
    }
    let mut freed = Bytes::ZERO;
    for (runtime, keeps) in of(name)? {
        let keeps = match keep {
            Keep::AsTagged => keeps,
            Keep::Contents => true,
            Keep::Nothing => false,
        };
        match runtime.sleep(keeps) {
            Ok(slept) => freed += slept.freed,
            Err(SleepError::Asleep) => {}
            Err(error) => return Err(chain(&error)),
        }
    }
    // Whoever sleeps is in no iteration.
    admission::rest(&process::devices());
    Ok(freed)
}

/// Wakes what is under a tag, or everything: what is awake stays so. Says how many bytes of device memory it got.
pub(crate) fn wake(name: Option<&str>, wait: Duration) -> Result<Bytes, String> {
    let mut got = Bytes::ZERO;
    let until = process::now() + wait;
    for (runtime, _) in of(name)? {
        match runtime.wake(until.saturating_sub(process::now())) {
            Ok(bytes) => got += bytes,
            Err(SleepError::Awake) => {}
            Err(error) => return Err(chain(&error)),
        }
    }
    Ok(got)
}
