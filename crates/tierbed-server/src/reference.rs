//! What is set, and what can be set, as text: the effective configuration and the reference page.

use std::fmt::Write;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use crate::file::{command, name, variable};

/// Units of values that are written as numbers in a file.
const NUMBERS: [&str; 4] = ["COUNT", "MS", "SECONDS", "SHARE"];
/// What has no value of its own.
const WITHOUT: [&str; 4] = ["help", "version", "config", "print_config"];

/// Returns what is set as a file of options, each with where it comes from.
pub(crate) fn effective(matches: &ArgMatches) -> String {
    let command = command();
    let mut text = String::new();
    for arg in settings(&command) {
        let id = arg.get_id().as_str();
        let Some(raw) = matches.get_raw(id) else { continue };
        let words: Vec<String> = raw.map(|word| word.to_string_lossy().into_owned()).collect();
        let default: Vec<String> =
            arg.get_default_values().iter().map(|word| word.to_string_lossy().into()).collect();
        let source = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "command line".to_owned(),
            Some(ValueSource::EnvVariable) => variable(arg),
            _ if words == default => "default".to_owned(),
            _ => "file".to_owned(),
        };
        let value = written(arg, &words);
        let _ = writeln!(text, "{} = {value}  # {source}", name(arg));
    }
    text
}

fn written(arg: &Arg, words: &[String]) -> String {
    let is_list = matches!(arg.get_action(), clap::ArgAction::Append);
    let is_number = NUMBERS.contains(&unit(arg).as_str());
    let is_bare = |word: &str| match is_number {
        true => word.parse::<f64>().is_ok(),
        false => unit(arg) == "true|false",
    };
    // TOML's basic strings escape as JSON's do.
    let texts = words.iter().map(|word| match is_bare(word) {
        true => word.clone(),
        false => serde_json::Value::from(word.as_str()).to_string(),
    });
    let texts: Vec<String> = texts.collect();
    if is_list {
        format!("[{}]", texts.join(", "))
    } else {
        texts.concat()
    }
}

/// Returns what is set, in the table's order.
fn settings(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| !WITHOUT.contains(&arg.get_id().as_str()))
}

/// Returns the kind of an option's value.
fn unit(arg: &Arg) -> String {
    let words: Vec<_> = arg.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect();
    match arg.get_value_names() {
        Some([name]) if words.is_empty() || name == "true|false" => name.to_string(),
        _ => words.join("|"),
    }
}

const HEAD: &str = "\
# Configuration

All settings of a server, with defaults. `tierbed-server` and `tierbed serve` have the same
options. `cargo x config` writes this page from the table in
[`options.rs`](../../crates/tierbed-server/src/options.rs).

`tierbed-server` takes each option from three places. The command line goes first:

| place | is written |
|---|---|
| command line | `--queue-ms-max 20` |
| environment | `TIERBED_QUEUE_MS_MAX=20` |
| a TOML file, named by `--config FILE` | `queue-ms-max = 20` |

The keys stand alone, or in the section `[serve]` of a [run file](run-file.md). `--print-config`
prints what is in force, as such a file, and says where each value comes from. An unknown key of the
file is refused with its line and the nearest known one. `SNAPSHOT` is the key `snapshot`.
`tierbed serve` takes command line and file. For predictions it has two options besides:
`--threads`, the threads of torch for a batch, and `--predict`, `python` or `aoti`: what scores.

| unit | is |
|---|---|
| `SIZE` | bytes: `16MiB`, `4GB`, `512k`; `KiB` and letters count in 1024s, `KB` in 1000s |
| `MS`, `SECONDS` | time; limits are 1 ms to a day; seconds also as `2s`, `500ms` |
| `COUNT` | a whole number, 1 or more |
| `SHARE` | a number above 0, up to 1 |
| `ADDRESS` | `host:port`; port 0 picks a free one |
| `URL` | `http://host:port`, or `https://` |
| `TABLES`, `NAMES`, `TIERS` | words with commas between; in a file a list, too |
";

/// Returns the page docs/reference/configuration.md.
#[must_use]
pub fn reference() -> String {
    let command = command();
    let mut page = HEAD.to_owned();
    let mut title = None;
    for arg in settings(&command) {
        let heading = arg.get_help_heading().unwrap_or("Address");
        if title != Some(heading.to_owned()) {
            let _ = write!(
                page,
                "\n## {heading}\n\n| option | unit | default | |\n|---|---|---|---|\n"
            );
            title = Some(heading.to_owned());
        }
        let _ = writeln!(page, "{}", row(arg));
    }
    page
}

fn row(arg: &Arg) -> String {
    let option = match arg.get_long() {
        Some(long) => format!("`--{long}`"),
        None => format!("`{}`", unit(arg)),
    };
    let unit = if arg.is_positional() { "FOLDER".to_owned() } else { unit(arg) };
    let unit = unit.replace('|', "`, `");
    let default = arg.get_default_values().iter().map(|word| word.to_string_lossy());
    let default: String = default.collect();
    let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
    let words = arg.get_help().map(ToString::to_string).unwrap_or_default();
    format!("| {option} | `{unit}` | {default} | {words} |")
}
