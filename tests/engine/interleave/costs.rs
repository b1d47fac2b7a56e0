//! Made-up costs: a seed makes a machine whose CPU and device are fast or slow, so that strategies take all their ways.

use tandem::program::{Flow, Group, Iteration, Kv, Phase, SubBatch};
use tandem::sched::Predict;

use super::random::Random;

/// Seconds, of three layers.
#[derive(Debug, Clone)]
pub struct Costs {
    flat: f64,
    row: f64,
    device_token: f64,
    host_token: f64,
    page: f64,
    launch: f64,
}

impl Costs {
    pub fn of(seed: u64) -> Costs {
        let mut r = Random(seed ^ 0x00c0_5750);
        let mut around = |seconds: f64| seconds * 2f64.powi(r.below(9) as i32 - 4);
        Costs {
            flat: around(1e-3),
            row: around(1e-5),
            device_token: around(1e-6),
            host_token: around(1e-5),
            page: around(1e-4),
            launch: around(1e-5),
        }
    }

    fn parts(&self, batch: &SubBatch) -> [f64; 3] {
        let sum = |of: &dyn Fn(&Group) -> bool| -> u64 {
            batch.groups.iter().filter(|g| of(g)).map(|g| u64::from(g.end())).sum()
        };
        let far = |g: &Group| g.kv == Kv::Host && g.phase == Phase::Decode;
        let (host, device) = (sum(&far), sum(&|g| !far(g)));
        let rows = u64::from(batch.rows());
        [self.linear(rows), self.device_attention(rows, device, device), self.host_attention(rows, host)]
    }
}

impl Predict for Costs {
    fn linear(&self, rows: u64) -> f64 {
        if rows == 0 { 0.0 } else { self.flat + self.row * rows as f64 }
    }
    fn device_attention(&self, _: u64, kv_tokens: u64, _: u64) -> f64 {
        self.device_token * kv_tokens as f64
    }
    fn host_attention(&self, _: u64, kv_tokens: u64) -> f64 {
        self.host_token * kv_tokens as f64
    }
    fn swap(&self, pages: u64) -> f64 {
        self.page * pages as f64
    }
    fn launch(&self) -> f64 {
        self.launch
    }
    fn layers(&self) -> u32 {
        3
    }
    fn iteration(&self, iteration: &Iteration) -> f64 {
        let parts: Vec<[f64; 3]> = iteration.sub_batches.iter().map(|b| self.parts(b)).collect();
        match (iteration.flow, &parts[..]) {
            // NEO's two halves.
            (Flow::TwoLanes, [a, b]) => a[0].max(b[2] + self.launch) + (b[0] + a[1]).max(a[2] + self.launch),
            // Cohorts have a layer's products, and nobody waits for their attention.
            (Flow::Async, [first, cohorts @ ..]) => {
                first[0] + first[1] + cohorts.iter().map(|c| c[0]).sum::<f64>() / 3.0
            }
            _ => parts.iter().flatten().sum(),
        }
    }
}
