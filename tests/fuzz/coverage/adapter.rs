//! Target: the config of an adapter.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "adapter/adapter_config.json",
    bytes,
    "eval @/model.toml --adapter @/adapter",
    &[0, 2, 4, 6]
));
