//! `ft bench --ranks`: rates of the links between ranks.

use super::measured::{Measured, kept, now};
use crate::train::Error;
use crate::train::job::device;
use candle_core::{DType, Device};
use ft_base::terminal::{hush, to_terminal};
use ft_engine::ranks::{self, CollectiveId, Comm, processes};
use ft_kernels::{Tensor, cuda};
use ft_plan::{Target, links::Link, probe};
use ft_recipe::{Device as DeviceName, Launch};
use serde_json::json;
use std::time::{Duration, Instant};

const GATHER: CollectiveId = CollectiveId::all("the timed gather");
const SUM: CollectiveId = CollectiveId::all("the timed sum");
const EXCHANGE: CollectiveId = CollectiveId::all("the timed exchange");
const AGREE: CollectiveId = CollectiveId::all("the measured rates");

/// f32 elements of a rank, as of a layer's weights: 64 MiB on a device, 1 MiB on the CPU.
const ELEMENTS: usize = 16 << 20;
const ON_CPU: usize = 1 << 18;
/// Gathers of one value each, timed together.
const FEW: usize = 16;
/// Delay of one rank before each of these on the CPU: the other ranks sleep meanwhile, as in a wait for arithmetic.
const LATE: Duration = Duration::from_millis(1);
/// Timed calls of each kind; the fastest counts, since other programs may use the machine too.
const CALLS: usize = 15;
/// Limit of a collective.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Times gathers, sums and pairwise exchanges between `ranks` ranks: the processes of a launcher, else threads with a
/// CUDA device each, or on the CPU. Keeps the rates for plans of such devices. `None` on ranks other than the first.
///
/// # Errors
/// Fewer devices or another number of processes than ranks; a lost rank.
pub fn run(ranks: usize) -> ft_base::Result<Option<Measured>> {
    Launch::check().map_err(Error::Usage)?;
    let (link, target, rank) = match Launch::of_env() {
        Some(launch) => among_processes(ranks, &launch)?,
        None => among_threads(ranks)?,
    };
    if rank > 0 {
        return Ok(None);
    }
    let words = |rate: f64| format!("{:.2} GB a second", rate / 1e9);
    let text = format!(
        "{} to each of {ranks} ranks in gathers, {} in sums, {} in exchanges, {:.0} microseconds a call ({})\n",
        words(link.gather),
        words(link.sum),
        words(link.exchange),
        link.call[0] * 1e6,
        link.source
    );
    Ok(Some(Measured { json: json!(link), text, kept: kept(link.save(target)) }))
}

fn among_processes(ranks: usize, launch: &Launch) -> ft_base::Result<(Link, Target, usize)> {
    if launch.rank > 0 {
        hush();
    }
    let (comm, _) = processes::join(Some(launch), TIMEOUT).inspect_err(|_| to_terminal())?;
    let outcome = (|| {
        if comm.world() != ranks {
            let why = format!("--ranks {ranks}: {} processes were started", comm.world());
            return Err(Error::Usage(format!("{why}\n  hint: --ranks {}", comm.world())).into());
        }
        let device = device(DeviceName::Auto)?;
        let link = ranks::on_device(&comm, &device, TIMEOUT, |comm| measure(comm, &device, "processes"))?;
        Ok((link, Target::of(&device), comm.rank()))
    })();
    match &outcome {
        Ok(_) => comm.leave(),
        Err(e) => comm.fail(e),
    }
    outcome
}

fn among_threads(ranks: usize) -> ft_base::Result<(Link, Target, usize)> {
    let count = cuda::count();
    if count > 0 && count < ranks {
        let why = format!("--ranks {ranks}: there are {count} CUDA devices, one for a rank");
        return Err(Error::Usage(format!("{why}\n  hint: CUDA_VISIBLE_DEVICES= measures the CPU")).into());
    }
    let open = |rank| if count == 0 { Ok(Device::Cpu) } else { cuda::open(rank).map_err(Error::Device) };
    let rank = |comm: ranks::Threads| -> ft_base::Result<(Link, Target)> {
        let device = open(comm.rank())?;
        let link = ranks::on_device(&comm, &device, TIMEOUT, |comm| measure(comm, &device, "threads"));
        link.map(|link| (link, Target::of(&device))).inspect_err(|e| comm.fail(e))
    };
    let outcomes: Vec<_> = std::thread::scope(|s| {
        let threads: Vec<_> =
            ranks::group(ranks, TIMEOUT).into_iter().map(|comm| s.spawn(move || rank(comm))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    });
    let mut first = None;
    for outcome in outcomes {
        first.get_or_insert(outcome?);
    }
    let (link, target) = first.ok_or_else(|| Error::Usage("--ranks is a number from 2 on".into()))?;
    Ok((link, target, 0))
}

/// Rates that the slowest rank sees.
fn measure(comm: &dyn Comm, device: &Device, how: &str) -> ft_base::Result<Link> {
    let (rank, world) = (comm.rank(), comm.world());
    let n = if device.is_cuda() { ELEMENTS } else { ON_CPU };
    let zeros = |n: usize| candle_core::Tensor::zeros(n, DType::F32, device).map(Tensor::from);
    let (mine, other) = (zeros(n)?, zeros(n)?);
    let ranges: Vec<_> = (0..world).map(|r| r * n..(r + 1) * n).collect();
    // into new memory, as weights for a visit
    let gather = || Ok(comm.all_gather(GATHER, mine.clone(), &ranges, &zeros(world * n)?)?.wait()?);
    let part = zeros(world * n)?;
    let part = || Some(part.clone());
    let sum = || Ok(comm.reduce_scatter(SUM, part(), ranges[rank].clone(), &other)?.wait()?);
    // each rank sends to the next one
    let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
    let (out, into) = ([(next, mine.clone())], [(before, other.clone())]);
    let exchange = || Ok(comm.exchange(EXCHANGE, &out, &into)?.wait()?);
    let (value, values) = (zeros(1)?, zeros(world)?);
    let single: Vec<_> = (0..world).map(|r| r..r + 1).collect();
    let late = if device.is_cuda() { Duration::ZERO } else { LATE };
    let words = || {
        (0..FEW).try_for_each(|turn| {
            let start = Instant::now();
            while turn % world == rank && start.elapsed() < late {
                std::hint::spin_loop();
            }
            Ok(comm.all_gather(GATHER, value.clone(), &single, &values)?.wait()?)
        })
    };
    let delays = late.as_secs_f64() * FEW as f64;
    let bytes = (n * DType::F32.size_in_bytes()) as f64;
    let own = [
        (world - 1) as f64 * bytes / fastest(comm, device, &gather)?,
        (world - 1) as f64 * bytes / fastest(comm, device, &sum)?,
        bytes / fastest(comm, device, &exchange)?,
        FEW as f64 / (fastest(comm, device, &words)? - delays).max(1e-9),
    ];
    let rates: Vec<[f64; 4]> = comm.all_gather_object(AGREE, &own)?;
    let [gather, sum, exchange, calls] =
        [0, 1, 2, 3].map(|i| rates.iter().map(|r| r[i]).fold(f64::INFINITY, f64::min));
    let now = now();
    let day = probe::day(&now);
    let source = format!("measured by ft bench --ranks {world} on {day}, {how}");
    Ok(Link { gather, sum, exchange, call: [1.0 / calls, 0.0], source })
}

/// Seconds of the fastest call, after one to warm up. All ranks begin each call together.
fn fastest(comm: &dyn Comm, device: &Device, call: &dyn Fn() -> ft_base::Result<()>) -> ft_base::Result<f64> {
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..=CALLS {
        device.synchronize()?;
        comm.barrier(AGREE)?;
        let start = Instant::now();
        call()?;
        device.synchronize()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.remove(0);
    Ok(times.into_iter().fold(f64::INFINITY, f64::min).max(f64::MIN_POSITIVE))
}
