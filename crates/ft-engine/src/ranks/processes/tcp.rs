//! Exchange of byte buffers over TCP, with one connection between each pair of processes.

use super::transport::{Backoff, Round, Transport};
use socket2::{SockRef, TcpKeepalive};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Idle time before the first keepalive probe, and between probes: routers on the way may forget a silent connection.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Starts the transport. `connections` lead to the peers, by rank; `done` is called with each completed
/// round, `broken` with the peer and the cause when a connection breaks.
pub fn start(
    connections: Vec<Option<TcpStream>>,
    done: impl Fn(Round) + Send + 'static,
    broken: impl FnOnce(usize, Error) + Send + 'static,
) -> Result<Transport> {
    for connection in connections.iter().flatten() {
        connection.set_nodelay(true)?;
        connection.set_nonblocking(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
        SockRef::from(connection).set_tcp_keepalive(&keepalive)?;
    }
    Transport::spawn("TCP", move |rounds| {
        for mut round in &rounds {
            if let Err((peer, e)) = exchange(&connections, &mut round) {
                broken(peer, e);
                // Keep the connections open, so that peers can still read sent data.
                rounds.iter().for_each(drop);
                return;
            }
            done(round);
        }
    })
}

/// Progress of one connection in bytes.
#[derive(Default)]
struct Progress {
    sent: usize,
    received: usize,
}

/// Sends and receives until the round is complete, or the connection to a peer breaks.
fn exchange(connections: &[Option<TcpStream>], round: &mut Round) -> std::result::Result<(), (usize, Error)> {
    let mut progress: Vec<Progress> = connections.iter().map(|_| Progress::default()).collect();
    let mut backoff = Backoff::new();
    loop {
        let (mut moved, mut left) = (false, false);
        for (rank, (stream, at)) in connections.iter().zip(&mut progress).enumerate() {
            let Some(mut stream) = stream.as_ref() else { continue };
            // buffers for a single rank precede the shared buffer
            let own = round.out.get(rank).map_or(&[][..], |b| &b[..]);
            let all = if round.to.contains(&rank) { &round.all[..] } else { &[] };
            while at.sent < own.len() + all.len() {
                let rest = match own.get(at.sent..).filter(|rest| !rest.is_empty()) {
                    Some(rest) => rest,
                    None => &all[at.sent - own.len()..],
                };
                match transferred(stream.write(rest)).map_err(|e| (rank, e))? {
                    0 => break,
                    n => at.sent += n,
                }
                moved = true;
            }
            left |= at.sent < own.len() + all.len();
            let Some(into) = round.into.get_mut(rank) else { continue };
            while at.received < into.len() {
                let read = stream.read(&mut into[at.received..]);
                match transferred(read).map_err(|e| (rank, e))? {
                    0 => break,
                    n => at.received += n,
                }
                moved = true;
            }
            left |= at.received < into.len();
        }
        if !left {
            return Ok(());
        }
        if moved { backoff = Backoff::new() } else { backoff.pause() }
    }
}

/// Number of bytes transferred; 0 if the connection is not ready.
fn transferred(outcome: Result<usize>) -> Result<usize> {
    match outcome {
        Ok(0) => Err(Error::from(ErrorKind::UnexpectedEof)),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::mpsc;

    /// A peer that goes away in a round is reported.
    #[test]
    fn a_broken_connection_is_reported() -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let other = TcpStream::connect(listener.local_addr()?)?;
        let lines = vec![None, None, Some(listener.accept()?.0)];
        let (tell, told) = mpsc::channel();
        let transport = start(lines, |_| (), move |peer, _| tell.send(peer).unwrap_or(()))?;
        drop(other);
        transport.exchange(Round::all_to_all(3, vec![2], vec![1], |_| 1));
        transport.end();
        assert_eq!(told.try_recv().map_err(Error::other)?, 2);
        Ok(())
    }

    /// Buffers of any length arrive intact, also beyond the size of the socket buffers.
    #[test]
    fn buffers_of_any_length_arrive_intact() -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let other = TcpStream::connect(listener.local_addr()?)?;
        let lines = [vec![None, Some(listener.accept()?.0)], vec![Some(other), None]];
        let long = 9 << 20;
        let ends = lines.map(|lines| {
            std::thread::spawn(move || -> Result<Vec<Vec<u8>>> {
                let rank = usize::from(lines[0].is_some());
                let (tell, told) = mpsc::channel();
                let transport = start(lines, move |round| drop(tell.send(round)), |_, _| ())?;
                let mut came = Vec::new();
                for (own, all) in [(0, 3), (5, 0), (long, 17), (0, 0)] {
                    let mut round = Round::new(2, vec![1 - rank]);
                    round.out[1 - rank] = vec![rank as u8; own * (rank + 1)];
                    round.all = vec![9; all];
                    round.into[1 - rank] = vec![0; own * (2 - rank) + all];
                    transport.exchange(round);
                    came.push(told.recv().map_err(Error::other)?.into.swap_remove(1 - rank));
                }
                transport.end();
                Ok(came)
            })
        });
        for (rank, end) in ends.into_iter().enumerate() {
            let came = end.join().expect("no panic")?;
            for (bytes, (own, all)) in came.iter().zip([(0, 3), (5, 0), (long, 17), (0, 0)]) {
                let own = own * (2 - rank);
                assert_eq!(bytes.len(), own + all);
                assert!(
                    bytes[..own].iter().all(|b| *b == 1 - rank as u8) && bytes[own..].iter().all(|b| *b == 9)
                );
            }
        }
        Ok(())
    }
}
