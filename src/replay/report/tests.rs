//! Pages as text: what stands in them, and what cannot get in. How they look is seen in a browser (tests/replay/report.rs).

use super::columns::decoder::Decoder;
use super::*;
use crate::ids::StreamId;
use crate::replay::record::Point;
use crate::trace::{Event, EventKind};
use crate::units::{DeviceAddress, Tick};

const HOSTILE: &str = "</script><img src=x onerror='alert(1)'>\"&{{columns}}<!--";

fn trace(modules: &[&str], events: u32) -> Trace {
    let event = |at: u32| Event {
        tick: Tick(at.into()),
        kind: EventKind::Alloc,
        id: at.into(),
        bytes: Bytes::new(100),
        stream: StreamId(0),
        iteration: at / 4,
        context: Context {
            phase: Phase::Backward,
            microbatch: at.checked_sub(1),
            chunk: None,
            module: at % modules.len() as u32,
        },
        is_dynamic: false,
        device: 0,
        thread: 0,
    };
    Trace { events: (0..events).map(event).collect(), modules: modules.iter().map(|&name| name.to_owned()).collect() }
}

fn record(events: u32) -> Record {
    let placed = |at: u32| Placed {
        from: at,
        until: u32::MAX,
        event: at,
        address: DeviceAddress::new(u64::from(at) * 100),
        bytes: Bytes::new(100),
    };
    let point = |at: u32| Point { event: at, live: Bytes::new(u64::from(at + 1) * 100), reserved: Bytes::mib(2) };
    Record { curve: (0..events).map(point).collect(), placed: (0..events).map(placed).collect() }
}

fn page(report: &Report<'_>) -> String {
    let mut page = Vec::new();
    report.write(&mut page).unwrap();
    String::from_utf8(page).unwrap()
}

/// What stands in the element with this id.
fn element<'a>(page: &'a str, id: &str) -> &'a str {
    let inside = page.split_once(&format!("id=\"{id}\">")).unwrap_or_else(|| panic!("there is no {id}")).1;
    inside.split_once("</").unwrap().0
}

#[test]
fn text_from_outside_is_text() {
    let (trace, record) = (trace(&[HOSTILE], 3), record(3));
    let notes = [HOSTILE.to_owned()];
    let figures = vec![(HOSTILE, HOSTILE.to_owned())];
    let pool = PoolReport { name: HOSTILE, figures, out_of_memory: None, record: &record };
    let pools = vec![pool];
    let report = Report {
        title: HOSTILE,
        trace: &trace,
        notes: &notes,
        verdict: HOSTILE,
        iterations: &[(0, 0)],
        events: 3,
        pools,
    };
    let page = page(&report);
    assert!(!page.contains("<img"));
    assert_eq!(page.matches("</script>").count(), page.matches("<script").count());
    assert_eq!(page.matches("<!--").count(), 0);
    assert_eq!(page.matches("id=\"curves\"").count(), 1, "what stands for a name is not looked at again");
    // Title twice, verdict, note, label, value and the pool's name above its column.
    assert_eq!(page.matches(&escaped(HOSTILE)).count(), 7);

    let outline: Value = serde_json::from_str(element(&page, "report")).unwrap();
    assert_eq!(outline["modules"], json!([HOSTILE]));
    assert_eq!(outline["pools"][0]["name"], HOSTILE);
}

#[test]
fn a_page_fetches_nothing() {
    let report = Report {
        title: "",
        trace: &Trace::default(),
        notes: &[],
        verdict: "",
        iterations: &[],
        events: 0,
        pools: Vec::new(),
    };
    let page = page(&report);
    for door in ["http:", "https:", "//www", " src=", "href=", "url(", "@import", "innerHTML", "eval(", "fetch("] {
        assert!(!page.contains(door), "{door}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn an_empty_trace_and_a_single_allocation_have_pages() {
    for events in [0, 1] {
        let (trace, record) = (trace(&["", "m"], events), record(events));
        let pools = vec![PoolReport { name: "one", figures: Vec::new(), out_of_memory: None, record: &record }];
        let page =
            page(&Report { title: "t", trace: &trace, notes: &[], verdict: "v", iterations: &[], events, pools });
        let outline: Value = serde_json::from_str(element(&page, "report")).unwrap();
        assert_eq!(outline["events"], events);
        assert_eq!(outline["pools"][0]["sizes"].as_array().unwrap().len(), events as usize);
        let mut map = Decoder::new(element(&page, "map-0").as_bytes());
        assert_eq!(map.number(), u64::from(events));
    }
}

#[test]
fn the_contexts_of_requests_come_back() {
    let (trace, record) = (trace(&["", "a", "unused", "b"], 6), record(6));
    let some = Record { placed: vec![record.placed[5], record.placed[1], record.placed[1]], curve: Vec::new() };
    let beyond = Placed { event: 77, ..record.placed[0] };
    let other = Record { placed: vec![beyond, record.placed[3]], curve: record.curve.clone() };
    let pool = |record| PoolReport { name: "p", figures: Vec::new(), out_of_memory: None, record };
    let pools = vec![pool(&some), pool(&other)];
    let page = page(&Report { title: "t", trace: &trace, notes: &[], verdict: "v", iterations: &[], events: 6, pools });

    let outline: Value = serde_json::from_str(element(&page, "report")).unwrap();
    assert_eq!(outline["modules"], json!(["", "a", "b"]));
    let mut columns = Decoder::new(element(&page, "curves").as_bytes());
    assert_eq!(columns.number(), 4, "events 1, 3, 5 and one that the trace does not have");
    let (backward, other) = (2, 5);
    assert_eq!(columns.numbers(4), [backward, backward, backward, other]);
    assert_eq!(columns.numbers(4), [1, 2, 1, 0]);
    assert_eq!(columns.numbers(4), [1, 3, 5, 0]);
    assert_eq!(columns.number(), 0);
    for _ in 0..5 {
        assert!(columns.numbers(0).is_empty());
    }
    assert_eq!(columns.number(), 6);
    assert_eq!(columns.differences(6), [0, 1, 2, 3, 4, 5]);
    assert_eq!(columns.differences(6), [100, 200, 300, 400, 500, 600]);
}

#[test]
fn the_table_has_a_row_for_every_label_of_any_pool() {
    let empty = Record::default();
    let pool = |name, figures, out_of_memory| PoolReport { name, figures, out_of_memory, record: &empty };
    let pools = vec![
        pool("a", vec![("peak", "1 GiB".into())], None),
        pool("b", vec![("peak", "2 GiB".into()), ("calls", "7".into())], Some((1234, Bytes::gib(3)))),
    ];
    let report =
        Report { title: "t", trace: &Trace::default(), notes: &[], verdict: "v", iterations: &[], events: 0, pools };
    let page = page(&report);
    for row in [
        "<th scope=\"row\">peak</th><td>1 GiB</td><td>2 GiB</td>",
        "<th scope=\"row\">calls</th><td>–</td><td>7</td>",
        "<th scope=\"row\">out of memory</th><td>never</td><td>3.00 GiB at event 1,234</td>",
    ] {
        assert!(page.contains(row), "{row}");
    }
}

#[test]
fn sizes_are_counted_by_powers_of_two() {
    let of = |bytes| Placed { bytes: Bytes::new(bytes), ..record(1).placed[0] };
    assert_eq!(
        sizes(&[of(8), of(15), of(32), of(0)]),
        [(1, 1, 0.0), (2, 0, 0.0), (4, 0, 0.0), (8, 2, 23.0), (16, 0, 0.0), (32, 1, 32.0)]
    );
    assert_eq!(sizes(&[of(u64::MAX)]).len(), 1);
}
