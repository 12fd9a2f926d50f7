//! Target: a safetensors file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "model/model.safetensors",
    bytes,
    "eval @/model.toml",
    &[0, 4, 6]
));
