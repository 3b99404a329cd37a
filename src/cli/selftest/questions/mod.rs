//! What nobody has written down about a driver, or not so that one could rely on it: each question is an experiment, and what it finds is its answer, never a
//! failure. A question that could not be asked, or whose experiment broke, says so and why.
//!
//! Bounded: a question may take [`QUESTION_MAX`], all of them together [`ALL_MAX`]. What an experiment may break (a context, by unmapping under work) it breaks in
//! another process.

mod descriptors;
mod memory;
mod misuse;
mod peers;
mod processes;
mod work;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::probe::in_words;
use crate::cli::table::Table;
use crate::clock::{Clock as _, SystemClock};
use crate::driver::{Capabilities, DeviceDescription, Driver, DriverName};
use crate::ids::{ChunkId, DeviceId};
use crate::memory::{Chunk, Device, Mapping};
use crate::units::Bytes;

/// What an experiment found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Yes,
    No,
    /// The question is for figures.
    Figures,
    /// It could not be asked here, or nothing can be said from what was seen; and why.
    Unknown(String),
}

impl Answer {
    fn of(holds: bool) -> Answer {
        if holds { Answer::Yes } else { Answer::No }
    }

    fn word(&self) -> &'static str {
        match self {
            Answer::Yes => "yes",
            Answer::No => "no",
            Answer::Figures => "figures",
            Answer::Unknown(_) => "unknown",
        }
    }
}

/// A question with what was found.
#[derive(Clone, Debug)]
pub(super) struct Answered {
    question: &'static str,
    answer: Answer,
    figures: Map<String, Value>,
}

impl Answered {
    pub(super) fn json(&self) -> Value {
        let mut shown = json!({ "question": self.question, "answer": self.answer.word(), "figures": self.figures });
        if let Answer::Unknown(why) = &self.answer {
            shown["why"] = json!(why);
        }
        shown
    }

    pub(super) fn add_to(&self, table: &mut Table) {
        let answer = match &self.answer {
            Answer::Unknown(why) => format!("unknown: {why}"),
            answer => answer.word().to_owned(),
        };
        table.row(vec![self.question.replace('_', " "), answer]);
        for (name, value) in &self.figures {
            let (name, value) = match (name.strip_suffix("_bytes"), value) {
                (Some(what), Value::Number(bytes)) if bytes.is_u64() => {
                    (what, Bytes::new(bytes.as_u64().unwrap_or_default()).to_string())
                }
                (_, Value::String(text)) => (name.as_str(), text.clone()),
                (_, value) => (name.as_str(), value.to_string()),
            };
            table.row(vec![format!("    {}", name.replace('_', " ")), format!("    {value}")]);
        }
    }
}

/// Where questions are asked.
struct Subject {
    name: DriverName,
    device: Arc<Device>,
    description: DeviceDescription,
}

/// An answer with its figures; or why there is none.
type Found = Result<(Answer, Map<String, Value>), String>;

/// Figures by name. Their units are in their names.
fn figures<const N: usize>(figures: [(&str, Value); N]) -> Map<String, Value> {
    figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

type Question = fn(&Subject) -> Found;

const QUESTIONS: &[(&str, Question)] = &[
    ("what_does_the_device_have", memory::device),
    ("does_a_chunk_take_more_than_its_bytes", memory::overhead),
    ("is_new_memory_cleared", memory::clearing),
    ("does_a_write_show_through_a_second_address", memory::alias),
    ("can_less_than_a_chunk_be_mapped", memory::part),
    ("how_many_descriptors_do_chunks_take", descriptors::count),
    ("can_an_import_be_exported_again", descriptors::reexport),
    ("does_a_descriptor_keep_memory_after_its_exporter_is_gone", processes::exporter_gone),
    ("does_released_memory_live_while_another_process_maps_it", processes::released_while_mapped),
    ("do_bytes_of_a_process_killed_in_its_work_return", processes::killed),
    ("do_they_return_while_a_forked_child_lives", processes::killed_with_child),
    ("does_work_of_a_killed_process_go_on", processes::work_goes_on),
    ("does_it_while_a_forked_child_lives", processes::work_goes_on_with_child),
    ("does_unmap_wait_for_queued_work", work::beside),
    ("may_memory_be_unmapped_under_queued_work", work::under),
    ("what_does_misuse_answer", misuse::answers),
    ("what_does_the_library_answer_to_misuse", misuse::answers_of_the_library),
    ("does_a_peer_reach_a_stitched_range", peers::reach),
    ("what_does_an_idle_daemon_take", peers::daemon),
];

/// Those about all devices at once: asked with the first that is shown, for with each of the others the experiment would be the same.
const OF_ALL_DEVICES: &[(&str, Question)] = &[("do_stitched_tensors_go_through_nccl", peers::collectives)];

/// Those that take from the whole machine what others may need: asked where everything is.
const TAKING: &[(&str, Question)] = &[("what_does_a_full_table_of_exports_answer", descriptors::full_table)];

/// The question that is asked before this process opens the driver.
const BEFORE_OPENING: &str = "does_a_descriptor_keep_memory_while_nobody_has_the_driver_open";
const BEFORE_OPENING_MAX: Duration = Duration::from_secs(20);

/// The longest of them look at tens of GiB, or wait for another process that makes its context: ten times what that takes.
const QUESTION_MAX: Duration = Duration::from_secs(60);

/// With checks and costs it stays under five minutes.
const ALL_MAX: Duration = Duration::from_secs(190);

/// Asks what cannot be asked any more once this process has opened the driver.
pub(super) fn ask_before_opening(name: DriverName, device: DeviceId, limit: Duration) -> Answered {
    let found = bounded(limit.min(BEFORE_OPENING_MAX), move || processes::descriptor_alone(name, device));
    answered(BEFORE_OPENING, found)
}

fn answered(question: &'static str, found: Found) -> Answered {
    let (answer, figures) = found.unwrap_or_else(|why| (Answer::Unknown(why), Map::new()));
    Answered { question, answer, figures }
}

/// What is asked about a device beside [`QUESTIONS`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside {
    pub(super) of_all_devices: bool,
    pub(super) taking: bool,
}

/// Asks every question about a device. Nobody else should use it meanwhile.
pub(super) fn ask_all(
    name: DriverName,
    driver: Arc<dyn Driver>,
    description: &DeviceDescription,
    beside: Beside,
    progress: &dyn Fn(&str),
) -> Vec<Answered> {
    let clock = SystemClock::new();
    let opened = Device::open(driver, description.id).map_err(in_words);
    let subject = opened.map(|device| Arc::new(Subject { name, device, description: description.clone() }));
    let ask = |(question, experiment): &(&'static str, Question)| {
        progress(&question.replace('_', " "));
        let limit = ALL_MAX.saturating_sub(clock.now()).min(QUESTION_MAX);
        let found = subject.as_ref().map_err(Clone::clone).and_then(|subject| within(limit, subject, *experiment));
        answered(question, found)
    };
    let of_all_devices = if beside.of_all_devices { OF_ALL_DEVICES } else { &[] };
    let taking = if beside.taking { TAKING } else { &[] };
    QUESTIONS.iter().chain(of_all_devices).chain(taking).map(ask).collect()
}

fn within(limit: Duration, subject: &Arc<Subject>, experiment: Question) -> Found {
    let subject = Arc::clone(subject);
    bounded(limit, move || experiment(&subject))
}

/// Asks on a thread of its own, because a call that hangs cannot be interrupted: it is left behind, and goes with the process.
fn bounded(limit: Duration, experiment: impl FnOnce() -> Found + Send + 'static) -> Found {
    let (send, receive) = channel();
    // If it has been given up nobody listens any more.
    std::thread::spawn(move || drop(send.send(experiment())));
    match receive.recv_timeout(limit) {
        Ok(found) => found,
        Err(RecvTimeoutError::Timeout) => Err(format!("no answer in {} s", limit.as_secs())),
        Err(RecvTimeoutError::Disconnected) => Err("the experiment is broken".to_owned()),
    }
}

/// Bytes that come back do it in milliseconds: an experiment waits so long.
const RETURN_MAX: Duration = Duration::from_secs(10);

/// The largest chunk of an experiment: work on it takes long enough to be seen.
const LEN_MAX: Bytes = Bytes::gib(1);
/// The same where the CPU does the work.
const PRETENDED_LEN_MAX: Bytes = Bytes::mib(64);

impl Subject {
    fn driver(&self) -> &dyn Driver {
        self.device.driver()
    }

    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn granularity(&self) -> Bytes {
        self.capabilities().granularity
    }

    fn free(&self) -> Result<Bytes, String> {
        Ok(self.driver().memory(self.device.id()).map_err(in_words)?.free)
    }

    /// A size for an experiment: a quarter of what is free, two granules at least.
    fn len(&self) -> Result<Bytes, String> {
        self.len_of(self.free()?)
    }

    /// The same, of what every device of the machine has free.
    fn len_everywhere(&self) -> Result<Bytes, String> {
        let free = |device: DeviceDescription| self.driver().memory(device.id).map(|memory| memory.free);
        let free: Result<Vec<Bytes>, _> = self.driver().devices().into_iter().map(free).collect();
        self.len_of(free.map_err(in_words)?.into_iter().min().unwrap_or_default())
    }

    fn len_of(&self, free: Bytes) -> Result<Bytes, String> {
        let two = Bytes::new(2 * self.granularity().get());
        let max = if self.name.is_pretended() { PRETENDED_LEN_MAX } else { LEN_MAX };
        let len = Bytes::new(free.get() / 4).min(max).round_down(two);
        if len.is_zero() { Err(format!("only {free} are free")) } else { Ok(len) }
    }

    fn needs_contents(&self) -> Result<(), String> {
        if self.capabilities().contents { Ok(()) } else { Err("this driver's memory has no contents".to_owned()) }
    }

    fn chunk(&self, len: Bytes) -> Result<Arc<Chunk>, String> {
        Chunk::create(&self.device, ChunkId(0), len).map(Arc::new).map_err(super::probe::memory_in_words)
    }

    fn stitch(&self, chunks: &[Arc<Chunk>]) -> Result<Mapping, String> {
        Mapping::stitch(chunks).map_err(super::probe::memory_in_words)
    }

    /// Waits until so much is free: how long that took, or none where it did not come to that in time.
    fn wait_for_free(&self, wanted: Bytes, limit: Duration) -> Result<Option<Duration>, String> {
        const STEP: Duration = Duration::from_micros(200);
        let clock = SystemClock::new();
        while self.free()? < wanted {
            if clock.now() > limit {
                return Ok(None);
            }
            std::thread::sleep(STEP);
        }
        Ok(Some(clock.now()))
    }
}

/// Milliseconds, or null for never.
fn millis(took: Option<Duration>) -> Value {
    took.map_or(Value::Null, |took| json!((took.as_secs_f64() * 1e6).round() / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::host::{HostDriver, HostOptions};

    #[test]
    fn a_question_that_hangs_or_breaks_is_given_up_and_says_so() {
        let driver = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::mib(64)])));
        let description = driver.devices().remove(0);
        let device = Device::open(driver, DeviceId(0)).unwrap();
        let subject = Arc::new(Subject { name: DriverName::Host, device, description });
        let hangs: Question = |_| loop {
            std::thread::park();
        };
        let breaks: Question = |_| unreachable!("the experiment is expected to panic");
        assert_eq!(within(Duration::ZERO, &subject, hangs), Err("no answer in 0 s".to_owned()));
        assert_eq!(within(QUESTION_MAX, &subject, breaks), Err("the experiment is broken".to_owned()));
        assert!(within(QUESTION_MAX, &subject, memory::device).is_ok());
    }
}
