//! The decision where a model runs: a line for people, the reasons, and `plan` in JSON.

use serde_json::{Value, json};
use tandem::engine::{Choice, Memory};
use tandem::program::{Far, LayerPlacement, Placement, Policy, Residence, Side};

use super::predict::Prediction;
use super::progress::{self, megabytes};

/// Where a model runs, and in how much memory.
pub struct Decision {
    /// The strategy's name on the command line.
    strategy: &'static str,
    placement: Placement,
    /// The accelerator that was considered.
    device: Option<String>,
    k: Option<usize>,
    pinned: Option<usize>,
    policies: Option<(Policy, Policy)>,
    /// Pages of keys and values on the device, and in total, if not all are on the device.
    kv_pages: Option<(usize, usize)>,
    /// How pages that left the device are attended; `None`: in each step in the faster way.
    far: Option<Far>,
    gpu: Option<(Memory, u64)>,
    host: Option<(Memory, Option<u64>)>,
    next: Option<(String, u64)>,
    /// Why a simpler placement was not possible.
    because: Option<String>,
    /// The prediction that the choice is based on.
    predicted: Option<Prediction>,
}

impl Decision {
    /// Everything on the CPU, with `available` bytes of memory before loading: no accelerator was requested, or there
    /// is none.
    pub fn cpu(layers: usize, memory: Memory, available: Option<u64>) -> Decision {
        Decision {
            strategy: "cpu-only",
            placement: Placement::all(Side::Host, layers, 0),
            device: None,
            k: Some(layers + 2),
            pinned: None,
            policies: None,
            kv_pages: None,
            far: Some(Far::Attend),
            gpu: None,
            host: Some((memory, available)),
            next: None,
            because: None,
            predicted: None,
        }
    }

    /// This decision, chosen by predicted time.
    pub fn with(self, predicted: Option<Prediction>) -> Decision {
        Decision { predicted, ..self }
    }

    /// Whether it was chosen by predicted time.
    pub fn is_predicted(&self) -> bool {
        self.predicted.is_some()
    }

    /// Whether pages of keys and values leave the accelerator.
    pub fn pages_move(&self) -> bool {
        self.kv_pages.is_some()
    }

    /// Whether a block has its keys and values on the accelerator.
    pub fn keeps_kv_on_device(&self) -> bool {
        self.placement.layers.iter().any(|l| l.kv == Side::Device)
    }

    /// Everything on the accelerator.
    pub fn gpu(layers: usize, device: String, memory: Memory, free: u64) -> Decision {
        Decision {
            strategy: "gpu-only",
            placement: Placement::all(Side::Device, layers, 0),
            device: Some(device),
            k: Some(0),
            gpu: Some((memory, free)),
            host: None,
            ..Decision::cpu(layers, memory, None)
        }
    }

    /// The placement that a strategy chose.
    pub fn split(
        strategy: &'static str,
        device: String,
        free: u64,
        choice: Choice,
        because: Option<String>,
    ) -> Decision {
        Decision {
            strategy,
            placement: choice.placement,
            device: Some(device),
            k: choice.k,
            pinned: choice.pinned,
            policies: choice.policies,
            kv_pages: choice.kv_pages,
            far: choice.far,
            gpu: Some((choice.device, free)),
            host: Some((choice.host, choice.host_available)),
            next: choice.next,
            because,
            predicted: None,
        }
    }

    /// This decision as a [`Choice`].
    pub fn choice(&self) -> Choice {
        let none = Memory { weights: 0, kv: 0, activations: 0 };
        Choice {
            placement: self.placement.clone(),
            k: self.k,
            pinned: self.pinned,
            policies: self.policies,
            kv_pages: self.kv_pages,
            far: self.far,
            device: self.gpu.map_or(none, |g| g.0),
            host: self.host.map_or(none, |h| h.0),
            host_available: self.host.and_then(|h| h.1),
            next: None,
        }
    }

    /// Prints the line, unless everything is on the CPU, there was no device and nothing was predicted; with `-v` also
    /// the reasons.
    pub fn tell(&self) {
        let line = self.line();
        match self.device.is_some() || self.is_predicted() {
            true => progress::note(&line),
            false => progress::detail(&line),
        }
        self.why().iter().for_each(|line| progress::detail(line));
    }

    fn line(&self) -> String {
        match &self.predicted {
            Some(predicted) => format!("{}; {}", self.what(), predicted.brief()),
            None => self.what(),
        }
    }

    fn what(&self) -> String {
        let device = self.device.as_deref().unwrap_or("a device");
        let share = self.gpu.as_ref().map(|(m, free)| share(m.total(), *free)).unwrap_or_default();
        let what = match (self.strategy, self.k) {
            (_, Some(k)) if k == self.placement.layers.len() + 2 && !self.placement.uses(Side::Device) => {
                return match (&self.device, &self.gpu) {
                    (Some(device), Some((_, free))) if self.next.is_some() => format!(
                        "{}: all on the cpu, not even the head fits the {} of {device}",
                        self.strategy,
                        megabytes(*free)
                    ),
                    _ => format!("{}: all on the cpu", self.strategy),
                };
            }
            (_, Some(0)) => format!("all on {device}"),
            (_, Some(k)) => self.boundary(k, device),
            ("lia", _) => self.lia(device),
            _ => self.stream(device),
        };
        let pages = match self.kv_pages {
            Some((n, all)) => {
                let others = match self.far {
                    Some(Far::Attend) => "attended by the cpu",
                    Some(Far::Stream) => "streamed",
                    None => "streamed or attended by the cpu",
                };
                format!(", {n} of {all} pages of keys and values there, the others {others}")
            }
            None => String::new(),
        };
        format!("{}: {what}{pages} ({share})", self.strategy)
    }

    fn boundary(&self, k: usize, device: &str) -> String {
        let n = self.placement.layers.len();
        let streamed = match self.placement.layers.first().map(|l| l.weights) {
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
        let n = self.placement.layers.len();
        let pinned = self.pinned.unwrap_or_default();
        let mut parts = Vec::new();
        if pinned > 0 {
            parts.push(format!("{} pinned on {device}", blocks(0..pinned)));
        }
        if let Some((prefill, decode)) = self.policies.filter(|_| pinned < n) {
            parts.push(format!(
                "{} by ({}) for prompts and ({}) in decode (1 is the cpu)",
                blocks(pinned..n),
                bits(prefill),
                bits(decode)
            ));
        }
        parts.push(self.ends(device));
        parts.join(", ")
    }

    fn stream(&self, device: &str) -> String {
        let n = self.placement.layers.len();
        let kv = match self.placement.layers.first().map(|l| l.kv) {
            Some(Side::Host) => "keys and values on the cpu, which attends in decode".to_owned(),
            _ => format!("keys and values on {device}"),
        };
        format!("{} streamed to {device}, {kv}, {}", blocks(0..n), self.ends(device))
    }

    fn ends(&self, device: &str) -> String {
        match (self.placement.embedding, self.placement.head) {
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
            self.because.iter().map(|e| format!("gpu-only does not fit: {}", numbers(e))).collect();
        if let (Some(device), Some((m, free))) = (&self.device, &self.gpu) {
            said.push(format!("on {device} {}, {} free", parts(m), megabytes(*free)));
        }
        if let Some((m, available)) = self.host.as_ref().filter(|_| self.device.is_some()) {
            let available = available.map_or(String::new(), |a| format!(", {} available", megabytes(a)));
            said.push(format!("on the host {}{available}", parts(m)));
        }
        said.extend(self.predicted.iter().flat_map(Prediction::why));
        if let (Some((what, bytes)), Some(device)) = (&self.next, &self.device) {
            said.push(format!("the next choice, {what}, would take {} of {device}", megabytes(*bytes)));
        }
        said
    }

    /// Adds the decision to `plan`.
    pub fn add_to(&self, plan: &mut Value) {
        let resident = |l: &LayerPlacement| matches!(l.weights, Residence::Device | Residence::Both);
        let ends = [self.placement.embedding, self.placement.head];
        let on_gpu = self.placement.layers.iter().filter(|l| resident(l)).count()
            + ends.iter().filter(|&&side| side == Side::Device).count();
        plan["strategy"] = json!(self.strategy);
        plan["cpu_units"] = json!(self.placement.layers.len() + 2 - on_gpu);
        plan["gpu_units"] = json!(on_gpu);
        if let Some(predicted) = &self.predicted {
            plan["predicted"] = predicted.json();
        }
        if let Some(k) = self.k {
            plan["k"] = json!(k);
        }
        if let Some(pinned) = self.pinned {
            plan["pinned_layers"] = json!(pinned);
        }
        if let Some((device, all)) = self.kv_pages {
            let far = match self.far {
                Some(Far::Attend) => "attend",
                Some(Far::Stream) => "stream",
                None => "time",
            };
            plan["kv_pages"] = json!({ "device": device, "all": all, "far": far });
        }
        let policies = match (self.policies, self.placement.layers.first()) {
            (Some(policies), _) => Some(policies),
            // One vector for all blocks.
            (None, Some(l)) if self.placement.layers.iter().all(|other| other == l) => {
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
        if let Some((m, free)) = &self.gpu {
            plan["memory"]["gpu"] = side(m, Some(*free));
        }
        if let Some((m, available)) = &self.host {
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

    fn memory(weights: u64) -> Memory {
        Memory { weights, kv: 0, activations: 0 }
    }

    fn choice(placement: Placement) -> Choice {
        Choice {
            placement,
            k: None,
            pinned: None,
            policies: None,
            kv_pages: None,
            far: Some(Far::Attend),
            device: memory(61_200_000),
            host: memory(9_000),
            host_available: Some(5_000_000_000),
            next: Some(("boundary 2 of 6 units".into(), 65_000_000)),
        }
    }

    fn decide(strategy: &'static str, choice: Choice) -> Decision {
        Decision::split(strategy, "emulated".into(), 64_000_000, choice, None)
    }

    #[test]
    fn a_boundary_is_told_by_its_units() {
        let line = |k| {
            let placement = Placement::boundary(k, 4, 0, 0);
            decide("helm", Choice { k: Some(k), ..choice(placement) }).line()
        };
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
        let placement = Placement::boundary(6, 4, 0, 0);
        let asked = Choice { k: Some(6), next: None, ..choice(placement) };
        assert_eq!(decide("helm", asked).line(), "helm: all on the cpu");
    }

    #[test]
    fn what_a_plan_says_adds_up() {
        let mut plan = json!({ "strategy": "?", "memory": { "weights": 1 } });
        let decision = decide("helm", Choice { k: Some(2), ..choice(Placement::boundary(2, 4, 0, 0)) });
        decision.add_to(&mut plan);
        assert_eq!((&plan["strategy"], &plan["k"]), (&json!("helm"), &json!(2)));
        assert_eq!((&plan["cpu_units"], &plan["gpu_units"]), (&json!(2), &json!(4)));
        assert_eq!(plan["memory"]["gpu"]["total"], 61_200_000);
        assert_eq!(plan["memory"]["gpu"]["available"], 64_000_000);
        assert_eq!(plan["memory"]["host"]["weights"], 9_000);
        assert_eq!(plan["memory"]["weights"], 1, "what was there stays");
        assert!(plan.get("prefill_policy").is_none(), "blocks differ");
        assert!(decision.why().iter().any(|line| line.contains("boundary 2 of 6 units, would take 65.0 MB")));
    }

    #[test]
    fn sizes_of_different_units_keep_them() {
        assert_eq!(share(61_200_000, 64_000_000), "61.2 of 64.0 MB");
        assert_eq!(share(61_200_000, 8_590_000_000), "61.2 MB of 8.59 GB");
    }
}
