//! Connections: accepts them within limits, and ends them in time.

use super::limits::Limits;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Pause after the system refuses a connection, for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes that a connection buffers.
const BUFFER: usize = 64 << 10;

/// Answers requests until `end`. Then open connections finish their answer within `end_time`.
pub(super) async fn serve(listener: TcpListener, router: Router, limits: Limits, end: impl Future) {
    let (ending, ended) = watch::channel(());
    let slots = Arc::new(Semaphore::new(limits.connections));
    let accept = async {
        loop {
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(_) => {
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let connection = converse(stream, router.clone(), limits, ended.clone());
            tokio::spawn(async move {
                connection.await;
                drop(slot);
            });
        }
    };
    tokio::select! {
        () = accept => {}
        _ = end => {}
    }
    drop(listener);
    drop(ending);
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    // the end of the runtime closes the rest
    let _ = timeout(limits.end_time, slots.acquire_many(all)).await;
}

/// Serves one connection.
async fn converse(stream: TcpStream, router: Router, limits: Limits, mut ended: watch::Receiver<()>) {
    // small events are sent at once
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(limits.unread_time));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_headers(limits.headers)
        .max_header_size(limits.header_bytes)
        .max_buf_size(BUFFER);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    tokio::select! {
        // a broken connection is the client's affair
        _ = connection.as_mut() => return,
        _ = ended.changed() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
