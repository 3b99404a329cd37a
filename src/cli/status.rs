//! `stitchd status`: devices and totals of a running daemon.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use super::table::Table;
use super::{Common, DONE, Failure, Outcome, ask, print_json};
use crate::daemon::live::json as show;
use crate::units::Bytes;
use crate::wire::v1;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd status --json | jq .devices[0].available_bytes\n  stitchd status --all      # every daemon of this node, those of pods among them"
)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    common: Common,
    /// Ask every daemon of this node, and not only one: those whose sockets are in /run/stitchd*, and in volumes of pods (sidecars)
    #[arg(long, conflicts_with = "socket")]
    all: bool,
}

/// Where daemons of a node have their sockets: their directories, as patterns in which a star stands for one name, or a part of it.
const PLACES: [&str; 2] =
    ["/run/stitchd*/stitchd.sock", "/var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/sockets/own/stitchd.sock"];

/// The files that a pattern names, in the order of their names.
fn matching(root: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned()];
    for part in pattern.trim_start_matches('/').split('/') {
        let is_like = |name: &str| match part.split_once('*') {
            Some((before, after)) => {
                name.len() >= before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
            }
            None => name == part,
        };
        let within = |directory: PathBuf| -> Vec<PathBuf> {
            if !part.contains('*') {
                return vec![directory.join(part)];
            }
            // One that cannot be read has none that we could ask.
            let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
            let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
            let mut names: Vec<String> = names.filter(|name| is_like(name)).collect();
            names.sort();
            names.into_iter().map(|name| directory.join(name)).collect()
        };
        found = found.into_iter().flat_map(within).collect();
    }
    found.retain(|path| path.exists());
    found
}

/// Every daemon of this node, each with what it answers.
fn run_all(args: &StatusArgs) -> Outcome {
    let mut sockets: Vec<PathBuf> = PLACES.iter().flat_map(|pattern| matching(Path::new("/"), pattern)).collect();
    let own = args.common.socket();
    if !sockets.contains(&own) && own.exists() {
        sockets.insert(0, own.clone());
    }
    if sockets.is_empty() {
        return Err(Failure::NoDaemon(format!(
            "this user finds no daemon's socket on this node; looked for {} and {}",
            own.display(),
            PLACES.join(" and ")
        )));
    }
    let answers: Vec<(PathBuf, Result<v1::StatusReply, Failure>)> =
        sockets.into_iter().map(|socket| (socket.clone(), ask::status(&socket))).collect();
    let is_good = answers.iter().all(|(_, answer)| answer.is_ok());
    if args.common.json {
        let daemon = |(socket, answer): &(PathBuf, Result<v1::StatusReply, Failure>)| match answer {
            Ok(status) => json!({ "socket": socket, "status": to_json(status) }),
            Err(error) => json!({ "socket": socket, "error": error.to_string() }),
        };
        print_json(&json!({ "daemons": answers.iter().map(daemon).collect::<Vec<_>>() }));
        return Ok(u8::from(!is_good));
    }
    let mut table =
        Table::new(&["daemon", "device", ">budget", ">leased", ">available", ">foreign", ">sessions", "state"]);
    for (socket, answer) in &answers {
        let name = socket.display().to_string();
        match answer {
            Ok(status) => {
                for device in &status.devices {
                    table.row(vec![
                        name.clone(),
                        name_of(device).0,
                        Bytes::new(device.budget_bytes).to_string(),
                        Bytes::new(device.leased_bytes).to_string(),
                        Bytes::new(device.available_bytes).to_string(),
                        Bytes::new(device.foreign_bytes).to_string(),
                        status.sessions.len().to_string(),
                        if status.is_draining { "shutting down".into() } else { show::device_state(device).to_owned() },
                    ]);
                }
            }
            Err(error) => {
                let mut row = vec![String::new(); table.columns()];
                row[0] = name;
                row[7] = error.to_string();
                table.row(row);
            }
        }
    }
    out!("{table}");
    Ok(u8::from(!is_good))
}

pub(super) fn run(args: &StatusArgs) -> Outcome {
    if args.all {
        return run_all(args);
    }
    let status = ask::status(&args.common.socket())?;
    if args.common.json {
        print_json(&to_json(&status));
        return DONE;
    }
    outln!(
        "stitchd {} on the {} driver, up {} s{}",
        status.version,
        status.driver,
        status.uptime_ms / 1000,
        if status.is_draining { ", shutting down" } else { "" }
    );
    let mut table = Table::new(&[
        "device",
        "model",
        ">total",
        ">budget",
        ">leased",
        ">peak",
        ">guaranteed",
        ">shared",
        ">reserved",
        ">idle",
        ">available",
        ">foreign",
        ">quarantined",
        ">waiting",
        ">chunks",
        "state",
    ]);
    for device in &status.devices {
        let (name, model) = name_of(device);
        let bytes = |bytes: u64| Bytes::new(bytes).to_string();
        table.row(vec![
            name,
            model,
            bytes(device.device.as_ref().map_or(0, |device| device.total_bytes)),
            bytes(device.budget_bytes),
            bytes(device.leased_bytes),
            bytes(device.peak_leased_bytes),
            bytes(device.guaranteed_bytes),
            bytes(device.shared_bytes),
            bytes(device.reserved_bytes),
            bytes(device.idle_bytes),
            bytes(device.available_bytes),
            bytes(device.foreign_bytes),
            bytes(device.quarantined_bytes + device.destroying_bytes),
            device.waiting_requests.to_string(),
            format!("{} of {}", device.chunks, device.chunks_max),
            format!("{}{}", show::device_state(device), if device.is_mps { ", MPS" } else { "" }),
        ]);
    }
    out!("{table}");
    outln!(
        "sessions: {}; {} came back by release, {} after deaths; {} of {} exports, {} of {} open files",
        status.sessions.len(),
        Bytes::new(status.returned_by_release_bytes),
        Bytes::new(status.returned_by_death_bytes),
        status.exports,
        status.exports_max,
        status.open_fds,
        status.open_fds_max
    );
    match status.keeper {
        Some(keeper) if keeper.pid > 0 => outln!(
            "keeper: process {} holds what outlives this daemon; {} of journal",
            keeper.pid,
            Bytes::new(keeper.journal_bytes)
        ),
        Some(_) => outln!("keeper: none just now; one is being started"),
        None => outln!("keeper: none, what this daemon holds ends with it"),
    }
    for text in status.devices.iter().filter_map(beyond) {
        outln!("{text}");
    }
    let unkept: u64 = status.devices.iter().map(|device| device.unkept_bytes).sum();
    if unkept > 0 {
        outln!(
            "{} are with those alone who have them mapped, as neither keeper nor journal could tell this daemon whose they are (there is none, or the journal is damaged): they cannot be shared or handed on, and go back to the driver as their jobs end",
            Bytes::new(unkept)
        );
    }
    if status.asked > 0 {
        outln!(
            "asked back: {} in {}, {} not answered in time (`stitchd revocations`)",
            Bytes::new(status.returned_by_revocation_bytes),
            crate::units::counted(status.asked, "question"),
            status.unanswered
        );
    }
    DONE
}

fn name_of(status: &v1::DeviceStatus) -> (String, String) {
    status.device.as_ref().map_or_else(Default::default, |device| (device.ordinal.to_string(), device.model.clone()))
}

/// What is said of a device of which more is there than the daemon is to have: one before it could lease more.
fn beyond(status: &v1::DeviceStatus) -> Option<String> {
    let device = status.device.as_ref()?;
    let states = [
        status.creating_bytes,
        status.idle_bytes,
        status.reserved_bytes,
        status.leased_bytes,
        status.shared_bytes,
        status.destroying_bytes,
        status.quarantined_bytes,
    ];
    let held = states.into_iter().fold(0, u64::saturating_add);
    let beyond = held.checked_sub(device.total_bytes).filter(|beyond| *beyond > 0)?;
    Some(format!(
        "device {}: {} are held of it, as the daemon before could lease more than the {} of this one; nothing more is leased until {} have come back",
        device.ordinal,
        Bytes::new(held),
        Bytes::new(device.total_bytes),
        Bytes::new(beyond)
    ))
}

fn to_json(status: &v1::StatusReply) -> Value {
    json!({
        "version": status.version,
        "driver": status.driver,
        "uptime_ms": status.uptime_ms,
        "is_draining": status.is_draining,
        "devices": status.devices.iter().map(show::device).collect::<Vec<_>>(),
        "sessions": status.sessions.len(),
        "waiting_requests": status.waiting_requests,
        "returned_by_release_bytes": status.returned_by_release_bytes,
        "returned_by_death_bytes": status.returned_by_death_bytes,
        "returned_by_revocation_bytes": status.returned_by_revocation_bytes,
        "asked": status.asked,
        "unanswered": status.unanswered,
        "exports": status.exports,
        "exports_max": status.exports_max,
        "open_fds": status.open_fds,
        "open_fds_max": status.open_fds_max,
        "keeper": status.keeper.map(|keeper| json!({
            "pid": keeper.pid,
            "restarts": keeper.restarts,
            "journal_bytes": keeper.journal_bytes,
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_a_name_or_a_part_of_it_and_what_is_not_there_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["run/stitchd", "run/stitchd-b", "run/other", "pods/1/v/own", "pods/2/v", "pods/3/v/own"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        for name in ["run/stitchd/s", "run/stitchd-b/s", "run/other/s", "pods/1/v/own/s", "pods/3/v/own/s"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let found = |pattern: &str| -> Vec<String> {
            let short = |path: PathBuf| path.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned();
            matching(dir.path(), pattern).into_iter().map(short).collect()
        };
        assert_eq!(found("/run/stitchd*/s"), ["run/stitchd/s", "run/stitchd-b/s"]);
        assert_eq!(found("/pods/*/v/own/s"), ["pods/1/v/own/s", "pods/3/v/own/s"]);
        assert_eq!(found("/nowhere/*/s"), Vec::<String>::new());
    }

    #[test]
    fn a_device_of_which_more_is_held_than_there_is_to_be_is_named() {
        let device = v1::Device { ordinal: 3, total_bytes: 32 << 20, ..v1::Device::default() };
        let status = |leased_mib: u64, idle_mib: u64| v1::DeviceStatus {
            device: Some(device.clone()),
            leased_bytes: leased_mib << 20,
            idle_bytes: idle_mib << 20,
            ..v1::DeviceStatus::default()
        };
        assert_eq!(beyond(&status(30, 2)), None);
        let text = beyond(&status(38, 2)).unwrap();
        assert!(text.starts_with("device 3: 40.0 MiB are held of it"), "{text}");
        assert!(text.contains("the 32.0 MiB of this one") && text.ends_with("until 8.0 MiB have come back"), "{text}");
    }
}
