//! The figures of all crates and packages, product and tools apart.

use std::collections::BTreeMap;
use std::fmt;

use super::super::{File, Scan};
use super::measures::Measures;

/// Where a file belongs. What the product does not ship is a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Product,
    Tools,
}

/// Figures by crate or package.
pub(super) struct Table {
    pub(super) rows: BTreeMap<(Side, String), Measures>,
    /// Words of the documents under `docs/`, without generated results.
    document_words: usize,
}

impl Table {
    /// Counts every file.
    pub(super) fn of(files: &[File]) -> Self {
        let mut table = Self { rows: BTreeMap::new(), document_words: 0 };
        for file in files {
            if matches!(file.scan, Scan::Markdown) {
                let is_counted =
                    file.path.starts_with("docs/") && !file.path.starts_with("docs/results/");
                table.document_words +=
                    if is_counted { file.text.split_whitespace().count() } else { 0 };
            }
            let measures = Measures::of(file);
            if let (Some(owner), true) = (owner(&file.path), measures != Measures::default()) {
                *table.rows.entry(owner).or_default() += measures;
            }
        }
        table
    }

    fn total(&self, side: Side) -> Measures {
        let mut total = Measures::default();
        let of_side = self.rows.iter().filter(|((of, _), _)| *of == side);
        of_side.for_each(|(_, measures)| total += *measures);
        total
    }
}

/// Returns the crate or package of a source file; scripts at the top belong to none.
fn owner(path: &str) -> Option<(Side, String)> {
    let mut folders = path.split('/');
    let (top, second) = (folders.next()?, folders.next()?);
    let owner = match top {
        "crates" => (Side::Product, second),
        "tools" => (Side::Tools, second),
        "python" if second == "tierbed" => (Side::Product, "python/tierbed"),
        "python" => (Side::Tools, second),
        "benchmarks" | "scripts" => (Side::Tools, top),
        _ => return None,
    };
    Some((owner.0, owner.1.to_owned()))
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:22} {:>7} {:>7} {:>7} {:>6} {:>7} {:>7} {:>10} {:>6}",
            "", "rust", "python", "masked", "exits", "tuples", "unsafe", "asserts/fn", "plans"
        )?;
        for (side, heading) in [(Side::Product, "product"), (Side::Tools, "tools")] {
            let rows = self.rows.iter().filter(|((of, _), _)| *of == side);
            let crate_count = rows.clone().filter(|(_, row)| row.rust_lines > 0).count();
            for ((_, name), measures) in rows {
                write_row(f, name, measures)?;
            }
            write_row(f, &format!("= {heading}, {crate_count} crates"), &self.total(side))?;
            writeln!(f)?;
        }
        writeln!(f, "words of documents: {}", self.document_words)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio that is printed with three digits")]
fn write_row(f: &mut fmt::Formatter<'_>, name: &str, row: &Measures) -> fmt::Result {
    let asserts_per_function = match row.functions {
        0 => String::new(),
        functions => format!("{:.3}", row.asserts as f64 / functions as f64),
    };
    writeln!(
        f,
        "{name:22} {:>7} {:>7} {:>7} {:>6} {:>7} {:>7} {asserts_per_function:>10} {:>6}",
        row.rust_lines, row.python_lines, row.masked, row.exits, row.tuples, row.unsafes, row.plans,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_and_tools_are_apart() {
        let source = "fn f() {\n    g();\n}\n";
        let table = Table::of(&[
            File::new("crates/tierbed-io/src/a.rs", source),
            File::new("crates/tierbed-io/tests/a.rs", source),
            File::new("tools/xtask/src/a.rs", source),
            File::new("python/tierbed/nn/a.py", "\"\"\"A.\"\"\"\nx = 1\n"),
            File::new("docs/a.md", "one two\nthree\n"),
            File::new("docs/results/a.md", "one two\nthree\n"),
        ]);
        assert_eq!(table.total(Side::Product).rust_lines, 3);
        assert_eq!(table.total(Side::Product).python_lines, 1);
        assert_eq!(table.total(Side::Tools).rust_lines, 3);
        assert_eq!(table.document_words, 3);
        let printed = table.to_string();
        assert!(printed.contains("= product, 1 crates"), "{printed}");
    }
}
