//! Limits on what clients can occupy.

use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Open connections; a further one waits until one is idle, which ends for it, or has ended.
    pub connections: usize,
    /// Headers of a request.
    pub headers: usize,
    /// Bytes of a request line with its headers.
    pub header_bytes: usize,
    /// Time for the headers of a request to arrive, and for a connection to be idle.
    pub header_time: Duration,
    /// Idle time of a connection before it makes room for another one.
    pub idle_time: Duration,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Bytes of all arriving, waiting or answered bodies; and bytes of a refused request still read.
    pub bodies_bytes: usize,
    /// Time for a body to arrive, or for the rest of a refused request.
    pub body_time: Duration,
    /// Time that a client may leave an answer unread.
    pub unread_time: Duration,
    /// Waiting requests.
    pub queue: usize,
    /// Time for answers to end after a signal.
    pub end_time: Duration,
    /// Further time for replicas to come to the end of a token.
    pub replica_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            connections: 256,
            headers: 64,
            header_bytes: 16 << 10,
            header_time: seconds(20),
            idle_time: seconds(1),
            body_bytes: 2 << 20,
            bodies_bytes: 16 << 20,
            body_time: seconds(30),
            unread_time: seconds(30),
            queue: 64,
            end_time: seconds(1),
            replica_time: Duration::from_millis(500),
        }
    }
}
