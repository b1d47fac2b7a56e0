use super::*;
use crate::model::synth;
use crate::plan::Group;
use crate::plan::{OpCosts, hardware};
use crate::profile::calibrate::Factor;
use crate::program::{Iteration, Kv, Phase, Placement, RequestId, Wants, lower, virtual_machine};

/// A machine whose operations cost `base + rows`, and whose attention costs what it reads and multiplies.
fn attention(n: f64, rows: f64, seen: f64) -> f64 {
    // Once; a row's query; the tokens of each sequence; the pairs.
    1.0 + n * (rows * 0.5 + seen * 0.25)
}

fn layer(base: f64) -> LayerTable {
    let curve = |base: f64| Curve::new([1.0, 4.0, 16.0].map(|rows| (rows, base + rows)).into());
    let decode: Vec<_> = [1.0, 8.0]
        .iter()
        .flat_map(|&n| [1.0, 64.0, 256.0].map(|seen| (n, seen, attention(n, 1.0, seen))))
        .collect();
    let prompt: Vec<_> = [1.0, 16.0, 64.0]
        .iter()
        .flat_map(|&rows| [1.0, 64.0, 256.0].map(|seen| (rows, seen, attention(1.0, rows, seen))))
        .collect();
    LayerTable {
        project: curve(base),
        append: curve(base + 1.0),
        attend: Surface::new(&decode),
        attend_prompt: Surface::new(&prompt),
        out_proj: curve(base + 2.0),
        ffn_up: curve(base + 3.0),
        ffn_down: curve(base + 4.0),
    }
}

fn tables(kinds: Vec<usize>, n_kinds: usize) -> Tables {
    let line = |y: f64| Curve::new(vec![(1.0, y), (2.0, y + 1.0)]);
    Tables {
        kinds,
        host: Some(SideTable {
            embed: line(100.0),
            layers: (0..n_kinds).map(|k| layer(10.0 * (k + 1) as f64)).collect(),
            head: line(200.0),
            pick: line(300.0),
            ..SideTable::default()
        }),
        device: None,
        factors: Factors::default(),
    }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a} for {b}");
}

/// One decode step by its program: every operation from its own curve, the layers by their kinds, each factor applied.
#[test]
fn a_step_is_the_sum_of_its_operations() {
    let sizes = Sizes::of_spec(&synth::spec("tiny-llama").unwrap());
    let layers = sizes.layers();
    let h = hardware::named("t4-xeon").unwrap();
    let mut t = tables((0..layers).map(|l| l % 2).collect(), 2);
    let group = |slot| crate::program::Group {
        request: RequestId { slot, generation: 0 },
        phase: Phase::Decode,
        first: 99,
        tokens: 1,
        kv: Kv::Host,
        wants: Wants::Last,
    };
    let iteration = Iteration::serial(vec![group(0), group(1)], true);
    let program = lower(&Placement::all(Side::Host, layers, 64), &iteration).unwrap();
    let price = |t: &Tables| {
        let costs = t.costs(&h, &sizes);
        virtual_machine::run(&program, &OpCosts::new(&costs, &sizes).of(&iteration)).seconds()
    };
    let of_kind = |k: f64| 5.0 * (10.0 * k + 2.0) + 1.0 + 2.0 + 3.0 + 4.0 + attention(2.0, 1.0, 100.0);
    let want: f64 = (0..layers).map(|l| of_kind((l % 2 + 1) as f64)).sum::<f64>() + 101.0 + 201.0 + 301.0;
    close(price(&t), want);
    // Two sequences of 100 tokens: between two factors, and at a third.
    let factor =
        |kind: &str, tokens, factor| Factor { kind: kind.into(), side: Side::Host, rows: 2, tokens, factor };
    t.factors.0.extend([factor("head", 100, 1.0), factor("head", 300, 3.0), factor("attend", 200, 0.5)]);
    t.host.as_mut().unwrap().once = Curve::new(vec![(1.0, 7.0)]);
    close(price(&t), want + 201.0 - 0.5 * layers as f64 * attention(2.0, 1.0, 100.0) + 7.0);
}

#[test]
fn batches_and_programs_cost_the_same() {
    let sizes = Sizes::of_spec(&synth::spec("tiny-llama").unwrap());
    let h = hardware::named("t4-xeon").unwrap();
    let t = tables(vec![0; sizes.layers()], 1);
    let costs = t.costs(&h, &sizes);
    let groups = [Group::decode(3, 99)];
    let batch = Batch::decode(&groups);
    close(costs.attention(Side::Host, 0, &batch), attention(3.0, 1.0, 100.0));
    close(costs.sublayer(Side::Host, 0, Sublayer::Scores, &batch), attention(3.0, 1.0, 100.0) / 2.0);
    close(costs.sublayer(Side::Host, 0, Sublayer::Qkv, &batch), 13.0 + 14.0);
    close(costs.sublayer(Side::Host, 0, Sublayer::Down, &batch), 17.0);
    let none = [Group::decode(0, 99)];
    assert_eq!(costs.sublayer(Side::Host, 0, Sublayer::Down, &Batch::decode(&none)), 0.0);
    // The other side was not measured: the roofline answers.
    let roofline = Roofline::new(&h, &sizes);
    assert_eq!(costs.attention(Side::Device, 0, &batch), roofline.attention(Side::Device, 0, &batch));
    assert_eq!(costs.head(Side::Device, 2), roofline.head(Side::Device, 2));
    assert_eq!((costs.issue(Side::Host), costs.issue(Side::Device)), (0.0, roofline.issue(Side::Device)));
}

/// Of several alike sequences, what a scan says is enough to know how many there are.
#[test]
fn the_shape_of_a_scan_is_found_again() {
    for sequences in [1, 2, 7] {
        for (rows, past) in [(1, 0), (1, 99), (16, 0), (16, 48), (64, 128)] {
            let groups = [Group { sequences, rows, past, causal: true }];
            let scan = Scan::of(&Batch::prefill(&groups), None);
            let (n, each, seen) = shape_of(&scan);
            close(n, sequences as f64);
            close(each, rows as f64);
            close(seen, past as f64 + (rows + 1) as f64 / 2.0);
            // What is taken to be paid once is a call for one row and one token.
            let (got, want) = (layer(1.0).attention(&scan), attention(sequences as f64, rows as f64, seen));
            let one = if rows > 1 { (sequences - 1) as f64 * (attention(1.0, 1.0, 1.0) - 1.0) } else { 0.0 };
            assert!(got <= want + 1e-9 && got >= want - one - 1e-9, "{got} for {want}: {scan:?}");
        }
    }
    assert_eq!(layer(1.0).attention(&Scan::default()), 0.0);
}

#[test]
fn layers_are_alike_by_their_windows_and_types() {
    let kinds_of = |name: &str| {
        let m = synth::outline(name).unwrap();
        let of = kinds(&m.spec, &m.weights);
        (0..m.spec.n_layers).for_each(|l| {
            let windowed = m.spec.window_of(l).is_some();
            assert_eq!(windowed, m.spec.window_of(of.iter().position(|&k| k == of[l]).unwrap()).is_some());
        });
        of
    };
    assert!(kinds_of("tiny-llama").iter().all(|&k| k == 0));
    let gemma = kinds_of("tiny-gemma3,layers=8");
    assert_eq!(gemma.iter().max(), Some(&1), "{gemma:?}");
}

#[test]
fn tables_that_cannot_have_been_measured_are_refused() {
    let good = tables(vec![0, 1], 2);
    assert!(good.check("p.json").is_ok());
    let text = serde_json::to_string(&good).unwrap();
    assert_eq!(serde_json::from_str::<Tables>(&text).unwrap(), good);
    let said = tables(vec![0, 2], 2).check("p.json").unwrap_err().to_string();
    assert!(said.contains("p.json: tables.host: fewer kinds of layers"), "{said}");
    let mut mad = good;
    mad.host.as_mut().unwrap().layers[1].out_proj = Curve::new(vec![(1.0, 1e9)]);
    assert!(mad.check("p.json").unwrap_err().to_string().contains("cannot have been measured"));
}
