//! The papers' closed formulas, as corrected: what tests and choices go by. Seconds may be of a layer or of an iteration, as
//! long as all of a formula are of the same.
//!
//! | symbol | here | what |
//! |---|---|---|
//! | T_glinear, T_gatt | `l`, `g` | the device's products and attention of a decode iteration |
//! | N_G, N_C | `n_g`, `n_c` | tokens of keys and values that device and host attend in a second |
//! | r, c | `g / l`, `n_c / n_g` | |

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

/// The same in an iteration with prompts, whose products take `lp` and attention `gp` together with theirs. Print divides by
/// times without the prompts; both cycles have them. Without prompts this is inequality 5.
pub fn pipelining_pays_mixed(n_g: f64, n_c: f64, l: f64, g: f64, lp: f64, gp: f64) -> bool {
    let cycle = lp + l + gp;
    (n_g * g + n_c * cycle) / cycle > n_g * g / (lp + gp)
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

/// How device and host share an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The host has no rows.
    GpuOnly,
    /// Two sub-batches in lock step (NEO).
    Pipelined,
    /// A cohort that advances by a layer an iteration (APEX).
    Overlapped,
}

/// What Algorithm 1 goes by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// Whether the iteration has rows of prompts.
    pub prompts: bool,
    /// Requests whose keys and values are on the host.
    pub host_requests: usize,
    /// See the [module](self).
    pub n_g: f64,
    /// See the [module](self).
    pub n_c: f64,
    /// Of the decode rows alone.
    pub l: f64,
    /// Of the decode rows alone.
    pub g: f64,
    /// Products with the prompts' rows.
    pub lp: f64,
    /// Attention with the prompts' rows.
    pub gp: f64,
}

/// APEX's Algorithm 1. Without requests on the host it is the device alone, with the prompts (print drops them); otherwise
/// pipelining if it pays, else overlap.
pub fn apex_algorithm_1(seen: &Seen) -> Mode {
    let Seen { prompts, host_requests, n_g, n_c, l, g, lp, gp } = *seen;
    let (lp, gp) = if prompts { (lp, gp) } else { (l, g) };
    match host_requests {
        0 => Mode::GpuOnly,
        _ if pipelining_pays_mixed(n_g, n_c, l, g, lp, gp) => Mode::Pipelined,
        _ => Mode::Overlapped,
    }
}
