//! Target: the config of a model.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "model/config.json",
    bytes,
    "plan @/model.toml model.weights=random",
    &[0, 2, 3, 4, 8]
));
