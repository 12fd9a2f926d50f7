//! `ft recipes`: recipes built into the binary.

use crate::cli::console::print;
use ft_recipe::{SHIPPED, Shipped};

/// Lists the shipped recipes, or prints the one called `name`, on stdout.
///
/// # Errors
/// An unknown name; a write error on stdout.
pub fn run(name: Option<&str>) -> Result<(), ft_base::Error> {
    print(&match name {
        Some(name) => Shipped::find(name)?.text.to_string(),
        None => list(),
    })
}

/// One line per recipe: name and title.
fn list() -> String {
    let width = SHIPPED.iter().map(|s| s.name.len()).max().unwrap_or(0);
    SHIPPED.iter().map(|s| format!("{:<width$}  {}\n", s.name, s.title())).collect()
}
