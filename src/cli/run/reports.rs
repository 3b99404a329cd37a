//! What the processes of a command tell of themselves: a file each in a directory that was made for it, written by the Python package (`stitchd/torch/_report.py`).
//!
//! A file may be missing, of another version, or of somebody else: what cannot be read is passed over.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::compare::Compared;
use crate::cli::table::Table;
use crate::units::Bytes;

/// Figures of one process.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Report {
    pub(super) pid: u32,
    #[serde(default)]
    rank: Option<u64>,
    #[serde(default)]
    program: String,
    /// Which PyTorch it has.
    #[serde(default)]
    pub(super) torch: Option<String>,
    /// Why PyTorch keeps its own allocator, if it does.
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    iterations: u64,
    /// It has come to its end, and these figures are the last.
    #[serde(default)]
    is_over: bool,
    #[serde(default)]
    pub(super) devices: Vec<OfDevice>,
}

/// Figures of one process on one device.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct OfDevice {
    pub(super) device: u32,
    #[serde(default)]
    counters: BTreeMap<String, u64>,
}

impl OfDevice {
    fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    fn peak_live(&self) -> Bytes {
        Bytes::new(self.counter("peak_live_bytes"))
    }

    fn peak_held(&self) -> Bytes {
        Bytes::new(self.counter("peak_held_bytes"))
    }

    /// The part of what was reserved at the peak that nothing asked for.
    fn fragmentation(&self) -> f64 {
        let (live, held) = (self.peak_live().get() as f64, self.peak_held().get() as f64);
        if held > 0.0 { (1.0 - live / held).max(0.0) } else { 0.0 }
    }

    fn deviations(&self) -> u64 {
        self.counters.iter().filter(|(name, _)| name.starts_with("deviations_")).map(|(_, count)| count).sum()
    }

    fn requests(&self) -> u64 {
        self.counters.iter().filter(|(name, _)| name.starts_with("requests_")).map(|(_, count)| count).sum()
    }

    fn planned_share(&self) -> f64 {
        self.counter("requests_planned") as f64 / self.requests().max(1) as f64
    }
}

/// A file of figures is some KiB.
const REPORT_LEN_MAX: u64 = 1 << 20;

/// Everything that was told, by process.
#[derive(Debug)]
pub(super) struct Reports {
    directory: PathBuf,
    is_quiet: bool,
    by_pid: BTreeMap<u32, Report>,
}

impl Reports {
    pub(super) fn new(directory: &Path, is_quiet: bool) -> Reports {
        Reports { directory: directory.to_owned(), is_quiet, by_pid: BTreeMap::new() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Report> {
        self.by_pid.values()
    }

    /// Reads what has come, and tells people what is new in it.
    pub(super) fn look(&mut self) {
        for entry in std::fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let Some(report) = read(&entry.path()) else { continue };
            let before = self.by_pid.get(&report.pid).cloned().unwrap_or_default();
            if !self.is_quiet {
                news(&before, &report)
                    .iter()
                    .for_each(|line| super::say(&format!("stitchd: {}: {line}\n", name(&report))));
            }
            self.by_pid.insert(report.pid, report);
        }
    }

    /// The recordings that the command's processes have left under this name.
    pub(super) fn recorded(&self, name: &std::ffi::OsStr) -> String {
        let of = |report: &Report| {
            let path = |of: &OfDevice| crate::session::locate::recording_path(name, report.pid, of.device);
            report.devices.iter().map(path).collect::<Vec<_>>()
        };
        let there: Vec<String> =
            self.iter().flat_map(of).filter(|path| path.is_file()).map(|path| path.display().to_string()).collect();
        if there.is_empty() {
            let like = crate::session::locate::recording_path(name, std::process::id(), 0);
            let like = like.display();
            format!(
                "stitchd: no process that uses PyTorch has recorded anything; files of others are named as {like}\n"
            )
        } else {
            format!("stitchd: recorded {}\n", there.join(", "))
        }
    }

    /// The closing table.
    pub(super) fn summary(&self, compared: &[Compared]) -> String {
        let used: Vec<(&Report, &OfDevice)> =
            self.iter().flat_map(|report| report.devices.iter().map(move |of| (report, of))).collect();
        if used.is_empty() {
            let reason = self.iter().find_map(|report| report.reason.as_deref());
            return match reason {
                Some(why) => format!("stitchd: nothing was served: {why}\n"),
                None => {
                    "stitchd: no figures: no process of it has used a GPU through a PyTorch that finds this package \
                         (`pip install client/python`); what others take shows `stitchd sessions` while they run\n"
                        .to_owned()
                }
            };
        }
        let mut table = Table::new(&[
            "process",
            ">device",
            ">iterations",
            ">peak allocated",
            ">peak reserved",
            ">fragmentation",
            ">by plan",
            ">deviations",
            ">PyTorch would reserve",
        ]);
        let mut notes = String::new();
        for (report, of) in &used {
            let compared = compared.iter().find(|one| one.pid == report.pid && one.device == of.device);
            let would = compared.map_or_else(|| "-".to_owned(), Compared::shown);
            table.row(vec![
                name(report),
                of.device.to_string(),
                report.iterations.to_string(),
                of.peak_live().to_string(),
                of.peak_held().to_string(),
                format!("{:.1} %", 100.0 * of.fragmentation()),
                format!("{:.1} %", 100.0 * of.planned_share()),
                of.deviations().to_string(),
                would,
            ]);
            if !report.is_over {
                let _ = writeln!(
                    notes,
                    "{} ended without a last word; its figures are those of some seconds before",
                    name(report)
                );
            }
        }
        if compared.iter().any(|one| one.is_cut) {
            let _ = writeln!(notes, "* of the job's beginning, as far as it was recorded; --record has all of it");
        }
        format!("\n{table}{notes}")
    }

    /// The same for programs.
    pub(super) fn to_json(&self, code: u8, compared: &[Compared]) -> Value {
        let device = |report: &Report, of: &OfDevice| {
            let compared = compared.iter().find(|one| one.pid == report.pid && one.device == of.device);
            json!({
                "device": of.device,
                "peak_allocated_bytes": of.peak_live().get(),
                "peak_reserved_bytes": of.peak_held().get(),
                "fragmentation": of.fragmentation(),
                "requests": of.requests(),
                "deviations": of.deviations(),
                "pytorch_reserved_bytes": compared.map(|one| one.reserved.get()),
                "pytorch_is_of_beginning": compared.map(|one| one.is_cut),
                "counters": of.counters,
            })
        };
        let process = |report: &Report| {
            json!({
                "pid": report.pid,
                "rank": report.rank,
                "program": report.program,
                "iterations": report.iterations,
                "is_over": report.is_over,
                "reason": report.reason,
                "devices": report.devices.iter().map(|of| device(report, of)).collect::<Vec<_>>(),
            })
        };
        json!({ "exit_code": code, "processes": self.iter().map(process).collect::<Vec<_>>() })
    }
}

fn read(path: &Path) -> Option<Report> {
    let is_report = path.extension().is_some_and(|ending| ending == "json");
    // A pipe would never end.
    let is_small = || path.metadata().is_ok_and(|about| about.is_file() && about.len() <= REPORT_LEN_MAX);
    let text = (is_report && is_small()).then(|| std::fs::read(path).ok())??;
    serde_json::from_slice(&text).ok()
}

/// What people call a process.
fn name(report: &Report) -> String {
    match report.rank {
        Some(rank) => format!("rank {rank}"),
        None => {
            // It is somebody else's text.
            let program: String = report.program.chars().filter(|c| !c.is_control()).take(40).collect();
            format!("{program} {}", report.pid).trim_start().to_owned()
        }
    }
}

/// What a report says that the one before did not, line by line.
fn news(before: &Report, now: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for of in &now.devices {
        let was = before.devices.iter().find(|was| was.device == of.device);
        let rises = |name: &str| of.counter(name) > was.map_or(0, |was| was.counter(name));
        let device = of.device;
        if was.is_none() {
            lines.push(format!("device {device} is served by stitchd"));
        }
        if rises("plans_installed") {
            lines.push(format!(
                "device {device} goes by its plan, as seen in iteration {}: so far {} live in {}",
                now.iterations,
                of.peak_live(),
                of.peak_held()
            ));
        }
        if rises("plans_refused") {
            lines.push(format!(
                "device {device} could not take its plan at iteration {}: there was no memory for it",
                now.iterations
            ));
        }
        if rises("failures") {
            lines.push(format!(
                "device {device} has run out of memory: {} live at most, of {} held",
                of.peak_live(),
                of.peak_held()
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(text: &str) -> Report {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn people_are_told_what_is_new_and_once() {
        let first = report(r#"{"pid": 7, "rank": 3, "devices": [{"device": 0, "counters": {"peak_live_bytes": 5}}]}"#);
        assert_eq!(news(&Report::default(), &first), ["device 0 is served by stitchd"]);
        let second = report(
            r#"{"pid": 7, "iterations": 3, "devices": [{"device": 0, "counters": {"plans_installed": 1, "failures": 2, "peak_live_bytes": 1048576, "peak_held_bytes": 2097152}}]}"#,
        );
        assert_eq!(
            news(&first, &second),
            [
                "device 0 goes by its plan, as seen in iteration 3: so far 1.0 MiB live in 2.0 MiB",
                "device 0 has run out of memory: 1.0 MiB live at most, of 2.0 MiB held"
            ]
        );
        assert_eq!(news(&second, &second), [""; 0]);
    }

    #[test]
    fn what_is_no_report_is_passed_over() {
        let place = tempfile::tempdir().unwrap();
        for (name, text) in [("1.json", "{"), ("2.json", "[]"), ("3.new", "{\"pid\": 3}"), ("4.json", "{\"pid\": 4}")] {
            std::fs::write(place.path().join(name), text).unwrap();
        }
        let mut reports = Reports::new(place.path(), true);
        reports.look();
        assert_eq!(reports.iter().map(|report| report.pid).collect::<Vec<_>>(), [4]);
        assert!(reports.summary(&[]).starts_with("stitchd: no figures: no process of it has used a GPU"));
    }

    #[test]
    fn the_table_has_what_was_asked_for_beside_what_was_reserved() {
        let place = tempfile::tempdir().unwrap();
        let text = r#"{"pid": 9, "program": "train.py", "iterations": 12, "is_over": true, "devices": [{"device": 1, "counters": {"peak_live_bytes": 3145728, "peak_held_bytes": 4194304, "requests_planned": 3, "requests_small": 1, "deviations_late": 2, "deviations_blocked": 1}}]}"#;
        std::fs::write(place.path().join("9.json"), text).unwrap();
        let mut reports = Reports::new(place.path(), true);
        reports.look();
        let compared = [Compared { pid: 9, device: 1, reserved: Bytes::mib(6), is_cut: true }];
        let summary = reports.summary(&compared);
        let row: Vec<&str> = summary.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(row.join(" "), "train.py 9 1 12 3.0 MiB 4.0 MiB 25.0 % 75.0 % 3 6.0 MiB *");
        assert!(summary.ends_with("as far as it was recorded; --record has all of it\n"), "{summary}");
        let json = reports.to_json(0, &compared);
        let device = &json["processes"][0]["devices"][0];
        assert_eq!(
            (device["fragmentation"].as_f64(), device["pytorch_reserved_bytes"].as_u64()),
            (Some(0.25), Some(6 << 20))
        );
    }
}
