//! The description of a step: its rows, and where the attention of each is computed.

/// Which tokens' attention [`Accelerator::attend`](super::Accelerator::attend) computes on this device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attend {
    /// All of it, here.
    Here,
    /// Here over the tokens from `from` on (a multiple of the page): the rest is attended elsewhere and merged in
    /// ([`Accelerator::merge`](super::Accelerator::merge)).
    From {
        /// First token whose page is on the device.
        from: usize,
    },
    /// All of it, here, over the tokens from `from` on (a multiple of the page): no row sees those before, in any layer that the step is
    /// for. So it is for layers with a window only.
    Since {
        /// First token whose page is on the device.
        from: usize,
    },
    /// Here over the tokens before `to` alone (a multiple of the page, at most the first row's position), whose pages
    /// are listed: a staging area's, as a rule. The result is partial; keys and values of the rows themselves are
    /// stored by another step of the same rows, with [`Attend::From`], and queries are what that one left. Its places in
    /// [`PartialRows`](super::PartialRows) are this one's if the same rows are partial in both: `to` = 0 makes a row so
    /// without a token.
    UpTo {
        /// First token that is not attended here.
        to: usize,
    },
    /// None of it: the rows are published, and their outputs collected.
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

    /// The first token that no row attends here, of rows that end before position `end`.
    pub fn end(self, end: usize) -> usize {
        match self {
            Attend::Here | Attend::From { .. } | Attend::Since { .. } => end,
            Attend::UpTo { to } => to,
            Attend::Elsewhere => 0,
        }
    }

    /// Whether attention's output is whole when it has been attended here.
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
    /// Its pages on the device: from that of token 0 on, or from that of [`Attend::From`]'s or [`Attend::Since`]'s token, all tokens of this
    /// step included; with [`Attend::UpTo`], those of the tokens before it. Not read with [`Attend::Elsewhere`].
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
    /// First rows of sequences, ascending: the only rows between which [`Accelerator::attend`](super::Accelerator::attend)
    /// may be divided into several calls. A sequence whose keys and values lie somewhere else than the others' (a
    /// staging area) needs a call of its own.
    pub cuts: &'a [usize],
    /// Base of the epochs that this step publishes.
    pub epoch: u32,
    /// Rows to launch for: at least the rows there are; the rest is padding.
    pub launch_rows: usize,
}
