//! Words to the service manager: ready, stopping, alive.
//!
//! systemd names a datagram socket in the environment (`sd_notify(3)`); with `Type=notify` it calls
//! the service started when told, and with `WatchdogSec=` it restarts one that falls silent.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use tierbed_core::{Error, Result};

/// The manager that started the process, if any.
#[derive(Debug)]
pub(crate) struct Manager {
    socket: Option<UnixDatagram>,
    /// Time between two signs of life.
    pub(crate) beat: Option<Duration>,
}

impl Manager {
    /// Looks for one in the environment.
    ///
    /// # Errors
    /// `Invalid` for a socket that cannot be reached.
    pub(crate) fn find() -> Result<Self> {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
            return Ok(Self { socket: None, beat: None });
        };
        let failed = |cause: std::io::Error| {
            Error::invalid("cannot reach the service manager")
                .with("NOTIFY_SOCKET", name.to_string_lossy())
                .with("cause", cause)
                .with("remedy", "start it by the manager, or without NOTIFY_SOCKET")
        };
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path)),
        };
        let socket = UnixDatagram::unbound().map_err(failed)?;
        socket.connect_addr(&address.map_err(failed)?).map_err(failed)?;
        Ok(Self { socket: Some(socket), beat: beat()? })
    }

    /// Tells it, where there is one: `READY=1`.
    pub(crate) fn tell(&self, words: &str) {
        let Some(socket) = &self.socket else { return };
        if let Err(cause) = socket.send(words.as_bytes()) {
            eprintln!("tierbed-server: the service manager does not hear {words:?}: {cause}");
        }
    }
}

/// Half of the time after which the manager takes the process for dead.
fn beat() -> Result<Option<Duration>> {
    let meant = std::env::var("WATCHDOG_PID");
    if meant.is_ok_and(|pid| pid != std::process::id().to_string()) {
        return Ok(None);
    }
    let Ok(text) = std::env::var("WATCHDOG_USEC") else { return Ok(None) };
    let us: Option<u64> = text.parse().ok().filter(|&us| us > 0);
    let us = us.ok_or_else(|| {
        Error::invalid("the service manager's time is no number")
            .with("WATCHDOG_USEC", &text)
            .with("remedy", "set WatchdogSec= of the unit, and leave the variable to systemd")
    })?;
    Ok(Some(Duration::from_micros(us / 2)))
}
