//! Target: the metrics log of a run.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "run/metrics.jsonl",
    bytes,
    "report @/run",
    &[0, 2, 4, 5]
));
