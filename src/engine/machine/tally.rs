//! How often the rows of a step have chosen each of a layer's experts.

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct ChoiceTally {
    /// Rows.
    pub rows: usize,
    /// Of each expert, their choices of it.
    pub counts: Vec<u32>,
}

impl ChoiceTally {
    /// Of a layer of so many experts.
    pub fn of(experts: usize) -> ChoiceTally {
        ChoiceTally { rows: 0, counts: vec![0; experts] }
    }

    /// Adds the choices of `rows` rows.
    pub fn add(&mut self, rows: usize, ids: &[u32]) {
        self.rows += rows;
        ids.iter().for_each(|&e| self.counts[e as usize] += 1);
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.rows = 0;
        self.counts.fill(0);
    }
}
