//! The machine's memory nodes, and binding memory to them.
//!
//! A node is the memory of a socket, or memory without processors (CXL). By default the system puts a page on the node of the
//! core that touches it first. Weights that only cross the link to a device may lie on a slow node (LIA §5), which
//! leaves the fast one to keys, values and activations.
//!
//! refs   mbind(2), numa(7); /sys/devices/system/node

use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use crate::{Error, Result};

/// A memory node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// Its number.
    pub node: usize,
    /// Its processors, as the system writes them: `0-3,8`; empty for a node without processors.
    pub cpus: String,
    /// Bytes, if the system reports them.
    pub memory: Option<u64>,
    /// Bytes that are free or hold only files that can be read again.
    #[serde(skip)]
    pub available: Option<u64>,
}

impl NumaNode {
    /// Whether a core that this process may use belongs to it.
    pub fn is_own(&self) -> bool {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.trim().parse::<usize>().ok()?..=last.trim().parse().ok()?)
        };
        let ranges: Vec<_> = self.cpus.split(',').filter_map(range).collect();
        super::cpu::cores().iter().any(|core| ranges.iter().any(|r| r.contains(&core.id)))
    }

    /// A short description.
    pub fn describe(&self) -> String {
        let memory = self.memory.map_or("memory unknown".into(), gigabytes);
        format!("cpus {}, {memory}", if self.cpus.is_empty() { "none" } else { &self.cpus })
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

/// The nodes of this machine, ascending; none if the system does not report them.
pub fn numa_nodes() -> Vec<NumaNode> {
    nodes_in(Path::new("/sys/devices/system/node"))
}

/// The nodes below a folder like `/sys/devices/system/node`.
pub fn nodes_in(folder: &Path) -> Vec<NumaNode> {
    let read = |path: &Path| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
    let mut nodes: Vec<NumaNode> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let info = read(&entry.path().join("meminfo")).unwrap_or_default();
            let of = |key: &str| kibibytes(&info, key);
            Some(NumaNode {
                node,
                cpus: read(&entry.path().join("cpulist"))?,
                memory: of("MemTotal:"),
                available: of("MemFree:").map(|free| free + of("FilePages:").unwrap_or(0)),
            })
        })
        .collect();
    nodes.sort_by_key(|n| n.node);
    nodes
}

fn kibibytes(info: &str, key: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.split_once(key).map(|(_, v)| v))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// The largest number that is taken for a node's: beyond those of any kernel, which has 1024.
const MOST_NUMBER: usize = u16::MAX as usize;

/// The requested place of weights, from `--weights-node`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NumaWish {
    /// On these nodes, ascending; page by page over several.
    Nodes(Vec<usize>),
    /// Page by page over all nodes with memory.
    Interleave,
}

impl FromStr for NumaWish {
    type Err = String;

    /// `1`, `0,2`, `1-3`, `interleave`.
    fn from_str(text: &str) -> std::result::Result<NumaWish, String> {
        if text == "interleave" {
            return Ok(NumaWish::Interleave);
        }
        let number = |n: &str| n.parse::<usize>().ok().filter(|&n| n <= MOST_NUMBER);
        let range = |part: &str| match part.split_once('-') {
            None => number(part).map(|n| n..=n),
            Some((first, last)) => Some(number(first)?..=number(last)?).filter(|r| !r.is_empty()),
        };
        let parts: Option<Vec<_>> = text.split(',').map(range).collect();
        let mut nodes: Vec<usize> = parts
            .ok_or("the numbers of nodes, like 1 or 1,2 or 1-3, or interleave")?
            .into_iter()
            .flatten()
            .collect();
        nodes.sort_unstable();
        nodes.dedup();
        Ok(NumaWish::Nodes(nodes))
    }
}

/// Nodes that memory is bound to. Made by [`NumaWish::among`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaBinding {
    nodes: Vec<NumaNode>,
    interleave: bool,
}

impl NumaWish {
    /// Resolves the request on a machine with these `nodes`.
    ///
    /// # Errors
    /// If the node does not exist or has no memory; the message lists the existing ones.
    pub fn among(&self, nodes: &[NumaNode]) -> Result<NumaBinding> {
        let with_memory: Vec<NumaNode> = nodes.iter().filter(|n| n.memory != Some(0)).cloned().collect();
        if with_memory.is_empty() {
            return Err(Error::Unsupported(
                "`weights_node`: this system does not tell its memory nodes; leave it out".into(),
            ));
        }
        match self {
            NumaWish::Interleave => Ok(NumaBinding { nodes: with_memory, interleave: true }),
            NumaWish::Nodes(wanted) => {
                match wanted.iter().find(|&&w| with_memory.iter().all(|n| n.node != w)) {
                    None => {
                        let nodes: Vec<_> =
                            with_memory.into_iter().filter(|n| wanted.contains(&n.node)).collect();
                        Ok(NumaBinding { interleave: nodes.len() > 1, nodes })
                    }
                    Some(wanted) => {
                        let there = |n: &NumaNode| format!("{} ({})", n.node, n.describe());
                        let there: Vec<_> = with_memory.iter().map(there).collect();
                        let plural = if there.len() == 1 { "node is" } else { "nodes are" };
                        Err(Error::usage(format!(
                            "`weights_node` {wanted}: there is no such node with memory; this machine's {plural} {}",
                            there.join(", ")
                        )))
                    }
                }
            }
        }
    }

    /// The nodes meant, of a machine that has `all`.
    pub fn numbers(&self, all: &[usize]) -> Vec<usize> {
        match self {
            NumaWish::Nodes(nodes) => nodes.clone(),
            NumaWish::Interleave => all.to_vec(),
        }
    }
}

impl NumaBinding {
    /// The numbers of the nodes, ascending.
    fn numbers(&self) -> Vec<usize> {
        self.nodes.iter().map(|n| n.node).collect()
    }

    /// A short description: `node 1 (cpus none, 137.44 GB)`.
    pub fn describe(&self) -> String {
        let numbers: Vec<String> = self.numbers().iter().map(usize::to_string).collect();
        match &self.nodes[..] {
            [node] => format!("node {} ({})", node.node, node.describe()),
            _ => format!("nodes {}, page by page", numbers.join(", ")),
        }
    }

    /// Returns an error for more bytes than the nodes have, since touching memory bound to full nodes ends the process.
    ///
    /// # Errors
    /// [`Error::Capacity`], with the numbers.
    pub fn check(&self, bytes: u64) -> Result<()> {
        let Some(available) = self.nodes.iter().map(|n| n.available).sum::<Option<u64>>() else {
            return Ok(());
        };
        if bytes <= available {
            return Ok(());
        }
        Err(Error::Capacity(format!(
            "`weights_node`: {} of weights do not fit {}, which has {} available",
            gigabytes(bytes),
            self.describe(),
            gigabytes(available)
        )))
    }

    /// Binds the whole pages inside a range of this process's memory; existing pages are moved.
    ///
    /// # Errors
    /// If the system refuses: it has no such call, or this process may not use the nodes.
    pub fn bind(&self, start: *mut u8, len: usize) -> Result<()> {
        let (from, to) = whole_pages(start as usize, len);
        if from >= to {
            return Ok(());
        }
        #[cfg(target_os = "linux")]
        {
            let mode = if self.interleave { libc::MPOL_INTERLEAVE } else { libc::MPOL_BIND };
            let mask = self.mask();
            // The kernel reads one bit fewer than this number says.
            let bits = (mask.len() * u64::BITS as usize + 1) as libc::c_ulong;
            // SAFETY: no byte of the range changes, whatever the policy; the mask is as long as stated.
            let done =
                unsafe { libc::syscall(libc::SYS_mbind, from, to - from, mode, mask.as_ptr(), bits, MOVE) };
            if done == 0 {
                return Ok(());
            }
        }
        Err(self.refused())
    }

    /// Calls `f` while memory that this thread allocates or touches first goes to the nodes: for memory that cannot be
    /// moved later because a driver pins it on allocation.
    ///
    /// # Errors
    /// As [`NumaBinding::bind`].
    pub fn during<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        #[cfg(target_os = "linux")]
        {
            let mode = if self.interleave { libc::MPOL_INTERLEAVE } else { libc::MPOL_BIND };
            let before = ThreadPolicy::current().ok_or_else(|| self.refused())?;
            if !ThreadPolicy::set(mode, &self.mask()) {
                return Err(self.refused());
            }
            let done = f();
            // The system does not refuse the policy that was just in force.
            ThreadPolicy::set(before.mode, &before.mask);
            Ok(done)
        }
        #[cfg(not(target_os = "linux"))]
        {
            let _ = f;
            Err(self.refused())
        }
    }

    fn refused(&self) -> Error {
        let why = std::io::Error::last_os_error();
        Error::Unsupported(format!(
            "`weights_node`: the system refuses to put memory on {}: {why}; may this process use it?",
            self.describe()
        ))
    }

    /// A bit for each node.
    fn mask(&self) -> Vec<u64> {
        let bits = u64::BITS as usize;
        let last = self.nodes.iter().map(|n| n.node).max().unwrap_or(0);
        let mut mask = vec![0; last / bits + 1];
        for n in &self.nodes {
            mask[n.node / bits] |= 1 << (n.node % bits);
        }
        mask
    }
}

/// The policy of the calling thread: set_mempolicy(2).
#[cfg(target_os = "linux")]
struct ThreadPolicy {
    mode: libc::c_int,
    mask: Vec<u64>,
}

#[cfg(target_os = "linux")]
impl ThreadPolicy {
    /// Upper bound of the number of nodes of any kernel.
    const NODES: usize = 1024;

    fn current() -> Option<ThreadPolicy> {
        let (mut mode, mut mask) = (0, vec![0u64; ThreadPolicy::NODES / 64]);
        let (bits, none) = (ThreadPolicy::NODES as libc::c_ulong, std::ptr::null::<u8>());
        // SAFETY: both are written within their sizes.
        let done =
            unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut mode, mask.as_mut_ptr(), bits, none, 0) };
        (done == 0).then_some(ThreadPolicy { mode, mask })
    }

    fn set(mode: libc::c_int, mask: &[u64]) -> bool {
        // The default policy has no nodes.
        let (nodes, bits) = match mask.iter().any(|&m| m != 0) {
            true => (mask.as_ptr(), mask.len() * u64::BITS as usize + 1),
            false => (std::ptr::null(), 0),
        };
        // SAFETY: the mask is as long as stated.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, bits as libc::c_ulong) == 0 }
    }
}

/// `MPOL_MF_MOVE` of mbind(2): existing pages are moved.
#[cfg(target_os = "linux")]
const MOVE: libc::c_uint = 2;

/// The addresses of the whole pages inside a range.
fn whole_pages(start: usize, len: usize) -> (usize, usize) {
    const PAGE: usize = 4096;
    (start.next_multiple_of(PAGE), (start + len) / PAGE * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets and a CXL card.
    fn machine() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (node, cpus, kib) in [(0, "0-15", 1000), (1, "16-31", 2000), (10, "", 8_000_000), (3, "", 0)] {
            let folder = dir.path().join(format!("node{node}"));
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("cpulist"), format!("{cpus}\n")).unwrap();
            let info = format!(
                "Node {node} MemTotal:  {kib} kB\nNode {node} MemFree: {} kB\nNode {node} FilePages: {} kB\n",
                kib / 2,
                kib / 4
            );
            std::fs::write(folder.join("meminfo"), info).unwrap();
        }
        std::fs::write(dir.path().join("online"), "0-1,10\n").unwrap();
        dir
    }

    #[test]
    fn nodes_are_read_from_a_tree() {
        let dir = machine();
        let nodes = nodes_in(dir.path());
        assert_eq!(nodes.iter().map(|n| n.node).collect::<Vec<_>>(), [0, 1, 3, 10]);
        assert_eq!((nodes[1].memory, nodes[1].available), (Some(2_048_000), Some(1_536_000)));
        assert_eq!(nodes[3].describe(), "cpus none, 8.19 GB");
        assert!(nodes_in(&dir.path().join("nowhere")).is_empty());
    }

    #[test]
    fn wishes_are_granted_or_refused_with_the_nodes_there_are() {
        let nodes = nodes_in(machine().path());
        let bind = |text: &str| text.parse::<NumaWish>().unwrap().among(&nodes);
        assert_eq!(bind("10").unwrap().describe(), "node 10 (cpus none, 8.19 GB)");
        assert_eq!(bind("10").unwrap().mask(), [1 << 10]);
        let all = bind("interleave").unwrap();
        assert_eq!(
            (all.describe().as_str(), all.mask()),
            ("nodes 0, 1, 10, page by page", vec![1 | 2 | 1 << 10])
        );
        for absent in ["2", "3"] {
            let error = bind(absent).unwrap_err().to_string();
            for word in [absent, "0 (cpus 0-15", "1 (cpus 16-31", "10 (cpus none, 8.19 GB)"] {
                assert!(error.contains(word), "{error:?} does not say {word:?}");
            }
        }
        let some = bind("10,0-1,0").unwrap();
        assert_eq!((some.numbers(), some.interleave), (vec![0, 1, 10], true));
        assert_eq!((bind("0,1").unwrap().mask(), bind("1-1").unwrap().interleave), (vec![3], false));
        for bad in ["", "-1", "one", "0,", "2-1", "0-65536", "1-2-3", "99999999999999999999"] {
            assert!(bad.parse::<NumaWish>().is_err(), "{bad}");
        }
        assert!(bind("0-2").unwrap_err().to_string().contains("`weights_node` 2: there is no such node"));
        let nowhere = NumaWish::Interleave.among(&[]).unwrap_err().to_string();
        assert!(nowhere.contains("does not tell"), "{nowhere}");
    }

    #[test]
    fn more_than_the_nodes_have_is_refused_with_the_numbers() {
        let nodes = nodes_in(machine().path());
        let card = NumaWish::Nodes(vec![10]).among(&nodes).unwrap();
        card.check(6_000_000_000).unwrap();
        let error = card.check(7_000_000_000).unwrap_err().to_string();
        assert!(error.contains("7.00 GB") && error.contains("6.14 GB available"), "{error}");
    }

    #[test]
    fn a_mask_goes_beyond_a_word() {
        let node = NumaNode { node: 70, cpus: String::new(), memory: Some(1), available: None };
        let mask = NumaWish::Nodes(vec![70]).among(&[node]).unwrap().mask();
        assert_eq!(mask, [0, 1 << 6]);
    }

    #[test]
    fn only_whole_pages_are_bound() {
        assert_eq!(whole_pages(4096, 8192), (4096, 12288));
        assert_eq!(whole_pages(4097, 8192), (8192, 12288));
        let (from, to) = whole_pages(5000, 100);
        assert!(from >= to);
    }

    /// Tests the system itself, if it has nodes and permits it.
    #[cfg(target_os = "linux")]
    #[test]
    fn memory_is_where_it_was_bound() {
        let Some(node) = numa_nodes().pop() else {
            println!("skipped: this system does not tell its memory nodes");
            return;
        };
        let binding = NumaWish::Nodes(vec![node.node]).among(&numa_nodes()).unwrap();
        let mut map = memmap2::MmapMut::map_anon(64 << 10).unwrap();
        map[0] = 1;
        if let Err(refused) = binding.bind(map.as_mut_ptr(), map.len()) {
            println!("skipped: {refused}");
            return;
        }
        map.fill(2);
        let (mut mode, mut mask) = (0, [0u64; 16]);
        // MPOL_F_ADDR: the policy of an address.
        let by_address = 2;
        // SAFETY: both are written within their sizes.
        let done = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &mut mode,
                mask.as_mut_ptr(),
                1024,
                map.as_ptr(),
                by_address,
            )
        };
        assert_eq!((done, mode), (0, libc::MPOL_BIND));
        assert_eq!(mask[..binding.mask().len()], binding.mask());

        let before = ThreadPolicy::current().unwrap();
        let during = binding.during(|| ThreadPolicy::current().unwrap()).unwrap();
        assert_eq!(
            (during.mode, &during.mask[..binding.mask().len()]),
            (libc::MPOL_BIND, &binding.mask()[..])
        );
        let after = ThreadPolicy::current().unwrap();
        assert_eq!((after.mode, after.mask), (before.mode, before.mask), "as it was");
    }
}
