//! The binary on a terminal: line editing and history of `ft chat`, lines of `ft run`.

use crate::world::{World, quickstart};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

const UP: &str = "\x1b[A";
const LEFT: &str = "\x1b[D";
const BACKSPACE: &str = "\x7f";
const ENTER: &str = "\r";
const CTRL_A: &str = "\x01";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
/// Escape sequence for bracketed paste, sent when input is expected.
const READY: &str = "\x1b[?2004h";

/// Time after which a process that prints nothing hangs.
const HANGS: Duration = Duration::from_secs(900);

/// A process attached to a pseudo-terminal.
struct Terminal {
    child: Child,
    keys: File,
    shows: Receiver<Vec<u8>>,
    /// Output not yet consumed; may end inside of a character.
    shown: Vec<u8>,
}

impl Terminal {
    fn start(w: &World, args: &[&str]) -> Self {
        Self::start_at(w, args, 80)
    }

    /// Starts on a terminal of some columns.
    fn start_at(w: &World, args: &[&str], columns: usize) -> Self {
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo terminal");
        grantpt(&pty).expect("granted");
        unlockpt(&pty).expect("unlocked");
        let name = ptsname(&pty, Vec::new()).expect("a name");
        let there = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let open = || File::options().read(true).write(true).open(there).expect("the other side");
        // A terminal that is closed on the other side may forget its size.
        let held = open();
        let size =
            Command::new("stty").args(["cols", &columns.to_string(), "rows", "24"]).stdin(open()).status();
        assert!(size.expect("started").success());
        let mut command = w.command(args);
        let child = command.env("TERM", "xterm").stdin(open()).stdout(open()).stderr(open()).spawn();
        drop((held, command));
        let (keys, mut screen) = (File::from(pty), Vec::new());
        let mut read = keys.try_clone().expect("a file");
        let (sender, shows) = channel();
        std::thread::spawn(move || {
            screen.resize(4096, 0);
            // A terminal closed on the other side returns an error.
            while let Ok(n) = read.read(&mut screen) {
                if sender.send(screen[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child: child.expect("started"), keys, shows, shown: Vec::new() }
    }

    fn press(&mut self, keys: &[&str]) {
        self.keys.write_all(keys.concat().as_bytes()).expect("typed");
    }

    /// Waits for a text in the output.
    fn until(&mut self, text: &str) {
        loop {
            if let Some(at) = self.shown.windows(text.len()).position(|w| w == text.as_bytes()) {
                self.shown.drain(..at + text.len());
                return;
            }
            match self.shows.recv_timeout(HANGS) {
                Ok(bytes) => self.shown.extend(bytes),
                Err(e) => panic!("{text:?} did not come ({e}): {:?}", String::from_utf8_lossy(&self.shown)),
            }
        }
    }

    /// All output until the process ends.
    fn whole(&mut self) -> String {
        loop {
            match self.shows.recv_timeout(HANGS) {
                Ok(bytes) => self.shown.extend(bytes),
                Err(RecvTimeoutError::Disconnected) => {
                    return String::from_utf8_lossy(&std::mem::take(&mut self.shown)).into_owned();
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("it goes on without output: {:?}", String::from_utf8_lossy(&self.shown))
                }
            }
        }
    }

    /// Sends Enter.
    fn enter(&mut self, keys: &[&str]) {
        self.press(keys);
        self.press(&[ENTER]);
    }

    /// Sends a question and waits for the answer.
    fn says(&mut self, keys: &[&str], answer: &str) {
        self.enter(keys);
        self.until(answer);
        self.until(READY);
    }

    fn clear(&mut self) {
        self.enter(&["/clear"]);
        self.until(READY);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn lines_are_edited_and_remembered() {
    let w = World::new();
    let model = quickstart(&w);
    let said = |prompt: &str| w.ok(&["chat", &model, "--prompt", prompt]).out.trim_end().to_string();
    let [sky, france] = ["What colour is the sky?", "What is the capital of France?"].map(said);
    assert_ne!(sky, france);
    let chat = ["chat", &model];
    let mut t = Terminal::start(&w, &chat);
    t.until(READY);
    // A typo, corrected in the middle of the line.
    t.says(&["hat colour is the skx", BACKSPACE, "?", LEFT, "y", CTRL_A, "W"], &sky);
    t.clear();
    t.says(&["What is the capital of France?"], &france);
    // Canceled.
    t.press(&["nothing", CTRL_C]);
    t.until(READY);
    t.clear();
    t.says(&[UP, UP, UP, UP], &sky);
    // Not in the history.
    t.clear();
    t.says(&[" What is the capital of France?"], &france);
    t.press(&[CTRL_D]);
    assert_eq!(t.child.wait().expect("ended").code(), Some(0));
    let kept = w.text("cache/chat-history");
    let lines: Vec<&str> = kept.lines().filter(|l| !l.starts_with('#')).collect();
    let (clear, sky_line, france_line) =
        ("/clear", "What colour is the sky?", "What is the capital of France?");
    assert_eq!(lines, [sky_line, clear, france_line, clear, sky_line, clear]);
    // A second session.
    let mut t = Terminal::start(&w, &chat);
    t.until(READY);
    t.says(&[UP, UP], &sky);
    t.press(&[CTRL_D]);
    assert_eq!(t.child.wait().expect("ended").code(), Some(0));
}

/// Replaces escape sequences of a terminal by line ends.
fn plain(text: &str) -> String {
    let sequences = regex::Regex::new("\x1b\\[[0-9;?]*[a-zA-Z]").expect("an expression");
    sequences.replace_all(text, "\n").into_owned()
}

/// No line is longer than the terminal, so that none takes two and no word is broken; the words are those
/// of a pipe.
#[test]
fn lines_of_a_run_fit_the_terminal() {
    let w = World::new();
    quickstart(&w);
    for columns in [40, 80] {
        let output = format!("run.output=o{columns}");
        let set = ["run.steps=4", "run.batch_rows=2", "run.micro_rows=2", "run.device=cpu", &output];
        let args = [&["run", "q.toml"], &set[..]].concat();
        let mut t = Terminal::start_at(&w, &args, columns);
        let shown = plain(&t.whole());
        assert!(t.child.wait().expect("ended").success(), "{shown}");
        assert!(shown.contains("4/4 [") && shown.contains("loss "), "{shown}");
        for line in shown.split(['\n', '\r']) {
            let words = line.split_whitespace().count();
            assert!(line.chars().count() <= columns || words == 1, "{columns}: {line:?}");
        }
    }
}

/// Help, lists, plans and errors break between words, at 80 and at 60 columns.
#[test]
fn no_word_is_broken_at_the_edge() {
    let w = World::new();
    w.write("r.toml", crate::world::recipe(crate::world::LORA));
    for columns in [80, 60] {
        for args in [
            &["--help"][..],
            &["run", "--help"],
            &["recipes"],
            // What is free changes from one command to the next.
            &[
                "plan",
                "qwen3-8b-qlora",
                "--gpu",
                "6GB",
                "memory.host_budget=64GiB",
                "memory.disk_budget=1TiB",
            ],
            &["check", "r.toml", "run.gradient_accumulation_steps=4", "memory.budget=48G"],
        ] {
            let plain = w.ft(args);
            let shown = Terminal::start_at(&w, args, columns).whole();
            let plain_of =
                |part: &str| part.split_once('m').map_or(String::new(), |(_, text)| text.to_string());
            let mut parts = shown.split("\x1b[");
            let first = parts.next().unwrap_or_default().to_string();
            let shown = parts.fold(first, |all, part| all + &plain_of(part)).replace('\r', "");
            let lines = |l: &&str| {
                l.chars().count() > columns && l.split_whitespace().count() > 1 && !l.contains('|')
            };
            let wide: Vec<&str> = shown.lines().filter(lines).collect();
            assert!(wide.is_empty(), "{args:?} at {columns}: {wide:#?}");
            let words = |s: &str| s.split_whitespace().map(String::from).collect::<Vec<_>>();
            let mut expected = words(&plain.out);
            expected.extend(words(&plain.err));
            let (mut there, mut expected) = (words(&shown), expected);
            there.sort();
            expected.sort();
            assert_eq!(there, expected, "{args:?} at {columns}");
        }
    }
}
