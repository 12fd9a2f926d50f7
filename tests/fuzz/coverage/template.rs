//! Target: a chat template.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ft_coverage::run(
    "chat/chat_template.jinja",
    bytes,
    "data @/chat.toml",
    &[0, 2, 3, 4]
));
