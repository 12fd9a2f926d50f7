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

/// Bytes of a device: the most that the run ever used of its pool on CUDA, the resident size now on the CPU.
pub fn device_bytes(device: &candle_core::Device) -> u64 {
    match crate::kernel::cuda::pool_bytes(device) {
        Some((_, high)) => high,
        None => host_bytes(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_process_has_a_size() {
        let (now, peak) = (super::host_bytes(), super::peak_host_bytes());
        assert!(now > 1 << 20 && peak >= now, "{now} {peak}");
    }
}
