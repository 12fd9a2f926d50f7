//! Dates for chat templates (`strftime_now`). Uses UTC, so a run does not depend on the machine's time
//! zone.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The current time in `format`; `Err` names an unknown directive.
pub(super) fn now(format: &str) -> Result<String, String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    at(seconds, format)
}

/// The time `seconds` after 1970-01-01 in `format`.
fn at(seconds: u64, format: &str) -> Result<String, String> {
    let days = (seconds / 86_400) as i64;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    // 1970-01-01 was a Thursday
    let weekday = ((days + 3) % 7) as usize;
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc extension: no zero padding
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let pad = |n: u64, width: usize| if bare { n.to_string() } else { format!("{n:0width$}") };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => pad((year % 100) as u64, 2),
            Some('m') => pad(month as u64, 2),
            Some('d') => pad(day as u64, 2),
            Some('e') => format!("{day:>2}"),
            Some('j') => pad((days - civil_days(year, 1, 1) + 1) as u64, 3),
            Some('H') => pad(hour, 2),
            Some('I') => pad(hour12, 2),
            Some('M') => pad(minute, 2),
            Some('S') => pad(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('B') => MONTHS[month - 1].to_string(),
            Some('b' | 'h') => MONTHS[month - 1][..3].to_string(),
            Some('A') => DAYS[weekday].to_string(),
            Some('a') => DAYS[weekday][..3].to_string(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_string(),
            Some('z') => "+0000".to_string(),
            Some('%') => "%".to_string(),
            other => {
                let name = other.map(String::from).unwrap_or_default();
                return Err(format!("strftime_now does not know the directive %{name}"));
            }
        });
    }
    Ok(out)
}

/// Converts days since 1970-01-01 to year, month and day, both from 1 (Hinnant, "chrono-compatible
/// low-level date algorithms").
fn civil(days: i64) -> (i64, usize, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month as usize, doy - (153 * mp + 2) / 5 + 1)
}

/// The inverse of [`civil`].
fn civil_days(year: i64, month: i64, day: i64) -> i64 {
    let y = year - i64::from(month <= 2);
    let (era, yoe) = (y.div_euclid(400), y.rem_euclid(400));
    let doy = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        // `date -u -d @1721952000`: Fri Jul 26 00:00:00 UTC 2024
        assert_eq!(at(1_721_952_000, "%d %b %Y").as_deref(), Ok("26 Jul 2024"));
        assert_eq!(at(1_721_952_000, "%A, %B %-d, %I %p %j").as_deref(), Ok("Friday, July 26, 12 AM 208"));
        assert_eq!(at(951_782_400 + 3661, "%F %T").as_deref(), Ok("2000-02-29 01:01:01"));
        assert_eq!(at(0, "%a %y%%").as_deref(), Ok("Thu 70%"));
        assert!(at(0, "%Q").is_err() && at(0, "%").is_err());
    }
}
