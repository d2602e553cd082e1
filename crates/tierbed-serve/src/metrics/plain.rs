//! Prometheus' text format 0.0.4, made of OpenMetrics text.
//!
//! Differs: a counter's family carries `_total` and a constant's `_info`, as its samples do; the
//! other format leaves both out. There is no mark of the end, and no line of units.

use std::fmt::{Error, Write};

/// Rewrites the text of a registry, whose families begin with a line of help and one of type.
///
/// # Errors
/// For a family without these: none that a registry writes.
pub(super) fn plain(open_metrics: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(open_metrics.len());
    let mut lines = open_metrics.lines();
    while let Some(line) = lines.next() {
        let Some(told) = line.strip_prefix("# HELP ") else {
            if !line.starts_with('#') {
                writeln!(out, "{line}")?;
            }
            continue;
        };
        let (name, help) = told.split_once(' ').ok_or(Error)?;
        let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE ")?.strip_prefix(name));
        let (suffix, kind) = match kind.ok_or(Error)?.trim_start() {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            "unknown" => ("", "untyped"),
            known => ("", known),
        };
        writeln!(out, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}")?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_the_names_of_their_samples() {
        let open =
            "# HELP a Some text.\n# TYPE a counter\n# UNIT a seconds\na_total{b=\"# c\"} 1\n\
                    # HELP d Of.\n# TYPE d info\nd_info{e=\"f\"} 1\n\
                    # HELP g H.\n# TYPE g gauge\ng 2\n# EOF\n";
        let expected = "# HELP a_total Some text.\n# TYPE a_total counter\na_total{b=\"# c\"} 1\n\
                        # HELP d_info Of.\n# TYPE d_info gauge\nd_info{e=\"f\"} 1\n\
                        # HELP g H.\n# TYPE g gauge\ng 2\n";
        assert_eq!(plain(open).as_deref(), Ok(expected));
        assert!(plain("# HELP a Some text.\na 1\n").is_err());
    }
}
