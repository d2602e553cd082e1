//! A server from its start to its end, by signals.

use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, Result};
use tierbed_serve::{LogLevel, LogOptions, ServeOptions, Server, TlsFiles};

use crate::manager::Manager;
use crate::options::Options;
use crate::source::Source;
use crate::values::words;

/// Time between two looks for signals.
const PAUSE: Duration = Duration::from_millis(100);
/// A snapshot with this attachment has a dense model.
const DENSE: &str = "dense.safetensors";

/// How a server ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Told to, and all was answered.
    Whole,
    /// Told to, but a request did not end.
    WithWorkLeft,
    /// Not told to.
    ByItself,
}

/// Serves until a signal ends it.
///
/// # Errors
/// Those of opening the snapshot and of starting the server.
pub(crate) fn serve(options: &Options) -> Result<Ended> {
    let manager = Manager::find()?;
    let (model_name, place) = place(options)?;
    let serving = serving(options, model_name)?;
    let source = Source::open(&place, options)?;
    if let Some(behind) = source.behind() {
        eprintln!("tierbed-server: {behind}");
    }
    // Not held: the memory of a version that is replaced goes to the next one.
    if source.snapshot().attachment_names().iter().any(|name| name == DENSE) {
        eprintln!("the snapshot has a model: this server answers lookups, tierbed serve both");
    }
    // Before this a signal ends the process at once: nobody was answered.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|cause| Error::os("cannot wait for signals", cause))?;
    let server = match source {
        Source::Folder(snapshot) => Server::start(&serving, snapshot, None)?,
        Source::Channel(following) => Server::follow(&serving, *following, None)?,
        Source::Shards(routing) => Server::route(&serving, *routing, None)?,
    };
    let tls = if serving.tls.is_some() { "s" } else { "" };
    let grpc = server.grpc_address().map(|address| format!(" and grpc{tls}://{address}"));
    let grpc = grpc.unwrap_or_default();
    let admin = server.admin_address().map(|address| format!(", admin on http{tls}://{address}"));
    let admin = admin.unwrap_or_default();
    println!("serving lookups on http{tls}://{}{grpc}{admin}", server.address());
    manager.tell("READY=1");
    let ended = until_told(&server, &mut signals, &manager, options.drain_delay);
    manager.tell("STOPPING=1");
    let is_whole = server.stop();
    match (ended, is_whole) {
        (true, _) => Ok(Ended::ByItself),
        (false, true) => Ok(Ended::Whole),
        (false, false) => Ok(Ended::WithWorkLeft),
    }
}

/// Waits for the signals that end a server; returns whether it ended by itself.
fn until_told(server: &Server, signals: &mut Signals, manager: &Manager, drain_s: f64) -> bool {
    let clock = SystemClock::default();
    let drain_us = (drain_s * 1e6) as u64;
    let mut closes_us: Option<u64> = None;
    let mut beats_us = 0;
    while !server.wait(PAUSE) {
        let now_us = clock.now_us();
        for signal in signals.pending() {
            match signal {
                SIGHUP => server.reload(),
                SIGTERM if closes_us.is_none() => {
                    manager.tell("STOPPING=1");
                    server.drain();
                    closes_us = Some(now_us + drain_us);
                }
                _ => return false,
            }
        }
        if closes_us.is_some_and(|closes_us| now_us >= closes_us) {
            return false;
        }
        if let Some(beat) = manager.beat.filter(|_| now_us >= beats_us) {
            // A server whose threads hang is silent.
            if server.responds(beat) {
                manager.tell("WATCHDOG=1");
            }
            beats_us = now_us + beat.as_micros() as u64 / 2;
        }
    }
    true
}

/// Returns the model's name and the place of what is served.
fn place(options: &Options) -> Result<(String, String)> {
    if options.routing.route.is_some() {
        return match &options.snapshot {
            None => Ok((options.serving.model_name.clone(), String::new())),
            Some(given) => Err(Error::invalid("a gateway has no snapshot of its own")
                .with("found", given)
                .with("remedy", "leave out one of SNAPSHOT and --route")),
        };
    }
    let Some(given) = &options.snapshot else {
        return Err(Error::invalid("no snapshot is named")
            .with("remedy", "give the folder that publish wrote: tierbed-server /data/snapshot"));
    };
    let named = given.split_once('=').filter(|(name, _)| !name.contains('/'));
    let Some((name, folder)) = named else {
        return Ok((options.serving.model_name.clone(), given.clone()));
    };
    let is_default = options.serving.model_name == ServeOptions::default().model_name;
    if !is_default && options.serving.model_name != name {
        return Err(Error::invalid("the model has two names")
            .with("found", format_args!("{name}, {}", options.serving.model_name))
            .with("remedy", "leave out one of NAME= and --model-name"));
    }
    Ok((name.to_owned(), folder.to_owned()))
}

fn serving(options: &Options, model_name: String) -> Result<ServeOptions> {
    let given = &options.serving;
    let defaults = ServeOptions::default();
    Ok(ServeOptions {
        address: options.address.clone(),
        grpc_address: given.grpc_address.clone(),
        admin_address: given.admin_address.clone(),
        tokens: given.tokens.clone(),
        tls: TlsFiles::given(
            given.tls_cert.clone(),
            given.tls_key.clone(),
            given.tls_client_ca.clone(),
            words(&given.tls_client_names),
        )?,
        requires_auth: given.require_auth,
        deltas: given.deltas.clone(),
        generation_grace_ms: given.generation_grace.map(|seconds| (seconds * 1e3) as u64),
        worker_threads: given.worker_threads.unwrap_or(defaults.worker_threads),
        lookup_threads: given.lookup_threads.unwrap_or(defaults.lookup_threads),
        model_name,
        limits: options.limits.limits(),
        log: LogOptions {
            level: LogLevel::parse(&given.log_level)?,
            has_access: given.access_log,
            slow_ms: given.slow_ms,
            ..LogOptions::default()
        },
        otlp_endpoint: given.otlp_endpoint.clone(),
        ..defaults
    })
}
