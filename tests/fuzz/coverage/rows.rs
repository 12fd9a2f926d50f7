//! Target: a data file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "chat.jsonl",
    bytes,
    "data @/chat.toml",
    &[0, 2, 3, 4]
));
