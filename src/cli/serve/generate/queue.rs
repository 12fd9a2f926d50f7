//! Jobs waiting for a replica, in order of arrival.

use super::job::Job;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A bounded queue.
pub struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    capacity: usize,
    /// Held while a replica loads a checkpoint, so that the rest keep answering.
    pub loading: Mutex<()>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// Outcome of waiting for a job.
pub enum Next {
    Job(Box<Job>),
    /// No job within the given time.
    Idle,
    Closed,
}

/// Reason to refuse a job.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    Full,
    Closed,
}

impl Queue {
    pub fn new(capacity: usize) -> Self {
        Self { waiting: Mutex::default(), changed: Condvar::new(), capacity, loading: Mutex::new(()) }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a job. A full queue first drops jobs of disconnected clients.
    ///
    /// # Errors
    /// A full or closed queue.
    pub fn push(&self, job: Job) -> Result<(), Refused> {
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(Refused::Closed);
        }
        if waiting.jobs.len() >= self.capacity {
            waiting.jobs.retain(|j| !j.events.is_closed());
        }
        if waiting.jobs.len() >= self.capacity {
            return Err(Refused::Full);
        }
        waiting.jobs.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for the next job, at most for `limit`.
    pub fn next(&self, limit: Option<Duration>) -> Next {
        let waiting = self.lock();
        let idle = |w: &mut Waiting| w.jobs.is_empty() && !w.closed;
        let mut waiting = match limit {
            None => self.changed.wait_while(waiting, idle).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                self.changed
                    .wait_timeout_while(waiting, limit, idle)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        match waiting.jobs.pop_front() {
            Some(job) => Next::Job(Box::new(job)),
            None if waiting.closed => Next::Closed,
            None => Next::Idle,
        }
    }

    /// Drops all jobs, and refuses further ones.
    pub fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        waiting.jobs.clear();
        self.changed.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }
}
