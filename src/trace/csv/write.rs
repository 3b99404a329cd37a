//! Writes trace CSV: what is read back is the same trace.

use std::io::Write;

use crate::trace::{Context, Event, EventKind, Phase, Trace};

use super::HEADER;

/// Writes a whole trace, row by row. Columns `device` and `thread` are there only if any event needs them.
///
/// An id or a size that the kind of an event does not have is left out, as the format wants it.
///
/// # Errors
///
/// What `out` says.
pub fn write(mut out: impl Write, trace: &Trace) -> std::io::Result<()> {
    let has_places = trace.events.iter().any(|event| event.device != 0 || event.thread != 0);
    let mut row = Vec::from(HEADER);
    row.extend_from_slice(if has_places { b",device,thread\n" } else { b"\n" });
    // Whoever is written to need not be asked for every row.
    const FLUSH_LEN: usize = 64 << 10;
    for event in &trace.events {
        write_event(&mut row, trace, event, has_places);
        if row.len() >= FLUSH_LEN {
            out.write_all(&row)?;
            row.clear();
        }
    }
    out.write_all(&row)?;
    out.flush()
}

fn write_event(row: &mut Vec<u8>, trace: &Trace, event: &Event, has_places: bool) {
    let Context { phase, microbatch, chunk, module } = event.context;
    number(row, event.tick.0);
    row.push(b',');
    row.extend_from_slice(event.kind.name().as_bytes());
    row.push(b',');
    if event.kind.has_id() {
        number(row, event.id);
    }
    row.push(b',');
    if event.kind == EventKind::Alloc {
        number(row, event.bytes.get());
    }
    row.push(b',');
    number(row, event.stream.0);
    row.push(b',');
    number(row, u64::from(event.iteration));
    row.push(b',');
    if phase != Phase::Other {
        row.extend_from_slice(phase.name().as_bytes());
    }
    for value in [microbatch, chunk] {
        row.push(b',');
        if let Some(value) = value {
            number(row, u64::from(value));
        }
    }
    row.push(b',');
    text(row, trace.modules.get(module as usize).map_or("", String::as_str));
    row.extend_from_slice(if event.is_dynamic { b",1" } else { b",0" });
    if has_places {
        for value in [event.device, event.thread] {
            row.push(b',');
            number(row, u64::from(value));
        }
    }
    row.push(b'\n');
}

fn number(row: &mut Vec<u8>, mut n: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            break;
        }
    }
    row.extend_from_slice(&digits[at..]);
}

fn text(row: &mut Vec<u8>, text: &str) {
    if !text.contains([',', '"', '\n', '\r']) {
        row.extend_from_slice(text.as_bytes());
        return;
    }
    row.push(b'"');
    for byte in text.bytes() {
        // A quote inside is written twice.
        row.extend(std::iter::repeat_n(byte, if byte == b'"' { 2 } else { 1 }));
    }
    row.push(b'"');
}
