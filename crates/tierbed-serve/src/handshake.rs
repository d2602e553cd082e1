//! Handshakes of TLS: how long they may take, how many there are at once, and why they end.

use std::future::{poll_fn, Future};
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::rustls::{self, CertificateError};
use tokio_rustls::server::TlsStream;
use tokio_rustls::TlsAcceptor;

use crate::connection::{turn_away, Callee, Protocol};
use crate::routes::Service;
use crate::tls::Tls;
use crate::wire::STOP_HEAD;

/// The first byte of every handshake.
const HANDSHAKE: u8 = 0x16;

/// Why a handshake came to nothing.
struct Failed {
    reason: &'static str,
    message: String,
}

impl Failed {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

/// Agrees with a client on its keys; `None` when that failed, which is counted and told.
pub(crate) async fn shake(
    stream: TcpStream,
    callee: &Callee,
    tls: &Tls,
) -> Option<TlsStream<TcpStream>> {
    let service = &callee.service;
    let failed = match agree(stream, callee, tls).await {
        Ok(shaken) => return shaken,
        Err(failed) => failed,
    };
    service.log.handshake_failed(failed.reason, &failed.message);
    service.metrics.handshake_failed(failed.reason);
    None
}

/// As [`shake`]; `None` for a client that said nothing, or whose handshake the stop ended.
async fn agree(
    stream: TcpStream,
    callee: &Callee,
    tls: &Tls,
) -> Result<Option<TlsStream<TcpStream>>, Failed> {
    let service = &callee.service;
    let ms_max = service.limits.handshake_ms_max;
    let until = Instant::now() + Duration::from_millis(ms_max);
    let over = |reason, what: &str| match *service.stopping.borrow() {
        true => Ok(None),
        false => Err(Failed::new(reason, format!("{what} within handshake_ms_max, {ms_max} ms"))),
    };
    let mut first = [0];
    let heard = within(until, service, stream.peek(&mut first)).await;
    match heard {
        None => return over("slow", "the client said nothing"),
        // As probes do that ask for an open port only.
        Some(Ok(0) | Err(_)) => return Ok(None),
        Some(Ok(_)) if first == [HANDSHAKE] => {}
        Some(Ok(_)) => return Err(not_tls(stream, callee.protocol).await),
    }
    // The semaphore is never closed.
    let Some(permit) = within(until, service, tls.handshakes.acquire()).await else {
        return over("busy", "handshakes_max others did not end");
    };
    let accepting = TlsAcceptor::from(tls.config(callee.protocol)).accept(stream);
    let accepted = within(until, service, accepting).await;
    drop(permit);
    match accepted {
        None => over("slow", "the handshake did not end"),
        Some(Ok(stream)) => Ok(Some(stream)),
        Some(Err(error)) => Err(Failed::new(reason(&error), error.to_string())),
    }
}

/// Tells a client that speaks plainly what is spoken here.
async fn not_tls(stream: TcpStream, protocol: Protocol) -> Failed {
    let message = "this port speaks TLS; ask by https://";
    // A client of gRPC is told by the closed connection.
    if protocol != Protocol::Grpc {
        turn_away(stream, "400 Bad Request", "invalid", message).await;
    }
    Failed::new("not_tls", "the client does not speak TLS")
}

/// Names what failed: the client's certificate, the server's in the client's eyes, or the rest.
fn reason(error: &io::Error) -> &'static str {
    let told = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match told {
        None => "left",
        Some(rustls::Error::InvalidCertificate(CertificateError::NotValidForName)) => "name",
        Some(rustls::Error::NoCertificatesPresented | rustls::Error::InvalidCertificate(_)) => {
            "certificate"
        }
        Some(rustls::Error::AlertReceived(_)) => "client",
        Some(_) => "protocol",
    }
}

/// Waits for work; `None` when time is over, or a while after the server began to stop.
async fn within<T>(until: Instant, service: &Service, work: impl Future<Output = T>) -> Option<T> {
    let mut stopping = service.stopping.clone();
    let stopped = async move {
        // An error means that the server was dropped: as good a reason to stop.
        let _ = stopping.wait_for(|&stop| stop).await;
        tokio::time::sleep(STOP_HEAD).await;
    };
    let (mut work, mut stopped) = (pin!(work), pin!(stopped));
    let first = poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => stopped.as_mut().poll(cx).map(|()| None),
    });
    tokio::time::timeout_at(until, first).await.ok().flatten()
}
