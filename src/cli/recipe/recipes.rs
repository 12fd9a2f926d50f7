//! `ft recipes`: recipes built into the binary.

use crate::cli::console::{print, print_wrapped};
use ft_recipe::{SHIPPED, Shipped};

/// Lists the shipped recipes, or prints the one called `name`, on stdout.
///
/// # Errors
/// An unknown name; a write error on stdout.
pub fn run(name: Option<&str>) -> Result<(), ft_base::Error> {
    match name {
        Some(name) => print(Shipped::find(name)?.text),
        None => print_wrapped(&list()),
    }
}

/// One line per recipe: name and title.
fn list() -> String {
    let width = SHIPPED.iter().map(|s| s.name.len()).max().unwrap_or(0);
    SHIPPED.iter().map(|s| format!("{:<width$}  {}\n", s.name, s.title())).collect()
}
