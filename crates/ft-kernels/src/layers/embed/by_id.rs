//! Tokens grouped by id.

use std::collections::HashMap;

/// Tokens of a micro-batch grouped by id, in token order within an id.
#[derive(Clone, Debug)]
pub struct ById {
    /// Distinct ids in ascending order (`ids` values), start offsets of the groups
    /// (`ids + 1`), then token indices.
    pub(super) list: Vec<u32>,
    pub(super) ids: usize,
}

impl ById {
    /// Groups tokens by id.
    pub fn new(ids: &[u32]) -> Self {
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|i| ids[*i as usize]);
        let (mut list, mut starts) = (Vec::new(), Vec::new());
        for (at, i) in order.iter().enumerate() {
            let id = ids[*i as usize];
            if list.last() != Some(&id) {
                list.push(id);
                starts.push(at as u32);
            }
        }
        starts.push(ids.len() as u32);
        let count = list.len();
        list.extend(starts.into_iter().chain(order));
        Self { list, ids: count }
    }

    /// Whether an id exceeds a table of `rows` rows.
    pub(super) fn is_outside(&self, rows: usize) -> bool {
        self.list[..self.ids].last().is_some_and(|last| *last as usize >= rows)
    }

    /// Keeps only tokens with ids in `of`, and replaces each id by the index in `of`.
    pub(super) fn only(&self, of: &[u32]) -> Self {
        let places: HashMap<usize, u32> = of.iter().zip(0..).map(|(id, at)| (*id as usize, at)).collect();
        let mut kept: Vec<(u32, &[u32])> =
            self.each().filter_map(|(id, tokens)| Some((*places.get(&id)?, tokens))).collect();
        kept.sort_unstable_by_key(|(at, _)| *at);
        Self::of_groups(&kept)
    }

    /// The same without the tokens of `id`.
    pub fn without(&self, id: u32) -> Self {
        let all = self.each().map(|(id, tokens)| (id as u32, tokens));
        Self::of_groups(&all.filter(|(other, _)| *other != id).collect::<Vec<_>>())
    }

    /// Groups of tokens, by ascending id.
    fn of_groups(groups: &[(u32, &[u32])]) -> Self {
        let (mut list, mut starts, mut order) = (Vec::new(), vec![0], Vec::new());
        for (id, tokens) in groups {
            list.push(*id);
            order.extend_from_slice(tokens);
            starts.push(order.len() as u32);
        }
        list.extend(starts.into_iter().chain(order));
        Self { list, ids: groups.len() }
    }

    /// Distinct ids in ascending order with the token indices.
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let (ids, rest) = self.list.split_at(self.ids);
        let (starts, order) = rest.split_at(self.ids + 1);
        ids.iter().zip(starts.windows(2)).map(|(id, w)| (*id as usize, &order[w[0] as usize..w[1] as usize]))
    }
}
