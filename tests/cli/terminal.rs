//! `ft chat` on a terminal: line editing and history.

use super::verbs::quickstart;
use super::world::World;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
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

/// A process attached to a pseudo-terminal.
struct Terminal {
    child: Child,
    keys: File,
    shows: Receiver<Vec<u8>>,
    /// Output not yet consumed.
    shown: String,
}

impl Terminal {
    fn start(w: &World, args: &[&str]) -> Self {
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo terminal");
        grantpt(&pty).expect("granted");
        unlockpt(&pty).expect("unlocked");
        let name = ptsname(&pty, Vec::new()).expect("a name");
        let there = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let open = || File::options().read(true).write(true).open(there).expect("the other side");
        let mut command = w.command(args);
        let child = command.env("TERM", "xterm").stdin(open()).stdout(open()).stderr(open()).spawn();
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
        Self { child: child.expect("started"), keys, shows, shown: String::new() }
    }

    fn press(&mut self, keys: &[&str]) {
        self.keys.write_all(keys.concat().as_bytes()).expect("typed");
    }

    /// Waits for a text in the output.
    fn until(&mut self, text: &str) {
        loop {
            if let Some(at) = self.shown.find(text) {
                self.shown.drain(..at + text.len());
                return;
            }
            match self.shows.recv_timeout(Duration::from_secs(60)) {
                Ok(bytes) => self.shown += &String::from_utf8_lossy(&bytes),
                Err(e) => panic!("{text:?} did not come ({e}): {:?}", self.shown),
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
    let kept = String::from_utf8(w.read("cache/chat-history")).expect("text");
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
