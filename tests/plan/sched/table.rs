//! Costs in closed form: a device whose products are flat up to a ridge, and attention that is linear in the tokens.

use tandem::program::{Flow, Group, Iteration, Kv, Phase, SubBatch};
use tandem::sched::Predict;

use super::formulas::TwoLanes;

/// Seconds, all layers together.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    pub layers: u32,
    /// Products of up to `ridge` rows.
    pub flat: f64,
    pub ridge: f64,
    /// Attention of a token on each side.
    pub device_token: f64,
    pub host_token: f64,
    /// A page to the other side.
    pub page: f64,
    /// Handing over a layer's rows.
    pub launch: f64,
}

/// What the rows of a sub-batch cost: products, attention of decode rows on the device, of prompts, on the host.
pub struct Parts {
    pub linear: f64,
    pub device: f64,
    pub prompts: f64,
    pub host: f64,
}

impl Table {
    pub fn parts(&self, batch: &SubBatch) -> Parts {
        let rows = u64::from(batch.rows());
        let sum = |of: &dyn Fn(&Group) -> bool| -> u64 {
            let tokens = |g: &Group| u64::from(g.tokens) * u64::from(g.first + g.tokens.div_ceil(2));
            batch.groups.iter().filter(|g| of(g)).map(tokens).sum()
        };
        let host = sum(&|g| g.phase == Phase::Decode && g.kv == Kv::Host);
        let device = sum(&|g| g.phase == Phase::Decode && g.kv != Kv::Host);
        let prompts = sum(&|g| g.phase == Phase::Prefill);
        Parts {
            linear: if rows == 0 { 0.0 } else { self.linear(rows) },
            device: self.device_attention(1, device, device),
            // Prompts reuse what they read.
            prompts: self.device_attention(1, prompts / 16, prompts),
            host: self.host_attention(1, host),
        }
    }
}

impl Predict for Table {
    fn linear(&self, rows: u64) -> f64 {
        self.flat * (rows as f64 / self.ridge).max(1.0)
    }
    fn device_attention(&self, _rows: u64, kv_tokens: u64, _pairs: u64) -> f64 {
        self.device_token * kv_tokens as f64
    }
    fn host_attention(&self, _rows: u64, kv_tokens: u64) -> f64 {
        self.host_token * kv_tokens as f64
    }
    fn swap(&self, pages: u64) -> f64 {
        self.page * pages as f64
    }
    fn launch(&self) -> f64 {
        self.launch
    }
    fn layers(&self) -> u32 {
        self.layers
    }
    fn iteration(&self, iteration: &Iteration) -> f64 {
        let parts: Vec<Parts> = iteration.sub_batches.iter().map(|b| self.parts(b)).collect();
        let handed = |t: f64| if t > 0.0 { t + self.launch * f64::from(self.layers) } else { 0.0 };
        match (iteration.flow, &parts[..]) {
            (Flow::TwoLanes, [zero, one]) => TwoLanes {
                linear: [zero.linear, one.linear],
                host: [zero.host, one.host],
                device: zero.device + one.device,
                prompts: zero.prompts + one.prompts,
                launch: self.launch * f64::from(self.layers),
            }
            .seconds(),
            (Flow::Async, [first, cohorts @ ..]) => {
                // A cohort's products are those of one layer.
                let joined: f64 = cohorts.iter().map(|c| c.linear / f64::from(self.layers)).sum();
                first.linear + first.prompts + first.device + joined
            }
            _ => {
                let one = |p: &Parts| p.linear + p.prompts + p.device.max(handed(p.host));
                parts.iter().map(one).sum()
            }
        }
    }
}
