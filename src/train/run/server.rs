//! `serve.devices`: runs `ft serve` as a child process during training, on devices without a rank.
//!
//! Failures of the server do not affect the run; start and end are reported and written to the metrics. The
//! server exits when stdin closes: at the end of the run, even after a crash.

use crate::train::Error;
use crate::train::job::Job;
use ft_base::store;
use ft_base::terminal::warn;
use ft_kernels::cuda;
use ft_recipe::{Launch, OneDevice, Recipe, Serve};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Log file of the server in the run folder.
const LOG: &str = "serve.log";
/// Time limit for the server to exit before it is killed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of characters quoted from the log.
const QUOTED: usize = 300;

/// Checks `serve.devices` against this machine, this executable, and the devices of the ranks.
///
/// # Errors
/// A device is in use by a rank or does not exist; this executable has no server.
pub fn check(recipe: &Recipe, cuda: bool, program: Option<&Path>) -> Result<(), Error> {
    if recipe.serve.devices.is_empty() {
        return Ok(());
    }
    let fail =
        |what: String, hint: &str| Err(Error::at(recipe, "serve.devices", format!("{what}\n  hint: {hint}")));
    if !cfg!(feature = "serve") {
        let hint = "build it with --features serve, or leave serve.devices out";
        return fail("this ft is built without its serve feature".into(), hint);
    }
    if program.is_none() {
        let hint = "start `ft serve RUN` beside it";
        return fail(
            "serve.devices: only `ft run` starts a server, and this is another program".into(),
            hint,
        );
    }
    let trains = match (cuda, Launch::of_env()) {
        (false, _) => 0,
        (true, None) => recipe.parallel.sharing() as usize,
        (true, Some(launch)) => Launch::of_machine().unwrap_or(launch.world),
    };
    let count = cuda::count();
    let matching = |which: &dyn Fn(usize) -> bool| -> Vec<OneDevice> {
        let is = |d: &&OneDevice| matches!(d, OneDevice::Cuda(n) if which(*n));
        recipe.serve.devices.iter().filter(is).copied().collect()
    };
    let (taken, lacking) = (matching(&|n| n < trains), matching(&|n| n >= trains && n >= count));
    let list = |devices: &[OneDevice]| {
        let words = devices.iter().map(|d| format!("{:?}", d.word()));
        words.collect::<Vec<_>>().join(", ")
    };
    if !taken.is_empty() {
        let which = match (trains, &taken[..]) {
            (1, _) => "this is the one that trains".into(),
            (_, [_]) => format!("this is one of {trains} that train"),
            (_, some) => format!("these are {} of {trains} that train", some.len()),
        };
        let free: Vec<OneDevice> = (trains..trains + taken.len()).map(OneDevice::Cuda).collect();
        let hint = match trains + taken.len() <= count {
            true => format!("serve.devices=[{}], or \"cpu\"", list(&free)),
            false => "serve.devices=[\"cpu\"], or ranks on fewer devices".into(),
        };
        return fail(format!("serve.devices = [{}]: {which}", list(&taken)), &hint);
    }
    if lacking.is_empty() {
        return Ok(());
    }
    let are = if count == 1 { "is 1 CUDA device" } else { &format!("are {count} CUDA devices") };
    let words: Vec<String> = lacking.iter().map(|d| d.word()).collect();
    fail(
        format!("serve.devices: there is no {}: there {are}", words.join(", no ")),
        "serve.devices=[\"cpu\"]",
    )
}

/// Event of a server.
pub enum ServerEvent {
    /// The server listens: address and process id.
    Listening(String, u32),
    /// The server has exited, with the reason.
    Ended(String),
}

/// A server started by a run. Dropping it stops the process.
pub struct Server {
    child: Option<Child>,
    address: Receiver<String>,
    log: PathBuf,
}

impl Server {
    /// Starts a server if the recipe asks for one. Prints a warning on failure.
    pub fn start(program: Option<&Path>, job: &Job, dir: &Path) -> Option<Self> {
        let program = program.filter(|_| !job.recipe.serve.devices.is_empty())?;
        if !job.recipe.run.save_every.recurs() && !job.recipe.run.keep_best {
            warn(
                "run.save_every = 0: until the run ends there is no checkpoint, and the server answers as the model \
                 was before the first step",
            );
        }
        match spawn(program, &job.recipe.serve, dir) {
            Ok(server) => Some(server),
            Err(e) => {
                warn(&format!(
                    "serve.devices: the server cannot be started: {e}; training goes on without it"
                ));
                None
            }
        }
    }

    /// Returns the next event, if any.
    pub fn poll(&mut self) -> Option<ServerEvent> {
        if let Ok(address) = self.address.try_recv() {
            return Some(ServerEvent::Listening(address, self.child.as_ref().map_or(0, Child::id)));
        }
        let ended = self.child.as_mut()?.try_wait();
        let how = match ended {
            Ok(None) => return None,
            Ok(Some(status)) => status.to_string(),
            Err(e) => e.to_string(),
        };
        self.child = None;
        let last = std::fs::read_to_string(&self.log).unwrap_or_default();
        let errors = last.lines().rev().find(|l| l.starts_with("error")).or_else(|| last.lines().next_back());
        let why =
            errors.map_or(String::new(), |l| format!(": {}", l.chars().take(QUOTED).collect::<String>()));
        Some(ServerEvent::Ended(format!("{how}{why} ({})", self.log.display())))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        drop(child.stdin.take());
        let end = Instant::now() + PATIENCE;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > end {
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            sleep(Duration::from_millis(5));
        }
    }
}

fn spawn(program: &Path, serve: &Serve, dir: &Path) -> io::Result<Server> {
    let devices: Vec<String> = serve.devices.iter().map(|d| d.word()).collect();
    let log = dir.join(LOG);
    let mut command = Command::new(program);
    command.arg("serve").arg(dir).args([
        "--device",
        &devices.join(","),
        "--port",
        &serve.port.to_string(),
        "--until-eof",
    ]);
    // The server is not a rank, so variables of the launcher are removed.
    Launch::VARIABLES.iter().for_each(|v| {
        command.env_remove(v);
    });
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(store::create(&log).map_err(io::Error::other)?);
    // In a separate process group, the server ignores Ctrl-C and lives until the run has saved a
    // checkpoint.
    let mut child = command.process_group(0).spawn()?;
    let (sender, address) = channel();
    if let Some(stdout) = child.stdout.take() {
        let read = move || {
            let mut line = String::new();
            if BufReader::new(stdout).read_line(&mut line).is_ok() && !line.trim().is_empty() {
                let _ = sender.send(line.trim().to_string());
            }
        };
        std::thread::Builder::new().name("server".into()).spawn(read)?;
    }
    Ok(Server { child: Some(child), address, log })
}
