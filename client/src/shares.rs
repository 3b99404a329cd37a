//! The shared ranges of this process, by where they begin.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stitchd::error::chain;
use stitchd::ids::DeviceId;
use stitchd::session::shared::{Attaching, Draft, Publishing, SharedRange};
use stitchd::units::{AddressSpan, Bytes};

use crate::process;

/// Until they are closed, or the process ends.
static SHARES: Mutex<BTreeMap<usize, Share>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
enum Share {
    Draft(Draft),
    Range(SharedRange),
}

/// What a range looks like from here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) span: AddressSpan,
    pub(crate) content: Bytes,
    pub(crate) version: u64,
    pub(crate) device: DeviceId,
    pub(crate) is_writable: bool,
    pub(crate) is_sealed: bool,
}

impl Share {
    fn place(&self) -> Place {
        match self {
            Share::Draft(draft) => Place {
                span: draft.span(),
                content: Bytes::ZERO,
                version: 0,
                device: draft.device(),
                is_writable: true,
                is_sealed: false,
            },
            Share::Range(range) => Place {
                span: range.span(),
                content: range.content(),
                version: range.version(),
                device: range.device(),
                is_writable: range.is_writable(),
                is_sealed: range.is_sealed(),
            },
        }
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<usize, Share>> {
    SHARES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep(share: Share) -> Place {
    let place = share.place();
    lock().insert(place.span.start().get() as usize, share);
    place
}

pub(crate) fn create(len: Bytes, device: i32) -> Result<Place, String> {
    let ordinal = u32::try_from(device).map_err(|_| format!("device {device} is not one that a process can have"))?;
    let session = process::daemon_session()?;
    session.draft(ordinal, len).map(|draft| keep(Share::Draft(draft))).map_err(|error| chain(&error))
}

pub(crate) fn publish(address: usize, how: &Publishing) -> Result<Place, String> {
    process::check_child()?;
    // Not under the lock: the daemon is asked meanwhile.
    let share = lock().remove(&address);
    let draft = match share {
        Some(Share::Draft(draft)) => draft,
        Some(share @ Share::Range(_)) => {
            keep(share);
            return Err("the range is published already".to_owned());
        }
        None => return Err(none(address)),
    };
    match draft.publish(how) {
        Ok(range) => Ok(keep(Share::Range(range))),
        Err(unpublished) => {
            let why = chain(&unpublished.error);
            if let Some(draft) = unpublished.draft {
                keep(Share::Draft(*draft));
            }
            Err(why)
        }
    }
}

pub(crate) fn attach(wanted: &Attaching) -> Result<Place, String> {
    let session = process::daemon_session()?;
    session.attach(wanted).map(|range| keep(Share::Range(range))).map_err(|error| chain(&error))
}

pub(crate) fn close(address: usize) -> Result<(), String> {
    process::check_child()?;
    let share = lock().remove(&address);
    share.map(drop).ok_or_else(|| none(address))
}

fn none(address: usize) -> String {
    format!("no shared range of this process begins at {address:#x}")
}
