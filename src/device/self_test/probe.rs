//! What the checks of a group share: memory of a device, the wait with a deadline, comparisons, and what failed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::numbers::value;
use super::watch::Watch;
use super::{GroupReport, Verdict};
use crate::cache::KvType;
use crate::device::runtime::{Buffer, DevPtr, Lane, Runtime};
use crate::tensor::Half;
use crate::{Error, Result};

pub const LANE: Lane = Lane::Compute;
/// What outputs hold before a kernel writes them: a NaN in every float type, an absurd index.
const CANARY: u8 = 0xff;
/// Bytes behind an output that nobody may write.
const GUARD: usize = 256;
/// A check launches microseconds of work; on the host's emulation of the kernels some seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// How far the worst element of an output is from its definition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worst {
    /// The error as a share of what the arithmetic allows: right up to 1.
    pub share: f64,
    pub got: f64,
    pub want: f64,
    pub allowed: f64,
    pub at: usize,
}

impl Worst {
    /// Nothing is off.
    pub const EXACT: Worst = Worst { share: 0.0, got: 0.0, want: 0.0, allowed: 0.0, at: 0 };

    /// Compares each element with (its definition, the allowed error).
    pub fn of(got: &[f64], want: impl IntoIterator<Item = (f64, f64)>) -> Worst {
        let mut worst = Worst::EXACT;
        let mut n = 0;
        for (at, (&got, (want, allowed))) in got.iter().zip(want).enumerate() {
            n += 1;
            let off = (got - want).abs();
            let share = match off {
                off if off.is_nan() => f64::INFINITY,
                0.0 => 0.0,
                off => off / allowed,
            };
            if share > worst.share {
                worst = Worst { share, got, want, allowed, at };
            }
        }
        assert_eq!(n, got.len(), "a definition of each element");
        worst
    }

    /// Compares bytes, of which each has to be equal.
    pub fn of_bytes(got: &[u8], want: &[u8]) -> Worst {
        assert_eq!(got.len(), want.len(), "a definition of each byte");
        let as_f64 = |x: &[u8]| x.iter().map(|&b| f64::from(b)).collect::<Vec<_>>();
        Worst::of(&as_f64(got), as_f64(want).into_iter().map(|b| (b, 0.0)))
    }

    /// The worse of two.
    pub fn max(self, other: Worst) -> Worst {
        if other.share > self.share { other } else { self }
    }
}

/// A device, and what became of the checks of a group so far.
pub struct Probe {
    pub rt: Arc<dyn Runtime>,
    watch: Arc<Watch>,
    /// Kernels that computed wrong values, and how.
    wrong: BTreeMap<String, String>,
    /// Kernels that were right where they ran alone.
    right: BTreeSet<String>,
    /// The largest share of an allowed error, of the checks that passed.
    worst: f64,
    checks: usize,
    /// Why the device runs nothing more.
    lost: Option<String>,
    /// Why some checks could not be made: no memory; a property that the device lacks.
    short: Option<String>,
    lacking: Option<String>,
}

impl Probe {
    pub fn new(watch: Arc<Watch>) -> Probe {
        Probe {
            rt: watch.clone(),
            watch,
            wrong: BTreeMap::new(),
            right: BTreeSet::new(),
            worst: 0.0,
            checks: 0,
            lost: None,
            short: None,
            lacking: None,
        }
    }

    /// Forgets the checks of the group before.
    pub fn begin_group(&mut self) {
        let fresh = Probe::new(self.watch.clone());
        *self = Probe { lost: self.lost.take(), right: std::mem::take(&mut self.right), ..fresh };
    }

    /// The verdict on the group.
    pub fn end_group(&self, name: &str, kernels: usize, seconds: f64) -> GroupReport {
        let (outcome, why) = match (&self.lost, &self.short, &self.lacking) {
            _ if !self.wrong.is_empty() => (Verdict::Failed, None),
            (Some(why), _, _) | (None, Some(why), _) => (Verdict::NotRun, Some(why)),
            (None, None, Some(why)) => (Verdict::Skipped, Some(why)),
            (None, None, None) => (Verdict::Passed, None),
        };
        GroupReport {
            name: name.to_owned(),
            outcome,
            kernels,
            checks: self.checks,
            worst: self.worst,
            failed: self.wrong.clone(),
            why: why.cloned(),
            seconds,
        }
    }

    /// Whether the kernel is there, and was not found to be wrong before.
    pub fn has(&self, kernel: &str) -> bool {
        self.rt.has_kernel(kernel)
    }

    /// Leaves a part of the group out, and says why.
    pub fn lacks(&mut self, why: &str) {
        self.lacking.get_or_insert(why.to_owned());
    }

    /// Makes one check: `body` launches, reads, and compares. If it fails, the kernels that it launched are suspect: those that
    /// failed before, or else those that were not right alone.
    pub fn check(&mut self, what: &str, body: impl FnOnce(&Probe) -> Result<Worst>) {
        self.check_named(what, None, body);
    }

    /// As [`Probe::check`]; `suspect` is what is to blame, whatever was launched.
    pub fn check_named(
        &mut self,
        what: &str,
        suspect: Option<&str>,
        body: impl FnOnce(&Probe) -> Result<Worst>,
    ) {
        if self.lost.is_some() {
            return;
        }
        self.watch.begin();
        let found = body(self);
        let kernels = match suspect {
            Some(name) => [name.to_owned()].into(),
            None => self.watch.launched_since_begin(),
        };
        let why = match found {
            Ok(worst) => {
                self.checks += 1;
                if worst.share <= 1.0 {
                    self.worst = self.worst.max(worst.share);
                    if kernels.len() == 1 {
                        self.right.extend(kernels);
                    }
                    return;
                }
                format!(
                    "{what}: element {} is {:.6e}, wanted {:.6e} within {:.1e}",
                    worst.at, worst.got, worst.want, worst.allowed
                )
            }
            Err(Error::Capacity(why)) => {
                self.short.get_or_insert(why);
                return;
            }
            Err(Error::Unsupported(why)) => {
                self.lacking.get_or_insert(why);
                return;
            }
            Err(error) => {
                self.checks += 1;
                // A failed launch need not end the device; a fault does.
                if let Err(lost) = self.finish() {
                    self.lost = Some(lost.to_string());
                }
                format!("{what}: {error}")
            }
        };
        if kernels.iter().any(|kernel| self.wrong.contains_key(kernel)) {
            return;
        }
        let all_right = kernels.is_subset(&self.right);
        for kernel in kernels {
            if all_right || !self.right.contains(&kernel) {
                self.wrong.insert(kernel, why.clone());
            }
        }
    }

    pub fn up(&self, bytes: &[u8]) -> Result<Buffer> {
        Buffer::from_bytes(&self.rt, LANE, bytes)
    }

    /// An output of `len` bytes.
    pub fn out(&self, len: usize) -> Result<Buffer> {
        let buffer = Buffer::new(&self.rt, len + GUARD)?;
        self.rt.fill(LANE, buffer.ptr(), CANARY, len + GUARD)?;
        Ok(buffer)
    }

    /// Zeroed memory.
    pub fn zeros(&self, len: usize) -> Result<Buffer> {
        let buffer = Buffer::new(&self.rt, len)?;
        self.rt.fill(LANE, buffer.ptr(), 0, len)?;
        Ok(buffer)
    }

    /// Waits for the compute lane, not forever.
    pub fn finish(&self) -> Result<()> {
        let event = self.rt.record(LANE)?;
        match self.rt.synchronize_until(&event, Instant::now() + PATIENCE)? {
            true => Ok(()),
            false => Err(Error::Device {
                what: self.rt.info().name.clone(),
                problem: format!("a kernel has not ended after {} s", PATIENCE.as_secs()),
            }),
        }
    }

    /// An [output](Probe::out).
    pub fn bytes(&self, out: &Buffer) -> Result<Vec<u8>> {
        self.finish()?;
        let mut all = vec![0; out.len()];
        self.rt.download(LANE, out.ptr(), &mut all)?;
        let guard = all.split_off(out.len() - GUARD);
        match guard.iter().all(|&b| b == CANARY) {
            true => Ok(all),
            false => Err(Error::Run("it wrote behind the end of its output".into())),
        }
    }

    pub fn floats(&self, out: &Buffer) -> Result<Vec<f64>> {
        let each = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Ok(self.bytes(out)?.chunks_exact(4).map(each).collect())
    }

    pub fn halves(&self, out: &Buffer, half: Half) -> Result<Vec<f64>> {
        let each = |b: &[u8]| value(half, u16::from_le_bytes([b[0], b[1]]));
        Ok(self.bytes(out)?.chunks_exact(2).map(each).collect())
    }

    pub fn words(&self, out: &Buffer) -> Result<Vec<f64>> {
        let each = |b: &[u8]| f64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Ok(self.bytes(out)?.chunks_exact(4).map(each).collect())
    }

    /// 16-bit types that the device computes with.
    pub fn half_types(&self) -> &'static [Half] {
        if self.rt.info().sm >= 80 { &[Half::F16, Half::BF16] } else { &[Half::F16] }
    }
}

/// The types of keys and values that the device has kernels for.
pub fn kv_types(p: &Probe) -> Vec<KvType> {
    p.half_types().iter().map(|&half| half.into()).chain([KvType::Q8]).collect()
}

/// The address of an optional buffer, or NULL.
pub fn at(buffer: &Option<Buffer>) -> DevPtr {
    buffer.as_ref().map_or(DevPtr::NULL, Buffer::ptr)
}
