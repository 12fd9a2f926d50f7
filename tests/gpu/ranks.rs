//! Several devices, as threads or processes: the same bits at every ZeRO stage; lost ranks.

use super::split::{self, ADAPTERS, CUT, LATE, MIXTURE, all, apart, ends, launch, launch_with};
use super::world::{FULL, LORA, Ran, World, few, nightly, ran};
use candle_core::{DType, Device, Tensor};
use ft::kernel::cuda;
use ft::ranks::{self, CollectiveId, Comm};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Returns true if there are `count` devices and NCCL; otherwise prints a note.
pub fn devices(n: usize) -> bool {
    let there = cuda::count();
    match cuda::nccl_is_here() {
        Ok(()) if there >= n => true,
        Ok(()) => {
            eprintln!("not run: {n} CUDA devices are needed, and there are {there}");
            false
        }
        Err(e) => {
            eprintln!("not run: {e}");
            false
        }
    }
}

fn own(run: &str, ranks: usize) -> [String; 2] {
    [format!("run.output={run}"), format!("parallel.data={ranks}")]
}

fn args<'a>(own: &'a [String; 2], set: &[&'a str]) -> Vec<&'a str> {
    [&["run", "r.toml", "run.device=cuda", &own[0], &own[1]], set].concat()
}

/// Runs on several devices in one process. Returns the final files.
#[track_caller]
fn bits(w: &World, ranks: usize, name: &str, set: &[&str]) -> Vec<Vec<u8>> {
    w.ok(&args(&own(name, ranks), set));
    ends(w, name)
}

/// As [`bits`], with processes.
#[track_caller]
fn processes(w: &World, ranks: usize, name: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let numbers: Vec<usize> = (0..ranks).collect();
    for (rank, r) in all(launch(w, &numbers, ranks, &args(&own(name, ranks), set))).iter().enumerate() {
        assert_eq!(r.code, 0, "{set:?}: rank {rank} of {ranks}: {}", r.err);
    }
    ends(w, name)
}

#[test]
fn more_ranks_than_devices_are_refused() {
    if !devices(1) {
        return;
    }
    let w = split::world(FULL);
    let many = ["run.device=cuda", "parallel.data=64", "run.batch_rows=64"];
    for verb in ["check", "run"] {
        for local in [&[][..], &["parallel.local=64"]] {
            let says = "64 ranks of this machine have a device each, and there ";
            split::refused(&w, verb, &[&many[..], local].concat(), says);
        }
    }
}

/// The launcher tells the devices of a machine.
#[test]
fn a_layout_is_chosen_for_the_devices_of_a_machine() {
    if !devices(2) {
        return;
    }
    let w = split::world(FULL);
    let set = ["run", "r.toml", "run.device=cuda", "parallel=auto", "run.output=auto", SHORT];
    let of_machine = |_: usize| vec![("LOCAL_WORLD_SIZE", "1")];
    for (rank, r) in
        all(split::launch_at(&w, &split::rendezvous(), (&[0, 1], 2), &set, &of_machine)).iter().enumerate()
    {
        assert_eq!(r.code, 0, "{}", r.err);
        assert!(rank > 0 || r.err.contains("; between machines of 1: "), "{}", r.err);
    }
}

/// Three steps.
const SHORT: &str = "run.epochs=0.3";

#[test]
fn stages_and_devices_have_the_same_bits() {
    if !devices(4) {
        return;
    }
    let (f32s, host) = ("model.dtype=f32", "memory.offload=['params', 'activations']");
    let cases = [
        (FULL, &[f32s, "memory.recompute=all", host][..]),
        (MIXTURE, &[f32s, "memory.recompute=2"]),
        (FULL, &[f32s]),
        (FULL, &["memory.recompute=all"]),
        (LORA, &[f32s, "memory.recompute=1", "memory.offload=['optimizer']"]),
        (ADAPTERS, &["model.quantize=nf4"]),
    ];
    for (rules, set) in cases.into_iter().take(few(2)) {
        let w = split::world(rules);
        let set = [set, &[SHORT, "--overwrite"]].concat();
        let run = |ranks: usize, zero: u8| {
            let zero = format!("parallel.zero={zero}");
            bits(&w, ranks, &format!("run-{ranks}"), &[&set[..], &[&zero]].concat())
        };
        let want = run(2, 0);
        for (ranks, zero) in [(4, 3), (2, 3), (4, 2), (2, 1), (2, 2), (4, 0), (4, 1)].into_iter().take(few(1))
        {
            assert!(run(ranks, zero) == want, "{set:?}: {ranks} devices, stage {zero}");
            let what = format!("{set:?}, {ranks} devices, stage {zero}");
            split::as_planned(&w, &format!("run-{ranks}"), "wire_bytes", &what);
        }
        let one = run(1, 0);
        if set.contains(&f32s) {
            let far = apart(&want[0], &one[0]);
            eprintln!("{set:?}: {far:.1e} from one device");
            assert!(far <= 1e-6, "{set:?}: {far:.1e} from one device");
        }
    }
}

#[test]
fn processes_have_the_bits_of_threads() {
    if !devices(4) {
        return;
    }
    for (rules, set) in [(FULL, &[][..]), (MIXTURE, &["memory.recompute=2"])].into_iter().take(few(1)) {
        let w = split::world(rules);
        let set = [set, &[SHORT, "--overwrite"]].concat();
        let want = bits(&w, 2, "threads", &set);
        for (ranks, zero) in [(2, 3), (4, 2), (2, 0)].into_iter().take(few(2)) {
            let zero = format!("parallel.zero={zero}");
            let got = processes(&w, ranks, "processes", &[&set[..], &[&zero]].concat());
            assert!(got == want, "{set:?}: {ranks} processes, {zero}");
        }
    }
}

/// Tokens of a row, experts with layers, and matrices with tokens over devices: the same bits at every stage of ZeRO, in
/// threads and processes, and results of one device.
#[test]
fn tokens_experts_and_matrices_over_devices() {
    if !devices(4) {
        return;
    }
    let tokens = if nightly() { 384 } else { 256 };
    let length = format!("data.max_length={tokens}");
    let packed = ["data.pack=true", &length, "run.batch_rows=2"];
    let recompute = &["memory.recompute=2"][..];
    let cases: [(&str, usize, &[&str], &[&str]); 3] = [
        (LORA, 2, &["parallel.context=2"], &packed),
        (MIXTURE, 2, &["parallel.expert=2", "parallel.pipeline=2"], recompute),
        (CUT, 1, &["parallel.tensor=2", "parallel.context=2"], &packed),
    ];
    for (rules, data, axes, set) in cases.into_iter().skip(usize::from(!nightly())) {
        let w = split::world(rules);
        if axes.contains(&"parallel.context=2") {
            w.config("tiny", json!({"max_position_embeddings": tokens}));
        }
        let steps = if nightly() { "run.steps=2" } else { "run.steps=1" };
        let set = [set, &["model.dtype=f32", steps, "--overwrite"]].concat();
        let want = bits(&w, data, "threads", &[&set[..], axes].concat());
        let both = [&set[..], axes, &["parallel.zero=3"]].concat();
        if nightly() {
            assert!(bits(&w, data, "stage-3", &both) == want, "{axes:?}: other bits at stage 3");
        }
        for r in all(launch(&w, &[0, 1, 2, 3], 4, &args(&own("processes", data), &both))) {
            assert_eq!(r.code, 0, "{axes:?}: {}", r.err);
        }
        assert!(ends(&w, "processes") == want, "{axes:?}: other bits in processes at stage 3");
        let one = bits(&w, 1, "one", &set);
        let far = apart(&want[0], &one[0]);
        assert!(far <= 1e-5, "{axes:?}: {far:.1e} from one device");
    }
}

/// Parts of 4-bit matrices with blocks of 16 and of 8 values, which no kernel takes.
#[test]
fn small_blocks_of_4_bit_matrices_over_devices() {
    if !devices(2) {
        return;
    }
    let w = split::world(CUT);
    w.config("tiny", json!({"num_key_value_heads": 4}));
    let set = ["model.dtype=f32", "model.quantize=nf4", "run.steps=1", "--overwrite"];
    let one = bits(&w, 1, "one", &set);
    let two = bits(&w, 1, "two", &[&set[..], &["parallel.tensor=2"]].concat());
    let far = apart(&two[0], &one[0]);
    assert!(far <= 1e-5, "{far:.1e} from one device");
}

/// Layers over devices: the bits of one stage, at every stage of ZeRO.
#[test]
fn layers_over_devices() {
    if !devices(4) {
        return;
    }
    let w = split::world(FULL);
    w.config("tiny", json!({"tie_word_embeddings": false}));
    let set = ["model.dtype=f32", "run.steps=2", "memory.recompute=1", "--overwrite"];
    for (data, zero) in [(2, "parallel.zero=3"), (1, "parallel.zero=0")].into_iter().take(few(1)) {
        let want = bits(&w, data, "one", &set);
        let got = bits(&w, data, "stages", &[&set[..], &["parallel.pipeline=2", zero]].concat());
        assert!(got == want, "{data} data ranks, {zero}: other bits than one stage");
    }
}

/// Processes started by `mpirun` have separate devices, too.
#[test]
#[cfg(feature = "mpi")]
fn mpirun_starts_devices() {
    if !devices(2) {
        return;
    }
    let w = split::world(FULL);
    let want = bits(&w, 2, "threads", &[SHORT]);
    let own = own("mpi", 2);
    let own_command = w.command(&[]);
    let mut c = std::process::Command::new("mpirun");
    c.args(["--oversubscribe", "--allow-run-as-root", "-n", "2", super::world::FT]);
    c.args(args(&own, &[SHORT, "parallel.zero=3"]));
    for (key, value) in own_command.get_envs() {
        match value {
            Some(value) => c.env(key, value),
            None => c.env_remove(key),
        };
    }
    let r = ran(c.current_dir(w.path("")).output().expect("mpirun is there"));
    assert_eq!(r.code, 0, "{}", r.err);
    assert!(ends(&w, "mpi") == want);
}

/// A checkpoint does not depend on devices: a run resumes on other devices with the same bits, and on the
/// CPU.
#[test]
fn a_run_goes_on_with_other_devices() {
    if !devices(4) {
        return;
    }
    let w = split::world(FULL);
    let f32s = "model.dtype=f32";
    let whole = bits(&w, 2, "whole", &[f32s, "parallel.zero=1"]);
    for (ranks, zero) in [(4, "parallel.zero=3"), (2, "parallel.zero=2")].into_iter().take(few(1)) {
        std::fs::remove_dir_all(w.path("again")).ok();
        bits(&w, ranks, "again", &[f32s, zero]);
        split::keep_first(&w, "again");
        let back = if ranks == 4 { 2 } else { 4 };
        assert!(bits(&w, back, "again", &[f32s, "--resume", "parallel.zero=0"]) == whole, "{ranks} {zero}");
    }
    split::keep_first(&w, "again");
    let cpu = ["run", "r.toml", "run.output=again", "run.device=cpu", f32s, "--resume", "parallel.data=2"];
    w.ok(&cpu);
    let far = apart(&whole[0], &ends(&w, "again")[0]);
    eprintln!("on the CPU from step 4: {far:.1e}");
    assert!(far <= 1e-4, "{far:.1e}");
}

#[test]
fn what_this_machine_cannot_do_is_refused() {
    if !devices(1) {
        return;
    }
    let w = split::world(FULL);
    let said = |r: &Ran, words: &str| {
        assert!(r.code == 2 && r.err.contains(words), "{}: {}", r.code, r.err);
        assert_eq!(r.err.matches("error: ").count(), 1, "{}", r.err);
    };
    let more = cuda::count() + 1;
    let batch = format!("run.batch_rows={more}");
    said(&w.ft(&args(&own("bad", more), &[&batch])), "CUDA device");
    let no_mpi = if cfg!(feature = "mpi") { "go by NCCL" } else { "--features mpi" };
    said(&w.ft(&args(&own("bad", 2), &["parallel.comm=mpi"])), no_mpi);
    assert!(!w.path("bad/model").exists());
}

/// Order of operations on an emulated device: at stage 3, weights are requested one visit ahead.
#[test]
fn gathers_come_a_visit_ahead() {
    if !devices(2) {
        return;
    }
    let w = split::world(FULL);
    let own = own("traced", 2);
    let set =
        args(&own, &["parallel.zero=3", "memory.recompute=all", "run.epochs=0.1", "run.eval_at_start=false"]);
    let both = all(launch_with(&w, &[0, 1], 2, &set, &[("EMU_DEBUG", "1"), ("EMU_STREAMS", "eager")]));
    assert!(both.iter().all(|r| r.code == 0), "{}", both[1].err);
    let calls: Vec<&str> = both[0].err.lines().filter(|l| l.starts_with("emu: ")).collect();
    let Some(loss) = calls.iter().position(|l| l.contains(" loss_")) else {
        eprintln!("not run: the device does not write down what it is asked for");
        return;
    };
    let is_gather = |l: &&&str| l.contains(" AllGather ") || l.contains(" nccl (group) ");
    let forward: Vec<usize> = (0..loss).filter(|i| calls[*i].contains(" attention_forward")).collect();
    assert_eq!(forward.len(), 3, "layers");
    // Forward: the embedding and all layers up to the next one, or the head.
    for (layer, at) in forward.iter().enumerate() {
        let gathers = calls[..*at].iter().filter(is_gather).count();
        assert!(gathers >= layer + 3, "layer {layer}: {gathers} gathers before it");
    }
    // Backward: a layer is recomputed after the gather of the layer below has begun.
    let again = (loss..calls.len()).filter(|i| calls[*i].contains(" attention_forward")).take(2);
    let mut from = loss;
    for at in again {
        let gathers = calls[from..at].iter().filter(|l| l.contains(" AllGather ")).count();
        assert!(gathers >= 1, "a layer is computed again with nothing on its way");
        from = at;
    }
}

/// The death of one process ends all other processes at once, before the timeout, with an error that names
/// it.
#[test]
fn a_process_that_dies_ends_all() {
    if !devices(4) {
        return;
    }
    let w = split::world(FULL);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let cases = [
        (Signal::KILL, 2, "its process is gone", "parallel.timeout=600"),
        (Signal::STOP, 1, "within 20 s", "parallel.timeout=20"),
        (Signal::KILL, 0, "its process is gone", "parallel.timeout=600"),
    ];
    for (signal, lost, says, timeout) in cases.into_iter().take(few(2)) {
        let name = format!("lost-{}-{lost}", signal.as_raw());
        let long = ["parallel.zero=3", timeout, "run.save_every=2", "run.epochs=4000"];
        let mut processes = launch(&w, &[0, 1, 2, 3], 4, &args(&own(&name, 4), &long));
        split::wait_for_a_checkpoint(&w, &name, &mut processes);
        let gone = Pid::from_raw(processes[lost].id() as i32).expect("a number");
        kill_process(gone, signal).expect("signalled");
        let mut stays = Vec::new();
        for (rank, p) in processes.into_iter().enumerate() {
            if rank == lost {
                // Killed, or ended by the loss.
                stays.push(p);
                continue;
            }
            let r = ran(p.wait_with_output().expect("an end"));
            assert_eq!(r.code, 7, "rank {rank}: {}", r.err);
            let log = std::fs::read(w.path(&format!("{name}/rank-{rank}.log"))).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).into_owned() + &r.err;
            for words in [&*format!("rank {lost} of 4 on {host}: "), says, "its last collective: "] {
                assert!(log.contains(words), "rank {rank}: {words:?} is not in {log}");
            }
        }
        for mut p in stays {
            p.kill().and_then(|()| p.wait()).expect("gone");
        }
    }
}

/// Code of a rank in a test with threads, one device per thread.
type Does<'a> = dyn Fn(&dyn Comm, &Device) -> ft::Result<Vec<f32>> + Sync + 'a;

/// Runs a function on `n` ranks.
fn each(world: usize, timeout: Duration, f: &Does<'_>) -> Vec<ft::Result<Vec<f32>>> {
    let group = ranks::group(world, timeout);
    std::thread::scope(|s| {
        let start = |c: ranks::Threads| {
            s.spawn(move || {
                let device = cuda::open(c.rank()).expect("a device");
                let out = ranks::on_device(&c, &device, timeout, |c| f(c, &device));
                out.inspect_err(|e| c.fail(e))
            })
        };
        let all: Vec<_> = group.into_iter().map(start).collect();
        all.into_iter().map(|t| t.join().expect("no panic")).collect()
    })
}

const N: usize = 1003;
const SUM: CollectiveId = CollectiveId::unit("a test", 3);

/// Values of a rank with very different magnitudes, so that the order of a sum matters.
fn part(rank: usize) -> Vec<f32> {
    (0..N).map(|i| ((i * 37 + rank * 11) % 97) as f32 * 10f32.powi((i + 3 * rank) as i32 % 9 - 4)).collect()
}

fn sums(c: &dyn Comm, device: &Device) -> ft::Result<Vec<f32>> {
    let (rank, world) = (c.rank(), c.world());
    let at = |r: usize| N * r / world..N * (r + 1) / world;
    let ranges: Vec<_> = (0..world).map(at).collect();
    let tensor = |v: Vec<f32>| -> ft::Result<ft::kernel::Tensor> { Ok(Tensor::new(v, device)?.into()) };
    let to = tensor(part(7)[at(rank)].to_vec())?;
    // The second rank contributes nothing.
    let mine = if rank == 1 { None } else { Some(tensor(part(rank))?) };
    c.reduce_scatter(SUM, mine, at(rank), &to)?.wait()?;
    let all: ft::kernel::Tensor = Tensor::zeros(N, DType::F32, device)?.into();
    c.all_gather(SUM, to, &ranges, &all)?.wait()?;
    Ok(all.real()?.to_vec1()?)
}

#[test]
fn sums_are_in_rank_order() {
    if !devices(4) {
        return;
    }
    for world in [2, 3, 4] {
        let mut want = part(7);
        for r in (0..world).filter(|r| *r != 1) {
            want.iter_mut().zip(part(r)).for_each(|(to, x)| *to += x);
        }
        for got in each(world, LATE, &sums) {
            assert!(got.expect("a sum") == want, "{world} ranks");
        }
    }
}

/// One rank fails, or never arrives, while others wait for its contribution.
#[test]
fn a_thread_that_fails_releases_the_others() {
    if !devices(3) {
        return;
    }
    let fails = |c: &dyn Comm, device: &Device| {
        sums(c, device)?;
        match c.rank() {
            1 => Err(candle_core::Error::Msg("no room".into()).into()),
            _ => sums(c, device),
        }
    };
    let gave_up = AtomicUsize::new(0);
    let late = |c: &dyn Comm, device: &Device| {
        sums(c, device)?;
        if c.rank() == 1 {
            split::wait_until(&mut [], "end of the wait of the others", || gave_up.load(Relaxed) == 2);
            return sums(c, device);
        }
        sums(c, device).inspect_err(|_| _ = gave_up.fetch_add(1, Relaxed))
    };
    let cases: [(&Does<'_>, _, _); 2] = [(&fails, "no room", 600), (&late, "parallel.timeout", 20)];
    for (does, why, timeout) in cases {
        for (rank, got) in each(3, Duration::from_secs(timeout), does).into_iter().enumerate() {
            let e = got.expect_err("a rank is lost");
            if rank != 1 {
                let lost = e.of::<ranks::Error>().unwrap_or_else(|| panic!("{e}"));
                assert!(lost.rank == 1 && lost.at == SUM && e.to_string().contains(why), "{e}");
            }
        }
    }
}
