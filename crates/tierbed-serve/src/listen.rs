//! Admission of connections: how many are open, and which ones wait.
//!
//! When the server stops, what the kernel has already taken for us is still answered: connections
//! that wait to be accepted, and requests that lie unread in a socket. Only then do doors close.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockFilter, SockRef};
use tierbed_core::{Error, Result};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::admin;
use crate::connection::{self, turn_away, Callee, Closing, Protocol};
use crate::grpc;
use crate::handshake::shake;
use crate::origin::Origin;

/// Clients that are told at once that there is no room for them; more are closed without a word.
const TURNED_AWAY_MAX: usize = 64;
/// Pause after the process found no room for one more open file.
const PAUSE: Duration = Duration::from_millis(100);
/// Time for handshakes that had begun when the server stopped.
const HANDSHAKE: Duration = Duration::from_millis(30);
/// A program of the kernel's packet filter: byte 13 of a TCP header has the flags; a packet with
/// SYN and without ACK begins a connection and is dropped, any other passes.
const DROP_NEW_CONNECTIONS: [SockFilter; 5] = [
    SockFilter::new(0x30, 0, 0, 13),       // load the byte
    SockFilter::new(0x54, 0, 0, 0x12),     // keep SYN and ACK
    SockFilter::new(0x15, 0, 1, 0x02),     // SYN alone?
    SockFilter::new(0x06, 0, 0, 0),        // drop
    SockFilter::new(0x06, 0, 0, u32::MAX), // pass whole
];
/// Files that are left for everything but connections of clients.
const FILES_KEPT: u64 = 16 + admin::CONNECTIONS_MAX as u64;

/// Where connections come in.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) callee: Callee,
    /// One is taken by every open connection.
    connections: Arc<Semaphore>,
    connections_max: u32,
    turned_away: Arc<Semaphore>,
}

impl Door {
    pub(crate) fn new(callee: Callee, connections_max: usize) -> Self {
        let connections_max = u32::try_from(connections_max).unwrap_or(u32::MAX);
        let connections = Arc::new(Semaphore::new(connections_max as usize));
        let turned_away = Arc::new(Semaphore::new(TURNED_AWAY_MAX));
        Self { callee, connections, connections_max, turned_away }
    }

    /// Makes another door into the same room.
    pub(crate) fn beside(&self, callee: Callee) -> Self {
        let connections = Arc::clone(&self.connections);
        let turned_away = Arc::clone(&self.turned_away);
        Self { callee, connections, connections_max: self.connections_max, turned_away }
    }

    /// Lets connections in until told to stop; returns when the last one has ended.
    pub(crate) async fn open(self, listener: TcpListener) {
        let mut stopping = self.callee.service.stopping.clone();
        let mut is_stopping = std::pin::pin!(async move {
            // An error means that the server was dropped: as good a reason to stop.
            let _ = stopping.wait_for(|&stop| stop).await;
        });
        loop {
            let next = std::future::poll_fn(|cx| {
                if is_stopping.as_mut().poll(cx).is_ready() {
                    return std::task::Poll::Ready(None);
                }
                listener.poll_accept(cx).map(Some)
            });
            match next.await {
                None => break,
                Some(Ok((stream, _))) => self.let_in(stream),
                Some(Err(error)) if is_of_one_connection(&error) => {}
                Some(Err(error)) => {
                    self.callee.service.log.accept_failed(&error);
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        if self.callee.protocol == Protocol::Http {
            let open = self.connections_max as usize - self.connections.available_permits();
            self.callee.service.log.stopping(open);
        }
        self.let_in_the_waiting(listener).await;
        // The semaphore is never closed.
        let _ = self.connections.acquire_many(self.connections_max).await;
    }

    /// Accepts what the kernel has accepted for us, then closes the door.
    ///
    /// Between the last accept and the close one more connection could be made, only to be reset.
    /// So the kernel first drops what begins a connection; who began one earlier has a moment to
    /// end the handshake. Who is dropped asks again, and finds the port closed.
    async fn let_in_the_waiting(&self, listener: TcpListener) {
        let dropping = SockRef::from(&listener).attach_filter(&DROP_NEW_CONNECTIONS);
        // Asked past the runtime, which may not have heard of the last ones yet.
        let listener = dropping.and_then(|()| listener.into_std());
        let listener = match listener {
            Ok(listener) => listener,
            Err(error) => return self.callee.service.log.accept_failed(&error),
        };
        self.accept_all(&listener);
        tokio::time::sleep(HANDSHAKE).await;
        self.accept_all(&listener);
    }

    fn accept_all(&self, listener: &std::net::TcpListener) {
        while let Ok((stream, _)) = listener.accept() {
            let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            match stream {
                Ok(stream) => self.let_in(stream),
                Err(error) => self.callee.service.log.accept_failed(&error),
            }
        }
    }

    fn let_in(&self, stream: TcpStream) {
        // Answers are written whole: nothing is gained by holding the last packet back.
        if let Err(error) = stream.set_nodelay(true) {
            self.callee.service.log.accept_failed(&error);
            return;
        }
        if let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() {
            let callee = self.callee.clone();
            tokio::spawn(async move {
                converse(stream, callee).await;
                drop(permit);
            });
            return;
        }
        let service = &self.callee.service;
        service.metrics.refused("connections");
        service.log.refused("connections", &Origin::default());
        // Others are told by the closed connection: there is no status before a call or handshake.
        if self.callee.protocol == Protocol::Grpc || service.tls.is_some() {
            return;
        }
        if let Ok(permit) = Arc::clone(&self.turned_away).try_acquire_owned() {
            tokio::spawn(async move {
                let message = "too many connections; try again later";
                turn_away(stream, "503 Service Unavailable", "busy", message).await;
                drop(permit);
            });
        }
    }
}

/// Answers a client until its connection ends, behind a handshake where there is TLS.
async fn converse(stream: TcpStream, callee: Callee) {
    let service = Arc::clone(&callee.service);
    let _open = Closing::new(&service.metrics.connections_open);
    match &service.tls {
        None => serve(stream, callee).await,
        Some(tls) => {
            if let Some(stream) = shake(stream, &callee, tls).await {
                serve(stream, callee).await;
            }
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, callee: Callee) {
    match callee.protocol {
        Protocol::Http | Protocol::Admin => connection::serve(stream, callee).await,
        Protocol::Grpc => grpc::connection::serve(stream, callee).await,
    }
}

/// Errors of a connection that ended before it was accepted.
fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(
        error.kind(),
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset
    )
}

/// Returns how many connections the process's open files allow, at most `asked`.
pub(crate) fn connections_allowed(asked: usize, open_files: Option<u64>) -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let (Some(limit), Some(open_files)) = (limit, open_files) else { return asked };
    let left = limit.saturating_sub(open_files + FILES_KEPT).max(1);
    asked.min(usize::try_from(left).unwrap_or(usize::MAX))
}

/// Binds an address.
///
/// # Errors
/// `Invalid` for an address that cannot be parsed or bound.
pub(crate) fn bind(address: &str) -> Result<(std::net::TcpListener, SocketAddr)> {
    let failed = |cause: std::io::Error| {
        Error::invalid("cannot listen on this address")
            .with("address", address)
            .with("cause", cause)
            .with("remedy", "choose a free port (0 picks one) of an address of this machine")
    };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}
