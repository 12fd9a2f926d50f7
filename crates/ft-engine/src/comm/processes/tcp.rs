//! Exchange of byte buffers over TCP, with one connection between each pair of processes.

use super::wire::{Pauses, Round};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

/// Handle of the I/O thread.
pub struct Wire {
    rounds: Sender<Round>,
    thread: JoinHandle<()>,
}

impl Wire {
    /// Starts the thread. `lines` are the connections to the peers, by rank; `done` is called with each
    /// completed round.
    ///
    /// # Errors
    /// No thread available.
    pub fn start(lines: Vec<Option<TcpStream>>, done: impl Fn(Round) + Send + 'static) -> Result<Self> {
        for line in lines.iter().flatten() {
            line.set_nodelay(true)?;
            line.set_nonblocking(true)?;
        }
        let (rounds, ask) = mpsc::channel();
        let work = move || carry(&lines, &ask, done);
        let thread = std::thread::Builder::new().name("wire".into()).spawn(work)?;
        Ok(Self { rounds, thread })
    }

    /// Starts a round.
    pub fn go(&self, round: Round) {
        // The thread exits when this value drops or a peer disconnects; `watch` reports the latter.
        let _ = self.rounds.send(round);
    }

    /// Waits for the last round and stops the thread.
    pub fn end(self) {
        drop(self.rounds);
        let _ = self.thread.join();
    }
}

fn carry(lines: &[Option<TcpStream>], ask: &Receiver<Round>, done: impl Fn(Round)) {
    while let Ok(mut round) = ask.recv() {
        if exchange(lines, &mut round).is_err() {
            // Keep the connections open, so that peers can still read sent data.
            while ask.recv().is_ok() {}
            return;
        }
        done(round);
    }
}

/// Progress of one connection in bytes.
#[derive(Default)]
struct Far {
    out: usize,
    into: usize,
}

/// Sends and receives until the round is complete.
fn exchange(lines: &[Option<TcpStream>], round: &mut Round) -> Result<()> {
    let mut far: Vec<Far> = lines.iter().map(|_| Far::default()).collect();
    let mut pauses = Pauses::new();
    loop {
        let (mut moved, mut left) = (false, false);
        for (rank, (line, far)) in lines.iter().zip(&mut far).enumerate() {
            let Some(mut line) = line.as_ref() else { continue };
            // buffers for a single rank precede the shared buffer
            let own = round.out.get(rank).map_or(&[][..], |b| &b[..]);
            while far.out < own.len() + round.all.len() {
                let rest = match own.get(far.out..).filter(|rest| !rest.is_empty()) {
                    Some(rest) => rest,
                    None => &round.all[far.out - own.len()..],
                };
                match some(line.write(rest))? {
                    0 => break,
                    n => far.out += n,
                }
                moved = true;
            }
            left |= far.out < own.len() + round.all.len();
            let Some(into) = round.into.get_mut(rank) else { continue };
            while far.into < into.len() {
                match some(line.read(&mut into[far.into..]))? {
                    0 => break,
                    n => far.into += n,
                }
                moved = true;
            }
            left |= far.into < into.len();
        }
        if !left {
            return Ok(());
        }
        if moved { pauses = Pauses::new() } else { pauses.pause() }
    }
}

/// Number of bytes transferred; 0 if the connection is not ready.
fn some(outcome: Result<usize>) -> Result<usize> {
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

    /// Buffers of any length arrive intact, also beyond the size of the socket buffers.
    #[test]
    fn what_goes_comes() -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let other = TcpStream::connect(listener.local_addr()?)?;
        let lines = [vec![None, Some(listener.accept()?.0)], vec![Some(other), None]];
        let long = 9 << 20;
        let ends = lines.map(|lines| {
            std::thread::spawn(move || -> Result<Vec<Vec<u8>>> {
                let rank = usize::from(lines[0].is_some());
                let (tell, told) = mpsc::channel();
                let wire = Wire::start(lines, move |round| drop(tell.send(round)))?;
                let mut came = Vec::new();
                for (own, all) in [(0, 3), (5, 0), (long, 17), (0, 0)] {
                    let mut round = Round::new(2);
                    round.out[1 - rank] = vec![rank as u8; own * (rank + 1)];
                    round.all = vec![9; all];
                    round.into[1 - rank] = vec![0; own * (2 - rank) + all];
                    wire.go(round);
                    came.push(told.recv().map_err(Error::other)?.into.swap_remove(1 - rank));
                }
                wire.end();
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
