//! One piece of work of a lane, and its execution.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use super::ops::pages::PageShape;
use super::program::{self, OwnedLaunch};
use crate::Result;
use crate::device::accelerator::{LayerPages, PageMove};
use crate::device::runtime::{DevPtr, Pinned};

/// Bytes of the device's (or of pinned) memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Address of the first byte.
    pub ptr: DevPtr,
    /// Number of bytes.
    pub len: usize,
}

impl Span {
    /// `len` bytes from `ptr` on.
    pub fn new(ptr: DevPtr, len: usize) -> Span {
        Span { ptr, len }
    }

    /// One past the last byte.
    pub(super) fn end(&self) -> u64 {
        self.ptr.0 + self.len as u64
    }

    pub(super) fn overlaps(&self, other: &Span) -> bool {
        self.ptr.0 < other.end() && other.ptr.0 < self.end()
    }
}

/// The bytes of host memory that a copy uses, by host address, since pageable memory has no device address.
fn host_span(memory: &Arc<dyn Pinned>, at: usize, len: usize) -> Span {
    Span::new(DevPtr(memory.host() as u64).add(at), len)
}

/// The body of an operation that a lane runs on the host: a function of the bytes it reads and of those it writes, in
/// the order of its spans.
pub(super) type Body = dyn Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send + Sync;

/// An operation that a lane runs on the host.
pub(super) struct HostOp {
    pub name: Cow<'static, str>,
    pub reads: Vec<Span>,
    pub writes: Vec<Span>,
    pub body: Box<Body>,
}

/// The spans that work reads, or those that it writes.
pub(super) enum Spans<'a> {
    None,
    One([Span; 1]),
    All(&'a [Span]),
    Many(Vec<Span>),
}

impl Deref for Spans<'_> {
    type Target = [Span];

    fn deref(&self) -> &[Span] {
        match self {
            Spans::None => &[],
            Spans::One(one) => one,
            Spans::All(all) => all,
            Spans::Many(many) => many,
        }
    }
}

/// Pages of some layers, from the device's layout to the host's or back.
#[derive(Debug, Clone)]
pub(super) struct LayerPageMoves {
    pub page: PageShape,
    pub layers: Arc<[LayerPages]>,
    pub pages: Arc<[PageMove]>,
    pub to_host: bool,
}

impl LayerPageMoves {
    fn bytes(&self) -> usize {
        self.page.bytes()
    }

    /// Each page of each layer, with its spans on the device and on the host.
    fn each(&self) -> impl Iterator<Item = (&PageMove, [Span; 2])> {
        let span = |base: DevPtr, id: u32| Span::new(base.add(id as usize * self.bytes()), self.bytes());
        let of = move |l: &LayerPages| {
            let l = *l;
            self.pages.iter().map(move |p| (p, [span(l.device, p.device), span(l.host, p.host)]))
        };
        self.layers.iter().flat_map(of)
    }

    /// # Safety
    /// As [`Op::run`], for the spans of all pages.
    unsafe fn run(&self) {
        for (page, spans) in self.each() {
            let [device, host] = spans.map(|s| s.ptr.0 as *mut u8);
            self.page.each(|token, d, h, len| {
                let there = token < page.tokens as usize;
                // SAFETY: all of these bytes are the pages'; both pages were found allocated when this was
                // enqueued, and the caller promises that nobody uses them.
                unsafe {
                    match (self.to_host, there) {
                        (true, true) => host.add(h).copy_from_nonoverlapping(device.add(d), len),
                        (true, false) => host.add(h).write_bytes(0, len),
                        (false, true) => device.add(d).copy_from_nonoverlapping(host.add(h), len),
                        (false, false) => device.add(d).write_bytes(0, len),
                    }
                }
            });
        }
    }
}

/// The accelerator's services that work needs.
pub(super) struct Hooks<'a> {
    /// Runs a real kernel.
    pub kernel: &'a dyn Fn(&OwnedLaunch) -> Result<()>,
    /// Whether the kernels' checker tracks which bytes are initialised.
    pub marks: bool,
}

/// Work.
pub(super) enum Op {
    Kernel(Arc<OwnedLaunch>),
    Host(HostOp),
    Pages(LayerPageMoves),
    Copy {
        dst: DevPtr,
        src: DevPtr,
        len: usize,
    },
    Fill {
        dst: DevPtr,
        value: u8,
        len: usize,
    },
    Upload {
        dst: DevPtr,
        data: Arc<[u8]>,
    },
    FromPinned {
        dst: DevPtr,
        src: Arc<dyn Pinned>,
        at: usize,
        len: usize,
    },
    ToPinned {
        src: DevPtr,
        dst: Arc<dyn Pinned>,
        at: usize,
        len: usize,
    },
    ToHost {
        src: DevPtr,
        len: usize,
        to: Arc<Mutex<Vec<u8>>>,
    },
    /// No work: declares spans that the next work touches beyond its own.
    Uses {
        what: Arc<str>,
        reads: Arc<[Span]>,
        writes: Arc<[Span]>,
    },
    /// A pause of this many seconds of emulated time, which the accompanying operations take.
    Elapse(f64),
    Graph(Arc<[Op]>),
}

/// The direction of a copy, which decides its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyDirection {
    ToDevice,
    ToHost,
    Within,
}

impl Op {
    /// The direction and bytes, if this is a copy.
    pub fn copied(&self) -> Option<(CopyDirection, usize)> {
        match self {
            Op::Copy { len, .. } => Some((CopyDirection::Within, *len)),
            Op::Upload { data, .. } => Some((CopyDirection::ToDevice, data.len())),
            Op::FromPinned { len, .. } => Some((CopyDirection::ToDevice, *len)),
            Op::ToPinned { len, .. } | Op::ToHost { len, .. } => Some((CopyDirection::ToHost, *len)),
            Op::Kernel(_) | Op::Host(_) | Op::Pages(_) | Op::Fill { .. } => None,
            Op::Uses { .. } | Op::Elapse(_) | Op::Graph(_) => None,
        }
    }

    /// Whether it is a launch: a kernel, an operation, or recorded work.
    pub fn is_launch(&self) -> bool {
        matches!(self, Op::Kernel(_) | Op::Host(_) | Op::Pages(_) | Op::Graph(_))
    }

    /// The spans that it reads and writes, on the device and in pinned memory. Those of a kernel are unknown: it has
    /// its own checker, and pages are declared ([`Op::Uses`]).
    pub fn touches(&self) -> (Spans<'_>, Spans<'_>) {
        let span = |ptr: &DevPtr, len: usize| Spans::One([Span::new(*ptr, len)]);
        let host = |memory, at: &usize, len: &usize| Spans::One([host_span(memory, *at, *len)]);
        match self {
            Op::Kernel(_) | Op::Elapse(_) => (Spans::None, Spans::None),
            Op::Host(op) => (Spans::All(&op.reads), Spans::All(&op.writes)),
            Op::Uses { reads, writes, .. } => (Spans::All(reads), Spans::All(writes)),
            Op::Pages(p) => {
                let [device, host] =
                    [0, 1].map(|side| Spans::Many(p.each().map(|(_, spans)| spans[side]).collect()));
                if p.to_host { (device, host) } else { (host, device) }
            }
            Op::Copy { dst, src, len } => (span(src, *len), span(dst, *len)),
            Op::Fill { dst, len, .. } => (Spans::None, span(dst, *len)),
            Op::Upload { dst, data } => (Spans::None, span(dst, data.len())),
            Op::FromPinned { dst, src, at, len } => (host(src, at, len), span(dst, *len)),
            Op::ToPinned { src, dst, at, len } => (span(src, *len), host(dst, at, len)),
            Op::ToHost { src, len, .. } => (span(src, *len), Spans::None),
            Op::Graph(ops) => {
                let (mut reads, mut writes) = (Vec::new(), Vec::new());
                for op in ops.iter() {
                    let (r, w) = op.touches();
                    reads.extend_from_slice(&r);
                    writes.extend_from_slice(&w);
                }
                (Spans::Many(reads), Spans::Many(writes))
            }
        }
    }

    /// Its name in messages.
    pub fn describe(&self) -> String {
        match self {
            Op::Kernel(launch) => format!("kernel {}", launch.kernel),
            Op::Host(op) => format!("operation {}", op.name),
            Op::Pages(p) => format!("operation {}_pages", if p.to_host { "gather" } else { "scatter" }),
            Op::Copy { len, .. } => format!("copy of {len} bytes within the device"),
            Op::Fill { len, .. } => format!("fill of {len} bytes"),
            Op::Upload { data, .. } => format!("copy of {} bytes to the device", data.len()),
            Op::FromPinned { len, .. } => format!("copy of {len} bytes to the device"),
            Op::ToPinned { len, .. } | Op::ToHost { len, .. } => {
                format!("copy of {len} bytes to the host")
            }
            Op::Uses { what, .. } => what.to_string(),
            Op::Elapse(seconds) => format!("{seconds} s of emulated time"),
            Op::Graph(ops) => format!("recorded work of {} operations", ops.len()),
        }
    }

    /// Does the work.
    ///
    /// # Safety
    /// Every span of [`Op::touches`] lies in allocated (or pinned) memory that stays so until the end, and
    /// no other thread writes what this reads, or touches what this writes. Reads and writes of a host
    /// operation do not overlap.
    pub unsafe fn run(&self, hooks: &Hooks<'_>) -> Result<()> {
        match self {
            Op::Kernel(launch) => return (hooks.kernel)(launch),
            Op::Uses { .. } | Op::Elapse(_) => {}
            Op::Graph(ops) => {
                for op in ops.iter() {
                    // SAFETY: the spans of a graph are those of its parts, which run one after another.
                    unsafe { op.run(hooks)? };
                }
            }
            // SAFETY: by this function's contract.
            Op::Host(op) => unsafe { run_on_slices(op)? },
            // SAFETY: by this function's contract.
            Op::Pages(p) => unsafe { p.run() },
            // SAFETY: both ranges are allocated and nothing else uses them now (`copy` allows them to overlap).
            Op::Copy { dst, src, len } => unsafe {
                std::ptr::copy(src.0 as *const u8, dst.0 as *mut u8, *len)
            },
            // SAFETY: allocated, and nothing else uses it now.
            Op::Fill { dst, value, len } => unsafe { std::ptr::write_bytes(dst.0 as *mut u8, *value, *len) },
            // SAFETY: as above; `data` is the program's own.
            Op::Upload { dst, data } => unsafe {
                std::ptr::copy_nonoverlapping(data.as_ptr(), dst.0 as *mut u8, data.len())
            },
            // SAFETY: as above; the range of pinned memory was checked when this was enqueued, and its
            // owner leaves it alone until an event after this is done.
            Op::FromPinned { dst, src, at, len } => unsafe {
                std::ptr::copy_nonoverlapping(src.host().add(*at), dst.0 as *mut u8, *len)
            },
            // SAFETY: as above.
            Op::ToPinned { src, dst, at, len } => unsafe {
                std::ptr::copy_nonoverlapping(src.0 as *const u8, dst.host().add(*at), *len)
            },
            Op::ToHost { src, len, to } => {
                // SAFETY: allocated, and nobody writes it now.
                let bytes = unsafe { std::slice::from_raw_parts(src.0 as *const u8, *len) };
                *to.lock().unwrap_or_else(|e| e.into_inner()) = bytes.to_vec();
            }
        }
        // Host memory is initialised when it is mapped, and the kernels' checker tracks only memory that the device can
        // access.
        if hooks.marks && !matches!(self, Op::ToPinned { .. } | Op::Uses { .. }) {
            for span in self.touches().1.iter() {
                program::mark_initialised(span.ptr, span.len);
            }
        }
        Ok(())
    }
}

/// Number of operands that most operations stay below; more than this many are allocated on the heap.
const FEW: usize = 24;

/// The one place where the device's memory becomes slices.
///
/// # Safety
/// As [`Op::run`].
unsafe fn run_on_slices(op: &HostOp) -> Result<()> {
    let read = |s: &Span| match s.len {
        0 => &[][..],
        // SAFETY: allocated, and stays so while the operation runs; nobody writes it meanwhile.
        len => unsafe { std::slice::from_raw_parts(s.ptr.0 as *const u8, len) },
    };
    let write = |s: &Span| match s.len {
        0 => &mut [][..],
        // SAFETY: as above; nobody else touches it, and the operation's own spans are apart.
        len => unsafe { std::slice::from_raw_parts_mut(s.ptr.0 as *mut u8, len) },
    };
    if op.reads.len().max(op.writes.len()) > FEW {
        let reads: Vec<&[u8]> = op.reads.iter().map(read).collect();
        let mut writes: Vec<&mut [u8]> = op.writes.iter().map(write).collect();
        return (op.body)(&reads, &mut writes);
    }
    let mut reads: [&[u8]; FEW] = [&[]; FEW];
    let mut writes: [&mut [u8]; FEW] = std::array::from_fn(|_| Default::default());
    reads.iter_mut().zip(&op.reads).for_each(|(to, s)| *to = read(s));
    writes.iter_mut().zip(&op.writes).for_each(|(to, s)| *to = write(s));
    (op.body)(&reads[..op.reads.len()], &mut writes[..op.writes.len()])
}
