//! Unmapping while work is queued, without the synchronizing that [`crate::driver::Driver::unmap`] asks of everybody else: in another process, which may lose
//! its context by it.

use serde_json::{Map, Value, json};

use super::{Answer, Found, Subject, figures};
use crate::cli::selftest::helper::Helper;
use crate::cli::selftest::probe::Role;

fn unmap(subject: &Subject, role: Role) -> Result<Value, String> {
    subject.needs_contents()?;
    let helper = Helper::start(subject.name, subject.device.id(), role, subject.len()?)?;
    Ok(helper.hear()?.0)
}

/// Unmaps what no work uses, while work on other memory is queued: harmless, whatever the driver does.
pub(super) fn beside(subject: &Subject) -> Found {
    Ok(waited(&unmap(subject, Role::UnmapBeside)?))
}

/// Unmaps what queued work uses. Where that is a fault, MPS would pass it on to every process of the device.
pub(super) fn under(subject: &Subject) -> Found {
    if subject.capabilities().mps {
        return Err("not asked: through MPS a fault of one process is one of all".to_owned());
    }
    Ok(survived(&unmap(subject, Role::UnmapUnder)?))
}

const OVER: &str = "the work was over before there was a queue";

/// What the other process said, as an answer: unmapping waits if the work is over when it comes back, and was not before.
fn waited(said: &Value) -> (Answer, Map<String, Value>) {
    let answer = match (said["was_over"] == true, said["is_over"].as_bool()) {
        (true, _) => Answer::Unknown(OVER.to_owned()),
        (false, Some(is_over)) => Answer::of(is_over),
        (false, None) => Answer::Unknown(said["work_error"].as_str().unwrap_or("the event was lost").to_owned()),
    };
    (answer, figures([("unmap_us", said["unmap_us"].clone()), ("queue_us", said["queue_us"].clone())]))
}

/// The same for whether nothing broke.
fn survived(said: &Value) -> (Answer, Map<String, Value>) {
    let refusals = [&said["unmap_error"], &said["work_error"]];
    let refusal = refusals.into_iter().find(|error| !error.is_null());
    let answer = match (said["was_over"] == true, refusal) {
        (true, _) => Answer::Unknown(OVER.to_owned()),
        (false, refusal) => Answer::of(refusal.is_none()),
    };
    let found = figures([
        ("work_was_queued", json!(said["was_over"] == false)),
        ("work_was_over_after_unmap", said["is_over"].clone()),
        ("unmap_us", said["unmap_us"].clone()),
        ("refusal", json!(refusal)),
    ]);
    (answer, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(was_over: bool, is_over: Option<bool>, work_error: Option<&str>) -> Value {
        json!({ "was_over": was_over, "is_over": is_over, "unmap_us": 1, "queue_us": 2, "unmap_error": null, "work_error": work_error })
    }

    #[test]
    fn unmapping_waited_if_the_work_is_over_that_was_not() {
        assert_eq!(waited(&said(false, Some(true), None)).0, Answer::Yes);
        assert_eq!(waited(&said(false, Some(false), None)).0, Answer::No);
        assert_eq!(waited(&said(true, Some(true), None)).0, Answer::Unknown(OVER.to_owned()));
        assert_eq!(waited(&said(false, None, Some("lost"))).0, Answer::Unknown("lost".to_owned()));
    }

    #[test]
    fn unmapping_under_work_is_allowed_if_nothing_broke() {
        assert_eq!(survived(&said(false, Some(true), None)).0, Answer::Yes);
        let (answer, found) = survived(&said(false, None, Some("illegal address")));
        assert_eq!((answer, &found["refusal"]), (Answer::No, &json!("illegal address")));
        assert_eq!(survived(&said(true, Some(true), None)).0, Answer::Unknown(OVER.to_owned()));
    }
}
