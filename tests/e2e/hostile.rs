//! Clients that mean no good: what they are refused is counted, and nobody else notices.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::Duration;

use stitchd::limits;
use stitchd::wire::v1::{self, client_frame, daemon_frame};

use crate::raw::{self, Grpc};
use crate::support::{TestDaemon, eventually};

const MIB: u64 = 1 << 20;

/// How often something was refused for this reason.
fn refused(daemon: &TestDaemon, reason: &str) -> u64 {
    let (_, text) = daemon.http("/metrics");
    let name = format!("stitchd_refusals_total{{reason=\"{reason}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// A figure of the daemon that has no labels.
fn figure(daemon: &TestDaemon, name: &str) -> u64 {
    let (_, text) = daemon.http("/metrics");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

fn claim(daemon: &TestDaemon, ticket: &[u8]) -> Result<usize, v1::Refused> {
    let channel = raw::chunk_socket(daemon);
    raw::send(&channel, client_frame::What::Claim(v1::Claim { protocol: 1, ticket: ticket.to_vec() }));
    let mut count = 0;
    loop {
        match raw::receive(&channel) {
            (daemon_frame::What::Batch(batch), fds) => {
                count += fds.len();
                raw::send(&channel, client_frame::What::Ack(v1::Ack { request: batch.request }));
                if batch.is_last {
                    return Ok(count);
                }
            }
            (daemon_frame::What::Refused(refused), _) => return Err(refused),
            (other, _) => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_ticket_of_a_shared_range_is_good_once_and_only_while_it_is_held() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http=127.0.0.1:0"]);
    let grpc = Grpc::connect(&daemon);
    let (one, link) = raw::link(&daemon, &grpc, "one");
    let leased = raw::acquire(&link, 1, raw::want(&one, 8)).unwrap();
    let ids: Vec<u64> = leased.iter().map(|(id, _)| *id).collect();
    let publish = |session, chunk_ids: &[u64], name: &str| {
        let request =
            v1::PublishRequest { name: name.into(), chunk_ids: chunk_ids.to_vec(), ..v1::PublishRequest::default() };
        grpc.publish(session, request)
    };
    // Chunks of somebody else, none, one twice: nothing is published, and they are whose they were.
    let (two, _other) = raw::link(&daemon, &grpc, "two");
    assert!(publish(&two, &ids, "stolen").is_err());
    assert!(publish(&one, &[], "nothing").is_err());
    assert!(publish(&one, &[ids[0], ids[0]], "twice").is_err());
    let published = publish(&one, &ids, "weights").unwrap();
    let range = published.range.unwrap().range_id;
    assert_eq!(claim(&daemon, &published.ticket), Ok(4));
    assert!(claim(&daemon, &published.ticket).is_err(), "it was used");
    // What is shared is nobody's to release or to publish again.
    assert!(grpc.release(&one, ids.clone()).is_err());
    assert!(publish(&one, &ids, "again").is_err());
    assert!(grpc.detach(&two, range).is_err(), "it holds nothing");
    // Held no more before the ticket is shown.
    let attached = grpc.attach(&two, "weights").unwrap();
    grpc.detach(&two, range).unwrap();
    assert!(claim(&daemon, &attached.ticket).unwrap_err().message.contains("does not hold"));
    // Held once is let go of once.
    let attached = grpc.attach(&two, "weights").unwrap();
    assert_eq!(claim(&daemon, &attached.ticket), Ok(4));
    grpc.detach(&two, range).unwrap();
    assert!(grpc.detach(&two, range).is_err());
    for guess in 0..200_u8 {
        assert!(claim(&daemon, &[guess; 16]).is_err());
        assert!(grpc.attach(&two, &format!("weights-{guess}")).is_err());
    }
    assert!(refused(&daemon, "ticket") >= 201 && refused(&daemon, "range") >= 200);
    let stolen = v1::OpenReply { secret: vec![0; 16], ..one.clone() };
    assert!(grpc.attach(&stolen, "weights").is_err());
    assert_eq!(refused(&daemon, "secret"), 1);
    // The others are served as before.
    assert_eq!(daemon.device("shared_bytes"), 8 * MIB);
    raw::acquire(&link, 2, raw::want(&one, 8)).unwrap();
    grpc.detach(&one, range).unwrap();
    daemon.wait_for_device("shared_bytes", 0);
}

/// What a session has given up it may get again, under the same numbers, while the ticket that came with it
/// the first time is good still.
#[test]
fn a_ticket_that_nobody_shows_takes_away_nothing_that_came_later() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http=127.0.0.1:0"]);
    let grpc = Grpc::connect(&daemon);
    let session = grpc.open("forgetful", 1).unwrap();
    let ids = |lease: &v1::AcquireReply| lease.chunks.iter().map(|chunk| chunk.chunk_id).collect::<Vec<u64>>();
    let lease = || grpc.acquire(&session, raw::want(&session, 8)).unwrap();
    let first = lease();
    grpc.release(&session, ids(&first)).unwrap();
    let second = lease();
    assert_eq!(ids(&first), ids(&second), "a session gets its own chunks again");
    assert!(claim(&daemon, &first.ticket).unwrap_err().message.contains("has released"));
    // Another that goes the same way, and is never shown.
    let third = lease();
    grpc.release(&session, ids(&third)).unwrap();
    let fourth = lease();
    assert_eq!((claim(&daemon, &second.ticket), claim(&daemon, &fourth.ticket)), (Ok(4), Ok(4)));
    // The same of shared ranges.
    let range = |name: &str| {
        let request =
            v1::PublishRequest { name: name.into(), chunk_ids: ids(&lease()), ..v1::PublishRequest::default() };
        let published = grpc.publish(&session, request).unwrap();
        (published.range.unwrap().range_id, published.ticket)
    };
    let (weights, ticket) = range("weights");
    assert_eq!(claim(&daemon, &ticket), Ok(4));
    let attached = grpc.attach(&session, "weights").unwrap();
    grpc.detach(&session, weights).unwrap();
    let again = grpc.attach(&session, "weights").unwrap();
    assert_ne!(attached.ticket, again.ticket);
    assert_eq!(claim(&daemon, &again.ticket), Ok(4));
    std::thread::sleep(Duration::from_millis(limits::TICKET_MS_MAX + 2_000));
    assert_eq!(daemon.device("leased_bytes"), 16 * MIB, "the second and the fourth lease");
    let held: BTreeSet<u64> = ids(&second).into_iter().chain(ids(&fourth)).collect();
    assert!(ids(&lease()).iter().all(|chunk| !held.contains(chunk)), "no chunk is leased twice");
    // Held since it was published, and attached once more.
    grpc.detach(&session, weights).unwrap();
    grpc.detach(&session, weights).unwrap();
    assert!(grpc.detach(&session, weights).is_err());
}

#[test]
fn a_thousand_sessions_that_come_and_go_leave_no_descriptor_and_no_task() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http=127.0.0.1:0"]);
    // A scrape is a task, too: both are counted from within one.
    let figures = || (figure(&daemon, "stitchd_open_fds"), figure(&daemon, "stitchd_tasks"));
    let before = figures();
    let rounds = 50;
    for round in 0..rounds {
        let grpc = Grpc::connect(&daemon);
        let mut sessions: Vec<_> = (0..20).map(|n| raw::link(&daemon, &grpc, &format!("{round}-{n}"))).collect();
        for (session, link) in &mut sessions {
            let _notices = grpc.watch(session);
            raw::acquire(link, 1, raw::want(session, 2)).unwrap();
        }
        // Half say goodbye, the others are gone with their connection and closed by whoever is left.
        for (session, link) in sessions {
            drop(link);
            grpc.close(&session).unwrap();
        }
    }
    let after = eventually("everything of them is gone", || {
        let now = figures();
        (now.0 <= before.0 + 2 && now.1 <= before.1 + 2).then_some(now)
    });
    println!("{} sessions: {before:?} descriptors and tasks before, {after:?} after", rounds * 20);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(figure(&daemon, "stitchd_sessions"), 0);
}

#[test]
fn the_sockets_lie_in_a_directory_that_is_the_daemons_and_its_groups() {
    let dir = tempfile::tempdir().unwrap();
    let (config, runtime) = (dir.path().join("stitchd.toml"), dir.path().join("run"));
    let group = std::fs::metadata(dir.path()).unwrap().gid();
    std::fs::write(&config, format!("socket_group = '{group}'\n")).unwrap();
    let (config, socket_dir) =
        (format!("--config={}", config.display()), format!("--runtime-dir={}", runtime.display()));
    let serve = ["serve", &socket_dir, "--device=0=64MiB", "--driver=host"];
    let mut daemon =
        crate::support::stitchd().args(serve).arg(&config).stderr(std::process::Stdio::null()).spawn().unwrap();
    eventually("it serves there", || runtime.join("chunks.sock").exists().then_some(()));
    eventually("it listens there", || {
        (std::fs::metadata(runtime.join("chunks.sock")).unwrap().mode() & 0o777 == 0o660).then_some(())
    });
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!((mode(&runtime), mode(&runtime.join("stitchd.sock"))), (0o750, 0o660));
    assert_eq!(std::fs::metadata(runtime.join("chunks.sock")).unwrap().gid(), group);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    // One in which everybody may write is none.
    std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o777)).unwrap();
    let output = crate::support::run(&serve);
    let said = crate::support::stderr(&output);
    assert!(!output.status.success() && said.contains("everybody may write there"), "{said}");
}
