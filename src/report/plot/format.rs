//! Numbers and lists in words.

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
