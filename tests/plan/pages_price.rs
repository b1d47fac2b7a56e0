//! What keys and values of eight times the device's capacity cost by the roofline of known machines: attended by the CPU in place,
//! streamed under the layers before, or brought back whole before each step.

use tandem::model::synth;
use tandem::plan::{OpCosts, Roofline, Sizes, hardware};
use tandem::program::{
    Far, Group, Iteration, Kv, MoveRequest, Phase, Placement, RequestId, Side, Wants, check, lower,
    virtual_machine,
};

const PAGE: u32 = 32;

/// Seconds of a decode step of one sequence of `context` tokens, of which `away` are not on the device.
fn seconds(machine: &str, model: &str, context: u32, away: u32, how: Option<Far>) -> f64 {
    let hardware = hardware::named(machine).unwrap();
    let sizes = Sizes::of_spec(&synth::parse(model).unwrap().spec);
    let placement = Placement::all(Side::Device, sizes.spec.n_layers, 0);
    let request = RequestId { slot: 0, generation: 0 };
    let group = Group {
        request,
        phase: Phase::Decode,
        first: context,
        tokens: 1,
        kv: how.map_or(Kv::Device, |far| Kv::Split { boundary: away, far }),
        wants: Wants::Last,
    };
    let mut iteration = Iteration::serial(vec![group], true);
    if how.is_none() {
        iteration.moves.push(MoveRequest { request, to: Side::Device, pages: 0..away / PAGE });
    }
    let program = lower(&placement, &iteration).unwrap();
    check(&program, &placement, &iteration).unwrap();
    let costs = Roofline::new(&hardware, &sizes);
    let costs = OpCosts::new(&costs, &sizes).of(&iteration);
    virtual_machine::run(&program, &costs).seconds()
}

#[test]
fn attending_or_streaming_pages_that_left_beats_bringing_them_back() {
    println!("{:>16} {:>10} {:>8} {:>10} {:>10} {:>10}", "", "", "context", "attend", "stream", "whole");
    for machine in ["rtx4090-desktop", "t4-xeon", "a10-xeon", "h100-spr"] {
        for (model, context) in [("qwen3-8b", 32_768), ("llama-3.2-1b", 65_536)] {
            let away = context / 8 * 7;
            let [attend, stream, whole] = [Some(Far::Attend), Some(Far::Stream), None]
                .map(|how| seconds(machine, model, context, away, how));
            let ms = |s: f64| format!("{:.1} ms", 1e3 * s);
            println!(
                "{machine:>16} {model:>10} {context:>8} {:>10} {:>10} {:>10}",
                ms(attend),
                ms(stream),
                ms(whole)
            );
            assert!(attend.min(stream) < whole, "{machine}, {model}: {attend} and {stream}, {whole}");
            // The copies of a layer run under the layers before it: no more than all copies and all the rest, which is what
            // bringing pages back first takes, and no less than the copies.
            let copies = whole - seconds(machine, model, context, 0, None);
            assert!(copies < stream && stream < whole, "{machine}, {model}: {copies}, {stream}, {whole}");
        }
    }
}
