//! A connection that is never waited for.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use socket2::{Domain, Protocol, Socket, Type};
use tierbed_core::{Error, Result};

use super::arrivals::Arrival;

/// Bytes that are read at once.
const READ_BYTES: usize = 64 << 10;

/// A request under way.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) arrival: Arrival,
    /// What was asked for, where the answer is checked.
    pub(super) ids: Option<Vec<i64>>,
}

/// One connection, with at most one request under way.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) asked: Option<Asked>,
    /// Requests so far.
    pub(super) asked_count: u32,
    unsent: Vec<u8>,
    pub(super) heard: Vec<u8>,
}

impl Connection {
    /// Begins to connect; what is sent meanwhile follows.
    pub(super) fn open(address: SocketAddr) -> Result<Self> {
        let failed = |cause| Error::os("cannot connect", cause).with("address", address);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))
            .map_err(failed)?;
        socket.set_tcp_nodelay(true).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        match socket.connect(&address.into()) {
            Err(error)
                if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) =>
            {
                return Err(failed(error))
            }
            _ => {}
        }
        let (unsent, heard) = (Vec::new(), Vec::new());
        Ok(Self { stream: socket.into(), asked: None, asked_count: 0, unsent, heard })
    }

    /// Sends a request, as far as the socket takes it.
    pub(super) fn send(&mut self, request: &[u8], asked: Asked) -> std::io::Result<()> {
        self.asked = Some(asked);
        self.asked_count += 1;
        self.unsent.extend_from_slice(request);
        self.flush()
    }

    /// Sends what the socket had not taken.
    pub(super) fn flush(&mut self) -> std::io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what has come; false when the server has closed.
    pub(super) fn hear(&mut self) -> std::io::Result<bool> {
        let mut bytes = [0; READ_BYTES];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(false),
                Ok(count) => self.heard.extend(bytes.iter().take(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }
}
