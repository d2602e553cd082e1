//! The ratchet: counts per crate that may only fall.
//!
//! `ceilings.txt` has a line per crate: name, masked fallbacks, masked exits, tuple parameters,
//! uses of `unsafe`. A crate without a line has ceilings of zero. Code that moves to another crate
//! takes its allowance along: `renew` accepts any division whose totals do not rise.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::super::{File, Finding};
use super::measures::Measures;
use super::table::Table;

/// What the columns of the file count.
const COLUMNS: [&str; 4] = ["masked fallbacks", "masked exits", "tuple parameters", "unsafe uses"];

type Counts = [usize; COLUMNS.len()];

const HEADER: &str = "\
# Most that a crate may have; written by `cargo x count --set`, checked by `cargo x tidy`.
# crate, masked fallbacks, masked exits, tuple parameters, unsafe uses
";

/// Refuses every count above its ceiling.
pub(super) fn check(files: &[File], table: &Table) -> Vec<Finding> {
    let Some(file) = ceilings_file(files) else { return Vec::new() };
    let ceilings = match parse(&file.text) {
        Ok(ceilings) => ceilings,
        Err((line, message)) => return vec![Finding::new(file, line, message)],
    };
    let mut findings = Vec::new();
    for (name, counts) in counts_of(table) {
        let (line, most) = ceilings.get(&name).copied().unwrap_or_default();
        for ((count, most), column) in counts.iter().zip(most).zip(COLUMNS) {
            if *count > most {
                let message = format!(
                    "{name} has {count} {column}, at most {most} (`cargo x count --list` shows \
                     them; code that moved here takes its allowance along: `cargo x count --set`)"
                );
                findings.push(Finding::new(file, line.max(1), message));
            }
        }
    }
    findings
}

/// Returns path and text of the file with today's counts, unless a total rose.
pub(super) fn renew(files: &[File], table: &Table) -> Result<(String, String), String> {
    let file = ceilings_file(files).ok_or("no xtask/ceilings.txt")?;
    let before = parse(&file.text).map_err(|(line, message)| format!("line {line}: {message}"))?;
    let counts = counts_of(table);
    let allowed = total(before.values().map(|(_, counts)| counts));
    let today = total(counts.values());
    for ((today, allowed), column) in today.iter().zip(allowed).zip(COLUMNS) {
        if *today > allowed {
            return Err(format!("{today} {column} in all crates, at most {allowed}"));
        }
    }
    let mut text = HEADER.to_owned();
    for (name, counts) in counts.iter().filter(|(_, counts)| counts.iter().any(|&n| n > 0)) {
        let columns: Vec<String> = counts.iter().map(usize::to_string).collect();
        writeln!(text, "{name} {}", columns.join(" ")).map_err(|error| error.to_string())?;
    }
    Ok((file.path.clone(), text))
}

fn ceilings_file(files: &[File]) -> Option<&File> {
    files.iter().find(|file| file.path.ends_with("tools/xtask/ceilings.txt"))
}

/// Returns line and counts by crate, or the line that is not understood and why.
fn parse(text: &str) -> Result<BTreeMap<String, (usize, Counts)>, (usize, String)> {
    let mut ceilings = BTreeMap::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or("").to_owned();
        let numbers: Result<Vec<usize>, _> = words.map(str::parse).collect();
        let counts = numbers.ok().and_then(|numbers| Counts::try_from(numbers).ok());
        let counts = counts
            .ok_or_else(|| (at + 1, format!("expected a crate and {} numbers", COLUMNS.len())))?;
        if ceilings.insert(name, (at + 1, counts)).is_some() {
            return Err((at + 1, "the crate has a line already".to_owned()));
        }
    }
    Ok(ceilings)
}

/// Counts every crate, of the product and of the tools.
fn counts_of(table: &Table) -> BTreeMap<String, Counts> {
    let counts = |row: &Measures| [row.masked, row.exits, row.tuples, row.unsafes];
    table.rows.iter().map(|((_, name), row)| (name.clone(), counts(row))).collect()
}

fn total<'a>(rows: impl Iterator<Item = &'a Counts>) -> Counts {
    rows.fold(Counts::default(), |mut sum, row| {
        sum.iter_mut().zip(row).for_each(|(sum, count)| *sum += count);
        sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASKED: &str = "fn f() { a.get(1).unwrap_or(0); }\n";

    fn tree(ceilings: &str, sources: &[(&str, &str)]) -> (Vec<File>, Table) {
        let mut files = vec![File::new("tools/xtask/ceilings.txt", ceilings)];
        files.extend(sources.iter().map(|(path, text)| File::new(*path, *text)));
        let table = Table::of(&files);
        (files, table)
    }

    #[test]
    fn a_crate_above_its_ceiling_is_refused() {
        let sources = [("crates/a/src/a.rs", MASKED)];
        let (files, table) = tree("a 0 0 0 0\n", &sources);
        assert_eq!(check(&files, &table).len(), 1);
        let (files, table) = tree("", &sources);
        assert_eq!(check(&files, &table).len(), 1, "no line is a ceiling of zero");
        let (files, table) = tree("a 1 0 0 0\n", &sources);
        assert_eq!(check(&files, &table), []);
        let (files, table) = tree("a 1 0\n", &sources);
        assert!(check(&files, &table)[0].message.contains("expected a crate"));
    }

    #[test]
    fn a_ceiling_falls_and_moves_but_no_total_rises() {
        let (files, table) = tree("a 3 0 0 0\n", &[("crates/b/src/a.rs", MASKED)]);
        let (path, text) = renew(&files, &table).unwrap();
        assert_eq!(
            (path.as_str(), text.as_str()),
            ("tools/xtask/ceilings.txt", &*format!("{HEADER}b 1 0 0 0\n"))
        );
        let (files, table) = tree("a 0 0 0 0\n", &[("crates/b/src/a.rs", MASKED)]);
        assert!(renew(&files, &table).is_err());
    }
}
