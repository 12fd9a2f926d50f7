//! Workloads by micro-batch size.

use super::Workload;
use ft_recipe::Recipe;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Workloads by micro-batch size, measured once and cached.
pub struct Workloads<'a> {
    count: Box<dyn Fn(&Recipe) -> Workload + 'a>,
    counted: RefCell<BTreeMap<usize, Workload>>,
}

impl<'a> Workloads<'a> {
    /// Measures with `count`, called with a recipe and its `run.micro_rows`.
    pub fn new(count: impl Fn(&Recipe) -> Workload + 'a) -> Self {
        Self { count: Box::new(count), counted: RefCell::default() }
    }

    /// Workload for micro-batches of `rows` rows.
    pub fn of(&self, recipe: &Recipe, rows: usize) -> Workload {
        if let Some(w) = self.counted.borrow().get(&rows) {
            return *w;
        }
        let mut recipe = recipe.clone();
        recipe.run.micro_rows = rows.into();
        let w = (self.count)(&recipe);
        self.counted.borrow_mut().insert(rows, w);
        w
    }
}
