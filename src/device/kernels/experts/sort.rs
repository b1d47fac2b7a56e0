//! Launching `cuda/experts_sort.cu`.

use super::super::abi::{ExpertGroup, ExpertSortParams};
use super::super::elementwise::launch;
use super::MOST_EXPERTS;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};

/// Bytes of an entry of a list of groups: u32 slot, first place, count, unused.
pub const GROUP_BYTES: usize = size_of::<ExpertGroup>();

/// Most choices (rows times k) of a launch: counts of chunks have 16 bits.
pub const MOST_CHOICES: usize = 65536;

/// Choices for which a small block is faster: its barriers wait for fewer warps.
const FEW_CHOICES: usize = 512;
const MOST_THREADS: usize = 1024;

/// Groups that `choices` choices of `experts` experts make at the most, of up to `tokens` each: an expert has one that is not full.
///
/// The most for up to so many choices and any number of tokens are those of all choices and 4 tokens.
pub fn group_capacity(choices: usize, experts: usize, tokens: usize) -> usize {
    experts.min(choices) + choices / tokens
}

/// Operands of [`sort`].
#[derive(Debug, Clone, Copy)]
pub struct SortArgs {
    /// u32 `[rows][used]`: experts, each below `experts`.
    pub ids: DevPtr,
    /// u32 `[experts]`: where an expert's matrices lie, or [`NONE`](super::NONE) where another device or the host computes it. NULL:
    /// expert e's are the e-th.
    pub slots: DevPtr,
    /// u32 `[rows][used]`: the place of each choice, or [`NONE`](super::NONE).
    pub places: DevPtr,
    /// u32 `[rows · used]`: the row of each place, [`NONE`](super::NONE) behind the last.
    pub rows_of: DevPtr,
    /// [`group_capacity`] entries of [`GROUP_BYTES`], 16-byte aligned: slot, first place, count. Behind the last group: zeros.
    pub groups: DevPtr,
    /// Rows.
    pub rows: usize,
    /// k.
    pub used: usize,
    /// E.
    pub experts: usize,
    /// M, most places of a group.
    pub tokens: usize,
}

/// How the block divides the choices: threads, warps that count, and the logarithm of the choices that each counts.
fn chunks(choices: usize, experts: usize) -> (usize, usize, usize) {
    let few = choices <= FEW_CHOICES;
    let threads = if few { experts.next_multiple_of(32).max(128) } else { MOST_THREADS };
    // Counts of all warps take at most 32 KiB.
    let warps = if few { 4 } else { (16384 / experts).min(MOST_THREADS / 32) };
    let chunk = choices.div_ceil(warps).next_power_of_two().max(32);
    (threads, choices.div_ceil(chunk), chunk.ilog2() as usize)
}

/// Enqueues the sorting of all choices by expert, in the order of rows and choices within each.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If there are more than [`MOST_CHOICES`] or [`MOST_EXPERTS`].
pub fn sort(rt: &dyn Runtime, lane: Lane, args: &SortArgs) -> Result<()> {
    let (experts, tokens, choices) = (args.experts, args.tokens, args.rows * args.used);
    assert!(
        choices <= MOST_CHOICES && (1..=MOST_EXPERTS).contains(&experts) && tokens > 0,
        "{} rows' {} choices of {experts} experts by {tokens}: at most {MOST_CHOICES} of {MOST_EXPERTS}",
        args.rows,
        args.used
    );
    assert!(args.groups.0.is_multiple_of(16), "groups of experts lie on 16 bytes");
    if choices == 0 {
        return Ok(());
    }
    let (threads, warps, chunk_log2) = chunks(choices, experts);
    let params = ExpertSortParams {
        ids: args.ids,
        slots: args.slots,
        places: args.places,
        rows: args.rows_of,
        groups: args.groups,
        choices: choices as u32,
        used: args.used as u32,
        experts: experts as u32,
        tokens: tokens as u32,
        capacity: group_capacity(choices, experts, tokens) as u32,
        warps: warps as u32,
        chunk_log2: chunk_log2 as u32,
        ..Default::default()
    };
    let shared = 4 * (4 * experts + 64) + 2 * experts * warps;
    launch(rt, lane, "experts_sort", [1, 1], threads, shared, &params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_counted_by_one_warp_whose_counts_fit() {
        for choices in [1, 8, 31, 33, 512, 513, 4096, 30000, MOST_CHOICES] {
            for experts in [1, 3, 60, 128, 256, 512, 513, MOST_EXPERTS] {
                let (threads, warps, chunk_log2) = chunks(choices, experts);
                let what =
                    format!("{choices} of {experts}: {threads} threads, {warps} warps of 2^{chunk_log2}");
                assert!(
                    threads >= experts && threads <= MOST_THREADS && threads.is_multiple_of(32),
                    "{what}"
                );
                assert!(warps >= 1 && warps <= threads / 32 && warps << chunk_log2 >= choices, "{what}");
                assert!((warps - 1) << chunk_log2 < choices && (5..16).contains(&chunk_log2), "{what}");
                assert!(4 * (4 * experts + 64) + 2 * experts * warps <= 49 << 10, "{what}");
            }
        }
    }

    #[test]
    fn a_list_has_room_for_every_sharing_of_the_choices() {
        for tokens in [4, 8, 64] {
            for counts in [vec![1, 1, 1], vec![9, 0, 0], vec![64, 65, 3], vec![4, 5, 8, 7], vec![1; 200]] {
                let (choices, experts): (usize, _) = (counts.iter().sum(), counts.len());
                let groups: usize = counts.iter().map(|c: &usize| c.div_ceil(tokens)).sum();
                assert!(groups <= group_capacity(choices, experts, tokens), "{counts:?} by {tokens}");
                assert!(group_capacity(choices, experts, tokens) <= group_capacity(choices, experts, 4));
            }
        }
    }
}
