//! The page of a replay in a real browser, where one is installed: it draws everything, and text from outside does nothing.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

use stitchd::ids::StreamId;
use stitchd::replay::{Placed, Point, PoolReport, Record, Report};
use stitchd::trace::{Context, Event, EventKind, Phase, Trace};
use stitchd::units::{Bytes, DeviceAddress, Tick};
use tempfile::TempDir;

/// Ends its script, and would say so in the page if it were run.
const HOSTILE: &str = "</script><img src=x onerror=\"document.body.dataset.error='run'\"><b id=planted>";
const REQUESTS: u32 = 500;

/// How long a browser may take, on a machine that does other things, too.
const PATIENCE: Duration = Duration::from_secs(120);

fn browser() -> Option<&'static str> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let is_there =
        |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    names.into_iter().find(is_there)
}

/// What has become of the page after its scripts ran.
fn dom(browser: &str, page: &[u8]) -> String {
    let dir = TempDir::new().unwrap();
    let (file, dumped) = (dir.path().join("page.html"), dir.path().join("dom.html"));
    std::fs::write(&file, page).unwrap();
    let mut process = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"])
        .args(["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--virtual-time-budget=20000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .stdin(Stdio::null())
        .stdout(File::create(&dumped).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut waited = Duration::ZERO;
    while process.try_wait().unwrap().is_none() {
        if waited > PATIENCE {
            process.kill().unwrap();
            process.wait().unwrap();
            panic!("the browser has not ended after {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
        waited += Duration::from_millis(50);
    }
    std::fs::read_to_string(&dumped).unwrap()
}

/// Requests that overlap in time, in two places far from each other.
fn replayed() -> (Trace, Record) {
    let (mut trace, mut record) = (Trace::default(), Record::default());
    trace.modules = vec![String::new(), HOSTILE.to_owned()];
    for at in 0..REQUESTS {
        let bytes = Bytes::kib(1 + u64::from(at % 7));
        trace.events.push(Event {
            tick: Tick(at.into()),
            kind: EventKind::Alloc,
            id: at.into(),
            bytes,
            stream: StreamId(0),
            iteration: at / 100,
            context: Context { phase: Phase::Forward, microbatch: Some(at % 3), chunk: None, module: at % 2 },
            is_dynamic: false,
            device: 0,
            thread: 0,
        });
        let address = DeviceAddress::new((u64::from(at % 2) << 44) + u64::from(at % 10 / 2) * 8192);
        record.placed.push(Placed { from: at, until: at + 10, event: at, address, bytes });
        record.curve.push(Point { event: at, live: Bytes::kib(u64::from(at.min(10))), reserved: Bytes::mib(2) });
    }
    (trace, record)
}

#[test]
fn a_browser_draws_everything_and_runs_nothing_from_outside() {
    let Some(browser) = browser() else {
        println!("SKIP: there is no chromium to look at pages with");
        return;
    };
    let (trace, record) = replayed();
    let short = Record { placed: record.placed[..50].to_vec(), curve: record.curve[..50].to_vec() };
    let pool = |name, record, out_of_memory| PoolReport {
        name,
        figures: vec![(HOSTILE, HOSTILE.to_owned())],
        out_of_memory,
        record,
    };
    let pools = vec![pool("stitchd", &record, None), pool(HOSTILE, &short, Some((50, Bytes::gib(1))))];
    let notes = [HOSTILE.to_owned()];
    let report = Report {
        title: HOSTILE,
        trace: &trace,
        notes: &notes,
        verdict: HOSTILE,
        iterations: &[(0, 0), (100, 1), (200, 2), (300, 3), (400, 4)],
        events: REQUESTS,
        pools,
    };
    let mut page = Vec::new();
    report.write(&mut page).unwrap();
    let dom = dom(browser, &page);
    let body = dom.split_once("<body").unwrap_or_else(|| panic!("no page: {dom}")).1.split_once('>').unwrap().0;
    assert!(!body.contains("data-error"), "{body}");
    assert!(body.contains("data-ready=\"500\""), "{body}");
    assert!(body.contains("data-held=\"550\""), "{body}");
    assert!(!dom.contains("<img") && !dom.contains("<b id"), "text has become a part of the page");
}

#[test]
fn a_browser_draws_a_page_with_nothing_in_it() {
    let Some(browser) = browser() else {
        println!("SKIP: there is no chromium to look at pages with");
        return;
    };
    let (trace, record) = (Trace::default(), Record::default());
    for pools in [0, 1] {
        let pool = |_| PoolReport { name: "empty", figures: Vec::new(), out_of_memory: None, record: &record };
        let pools: Vec<_> = (0..pools).map(pool).collect();
        let report = Report { title: "", trace: &trace, notes: &[], verdict: "", iterations: &[], events: 0, pools };
        let mut page = Vec::new();
        report.write(&mut page).unwrap();
        let dom = dom(browser, &page);
        let body = dom.split_once("<body").unwrap_or_else(|| panic!("no page: {dom}")).1.split_once('>').unwrap().0;
        assert!(body.contains("data-held=\"0\"") && !body.contains("data-error"), "{body}");
    }
}
