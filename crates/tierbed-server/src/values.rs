//! Kinds of values: sizes, counts, times and shares, read from words.
//!
//! A word that does not fit is told with what would: clap puts the option's name before it.

use std::fmt;
use std::str::FromStr;

/// The longest time, a day: longer ones are mistakes.
const TIME_MS_MAX: u64 = 24 * 3_600_000;

/// Bytes, as people write them: `16MiB`, `4GB`, `512k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    /// `KiB MiB GiB TiB PiB` and bare letters count in 1024s, `KB MB GB TB PB` in 1000s.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write a size, for example 16MiB, 4GiB or 4000000000".to_owned();
        let trimmed = text.trim();
        let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(end);
        let unit = unit_bytes(unit.trim()).ok_or_else(wrong)?;
        let Some((whole, part)) = number.split_once('.') else {
            let number: u64 = number.parse().map_err(|_| wrong())?;
            return number.checked_mul(unit).map(Self).ok_or_else(wrong);
        };
        if whole.is_empty() || part.is_empty() || part.contains('.') {
            return Err(wrong());
        }
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit as f64;
        // Beyond 2^53 bytes fractions have no sense.
        if bytes < 9.0e15 {
            Ok(Self(bytes as u64))
        } else {
            Err(wrong())
        }
    }
}

fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    let (letter, step) = match unit.strip_suffix("ib") {
        Some(letter) => (letter, 1024),
        None => match unit.strip_suffix('b') {
            Some(letter) => (letter, 1000),
            None => (unit.as_str(), 1024),
        },
    };
    let power = ["", "k", "m", "g", "t", "p"].iter().position(|&known| known == letter)?;
    let is_half = letter.is_empty() && unit.ends_with("ib");
    (!is_half).then(|| u64::pow(step, power as u32))
}

impl fmt::Display for Size {
    /// In the largest unit that divides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        match units.iter().find(|(_, of)| self.0 > 0 && self.0.is_multiple_of(*of)) {
            Some((unit, of)) => write!(f, "{}{unit}", self.0 / of),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Reads a size that is not 0.
pub(crate) fn bytes(text: &str) -> Result<Size, String> {
    match text.parse()? {
        Size(0) => Err("write a size above 0, for example 16MiB".to_owned()),
        size => Ok(size),
    }
}

/// Reads a number of things, perhaps none.
pub(crate) fn count_or_0(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "write a whole number, 0 or more".to_owned())
}

/// Reads a number of things, one at least.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|&number| number >= 1);
    number.ok_or_else(|| "write a whole number, 1 or more".to_owned())
}

/// Reads a time limit in milliseconds.
pub(crate) fn limit_ms(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|&ms| (1..=TIME_MS_MAX).contains(&ms));
    number.ok_or_else(|| format!("write whole milliseconds, 1 to {TIME_MS_MAX}"))
}

/// Reads milliseconds, 0 among them.
pub(crate) fn ms(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "write whole milliseconds, 0 or more".to_owned())
}

/// Reads seconds, at most a day of them: `2`, `2s`, `500ms`.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let number = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(ms), _) => ms.parse().ok().map(|ms: f64| ms / 1e3),
        (None, Some(s)) => s.parse().ok(),
        (None, None) => text.parse().ok(),
    };
    let number = number.filter(|s: &f64| (0.0..=86_400.0).contains(s));
    number.ok_or_else(|| "write seconds, 0 to 86400".to_owned())
}

/// Reads a share of a whole.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|&share: &f64| share > 0.0 && share <= 1.0);
    number.ok_or_else(|| "write a number above 0, up to 1".to_owned())
}

/// Reads yes or no.
pub(crate) fn flag(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Ok(true),
        "false" | "no" | "off" | "0" => Ok(false),
        _ => Err("write true or false".to_owned()),
    }
}

/// Reads words with commas between.
pub(crate) fn words(text: &str) -> Vec<String> {
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_python_reads_them() {
        let read = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(read("16MiB"), Ok(16 << 20));
        assert_eq!(read(" 4 gb "), Ok(4_000_000_000));
        assert_eq!(read("512k"), Ok(512 << 10));
        assert_eq!(read("1.5GiB"), Ok(3 << 29));
        assert_eq!(read("7"), Ok(7));
        assert_eq!(read("7b"), Ok(7));
        assert_eq!(read("2PiB"), Ok(2 << 50));
        for wrong in [
            "",
            "MiB",
            "4XB",
            "1..5G",
            ".5G",
            "5.G",
            "-1",
            "4ib",
            "99999999999999999999",
            "20000000TiB",
            "1e3",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for (bytes, text) in [(0, "0"), (1 << 30, "1GiB"), (3 << 20, "3MiB"), (1025, "1025")] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(count("0").is_err() && count("-1").is_err() && count("1.5").is_err());
        assert_eq!(count("1"), Ok(1));
        assert!(limit_ms("0").is_err() && limit_ms("86400001").is_err());
        assert_eq!(limit_ms("86400000"), Ok(86_400_000));
        assert!(seconds("-1").is_err() && seconds("nan").is_err() && seconds("inf").is_err());
        let read = ["2", "2s", "500ms", "0.25s"].map(|text| seconds(text).unwrap());
        assert_eq!(read, [2.0, 2.0, 0.5, 0.25]);
        assert!(seconds("2h").is_err() && seconds("s").is_err() && seconds("-1ms").is_err());
        assert!(share("0").is_err() && share("1.1").is_err() && share("nan").is_err());
        assert_eq!(share("1"), Ok(1.0));
        assert!(bytes("0").is_err());
    }
}
