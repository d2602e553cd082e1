//! Numbers of a tensor in JSON: flat, or nested as the shape is.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};
use tierbed_core::{Error, Result};

/// A number of a tensor.
pub(super) trait Number: Sized {
    const EXPECTED: &'static str;
    fn from_int(value: i64) -> Option<Self>;
    fn from_float(value: f64) -> Option<Self>;
}

impl Number for i64 {
    const EXPECTED: &'static str = "whole numbers of 64 bits";

    fn from_int(value: i64) -> Option<Self> {
        Some(value)
    }

    fn from_float(_: f64) -> Option<Self> {
        None
    }
}

impl Number for f32 {
    const EXPECTED: &'static str = "numbers";

    fn from_int(value: i64) -> Option<Self> {
        Some(value as f32)
    }

    fn from_float(value: f64) -> Option<Self> {
        Some(value as f32)
    }
}

/// Decodes the numbers of `json`, in order. Shapes are checked by who knows them.
///
/// # Errors
/// `Invalid` for anything but arrays of numbers.
pub(super) fn numbers<T: Number>(json: &str) -> Result<Vec<T>> {
    let mut numbers = Vec::new();
    let mut source = serde_json::Deserializer::from_str(json);
    let decoded = Numbers(&mut numbers).deserialize(&mut source);
    decoded.map_err(|cause| {
        Error::invalid("data of the tensor is malformed")
            .with("expected", T::EXPECTED)
            .with("cause", cause)
    })?;
    Ok(numbers)
}

struct Numbers<'a, T>(&'a mut Vec<T>);

impl<'de, T: Number> DeserializeSeed<'de> for Numbers<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> std::result::Result<(), D::Error> {
        source.deserialize_any(self)
    }
}

impl<T: Number> Numbers<'_, T> {
    fn push<E: serde::de::Error>(
        self,
        number: Option<T>,
        found: impl fmt::Display,
    ) -> std::result::Result<(), E> {
        match number {
            Some(number) => {
                self.0.push(number);
                Ok(())
            }
            None => Err(E::custom(format_args!("{found} is none of {}", T::EXPECTED))),
        }
    }
}

impl<'de, T: Number> Visitor<'de> for Numbers<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> std::result::Result<(), E> {
        self.push(T::from_int(value), value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> std::result::Result<(), E> {
        let number = match i64::try_from(value) {
            Ok(value) => T::from_int(value),
            Err(_) => T::from_float(value as f64),
        };
        self.push(number, value)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> std::result::Result<(), E> {
        self.push(T::from_float(value), value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<(), A::Error> {
        while items.next_element_seed(Numbers(self.0))?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_flat_and_nested() {
        assert_eq!(numbers::<i64>("[1, -2, 9223372036854775807]").unwrap(), [1, -2, i64::MAX]);
        assert_eq!(numbers::<i64>("[[1, 2], [], [3]]").unwrap(), [1, 2, 3]);
        assert_eq!(numbers::<f32>("[[1], [0.5, -1e-3]]").unwrap(), [1.0, 0.5, -0.001]);
        assert_eq!(numbers::<f32>("[1e39]").unwrap(), [f32::INFINITY]);
        for bad in ["[1.5]", "[9223372036854775808]", "[true]", "[\"1\"]", "{}", "[null]"] {
            assert!(numbers::<i64>(bad).is_err(), "{bad}");
        }
        assert!(numbers::<f32>("[true]").is_err());
        let deep = "[".repeat(100_000);
        assert!(numbers::<f32>(&deep).is_err(), "nesting has an end");
    }
}
