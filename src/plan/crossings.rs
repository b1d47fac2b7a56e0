//! Pinned memory that rows cross the link through, without lowering a program: a planner asks for thousands of placements.

use super::sizes::Sizes;
use crate::device::Mailbox;
use crate::program::{Phase, Placement, Side, Sublayer};

/// A kind of cargo: what [`crate::program::Cargo`] says, without numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Hidden,
    Delta,
    Qkv,
    Attn,
    Act,
    Choices,
    Share,
}

const KINDS: [What; 7] =
    [What::Hidden, What::Delta, What::Qkv, What::Attn, What::Act, What::Choices, What::Share];

/// For each kind of cargo, whether it crosses to the host and to the device.
type Crossings = [[bool; 2]; KINDS.len()];

/// What crosses in the programs of a placement whose tokens are all where their blocks keep them, and whether the host attends rows
/// that the device has made.
fn crossings(placement: &Placement) -> (Crossings, bool) {
    let (mut found, mut mailbox) = (Crossings::default(), false);
    for phase in [Phase::Prefill, Phase::Decode] {
        let mut cross = |what: What, to: Side| found[what as usize][to as usize] = true;
        let (mut hidden, mut delta) = (placement.embedding, None::<Side>);
        let bring =
            |hidden: &mut Side, delta: &mut Option<Side>, to: Side, cross: &mut dyn FnMut(What, Side)| {
                if *hidden != to {
                    cross(What::Hidden, to);
                } else if delta.is_some_and(|at| at != to) {
                    cross(What::Delta, to);
                }
                (*hidden, *delta) = (to, None);
            };
        for layer in &placement.layers {
            let policy = layer.policy(phase);
            let [qkv, out, up, down] = Sublayer::PRODUCTS.map(|s| policy.side(s));
            let attention = policy.side(Sublayer::Scores);
            bring(&mut hidden, &mut delta, qkv, &mut cross);
            let there = match (qkv, attention, out) {
                (Side::Device, Side::Host, out) => {
                    mailbox = true;
                    // Collected from the mailbox.
                    out
                }
                (Side::Host, Side::Device, _) => {
                    cross(What::Qkv, Side::Device);
                    Side::Device
                }
                (_, at, _) => at,
            };
            if there != out {
                cross(What::Attn, out);
            }
            delta = Some(out);
            bring(&mut hidden, &mut delta, up, &mut cross);
            if up != down {
                cross(What::Act, down);
            }
            if layer.is_divided() {
                cross(What::Choices, Side::Host);
                cross(What::Share, Side::Device);
            }
            delta = Some(down);
        }
        bring(&mut hidden, &mut delta, placement.head, &mut cross);
    }
    (found, mailbox)
}

/// Bytes of pinned memory for `rows` rows; `spilled`: some attend tokens on the host in part.
pub(super) fn pinned_rows(sizes: &Sizes, placement: &Placement, rows: u64, spilled: bool) -> u64 {
    let spec = &sizes.spec;
    let (d, q, kv) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64);
    let (found, mailbox) = crossings(placement);
    let areas = KINDS.iter().zip(found).map(|(what, to)| {
        let row = match what {
            What::Hidden | What::Delta => 4 * d,
            What::Qkv => 4 * (q + 2 * kv),
            What::Attn => 2 * q,
            What::Act => 2 * spec.d_ff as u64,
            What::Choices => 2 * d + 8 * spec.experts.as_ref().map_or(0, |e| e.used as u64),
            What::Share => 4 * d,
        };
        row * to.iter().filter(|&&crosses| crosses).count() as u64
    });
    // q, k, v there and results back; (m, s, o) of every head, f32.
    let mail = if mailbox || spilled { Mailbox::ELEMENT as u64 * (2 * q + 2 * kv) } else { 0 };
    let parts = if spilled { 4 * (q + 2 * spec.n_heads as u64) } else { 0 };
    rows * (areas.sum::<u64>() + mail + parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{
        Cargo, Group, Iteration, Kind, Kv, LayerPlacement, Policy, RequestId, Residence, Wants, lower,
    };

    /// Against what programs carry and publish.
    #[test]
    fn crossings_are_those_of_programs() {
        let mut cases = 0;
        for bits in 0..1u32 << 10 {
            let bit = |i: u32| bits >> i & 1 == 1;
            let policy = |a: [u32; 4]| {
                let [qkv, attention, out, ffn] = a.map(bit);
                Policy::from_bits([qkv, attention, attention, out, ffn, bit(8) ^ ffn])
            };
            let (prefill, decode) = (policy([0, 1, 2, 3]), policy([4, 5, 6, 7]));
            let layer = LayerPlacement {
                weights: Residence::Streamed,
                prefill,
                decode,
                kv: Side::Host,
                device_experts: 0,
            };
            let side = |host: bool| if host { Side::Host } else { Side::Device };
            let mut placement = Placement::all(side(bit(2)), 3, 0);
            placement.head = side(bit(5));
            placement.layers = vec![LayerPlacement::all(side(bit(1))), layer, layer];
            if bit(9) {
                // Its experts on both sides.
                let divided = LayerPlacement {
                    weights: Residence::Both,
                    device_experts: 1,
                    ..LayerPlacement::all(Side::Device)
                };
                placement.layers.insert(2, divided);
            }
            let (mut want, mut mailbox) = (Crossings::default(), false);
            for phase in [Phase::Prefill, Phase::Decode] {
                let request = RequestId { slot: 0, generation: 0 };
                let group = Group { request, phase, first: 64, tokens: 1, kv: Kv::Device, wants: Wants::All };
                for op in lower(&placement, &Iteration::serial(vec![group], true)).unwrap().ops {
                    match op.kind {
                        Kind::Carry { cargo, to } => {
                            let what = match cargo {
                                Cargo::Hidden { .. } => What::Hidden,
                                Cargo::Delta { .. } => What::Delta,
                                Cargo::Qkv => What::Qkv,
                                Cargo::Attn => What::Attn,
                                Cargo::Act => What::Act,
                                Cargo::Choices => What::Choices,
                                Cargo::Share => What::Share,
                            };
                            want[what as usize][to as usize] = true;
                        }
                        Kind::Publish { .. } => mailbox = true,
                        _ => {}
                    }
                }
            }
            assert_eq!(crossings(&placement), (want, mailbox), "{placement:?}");
            cases += 1;
        }
        assert_eq!(cases, 1024);
    }
}
