//! Tables for people: columns as wide as their widest cell, numbers to the right.

/// A table that is being filled.
#[derive(Debug)]
pub(super) struct Table {
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns. A header that begins with '>' stands over numbers.
    pub(super) fn new(headers: &[&str]) -> Table {
        Table { headers: headers.iter().map(|header| (*header).to_owned()).collect(), rows: Vec::new() }
    }

    /// How many columns it has.
    pub(super) fn columns(&self) -> usize {
        self.headers.len()
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.headers.len(), "a row has a cell for every column");
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_number: Vec<bool> = self.headers.iter().map(|header| header.starts_with('>')).collect();
        let titles: Vec<String> = self.headers.iter().map(|header| header.trim_start_matches('>').to_owned()).collect();
        let width = |at: usize| self.rows.iter().chain([&titles]).map(|row| row[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..titles.len()).map(width).collect();
        for row in [&titles].into_iter().chain(&self.rows) {
            let mut line = String::new();
            for (at, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[at] - cell.chars().count());
                line.push_str(&if is_number[at] { format!("{pad}{cell}  ") } else { format!("{cell}{pad}  ") });
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["name", ">size"]);
        table.row(vec!["a".into(), "1".into()]);
        table.row(vec!["größe".into(), "100".into()]);
        assert_eq!(table.to_string(), "name   size\na         1\ngröße   100\n");
    }
}
