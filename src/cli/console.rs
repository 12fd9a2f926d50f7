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
}
