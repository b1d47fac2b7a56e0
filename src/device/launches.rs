//! Kernels that an operation takes on the device, each launched after the one before: as the launchers of `device/kernels/` have
//! them for decode rows. Prefill takes one less for its attention.

/// See the [module](self).
#[derive(Debug)]
pub enum Launches {}

impl Launches {
    /// Embedding rows.
    pub const EMBED: u32 = 1;
    /// The norm, and the product with the three matrices as one. (Rows that stay at home are finished by what appends them.)
    pub const PROJECT: u32 = 2;
    /// Rotation, keys and values into their pages.
    pub const APPEND: u32 = 1;
    /// The parts of long sequences, and their merge.
    pub const ATTEND: u32 = 2;
    /// The output projection.
    pub const OUT: u32 = 1;
    /// The norm, and the product with gate and up.
    pub const UP: u32 = 2;
    /// The product with the feed-forward's last matrix.
    pub const DOWN: u32 = 1;
    /// Of experts: the norm, the router's logits, the choice, its order, the rows of each expert, and their product with gate and up.
    pub const EXPERTS_UP: u32 = 6;
    /// Of experts, the part of it up to the choice.
    pub const EXPERTS_ROUTE: u32 = 3;
    /// Of experts: the product with their last matrices, and its sum.
    pub const EXPERTS_DOWN: u32 = 2;
    /// The last norm, and the product with the head.
    pub const HEAD: u32 = 2;
    /// The likeliest tokens of each row, by parts of the vocabulary, and the likeliest of these.
    pub const PICK: u32 = 2;
    /// Rows added to rows.
    pub const ADD: u32 = 1;
    /// What sampling needs of each row.
    pub const TOP: u32 = 1;

    /// The halves of a feed-forward whose experts are divided: the choice, and the rest.
    pub const DIVIDED: [u32; 2] =
        [Launches::EXPERTS_ROUTE, Launches::EXPERTS_UP - Launches::EXPERTS_ROUTE + Launches::EXPERTS_DOWN];

    /// The first half of a feed-forward.
    pub fn up(experts: bool) -> u32 {
        if experts { Launches::EXPERTS_UP } else { Launches::UP }
    }

    /// The second half.
    pub fn down(experts: bool) -> u32 {
        if experts { Launches::EXPERTS_DOWN } else { Launches::DOWN }
    }
}
