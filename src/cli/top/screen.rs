//! What is shown, as lines of at most so many columns.
//!
//! Names are others': what would move a cursor or change a color is shown as a question mark.

use std::cmp::Ordering;

use crate::cli::table::Table;
use crate::daemon::live::json as show;
use crate::units::{Bytes, counted};
use crate::wire::v1;

/// By what sessions are sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Sort {
    #[default]
    Leased,
    InUse,
    Age,
    Name,
    Requests,
    Failures,
}

impl Sort {
    /// By its key.
    pub(super) fn of(letter: char) -> Option<Sort> {
        Some(match letter.to_ascii_lowercase() {
            'l' => Sort::Leased,
            'u' => Sort::InUse,
            'a' => Sort::Age,
            'n' => Sort::Name,
            'r' => Sort::Requests,
            'f' => Sort::Failures,
            _ => return None,
        })
    }

    fn title(self) -> &'static str {
        match self {
            Sort::Leased => "leased",
            Sort::InUse => "in use",
            Sort::Age => "age",
            Sort::Name => "session",
            Sort::Requests => "requests",
            Sort::Failures => "failures",
        }
    }
}

/// How it is looked at.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) columns: usize,
    pub(super) rows: usize,
    pub(super) is_colored: bool,
    pub(super) sort: Sort,
    /// Large ones, or the last names, first.
    pub(super) is_down: bool,
    /// The first session that is shown.
    pub(super) first: usize,
    pub(super) is_stopped: bool,
    pub(super) is_helping: bool,
    pub(super) trouble: Option<String>,
    /// The session whose addresses are shown, and where its memory lies.
    pub(super) map: Option<(u64, v1::AddressMapReply)>,
}

impl Default for View {
    fn default() -> View {
        View {
            columns: 80,
            rows: 24,
            is_colored: false,
            sort: Sort::default(),
            is_down: true,
            first: 0,
            is_stopped: false,
            is_helping: false,
            trouble: None,
            map: None,
        }
    }
}

impl View {
    pub(super) fn sort_by(&mut self, sort: Option<Sort>) {
        let Some(sort) = sort else { return };
        self.is_down = if self.sort == sort { !self.is_down } else { sort != Sort::Name };
        (self.sort, self.first) = (sort, 0);
    }

    fn painted(&self, color: u8, text: &str) -> String {
        if self.is_colored { format!("\x1b[38;5;{color}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn strong(&self, text: &str) -> String {
        if self.is_colored { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// As much of it as has room.
    fn cut(&self, text: &str) -> String {
        text.chars().take(self.columns).collect()
    }
}

const FREE: u8 = 238;
const WARNING: u8 = 203;
/// Colors of sessions, of the terminal's 256: apart from each other and readable on dark and light.
const COLORS: [u8; 10] = [33, 208, 35, 170, 178, 37, 203, 105, 142, 67];

fn color_of(session: u64) -> u8 {
    COLORS[(session % COLORS.len() as u64) as usize]
}

/// What a device's run is drawn as: a sign and a color.
fn sign(run: &v1::ChunkRun) -> (char, u8) {
    match show::run_state(run) {
        "leased" => ('█', color_of(run.session_id)),
        "shared" => ('▓', 44),
        "idle" => ('▒', 109),
        "reserved" => ('▒', 141),
        "creating" => ('▚', 250),
        _ => ('▞', WARNING),
    }
}

/// Text of others, with nothing in it that a terminal would obey.
fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

fn age(ms: u64) -> String {
    let s = ms / 1_000;
    match s {
        0..120 => format!("{s} s"),
        120..7_200 => format!("{} min", s / 60),
        7_200..172_800 => format!("{} h", s / 3_600),
        _ => format!("{} days", s / 86_400),
    }
}

/// Everything, from the top.
pub(super) fn lines(live: &v1::LiveReply, view: &View) -> Vec<String> {
    let status = live.status.clone().unwrap_or_default();
    let mut lines = vec![headline(&status, view)];
    if let Some(trouble) = &view.trouble {
        lines.push(view.painted(WARNING, &view.cut(&plain(trouble))));
    }
    if view.is_helping {
        let help = [
            "q quits, space stops and goes on, arrows (or j and k) move the sessions, m maps the first one, h hides this",
            "sort by: l leased, u in use, a age, n name, r requests, f failures; again for the other way round",
            "█ leased, in the session's color; ▓ shared; ▒ idle, or reserved for a plan; ▚ being created; ▞ in quarantine; ░ foreign; · free",
        ];
        lines.extend(help.iter().map(|line| view.cut(line)));
    }
    for device in &status.devices {
        lines.extend(device_lines(device, live, view));
    }
    lines.push(String::new());
    let below = match &view.map {
        Some((session, reply)) => map_lines(*session, reply, &status, view),
        None => below(live, view),
    };
    // The list of sessions takes what is left, and at least some lines.
    let room = view.rows.saturating_sub(lines.len() + below.len()).max(4);
    lines.extend(session_lines(&status, view, room));
    lines.extend(below);
    lines.truncate(view.rows);
    lines
}

fn headline(status: &v1::StatusReply, view: &View) -> String {
    let mut text = format!(
        "stitchd {} on the {} driver, up {}, {}",
        status.version,
        status.driver,
        age(status.uptime_ms),
        counted(status.sessions.len() as u64, "session")
    );
    if status.waiting_requests > 0 {
        text.push_str(&format!(", {} waiting", status.waiting_requests));
    }
    if status.keeper.is_some_and(|keeper| keeper.pid == 0) {
        text.push_str(", no keeper");
    }
    if status.is_draining {
        text.push_str(", shutting down");
    }
    if view.is_stopped {
        text.push_str(" (stopped: space goes on)");
    }
    view.strong(&view.cut(&plain(&text)))
}

fn device_lines(status: &v1::DeviceStatus, live: &v1::LiveReply, view: &View) -> Vec<String> {
    let device = status.device.clone().unwrap_or_default();
    let more = live.devices.iter().find(|more| more.ordinal == device.ordinal).cloned().unwrap_or_default();
    let bytes = |bytes: u64| Bytes::new(bytes).to_string();
    let (leased, budget) = (bytes(status.leased_bytes), bytes(status.budget_bytes));
    let mut figures = vec![
        format!("device {} {}: {leased} of {budget} leased", device.ordinal, device.model),
        format!("{} in use", bytes(more.live_bytes)),
        format!("{} available", bytes(status.available_bytes)),
        format!("{:.0} % in pieces", more.external_fragmentation * 100.0),
        format!("{} saved by stitching", bytes(more.rescued_bytes)),
    ];
    figures.extend((more.failures > 0).then(|| counted(more.failures, "failure")));
    let state = show::device_state(status);
    figures.extend((state != "ready").then(|| state.to_owned()));
    let figures = filled(figures.iter().map(|figure| plain(figure)), view.columns);
    let mut lines = vec![String::new()];
    lines.extend(figures.iter().map(|line| view.cut(line)));
    lines.push(map(status, &more, view));
    lines
}

/// Figures one after the other, in as few lines as have room for them.
fn filled(figures: impl Iterator<Item = String>, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for figure in figures {
        match lines.last_mut() {
            // A comma and a space before it, and perhaps a comma behind.
            Some(line) if line.chars().count() + figure.chars().count() + 3 <= columns => {
                line.push_str(&format!(", {figure}"));
            }
            Some(line) => {
                line.push(',');
                lines.push(format!("  {figure}"));
            }
            None => lines.push(figure),
        }
    }
    lines
}

/// Chunks in the order of their numbers, then what others use, then what nobody has: over the width of the terminal.
fn map(status: &v1::DeviceStatus, more: &v1::DeviceLive, view: &View) -> String {
    let total = status.device.as_ref().map_or(0, |device| device.total_bytes).max(1);
    let mut parts: Vec<(u64, (char, u8))> = more.runs.iter().map(|run| (run.len_bytes, sign(run))).collect();
    parts.push((status.foreign_bytes, ('░', 245)));
    let known: u64 = parts.iter().map(|(bytes, _)| bytes).sum();
    parts.push((total.saturating_sub(known), ('·', FREE)));
    let whole = known.max(total);
    let columns = view.columns.max(1) as u64;
    let mut signs: Vec<(char, u8)> = Vec::new();
    let mut end = 0_u64;
    for (bytes, sign) in parts {
        end += bytes;
        // A cell shows what is in its middle.
        let until =
            (u128::from(end) * u128::from(columns) * 2 / u128::from(whole)).div_ceil(2).min(u128::from(columns));
        let until = usize::try_from(until).unwrap_or(signs.len());
        signs.extend(std::iter::repeat_n(sign, until.saturating_sub(signs.len())));
    }
    let runs = signs.chunk_by(|one, next| one == next);
    runs.map(|run| view.painted(run[0].1, &run.iter().map(|(sign, _)| *sign).collect::<String>())).collect()
}

/// Where a session's memory lies: a line for each range, as long as it is beside the longest.
fn map_lines(session: u64, reply: &v1::AddressMapReply, status: &v1::StatusReply, view: &View) -> Vec<String> {
    const TITLE: usize = 50;
    const OLD_MS: u64 = 3_000;
    let bytes = |bytes: u64| Bytes::new(bytes).to_string();
    let name = status.sessions.iter().find(|of| of.session_id == session).map_or("", |of| &of.name);
    let title = format!("where the memory of {} #{session} lies (m hides this)", plain(name));
    let mut lines = vec![String::new(), view.strong(&view.cut(&title))];
    if reply.devices.is_empty() {
        lines.push(view.cut("it has not said: it holds nothing, is over, or its client is of before this question"));
    }
    let width = view.columns.saturating_sub(TITLE).max(1);
    for device in &reply.devices {
        let map = device.map.clone().unwrap_or_default();
        let longest = map.ranges.iter().map(|range| range.len_bytes).max().unwrap_or(0).max(1);
        if device.age_ms > OLD_MS {
            lines.push(view.cut(&format!("{} as it was {} ago", device.ordinal, age(device.age_ms))));
        }
        for range in &map.ranges {
            let used = range.live_bytes as f64 / range.len_bytes.max(1) as f64 * 100.0;
            let text = format!(
                "{} {:<9} {:>9}, {used:>3.0} % used, hole {:>9}",
                device.ordinal,
                show::range_kind(range),
                bytes(range.len_bytes),
                bytes(range.largest_free_bytes),
            );
            let long = (range.len_bytes as u128 * width as u128 / u128::from(longest)) as usize;
            let text = view.cut(&format!("{text:<TITLE$.TITLE$}"));
            let drawn = if view.columns > TITLE { shades(&range.used, long.max(1)) } else { String::new() };
            lines.push(text + &view.painted(color_of(session), &drawn));
        }
        if map.other_ranges > 0 {
            let (all, live) = (bytes(map.other_bytes), bytes(map.other_live_bytes));
            lines.push(
                view.cut(&format!("{} and {} smaller ones of {all}, {live} used", device.ordinal, map.other_ranges)),
            );
        }
    }
    lines
}

/// Cells over so many columns, each as dark as it is in use on average.
fn shades(cells: &[u8], columns: usize) -> String {
    const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];
    let shade = |column: usize| {
        let (from, until) = (column * cells.len() / columns, ((column + 1) * cells.len()).div_ceil(columns));
        let some = cells.get(from..until.max(from + 1).min(cells.len())).unwrap_or_default();
        let mean = some.iter().map(|cell| f64::from(*cell)).sum::<f64>() / some.len().max(1) as f64;
        match mean {
            0.0 => SHADES[0],
            255.0 => SHADES[4],
            mean => SHADES[1 + (mean / 256.0 * 3.0) as usize],
        }
    };
    (0..columns).map(shade).collect()
}

/// The session that stands first in the list.
pub(super) fn first_session(live: &v1::LiveReply, view: &View) -> Option<u64> {
    let status = live.status.as_ref()?;
    let sessions = sorted(status, view);
    sessions.get(view.first.min(sessions.len().saturating_sub(1))).map(|session| session.session_id)
}

fn sorted<'a>(status: &'a v1::StatusReply, view: &View) -> Vec<&'a v1::SessionStatus> {
    let mut sessions: Vec<&v1::SessionStatus> = status.sessions.iter().collect();
    let by = |one: &v1::SessionStatus, next: &v1::SessionStatus| -> Ordering {
        let live = |session| show::counter(session, "live_bytes");
        match view.sort {
            Sort::Leased => one.leased_bytes.cmp(&next.leased_bytes),
            Sort::InUse => live(one).cmp(&live(next)),
            Sort::Age => one.age_ms.cmp(&next.age_ms),
            Sort::Name => one.name.cmp(&next.name),
            Sort::Requests => show::requests(one).cmp(&show::requests(next)),
            Sort::Failures => show::counter(one, "failures").cmp(&show::counter(next, "failures")),
        }
    };
    sessions.sort_by(|one, next| {
        let order = by(one, next);
        let order = if view.is_down { order.reverse() } else { order };
        order.then(one.session_id.cmp(&next.session_id))
    });
    sessions
}

fn session_lines(status: &v1::StatusReply, view: &View, room: usize) -> Vec<String> {
    if status.sessions.is_empty() {
        return vec![view.cut("no sessions")];
    }
    let sessions = sorted(status, view);
    let all = sessions.len();
    let first = view.first.min(all - 1);
    // The header takes one line, and where some are not shown the last says so.
    let most = room.saturating_sub(1).max(1);
    let shown = if all - first > most { most.saturating_sub(1).max(1) } else { all - first };
    let titles = [
        "",
        ">#",
        "session",
        "tenant",
        ">process",
        ">leased",
        ">in use",
        ">limit",
        ">requests",
        ">off plan",
        ">failures",
        ">age",
        "state",
    ];
    let marked = titles.map(|title| match title.trim_start_matches('>') == view.sort.title() {
        true => format!("{title}{}", if view.is_down { '▾' } else { '▴' }),
        false => title.to_owned(),
    });
    let mut table = Table::new(&marked.each_ref().map(String::as_str));
    for session in &sessions[first..first + shown] {
        table.row(vec![
            "█".into(),
            session.session_id.to_string(),
            plain(&if session.name.is_empty() { format!("#{}", session.session_id) } else { session.name.clone() }),
            plain(&session.tenant),
            session.pid.to_string(),
            Bytes::new(session.leased_bytes).to_string(),
            Bytes::new(show::counter(session, "live_bytes")).to_string(),
            if session.limit_bytes >= u64::MAX / 2 {
                "–".into()
            } else {
                Bytes::new(session.limit_bytes).to_string()
            },
            show::requests(session).to_string(),
            show::deviations(session).to_string(),
            show::counter(session, "failures").to_string(),
            age(session.age_ms),
            show::session_state(session).into(),
        ]);
    }
    let text = table.to_string();
    let mut lines: Vec<String> = text.lines().map(|line| view.cut(line)).collect();
    lines[0] = view.strong(&lines[0]);
    for (line, session) in lines[1..].iter_mut().zip(&sessions[first..]) {
        *line = line.replacen('█', &view.painted(color_of(session.session_id), "█"), 1);
    }
    if shown < all - first {
        lines.push(
            view.cut(&format!("and {} (arrows move the list)", counted((all - first - shown) as u64, "more session"))),
        );
    }
    lines
}

/// Who waits, and what happened last.
fn below(live: &v1::LiveReply, view: &View) -> Vec<String> {
    const WAITING: usize = 5;
    const EVENTS: usize = 6;
    let mut lines = Vec::new();
    if !live.waiting.is_empty() {
        lines.extend([String::new(), view.strong("waiting")]);
        for wait in live.waiting.iter().take(WAITING) {
            let what = if wait.is_waiting { "waits for others" } else { "is being created" };
            let text = format!(
                "{} for {} on device {}: {what}, for {:.1} s",
                Bytes::new(wait.len_bytes),
                plain(&wait.name),
                wait.ordinal,
                wait.age_ms as f64 / 1e3
            );
            lines.push(view.cut(&text));
        }
        if live.waiting.len() > WAITING {
            lines.push(format!("and {} more", live.waiting.len() - WAITING));
        }
    }
    if !live.events.is_empty() {
        lines.extend([String::new(), view.strong("events")]);
        let now_ms = live.status.as_ref().map_or(0, |status| status.uptime_ms);
        for event in live.events.iter().rev().take(EVENTS) {
            let ago = age(now_ms.saturating_sub(event.at_ms));
            lines.push(view.cut(&format!("{ago:>7} ago  {:<11} {}", show::event_kind(event), plain(&event.text))));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(number: u64, name: &str, leased_mib: u64) -> v1::SessionStatus {
        v1::SessionStatus {
            session_id: number,
            name: name.into(),
            leased_bytes: leased_mib << 20,
            limit_bytes: u64::MAX,
            is_attached: true,
            ..v1::SessionStatus::default()
        }
    }

    fn live(sessions: Vec<v1::SessionStatus>) -> v1::LiveReply {
        let device =
            v1::Device { ordinal: 0, total_bytes: 100 << 20, model: "pretended".into(), ..v1::Device::default() };
        let runs = sessions.iter().map(|session| v1::ChunkRun {
            state: v1::chunk_run::State::Leased.into(),
            session_id: session.session_id,
            len_bytes: session.leased_bytes,
            chunks: session.leased_bytes >> 21,
        });
        v1::LiveReply {
            devices: vec![v1::DeviceLive { runs: runs.collect(), ..v1::DeviceLive::default() }],
            status: Some(v1::StatusReply {
                devices: vec![v1::DeviceStatus {
                    device: Some(device),
                    foreign_bytes: 10 << 20,
                    ..v1::DeviceStatus::default()
                }],
                sessions,
                ..v1::StatusReply::default()
            }),
            ..v1::LiveReply::default()
        }
    }

    fn view(columns: usize, rows: usize) -> View {
        View { columns, rows, ..View::default() }
    }

    #[test]
    fn the_figures_of_a_device_are_all_there_however_narrow_the_terminal_is() {
        let mut live = live(vec![session(1, "a", 20)]);
        live.devices[0].failures = 8;
        for (columns, device_lines) in [(200, 1), (100, 2), (60, 3)] {
            let lines = lines(&live, &view(columns, 24));
            let from = lines.iter().position(|line| line.starts_with("device 0 pretended")).unwrap();
            let until = from + lines[from..].iter().position(|line| line.starts_with('█')).unwrap();
            let all = lines[from..until].join("\n");
            assert_eq!(until - from, device_lines, "{columns}: {all}");
            for figure in ["leased", "in use", "available", "% in pieces", "saved by stitching", "8 failures"] {
                assert!(all.contains(figure), "{columns}: {figure}: {all}");
            }
        }
    }

    #[test]
    fn a_map_shows_each_in_proportion_and_fills_the_line() {
        let live = live(vec![session(1, "a", 20), session(2, "b", 40)]);
        let lines = lines(&live, &view(50, 24));
        let map = lines.iter().find(|line| line.starts_with('█')).unwrap();
        assert_eq!(map, &format!("{}{}{}", "█".repeat(30), "░".repeat(5), "·".repeat(15)));
        let colored = super::lines(&live, &View { is_colored: true, ..view(50, 24) });
        let map = colored.iter().find(|line| line.contains('░')).unwrap();
        assert!(map.contains(&format!("\x1b[38;5;{}m{}", color_of(1), "█".repeat(10))), "{map:?}");
        assert!(map.contains(&format!("\x1b[38;5;{}m{}", color_of(2), "█".repeat(20))), "{map:?}");
    }

    #[test]
    fn a_map_of_addresses_has_a_line_for_each_range_as_long_as_it_is_and_as_dark_as_it_is_used() {
        let range = |kind: v1::address_range::Kind, mib: u64, used: &[u8]| v1::AddressRange {
            kind: kind.into(),
            len_bytes: mib << 20,
            live_bytes: mib << 19,
            used: used.to_vec(),
            ..v1::AddressRange::default()
        };
        let kinds = (v1::address_range::Kind::Planned, v1::address_range::Kind::Stitched);
        let map = v1::AddressMap {
            ranges: vec![range(kinds.0, 40, &[255, 255, 0, 0]), range(kinds.1, 10, &[1])],
            other_ranges: 3,
            ..v1::AddressMap::default()
        };
        let devices = vec![v1::DeviceMap { ordinal: 0, age_ms: 0, map: Some(map) }];
        let live = live(vec![session(7, "job", 50)]);
        let view = View { map: Some((7, v1::AddressMapReply { devices })), ..view(90, 40) };
        let lines = lines(&live, &view);
        let drawn =
            |kind: &str| lines.iter().find(|line| line.starts_with(kind)).unwrap().chars().skip(50).collect::<String>();
        assert_eq!(drawn("0 planned"), "█".repeat(20) + &"·".repeat(20));
        assert_eq!(drawn("0 stitched"), "░".repeat(10));
        assert!(lines.iter().any(|line| line.contains("and 3 smaller ones")), "{lines:#?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 90), "{lines:#?}");
        assert_eq!(first_session(&live, &view), Some(7));
    }

    #[test]
    fn sessions_are_sorted_by_what_is_wanted_and_the_other_way_round() {
        let live = live(vec![session(1, "b", 2), session(2, "c", 6), session(3, "a", 4)]);
        let mut view = view(120, 40);
        let order = |view: &View| -> String {
            // Behind the number.
            let named =
                |line: &String| line.strip_prefix("█  ").map(|line| line.split_whitespace().nth(1).unwrap().to_owned());
            lines(&live, view).iter().filter_map(named).collect()
        };
        assert!(lines(&live, &view).iter().any(|line| line.split_whitespace().take(3).eq(["█", "2", "c"])));
        assert_eq!(order(&view), "cab");
        view.sort_by(Sort::of('l'));
        assert_eq!(order(&view), "bac");
        view.sort_by(Sort::of('n'));
        assert_eq!(order(&view), "abc");
        view.sort_by(Sort::of('z'));
        assert_eq!(order(&view), "abc");
        view.first = 1;
        assert_eq!(order(&view), "bc");
    }

    #[test]
    fn nothing_is_wider_or_higher_than_the_terminal_and_nothing_of_others_is_obeyed() {
        let mut live = live((1..=500).map(|number| session(number, "\x1b[2J\u{9b}31m\r\nevil", 0)).collect());
        live.events = vec![v1::Event { at_ms: 0, kind: 1, text: "\x1b]0;title\x07".into() }];
        live.waiting = vec![v1::WaitingRequest { name: "\x08\x08".into(), ..v1::WaitingRequest::default() }; 9];
        for (columns, rows) in [(20, 5), (80, 24), (200, 60), (1, 1)] {
            let lines = lines(&live, &view(columns, rows));
            assert!(lines.len() <= rows, "{rows}: {}", lines.len());
            for line in &lines {
                assert!(line.chars().count() <= columns, "{columns}: {line:?}");
                assert!(!line.chars().any(char::is_control), "{line:?}");
            }
        }
        let shown = lines(&live, &view(120, 24));
        assert!(shown.iter().any(|line| line.contains("more sessions")), "{shown:#?}");
    }
}
