//! Results on stdout, errors on stderr.

use ft_base::error::Error;
use ft_base::terminal::{color_on_stderr, escape, tell_wrapped};

/// Prints errors; the first determines the exit code.
pub(super) fn exit(errors: &[Error]) -> u8 {
    for e in errors {
        tell_wrapped(&render(e, color_on_stderr()));
    }
    errors.first().map_or(0, |e| e.exit_code() as u8)
}

/// Formats `error: ...` with each hint on a line starting with `hint:`; the text is escaped before
/// coloring.
fn render(error: &Error, color: bool) -> String {
    let (red, cyan, reset) = if color { ("\x1b[1;31m", "\x1b[1;36m", "\x1b[0m") } else { ("", "", "") };
    if let Some(e) = error.of::<ft_recipe::Error>()
        && !e.problems().is_empty()
    {
        return e.render(color);
    }
    let mut out = format!("{red}error{reset}: ");
    for (i, line) in escape(&error.to_string()).lines().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        match line.trim_start().strip_prefix("hint:") {
            Some(hint) => out.push_str(&format!("{cyan}hint{reset}:{hint}")),
            None => out.push_str(line),
        }
    }
    out
}

/// Colors the headings of help, and `error` and `tip`, in the text of a page or an error of clap.
pub(super) fn color_headings(text: &str) -> String {
    let color = |line: &str| {
        let heading = line.split_inclusive(':').next().filter(|h| h.ends_with(':')).unwrap_or_default();
        let code = match heading {
            "error:" => "1;31",
            "  tip:" => "32",
            "Usage:" | "Arguments:" | "Commands:" | "Options:" => "1;4",
            _ => return line.to_string(),
        };
        format!("\x1b[{code}m{heading}\x1b[0m{}", &line[heading.len()..])
    };
    text.split_inclusive('\n').map(color).collect()
}

/// Prints a result on stdout. A closed pipe (`| head`) is no error.
pub(super) fn print(text: &str) -> ft_base::Result<()> {
    Ok(ft_recipe::Error::of_print(ft_base::terminal::print(text))?)
}

/// As [`print`], with lines broken between words on a terminal.
pub(super) fn print_wrapped(text: &str) -> ft_base::Result<()> {
    Ok(ft_recipe::Error::of_print(ft_base::terminal::print_wrapped(text))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::infer::usage;

    #[test]
    fn hints_stand_at_the_beginning_of_a_line() {
        let e = usage("a\n  hint: b\n  more\nhint: c");
        assert_eq!(render(&e, false), "error: a\nhint: b\n  more\nhint: c");
        assert!(render(&e, true).contains("\x1b[1;36mhint\x1b[0m: b"));
    }

    #[test]
    fn headings_of_help_and_errors_are_colored() {
        let text = "error: no 'a'\n\n  tip: b: c\n\nUsage: ft\n\nOptions:\n  -h  Usage: none\n\nNote: d\n";
        let colored = "\x1b[1;31merror:\x1b[0m no 'a'\n\n\x1b[32m  tip:\x1b[0m b: c\n\n\x1b[1;4mUsage:\x1b[0m ft\n\n\
            \x1b[1;4mOptions:\x1b[0m\n  -h  Usage: none\n\nNote: d\n";
        assert_eq!(color_headings(text), colored);
    }
}
