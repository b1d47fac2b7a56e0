//! Predicted times, as people and programs read them.

use serde_json::{Value, json};
use tandem::open::Prediction;
use tandem::plan::{FarForecast, Spilled};

use super::progress::{self, megabytes};

/// `1.23 s`, `12.3 ms`, `123 us`.
pub fn seconds(t: f64) -> String {
    match t {
        t if t >= 100.0 => format!("{t:.0} s"),
        t if t >= 1.0 => format!("{t:.2} s"),
        t if t >= 1e-3 => format!("{:.1} ms", t * 1e3),
        t => format!("{:.0} us", t * 1e6),
    }
}

/// `predicted: 12.3 ms for the prompt, 1.2 ms a token`; `predicted for a100-spr: …` if that is another machine.
pub fn brief(p: &Prediction) -> String {
    let whose = p.whose.as_ref().map_or(String::new(), |name| format!(" for {}", progress::one_line(name)));
    let prompt = format!("predicted{whose}: {} for the prompt", seconds(p.prefill));
    match p.step() {
        Some(step) => format!("{prompt}, {} a token", seconds(step)),
        None => prompt,
    }
}

/// Why it won: a line for each strategy.
pub fn why(p: &Prediction) -> Vec<String> {
    let mut lines = vec![format!(
        "{}; for {} x {} + {} tokens, by {}",
        p.why, p.work.batch, p.work.prompt, p.work.gen_len, p.from
    )];
    for c in &p.considered {
        let time = match c.seconds {
            Some((prefill, decode)) => format!("{} + {}", seconds(prefill), seconds(decode)),
            None => "does not fit".into(),
        };
        lines.push(format!(
            "  {:<9} {time:>20}  {:>9} of the device  {:>9} of the host  {}",
            c.strategy.name(),
            megabytes(c.bytes.0),
            megabytes(c.bytes.1),
            c.what
        ));
    }
    lines.extend(p.far.as_ref().map(|far| told(far, p.work.context())));
    lines
}

/// For `plan` in JSON.
pub fn json(p: &Prediction) -> Value {
    let candidates: Vec<Value> = p
        .considered
        .iter()
        .map(|c| {
            json!({
                "strategy": c.strategy.name(),
                "feasible": c.seconds.is_some(),
                "what": c.what,
                "t_prefill_s": c.seconds.map(|s| s.0),
                "t_decode_s": c.seconds.map(|s| s.1),
                "gpu_bytes": c.bytes.0,
                "host_bytes": c.bytes.1,
            })
        })
        .collect();
    json!({
        "prompt_len": p.work.prompt,
        "gen_len": p.work.gen_len,
        "batch": p.work.batch,
        "chunk": p.work.chunk,
        "t_prefill_s": p.prefill,
        "t_decode_s": p.decode,
        "t_decode_step_s": p.step(),
        "by": p.from,
        "why": p.why,
        "far": p.far,
        "candidates": candidates,
    })
}

/// A sentence on how decode steps attend pages that left the device.
pub fn told(far: &FarForecast, context: u64) -> String {
    let way = |w: Spilled| match w {
        Spilled::Split => "attended by the cpu",
        Spilled::Streamed => "streamed",
    };
    let ways: Vec<String> =
        far.ways.iter().map(|&(from, w)| format!("{} from token {from} on", way(w))).collect();
    format!(
        "pages that left the device: {}; a token at {context} takes {} with them attended by the cpu, {} streamed",
        ways.join(", "),
        seconds(far.attend_s),
        seconds(far.stream_s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_time() {
        for (t, want) in
            [(123.4, "123 s"), (1.234, "1.23 s"), (0.2055, "205.5 ms"), (5.5e-6, "6 us"), (0.0, "0 us")]
        {
            assert_eq!(seconds(t), want);
        }
    }
}
