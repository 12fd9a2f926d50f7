//! Dates for chat templates (`strftime_now`). Uses UTC, so a run does not depend on the machine's time
//! zone.

use chrono::{DateTime, Utc};
use std::time::SystemTime;

/// Directives of Python's `strftime` that may stand in a template: numbers, and the rest.
const NUMBERS: &str = "YymdejHIMSCGgVUWuwkls";
const OTHERS: &str = "pPBbhAaFTDxXcrRnt%";
/// Directives that stay the same within a day; all others are of the time of day.
const DAILY: &str = "YymdejCGgVUWuwBbhAaFDxntZz%";
const CALL: &str = "strftime_now";

/// The current time in `format`; `Err` names an unknown directive.
pub(crate) fn now(format: &str) -> Result<String, String> {
    at(SystemTime::now().into(), format)
}

/// How often a template's text may change by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Changes {
    Never,
    Daily,
    /// Within a day, or nothing is known of the format.
    Always,
}

/// How often the calls of `strftime_now` in a template change its text. The template may stand in JSON.
pub(crate) fn changes(template: &str) -> Changes {
    let calls = template.match_indices(CALL).map(|(at, _)| of_call(&template[at + CALL.len()..]));
    calls.max().unwrap_or(Changes::Never)
}

fn of_call(behind: &str) -> Changes {
    let behind = behind.trim_start();
    let Some(argument) = behind.strip_prefix('(') else {
        // a question whether the function is there, or another use
        return if behind.starts_with("is ") { Changes::Never } else { Changes::Always };
    };
    let argument = argument.trim_start().trim_start_matches('\\');
    let Some(quote) = argument.chars().next().filter(|c| matches!(c, '\'' | '"')) else {
        return Changes::Always;
    };
    let Some((format, rest)) = argument[1..].split_once(quote) else { return Changes::Always };
    let format = format.trim_end_matches('\\');
    let daily = !format.contains('\\')
        && directives(format).all(|(_, directive)| directive.is_some_and(|c| DAILY.contains(c)))
        && rest.trim_start().starts_with(')');
    if daily { Changes::Daily } else { Changes::Always }
}

/// The directives of a format: whether without padding, and the letter.
fn directives(format: &str) -> impl Iterator<Item = (bool, Option<char>)> {
    let mut rest = format;
    std::iter::from_fn(move || {
        let (_, directive) = rest.split_once('%')?;
        let bare = directive.strip_prefix('-');
        let mut chars = bare.unwrap_or(directive).chars();
        let letter = chars.next();
        rest = chars.as_str();
        Some((bare.is_some(), letter))
    })
}

fn at(time: DateTime<Utc>, format: &str) -> Result<String, String> {
    let (mut out, mut rest) = (String::new(), format);
    while let Some((text, directive)) = rest.split_once('%') {
        // glibc extension: no zero padding
        let bare = directive.strip_prefix('-');
        let mut chars = bare.unwrap_or(directive).chars();
        let spec = match chars.next() {
            // Python's time is without a zone
            Some('Z' | 'z') => String::new(),
            Some('f') if bare.is_none() => "%6f".into(),
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
    fn dates_of_known_moments_are_formatted() {
        // `date -u -d @1721952000`: Fri Jul 26 00:00:00 UTC 2024
        assert_eq!(text(1_721_952_000, "%d %b %Y").as_deref(), Ok("26 Jul 2024"));
        assert_eq!(text(1_721_952_000, "%A, %B %-d, %I %p %j").as_deref(), Ok("Friday, July 26, 12 AM 208"));
        assert_eq!(text(951_782_400 + 3661, "%F %T").as_deref(), Ok("2000-02-29 01:01:01"));
        assert_eq!(text(0, "%a %y%%").as_deref(), Ok("Thu 70%"));
        assert!(text(0, "%Q").is_err() && text(0, "%").is_err());
    }

    /// Expected values from Python: `datetime.fromtimestamp(s, timezone.utc).replace(tzinfo=None).strftime(format)`
    /// where the local time zone is UTC.
    #[test]
    fn directives_are_those_of_python() {
        let all = "%Y %y %m %d %e %j %H %I %M %S %p %B %b %h %A %a %F %T %Z %z %% %c|%x|%X|%D|%r|%R|%C|%G-%V|%g|%u|%w|%U|%W|%k|%l|%P|%s|%f|%n%t";
        let bare = "%-Y %-y %-m %-d %-e %-j %-H %-I %-M %-S %-p %-B %-b %-h %-A %-a %-F %-T";
        for (seconds, expected, without_padding) in [
            (
                0,
                "1970 70 01 01  1 001 00 12 00 00 AM January Jan Jan Thursday Thu 1970-01-01 00:00:00   % Thu Jan  1 00:00:00 1970|01/01/70|00:00:00|01/01/70|12:00:00 AM|00:00|19|1970-01|70|4|4|00|00| 0|12|am|0|000000|\n\t",
                "1970 70 1 1 1 1 0 12 0 0 AM January Jan Jan Thursday Thu 1970-01-01 00:00:00",
            ),
            (
                951_786_061,
                "2000 00 02 29 29 060 01 01 01 01 AM February Feb Feb Tuesday Tue 2000-02-29 01:01:01   % Tue Feb 29 01:01:01 2000|02/29/00|01:01:01|02/29/00|01:01:01 AM|01:01|20|2000-09|00|2|2|09|09| 1| 1|am|951786061|000000|\n\t",
                "2000 0 2 29 29 60 1 1 1 1 AM February Feb Feb Tuesday Tue 2000-02-29 01:01:01",
            ),
            (
                1_721_952_000,
                "2024 24 07 26 26 208 00 12 00 00 AM July Jul Jul Friday Fri 2024-07-26 00:00:00   % Fri Jul 26 00:00:00 2024|07/26/24|00:00:00|07/26/24|12:00:00 AM|00:00|20|2024-30|24|5|5|29|30| 0|12|am|1721952000|000000|\n\t",
                "2024 24 7 26 26 208 0 12 0 0 AM July Jul Jul Friday Fri 2024-07-26 00:00:00",
            ),
            (
                1_735_693_323,
                "2025 25 01 01  1 001 01 01 02 03 AM January Jan Jan Wednesday Wed 2025-01-01 01:02:03   % Wed Jan  1 01:02:03 2025|01/01/25|01:02:03|01/01/25|01:02:03 AM|01:02|20|2025-01|25|3|3|00|00| 1| 1|am|1735693323|000000|\n\t",
                "2025 25 1 1 1 1 1 1 2 3 AM January Jan Jan Wednesday Wed 2025-01-01 01:02:03",
            ),
            (
                4_102_444_799,
                "2099 99 12 31 31 365 23 11 59 59 PM December Dec Dec Thursday Thu 2099-12-31 23:59:59   % Thu Dec 31 23:59:59 2099|12/31/99|23:59:59|12/31/99|11:59:59 PM|23:59|20|2099-53|99|4|4|52|52|23|11|pm|4102444799|000000|\n\t",
                "2099 99 12 31 31 365 23 11 59 59 PM December Dec Dec Thursday Thu 2099-12-31 23:59:59",
            ),
        ] {
            assert_eq!(text(seconds, all).as_deref(), Ok(expected));
            assert_eq!(text(seconds, bare).as_deref(), Ok(without_padding));
        }
    }

    #[test]
    fn templates_with_the_time_of_day_are_recognized() {
        for directive in ["-H:%M", "T", "X", "c", "s", "S", "p", "r", "R", "k", "f", "I", "F %T", "Q", "E"] {
            let template = format!("{{% set d = strftime_now('%{directive}') %}}");
            assert_eq!(changes(&template), Changes::Always, "{directive}");
        }
        assert_eq!(changes("{% set d = strftime_now(\"%d %b %Y, 100%%\") %}"), Changes::Daily);
        assert_eq!(
            changes(
                r#"{"chat_template": "{%- if strftime_now is defined %}{{ strftime_now(\"%-d/%m\") }}"}"#
            ),
            Changes::Daily
        );
        for alias in [
            "{% set f = strftime_now %}",
            "{{ strftime_now(format) }}",
            "{{ strftime_now('%d' ~ h) }}",
            r#"{{ strftime_now('\x25H') }}"#,
        ] {
            assert_eq!(changes(alias), Changes::Always, "{alias}");
        }
        assert_eq!(changes("{% if strftime_now is defined %}{% endif %}%H"), Changes::Never);
    }
}
