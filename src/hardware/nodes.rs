//! Memory nodes beside the CPU's own memory, for weights on the host: CXL expanders, another socket's memory (LIA §5.4).
//!
//! ```text
//! [[node]]  node  bytes  read_bw       as often as there are nodes; 0 is the CPU's own memory, `[cpu]` describes it
//! ```
//! Keys, values and activations stay in the CPU's own memory. Weights on several nodes alternate page by page, so that
//! all nodes deliver as much in the same time: n nodes are as fast as n times the slowest of them.

use serde::Serialize;
use toml::{Table, Value};

use super::{BYTES, Cpu, Hardware, RATE, Section};
use crate::{Error, Result};

/// Number of the CPU's own memory in a description.
const OWN: usize = 0;

/// Most nodes of a Linux kernel.
const NODES: f64 = 1024.0;

/// The memory of a node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Node {
    /// Its number.
    pub node: usize,
    /// Memory, in bytes.
    pub bytes: f64,
    /// Rate at which all cores together read it, bytes/s.
    pub read_bw: f64,
    /// Whether it is a part of the CPU's own memory, which [`Cpu`] describes, too.
    #[serde(skip)]
    pub own: bool,
}

/// Where weights on the host lie, if not all in the CPU's own memory: see [`Hardware::with_weights_on`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WeightsNodes {
    /// The nodes, ascending.
    pub nodes: Vec<usize>,
    /// How many of them are a part of the CPU's own memory.
    pub own: usize,
    /// Bytes of the others.
    pub bytes: f64,
    /// Rate at which all cores together read weights, bytes/s.
    pub read_bw: f64,
}

impl WeightsNodes {
    /// `node 1`, `nodes 1, 2 page by page`.
    pub fn describe(&self) -> String {
        let numbers: Vec<String> = self.nodes.iter().map(usize::to_string).collect();
        match &numbers[..] {
            [one] => format!("node {one}"),
            _ => format!("nodes {} page by page", numbers.join(", ")),
        }
    }
}

impl Hardware {
    /// The nodes beside the CPU's own memory; empty if there are none.
    pub fn spare_nodes(&self) -> Vec<usize> {
        self.nodes.iter().filter(|n| !n.own).map(|n| n.node).collect()
    }

    /// Takes `available` bytes of all nodes together as the CPU's own memory, less those of nodes beside it.
    pub fn share_memory(&mut self, available: f64) {
        let others: f64 = self.nodes.iter().filter(|n| !n.own).map(|n| n.bytes).sum();
        self.cpu.dram_bytes = (available - others).max(BYTES.0);
    }

    /// All nodes, the CPU's own memory first.
    pub fn all_nodes(&self) -> Vec<usize> {
        let mut all: Vec<usize> = self.nodes.iter().map(|n| n.node).collect();
        if self.nodes.iter().all(|n| !n.own) {
            all.push(OWN);
        }
        all.sort_unstable();
        all
    }

    /// This machine with weights on the host on these nodes.
    ///
    /// # Errors
    /// A node that is not described; the message names those that are.
    pub fn with_weights_on(&self, nodes: &[usize]) -> Result<Hardware> {
        let (mut numbers, all) = (nodes.to_vec(), self.all_nodes());
        numbers.sort_unstable();
        numbers.dedup();
        if let Some(unknown) = numbers.iter().find(|n| !all.contains(n)) {
            let all: Vec<String> = all.iter().map(usize::to_string).collect();
            return Err(Error::usage(format!(
                "`weights_node` {unknown}: {} has no such memory node; it has {} ([[node]] describes more)",
                self.name,
                all.join(", ")
            )));
        }
        let known = |n: &usize| self.nodes.iter().find(|node| node.node == *n);
        let rate = |n: &usize| known(n).map_or(self.cpu.read_bw, |node| node.read_bw);
        let others: Vec<&Node> = numbers.iter().filter_map(known).filter(|n| !n.own).collect();
        let slowest = numbers.iter().map(rate).fold(f64::INFINITY, f64::min);
        let weights = (!others.is_empty()).then(|| WeightsNodes {
            own: numbers.len() - others.len(),
            bytes: others.iter().map(|n| n.bytes).sum(),
            read_bw: slowest * numbers.len() as f64,
            nodes: numbers,
        });
        Ok(Hardware { weights, ..self.clone() })
    }
}

/// Reads all `[[node]]` of a description.
pub(super) fn parse(file: &str, root: &Table, cpu: &Cpu) -> Result<Vec<Node>> {
    let of = |what: &str| Error::format(format!("{file}: node"), format!("{what}, wanted sections [[node]]"));
    let sections = match root.get("node") {
        None => return Ok(Vec::new()),
        Some(Value::Array(sections)) => sections,
        Some(Value::Table(_)) => return Err(of("one section [node]")),
        Some(other) => return Err(of(other.type_str())),
    };
    let mut nodes: Vec<Node> = Vec::new();
    for section in sections {
        let Value::Table(table) = section else { return Err(of(section.type_str())) };
        let s = Section::new(file, "node", table, &["node", "bytes", "read_bw"])?;
        let number =
            s.number("node", (1.0, NODES - 1.0, "a whole number from 1 to 1023; 0 is the CPU's own memory"))?;
        let node = Node {
            node: number as usize,
            bytes: s.number("bytes", BYTES)?,
            read_bw: s.number("read_bw", RATE)?,
            own: false,
        };
        let wrong = |field: &str, what: String| Err(Error::format(format!("{file}: node.{field}"), what));
        if number.fract() != 0.0 {
            return wrong("node", format!("{number}, wanted a whole number"));
        }
        if nodes.iter().any(|n| n.node == node.node) {
            return wrong("node", format!("{} is described twice", node.node));
        }
        if node.read_bw > cpu.read_bw {
            let (node, own) = (node.read_bw, cpu.read_bw);
            return wrong("read_bw", format!("{node:e}, wanted at most cpu.read_bw, {own:e}"));
        }
        nodes.push(node);
    }
    nodes.sort_by_key(|n| n.node);
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::super::{named, parse};
    use super::*;

    const CPU: &str =
        "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = 45e9\nflops_bf16 = 1e12\nllc_bytes = 24e6\n";
    const NODES: &str = "[[node]]\nnode = 2\nbytes = 256e9\nread_bw = 20e9\n[[node]]\nnode = 1\nbytes = 128e9\nread_bw = 17e9\n";

    fn machine() -> Hardware {
        parse("box.toml", &format!("{CPU}{NODES}")).unwrap()
    }

    #[test]
    fn nodes_are_read_in_order_and_the_slowest_sets_the_pace() {
        let h = machine();
        assert_eq!((h.spare_nodes(), h.all_nodes()), (vec![1, 2], vec![0, 1, 2]));
        let on = |nodes: &[usize]| h.with_weights_on(nodes).unwrap().weights;
        assert_eq!(on(&[0]), None);
        let one = on(&[2]).unwrap();
        assert_eq!((one.own, one.bytes, one.read_bw), (0, 256e9, 20e9));
        let both = on(&[2, 1, 2]).unwrap();
        assert_eq!((both.own, both.bytes, both.read_bw), (0, 384e9, 34e9));
        assert_eq!(both.describe(), "nodes 1, 2 page by page");
        let all = on(&[0, 1, 2]).unwrap();
        assert_eq!((all.own, all.bytes, all.read_bw), (1, 384e9, 51e9));
        let error = h.with_weights_on(&[7]).unwrap_err().to_string();
        assert!(error.contains("`weights_node` 7: box has no such memory node; it has 0, 1, 2"), "{error}");
    }

    #[test]
    fn a_measured_machine_may_have_several_nodes_of_its_own() {
        let own = Node { node: 1, bytes: 64e9, read_bw: 40e9, own: true };
        let h = Hardware {
            nodes: vec![own, Node { node: 4, bytes: 128e9, read_bw: 10e9, own: false }],
            ..named("t4-xeon").unwrap()
        };
        assert_eq!((h.spare_nodes(), h.all_nodes()), (vec![4], vec![1, 4]));
        assert_eq!(h.with_weights_on(&[1]).unwrap().weights, None);
        assert!(h.with_weights_on(&[0]).is_err());
        let mut shared = h;
        shared.share_memory(180e9);
        assert_eq!(shared.cpu.dram_bytes, 52e9);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (from, to, want) in [
            ("node = 2", "node = 0", "node.node: 0, wanted a whole number from 1"),
            ("node = 2", "node = 1.5", "node.node: 1.5, wanted a whole number"),
            ("node = 2", "node = 1", "node.node: 1 is described twice"),
            ("bytes = 256e9\n", "", "node.bytes: missing, wanted bytes"),
            ("20e9", "-1", "node.read_bw: -1, wanted bytes/s"),
            ("20e9", "46e9", "node.read_bw: 4.6e10, wanted at most cpu.read_bw, 4.5e10"),
            (
                "node = 2",
                "node = 2\nlatency = 1",
                "node.latency: no such field; [node] has node, bytes, read_bw",
            ),
        ] {
            let error =
                parse("box.toml", &format!("{CPU}{}", NODES.replacen(from, to, 1))).unwrap_err().to_string();
            assert!(error.contains(&format!("box.toml: {want}")), "{want}: {error}");
        }
        for (text, want) in
            [("[node]\nnode = 1\n", "one section [node], wanted sections [[node]]"), ("[cpu.x]\n", "cpu.x")]
        {
            let error = parse("box.toml", &format!("{CPU}{text}")).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
        let error = parse("box.toml", &format!("node = 1\n{CPU}")).unwrap_err().to_string();
        assert!(error.contains("box.toml: node: integer, wanted sections [[node]]"), "{error}");
    }
}
