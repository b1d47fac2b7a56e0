//! The decision where a model runs, as people and programs read it: a line, the reasons, and `plan` in JSON.

use serde_json::{Value, json};
use tandem::engine::Memory;
use tandem::open::PlacementDecision;
use tandem::program::{Far, LayerPlacement, Policy, Residence, Side, Sublayer};

use super::predict;
use super::progress::{self, megabytes};

/// A decision in words.
pub struct DecisionWords<'a>(pub &'a PlacementDecision);

impl DecisionWords<'_> {
    /// Prints the line, unless everything is on the CPU, there was no device and nothing was predicted; with `-v` also
    /// the reasons.
    pub fn tell(&self) {
        let line = self.line();
        match self.0.device.is_some() || self.0.is_predicted() {
            true => progress::note(&line),
            false => progress::detail(&line),
        }
        self.why().iter().for_each(|line| progress::detail(line));
    }

    pub fn line(&self) -> String {
        match &self.0.predicted {
            Some(predicted) => format!("{}; {}", self.what(), predict::brief(predicted)),
            None => self.what(),
        }
    }

    fn what(&self) -> String {
        let device = self.0.device.as_deref().unwrap_or("a device");
        let share = self.0.gpu.as_ref().map(|(m, free)| share(m.total(), *free)).unwrap_or_default();
        let what = match (self.0.strategy, self.0.k) {
            _ if self.0.placement.is_host_alone() => {
                return match (&self.0.device, &self.0.gpu) {
                    (Some(device), Some((_, free))) if self.0.next.is_some() => format!(
                        "{}: all on the cpu, not even the head fits the {} of {device}",
                        self.0.strategy,
                        megabytes(*free)
                    ),
                    _ => format!("{}: all on the cpu", self.0.strategy),
                };
            }
            (_, Some(0)) => format!("all on {device}"),
            (_, Some(k)) => self.boundary(k, device),
            ("lia", _) => self.lia(device),
            ("cpu-moe" | "ncmoe" | "experts", _) => self.experts(device),
            _ => self.stream(device),
        };
        let pages = match self.0.kv_pages {
            Some((n, all)) => {
                let others = match self.0.far {
                    Some(Far::Attend) => "attended by the cpu",
                    Some(Far::Stream) => "streamed",
                    None => "streamed or attended by the cpu",
                };
                format!(", {n} of {all} pages of keys and values there, the others {others}")
            }
            None => String::new(),
        };
        format!("{}: {what}{pages} ({share})", self.0.strategy)
    }

    fn boundary(&self, k: usize, device: &str) -> String {
        let n = self.0.placement.layers.len();
        let streamed = match self.0.placement.layers.first().map(|l| l.weights) {
            Some(Residence::Streamed) => format!(", blocks on the cpu streamed to {device} for prompts"),
            _ => String::new(),
        };
        if k == n + 2 {
            return format!("all units on the cpu{streamed}");
        }
        let here = match k {
            1 => "embedding".to_owned(),
            k => format!("embedding and {}", blocks(0..k - 1)),
        };
        let there = match k == n + 1 {
            true => "the head".to_owned(),
            false => format!("{} and the head", blocks(k - 1..n)),
        };
        format!("{here} on the cpu, {there} on {device}{streamed}")
    }

    fn lia(&self, device: &str) -> String {
        let layers = &self.0.placement.layers;
        let (n, pinned) = (layers.len(), self.0.pinned.unwrap_or_default());
        let resident = |l: &LayerPlacement| matches!(l.weights, Residence::Device | Residence::Both);
        let in_front = layers.iter().take_while(|l| resident(l)).count() == pinned;
        let mut parts = Vec::new();
        match in_front {
            _ if pinned == 0 => {}
            true => parts.push(format!("{} pinned on {device}", blocks(0..pinned))),
            false => parts.push(format!("{pinned} of {n} blocks pinned on {device}, spread evenly")),
        }
        let beside = |l: &&LayerPlacement| resident(l) && l.kv == Side::Host;
        match layers.iter().filter(beside).count() {
            0 => {}
            some => parts.push(format!("{some} of them with keys and values on the cpu")),
        }
        if let Some((prefill, decode)) = self.0.policies.filter(|_| pinned < n) {
            let others = if in_front { blocks(pinned..n) } else { "the others".into() };
            parts.push(format!(
                "{others} by ({}) for prompts and ({}) in decode (1 is the cpu)",
                bits(prefill),
                bits(decode)
            ));
        }
        parts.push(self.ends(device));
        parts.join(", ")
    }

    fn experts(&self, device: &str) -> String {
        let layers = &self.0.placement.layers;
        let on_host = layers.iter().take_while(|l| l.weights == Residence::Host).count();
        let there = |l: &LayerPlacement| matches!(l.weights, Residence::Both | Residence::StreamedExperts);
        let experts_from = layers.iter().rposition(there).map_or(on_host, |l| l + 1);
        let mut parts = Vec::new();
        if on_host > 0 {
            parts.push(format!("{} on the cpu", blocks(0..on_host)));
        }
        let kv = match layers.last().map(|l| l.kv) {
            Some(Side::Host) => ", keys and values",
            _ => "",
        };
        let streamed = layers.iter().filter(|l| l.weights == Residence::StreamedExperts).count();
        let front = layers[on_host..experts_from].iter().all(there);
        if streamed > 0 && !front {
            let but = format!("the experts of {streamed}{kv}");
            parts.push(format!("{} on {device} but for {but}, spread evenly", blocks(on_host..layers.len())));
        } else if experts_from > on_host {
            parts
                .push(format!("{} on {device}, their experts{kv} on the cpu", blocks(on_host..experts_from)));
        }
        if streamed > 0 {
            let rows = self.0.placement.stream_rows.max(1);
            parts.push(format!("experts copied to {device} for {rows} rows of prompts or more"));
        }
        if experts_from < layers.len() && (streamed == 0 || front) {
            let but = if kv.is_empty() { "" } else { " but for keys and values" };
            parts.push(format!("{} wholly on {device}{but}", blocks(experts_from..layers.len())));
        }
        parts.push(self.ends(device));
        parts.join(", ")
    }

    fn stream(&self, device: &str) -> String {
        let n = self.0.placement.layers.len();
        let kv = match self.0.placement.layers.first().map(|l| l.kv) {
            Some(Side::Host) => "keys and values on the cpu, which attends in decode".to_owned(),
            _ => format!("keys and values on {device}"),
        };
        format!("{} streamed to {device}, {kv}, {}", blocks(0..n), self.ends(device))
    }

    fn ends(&self, device: &str) -> String {
        match (self.0.placement.embedding, self.0.placement.head) {
            (Side::Host, Side::Host) => "embedding and head on the cpu".to_owned(),
            (Side::Device, Side::Device) => format!("embedding and head on {device}"),
            (Side::Host, Side::Device) => format!("embedding on the cpu, head on {device}"),
            (Side::Device, Side::Host) => format!("embedding on {device}, head on the cpu"),
        }
    }

    fn why(&self) -> Vec<String> {
        let parts = |m: &Memory| {
            format!(
                "{} (weights {}, KV {}, activations {})",
                megabytes(m.total()),
                megabytes(m.weights),
                megabytes(m.kv),
                megabytes(m.activations)
            )
        };
        // The advice in the message has already been followed.
        let numbers = |e: &String| e.split("; try ").next().unwrap_or_default().to_owned();
        let mut said: Vec<String> =
            self.0.because.iter().map(|e| format!("gpu-only does not fit: {}", numbers(e))).collect();
        if let (Some(device), Some((m, free))) = (&self.0.device, &self.0.gpu) {
            said.push(format!("on {device} {}, {} free", parts(m), megabytes(*free)));
        }
        if let Some((m, available)) = self.0.host.as_ref().filter(|_| self.0.device.is_some()) {
            let available = available.map_or(String::new(), |a| format!(", {} available", megabytes(a)));
            said.push(format!("on the host {}{available}", parts(m)));
        }
        said.extend(self.0.predicted.iter().flat_map(predict::why));
        if let (Some((what, bytes)), Some(device)) = (&self.0.next, &self.0.device) {
            said.push(format!("the next choice, {what}, would take {} of {device}", megabytes(*bytes)));
        }
        said
    }

    /// Adds the decision to `plan`.
    pub fn add_to(&self, plan: &mut Value) {
        let resident = |l: &LayerPlacement| l.weights.stays_on_device(Sublayer::Qkv);
        let ends = [self.0.placement.embedding, self.0.placement.head];
        let on_gpu = self.0.placement.layers.iter().filter(|l| resident(l)).count()
            + ends.iter().filter(|&&side| side == Side::Device).count();
        plan["strategy"] = json!(self.0.strategy);
        plan["cpu_units"] = json!(self.0.placement.layers.len() + 2 - on_gpu);
        plan["gpu_units"] = json!(on_gpu);
        if let Some(predicted) = &self.0.predicted {
            plan["predicted"] = predict::json(predicted);
        }
        if let Some(k) = self.0.k {
            plan["k"] = json!(k);
        }
        if let Some(pinned) = self.0.pinned {
            plan["pinned_layers"] = json!(pinned);
        }
        if let Some(experts) = &self.0.experts {
            plan["experts"] = json!(experts);
        }
        if let Some((device, all)) = self.0.kv_pages {
            let far = match self.0.far {
                Some(Far::Attend) => "attend",
                Some(Far::Stream) => "stream",
                None => "time",
            };
            plan["kv_pages"] = json!({ "device": device, "all": all, "far": far });
        }
        let policies = match (self.0.policies, self.0.placement.layers.first()) {
            (Some(policies), _) => Some(policies),
            // One vector for all blocks.
            (None, Some(l)) if self.0.placement.layers.iter().all(|other| other == l) => {
                Some((l.prefill, l.decode))
            }
            _ => None,
        };
        if let Some((prefill, decode)) = policies {
            plan["prefill_policy"] = json!(prefill.bits());
            plan["decode_policy"] = json!(decode.bits());
        }
        let side = |m: &Memory, available: Option<u64>| {
            json!({
                "weights": m.weights,
                "kv": m.kv,
                "activations": m.activations,
                "total": m.total(),
                "available": available,
            })
        };
        if let Some((m, free)) = &self.0.gpu {
            plan["memory"]["gpu"] = side(m, Some(*free));
        }
        if let Some((m, available)) = &self.0.host {
            plan["memory"]["host"] = side(m, *available);
        }
    }
}

/// `61.2 of 64.0 MB`.
fn share(used: u64, free: u64) -> String {
    let (used, free) = (megabytes(used), megabytes(free));
    match (used.split_once(' '), free.split_once(' ')) {
        (Some((number, unit)), Some((_, of))) if unit == of => format!("{number} of {free}"),
        _ => format!("{used} of {free}"),
    }
}

fn blocks(range: std::ops::Range<usize>) -> String {
    match range.len() {
        1 => format!("block {}", range.start),
        _ => format!("blocks {}-{}", range.start, range.end - 1),
    }
}

fn bits(policy: Policy) -> String {
    policy.bits().map(|b| b.to_string()).join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem::program::Placement;

    fn memory(weights: u64) -> Memory {
        Memory { weights, kv: 0, activations: 0 }
    }

    fn decide(k: usize, next: Option<(String, u64)>) -> PlacementDecision {
        PlacementDecision {
            strategy: "helm",
            placement: Placement::boundary(k, 4, 0, 0),
            device: Some("emulated".into()),
            k: Some(k),
            pinned: None,
            experts: None,
            policies: None,
            kv_pages: None,
            far: Some(Far::Attend),
            gpu: Some((memory(61_200_000), 64_000_000)),
            host: Some((memory(9_000), Some(5_000_000_000))),
            next,
            because: None,
            predicted: None,
        }
    }

    fn before() -> Option<(String, u64)> {
        Some(("boundary 2 of 6 units".into(), 65_000_000))
    }

    #[test]
    fn a_boundary_is_told_by_its_units() {
        let line = |k| DecisionWords(&decide(k, before())).line();
        for (k, want) in [
            (0, "helm: all on emulated (61.2 of 64.0 MB)"),
            (1, "helm: embedding on the cpu, blocks 0-3 and the head on emulated (61.2 of 64.0 MB)"),
            (
                2,
                "helm: embedding and block 0 on the cpu, blocks 1-3 and the head on emulated (61.2 of 64.0 MB)",
            ),
            (
                4,
                "helm: embedding and blocks 0-2 on the cpu, block 3 and the head on emulated (61.2 of 64.0 MB)",
            ),
            (5, "helm: embedding and blocks 0-3 on the cpu, the head on emulated (61.2 of 64.0 MB)"),
            (6, "helm: all on the cpu, not even the head fits the 64.0 MB of emulated"),
        ] {
            assert_eq!(line(k), want);
        }
        assert_eq!(DecisionWords(&decide(6, None)).line(), "helm: all on the cpu");
    }

    #[test]
    fn what_a_plan_says_adds_up() {
        let mut plan = json!({ "strategy": "?", "memory": { "weights": 1 } });
        let decision = decide(2, before());
        DecisionWords(&decision).add_to(&mut plan);
        assert_eq!((&plan["strategy"], &plan["k"]), (&json!("helm"), &json!(2)));
        assert_eq!((&plan["cpu_units"], &plan["gpu_units"]), (&json!(2), &json!(4)));
        assert_eq!(plan["memory"]["gpu"]["total"], 61_200_000);
        assert_eq!(plan["memory"]["gpu"]["available"], 64_000_000);
        assert_eq!(plan["memory"]["host"]["weights"], 9_000);
        assert_eq!(plan["memory"]["weights"], 1, "what was there stays");
        assert!(plan.get("prefill_policy").is_none(), "blocks differ");
        assert!(
            DecisionWords(&decision)
                .why()
                .iter()
                .any(|line| line.contains("boundary 2 of 6 units, would take 65.0 MB"))
        );
    }

    #[test]
    fn sizes_of_different_units_keep_them() {
        assert_eq!(share(61_200_000, 64_000_000), "61.2 of 64.0 MB");
        assert_eq!(share(61_200_000, 8_590_000_000), "61.2 MB of 8.59 GB");
    }
}
