//! The feed-forward of a mixture of experts: which experts each row uses, their products, and the sum of what they give.
//!
//! | file | launches | kernels |
//! |---|---|---|
//! | `route` | [`route_logits`], [`choose`] | `experts_route.cu` |
//! | `sort` | [`sort`] | `experts_sort.cu` |
//! | `rows` | [`gather`], [`combine`] | `experts_rows.cu` |
//! | `product` | [`experts_product`] | `experts_gemv.cu`, `experts_gemv_quant.cu`, `experts_dense.cu`, `experts_quant.cu` |
//!
//! ```text
//! x ─► logits ─► choose ─► sort ─► gather ─► gate and up, activation ─► down ─► combine
//!                  k ids    │ places, rows, groups                              Σ_j w_j·out[place_j] + σ(g)·shared
//!                           └ by expert, at most M rows each
//! ```
//! The host never sees a choice. Grids follow from the number of rows alone, so that the launches can be recorded: the list of
//! groups has room for the worst case ([`group_capacity`]), and blocks of groups without rows end at once.

mod product;
mod route;
mod rows;
mod sort;

pub use self::product::{ExpertMatrices, ExpertProductArgs, experts_product, most_tokens};
pub use self::route::{ChooseArgs, MOST_EXPERTS, RouteArgs, choose, route_logits};
pub use self::rows::{CombineArgs, GatherArgs, combine, gather};
pub use self::sort::{GROUP_BYTES, MOST_CHOICES, SortArgs, group_capacity, sort};

/// No place of a choice, no row of a place, no matrices of an expert.
pub const NONE: u32 = super::abi::EXPERT_NONE;

use super::product::choose::{GEMV_ROWS, GROUP_ROWS, row_bucket};

/// M, the most rows of a group: what [`sort`] makes and [`experts_product`] is planned for. The same for all rows of a bucket; about
/// as many as an expert has if all are chosen alike.
///
/// A device may have no kernel for so many: see [`most_tokens`].
pub fn tokens_of(rows: usize, used: usize, experts: usize) -> usize {
    if rows <= GEMV_ROWS {
        return GEMV_ROWS;
    }
    let each = (row_bucket(rows) * used).div_ceil(experts.max(1));
    each.next_power_of_two().clamp(8, GROUP_ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_grow_with_the_rows_of_an_expert() {
        let of = |rows| tokens_of(rows, 8, 128);
        assert_eq!([1, 4, 5, 64, 128, 129, 256, 400, 512, 4096].map(of), [4, 4, 8, 8, 8, 16, 16, 32, 32, 64]);
        assert_eq!([1, 4, 5, 16, 128].map(|rows| tokens_of(rows, 2, 8)), [4, 4, 8, 8, 32]);
    }

    #[test]
    fn rows_of_a_bucket_have_the_same_groups() {
        for rows in 1..2048 {
            for (used, experts) in [(8, 128), (2, 8), (4, 60), (3, 3)] {
                let of = |rows| tokens_of(rows, used, experts);
                assert_eq!(of(rows), of(row_bucket(rows)), "{rows} rows, {used} of {experts}");
                assert!(of(rows) <= of(rows + 1), "{rows} rows, {used} of {experts}");
            }
        }
    }
}
