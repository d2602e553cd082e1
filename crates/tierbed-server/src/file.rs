//! File of options in TOML, below the environment and the command line.
//!
//! Each key is checked alone, as if it stood on the command line, so that an error names its line.
//! Values that fit become the defaults of the whole. A file of `tierbed train --config` has them in
//! the section `[serve]`, beside those of other commands.

use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};
use tierbed_core::Error;
use toml::de::{DeTable, DeValue};

use crate::options::Options;

/// Largest file that is read.
const BYTES_MAX: u64 = 1 << 20;
/// What cannot stand in a file.
const ONLY_SPOKEN: [&str; 2] = ["config", "print_config"];
/// The section of a server, in a file of several commands.
const SECTION: &str = "serve";
/// Sections of other commands, which check them.
const OTHER_SECTIONS: [&str; 7] = ["cluster", "data", "eval", "plan", "publish", "store", "train"];
/// Keys of the section that only `tierbed serve` has: of torch.
const OF_TORCH: [&str; 2] = ["predict", "threads"];

/// Something is set wrongly.
#[derive(Debug)]
pub(crate) enum Wrong {
    /// On the command line or in the environment; or help was asked for.
    Words(clap::Error),
    /// In the file.
    File(Error),
}

impl From<clap::Error> for Wrong {
    fn from(error: clap::Error) -> Self {
        Self::Words(error)
    }
}

/// Returns the command with the variables of the environment.
pub(crate) fn command() -> Command {
    Options::command().mut_args(|arg| match arg.get_id().as_str() {
        // Asking is done by words.
        "print_config" => arg,
        _ => {
            let variable = variable(&arg);
            arg.env(variable).hide_env(true)
        }
    })
}

/// Returns the variable of the environment for an option.
pub(crate) fn variable(arg: &Arg) -> String {
    format!("TIERBED_{}", arg.get_id().as_str().to_uppercase())
}

/// Returns an option's name on the command line and in a file.
pub(crate) fn name(arg: &Arg) -> String {
    arg.get_id().as_str().replace('_', "-")
}

/// Reads command line, environment and the file they name.
///
/// # Errors
/// Of whichever is wrong first.
pub(crate) fn read(words: &[OsString]) -> Result<(Options, ArgMatches), Wrong> {
    let spoken = command().try_get_matches_from(words)?;
    let matches = match Options::from_arg_matches(&spoken)?.config {
        None => spoken,
        Some(path) => {
            let values = values(&path).map_err(Wrong::File)?;
            command().mut_args(|arg| with_default(arg, &values)).try_get_matches_from(words)?
        }
    };
    Ok((Options::from_arg_matches(&matches)?, matches))
}

/// An option that a host sets, which has a file of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The option's name as on the command line, without the dashes before it.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl Options {
    /// Returns what `settings` set, and defaults: neither command line nor environment count.
    ///
    /// # Errors
    /// `Invalid` for an option that there is not, and a value that does not fit.
    pub fn of_settings(settings: &[Setting]) -> tierbed_core::Result<Self> {
        let values =
            settings.iter().map(|Setting { name, value }| checked(name, vec![value.clone()]));
        let values: Vec<Value> = values.collect::<tierbed_core::Result<_>>()?;
        let command = Self::command().mut_args(|arg| with_default(arg, &values));
        let matches = command.try_get_matches_from(["tierbed-server"]);
        match matches.and_then(|matches| Self::from_arg_matches(&matches)) {
            Ok(options) => Ok(options),
            Err(cause) => panic!("options that are right alone are wrong together: {cause}"),
        }
    }
}

/// An option that a file sets.
#[derive(Debug, PartialEq, Eq)]
struct Value {
    id: String,
    words: Vec<String>,
}

fn with_default(arg: Arg, values: &[Value]) -> Arg {
    match values.iter().find(|value| arg.get_id() == value.id.as_str()) {
        Some(value) => arg.default_values(value.words.clone()),
        None => arg,
    }
}

fn values(path: &Path) -> tierbed_core::Result<Vec<Value>> {
    let of = |error: Error| error.with("path", path.display());
    let about = std::fs::metadata(path).map_err(|cause| {
        of(Error::invalid("cannot read the file of options"))
            .with("cause", cause)
            .with("remedy", "name a file that the server may read")
    })?;
    if about.len() > BYTES_MAX {
        return Err(of(Error::invalid("the file of options is too large"))
            .with("bytes_max", BYTES_MAX)
            .with("remedy", "name a file of options in TOML"));
    }
    let text = std::fs::read_to_string(path).map_err(|cause| {
        of(Error::invalid("the file of options is no text"))
            .with("cause", cause)
            .with("remedy", "name a file of options in TOML")
    })?;
    parse(&text).map_err(of)
}

fn parse(text: &str) -> tierbed_core::Result<Vec<Value>> {
    let line_of = |at: usize| text.bytes().take(at).filter(|&byte| byte == b'\n').count() + 1;
    let table = DeTable::parse(text).map_err(|cause| {
        let at = cause.span().map_or(0, |span| span.start);
        Error::invalid("the file of options is no TOML")
            .with("line", line_of(at))
            .with("cause", cause.message())
            .with("remedy", "write a line for each option: queue-ms-max = 20")
    })?;
    let mut values: Vec<Value> = Vec::new();
    for (key, value) in table.into_inner() {
        let line = line_of(key.span().start);
        match value.into_inner() {
            DeValue::Table(keys) if key.get_ref() == SECTION => {
                for (key, value) in keys {
                    if !OF_TORCH.contains(&key.get_ref().as_ref()) {
                        let line = line_of(key.span().start);
                        add(&mut values, key.get_ref(), value.get_ref(), line)?;
                    }
                }
            }
            DeValue::Table(_) if OTHER_SECTIONS.contains(&key.get_ref().as_ref()) => {}
            value => add(&mut values, key.get_ref(), &value, line)?,
        }
    }
    Ok(values)
}

/// Adds an option of the file, checked.
fn add(
    values: &mut Vec<Value>,
    key: &str,
    value: &DeValue<'_>,
    line: usize,
) -> tierbed_core::Result<()> {
    let words = spelled(value).ok_or_else(|| {
        Error::invalid("an option has a value of a kind that none takes")
            .with("line", line)
            .with("option", key)
            .with("found", value.type_str())
            .with("remedy", "write a text, a number, true or false, or a list of texts")
    })?;
    let value = checked(key, words).map_err(|error| error.with("line", line))?;
    if values.iter().any(|other| other.id == value.id) {
        return Err(Error::invalid("an option stands above the sections and in one")
            .with("line", line)
            .with("option", key)
            .with("remedy", "leave one out"));
    }
    values.push(value);
    Ok(())
}

/// Returns the words of a value as they would stand on the command line.
fn spelled(value: &DeValue<'_>) -> Option<Vec<String>> {
    match value {
        DeValue::Array(items) => {
            items.iter().map(|item| one_word(item.get_ref())).collect::<Option<Vec<_>>>()
        }
        one => one_word(one).map(|word| vec![word]),
    }
}

fn one_word(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            let digits = i64::from_str_radix(number.as_str(), number.radix()).ok()?;
            Some(digits.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(is_set) => Some(is_set.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

/// Checks an option of the file as if it stood alone on the command line.
fn checked(key: &str, words: Vec<String>) -> tierbed_core::Result<Value> {
    let command = command();
    let known = command.get_arguments().find(|arg| name(arg) == key);
    let known = known.filter(|arg| !ONLY_SPOKEN.contains(&arg.get_id().as_str()));
    let Some(arg) = known else { return Err(unknown(key)) };
    let is_list = matches!(arg.get_action(), clap::ArgAction::Append);
    let is_by_comma = arg
        .get_value_names()
        .is_some_and(|names| names == ["TABLES"] || names == ["NAMES"] || names == ["TIERS"]);
    let words = if is_list {
        words
    } else if is_by_comma {
        vec![words.join(",")]
    } else if words.len() == 1 {
        words
    } else {
        return Err(Error::invalid("an option takes one value")
            .with("option", key)
            .with("found", words.len())
            .with("remedy", "write one value, without brackets"));
    };
    let id = arg.get_id().to_string();
    let spoken = words.iter().map(|word| match id.as_str() {
        "snapshot" => word.clone(),
        _ => format!("--{key}={word}"),
    });
    let spoken = ["tierbed-server".to_owned()].into_iter().chain(spoken);
    let spoken: Vec<String> = spoken.collect();
    match command.try_get_matches_from(spoken) {
        Ok(_) => Ok(Value { id, words }),
        Err(error) => {
            let error = error.render().to_string();
            let told = error.lines().next().unwrap_or_default();
            Err(Error::invalid(told.trim_start_matches("error: ")).with("option", key))
        }
    }
}

fn unknown(key: &str) -> Error {
    let error =
        Error::invalid("the file has an option that the server does not know").with("option", key);
    let asked = command().try_get_matches_from(["tierbed-server".to_owned(), format!("--{key}")]);
    let near = asked.err().and_then(|asked| match asked.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(near)) => Some(near.trim_start_matches("--").to_owned()),
        _ => None,
    });
    match near {
        Some(near) => error.with("remedy", format_args!("write {near}")),
        None => error.with("remedy", "write one of the options of --help, without its dashes"),
    }
}

#[cfg(test)]
mod tests;
