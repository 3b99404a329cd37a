//! Pictures of an order: memory over time before and after, in the terminal and on a page, and the places on it.

use std::fmt::Write as _;
use std::path::Path;

use super::{Answer, name};
use crate::order::{Graph, Life, Of, curve};
use crate::units::Bytes;

/// Columns of the picture in the terminal.
const COLUMNS: usize = 72;
/// Heights that a column can have.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// The size of a picture on a page.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 320.0;
/// Rectangles on a page: the largest by bytes and time.
const SHOWN_MAX: usize = 4_000;

/// Two lines of bars: the order as it was, and as it is now.
pub(super) fn lines(answer: &Answer, len: usize) -> String {
    let most = answer.ordered.initial_peak.max(1);
    let line = |lives: &[Life]| {
        let curve = curve(lives, len);
        let columns = COLUMNS.min(curve.len());
        let bar = |column: usize| {
            let stretch = &curve[column * curve.len() / columns..((column + 1) * curve.len() / columns).max(1)];
            let live = stretch.iter().copied().max().unwrap_or(0);
            let step = (live as f64 / most as f64 * BARS.len() as f64).ceil() as usize;
            BARS[step.clamp(1, BARS.len()) - 1]
        };
        (0..columns).map(bar).collect::<String>()
    };
    format!(
        "before {}\nafter  {}\n       live bytes from the first operator to the last; full is {}",
        line(&answer.before),
        line(&answer.after),
        Bytes::new(most)
    )
}

/// A page that needs nothing else.
pub(super) fn page(path: &Path, graph: &Graph, answer: &Answer) -> String {
    let Answer { ordered, before, after, placed, caching, .. } = answer;
    let most = ordered.initial_peak.max(placed.peak).max(1);
    let [given, peak, bound, pool] =
        [ordered.initial_peak, ordered.peak, ordered.lower_bound, placed.peak].map(Bytes::new);
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Order</title><style>{STYLE}</style>\n<h1>{}</h1>\n<p>{} operators. Live at the peak: {given} as given, <b>{peak}</b> in this order ({:.1} % less{}); no order needs less than {bound}. Pool: {pool}. PyTorch's caching allocator reserves {caching} for the order as given, as its model says.</p>\n",
        escaped(&path.display().to_string()),
        graph.len(),
        100.0 * super::less(ordered.peak, ordered.initial_peak),
        if ordered.is_proven() { ", proven to be the least" } else { "" },
    );
    let _ = write!(
        page,
        "<h2>Live bytes, operator by operator</h2>\n{}",
        opened("live bytes over operators", most, graph.len())
    );
    for (class, lives) in [("before", before), ("after", after)] {
        let _ = write!(page, "<path class=\"{class}\" d=\"{}\"/>", steps(&curve(lives, graph.len()), most));
    }
    let _ = write!(
        page,
        "</svg>\n<p class=\"key\"><span class=\"before\">as given</span> <span class=\"after\">in this order</span></p>\n"
    );
    let _ = write!(page, "<h2>Places</h2>\n{}", opened("addresses over operators", placed.peak.max(1), graph.len()));
    let mut shown: Vec<usize> = (0..after.len()).collect();
    shown.sort_by_key(|number| {
        std::cmp::Reverse(u128::from(after[*number].bytes) * u128::from(after[*number].lifetime.ticks()))
    });
    shown.truncate(SHOWN_MAX);
    let across = WIDTH / graph.len().max(1) as f64;
    let up = HEIGHT / placed.peak.max(1) as f64;
    for number in shown {
        let (life, offset) = (&after[number], placed.offsets[number]);
        let class = match life.of {
            Of::Workspace(_) => "workspace",
            Of::Storage(_) if life.is_given && life.is_kept => "stays",
            Of::Storage(_) => "comes",
        };
        let _ = write!(
            page,
            "<rect class=\"{class}\" x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{:.2}\"><title>{}: {}, operators {} to {}</title></rect>",
            life.lifetime.start.0 as f64 * across,
            HEIGHT - (offset + life.bytes) as f64 * up,
            (life.lifetime.ticks() as f64 * across).max(0.3),
            (life.bytes as f64 * up).max(0.1),
            escaped(name(graph, life.of)),
            Bytes::new(life.bytes),
            life.lifetime.start.0,
            life.lifetime.end.0 - 1,
        );
    }
    page.push_str("</svg>\n<p class=\"key\"><span class=\"stays\">there before and after</span> <span class=\"comes\">comes and goes</span> <span class=\"workspace\">workspace</span><br>the pointer over a place says what lies there, and when</p>\n");
    page
}

/// A picture that begins with its axes: bytes from below, operators from the left.
fn opened(what: &str, most: u64, operators: usize) -> String {
    let [left, top, right, bottom] = [90.0, 12.0, 30.0, 44.0];
    let (width, height) = (WIDTH + left + right, HEIGHT + top + bottom);
    let mut picture = format!(
        "<svg viewBox=\"{} {} {width} {height}\" role=\"img\" aria-label=\"{what}\"><g class=\"axes\">",
        -left, -top
    );
    let bytes = every(most, 2);
    for at in (0..=most / bytes).map(|line| line * bytes) {
        let y = HEIGHT - at as f64 / most as f64 * HEIGHT;
        let _ = write!(picture, "<path d=\"M0,{y:.2}H{WIDTH}\"/>");
        let _ = write!(picture, "<text x=\"-8\" y=\"{:.2}\" text-anchor=\"end\">{}</text>", y + 4.0, Bytes::new(at));
    }
    let operators = operators.max(1) as u64;
    let each = every(operators, 10);
    for at in (0..=operators / each).map(|line| line * each) {
        let x = at as f64 / operators as f64 * WIDTH;
        let _ = write!(picture, "<path d=\"M{x:.2},{HEIGHT}v5\"/>");
        let _ = write!(picture, "<text x=\"{x:.2}\" y=\"{}\" text-anchor=\"middle\">{at}</text>", HEIGHT + 20.0);
    }
    let (middle, below) = (WIDTH / 2.0, HEIGHT + 38.0);
    let _ = write!(picture, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">operator</text></g>");
    picture
}

/// A step that goes into `most` some times, up to eight: a power of two, or once or five times one of ten.
fn every(most: u64, base: u64) -> u64 {
    const STEPS_MAX: u64 = 8;
    let steps = std::iter::successors(Some(1_u64), |power| power.checked_mul(base));
    let fits = |step: &u64| most / step <= STEPS_MAX;
    let between = |power: u64| [Some(power), power.checked_mul(5).filter(|_| base == 10)];
    steps.flat_map(between).flatten().find(fits).unwrap_or(u64::MAX)
}

const STYLE: &str = "body{font:16px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#1f2328;background:#fff}svg{width:100%;border:1px solid #8888;background:#8881}path{fill:none;stroke-width:1.5}.axes path{stroke:#8886;stroke-width:1}.axes text{font-size:13px;fill:currentColor}.before{stroke:#9a6700}.after{stroke:#0969da}.key span{padding:0 .5em;border-left:1em solid}.key .before{border-color:#9a6700}.key .after{border-color:#0969da}rect{stroke:#fff;stroke-width:.2}rect.stays{fill:#57606a}rect.comes{fill:#0969da}rect.workspace{fill:#bf3989}.key .stays{border-color:#57606a}.key .comes{border-color:#0969da}.key .workspace{border-color:#bf3989}@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}rect{stroke:#0d1117}}";

/// A line that goes from step to step.
fn steps(curve: &[u64], most: u64) -> String {
    let mut line = String::new();
    let across = WIDTH / curve.len().max(1) as f64;
    for (at, live) in curve.iter().enumerate() {
        let y = HEIGHT - *live as f64 / most as f64 * HEIGHT;
        let _ = write!(
            line,
            "{}{:.2},{y:.2}H{:.2}",
            if at == 0 { "M" } else { "L" },
            at as f64 * across,
            (at + 1) as f64 * across
        );
    }
    line
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_a_few_lines_at_round_numbers() {
        for (most, base, step) in
            [(1, 2, 1), (8, 2, 1), (9, 2, 2), (1000, 2, 128), (9, 10, 5), (50, 10, 10), (95, 10, 50), (1200, 10, 500)]
        {
            assert_eq!(every(most, base), step, "{most}");
        }
        assert_eq!(every(u64::MAX, 2), 1 << 61);
        let picture = opened("x", 1000, 40);
        assert!(picture.contains(">896 B</text>") && picture.contains(">40</text>"), "{picture}");
    }
}
