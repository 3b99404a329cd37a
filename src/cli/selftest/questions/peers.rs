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

/// All devices of the machine add up stitched ranges with NCCL, or what takes its place, once it has shown that it adds up whole chunks. In another process: it keeps threads, and what it breaks stays
/// broken.
pub(super) fn collectives(subject: &Subject) -> Found {
    subject.needs_contents()?;
    let helper = Helper::start(subject.name, subject.device.id(), Role::Collectives, subject.len_everywhere()?)?;
    // What fails before this says nothing of stitched ranges: none has been used.
    let (ready, _) = helper.hear()?;
    let mut figures = ready.as_object().cloned().unwrap_or_default();
    match helper.hear() {
        Ok((said, _)) => figures.extend(said.as_object().cloned().unwrap_or_default()),
        // Whole chunks went through; this has ended the process, or hangs.
        Err(why) => drop(figures.insert("refused".to_owned(), json!(why))),
    }
    let goes = figures.get("wrong_places").is_some_and(|wrong| *wrong == 0);
    let answer = match ready["ranks"].as_u64() {
        Some(1) if goes => {
            Answer::Unknown("one device: an all-reduce is a copy there, and that copy is right".to_owned())
        }
        _ => Answer::of(goes),
    };
    Ok((answer, figures))
}

pub(super) fn daemon(_: &Subject) -> Found {
    let mut figures = Map::new();
    figures.insert("asked_by".to_owned(), json!("tests/gpu/run"));
    Ok((Answer::Unknown("not asked here: tests/gpu starts a daemon and looks".to_owned()), figures))
}
