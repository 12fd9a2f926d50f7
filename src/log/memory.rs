//! Memory that the process has used, as the system counts it.

/// Largest resident size of this process so far, in bytes; 0 where the system does not tell.
pub fn peak_host_bytes() -> u64 {
    status("VmHWM:")
}

/// Resident size of this process, in bytes.
pub fn host_bytes() -> u64 {
    status("VmRSS:")
}

fn status(key: &str) -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|t| {
            t.lines()
                .find_map(|l| l.strip_prefix(key)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
        })
        .map_or(0, |kb| kb * 1024)
}

/// Bytes of a device that are in use now, by all of the process; the resident size on the CPU.
pub fn device_bytes(device: &candle_core::Device) -> u64 {
    match device {
        candle_core::Device::Cpu => host_bytes(),
        _ => cuda_bytes(),
    }
}

#[cfg(feature = "cuda")]
fn cuda_bytes() -> u64 {
    candle_core::cuda_backend::cudarc::driver::result::mem_get_info()
        .map_or(0, |(free, total)| total.saturating_sub(free) as u64)
}

#[cfg(not(feature = "cuda"))]
fn cuda_bytes() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_process_has_a_size() {
        let (now, peak) = (super::host_bytes(), super::peak_host_bytes());
        assert!(now > 1 << 20 && peak >= now, "{now} {peak}");
    }
}
