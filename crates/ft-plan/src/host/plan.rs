//! Host memory, disk space and shared memory of a run, required and available.
//!
//! On the CPU the device is the host: `host` then lists the process's bytes on top of the device's, and the available
//! bytes exclude the device's.

use super::budget::local;
use super::capacity::Capacity;
use super::files::{Disk, FileGroup};
use super::parts::{NamedBytes, sum};
use crate::memory::{nf4, optimizer_bytes, rounded};
use crate::units::bytes;
use crate::workload::{Workload, reference_bytes};
use ft_base::memory;
use ft_base::store;
use ft_engine::adapters::{Part, Selection, TrainedPart, initial};
use ft_engine::model::Config;
use ft_engine::model::modules::Group;
use ft_engine::quant::{self, MXFP4_BLOCK};
use ft_hub::Settings;
use ft_kernels::Machine;
use ft_recipe::{Comm, Decomposition, Interval, Launch, Length, Quantize, Recipe, Rendezvous, Weights};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// Bytes of a tensor's entry in a safetensors header without the name, padding included.
const ENTRY: u64 = 90;
/// Extra bytes of a tensor name in an adapter file.
const NAMES: u64 = 24;
/// Bytes of a checkpoint's state and manifest, and of a result's config.
const STATE: u64 = 16 << 10;
/// Bytes of a step's line in `metrics.jsonl`, and of one expert's count in expert-load lines.
const LINE: (u64, u64) = (450, 8);
/// Steps between expert-load lines.
const LOAD_EVERY: u64 = 10;
/// Shared memory of a rank with NCCL: two channels of 9,637,888 bytes (the size in NCCL's own error
/// messages), used if devices have no peer access.
pub(super) const NCCL: u64 = 2 * 9_637_888;
/// File mapped by Open MPI per rank of a machine (`btl_sm_segment_size`).
pub(super) const MPI: u64 = 4 << 20;

/// Settings to change if the token cache does not fit.
pub(super) const TOKENS: &[&str] = &["FT_CACHE", "data.cache"];

/// Host memory, shared memory and files of a run, with the available bytes.
#[derive(Clone, Debug, Default)]
pub struct HostPlan {
    /// Host memory of a rank, by name.
    pub host: NamedBytes,
    /// Host memory available for `host`, if known.
    pub host_left: Option<u64>,
    /// Shared memory of a rank, by name.
    pub shared: NamedBytes,
    /// Shared memory available to a rank, if known.
    pub shared_left: Option<u64>,
    /// File groups of the run, over all ranks.
    pub files: Vec<FileGroup>,
    /// File groups by disk.
    pub disks: Vec<Disk>,
    /// Bytes of one checkpoint.
    checkpoint: u64,
    /// Number of checkpoints written, if known.
    saves: Option<u64>,
}

impl HostPlan {
    /// Computes the requirements of a recipe; `host` has the known host allocations of a rank.
    pub fn new(r: &Recipe, s: &Selection, machine: Machine, w: &Workload, mut host: NamedBytes) -> Self {
        let trained = s.parts();
        let count: u64 = trained.iter().map(|t| t.elements() as u64).sum();
        let headers: u64 = trained.iter().map(|t| t.name_bytes() as u64 + ENTRY).sum();
        let states: u64 = trained.iter().map(|t| optimizer_bytes(&r.optimizer, t, s.layers)).sum();
        let (eight_bit, projects) = (r.optimizer.name.eight_bit(), r.optimizer.name.projects());
        // weights, two moments, their scales if 8-bit, and projection matrices (GaLore)
        let entries = 3 + if eight_bit { 2 } else { 0 } + u64::from(projects);
        let rounded = rounded(r, s, machine, &trained);
        let width = |rounded: bool| if rounded { machine.width } else { 4 };
        let sizes = trained.iter().zip(rounded).map(|(t, rounded)| t.elements() as u64 * width(rounded));
        let sizes: Vec<u64> = sizes.collect();
        let weights: u64 = sizes.iter().sum();
        let adapter = trained.iter().zip(sizes).map(|(t, bytes)| copies(r, s, t) * bytes);
        let result: u64 = if s.everything_full() { machine.width * count } else { adapter.sum() };
        let checkpoint = weights + states + entries * headers + STATE;
        let saves = saves(r, w);
        let experts = s.modules.iter().filter(|(m, _)| m.expert.is_some()).count() as u64 / 3;
        let steps = w.steps.unwrap_or(0);
        let loads = (LINE.1 * experts).saturating_mul(steps.div_ceil(LOAD_EVERY));
        let log = LINE.0.saturating_mul(steps).saturating_add(loads);
        let at = |name, bytes, change| FileGroup { name, bytes, dir: r.run.output.clone(), change };
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
        let (kept, cache) = (reference_bytes(r, w), store::cache_folder().filter(|_| r.data.cache));
        if let Some(dir) = cache.filter(|_| kept > 0) {
            space.files.push(FileGroup { name: "reference", bytes: kept, dir, change: TOKENS });
        }
        if let Some(data) = w.resident() {
            host.push(("data", data));
        }
        space.host = host;
        let shared = match (r.parallel.ranks(), r.parallel.comm) {
            (1, _) => 0,
            (_, Comm::Nccl) => NCCL,
            _ if machine.cuda => NCCL,
            (_, Comm::Mpi) => MPI,
            (_, Comm::Auto) if Launch::of_env().is_some_and(|l| l.rendezvous == Rendezvous::Mpi) => MPI,
            _ => 0,
        };
        space.shared = vec![("communication", shared)];
        space
    }

    /// Peak bytes of checkpoints: the kept ones plus the one being written.
    fn checkpoints(&self, keep: usize) -> u64 {
        let most = keep.max(1) as u64 + 1;
        self.checkpoint.saturating_mul(self.saves.map_or(most, |n| n.min(most)))
    }

    /// Adds the model download if the model is not `here`, and the 4-bit model of `model.cache` if not
    /// yet written.
    pub fn model(&mut self, r: &Recipe, config: &Config, s: &Selection, here: bool) {
        if r.model.weights == Weights::Random {
            return;
        }
        let of = |n: u64, four_bit: bool| if four_bit { nf4(n) } else { config.stored_width() * n };
        let all = |four_bit: bool| -> u64 {
            let mut bytes = 0;
            for (m, _) in s.with_weights() {
                let n = m.weight_values() as u64;
                bytes += match m.is_mxfp4() {
                    true => n / 2 + n / MXFP4_BLOCK as u64,
                    false => of(n, four_bit && quant::applies_to(m)),
                };
                bytes += of(m.bias().unwrap_or(0) as u64, false);
                bytes += m.name.len() as u64 + ENTRY;
            }
            bytes
        };
        if !here {
            let (dir, bytes) = (Settings::from_env().cache, all(config.is_bitsandbytes()));
            self.files.push(FileGroup { name: "model", bytes, dir, change: &["HF_HOME"] });
        }
        if let (Some(dir), Quantize::Nf4, false) =
            (&r.model.cache, r.model.quantize, config.is_bitsandbytes())
        {
            let dir = r.resolve(&dir.to_string_lossy());
            if !dir.join(ft_engine::load::CACHE_MARKER).is_file() {
                self.files.push(FileGroup {
                    name: "quantized_model",
                    bytes: all(true),
                    dir,
                    change: &["model.cache"],
                });
            }
        }
    }

    /// Adds the token cache for data not yet tokenized, estimated as the size of the text: a stored token takes four
    /// bytes and covers about four bytes of text.
    pub fn tokens(&mut self, r: &Recipe) {
        let Some(cache) = store::cache_folder().filter(|_| r.data.cache) else { return };
        let resolve = |s: &str| r.resolve(s);
        let files = |s| ft_data::find(s, &resolve).unwrap_or_default();
        let size = |f: PathBuf| std::fs::metadata(&f).map_or(0, |m| m.len()) * ft_data::unpacks_to(&f);
        let all = r.data.all_sources().flat_map(files).map(size);
        let bytes = all.fold(0, u64::saturating_add);
        if bytes > 0 {
            self.files.push(FileGroup { name: "tokens", bytes, dir: cache, change: TOKENS });
        }
    }

    /// Records the available bytes; `device` is the planned device peak of a rank.
    pub fn look(&mut self, r: &Recipe, machine: Machine, device: u64, room: &Capacity<'_>) {
        let local = local(r, machine);
        // a budget above this machine's memory is meant for another machine of unknown memory and disks
        let told = !machine.cuda && r.memory.budget.is_some_and(|b| room.host.is_some_and(|h| b > h));
        let reach = r.memory.host_budget.map(memory::part).or(room.host.filter(|_| !told));
        self.host_left = reach.map(|all| match machine.cuda {
            true => all / local,
            // ranks that run as threads share the memory left by the device bytes
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
                // files replaced by the run count as free space
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

    /// Whether host memory suffices, as far as known.
    pub(crate) fn host_fits(&self) -> bool {
        self.host_left.is_none_or(|left| sum(&self.host) <= left)
    }

    fn shared_fits(&self) -> bool {
        self.shared_left.is_none_or(|left| sum(&self.shared) <= left)
    }

    /// Whether everything fits.
    pub fn fits(&self) -> bool {
        self.host_fits() && self.shared_fits() && self.disks.iter().all(Disk::fits)
    }

    /// Shortages, one line each: required, available, settings to change. The host's line is included
    /// only if `beside` is set, i.e. the shortage does not stem from the device bytes.
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

    /// Changes to make room on a disk, as (settings, words).
    pub fn hints(&self, r: &Recipe) -> Vec<(Vec<String>, String)> {
        let (mut out, best) = (Vec::new(), usize::from(r.run.keep_best));
        for d in self.disks.iter().filter(|d| !d.fits()) {
            let (needed, free) = (d.needed(), d.free.unwrap_or(0));
            let keeps = d.parts.iter().find(|(n, _)| *n == "checkpoints").map_or(0, |(_, b)| *b);
            let others = needed - keeps;
            // the most checkpoints with room for the one being written
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

    /// The JSON tables of `ft plan --json`: host, disk, shared memory, filesystems.
    pub fn json(&self) -> [(&'static str, Value); 4] {
        let table = |parts: &NamedBytes, left: Option<u64>| {
            let mut out: Map<String, Value> = parts.iter().map(|(k, b)| (k.to_string(), json!(b))).collect();
            out.insert("total".into(), json!(sum(parts)));
            out.insert("available".into(), json!(left));
            Value::Object(out)
        };
        let files: NamedBytes = self.files.iter().map(|f| (f.name, f.bytes)).collect();
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

    /// The tables as text, one line each.
    pub fn text(&self) -> String {
        let mut s = String::new();
        let verdict = |needed: u64, left: Option<u64>, at: &str| match left {
            None => format!("{}{at}; free space unknown", bytes(needed)),
            Some(left) if needed <= left => format!("{} of {} free{at}", bytes(needed), bytes(left)),
            Some(left) => format!("{} DO NOT FIT {} free{at}", bytes(needed), bytes(left)),
        };
        let mut line = |name: &str, parts: &NamedBytes, left, at: &str| {
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

/// Copies of a trained tensor in an adapter's files: two of factors with an initial update subtracted from the base,
/// and of a tied table, with two names.
fn copies(r: &Recipe, s: &Selection, t: &TrainedPart<'_>) -> u64 {
    let changes_base = r.lora.init.decomposition().is_some_and(Decomposition::changes_base);
    let factor = matches!(t.part, Part::A | Part::B) && changes_base && initial::from_base(r, t.module);
    let table = t.module.group == Group::Embedding && s.tied_in_full();
    if factor || table { 2 } else { 1 }
}

/// Most checkpoints of a run, if known. Any evaluation may have the best one.
fn saves(r: &Recipe, w: &Workload) -> Option<u64> {
    let epochs = match r.run.length() {
        Length::Epochs(epochs) => Some(epochs),
        Length::Steps(n) => w.epoch.map(|e| n as f64 * r.run.batch_rows as f64 / e.rows.max(1) as f64),
    };
    let best = if r.run.keep_best { r.run.eval_every } else { Interval::Steps(0) };
    let before = |every: Interval| every.most_before_end(epochs, w.steps);
    Some(before(r.run.save_every)?.saturating_add(before(best)?).saturating_add(1))
}

/// Recipe keys to change to shrink a host component.
fn host_keys(part: &str) -> &'static [&'static str] {
    match part {
        "offloaded_optimizer" => &["memory.offload", "optimizer.name", "parallel.zero"],
        "offloaded_weights" => &["memory.offload", "model.quantize", "parallel.zero"],
        "offloaded_activations" => &["memory.offload", "run.micro_rows"],
        "server" => &["serve.devices"],
        _ => &[],
    }
}

fn words(parts: &NamedBytes) -> String {
    let parts = parts.iter().filter(|(_, b)| *b > 0);
    let each: Vec<String> = parts.map(|(k, b)| format!("{} {}", k.replace('_', " "), bytes(*b))).collect();
    each.join(", ")
}

fn places(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ")
}
