//! Counts, texts and times in words.

use super::plot::grouped;
use std::time::{Duration, UNIX_EPOCH};

/// Last second of the year 9999.
const LATEST: u64 = 253_402_300_799;

/// A count with its noun.
pub fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{} {what}s", grouped(n)) }
}

/// Truncates a text, with a notice.
pub fn cut(text: &str, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some((at, _)) => format!("{} (cut: {} more bytes)", &text[..at], text.len() - at),
        None => text.to_string(),
    }
}

/// Formats a duration.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "unknown".into();
    }
    match seconds {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

/// Formats a Unix time as date and time in UTC.
pub fn moment(seconds: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_secs(seconds.min(LATEST));
    let text = humantime::format_rfc3339_seconds(time).to_string();
    format!("{} UTC", text[..16].replace('T', " "))
}
