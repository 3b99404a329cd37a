//! Devices among each other; and what is asked elsewhere.

use serde_json::{Map, Value, json};

use super::{Answer, Found, Subject};
use crate::cli::selftest::helper::Helper;
use crate::cli::selftest::probe::Role;

/// Every other device writes to a range of two chunks here. In another process: a device that does not reach the memory loses it its context.
pub(super) fn reach(subject: &Subject) -> Found {
    subject.needs_contents()?;
    if subject.driver().devices().len() < 2 {
        return Err("one device".to_owned());
    }
    let helper = Helper::start(subject.name, subject.device.id(), Role::Peers, subject.len()?)?;
    let (said, _) = helper.hear()?;
    let peers = said["peers"].as_object().cloned().unwrap_or_default();
    let all = !peers.is_empty() && peers.values().all(|peer| peer["is_there"] == true);
    let figure = |(peer, said): (String, Value)| (format!("device_{peer}"), said);
    Ok((Answer::of(all), peers.into_iter().map(figure).collect()))
}

pub(super) fn collectives(_: &Subject) -> Found {
    Err("not asked here: it takes the library and a framework; tests/gpu asks through PyTorch".to_owned())
}

pub(super) fn daemon(_: &Subject) -> Found {
    let mut figures = Map::new();
    figures.insert("asked_by".to_owned(), json!("tests/gpu/run"));
    Ok((Answer::Unknown("not asked here: tests/gpu starts a daemon and looks".to_owned()), figures))
}
