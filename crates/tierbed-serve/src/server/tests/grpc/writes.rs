//! How often a server writes for a call.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::io::{duplex, DuplexStream, ReadBuf};

use super::*;
use crate::connection::{Callee, Protocol};
use crate::grpc::{connection, router, Health};

/// A server's end of a connection that counts its writes.
struct Counted {
    stream: DuplexStream,
    write_count: Arc<AtomicUsize>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.write_count.fetch_add(1, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[test]
fn head_message_and_trailers_are_one_write() {
    let (_stop, stopping) = watch::channel(false);
    let service = super::super::service(&options(), snapshot(), None, stopping);
    let service = Arc::new(service.unwrap());
    service.serving(None).unwrap();
    let router = router(&service, &Health::default());
    let callee = Callee { router, service, protocol: Protocol::Grpc };
    let write_count = Arc::new(AtomicUsize::new(0));
    // One thread, so that nobody writes while an answer is being made.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (near, far) = duplex(1 << 20);
    let counted = Counted { stream: far, write_count: Arc::clone(&write_count) };
    let calls = runtime.block_on(async {
        tokio::spawn(connection::serve(counted, callee));
        let (calls, connection) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(connection);
        calls
    });
    let client = Client { runtime, calls };
    // Rows that are stored nowhere: no thread reads any. The answer has more bytes than the
    // machinery of HTTP/2 copies into one buffer by itself.
    let asked = ids(&[[400, 1]; 60].concat());
    for _ in 0..3 {
        assert_eq!(client.infer(&asked).code, Code::Ok, "both sides tell their settings");
    }
    let before = write_count.load(Ordering::Relaxed);
    for _ in 0..10 {
        let answer: ModelInferResponse = client.infer(&asked).answer();
        assert_eq!(answer.raw_output_contents[0].len(), 60 * 11 * 4);
    }
    assert_eq!(write_count.load(Ordering::Relaxed) - before, 10);
}
