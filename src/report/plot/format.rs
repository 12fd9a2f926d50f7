//! Numbers, lists, texts and times in words.

use std::time::{Duration, UNIX_EPOCH};

/// Last second of the year 9999.
const LATEST: u64 = 253_402_300_799;

/// Formats with four significant digits; "none" if not finite.
pub fn short(y: f64) -> String {
    if !y.is_finite() {
        return "none".into();
    }
    let size = y.abs();
    if y == 0.0 {
        "0".into()
    } else if !(1e-3..1e6).contains(&size) {
        format!("{y:.3e}")
    } else {
        let decimals = (3 - size.log10().floor() as i32).max(0) as usize;
        format!("{y:.decimals$}")
    }
}

/// Formats an integer with thin spaces between thousands.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 2);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('\u{2009}');
        }
        out.push(d);
    }
    out
}

/// Up to six numbers, e.g. "1, 2, 3, 4, 5, 6 and 4 more".
pub fn first_few(numbers: &[u64]) -> String {
    let shown: Vec<String> = numbers.iter().take(6).map(u64::to_string).collect();
    match numbers.len() {
        n if n > 6 => format!("{} and {} more", shown.join(", "), n - 6),
        _ => shown.join(", "),
    }
}

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
