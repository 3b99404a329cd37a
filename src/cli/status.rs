//! `stitchd status`: devices and totals of a running daemon.

use clap::Args;
use serde_json::{Value, json};

use super::table::Table;
use super::{Common, DONE, Outcome, ask, print_json};
use crate::ids::DeviceUuid;
use crate::units::Bytes;
use crate::wire::v1;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  stitchd status --json | jq .devices[0].available_bytes")]
pub(super) struct StatusArgs {
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &StatusArgs) -> Outcome {
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
            format!("{}{}", state_of(device), if device.is_mps { ", MPS" } else { "" }),
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

fn state_of(status: &v1::DeviceStatus) -> &'static str {
    match (status.is_lost, status.is_draining) {
        (true, _) => "lost",
        (false, true) => "draining",
        (false, false) => "ready",
    }
}

fn name_of(status: &v1::DeviceStatus) -> (String, String) {
    status.device.as_ref().map_or_else(Default::default, |device| (device.ordinal.to_string(), device.model.clone()))
}

fn to_json(status: &v1::StatusReply) -> Value {
    let device = |status: &v1::DeviceStatus| {
        let device = status.device.clone().unwrap_or_default();
        let uuid: [u8; 16] = device.uuid.try_into().unwrap_or_default();
        json!({
            "ordinal": device.ordinal,
            "uuid": DeviceUuid(uuid).to_string(),
            "model": device.model,
            "total_bytes": device.total_bytes,
            "budget_bytes": status.budget_bytes,
            "creating_bytes": status.creating_bytes,
            "idle_bytes": status.idle_bytes,
            "reserved_bytes": status.reserved_bytes,
            "leased_bytes": status.leased_bytes,
            "shared_bytes": status.shared_bytes,
            "guaranteed_bytes": status.guaranteed_bytes,
            "peak_leased_bytes": status.peak_leased_bytes,
            "destroying_bytes": status.destroying_bytes,
            "quarantined_bytes": status.quarantined_bytes,
            "foreign_bytes": status.foreign_bytes,
            "available_bytes": status.available_bytes,
            "waiting_requests": status.waiting_requests,
            "refused_creates": status.refused_creates,
            "chunks": status.chunks,
            "chunks_max": status.chunks_max,
            "state": state_of(status),
            "mps": status.is_mps,
        })
    };
    json!({
        "version": status.version,
        "driver": status.driver,
        "uptime_ms": status.uptime_ms,
        "is_draining": status.is_draining,
        "devices": status.devices.iter().map(device).collect::<Vec<_>>(),
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
