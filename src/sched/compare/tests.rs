use super::super::queues::RequestView;
use super::*;
use crate::model::synth;
use crate::plan::{Predictor, Sizes, hardware};
use crate::program::{Placement, RequestId, Side};

const LIMITS: Limits =
    Limits { rows: 1024, sub_batches: 2, sequences: 256, device_pages: 200, host_pages: 4000 };

fn predictor(machine: &str) -> Predictor {
    let sizes = Sizes::of_spec(&synth::spec("llama-2-7b").unwrap());
    let placement = Placement {
        host_pages: LIMITS.host_pages,
        ..Placement::all(Side::Device, sizes.layers(), LIMITS.device_pages)
    };
    Predictor::new(hardware::named(machine).unwrap(), sizes, placement)
}

fn queues(n: u32, prompt: u32, output: u32) -> Queues {
    let mut queues = Queues::default();
    for slot in 0..n {
        let prompt = prompt * (75 + slot * 37 % 51) / 100;
        let output = output * (75 + slot * 23 % 51) / 100;
        queues.submit(RequestView::new(RequestId { slot, generation: 0 }, prompt, prompt + output));
    }
    queues
}

/// The winner's name with portions of this size, and how many of them it took.
fn winner(
    current: &Policy,
    queues: &Queues,
    costs: &dyn Predict,
    portion: i64,
) -> (Option<&'static str>, u32) {
    let mut comparison = Comparison::new(current, Policy::all(), queues, &LIMITS, costs);
    let (mut work, mut portions) = (0, 0);
    loop {
        work += portion;
        portions += 1;
        if let Some(better) = comparison.advance(&mut work, &LIMITS, costs, &Learned::default()) {
            return (better.map(|policy| policy.name()), portions);
        }
        assert!(work <= 0, "it stops only when its work is used up");
        let step = queues.waiting().len() as i64;
        assert!(work > -(step + STEP + 16 * step / REPEATED), "a step and its repetitions beyond its share");
    }
}

#[test]
fn portions_give_the_answer_of_one_go() {
    for machine in ["t4-xeon", "t4-g4dn"] {
        let costs = predictor(machine);
        for (prompt, output) in [(400, 30), (50, 100)] {
            let queues = queues(40, prompt, output);
            let (at_once, one) = winner(&Policy::mixed(), &queues, &costs, 1 << 40);
            let (in_portions, many) = winner(&Policy::mixed(), &queues, &costs, 400);
            assert_eq!(at_once, in_portions, "{machine} {prompt}+{output}");
            assert!(one == 1 && many > 20, "{many} portions");
        }
    }
}

/// The winner finishes sooner than every policy that it was compared with, and stays against all of them.
#[test]
fn the_winner_stays() {
    let costs = predictor("t4-xeon");
    let queues = queues(60, 300, 40);
    let mut won = 0;
    for current in Policy::all() {
        let (better, _) = winner(&current, &queues, &costs, 1 << 40);
        let Some(name) = better else { continue };
        won += 1;
        let best = Policy::all().into_iter().find(|p| p.name() == name).unwrap();
        assert_eq!(winner(&best, &queues, &costs, 1 << 40).0, None, "{} -> {name}", current.name());
    }
    assert!(won > 0, "no policy is better than another");
}
