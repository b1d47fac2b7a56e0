//! The description of a step: its rows, and where the attention of each is computed.

/// Which tokens' attention [`RowOp::Attend`](super::RowOp::Attend) computes on this device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attend {
    /// Attention over all tokens, on this device.
    Here,
    /// This device attends the tokens from `from` on (the beginning of a page). Another device attends the rest, and
    /// its result is merged in ([`RowOp::Merge`](super::RowOp::Merge)).
    From {
        /// First token whose page is on the device.
        from: usize,
    },
    /// This device attends the tokens from `from` on (the beginning of a page), and that is all of the attention: no
    /// row sees earlier tokens in any layer that the step is for. So this is for layers with a window only.
    Since {
        /// First token whose page is on the device.
        from: usize,
    },
    /// This device attends only the tokens before `to` (the beginning of a page, at most the first row's position),
    /// whose pages are listed; usually they lie in a staging area. The result is partial. Another step of the same
    /// rows, with [`Attend::From`], stores the keys and values of the rows themselves, and leaves the queries that this
    /// one reads. Both steps use the same places in [`PartialRows`](super::PartialRows) if the same rows are partial in
    /// both: `to` = 0 makes a row partial without attending any token.
    UpTo {
        /// First token that this device does not attend.
        to: usize,
    },
    /// Attention is computed on the host alone: the rows are published, and their outputs collected.
    Elsewhere,
}

impl Attend {
    /// First token whose page [`StepSeq::pages`] lists.
    pub fn first_token(self) -> usize {
        match self {
            Attend::From { from } | Attend::Since { from } => from,
            Attend::Here | Attend::UpTo { .. } | Attend::Elsewhere => 0,
        }
    }

    /// The end of the tokens that this device attends, for rows that end before position `end`.
    pub fn end(self, end: usize) -> usize {
        match self {
            Attend::Here | Attend::From { .. } | Attend::Since { .. } => end,
            Attend::UpTo { to } => to,
            Attend::Elsewhere => 0,
        }
    }

    /// Whether this device's attention alone gives the whole output.
    pub fn is_whole(self) -> bool {
        matches!(self, Attend::Here | Attend::Since { .. })
    }

    /// Whether the rows store their keys and values in the listed pages.
    pub fn stores(self) -> bool {
        matches!(self, Attend::Here | Attend::From { .. } | Attend::Since { .. })
    }
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct StepSeq<'a> {
    /// The sequence's pages on the device: from the page of token 0, or of [`Attend::From`]'s or [`Attend::Since`]'s
    /// token, up to the last token of this step; with [`Attend::UpTo`], the pages of the tokens before `to`. Not read
    /// with [`Attend::Elsewhere`].
    pub pages: &'a [u32],
    /// Position of the first row.
    pub first_pos: usize,
    /// First row.
    pub row0: usize,
    /// Rows.
    pub n_rows: usize,
    /// Where attention happens.
    pub attend: Attend,
}

/// What a step computes.
#[derive(Debug, Clone, Copy)]
pub struct StepDesc<'a> {
    /// Sequences in the order of their rows, which follow one another from row 0 on.
    pub seqs: &'a [StepSeq<'a>],
    /// One per row.
    pub tokens: &'a [u32],
    /// Rows that want logits, ascending.
    pub logit_rows: &'a [u32],
    /// First rows of sequences, ascending: the only rows between which [`RowOp::Attend`](super::RowOp::Attend)
    /// may be divided into several calls. A sequence whose keys and values lie in another place than those of the
    /// others (a staging area) needs a call of its own.
    pub cuts: &'a [usize],
    /// Base of the epochs that this step publishes.
    pub epoch: u32,
    /// Number of rows to launch for, at least the number of rows in the step; the rest is padding.
    pub launch_rows: usize,
}
