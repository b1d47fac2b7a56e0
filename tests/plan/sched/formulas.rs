//! Closed formulas of NEO and APEX, as corrected, that the papers print and no strategy evaluates: the oracle tests hold them against print,
//! and `table.rs` predicts with NEO's. Symbols as in `src/sched/model.rs`; r = g / l, c = n_c / n_g.

use tandem::sched::pipelining_pays_mixed;

/// NEO's time of an iteration (NEO §3.2 with the two terms that print lacks: attention of prompts, and handing over to the host).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TwoLanes {
    /// Products of each sub-batch: T_l0, T_l1.
    pub linear: [f64; 2],
    /// Attention of each sub-batch's host rows: T_ca0, T_ca1.
    pub host: [f64; 2],
    /// Attention of the first's decode rows on the device: T_ga0.
    pub device: f64,
    /// Attention of the first's prompts: T_pf0.
    pub prompts: f64,
    /// Handing rows to the host and back: t_launch.
    pub launch: f64,
}

impl TwoLanes {
    /// Seconds: the host attends the second while the device multiplies the first, then the other way round.
    pub fn seconds(&self) -> f64 {
        let host = |t: f64| if t > 0.0 { t + self.launch } else { 0.0 };
        self.linear[0].max(host(self.host[1]))
            + (self.linear[1] + self.prompts + self.device).max(host(self.host[0]))
    }

    /// Whether the host never keeps the device waiting: NEO's inequalities.
    pub fn is_hidden(&self) -> bool {
        let host = |t: f64| if t > 0.0 { t + self.launch } else { 0.0 };
        host(self.host[1]) <= self.linear[0]
            && host(self.host[0]) <= self.linear[1] + self.prompts + self.device
    }
}

/// The ratio N_G / N_C below which pipelining pays in decode-only iterations (APEX inequality 6): 2·l/g + 3 + g/l, which is
/// least, 3 + 2·√2, at g = √2·l.
pub fn ratio_limit(l: f64, g: f64) -> f64 {
    2.0 * l / g + 3.0 + g / l
}

/// Whether asymmetric pipelining makes more tokens than the device alone (APEX inequality 5, as printed before it is rearranged).
pub fn pipelining_pays(n_g: f64, n_c: f64, l: f64, g: f64) -> bool {
    pipelining_pays_mixed(n_g, n_c, l, g, l, g)
}

/// Tokens of asynchronous overlap over those of the device alone: 1 + c·(1 + 1/r).
pub fn overlap_gain(c: f64, r: f64) -> f64 {
    1.0 + c * (1.0 + 1.0 / r)
}

/// Tokens of asymmetric pipelining over those of the device alone: (1 + r)/(2 + r) + c·(1 + 1/r). Overlap is ahead by 1/(2 + r)
/// whenever its assumptions hold.
pub fn pipelining_gain(c: f64, r: f64) -> f64 {
    (1.0 + r) / (2.0 + r) + c * (1.0 + 1.0 / r)
}

/// The share of the host's waiting that layers spread over `devices` leave away (APEX §6): 1 − 1/G.
pub fn waiting_saved(devices: u32) -> f64 {
    1.0 - 1.0 / f64::from(devices)
}
