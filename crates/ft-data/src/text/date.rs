//! Dates for chat templates (`strftime_now`). Uses UTC, so a run does not depend on the machine's time
//! zone.

use chrono::{DateTime, Utc};
use std::time::SystemTime;

/// Directives of Python's `strftime` that may stand in a template: numbers, and the rest.
const NUMBERS: &str = "YymdejHIMS";
const OTHERS: &str = "pBbhAaFTZz%";
/// Directives with the time of day.
const TIMES: [char; 6] = ['H', 'I', 'M', 'S', 'T', 'p'];

/// The current time in `format`; `Err` names an unknown directive.
pub(crate) fn now(format: &str) -> Result<String, String> {
    at(SystemTime::now().into(), format)
}

/// Whether a text contains a directive with the time of day.
pub(crate) fn has_time_of_day(text: &str) -> bool {
    text.split('%').skip(1).any(|t| t.trim_start_matches('-').starts_with(TIMES))
}

fn at(time: DateTime<Utc>, format: &str) -> Result<String, String> {
    let (mut out, mut rest) = (String::new(), format);
    while let Some((text, directive)) = rest.split_once('%') {
        // glibc extension: no zero padding
        let bare = directive.strip_prefix('-');
        let mut chars = bare.unwrap_or(directive).chars();
        let spec = match chars.next() {
            Some(c) if NUMBERS.contains(c) && bare.is_some() => format!("%-{c}"),
            Some(c) if NUMBERS.contains(c) || OTHERS.contains(c) => format!("%{c}"),
            other => {
                let name = other.map(String::from).unwrap_or_default();
                return Err(format!("strftime_now does not know the directive %{name}"));
            }
        };
        out += &format!("{text}{}", time.format(&spec));
        rest = chars.as_str();
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(seconds: i64, format: &str) -> Result<String, String> {
        at(DateTime::from_timestamp(seconds, 0).unwrap(), format)
    }

    #[test]
    fn known_moments() {
        // `date -u -d @1721952000`: Fri Jul 26 00:00:00 UTC 2024
        assert_eq!(text(1_721_952_000, "%d %b %Y").as_deref(), Ok("26 Jul 2024"));
        assert_eq!(text(1_721_952_000, "%A, %B %-d, %I %p %j").as_deref(), Ok("Friday, July 26, 12 AM 208"));
        assert_eq!(text(951_782_400 + 3661, "%F %T").as_deref(), Ok("2000-02-29 01:01:01"));
        assert_eq!(text(0, "%a %y%%").as_deref(), Ok("Thu 70%"));
        assert!(text(0, "%Q").is_err() && text(0, "%").is_err() && text(0, "%c").is_err());
    }

    /// Expected values from Python: `datetime.fromtimestamp(s, timezone.utc).strftime(format)`.
    #[test]
    fn directives_are_those_of_python() {
        let all = "%Y %y %m %d %e %j %H %I %M %S %p %B %b %h %A %a %F %T %Z %z %%";
        let bare = "%-Y %-y %-m %-d %-e %-j %-H %-I %-M %-S %-p %-B %-b %-h %-A %-a %-F %-T";
        for (seconds, expected, without_padding) in [
            (
                0,
                "1970 70 01 01  1 001 00 12 00 00 AM January Jan Jan Thursday Thu 1970-01-01 00:00:00 UTC +0000 %",
                "1970 70 1 1 1 1 0 12 0 0 AM January Jan Jan Thursday Thu 1970-01-01 00:00:00",
            ),
            (
                951_786_061,
                "2000 00 02 29 29 060 01 01 01 01 AM February Feb Feb Tuesday Tue 2000-02-29 01:01:01 UTC +0000 %",
                "2000 0 2 29 29 60 1 1 1 1 AM February Feb Feb Tuesday Tue 2000-02-29 01:01:01",
            ),
            (
                1_721_952_000,
                "2024 24 07 26 26 208 00 12 00 00 AM July Jul Jul Friday Fri 2024-07-26 00:00:00 UTC +0000 %",
                "2024 24 7 26 26 208 0 12 0 0 AM July Jul Jul Friday Fri 2024-07-26 00:00:00",
            ),
            (
                1_735_693_323,
                "2025 25 01 01  1 001 01 01 02 03 AM January Jan Jan Wednesday Wed 2025-01-01 01:02:03 UTC +0000 %",
                "2025 25 1 1 1 1 1 1 2 3 AM January Jan Jan Wednesday Wed 2025-01-01 01:02:03",
            ),
            (
                4_102_444_799,
                "2099 99 12 31 31 365 23 11 59 59 PM December Dec Dec Thursday Thu 2099-12-31 23:59:59 UTC +0000 %",
                "2099 99 12 31 31 365 23 11 59 59 PM December Dec Dec Thursday Thu 2099-12-31 23:59:59",
            ),
        ] {
            assert_eq!(text(seconds, all).as_deref(), Ok(expected));
            assert_eq!(text(seconds, bare).as_deref(), Ok(without_padding));
        }
    }

    #[test]
    fn the_time_of_day_is_seen_in_a_template() {
        assert!(has_time_of_day("{{ strftime_now('%-H:%M') }}") && has_time_of_day("%F %T"));
        assert!(!has_time_of_day("{% set d = strftime_now('%d %b %Y') %}"));
    }
}
