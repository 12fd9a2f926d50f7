//! Target: a recipe.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "recipe.toml",
    bytes,
    "plan @/recipe.toml",
    &[0, 2, 3, 4, 8]
));
