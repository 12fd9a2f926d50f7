//! Lines broken between words; counts with nouns.

use console::{Term, measure_text_width, strip_ansi_codes};

/// Columns assumed of a stream without a size.
const DEFAULT_WIDTH: usize = 80;

/// Columns of the terminal on stderr, or on stdout; 80 if unknown.
pub fn width() -> usize {
    let size = Term::stderr().size_checked().or_else(|| Term::stdout().size_checked());
    size.map_or(DEFAULT_WIDTH, |(_, columns)| usize::from(columns).max(1))
}

/// A count with its noun.
pub fn plural(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

/// Breaks the lines of `text` between words, at `width` columns. The rest of a line is indented by two
/// columns more than its start, or as the second of two columns. Source lines, behind a `|`, stay whole, and so does
/// a word longer than a line; color codes take no column.
pub fn wrap(text: &str, width: usize) -> String {
    text.split('\n').map(|line| wrap_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn wrap_line(line: &str, width: usize) -> String {
    if measure_text_width(line) <= width || is_source(line) {
        return line.to_string();
    }
    let indent = line.len() - line.trim_start_matches(' ').len();
    let hang = second_column(line, indent).filter(|column| *column <= width / 2);
    let rest = " ".repeat(hang.unwrap_or(indent + 2).min(width / 2));
    let mut out = line[..indent].to_string();
    let mut column = indent;
    let mut gap = 0;
    for word in line[indent..].split(' ') {
        let columns = measure_text_width(word);
        if gap > 0 && column + gap + columns > width && !word.is_empty() {
            out.push('\n');
            out.push_str(&rest);
            (column, gap) = (rest.len(), 0);
        }
        if !word.is_empty() {
            out.push_str(&" ".repeat(gap));
            out.push_str(word);
            column += gap + columns;
            gap = 0;
        }
        gap += 1;
    }
    out
}

/// Whether a line quotes a file: `12 | text`.
fn is_source(line: &str) -> bool {
    let plain = strip_ansi_codes(line);
    plain.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit()).starts_with('|')
}

/// Where the text behind the first gap of two spaces or more begins.
fn second_column(line: &str, indent: usize) -> Option<usize> {
    let gap = indent + line[indent..].find("  ")?;
    let text = line[gap..].trim_start_matches(' ');
    Some(measure_text_width(&line[..line.len() - text.len()]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_break_between_words() {
        let text = "warning: one two three\n  hint: four five six\nrow   2.0  7";
        let wrapped = "warning: one\n  two three\n  hint: four\n    five six\nrow   2.0  7";
        assert_eq!(wrap(text, 12), wrapped);
        assert_eq!(wrap("  run    train as said", 18), "  run    train as\n         said");
        assert_eq!(wrap("12 | a line of a file", 8), "12 | a line of a file");
        assert_eq!(wrap("a /very/long/path b", 8), "a\n  /very/long/path\n  b");
        assert_eq!(wrap("\x1b[1;31mred\x1b[0m one two", 8), "\x1b[1;31mred\x1b[0m one\n  two");
        assert_eq!(wrap("空の色 は 青い", 8), "空の色\n  は\n  青い");
    }

    proptest! {
        /// The words stay the same, and a line exceeds the width only by one word.
        #[test]
        fn wrapping_changes_no_word(text in "[a-e ]{0,80}", width in 1usize..40) {
            let wrapped = wrap(&text, width);
            let words = |s: &str| s.split_whitespace().map(String::from).collect::<Vec<_>>();
            prop_assert_eq!(words(&wrapped), words(&text));
            for line in wrapped.lines() {
                prop_assert!(line.len() <= width || words(line).len() <= 1, "{:?}", wrapped);
            }
        }
    }
}
