//! What a run takes beside the device: host memory, files by disk, shared memory; and whether there is room.
//!
//! On the CPU the device's memory is the host's: `host` lists what the process takes beside it, and what is
//! available to that is what the device's bytes leave.

use super::Machine;
use super::report::bytes;
use super::statics::{nf4, rounded, states};
use super::workload::Workload;
use ft_engine::adapt::Selection;
use ft_data::hub::Settings;
use ft_kernels::cuda;
use ft_base::memory;
use ft_engine::model::Config;
use ft_engine::model::modules::Group;
use ft_engine::quant;
use ft_recipe::{Comm, Launch, Meeting, Quantize, Recipe, Weights};
use ft_base::store;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes by name.
pub type Parts = Vec<(&'static str, u64)>;

/// Bytes that a tensor's entry in a safetensors header takes beside its name, padding included.
const ENTRY: u64 = 90;
/// What names in an adapter have more.
const NAMES: u64 = 24;
/// Bytes of a checkpoint's state and manifest, and of a result's config.
const STATE: u64 = 16 << 10;
/// Bytes of a step's line in `metrics.jsonl`, and of an expert's count in the lines of mixtures.
const LINE: (u64, u64) = (450, 8);
/// Steps between the lines that tell the load of experts.
const LOAD_EVERY: u64 = 10;
/// What one channel of NCCL takes of shared memory for a rank whose device its peers cannot reach directly, as
/// its errors name it, and the channels that it opens then.
const NCCL: u64 = 2 * 9_637_888;
/// CUDA devices of a server.
const DEVICES: u64 = 8;
/// The file that Open MPI maps for each rank of a machine (`btl_sm_segment_size`).
const MPI: u64 = 4 << 20;

/// What to change where kept tokens do not fit.
const TOKENS: &[&str] = &["FT_CACHE", "data.cache"];

/// Files that a run writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Files {
    /// What they are.
    pub name: &'static str,
    /// Their bytes when there are most of them.
    pub bytes: u64,
    /// Where they go.
    pub dir: PathBuf,
    /// What to change where they do not fit: keys, or a variable of the environment.
    pub change: &'static [&'static str],
}

/// One disk, and what of a run goes there.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Folders on it.
    pub dirs: Vec<PathBuf>,
    /// Names and bytes of what goes there.
    pub parts: Parts,
    /// Bytes that may be written there, where known.
    pub free: Option<u64>,
    /// What to change.
    pub change: Vec<&'static str>,
}

impl Disk {
    /// Bytes that go there.
    pub fn needed(&self) -> u64 {
        sum(&self.parts)
    }

    /// Whether there is room; where nothing is known, nothing speaks against it.
    pub fn fits(&self) -> bool {
        self.free.is_none_or(|f| self.needed() <= f)
    }
}

/// A disk as the system describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Equal for folders on the same one.
    pub id: u64,
    /// Bytes that this user may still write.
    pub free: u64,
}

/// What a machine has. Tests make their own.
pub struct Room<'a> {
    /// Bytes of host memory that this process may hold in all.
    pub host: Option<u64>,
    /// Bytes free in `/dev/shm`.
    pub shared: Option<u64>,
    /// The disk that a folder is on, or would be.
    pub volume: &'a dyn Fn(&Path) -> Option<Volume>,
    /// Bytes that stand in a run folder and that the run replaces.
    pub replaced: &'a dyn Fn(&Path) -> u64,
}

impl Room<'_> {
    /// Where this machine would run it: this machine. A plan for a device that is not here is for another
    /// machine, whose memory and disks are not known.
    pub fn of(machine: Machine) -> Room<'static> {
        if machine.cuda && ft_kernels::cuda::cuda_memory().is_none() {
            return Room { host: None, shared: None, volume: &|_| None, replaced: &|_| 0 };
        }
        Room {
            host: memory::reach_bytes(),
            shared: store::free_bytes(Path::new("/dev/shm")).map(memory::part),
            volume: &volume,
            replaced: &replaced,
        }
    }
}

fn volume(dir: &Path) -> Option<Volume> {
    let free = store::free_bytes(dir)?;
    let there = dir.ancestors().find_map(|d| {
        let d = if d.as_os_str().is_empty() { Path::new(".") } else { d };
        std::fs::metadata(d).ok()
    })?;
    Some(Volume { id: there.dev(), free })
}

/// Checkpoints go before the first new one comes; a result stays until the new one is whole.
fn replaced(dir: &Path) -> u64 {
    size(&dir.join("checkpoints"))
}

/// Bytes of all files below a folder; links are not followed.
fn size(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => size(&e.path()),
            Ok(m) if m.is_file() => m.len(),
            _ => 0,
        })
        .sum()
}

/// Sum of named bytes.
pub fn sum(parts: &[(&'static str, u64)]) -> u64 {
    parts.iter().map(|(_, b)| b).sum()
}

/// What a run takes beside the device, and what there is.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Host memory of a rank, by name.
    pub host: Parts,
    /// Host memory that these bytes may take, where known.
    pub host_left: Option<u64>,
    /// Shared memory of a rank, by name.
    pub shared: Parts,
    /// Shared memory that is free, where known.
    pub shared_left: Option<u64>,
    /// Files of the run, over all ranks.
    pub files: Vec<Files>,
    /// Files by disk.
    pub disks: Vec<Disk>,
    /// Bytes of one checkpoint.
    checkpoint: u64,
    /// Checkpoints that the run writes, where known.
    saves: Option<u64>,
}

impl Space {
    /// What a recipe takes; `host` is what of it is known to live there already.
    pub fn new(r: &Recipe, s: &Selection, machine: Machine, w: &Workload, mut host: Parts) -> Self {
        let trained = s.parts();
        let count: u64 = trained.iter().map(|t| t.elements() as u64).sum();
        let headers: u64 = trained.iter().map(|t| t.name_bytes() as u64 + ENTRY).sum();
        let states: u64 = trained.iter().map(|t| states(&r.optimizer, t, s.layers)).sum();
        let (eight_bit, projects) = (r.optimizer.name.eight_bit(), r.optimizer.name.projects());
        // weights, two moments, the scales of those in 8 bits, and directions of gradients
        let entries = 3 + if eight_bit { 2 } else { 0 } + u64::from(projects);
        let rounded = rounded(r, s, machine, &trained);
        let weights = trained.iter().zip(rounded).map(|(t, rounded)| (t.elements() as u64, rounded));
        let weights: u64 = weights.map(|(n, rounded)| n * if rounded { machine.width } else { 4 }).sum();
        let result = if s.everything_full() { machine.width * count } else { weights };
        let checkpoint = weights + states + entries * headers + STATE;
        let saves = match (r.run.save_every as u64, w.steps) {
            (0, _) => Some(1),
            (every, steps) => steps.map(|n| n.div_ceil(every)),
        };
        let experts = s.modules.iter().filter(|(m, _)| m.expert.is_some()).count() as u64 / 3;
        let steps = w.steps.unwrap_or(0);
        let loads = (LINE.1 * experts).saturating_mul(steps.div_ceil(LOAD_EVERY));
        let log = LINE.0.saturating_mul(steps).saturating_add(loads);
        let at = |name, bytes, change| Files { name, bytes, dir: r.run.output.clone(), change };
        let output: &[&str] = &["run.output"];
        let mut space = Self { checkpoint, saves, ..Self::default() };
        space.files = vec![
            at(
                "checkpoints",
                space.checkpoints(r.run.keep + usize::from(r.run.keep_best)),
                &["run.keep", "run.output"],
            ),
            at("result", result + headers + NAMES * trained.len() as u64 + STATE, output),
            at("metrics", log, output),
        ];
        if let Some(data) = w.resident() {
            host.push(("data", data));
        }
        space.host = host;
        let shared = match (r.parallel.ranks(), r.parallel.comm) {
            (1, _) => 0,
            (_, Comm::Nccl) => NCCL,
            _ if machine.cuda => NCCL,
            (_, Comm::Mpi) => MPI,
            (_, Comm::Auto) if Launch::of_env().is_some_and(|l| l.meeting == Meeting::Mpi) => MPI,
            _ => 0,
        };
        space.shared = vec![("communication", shared)];
        space
    }

    /// Bytes of checkpoints when there are most of them: the one being written stands beside those that stay.
    fn checkpoints(&self, keep: usize) -> u64 {
        let most = keep.max(1) as u64 + 1;
        self.checkpoint.saturating_mul(self.saves.map_or(most, |n| n.min(most)))
    }

    /// Adds the model's download, and the 4-bit model that `model.cache` keeps, where they are still to be made.
    pub fn model(&mut self, r: &Recipe, config: &Config, s: &Selection, here: bool) {
        if r.model.weights == Weights::Random {
            return;
        }
        let of = |n: u64, four_bit: bool| match four_bit {
            true => {
                let (codes, scales) = nf4(n);
                codes + scales
            }
            false => config.stored_width() * n,
        };
        let all = |four_bit: bool| -> u64 {
            let mut bytes = 0;
            for (m, _) in s.modules.iter().filter(|(m, _)| !(s.tied && m.group == Group::Head)) {
                let n = m.weight_values() as u64;
                bytes += of(n, four_bit && quant::takes(m)) + of(m.bias().unwrap_or(0) as u64, false);
                bytes += m.name.len() as u64 + ENTRY;
            }
            bytes
        };
        if !here {
            let (dir, bytes) = (Settings::from_env().cache, all(config.four_bit));
            self.files.push(Files { name: "model", bytes, dir, change: &["HF_HOME"] });
        }
        if let (Some(dir), Quantize::Nf4, false) = (&r.model.cache, r.model.quantize, config.four_bit) {
            let dir = r.resolve(&dir.to_string_lossy());
            if !dir.join(quant::CACHE_MARKER).is_file() {
                self.files.push(Files {
                    name: "quantized_model",
                    bytes: all(true),
                    dir,
                    change: &["model.cache"],
                });
            }
        }
    }

    /// Adds the tokens that are kept between commands, of data that was not tokenized yet. How many there will be is not
    /// known: about as many bytes as the text has, for a token of four bytes stands for some four of text.
    pub fn tokens(&mut self, r: &Recipe) {
        let Some(cache) = store::cache_folder().filter(|_| r.data.cache) else { return };
        let resolve = |s: &str| r.resolve(s);
        let files = |s| ft_data::find(s, &resolve).unwrap_or_default();
        let size = |f: PathBuf| std::fs::metadata(&f).map_or(0, |m| m.len()) * ft_data::unpacks_to(&f);
        let all = r.data.train.iter().chain(&r.data.eval).flat_map(files).map(size);
        let bytes = all.fold(0, u64::saturating_add);
        if bytes > 0 {
            self.files.push(Files { name: "tokens", bytes, dir: cache, change: TOKENS });
        }
    }

    /// Takes down what there is; `device` is what the plan says of the device.
    pub fn look(&mut self, r: &Recipe, machine: Machine, device: u64, room: &Room<'_>) {
        let local = local(r, machine);
        // a budget above what this machine has speaks of another, whose memory and disks are not known
        let told = !machine.cuda && r.memory.budget.is_some_and(|b| room.host.is_some_and(|h| b > h));
        let reach = r.memory.host_budget.map(memory::part).or(room.host.filter(|_| !told));
        self.host_left = reach.map(|all| match machine.cuda {
            true => all / local,
            // ranks that are threads of a process share what it takes beside the device's bytes
            false => all.saturating_sub(device.saturating_mul(local)),
        });
        self.shared_left = room.shared.map(|all| all / local);
        self.disks.clear();
        let mut ids: Vec<Option<u64>> = Vec::new();
        for f in &self.files {
            let volume = (room.volume)(&f.dir).filter(|_| !told);
            let id = if r.memory.disk_budget.is_some() { None } else { volume.map(|v| v.id) };
            let k = ids.iter().position(|i| *i == id).unwrap_or_else(|| {
                ids.push(id);
                let free = r.memory.disk_budget.or(volume.map(|v| v.free));
                self.disks.push(Disk { dirs: Vec::new(), parts: Vec::new(), free, change: Vec::new() });
                ids.len() - 1
            });
            let disk = &mut self.disks[k];
            if !disk.dirs.contains(&f.dir) {
                // what stands there already and goes, or is written over, is as good as free
                let again = if f.dir == r.run.output { (room.replaced)(&f.dir) } else { 0 };
                disk.free = disk.free.map(|n| n.saturating_add(again));
                disk.dirs.push(f.dir.clone());
            }
            disk.parts.push((f.name, f.bytes));
            for key in f.change.iter().filter(|_| f.bytes > 0) {
                if !disk.change.contains(key) {
                    disk.change.push(key);
                }
            }
        }
    }

    fn host_fits(&self) -> bool {
        self.host_left.is_none_or(|left| sum(&self.host) <= left)
    }

    fn shared_fits(&self) -> bool {
        self.shared_left.is_none_or(|left| sum(&self.shared) <= left)
    }

    /// Whether there is room for all of it.
    pub fn fits(&self) -> bool {
        self.host_fits() && self.shared_fits() && self.disks.iter().all(Disk::fits)
    }

    /// What there is no room for: what is needed, what there is and what to change, a line each. `beside` says
    /// whether the host's shortage is one of its own, and not what the device's bytes leave of it.
    pub fn shortages(&self, beside: bool) -> Vec<String> {
        let mut out = Vec::new();
        if beside && !self.host_fits() {
            let mut keys: Vec<&str> = Vec::new();
            for key in self.host.iter().flat_map(|(name, _)| host_keys(name)) {
                if !keys.contains(key) {
                    keys.push(key);
                }
            }
            let change: String = if keys.is_empty() { "a machine with more".into() } else { keys.join(", ") };
            out.push(format!(
                "host memory of a rank: {} beside the device's ({}), and {} are left for it; to change: {change}",
                bytes(sum(&self.host)),
                words(&self.host),
                bytes(self.host_left.unwrap_or(0)),
            ));
        }
        if !self.shared_fits() {
            out.push(format!(
                "shared memory of a rank (/dev/shm): {}, and {} are free for it; to change: parallel.comm, or a larger \
                 /dev/shm",
                bytes(sum(&self.shared)),
                bytes(self.shared_left.unwrap_or(0)),
            ));
        }
        for d in self.disks.iter().filter(|d| !d.fits()) {
            out.push(format!(
                "disk of {}: {} ({}), and {} are free; to change: {}",
                places(&d.dirs),
                bytes(d.needed()),
                words(&d.parts),
                bytes(d.free.unwrap_or(0)),
                d.change.join(", "),
            ));
        }
        out
    }

    /// Changes that make room on a disk: settings, words.
    pub fn hints(&self, r: &Recipe) -> Vec<(Vec<String>, String)> {
        let (mut out, best) = (Vec::new(), usize::from(r.run.keep_best));
        for d in self.disks.iter().filter(|d| !d.fits()) {
            let (needed, free) = (d.needed(), d.free.unwrap_or(0));
            let keeps = d.parts.iter().find(|(n, _)| *n == "checkpoints").map_or(0, |(_, b)| *b);
            let others = needed - keeps;
            // as many as there is room for beside the one that is written
            let room = free.saturating_sub(others) / self.checkpoint.max(1);
            let most =
                usize::try_from(room).unwrap_or(usize::MAX).saturating_sub(1 + best).min(r.run.keep - 1);
            let fewer = (most > 0 && others + self.checkpoints(most + best) <= free).then_some(most);
            if let Some(k) = fewer {
                let saved = bytes(keeps - self.checkpoints(k + best));
                let text = format!("run.keep {} -> {k}: fits, saves {saved} on disk", r.run.keep);
                out.push((vec![format!("run.keep={k}")], text));
            }
            for key in d.change.iter().filter(|k| **k != "run.keep") {
                let moved = self.files.iter().filter(|f| f.change.contains(key) && d.dirs.contains(&f.dir));
                let moved: u64 = moved.map(|f| f.bytes).sum();
                let fits = if needed - moved <= free { "fits, " } else { "" };
                let saves = format!("{fits}saves {} on this one", bytes(moved));
                out.push(match *key {
                    "data.cache" => {
                        let set = if fits.is_empty() { Vec::new() } else { vec!["data.cache=false".into()] };
                        (set, format!("data.cache true -> false: {saves}; tokens stay in memory"))
                    }
                    _ => (Vec::new(), format!("{key} on another disk: {saves}")),
                });
            }
        }
        out
    }

    /// The three, as `ft plan --json` prints them, and the disks one by one.
    pub fn json(&self) -> [(&'static str, Value); 4] {
        let table = |parts: &Parts, left: Option<u64>| {
            let mut out: Map<String, Value> = parts.iter().map(|(k, b)| (k.to_string(), json!(b))).collect();
            out.insert("total".into(), json!(sum(parts)));
            out.insert("available".into(), json!(left));
            Value::Object(out)
        };
        let files: Parts = self.files.iter().map(|f| (f.name, f.bytes)).collect();
        let free = match &self.disks[..] {
            [one] => one.free,
            _ => None,
        };
        let each = self.disks.iter().map(|d| {
            let names: Vec<&str> = d.parts.iter().map(|(n, _)| *n).collect();
            json!({"folders": d.dirs, "holds": names, "needed": d.needed(), "available": d.free, "fits": d.fits()})
        });
        [
            ("host", table(&self.host, self.host_left)),
            ("disk", table(&files, free)),
            ("shared", table(&self.shared, self.shared_left)),
            ("filesystems", each.collect()),
        ]
    }

    /// The three, a line each.
    pub fn text(&self) -> String {
        let mut s = String::new();
        let verdict = |needed: u64, left: Option<u64>, at: &str| match left {
            None => format!("{}{at}; free space unknown", bytes(needed)),
            Some(left) if needed <= left => format!("{} of {} free{at}", bytes(needed), bytes(left)),
            Some(left) => format!("{} DO NOT FIT {} free{at}", bytes(needed), bytes(left)),
        };
        let mut line = |name: &str, parts: &Parts, left, at: &str| {
            if sum(parts) == 0 {
                let _ = writeln!(s, "{name:<11} nothing{at}");
            } else {
                let _ = writeln!(s, "{name:<11} {}: {}", words(parts), verdict(sum(parts), left, at));
            }
        };
        line("host", &self.host, self.host_left, " beside the device's");
        for d in &self.disks {
            line("disk", &d.parts, d.free, &format!(" at {}", places(&d.dirs)));
        }
        line("/dev/shm", &self.shared, self.shared_left, "");
        s
    }
}

/// Ranks of a recipe on one machine.
fn local(r: &Recipe, machine: Machine) -> u64 {
    // a plan of more devices than servers have is of several machines
    let devices = |n: u64| if n > DEVICES { n.min(DEVICES.max(cuda::count() as u64)) } else { n };
    if machine.cuda { devices(r.parallel.local()) } else { r.parallel.local() }
}

/// Bytes of a machine's `host` memory that a rank may use beside its device and a server; none where the host is the device,
/// or nothing is known of it.
pub fn beside_device(r: &Recipe, machine: Machine, (host, server): (Option<u64>, u64)) -> Option<u64> {
    let all = r.memory.host_budget.map(memory::part).or(host).filter(|_| machine.cuda)?;
    Some(all.saturating_sub(server) / local(r, machine))
}

/// The recipe keys that make a part of the host's memory smaller.
fn host_keys(part: &str) -> &'static [&'static str] {
    match part {
        "offloaded_optimizer" => &["memory.offload", "optimizer.name", "parallel.zero"],
        "offloaded_weights" => &["memory.offload", "model.quantize", "parallel.zero"],
        "offloaded_activations" => &["memory.offload", "run.micro_rows"],
        "server" => &["serve.devices"],
        _ => &[],
    }
}

fn words(parts: &Parts) -> String {
    let parts = parts.iter().filter(|(_, b)| *b > 0);
    let each: Vec<String> = parts.map(|(k, b)| format!("{} {}", k.replace('_', " "), bytes(*b))).collect();
    each.join(", ")
}

fn places(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
