//! A replay as one page to look at: verdict, figures, bytes over time, addresses over time, sizes. It needs no network, and any browser of
//! the last years opens it from a disk.
//!
//! Not for: making figures. Whoever replays has them, and says what they are called.
//!
//! Invariant: text from outside stands in the page only escaped ([`escaped`], [`script_json`]), and the scripts put it only where it is text.

mod address_map;
mod columns;
mod curve;

use std::io::{self, Write};

use serde_json::{Value, json};

use self::address_map::AddressMap;
pub use self::address_map::grouped;
use self::columns::Columns;
use super::record::{Placed, Record};
use crate::trace::{Context, Phase, Trace};
use crate::units::Bytes;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = concat!(include_str!("plot.js"), "\n", include_str!("map.js"), "\n", include_str!("page.js"));

/// Allocations that are shown as themselves: of one pool, and of all. A rectangle takes about ten bytes of the file, and some tens of
/// nanoseconds of every frame while somebody zooms.
const SHOWN_OF_POOL_MAX: usize = 250_000;
const SHOWN_MAX: usize = 750_000;
/// Steps of all curves, which take about as much.
const STEPS_MAX: usize = 120_000;

/// A replay as a page.
#[derive(Debug)]
pub struct Report<'a> {
    /// What was replayed.
    pub title: &'a str,
    /// The trace that [`Placed::event`] points into.
    pub trace: &'a Trace,
    /// What a reader should know before the figures.
    pub notes: &'a [String],
    /// The one sentence that matters most.
    pub verdict: &'a str,
    /// Where each iteration begins: the event, counted as in [`super::Point`], and the iteration. Events never go back.
    pub iterations: &'a [(u32, u32)],
    /// Events on the axis of time.
    pub events: u32,
    /// Pool by pool, in the order in which they are shown.
    pub pools: Vec<PoolReport<'a>>,
}

/// What one pool made of the trace.
#[derive(Debug)]
pub struct PoolReport<'a> {
    /// Its name.
    pub name: &'a str,
    /// Label and value of each figure, as shown. The table has a row for each label that any pool has.
    pub figures: Vec<(&'a str, String)>,
    /// The event and the bytes of the request that it could not serve, if there was one.
    pub out_of_memory: Option<(u32, Bytes)>,
    /// What it did.
    pub record: &'a Record,
}

impl Report<'_> {
    /// Writes the page.
    ///
    /// # Errors
    ///
    /// Those of `to`.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        let pools = self.pools.len().max(1);
        let shown_max = SHOWN_OF_POOL_MAX.min(SHOWN_MAX / pools);
        let new_map = |pool: &PoolReport<'_>| {
            let end = pool.out_of_memory.map_or(self.events, |(event, _)| event.min(self.events));
            AddressMap::new(&pool.record.placed, self.events, end, shown_max)
        };
        let maps: Vec<AddressMap> = self.pools.iter().map(new_map).collect();
        let requests = Requests::of(self.trace, &maps);

        // One pass over the template: what stands in for a name is never looked at again.
        let mut pieces = PAGE.split("{{");
        to.write_all(pieces.next().unwrap_or_default().as_bytes())?;
        for piece in pieces {
            let (name, after) = piece.split_once("}}").expect("the template closes what it opens");
            match name {
                "title" => to.write_all(escaped(self.title).as_bytes())?,
                "style" => to.write_all(STYLE.as_bytes())?,
                "verdict" => to.write_all(escaped(self.verdict).as_bytes())?,
                "notes" => self.write_notes(&mut to)?,
                "figures" => self.write_figures(&mut to)?,
                "report" => to.write_all(script_json(&self.outline(&maps, &requests)).as_bytes())?,
                "columns" => self.write_columns(&mut to, &maps, &requests)?,
                "script" => to.write_all(SCRIPT.as_bytes())?,
                _ => unreachable!("the template has no other names"),
            }
            to.write_all(after.as_bytes())?;
        }
        to.flush()
    }

    fn write_notes(&self, to: &mut impl Write) -> io::Result<()> {
        self.notes.iter().try_for_each(|note| writeln!(to, "<li>{}</li>", escaped(note)))
    }

    /// A column for each pool, a row for each figure.
    fn write_figures(&self, to: &mut impl Write) -> io::Result<()> {
        write!(to, "<thead><tr><th></th>")?;
        self.pools.iter().try_for_each(|pool| write!(to, "<th scope=\"col\">{}</th>", escaped(pool.name)))?;
        writeln!(to, "</tr></thead>\n<tbody>")?;
        let mut labels: Vec<&str> = Vec::new();
        for (label, _) in self.pools.iter().flat_map(|pool| &pool.figures) {
            if !labels.contains(label) {
                labels.push(label);
            }
        }
        for label in labels {
            let value = |pool: &PoolReport<'_>| {
                let figure = pool.figures.iter().find(|(known, _)| *known == label);
                figure.map_or_else(|| "–".into(), |(_, value)| escaped(value))
            };
            write_row(to, &escaped(label), self.pools.iter().map(value))?;
        }
        if self.pools.iter().any(|pool| pool.out_of_memory.is_some()) {
            let value = |pool: &PoolReport<'_>| match pool.out_of_memory {
                Some((event, bytes)) => format!("{bytes} at event {}", grouped(event.into())),
                None => "never".into(),
            };
            write_row(to, "out of memory", self.pools.iter().map(value))?;
        }
        writeln!(to, "</tbody>")
    }

    /// All that is not a long column of numbers.
    fn outline(&self, maps: &[AddressMap], requests: &Requests) -> Value {
        let pool = |(pool, map): (&PoolReport<'_>, &AddressMap)| {
            json!({
                "name": pool.name,
                "out_of_memory": pool.out_of_memory.map(|(event, bytes)| json!([event, bytes.get()])),
                // As text: an address may be larger than the numbers of JavaScript are exact.
                "ranges": map.ranges.iter().map(|range| json!([range.start.to_string(), range.len])).collect::<Vec<_>>(),
                "sizes": sizes(&pool.record.placed),
                "words": map.words(),
            })
        };
        json!({
            "events": self.events,
            "iterations": self.iterations,
            "phases": Phase::ALL.map(|(name, _)| name),
            "modules": requests.modules.iter().map(|module| self.module(*module)).collect::<Vec<_>>(),
            "pools": self.pools.iter().zip(maps).map(pool).collect::<Vec<_>>(),
        })
    }

    fn module(&self, module: u32) -> &str {
        self.trace.modules.get(module as usize).map_or("", String::as_str)
    }

    /// Each in an element of its own, so that a page unpacks only what it is about to draw.
    fn write_columns(&self, to: &mut impl Write, maps: &[AddressMap], requests: &Requests) -> io::Result<()> {
        let mut columns = Columns::new();
        requests.write(&mut columns)?;
        for pool in &self.pools {
            let steps = curve::thin_out(&pool.record.curve, STEPS_MAX / self.pools.len().max(1));
            curve::write(&steps, &mut columns)?;
        }
        write_element(to, "curves", columns)?;
        for (at, map) in maps.iter().enumerate() {
            let mut columns = Columns::new();
            map.write(&mut columns, |event| requests.row(event))?;
            write_element(to, &format!("map-{at}"), columns)?;
        }
        Ok(())
    }
}

fn write_element(to: &mut impl Write, id: &str, columns: Columns) -> io::Result<()> {
    write!(to, "<script type=\"text/plain\" id=\"{id}\">")?;
    to.write_all(&columns.finish()?)?;
    writeln!(to, "</script>")
}

fn write_row(to: &mut impl Write, label: &str, mut cells: impl Iterator<Item = String>) -> io::Result<()> {
    write!(to, "<tr><th scope=\"row\">{label}</th>")?;
    cells.try_for_each(|cell| write!(to, "<td>{cell}</td>"))?;
    writeln!(to, "</tr>")
}

/// The contexts of what any map shows, each once.
struct Requests {
    /// Events in the trace, ascending, and their contexts.
    rows: Vec<(u32, Context)>,
    /// The modules that they name, ascending.
    modules: Vec<u32>,
}

impl Requests {
    fn of(trace: &Trace, maps: &[AddressMap]) -> Requests {
        let mut events: Vec<u32> = maps.iter().flat_map(|map| &map.shown).map(|rectangle| rectangle.event).collect();
        events.sort_unstable();
        events.dedup();
        let context =
            |event: u32| trace.events.get(event as usize).map_or_else(Context::default, |event| event.context);
        let rows: Vec<(u32, Context)> = events.into_iter().map(|event| (event, context(event))).collect();
        let mut modules: Vec<u32> = rows.iter().map(|(_, context)| context.module).collect();
        modules.sort_unstable();
        modules.dedup();
        Requests { rows, modules }
    }

    /// Which row is an event's.
    fn row(&self, event: u32) -> u64 {
        self.rows.partition_point(|(known, _)| *known < event) as u64
    }

    /// Writes it, as `readRequests` of `plot.js` reads it.
    fn write(&self, columns: &mut Columns) -> io::Result<()> {
        let contexts = || self.rows.iter().map(|(_, context)| context);
        let phase =
            |context: &Context| Phase::ALL.iter().position(|(_, phase)| *phase == context.phase).unwrap_or(0) as u64;
        let module = |context: &Context| self.modules.partition_point(|known| *known < context.module) as u64;
        columns.number(self.rows.len() as u64)?;
        columns.numbers(contexts().map(phase))?;
        columns.numbers(contexts().map(module))?;
        columns.numbers(contexts().map(|context| context.microbatch.map_or(0, |microbatch| u64::from(microbatch) + 1)))
    }
}

/// For each power of two: the smallest size, how many there are up to the next power, their bytes together.
fn sizes(placed: &[Placed]) -> Vec<(u64, u64, f64)> {
    let mut classes = vec![(0, 0.0); 64];
    for placed in placed {
        let class = &mut classes[placed.bytes.get().max(1).ilog2() as usize];
        class.0 += 1;
        class.1 += placed.bytes.get() as f64;
    }
    let is_used = |class: &usize| classes[*class].0 > 0;
    let (first, last) = ((0..64).find(is_used), (0..64).rfind(is_used));
    let (Some(first), Some(last)) = (first, last) else { return Vec::new() };
    (first..=last).map(|class| (1 << class, classes[class].0, classes[class].1)).collect()
}

/// Text as HTML shows it, between tags and in attributes.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// JSON that cannot end the script element that it stands in, nor begin a comment there.
fn script_json(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

#[cfg(test)]
mod tests;
