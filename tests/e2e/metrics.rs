//! What Prometheus and probes see.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use stitchd::error::chain;
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::giving::GiverThread;
use stitchd::units::Bytes;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::raw::Grpc;
use crate::support::{TestDaemon, config_file, eventually, hear, python, stitchd};

/// The value of the one series whose line begins so.
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(series));
    let line = line.unwrap_or_else(|| panic!("there is no {series} in:\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// The beginning of a series of a session of this process, which is in no pod.
fn of_session(name: &str, uuid: impl std::fmt::Display, session: &str) -> String {
    let uid = rustix::process::geteuid().as_raw();
    format!(
        "{name}{{UUID=\"{uuid}\",tenant=\"uid:{uid}\",client_namespace=\"\",client_pod=\"\",client_container=\"\",session=\"{session}\","
    )
}

fn scrape(daemon: &TestDaemon) -> String {
    let (status, text) = daemon.http("/metrics");
    assert!(status.contains("200"), "{status}");
    text
}

#[test]
fn every_figure_is_there_from_the_first_scrape_and_follows_what_happens() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let uuid = daemon.uuid();
    let text = scrape(&daemon);
    for counter in [
        format!("stitchd_requests_total{{UUID=\"{uuid}\",served=\"planned\"}}"),
        format!("stitchd_plan_deviations_total{{UUID=\"{uuid}\",kind=\"blocked\"}}"),
        format!("stitchd_returned_bytes_total{{UUID=\"{uuid}\",reason=\"death\"}}"),
        format!("stitchd_allocation_failures_total{{UUID=\"{uuid}\",reason=\"exhausted\"}}"),
        format!("stitchd_allocation_failures_total{{UUID=\"{uuid}\",reason=\"fragmented\"}}"),
        "stitchd_driver_call_seconds_count{call=\"create\"}".to_owned(),
        "stitchd_driver_failures_total{call=\"create\"}".to_owned(),
        "stitchd_revocations_total{result=\"asked\"}".to_owned(),
        "stitchd_session_ends_total{reason=\"died\"}".to_owned(),
        format!("stitchd_rescued_bytes_total{{UUID=\"{uuid}\"}}"),
        "stitchd_acquire_seconds_count{result=\"granted\"}".to_owned(),
        "stitchd_sessions".to_owned() + " ",
    ] {
        assert_eq!(value(&text, &counter), 0.0, "{counter}");
    }
    let device = |text: &str, state: &str| {
        value(text, &format!("stitchd_device_bytes{{gpu=\"0\",UUID=\"{uuid}\",state=\"{state}\"}}"))
    };
    let mib = |n: u64| (n << 20) as f64;
    assert_eq!((device(&text, "total"), device(&text, "leased")), (mib(64), 0.0));

    let runtime = daemon.runtime("quoted\" \\ name");
    let kept = runtime.alloc(&Request::of(Bytes::mib(8))).unwrap();
    runtime.alloc(&Request::of(Bytes::mib(100))).unwrap_err();
    let text = scrape(&daemon);
    assert_eq!((device(&text, "leased"), value(&text, "stitchd_sessions ")), (mib(8), 1.0));
    let session = of_session("stitchd_session_bytes", &uuid, "quoted\\\" \\\\ name") + "kind=";
    assert_eq!(value(&text, &format!("{session}\"live\"}}")), mib(8));
    assert_eq!(value(&text, &format!("{session}\"leased\"}}")), mib(8));
    assert_eq!(value(&text, &format!("stitchd_requests_total{{UUID=\"{uuid}\",served=\"pool\"}}")), 1.0);
    assert_eq!(
        value(&text, &format!("stitchd_allocation_failures_total{{UUID=\"{uuid}\",reason=\"exhausted\"}}")),
        1.0
    );
    let free =
        |kind: &str| value(&text, &format!("stitchd_largest_free_bytes{{gpu=\"0\",UUID=\"{uuid}\",kind=\"{kind}\"}}"));
    assert_eq!(free("stitchable"), mib(56));
    assert!(value(&text, "stitchd_acquire_seconds_count{result=\"granted\"}") >= 1.0);
    assert!(value(&text, "stitchd_acquire_seconds_count{result=\"refused\"}") >= 1.0);
    assert!(value(&text, "stitchd_driver_call_seconds_count{call=\"create\"}") >= 4.0, "8 MiB in chunks of 2");
    let served = of_session("stitchd_session_requests_total", &uuid, "quoted\\\" \\\\ name") + "served=\"pool\"}";
    assert_eq!(value(&text, &served), 1.0);
    assert!(value(&text, "process_resident_memory_bytes ") > 1e6 && value(&text, "process_start_time_seconds ") > 1e9);

    // A session that is over leaves no series, and its counts.
    runtime.free(kept, stitchd::ids::StreamId::DEFAULT).unwrap();
    drop(runtime);
    let text =
        eventually("the session ends", || Some(scrape(&daemon)).filter(|text| value(text, "stitchd_sessions ") == 0.0));
    assert!(!text.contains("quoted"));
    assert_eq!(value(&text, &format!("stitchd_requests_total{{UUID=\"{uuid}\",served=\"pool\"}}")), 1.0);
    assert_eq!(value(&text, &format!("stitchd_returned_bytes_total{{UUID=\"{uuid}\",reason=\"release\"}}")), mib(8));
}

#[test]
fn failures_are_told_apart_and_sessions_of_one_name_are_one_series() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let uuid = daemon.uuid();
    let limited = daemon.session_with_limit("limited", Bytes::mib(8));
    let limited = limited.runtime(0, RuntimeConfig::default()).unwrap();
    limited.alloc(&Request::of(Bytes::mib(16))).unwrap_err();
    let twins = [daemon.runtime("twin"), daemon.runtime("twin")];
    for twin in &twins {
        twin.alloc(&Request::of(Bytes::mib(8))).unwrap();
    }
    let text = scrape(&daemon);
    let failed = |reason: &str| {
        value(&text, &format!("stitchd_allocation_failures_total{{UUID=\"{uuid}\",reason=\"{reason}\"}}"))
    };
    assert_eq!((failed("limit"), failed("exhausted"), failed("fragmented")), (1.0, 0.0, 0.0));
    let leased = of_session("stitchd_session_bytes", &uuid, "twin") + "kind=\"leased\"}";
    assert_eq!((value(&text, &leased), text.matches(leased.as_str()).count()), ((16_u64 << 20) as f64, 1));
}

#[test]
fn what_was_counted_under_the_daemon_before_is_no_news_of_the_one_that_follows() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let uuid = daemon.uuid();
    let session = daemon.session("stays");
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    for _ in 0..3 {
        runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
    }
    runtime.alloc(&Request::of(Bytes::mib(100))).unwrap_err();
    let served = format!("stitchd_requests_total{{UUID=\"{uuid}\",served=\"pool\"}}");
    let of_it = of_session("stitchd_session_requests_total", &uuid, "stays") + "served=\"pool\"}";
    let failed = format!("stitchd_allocation_failures_total{{UUID=\"{uuid}\",reason=\"exhausted\"}}");
    let counted = |daemon: &TestDaemon| {
        let text = scrape(daemon);
        [&served, &of_it, &failed].map(|series| value(&text, series))
    };
    assert_eq!(counted(&daemon), [3.0, 3.0, 1.0]);
    let daemon = daemon.follow(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    eventually("that the session is there again", || session.is_attached().then_some(()));
    assert_eq!(counted(&daemon), [0.0, 0.0, 0.0]);
    runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
    runtime.alloc(&Request::of(Bytes::mib(100))).unwrap_err();
    assert_eq!(counted(&daemon), [1.0, 1.0, 1.0]);
    // Its own figures are its whole life's.
    let listed = daemon.cli_json(&["sessions"]);
    assert_eq!(listed["sessions"][0]["counters"]["requests_pool"], 4, "{listed}");
}

#[test]
fn the_counters_of_a_name_do_not_go_down_when_one_of_its_sessions_ends() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let uuid = daemon.uuid();
    let served = of_session("stitchd_session_requests_total", &uuid, "twin") + "served=\"pool\"}";
    let (stays, goes) = (daemon.runtime("twin"), daemon.runtime("twin"));
    stays.alloc(&Request::of(Bytes::mib(4))).unwrap();
    for _ in 0..5 {
        goes.alloc(&Request::of(Bytes::mib(4))).unwrap();
    }
    assert_eq!(value(&scrape(&daemon), &served), 6.0);
    goes.alloc(&Request::of(Bytes::mib(4))).unwrap();
    drop(goes);
    let text =
        eventually("the session ends", || Some(scrape(&daemon)).filter(|text| value(text, "stitchd_sessions ") == 1.0));
    assert_eq!(value(&text, &served), 7.0, "with what it did after the last scrape");
}

#[test]
fn nobody_uses_more_than_he_holds_whatever_he_writes_on_his_page() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let program = "
p = malloc(8 * MIB)
with open('/proc/self/maps') as maps:
    page = next(int(line.split('-')[0], 16) for line in maps if 'stitchd-stats' in line)
for counter in (6, 8, 12, 13):
    ctypes.c_uint64.from_address(page + 64 + 8 * counter).value = 1 << 55
say('has written')
sys.stdin.read()
";
    let Some(mut client) = python(&daemon, program) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "has written");
    let (uuid, text) = (daemon.uuid(), scrape(&daemon));
    let largest =
        |kind: &str| value(&text, &format!("stitchd_largest_free_bytes{{gpu=\"0\",UUID=\"{uuid}\",kind=\"{kind}\"}}"));
    let mib = |n: u64| (n << 20) as f64;
    assert_eq!((largest("stitchable"), largest("contiguous")), (mib(64), mib(56)));
    let listed = daemon.cli_json(&["sessions"]);
    assert_eq!(listed["sessions"][0]["counters"]["live_bytes"], 8 << 20, "{listed}");
    drop(client.stdin.take());
    client.wait().unwrap();
}

#[test]
fn who_is_refused_as_everybody_waits_has_failed_for_want_of_memory() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let config = || RuntimeConfig { wait: Duration::from_secs(2), ..RuntimeConfig::default() };
    let sessions = ["one", "other"].map(|name| daemon.session(name));
    let runtimes = sessions.each_ref().map(|session| session.runtime(0, config()).unwrap());
    for runtime in &runtimes {
        runtime.alloc(&Request::of(Bytes::mib(24))).unwrap();
    }
    let fails = |runtime: &Runtime| chain(&runtime.alloc(&Request::of(Bytes::mib(24))).unwrap_err());
    let [one, other] = std::thread::scope(|scope| {
        runtimes.each_ref().map(|runtime| scope.spawn(move || fails(runtime))).map(|thread| thread.join().unwrap())
    });
    assert!(one.contains("waits for more") || other.contains("waits for more"), "{one}; {other}");
    let (uuid, text) = (daemon.uuid(), scrape(&daemon));
    let failed = ["exhausted", "driver"].map(|reason| {
        value(&text, &format!("stitchd_allocation_failures_total{{UUID=\"{uuid}\",reason=\"{reason}\"}}"))
    });
    assert_eq!(failed, [2.0, 0.0]);
}

#[test]
fn prometheus_gets_the_format_that_it_asks_for_and_everybody_else_the_one_that_all_read() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let text = scrape(&daemon);
    assert!(text.contains("# TYPE stitchd_requests_total counter\n") && !text.contains("# EOF"));
    let asked = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let (head, text) = daemon.http_with("/metrics", &format!("Accept: {asked}\r\n"));
    assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(text.contains("# TYPE stitchd_requests counter\n") && text.ends_with("# EOF\n"));
    assert!(text.contains("\nstitchd_requests_total{") && !text.contains("\n\n"));
}

#[test]
fn idle_pieces_show_as_fragmentation() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    let uuid = daemon.uuid();
    let runtime = daemon.runtime("fragmented");
    let blocks: Vec<_> = (0..32).map(|_| runtime.alloc(&Request::of(Bytes::mib(2))).unwrap()).collect();
    for block in blocks.iter().step_by(2) {
        runtime.free(*block, stitchd::ids::StreamId::DEFAULT).unwrap();
    }
    // Figures of idle memory are written when the pools change, not at every free.
    runtime.alloc(&Request::of(Bytes::mib(64))).unwrap_err();
    let text = scrape(&daemon);
    let ratio =
        |kind: &str| value(&text, &format!("stitchd_fragmentation_ratio{{gpu=\"0\",UUID=\"{uuid}\",kind=\"{kind}\"}}"));
    assert!((ratio("external") - (1.0 - 2.0 / 32.0)).abs() < 1e-9, "{}", ratio("external"));
    assert!((ratio("internal") - 0.5).abs() < 1e-9, "{}", ratio("internal"));
    let free =
        |kind: &str| value(&text, &format!("stitchd_largest_free_bytes{{gpu=\"0\",UUID=\"{uuid}\",kind=\"{kind}\"}}"));
    assert_eq!((free("contiguous"), free("stitchable")), ((2_u64 << 20) as f64, (32_u64 << 20) as f64));
}

#[test]
fn probes_say_alive_and_ready() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0"]);
    for page in ["/livez", "/readyz"] {
        let (status, body) = daemon.http(page);
        assert!(status.contains("200") && body.contains("ok"), "{page}: {status} {body}");
    }
    assert!(daemon.http("/nothing").0.contains("404"));
}

#[test]
fn a_daemon_that_waits_for_its_sessions_to_end_is_alive_and_not_ready_whoever_asks() {
    let (_dir, config) = config_file("keeper = 'none'\ndrain = '30s'\n");
    let mut daemon = TestDaemon::with(&["--device=0=64MiB", "--http", "127.0.0.1:0", &config]);
    let grpc = Grpc::connect(&daemon);
    let services = ["", "stitchd.v1.Sessions", "stitchd.v1.Leases", "stitchd.v1.Plans", "stitchd.v1.Ranges"];
    assert_eq!(services.map(|service| grpc.health(service)), [ServingStatus::Serving; 5]);
    assert_eq!(daemon.cli(&["health"]).status.code(), Some(0));
    let session = grpc.open("goes on", 1).unwrap();
    let pid = rustix::process::Pid::from_raw(daemon.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("that it is not ready", || daemon.http("/readyz").0.contains("503").then_some(()));
    assert!(daemon.http("/livez").0.contains("200"));
    eventually("that gRPC says so", || (grpc.health("") == ServingStatus::NotServing).then_some(()));
    assert_eq!(services.map(|service| grpc.health(service)), [ServingStatus::NotServing; 5]);
    assert_eq!(grpc.health("stitchd.v1.Admin"), ServingStatus::Serving);
    assert_eq!(daemon.cli(&["health"]).status.code(), Some(1));
    let text = scrape(&daemon);
    assert!(text.contains("stitchd_ready 0"));
    // Nobody could have any more of it.
    let uuid = daemon.uuid();
    assert_eq!(value(&text, &format!("stitchd_available_bytes{{gpu=\"0\",UUID=\"{uuid}\"}}")), 0.0);
    let all = stitchd().args(["status", "--all"]).env("STITCHD_RUNTIME_DIR", daemon.path()).output().unwrap();
    let all = String::from_utf8(all.stdout).unwrap();
    let row = all.lines().find(|line| line.starts_with(daemon.path().to_str().unwrap())).unwrap_or(&all);
    assert!(row.ends_with("shutting down"), "{row}");
    grpc.close(&session).unwrap();
    assert!(daemon.terminate().success());
}

#[test]
fn a_process_on_two_devices_is_counted_on_each_and_asked_for_what_lies_idle_there() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--device=1=64MiB", "--http", "127.0.0.1:0"]);
    let session = daemon.session("both");
    let runtimes: Vec<_> =
        (0..2).map(|device| std::sync::Arc::new(session.runtime(device, RuntimeConfig::default()).unwrap())).collect();
    let _givers: Vec<_> =
        runtimes.iter().map(|runtime| GiverThread::begin(&session, std::sync::Arc::clone(runtime)).unwrap()).collect();
    for (runtime, live, idle) in [(&runtimes[0], 8, 16), (&runtimes[1], 24, 32)] {
        runtime.alloc(&Request::of(Bytes::mib(live))).unwrap();
        let freed = runtime.alloc(&Request::of(Bytes::mib(idle))).unwrap();
        runtime.free(freed, StreamId::DEFAULT).unwrap();
        // Figures that take a walk are written then.
        runtime.mark_iteration();
    }
    let text = scrape(&daemon);
    for (device, live, parked) in [(0, 8_u64 << 20, 16_u64 << 20), (1, 24 << 20, 32 << 20)] {
        let uuid = session.devices().iter().find(|of| of.ordinal == device).unwrap().uuid;
        for (kind, bytes) in [("live", live), ("parked", parked), ("leased", live + parked)] {
            let line = text.lines().find(|line| {
                line.starts_with("stitchd_session_bytes")
                    && line.contains(&uuid.to_string())
                    && line.contains(&format!("kind=\"{kind}\""))
            });
            let line = line.unwrap_or_else(|| panic!("no {kind} of device {device} in {text}"));
            assert!(line.ends_with(&format!(" {bytes}")), "{line}");
        }
    }
    assert_eq!(daemon.cli_json(&["sessions"])["sessions"][0]["counters"]["live_bytes"], 32 << 20);
    let served = |text: &str, device: u32| {
        let uuid = session.devices().iter().find(|of| of.ordinal == device).unwrap().uuid;
        value(text, &format!("stitchd_requests_total{{UUID=\"{uuid}\",served=\"pool\"}}"))
    };
    assert_eq!([served(&text, 0), served(&text, 1)], [2.0, 2.0]);
    // What lies idle on each is known, and exactly that is asked for.
    let config = RuntimeConfig { wait: std::time::Duration::from_secs(10), ..RuntimeConfig::default() };
    let other = daemon.session("other");
    for (device, wanted) in [(0, 56), (1, 40)] {
        let runtime = other.runtime(device, config).unwrap();
        runtime.alloc(&Request::of(Bytes::mib(wanted))).unwrap();
    }
    assert_eq!(daemon.status()["unanswered"], 0);
    // What a session has counted stays where it was counted when it is over: a counter that goes back is taken for a restart.
    let before = scrape(&daemon);
    let (of_first, of_second) = (served(&before, 0), served(&before, 1));
    drop(other);
    let text = eventually("a session ends", || {
        Some(scrape(&daemon)).filter(|text| value(text, "stitchd_session_ends_total{reason=\"closed\"}") >= 1.0)
    });
    assert_eq!([served(&text, 0), served(&text, 1)], [of_first, of_second]);
}

#[test]
fn what_nobody_can_have_counted_spoils_nothing_for_others() {
    let daemon = TestDaemon::with(&["--device=0=256MiB", "--http", "127.0.0.1:0"]);
    let honest = daemon.runtime("honest");
    honest.alloc(&Request::of(Bytes::mib(5))).unwrap();
    let job = "\
p = malloc(5 * MIB)
with open('/proc/self/maps') as maps:
    page = next(int(line.split('-')[0], 16) for line in maps if 'stitchd-stats' in line)
ctypes.memset(page + 64, 0xff, 512)
say('lied')
sys.stdin.readline()
";
    let Some(mut client) = python(&daemon, job) else { return };
    assert_eq!(hear(&mut BufReader::new(client.stdout.take().unwrap()).lines()), "lied");
    let counts = || {
        let requests = |line: &&str| line.starts_with("stitchd_requests_total{");
        let metrics = scrape(&daemon);
        let figures = metrics.lines().filter(requests).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>());
        figures.map(|figure| figure.unwrap()).sum::<f64>()
    };
    assert_eq!(counts(), 1.0, "the honest one's");
    // For people, too.
    assert_eq!(daemon.cli_json(&["top", "--once"])["sessions"].as_array().unwrap().len(), 2);
    assert!(daemon.cli(&["sessions"]).status.success());
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    eventually("the liar is gone", || (daemon.status()["sessions"] == 1).then_some(()));
    assert_eq!(counts(), 1.0);
}
