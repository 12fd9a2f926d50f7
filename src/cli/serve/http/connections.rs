//! Connections: accepts them within limits, and ends them in time. Idle ones make room for others.

use crate::cli::serve::limits::Limits;
use axum::Router;
use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Pause after the system refuses a connection, for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes that a connection buffers.
const BUFFER: usize = 64 << 10;

/// Answers requests until `end`. Then open connections finish their answer within `end_time`.
pub(super) async fn serve(listener: TcpListener, router: Router, limits: Limits, end: impl Future) {
    let (ending, ended) = watch::channel(());
    let slots = Arc::new(Semaphore::new(limits.connections));
    let open = Arc::new(Open::default());
    let accept = async {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(_) => {
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let slot = tokio::select! {
                biased;
                slot = slots.clone().acquire_owned() => slot,
                () = open.make_room(limits.idle_time) => return,
            };
            let Ok(slot) = slot else { return };
            let client = open.add();
            let connection = converse(stream, router.clone(), limits, ended.clone(), client.clone());
            let open = open.clone();
            tokio::spawn(async move {
                connection.await;
                open.clients().retain(|c| !Arc::ptr_eq(c, &client));
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

/// Open connections.
#[derive(Default)]
struct Open {
    clients: Mutex<Vec<Arc<Client>>>,
    /// Tells that a connection has become idle.
    idle: Arc<Notify>,
}

impl Open {
    fn clients(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) -> Arc<Client> {
        let state = State { since: Instant::now(), busy: false, new: true };
        let client = Arc::new(Client {
            state: state.into(),
            refused: AtomicBool::new(false),
            leave: Notify::new(),
            idle: self.idle.clone(),
        });
        self.clients().push(client.clone());
        client
    }

    /// Waits until a connection has been idle for `time`, and asks the longest idle one to close. Never returns; the
    /// caller races it against a free slot.
    async fn make_room(&self, time: Duration) {
        loop {
            let idle = |c: &Arc<Client>| {
                let State { since, busy, .. } = *c.state();
                (!busy).then(|| (since, c.clone()))
            };
            let longest = self.clients().iter().filter_map(idle).min_by_key(|(since, _)| *since);
            match longest.map(|(since, client)| (time.saturating_sub(since.elapsed()), client)) {
                Some((rest, client)) if rest.is_zero() => {
                    client.leave.notify_one();
                    return std::future::pending().await;
                }
                // its request may be on the way
                Some((rest, _)) => sleep(rest).await,
                None => self.idle.notified().await,
            }
        }
    }
}

/// One connection.
struct Client {
    state: Mutex<State>,
    /// Whether the last answer is an error, possibly before the end of the request.
    refused: AtomicBool,
    /// Asks it to make room for another one.
    leave: Notify,
    idle: Arc<Notify>,
}

#[derive(Clone, Copy)]
struct State {
    /// Since when it is idle.
    since: Instant,
    /// Whether a request is read or answered.
    busy: bool,
    /// Whether it has had no request.
    new: bool,
}

impl Client {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request of a connection, until its answer is written.
struct Busy(Arc<Client>);

impl Busy {
    fn new(client: Arc<Client>) -> Self {
        let since = client.state().since;
        *client.state() = State { since, busy: true, new: false };
        Self(client)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.state() = State { since: Instant::now(), busy: false, new: false };
        self.0.idle.notify_one();
    }
}

/// The body of an answer.
struct Answer {
    body: axum::body::Body,
    _busy: Busy,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves one connection. After a refusal, the rest of the request is read, within limits: a connection closed before
/// loses the answer.
async fn converse(
    mut stream: TcpStream,
    router: Router,
    limits: Limits,
    mut ended: watch::Receiver<()>,
    client: Arc<Client>,
) {
    // small events are sent at once
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(limits.unread_time));
    let is_regular = answer_all(&mut stream, router, limits, &mut ended, &client).await;
    if is_regular && client.refused.load(Ordering::Relaxed) {
        tokio::select! {
            _ = timeout(limits.body_time, discard(&stream, limits.bodies_bytes)) => {}
            _ = ended.changed() => {}
            () = client.leave.notified() => {}
        }
    }
}

/// Reads to the end of a stream, at most about `most` bytes.
async fn discard(stream: &TcpStream, most: usize) {
    let (mut buffer, mut seen) = (vec![0; BUFFER], 0);
    while seen < most && stream.readable().await.is_ok() {
        match stream.try_read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => seen += length,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// Answers the requests of one connection. Returns true after a regular end, not asked for by anything else.
async fn answer_all(
    stream: &mut TcpStream,
    router: Router,
    limits: Limits,
    ended: &mut watch::Receiver<()>,
    client: &Arc<Client>,
) -> bool {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_headers(limits.headers)
        .max_header_size(limits.header_bytes)
        .max_buf_size(BUFFER);
    let (router, of) = (TowerToHyperService::new(router), client.clone());
    let service = service_fn(move |request| {
        let busy = Busy::new(of.clone());
        let answer = router.call(request);
        async {
            let answer = answer.await?;
            busy.0.refused.store(!answer.status().is_success(), Ordering::Relaxed);
            Ok::<_, Infallible>(answer.map(|body| Answer { body, _busy: busy }))
        }
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut last = None;
    tokio::select! {
        biased;
        // a broken connection is the client's affair
        end = connection.as_mut() => return end.is_ok(),
        _ = ended.changed() => {}
        () = client.leave.notified() => match *client.state() {
            // half of a first request may have been read
            State { new: true, .. } => return false,
            // the end of an answer may not have been sent
            State { busy: false, .. } => last = Some(limits.end_time),
            State { busy: true, .. } => {}
        },
    }
    connection.as_mut().graceful_shutdown();
    let _ = match last {
        Some(time) => timeout(time, connection).await.is_ok(),
        None => connection.await.is_ok(),
    };
    false
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
