//! A block: its warps run in turns, each until it waits or its time is over.

use super::Context;
use super::barrier::Barriers;
use super::step::Stop;
use super::warp::{Position, State, Warp};
use crate::fault::{FaultKind, Problem};
use crate::options::permutation;

/// Which warp went wrong, and how.
type Failure = (Option<usize>, Box<Problem>);

/// Runs a block to its end.
pub(super) fn run(cx: &mut Context<'_>, warps: &mut [Warp], position: &Position) -> Result<(), Failure> {
    cx.shared.forget();
    cx.bulk.clear();
    cx.stats.blocks += 1;
    for warp in warps.iter_mut() {
        warp.start(cx.kernel, position);
    }
    let order: Vec<u64> = permutation(cx.options.order, warps.len() as u64).collect();
    let mut barriers = Barriers::default();
    let mut spent = vec![0u64; warps.len()];
    loop {
        let mut progress = false;
        for number in &order {
            let number = *number as usize;
            if warps[number].state != State::Ready {
                continue;
            }
            progress = true;
            turn(cx, warps, number, &mut barriers, &mut spent[number])
                .map_err(|problem| (Some(number), problem))?;
        }
        if !progress {
            break;
        }
    }
    match warps.iter().position(|w| w.state != State::Done) {
        None if !cx.bulk.is_empty() => {
            let problem = "bulk copies that nobody waited for".into();
            Err((None, Problem::of_warp(FaultKind::Operand(problem))))
        }
        None => Ok(()),
        Some(stuck) => {
            // The warp is after the barrier that it waits at.
            warps[stuck].pc -= 1;
            Err((Some(stuck), Problem::of_warp(FaultKind::Deadlock(barriers.describe()))))
        }
    }
}

fn turn(
    cx: &mut Context<'_>,
    warps: &mut [Warp],
    number: usize,
    barriers: &mut Barriers,
    spent: &mut u64,
) -> Result<(), Box<Problem>> {
    loop {
        match warps[number].run(cx, spent)? {
            Stop::Slice => return Ok(()),
            Stop::Barrier { id, count, arrive } => {
                let all = warps.len() as u32;
                barriers.arrive(id, count, number, !arrive, all).map_err(Problem::of_warp)?;
                warps[number].pc += 1;
                if !arrive {
                    warps[number].state = State::Waiting(id);
                }
                release(cx, warps, barriers, id);
                if warps[number].state != State::Ready {
                    return Ok(());
                }
            }
            Stop::Done => {
                for id in barriers.of_all() {
                    release(cx, warps, barriers, id);
                }
                return Ok(());
            }
        }
    }
}

fn release(cx: &Context<'_>, warps: &mut [Warp], barriers: &mut Barriers, id: u32) {
    let excused = |w: &&Warp| w.state == State::Done && cx.options.excuse_exited;
    let expected = warps.len() - warps.iter().filter(excused).count();
    for warp in barriers.complete(id, expected as u32) {
        warps[warp].state = State::Ready;
    }
}
