use super::super::targets::OwnTargets;
use super::super::view::RequestView;
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

/// Before the first step no policy decides yet: the fastest wins, however small its lead over the first of the table.
#[test]
fn before_the_first_step_the_fastest_wins() {
    let costs = predictor("t4-g4dn");
    for (prompt, output) in [(300, 40), (400, 100), (50, 100)] {
        let queues = queues(60, prompt, output);
        let worth = Steady::of(&queues, &LIMITS, &costs, 1.0).worth;
        let seconds = |policy: &Policy| {
            let mut rollout = Rollout::new(policy.clone(), queues.clone(), worth).exactly();
            while rollout.requests() > 0 && rollout.seconds().is_finite() {
                rollout.step(&LIMITS, &costs, &Learned::default());
            }
            rollout.seconds()
        };
        let all: Vec<f64> = Policy::all().iter().map(seconds).collect();
        let least = all.iter().copied().fold(f64::INFINITY, f64::min);
        for (first, takes) in Policy::all().iter().zip(&all) {
            let comparison = Comparison::new(first, Policy::all(), &queues, &LIMITS, &costs);
            let (mut comparison, mut work) = (comparison.within(1 << 40), i64::MAX);
            let better = comparison.advance(&mut work, &LIMITS, &costs, &Learned::default());
            let winner = better.expect("its work is not limited").unwrap_or_else(|| first.clone());
            let won = seconds(&winner);
            assert!(
                won <= least,
                "{} ({takes} s) -> {} ({won} s), the least is {least} s",
                first.name(),
                winner.name()
            );
        }
    }
}

/// Forty requests of which half have waited for `seconds` already.
fn waiting(targets: Targets, seconds: f64) -> Queues {
    waiting_with(targets, seconds, |_| OwnTargets::default())
}

/// The same, with targets of their own.
fn waiting_with(targets: Targets, seconds: f64, own: impl Fn(u32) -> OwnTargets) -> Queues {
    let mut queues = Queues::default();
    queues.set_targets(targets);
    let view = |slot, prompt, most| {
        let request = RequestView::new(RequestId { slot, generation: 0 }, prompt, most);
        RequestView { targets: own(slot), ..request }
    };
    for slot in 0..20 {
        let prompt = 400 * (75 + slot * 37 % 51) / 100;
        queues.submit(view(slot, prompt, prompt + 75 + slot * 23 % 51));
    }
    queues.set_now(1.0);
    for slot in 20..40 {
        queues.submit(view(slot, 400, 500));
    }
    queues.set_now(1.0 + seconds);
    queues
}

/// Rolls a policy out to the end.
fn rolled_out(policy: &Policy, queues: Queues, costs: &dyn Predict) -> Rollout {
    let worth = Steady::of(&queues, &LIMITS, costs, 1.0).worth;
    let mut rollout = Rollout::new(policy.clone(), queues, worth);
    while rollout.requests() > 0 {
        rollout.step(&LIMITS, costs, &Learned::default());
    }
    rollout
}

/// Targets that each request has for itself choose what they choose as those of all.
#[test]
fn own_targets_of_all_requests_choose_as_those_of_all() {
    let costs = predictor("t4-xeon");
    let mut winners = Vec::new();
    for (ttft, tpot) in [(None, Some(0.06)), (None, Some(0.1)), (Some(3.0), None), (Some(8.0), Some(0.15))] {
        let all = waiting(Targets { ttft, tpot, ..Targets::OFFLINE }, 0.0);
        let each = waiting_with(Targets::OFFLINE, 0.0, |_| OwnTargets::new(ttft, tpot));
        let of = |queues: &Queues| winner(&Policy::mixed(), queues, &costs, 1 << 40).0;
        assert_eq!(of(&all), of(&each), "{ttft:?} {tpot:?}");
        for policy in Policy::all() {
            let late = |queues: &Queues| rolled_out(&policy, queues.clone(), &costs).late();
            assert_eq!(late(&all), late(&each), "{} {ttft:?} {tpot:?}", policy.name());
        }
        winners.push(of(&each));
    }
    let free = winner(&Policy::mixed(), &waiting(Targets::OFFLINE, 0.0), &costs, 1 << 40).0;
    assert!(winners.iter().any(|&winner| winner != free), "no target changes what {free:?} decides");
}

/// One request with tight targets is not outvoted by those that ask nothing, and is not late where any policy keeps them.
#[test]
fn one_request_with_tight_targets_changes_the_choice() {
    let costs = predictor("t4-xeon");
    let named = |name: Option<&str>| {
        let name = name.unwrap_or(Policy::mixed().name());
        Policy::all().into_iter().find(|p| p.name() == name).unwrap()
    };
    let one = |own: OwnTargets| {
        waiting_with(Targets::OFFLINE, 0.0, move |slot| if slot == 0 { own } else { OwnTargets::default() })
    };
    let free = named(winner(&Policy::mixed(), &one(OwnTargets::default()), &costs, 1 << 40).0);
    let mut changed = 0;
    for tpot in [0.06, 0.08, 0.1, 0.15, 0.2] {
        let queues = one(OwnTargets::new(None, Some(tpot)));
        let late = |policy: &Policy| rolled_out(policy, queues.clone(), &costs).late();
        let chosen = named(winner(&Policy::mixed(), &queues, &costs, 1 << 40).0);
        assert_eq!(late(&chosen).1, 1, "only one has targets");
        let least = Policy::all().iter().map(|policy| late(policy).0).min().unwrap();
        assert_eq!(late(&chosen).0, least, "{tpot}: {}", chosen.name());
        changed += usize::from(late(&free).0 > least);
    }
    assert!(changed > 0, "{} keeps every target", free.name());
}

/// Requests without targets are awaited as ever, whatever one beside them asks.
#[test]
fn own_targets_take_nobodys_patience() {
    let costs = predictor("t4-g4dn");
    let by = |own: OwnTargets| {
        let queues = waiting_with(Targets::NONE, 1.0, |slot| match slot {
            0 => own,
            _ => OwnTargets::default(),
        });
        Comparison::new(&Policy::mixed(), Policy::all(), &queues, &LIMITS, &costs).by
    };
    let own = OwnTargets::new(None, Some(0.1));
    assert_eq!(by(own), By { targets: Some(Targets::NONE), patience: Patience::Unknown });
    // All say how long they wait.
    let each = |slot: u32| OwnTargets::new(Some(f64::from(slot + 1)), None);
    let queues = waiting_with(Targets::NONE, 1.0, each);
    let by = Comparison::new(&Policy::mixed(), Policy::all(), &queues, &LIMITS, &costs).by;
    assert_eq!(by, By { targets: Some(Targets::NONE), patience: Patience::Any });
}

/// What keeps the targets beats what does not, however fast it is.
#[test]
fn targets_come_before_speed() {
    let costs = predictor("t4-xeon");
    let late = |policy: &Policy, targets: Targets| {
        let queues = waiting(targets, 0.0);
        let worth = Steady::of(&queues, &LIMITS, &costs, 1.0).worth;
        let mut rollout = Rollout::new(policy.clone(), queues, worth);
        while rollout.requests() > 0 {
            rollout.step(&LIMITS, &costs, &Learned::default());
        }
        (rollout.seconds(), rollout.late())
    };
    let named = |name: &str| Policy::all().into_iter().find(|p| p.name() == name).unwrap();
    let winner_of = |targets: Targets| {
        let queues = waiting(targets, 0.0);
        let current = Policy::mixed();
        named(winner(&current, &queues, &costs, 1 << 40).0.unwrap_or(current.name()))
    };
    let free = winner_of(Targets::OFFLINE);
    let mut kept = 0;
    for tpot in [0.06, 0.08, 0.1, 0.15, 0.2] {
        let targets = Targets { tpot: Some(tpot), ..Targets::NONE };
        let within = winner_of(targets);
        let ((free_s, (free_late, all)), (within_s, (within_late, _))) =
            (late(&free, targets), late(&within, targets));
        let keeps = targets.kept(within_late, all);
        kept += usize::from(keeps);
        // Not faster than the fastest, not later than it, and in time if anybody is.
        assert!(within_s >= free_s * 0.98 && within_late <= free_late, "{tpot}: {}", within.name());
        let anybody = Policy::all().iter().any(|p| targets.kept(late(p, targets).1.0, all));
        assert_eq!(keeps, anybody, "{tpot}: {}", within.name());
    }
    assert!(kept > 0, "no target can be kept");
}

/// Without targets first tokens count only where requests came one by one.
#[test]
fn first_tokens_are_bounded_by_those_of_the_device_alone() {
    let costs = predictor("t4-g4dn");
    let bound =
        |queues: &Queues| Comparison::new(&Policy::mixed(), Policy::all(), queues, &LIMITS, &costs).by;
    let nothing = By { targets: None, patience: Patience::Any };
    assert_eq!(bound(&queues(40, 400, 100)), nothing);
    assert_eq!(bound(&waiting(Targets::OFFLINE, 1.0)), nothing);
    let queues = waiting(Targets::NONE, 1.0);
    assert_eq!(bound(&queues), By { patience: Patience::Unknown, ..nothing });
    let first = |policy: Policy| {
        let worth = Steady::of(&queues, &LIMITS, &costs, 1.0).worth;
        let mut rollout = Rollout::new(policy, queues.in_sight(), worth);
        while rollout.requests() > 0 {
            rollout.step(&LIMITS, &costs, &Learned::default());
        }
        rollout.first_seconds()
    };
    let reference = Policy::all().into_iter().find(|p| p.name() == REFERENCE).unwrap();
    let most = Targets::bound(first(reference));
    let chosen = winner(&Policy::mixed(), &queues, &costs, 1 << 40).0;
    let chosen =
        Policy::all().into_iter().find(|p| p.name() == chosen.unwrap_or("mixed")).unwrap_or(Policy::mixed());
    assert!(first(chosen) <= most + 1e-9);
    assert_eq!((Targets::bound(2.0), Targets::bound(40.0)), (3.0, 50.0));
}
