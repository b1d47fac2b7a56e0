//! The closed formulas of the papers, as corrected, by which strategies choose. Seconds may be of a layer or of an iteration, as
//! long as all of a formula are of the same.
//!
//! | symbol | here | what |
//! |---|---|---|
//! | T_glinear, T_gatt | `l`, `g` | the device's products and attention of a decode iteration |
//! | N_G, N_C | `n_g`, `n_c` | tokens of keys and values that device and host attend in a second |

/// Whether asymmetric pipelining makes more tokens than the device alone in an iteration with prompts, whose products take `lp`
/// and attention `gp` together with theirs. Print divides by times without the prompts; both cycles have them. Without prompts
/// (`lp` = `l`, `gp` = `g`) this is APEX's inequality 5, as printed before it is rearranged.
pub fn pipelining_pays_mixed(n_g: f64, n_c: f64, l: f64, g: f64, lp: f64, gp: f64) -> bool {
    let cycle = lp + l + gp;
    (n_g * g + n_c * cycle) / cycle > n_g * g / (lp + gp)
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
pub struct BalanceInputs {
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
pub fn apex_algorithm_1(seen: &BalanceInputs) -> Mode {
    let BalanceInputs { prompts, host_requests, n_g, n_c, l, g, lp, gp } = *seen;
    let (lp, gp) = if prompts { (lp, gp) } else { (l, g) };
    match host_requests {
        0 => Mode::GpuOnly,
        _ if pipelining_pays_mixed(n_g, n_c, l, g, lp, gp) => Mode::Pipelined,
        _ => Mode::Overlapped,
    }
}
