//! Memory nodes: how fast the CPU reads each of them.

use serde::{Deserialize, Serialize};

use crate::host::{NumaNode, NumaWish, Pool};
use crate::plan::hardware::Node;
use crate::profile::bandwidth::ReadProbe;
use crate::profile::sample::{Effort, sample};
use crate::{Error, Result};

/// A memory node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeLimits {
    /// Its number.
    pub node: usize,
    /// Whether it has a core of the pool: it is then a part of the CPU's own memory.
    pub own: bool,
    /// Bytes that were available.
    pub memory_bytes: u64,
    /// Bytes per second that all threads together read.
    pub bytes_s: f64,
}

impl NodeLimits {
    /// Reads a buffer of at most `bytes` bytes on each of `nodes` with memory, with all threads. Empty if there is only one:
    /// all memory is then the CPU's own. Nodes that are full, or that this process may not use, are left out.
    ///
    /// # Errors
    /// As [`NumaWish::among`].
    pub fn measure(nodes: &[NumaNode], pool: &Pool, bytes: u64, effort: Effort) -> Result<Vec<NodeLimits>> {
        const LEAST: u64 = 64 << 20;
        let mut found = Vec::new();
        if nodes.iter().filter(|n| n.memory != Some(0)).count() < 2 {
            return Ok(found);
        }
        for node in nodes {
            let memory_bytes = node.available.unwrap_or_default();
            let bytes = bytes.min(memory_bytes / 4);
            if bytes < LEAST {
                continue;
            }
            let there = NumaWish::Nodes(vec![node.node]).among(nodes)?;
            let Ok(probe) = ReadProbe::on(bytes as usize, Some(&there)) else { continue };
            let seconds = sample(effort, || Ok::<_, Error>(probe.pass(pool)))?;
            // The best pass: a limit is what nothing exceeds.
            let bytes_s = probe.bytes() as f64 / seconds.quantile(0.0);
            found.push(NodeLimits { node: node.node, own: node.is_own(), memory_bytes, bytes_s });
        }
        Ok(found)
    }

    /// As planners read it.
    pub fn hardware(&self) -> Node {
        Node { node: self.node, bytes: self.memory_bytes as f64, read_bw: self.bytes_s, own: self.own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::numa_nodes;

    #[test]
    fn one_node_is_the_cpus_own_memory() {
        let pool = Pool::new(2);
        let nodes = numa_nodes();
        let limits = NodeLimits::measure(&nodes, &pool, 64 << 20, Effort::Quick).unwrap();
        match nodes.iter().filter(|n| n.memory != Some(0)).count() {
            0 | 1 => assert_eq!(limits, []),
            _ => assert!(limits.iter().all(|l| l.bytes_s > 1e8), "{limits:?}"),
        }
        // Of two, one is described that is not there: it cannot be bound, and is left out.
        let Some(here) = nodes.first().filter(|n| n.available > Some(1 << 30)) else {
            println!("skipped: this system does not tell its memory nodes");
            return;
        };
        let absent = NumaNode { node: 900, cpus: String::new(), ..here.clone() };
        let limits = NodeLimits::measure(&[here.clone(), absent], &pool, 64 << 20, Effort::Quick).unwrap();
        if limits.is_empty() {
            println!("skipped: this process may not bind memory");
            return;
        }
        assert_eq!((limits.len(), limits[0].node, limits[0].own), (1, here.node, true));
        assert!(limits[0].bytes_s > 1e8);
    }
}
