//! Column layouts of the supported log formats.
//!
//! Two layouts are known. **Criteo**: 40 tab-separated fields, the label (0 or 1), 13 integers
//! `I1..I13` (empty or negative allowed) and 26 tokens `C1..C26` (empty allowed). **Avazu**:
//! comma-separated with a header; `click` is the label, `id` is dropped, `hour` (`YYMMDDHH`)
//! becomes the hour of the day, every other column is a token.
//!
//! A parsed line is a [`Sample`]: dense values already transformed, tokens already fingerprints.

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};

use crate::batch::BatchShape;
use crate::fingerprint::{fingerprint, MISSING};

/// Integer features of the Criteo layout.
pub const CRITEO_DENSE_COUNT: usize = 13;
/// Categorical features of the Criteo layout.
pub const CRITEO_FEATURE_COUNT: usize = 26;
/// Integers below this take their logarithm from a table.
const LOG_TABLE_LEN: usize = 4096;

/// The layout of a log's lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Label, 13 integers, 26 tokens, tab-separated, no header.
    Criteo,
    /// Comma-separated with a header naming `id`, `click`, `hour` and the token columns.
    Avazu,
}

/// One line, ready for a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// 0 or 1.
    pub label: f32,
    /// Transformed dense features, `[N]`.
    pub dense: Vec<f32>,
    /// Token fingerprints, `[F]`; [`MISSING`] where the token is empty.
    pub fingerprints: Vec<u64>,
}

impl Sample {
    /// Builds an empty sample of `shape`.
    #[must_use]
    pub fn new(shape: BatchShape) -> Self {
        Self {
            label: 0.0,
            dense: vec![0.0; shape.dense_count],
            fingerprints: vec![MISSING; shape.feature_count],
        }
    }
}

/// What is wrong with a line; the reader adds file and line number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLine {
    /// What was expected.
    pub expected: &'static str,
    /// 1-based field, 0 for the line as a whole.
    pub field: usize,
    /// What was found, cut to 40 characters.
    pub found: String,
}

impl BadLine {
    fn new(expected: &'static str, field: usize, found: &[u8]) -> Self {
        let found = String::from_utf8_lossy(found);
        let mut shown: String = found.chars().take(40).collect();
        if shown.len() < found.len() {
            shown.push_str("...");
        }
        Self { expected, field, found: shown }
    }
}

/// `log1p(max(x, 0))` of an integer feature, small ones from a table.
#[derive(Debug, Clone)]
pub struct LogTransform {
    table: Vec<f32>,
}

impl Default for LogTransform {
    fn default() -> Self {
        Self { table: (0..LOG_TABLE_LEN).map(|x| libm::log1p(x as f64) as f32).collect() }
    }
}

impl LogTransform {
    /// Returns `log1p(max(value, 0))`.
    #[must_use]
    pub fn apply(&self, value: i64) -> f32 {
        if value <= 0 {
            return 0.0;
        }
        let known = usize::try_from(value).ok().and_then(|at| self.table.get(at));
        known.copied().unwrap_or_else(|| libm::log1p(value as f64) as f32)
    }
}

/// Where the columns of an Avazu file are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Column {
    Dropped,
    Label,
    Hour { feature: u32 },
    Token { feature: u32 },
}

/// Parses the lines of one layout.
#[derive(Debug, Clone)]
pub struct Parser {
    format: LogFormat,
    columns: Vec<Column>,
    feature_names: Vec<String>,
    log: LogTransform,
}

impl Parser {
    /// Builds the parser of Criteo lines.
    #[must_use]
    pub fn criteo() -> Self {
        let feature_names = (1..=CRITEO_FEATURE_COUNT).map(|at| format!("C{at}")).collect();
        let log = LogTransform::default();
        Self { format: LogFormat::Criteo, columns: Vec::new(), feature_names, log }
    }

    /// Builds the parser of the Avazu files with this header line.
    ///
    /// # Errors
    /// `Invalid` when the header lacks `click` or has no token column.
    pub fn avazu(header: &[u8]) -> Result<Self> {
        let header = header.strip_prefix(b"\xef\xbb\xbf").unwrap_or(header);
        let header = String::from_utf8_lossy(header);
        let mut feature_names: Vec<String> = Vec::new();
        let mut columns = Vec::new();
        for name in header.split(',') {
            let feature = feature_names.len() as u32;
            columns.push(match name {
                "id" => Column::Dropped,
                "click" => Column::Label,
                "hour" => Column::Hour { feature },
                _ => Column::Token { feature },
            });
            match name {
                "id" | "click" => {}
                "hour" => feature_names.push("hour_of_day".to_owned()),
                _ => feature_names.push(name.to_owned()),
            }
        }
        let label_count = columns.iter().filter(|column| **column == Column::Label).count();
        if label_count != 1 || feature_names.is_empty() {
            return Err(Error::invalid("this is not the header of an avazu file")
                .with("expected", "id,click,hour,C1,...")
                .with("found", header.chars().take(80).collect::<String>())
                .with("remedy", "give the file's header line, or another format"));
        }
        Ok(Self { format: LogFormat::Avazu, columns, feature_names, log: LogTransform::default() })
    }

    /// Returns the layout.
    #[must_use]
    pub fn format(&self) -> LogFormat {
        self.format
    }

    /// Returns the names of the categorical features, in batch order.
    #[must_use]
    pub fn feature_names(&self) -> &[String] {
        &self.feature_names
    }

    /// Tells whether `other` finds the same features in the same columns.
    #[must_use]
    pub fn has_columns_of(&self, other: &Self) -> bool {
        self.columns == other.columns && self.feature_names == other.feature_names
    }

    /// Returns the shape of a sample.
    #[must_use]
    pub fn shape(&self) -> BatchShape {
        let dense_count = if self.format == LogFormat::Criteo { CRITEO_DENSE_COUNT } else { 0 };
        BatchShape { dense_count, feature_count: self.feature_names.len() }
    }

    /// Parses `line` into `sample`, which has this parser's shape.
    ///
    /// # Errors
    /// Says what was expected and found; `sample` is then unspecified.
    pub fn parse(&self, line: &[u8], sample: &mut Sample) -> std::result::Result<(), BadLine> {
        match self.format {
            LogFormat::Criteo => self.parse_criteo(line, sample),
            LogFormat::Avazu => self.parse_avazu(line, sample),
        }
    }

    fn parse_criteo(&self, line: &[u8], sample: &mut Sample) -> std::result::Result<(), BadLine> {
        let mut fields = Fields::new(line, b'\t');
        let mut next = |at: usize| {
            fields.next().ok_or_else(|| {
                let found = format!("{at} fields: {}", String::from_utf8_lossy(line));
                BadLine::new("40 tab-separated fields", 0, found.as_bytes())
            })
        };
        sample.label = parse_label(next(0)?, 1)?;
        for (at, dense) in sample.dense.iter_mut().enumerate() {
            let field = next(1 + at)?;
            *dense = if field.is_empty() {
                0.0
            } else {
                let value = parse_integer(field)
                    .ok_or_else(|| BadLine::new("an integer or nothing", 2 + at, field))?;
                self.log.apply(value)
            };
        }
        for (at, slot) in sample.fingerprints.iter_mut().enumerate() {
            *slot = fingerprint(at as u32, next(1 + CRITEO_DENSE_COUNT + at)?);
        }
        if fields.next().is_some() {
            let count = 41 + fields.count();
            let found = format!("{count} fields: {}", String::from_utf8_lossy(line));
            return Err(BadLine::new("40 tab-separated fields", 0, found.as_bytes()));
        }
        Ok(())
    }

    fn parse_avazu(&self, line: &[u8], sample: &mut Sample) -> std::result::Result<(), BadLine> {
        let mut fields = Fields::new(line, b',');
        let wrong_count = || BadLine::new("as many fields as the header has", 0, line);
        for (at, column) in self.columns.iter().enumerate() {
            let field = fields.next().ok_or_else(wrong_count)?;
            if field.first() == Some(&b'"') {
                return Err(BadLine::new("a field without quotes", at + 1, field));
            }
            let (feature, token) = match *column {
                Column::Dropped => continue,
                Column::Label => {
                    sample.label = parse_label(field, at + 1)?;
                    continue;
                }
                Column::Hour { feature } => (feature, hour_of_day(field, at + 1)?),
                Column::Token { feature } => (feature, field),
            };
            if let Some(slot) = sample.fingerprints.get_mut(feature as usize) {
                *slot = fingerprint(feature, token);
            }
        }
        if fields.next().is_some() {
            return Err(wrong_count());
        }
        Ok(())
    }
}

/// The fields of a line. An empty line has one empty field.
struct Fields<'a> {
    rest: Option<&'a [u8]>,
    separator: u8,
}

impl<'a> Fields<'a> {
    fn new(line: &'a [u8], separator: u8) -> Self {
        Self { rest: Some(line), separator }
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.rest?;
        // Fields are a few bytes long: a plain loop beats a vectorised search here.
        let Some(at) = rest.iter().position(|&byte| byte == self.separator) else {
            self.rest = None;
            return Some(rest);
        };
        let (field, tail) = rest.split_at(at);
        self.rest = tail.get(1..);
        Some(field)
    }
}

fn parse_label(field: &[u8], at: usize) -> std::result::Result<f32, BadLine> {
    match field {
        b"0" => Ok(0.0),
        b"1" => Ok(1.0),
        _ => Err(BadLine::new("a label, 0 or 1", at, field)),
    }
}

fn parse_integer(field: &[u8]) -> Option<i64> {
    let (is_negative, digits) = match field.split_first()? {
        (b'-', digits) => (true, digits),
        _ => (false, field),
    };
    // 18 digits always fit.
    if digits.is_empty() || digits.len() > 18 {
        return None;
    }
    let mut value = 0i64;
    for &digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        value = value * 10 + i64::from(digit - b'0');
    }
    Some(if is_negative { -value } else { value })
}

fn hour_of_day(field: &[u8], at: usize) -> std::result::Result<&[u8], BadLine> {
    let bad = || BadLine::new("an hour as YYMMDDHH", at, field);
    if field.is_empty() {
        return Ok(field);
    }
    if field.len() != 8 || !field.iter().all(u8::is_ascii_digit) {
        return Err(bad());
    }
    let (_, hour) = field.split_at(6);
    if hour > b"23".as_slice() {
        return Err(bad());
    }
    Ok(hour)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn criteo_line(integers: &str, tokens: &str) -> String {
        let integers: Vec<_> = integers.split(',').collect();
        let tokens: Vec<_> = tokens.split(',').collect();
        let mut fields = vec!["1".to_owned()];
        fields.extend((0..13).map(|at| integers.get(at).copied().unwrap_or("").to_owned()));
        fields.extend((0..26).map(|at| tokens.get(at).copied().unwrap_or("").to_owned()));
        fields.join("\t")
    }

    fn parse(parser: &Parser, line: &str) -> std::result::Result<Sample, BadLine> {
        let mut sample = Sample::new(parser.shape());
        parser.parse(line.as_bytes(), &mut sample).map(|()| sample)
    }

    #[test]
    fn criteo_lines_keep_missing_and_negative_apart_from_values() {
        let sample = parse(&Parser::criteo(), &criteo_line("1,-2,,5000,0", "ab,,cd")).unwrap();
        assert_eq!(sample.label, 1.0);
        let expected = [2f64.ln() as f32, 0.0, 0.0, 5001f64.ln() as f32, 0.0];
        assert_eq!(sample.dense[..5], expected);
        let tokens = [fingerprint(0, b"ab"), MISSING, fingerprint(2, b"cd"), MISSING];
        assert_eq!(sample.fingerprints[..4], tokens);
    }

    #[test]
    fn bad_criteo_lines_say_what_was_found() {
        let parser = Parser::criteo();
        let good = criteo_line("1", "ab");
        let cases = [
            (String::new(), 1, "a label"),
            (good.replacen('1', "2", 1), 1, "a label"),
            (good.clone() + "\tx", 0, "40 tab"),
            (good.trim_end().to_owned(), 0, "40 tab"),
            (criteo_line("1,x7", ""), 3, "an integer"),
            (criteo_line("1,1.5", ""), 3, "an integer"),
            (criteo_line("-", ""), 2, "an integer"),
            (criteo_line("1234567890123456789", ""), 2, "an integer"),
        ];
        for (line, field, expected) in cases {
            let bad = parse(&parser, &line).unwrap_err();
            assert_eq!(bad.field, field, "{bad:?}");
            assert!(bad.expected.starts_with(expected), "{bad:?}");
        }
        assert!(parse(&parser, "2").unwrap_err().found.contains('2'));
    }

    #[test]
    fn avazu_columns_come_from_the_header() {
        let parser = Parser::avazu(b"id,click,hour,C1,banner_pos").unwrap();
        assert_eq!(parser.feature_names(), ["hour_of_day", "C1", "banner_pos"]);
        assert_eq!(parser.shape(), BatchShape { dense_count: 0, feature_count: 3 });
        let sample = parse(&parser, "10000,1,14102123,1005,").unwrap();
        assert_eq!(sample.label, 1.0);
        let tokens = [fingerprint(0, b"23"), fingerprint(1, b"1005"), MISSING];
        assert_eq!(sample.fingerprints, tokens);
        for line in [
            "1,1,14102199,1,2",
            "1,1,141021,1,2",
            "1,1,14102100,1",
            "1,x,14102100,1,2",
            "1,1,14102100,\"a\",2",
            "1,1,14102100,1,2,3",
        ] {
            parse(&parser, line).unwrap_err();
        }
        let error = Parser::avazu(b"a,b,c").unwrap_err();
        assert!(error.to_string().contains("a,b,c"), "{error}");
    }
}
