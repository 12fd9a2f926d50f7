//! The listener of a rendezvous. Callers without the key cannot end or stall it: they are bounded in number, bytes
//! and time, heard all at once, and dropped.

use super::key::Key;
use super::link::{Caller, Link};
use ft_base::terminal;
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// Time of a caller up to the end of its first message.
const HELLO: Duration = Duration::from_secs(10);
/// Callers heard at once, beyond the ranks. The oldest is dropped for a newer one.
const SPARE: usize = 64;
/// Pause while nothing happens.
const PAUSE: Duration = Duration::from_millis(2);

/// A listener for callers with the key.
pub struct Listener {
    listener: TcpListener,
    key: Key,
    callers: VecDeque<(Caller, SocketAddr, Instant)>,
    /// Most callers at once.
    most: usize,
    /// Number of dropped callers, and the address of the first.
    strangers: Option<(usize, SocketAddr)>,
}

/// Binds a listener, on `to` alone if all processes run on one machine, else on all interfaces.
///
/// # Errors
/// A port in use.
pub fn listen(to: SocketAddr, port: u16, one_machine: bool) -> Result<TcpListener, String> {
    let ip: IpAddr = match (one_machine, to.is_ipv4()) {
        (true, _) => to.ip(),
        (false, true) => Ipv4Addr::UNSPECIFIED.into(),
        (false, false) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let bound = TcpListener::bind((ip, port)).and_then(|l| l.set_nonblocking(true).map(|()| l));
    bound.map_err(|e| {
        let hint = if port == 0 { "" } else { "\n  hint: another MASTER_PORT, the same for all processes" };
        format!("it cannot listen at port {port}: {e}{hint}")
    })
}

impl Listener {
    /// A listener for a world of this size.
    pub fn new(listener: TcpListener, key: Key, world: usize) -> Self {
        Self { listener, key, callers: VecDeque::new(), most: world + SPARE, strangers: None }
    }

    /// The port, for a launcher that tells it to the other ranks.
    #[cfg(any(test, feature = "mpi"))]
    pub fn port(&self) -> Result<u16, String> {
        self.listener.local_addr().map(|a| a.port()).map_err(|e| e.to_string())
    }

    /// The next caller with the key, and the first message; `None` after a short pause without one.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<(Link, IpAddr, T)>, String> {
        self.accept()?;
        let mut at = 0;
        while let Some((caller, from, since)) = self.callers.get_mut(at) {
            let from = *from;
            match caller.advance(&self.key) {
                Ok(false) if since.elapsed() < HELLO => at += 1,
                Ok(whole) => {
                    let caller = self.callers.remove(at).filter(|_| whole);
                    match caller.and_then(|(caller, ..)| caller.finish().ok()) {
                        Some((link, message)) => return Ok(Some((link, from.ip(), message))),
                        None => self.drop_stranger(from),
                    }
                }
                Err(_) => {
                    self.callers.remove(at);
                    self.drop_stranger(from);
                }
            }
        }
        std::thread::sleep(PAUSE);
        Ok(None)
    }

    /// Accepts what waits, within the bound.
    fn accept(&mut self) -> Result<(), String> {
        for _ in 0..self.most {
            match self.listener.accept() {
                Ok((stream, from)) => match Caller::challenge(stream) {
                    Ok(caller) => self.callers.push_back((caller, from, Instant::now())),
                    Err(_) => self.drop_stranger(from),
                },
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // The caller has gone, or descriptors are short until callers are dropped.
                Err(e) if is_passing(&e) => break,
                Err(e) => return Err(format!("it cannot listen: {e}")),
            }
            if self.callers.len() > self.most
                && let Some((_, from, _)) = self.callers.pop_front()
            {
                self.drop_stranger(from);
            }
        }
        Ok(())
    }

    fn drop_stranger(&mut self, from: SocketAddr) {
        self.strangers.get_or_insert((0, from)).0 += 1;
    }
}

/// Whether a listener goes on after an error.
fn is_passing(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted)
        || [Errno::MFILE, Errno::NFILE].iter().any(|full| e.raw_os_error() == Some(full.raw_os_error()))
}

/// Dropped callers are reported once, at the end of the rendezvous.
impl Drop for Listener {
    fn drop(&mut self) {
        // Who has not finished by now is none of the ranks.
        while let Some((_, from, _)) = self.callers.pop_front() {
            self.drop_stranger(from);
        }
        match self.strangers {
            None => {}
            Some((1, from)) => {
                terminal::warn(&format!("a connection from {from} without the key of this run was dropped"));
            }
            Some((n, from)) => terminal::warn(&format!(
                "{n} connections without the key of this run were dropped, the first from {from}"
            )),
        }
    }
}
