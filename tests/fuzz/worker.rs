//! Worker processes: run command lines one after another under limits, so that crashes and hangs can be
//! observed.

use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Memory limit of a case in bytes. Allocations fail only above 1.5 times this.
pub const MEMORY: u64 = 1 << 30;
/// Processor time limit of a case; independent of the load on the machine, unlike elapsed time.
const PROCESSOR: Duration = Duration::from_secs(60);
/// Elapsed time without any processor time after which a case counts as hanging.
const WAITING: Duration = Duration::from_secs(120);
/// Stack size of the case's thread in bytes, an eighth of the usual main thread.
const STACK: usize = 1 << 20;
/// Number of cases after which a worker is replaced.
const CASES: usize = 500;
/// Environment variable that turns this binary into a worker.
const WORKER: &str = "FT_FUZZ_WORKER";

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Returned this exit code.
    Code(u8),
    /// Ended the worker process with this exit status.
    Exit(i32),
    /// Ended the worker process by this signal.
    Signal(i32),
    /// Did not end.
    Hang,
}

/// Outcome of a command.
#[derive(Debug)]
pub struct Outcome {
    pub end: End,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    /// Peak resident size in bytes.
    pub memory: u64,
}

/// The parent's side of a worker process.
pub struct Worker {
    home: PathBuf,
    running: Option<Running>,
}

struct Running {
    child: Child,
    socket: UnixStream,
    cases: usize,
}

impl Worker {
    /// A worker, started by the first command. `home` is a private folder.
    pub fn new(home: &Path) -> Self {
        Self { home: home.to_path_buf(), running: None }
    }

    /// Runs `ft ARGS` in the folder `dir`.
    pub fn run(&mut self, dir: &Path, args: &[String]) -> Outcome {
        if self.running.as_ref().is_some_and(|r| r.cases >= CASES) {
            self.stop();
        }
        let outputs = [self.home.join("stdout"), self.home.join("stderr")];
        let files = outputs.each_ref().map(|path| {
            let open = OpenOptions::new().create(true).append(true).read(true).open(path);
            open.expect("a file for what a case prints")
        });
        files.iter().for_each(|f| f.set_len(0).expect("emptied"));
        let running = self.running.get_or_insert_with(|| Running::start(&self.home, &files));
        running.cases += 1;
        let job = serde_json::to_string(&(dir, args)).expect("JSON");
        // If the worker is gone, the missing answer reveals this.
        let _ = running.socket.write_all(format!("{job}\n").as_bytes());
        let (end, memory) = match running.answer() {
            Ok(answer) => answer,
            Err(end) => {
                self.stop();
                (end, 0)
            }
        };
        let [out, err] = outputs.map(|path| {
            let mut text = Vec::new();
            File::open(path).expect("there").take(4 << 20).read_to_end(&mut text).expect("read");
            text
        });
        Outcome { end, out, err, memory }
    }

    /// Ends the worker process; the next command starts a new one.
    pub fn stop(&mut self) {
        if let Some(mut r) = self.running.take() {
            let _ = r.child.kill();
            let _ = r.child.wait();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Running {
    fn start(home: &Path, files: &[File; 2]) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a pair of sockets");
        let copy = |f: &File| Stdio::from(f.try_clone().expect("a descriptor"));
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args(["worker::serve", "--exact", "--nocapture", "--test-threads=1"]);
        environment(&mut command, home).env(WORKER, "1");
        command.stdin(OwnedFd::from(theirs)).stdout(copy(&files[0])).stderr(copy(&files[1]));
        Self { child: command.spawn().expect("a worker"), socket, cases: 0 }
    }

    /// Waits for the answer. The error is the end of the process, or a hang.
    fn answer(&mut self) -> Result<(End, u64), End> {
        let spent = processor(&self.child);
        let mut last = (Instant::now(), spent);
        self.socket.set_read_timeout(Some(Duration::from_millis(250))).expect("a time-out");
        let mut line = Vec::new();
        let mut part = [0; 64];
        while line.last() != Some(&b'\n') {
            match self.socket.read(&mut part) {
                Ok(0) => return Err(ended(self.child.wait().expect("its status"))),
                Ok(n) => line.extend(&part[..n]),
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(_) => return Err(ended(self.child.wait().expect("its status"))),
            }
            let now = processor(&self.child);
            if now > last.1 {
                last = (Instant::now(), now);
            }
            if now.saturating_sub(spent) > PROCESSOR || last.0.elapsed() > WAITING {
                return Err(End::Hang);
            }
        }
        let text = String::from_utf8(line).expect("an answer");
        let mut words = text.split_whitespace();
        let mut next = || words.next().and_then(|w| w.parse::<u64>().ok()).expect("two numbers");
        Ok((End::Code(next() as u8), next()))
    }
}

fn ended(status: ExitStatus) -> End {
    status.code().map_or_else(|| End::Signal(status.signal().unwrap_or(0)), End::Exit)
}

/// Processor time of a process so far; 0 if unknown.
fn processor(child: &Child) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    // 100 ticks per second on every Linux.
    Duration::from_millis(10 * ticks)
}

/// Sets the environment of a case: no hub, a private cache, no color.
pub fn environment<'a>(command: &'a mut Command, home: &Path) -> &'a mut Command {
    for name in ["HF_TOKEN", "HF_HUB_CACHE", "RUST_BACKTRACE", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    // Additional arenas per thread would count as used memory.
    command.env("MALLOC_ARENA_MAX", "1").env("NO_COLOR", "1").env("HF_HUB_OFFLINE", "1");
    command.env("HF_HOME", home.join("hf")).env("FT_CACHE", home.join("cache"))
}

/// Runs the binary in `dir`, under the `ulimit` commands in `limits`.
pub fn limited(home: &Path, dir: &Path, limits: &str, args: &[String]) -> Outcome {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limits}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_ft")]).args(args);
    environment(&mut command, home).current_dir(dir).stdin(Stdio::null());
    let output = command.output().expect("sh");
    let end = match ended(output.status) {
        End::Exit(code) => End::Code(code as u8),
        other => other,
    };
    Outcome { end, out: output.stdout, err: output.stderr, memory: 0 }
}

/// The worker's side: a test that does nothing unless started by a [`Worker`].
#[test]
fn serve() {
    if std::env::var_os(WORKER).is_none() {
        return;
    }
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("the socket");
    let mut socket = UnixStream::from(stdin);
    let lines = BufReader::new(socket.try_clone().expect("the socket")).lines();
    let size = status("VmSize:");
    let limit = |resource, most: u64| {
        let both = Rlimit { current: Some(most), maximum: Some(most) };
        setrlimit(resource, both).expect("a limit");
    };
    limit(Resource::As, size + MEMORY + MEMORY / 2);
    limit(Resource::Core, 0);
    for line in lines.map_while(Result::ok) {
        let (dir, mut args): (PathBuf, Vec<String>) = serde_json::from_str(&line).expect("a job");
        args.insert(0, "ft".into());
        std::env::set_current_dir(dir).expect("the case's folder");
        // Resets the peak resident size, so that it covers only this case.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        let before = status("VmRSS:");
        let case = std::thread::Builder::new().stack_size(STACK).spawn(move || ft::cli::call(args));
        let Ok(code) = case.expect("a thread").join() else { std::process::exit(101) };
        let took = status("VmHWM:").saturating_sub(before);
        socket.write_all(format!("{code} {took}\n").as_bytes()).expect("an answer");
    }
    std::process::exit(0)
}

/// A line of `/proc/self/status`, in bytes.
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}
