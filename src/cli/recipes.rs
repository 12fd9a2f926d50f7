//! `ft recipes`: the recipes that are built into the binary.

use ft_recipe::{SHIPPED, Shipped};

/// The verb: lists the shipped recipes, or prints the one called `name`, on stdout.
///
/// # Errors
/// A name that no shipped recipe has; a stdout that takes no more.
pub fn run(name: Option<&str>) -> Result<(), ft_base::Error> {
    super::print(&match name {
        Some(name) => Shipped::find(name)?.text.to_string(),
        None => list(),
    })
}

/// One line a recipe: its name, and what it is.
fn list() -> String {
    let width = SHIPPED.iter().map(|s| s.name.len()).max().unwrap_or(0);
    SHIPPED.iter().map(|s| format!("{:<width$}  {}\n", s.name, s.title())).collect()
}
