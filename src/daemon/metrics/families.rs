//! Families of very many series, as text: what the recorder does with a map for each label, which for a thousand sessions on eight devices took longer than all else of a scrape.

use std::fmt::Write as _;

use metrics_exporter_prometheus::formatting;

use super::names;

/// Labels of a series as they stand between the braces.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels(String);

impl Labels {
    pub(super) fn and(mut self, name: &str, value: &str) -> Labels {
        let comma = if self.0.is_empty() { "" } else { "," };
        self.0.extend([comma, name, "=\""]);
        // As the format has it, and not as the recorder does: to that two backslashes are one.
        for letter in value.chars() {
            match letter {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                other => self.0.push(other),
            }
        }
        self.0.push('"');
        self
    }
}

/// What a family is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Counter,
    Gauge,
}

/// Writes a family that there is a series of: for each of `rows` one for each value of a label, with its figure.
pub(super) fn write<'a, Row>(
    out: &mut String,
    (name, kind): (&'static str, Kind),
    rows: &'a [(Labels, Row)],
    (label, values): (&str, &[&str]),
    figure: impl Fn(&'a Row, usize) -> u64,
) {
    if rows.is_empty() {
        return;
    }
    write_head(out, name, kind);
    for (labels, row) in rows {
        for (at, value) in values.iter().enumerate() {
            out.extend([name, "{", &labels.0, ",", label, "=\"", value, "\"} "]);
            writeln!(out, "{}", figure(row, at)).expect("a string takes all");
        }
    }
    out.push('\n');
}

/// Writes a family of one series without labels.
pub(super) fn write_one(out: &mut String, (name, kind): (&'static str, Kind), figure: f64) {
    write_head(out, name, kind);
    writeln!(out, "{name} {figure}\n").expect("a string takes all");
}

fn write_head(out: &mut String, name: &'static str, kind: Kind) {
    let kind = match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
    };
    formatting::write_help_line(out, name, None, None, names::meaning(name));
    formatting::write_type_line(out, name, None, None, kind);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_written_as_the_format_has_it() {
        let labels = |name| Labels::default().and("UUID", "GPU-1").and("session", name);
        let rows = [(labels("a"), [1_u64, 2]), (labels("\"\\\n\\\\é"), [3, u64::MAX])];
        let mut out = String::new();
        let family = ("stitchd_session_requests_total", Kind::Counter);
        write(&mut out, family, &rows, ("served", &["planned", "small"]), |row, at| row[at]);
        let expected = [
            "# HELP stitchd_session_requests_total The same of the sessions that are there.",
            "# TYPE stitchd_session_requests_total counter",
            r#"stitchd_session_requests_total{UUID="GPU-1",session="a",served="planned"} 1"#,
            r#"stitchd_session_requests_total{UUID="GPU-1",session="a",served="small"} 2"#,
            r#"stitchd_session_requests_total{UUID="GPU-1",session="\"\\\n\\\\é",served="planned"} 3"#,
            r#"stitchd_session_requests_total{UUID="GPU-1",session="\"\\\n\\\\é",served="small"} 18446744073709551615"#,
            "\n",
        ];
        assert_eq!(out, expected.join("\n"));
        let none: [(Labels, [u64; 2]); 0] = [];
        write(&mut out, family, &none, ("served", &["planned"]), |row, at| row[at]);
        assert_eq!(out, expected.join("\n"), "nothing of nobody");
    }
}
