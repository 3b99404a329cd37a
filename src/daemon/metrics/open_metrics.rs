//! From the text format of Prometheus to OpenMetrics 1.0, which Prometheus asks for first: families of counters are called without `_total`, and the text says where it ends.

/// The same in OpenMetrics. Only what the exporter writes: each family in one piece, counters with `_total`.
pub(super) fn to_open_metrics(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let counters: std::collections::HashSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let meta = ["# HELP ", "# TYPE "].into_iter().find_map(|kind| Some((kind, line.strip_prefix(kind)?)));
        match meta {
            Some((kind, rest)) => {
                let (name, said) = rest.split_once(' ').unwrap_or((rest, ""));
                let name = name.strip_suffix("_total").filter(|_| counters.contains(name)).unwrap_or(name);
                out.extend([kind, name, " ", said, "\n"]);
            }
            None => out.extend([line, "\n"]),
        }
    }
    out.push_str("# EOF\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_of_counters_lose_their_suffix_and_nothing_else_changes() {
        let text = "# HELP a_total Of a_total.\n# TYPE a_total counter\na_total{x=\"# TYPE\"} 1\n\n# TYPE sum_total gauge\nsum_total 2\n\n";
        let expected = "# HELP a Of a_total.\n# TYPE a counter\na_total{x=\"# TYPE\"} 1\n# TYPE sum_total gauge\nsum_total 2\n# EOF\n";
        assert_eq!(to_open_metrics(text), expected);
        assert_eq!(to_open_metrics(""), "# EOF\n");
    }
}
