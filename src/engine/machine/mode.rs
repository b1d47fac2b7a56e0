//! How the attention of a layer is computed.

use crate::program::Side;

/// How a layer's attention is computed: steps are prepared once for each mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Mode {
    /// The side that attends, in prefill and in decode.
    pub attend: [Side; 2],
    /// The side that keeps keys and values, which decides the pages to attend.
    pub kv: Side,
    /// The window of windowed layers whose pages may leave the device: pages that have left may lie before it.
    pub window: Option<usize>,
}

/// Each mode once.
pub(super) fn distinct(modes: &[Mode]) -> Vec<Mode> {
    let mut found: Vec<Mode> = Vec::new();
    for &mode in modes {
        if !found.contains(&mode) {
            found.push(mode);
        }
    }
    found
}
