//! Timelines: windows of them, as Chrome traces, drawn.

use tandem::program::Unit;
use tandem::timeline::{Panel, StepWindow, Timeline, Traced, write_chrome, write_svg};

fn span(name: &'static str, unit: Unit, step: u32, start: f64, end: f64) -> Traced {
    Traced { name, unit, layer: Some(2), rows: 3, sub_batch: 0, cohort: None, step, start, end }
}

fn timeline() -> Timeline {
    Timeline {
        spans: vec![
            span("embed", Unit::Host, 0, 0.0, 0.5),
            span("carry", Unit::H2d, 0, 0.5, 0.6),
            span("project", Unit::Gpu, 1, 0.6, 1.0),
        ],
    }
}

/// Four steps of a second; the attention of a cohort goes on from 0.5 to 2.5, over two borders.
fn overlapped() -> Timeline {
    let mut spans: Vec<Traced> =
        (0..4).map(|i| span("ffn_up", Unit::Gpu, i, i.into(), f64::from(i) + 0.9)).collect();
    let cohort = |s: Traced| Traced { sub_batch: 1, cohort: Some(1), ..s };
    spans.push(cohort(span("attend", Unit::Host, 0, 0.5, 2.5)));
    spans.push(cohort(span("parked", Unit::Gpu, 1, 1.2, 1.2)));
    spans.push(cohort(span("join", Unit::Gpu, 3, 3.2, 3.2)));
    Timeline { spans }
}

fn chrome(panels: &[Panel<'_>]) -> Vec<serde_json::Value> {
    let mut out = Vec::new();
    write_chrome(panels, &mut out).unwrap();
    serde_json::from_slice(&out).unwrap()
}

fn drawn(panels: &[Panel<'_>]) -> String {
    let mut out = Vec::new();
    write_svg("a < b", panels, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn a_chrome_trace_has_every_operation_in_microseconds() {
    let (timeline, other) = (timeline(), overlapped());
    let of = |name, timeline| Panel { name, timeline };
    let events = chrome(&[of("neo", &timeline), of("apex", &other)]);
    let complete: Vec<_> = events.iter().filter(|e| e["ph"] == "X" && e["pid"] == 1).collect();
    assert_eq!(complete.len(), 3);
    assert_eq!((complete[2]["name"].as_str(), complete[2]["ts"].as_f64()), (Some("project"), Some(0.6e6)));
    assert!((complete[1]["dur"].as_f64().unwrap() - 0.1e6).abs() < 1e-3);
    // Four lanes and a name for each of the two.
    assert_eq!(events.iter().filter(|e| e["ph"] == "M").count(), 10);
    assert!(events.iter().any(|e| e["pid"] == 2 && e["name"] == "cohort 1 attend"));
    assert!(events.iter().any(|e| e["pid"] == 2 && e["name"] == "batch 0 ffn_up"));
    assert_eq!(timeline.busy(Unit::Host), 0.5);
}

#[test]
fn a_drawing_has_a_rectangle_for_each_operation_of_the_last_steps() {
    let drawn = |steps| {
        let mut out = Vec::new();
        timeline().write_svg(&mut out, steps).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert_eq!(drawn(2).matches("<title>").count(), 3);
    assert_eq!(drawn(1).matches("<title>").count(), 1);
    assert!(drawn(1).contains("the last 1 of 2 steps") && drawn(2).contains("all steps"));
    let mut out = Vec::new();
    Timeline::default().write_svg(&mut out, 4).unwrap();
    assert!(String::from_utf8(out).unwrap().ends_with("</svg>\n"));
}

#[test]
fn what_goes_on_over_the_borders_of_steps_is_shown_in_each() {
    let all = overlapped();
    let shown = StepWindow { from: None, steps: 1 }.cut(&all);
    // Step 2: its own work, and the end of the cohort's attention.
    let of = |name: &str| shown.spans.iter().find(|s| s.name == name).map(|s| (s.start, s.end));
    assert_eq!((of("ffn_up"), of("attend")), (Some((0.0, 2.9 - 2.0)), Some((0.0, 0.5))));
    assert_eq!((of("parked"), of("join"), shown.steps()), (None, None, 1));
    let shown = all.part(1..3);
    let attend = shown.spans.iter().find(|s| s.name == "attend").unwrap();
    assert_eq!((attend.start, attend.end), (0.0, 1.5));
    assert!(shown.spans.iter().any(|s| s.name == "parked" && s.step == 0));
    // A run that is over before there are margins is shown as far as it goes.
    assert_eq!(StepWindow { from: None, steps: 9 }.cut(&all).steps(), 4);
}

#[test]
fn a_window_begins_at_its_time_or_in_the_middle() {
    let at = |from, now, tokens| StepWindow { from, steps: 3 }.begins(now, tokens, 100);
    assert!(!at(None, 9.0, 49) && at(None, 0.0, 50));
    assert!(!at(Some(2.0), 1.9, 100) && at(Some(2.0), 2.0, 0));
}

#[test]
fn rows_of_a_lane_are_named_by_their_sub_batch_and_busy_shares_are_told() {
    let (one, many) = (timeline(), overlapped());
    let svg = drawn(&[Panel { name: "gpu-only", timeline: &one }, Panel { name: "apex", timeline: &many }]);
    for want in
        ["a &lt; b", "(a)  gpu-only", "(b)  apex", ">GPU's rows<", ">cohort 1<", ">GPU<", ">CPU<", ">step 3<"]
    {
        assert!(svg.contains(want), "{want}: {svg}");
    }
    // 3.6 of 3.9 seconds.
    assert!(
        svg.contains(">92%<") && svg.contains("a cohort joins") && svg.contains("it stays parked"),
        "{svg}"
    );
    let empty = Timeline::default();
    assert!(drawn(&[Panel { name: "idle", timeline: &empty }]).contains("no step"));
}

#[test]
fn neighbours_that_nobody_can_tell_apart_are_one_rectangle() {
    let spans = (0..1000).map(|i| span("ffn_up", Unit::Gpu, 0, f64::from(i), f64::from(i) + 1.0)).collect();
    let svg = drawn(&[Panel { name: "", timeline: &Timeline { spans } }]);
    assert_eq!(svg.matches("<title>").count(), 1, "{svg}");
    assert!(svg.contains("ffn_up 2 and 999 more"), "{svg}");
}
