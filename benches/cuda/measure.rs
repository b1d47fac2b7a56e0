//! Timing on a device, against what the same device copies and multiplies at best.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tandem::Result;
use tandem::device::{Buffer, Lane, Runtime};

/// Repetitions go on for at least so long, several times: the middle one counts.
const SECONDS: f64 = 0.02;
const TIMES: usize = 5;
/// Operands that do not fit here together are cold: twice the largest L2 of today.
const COLD_BYTES: usize = 128 << 20;

/// One kernel on one shape, before it is timed.
pub struct Work<'a> {
    /// Which family of kernels.
    pub family: &'a str,
    /// Name as in `cuda/`.
    pub kernel: String,
    /// Sizes, for people.
    pub shape: String,
    /// Bytes that it must move at least.
    pub bytes: f64,
    /// Floating-point operations that it must do.
    pub flops: f64,
    /// Which [`Bench::matrix`] it is compared with, if its arithmetic is a matter of matrix units.
    pub peak: Option<&'a str>,
}

/// A timed kernel.
struct Line {
    family: String,
    kernel: String,
    shape: String,
    seconds: f64,
    bytes: f64,
    flops: f64,
    peak: Option<f64>,
}

/// The device, the limits it has shown, and what was measured so far.
pub struct Bench {
    pub rt: Arc<dyn Runtime>,
    /// Tiny shapes, answers only.
    pub test: bool,
    /// Bytes read plus bytes written a second by a large copy.
    pub copy: f64,
    /// Floating-point operations a second of matrix units, by the name of the peak kernel.
    pub matrix: BTreeMap<String, f64>,
    words: Vec<String>,
    lines: Vec<Line>,
    checked: usize,
}

impl Bench {
    pub fn new(rt: Arc<dyn Runtime>, test: bool, words: Vec<String>) -> Result<Bench> {
        let mut bench =
            Bench { rt, test, copy: 0.0, matrix: BTreeMap::new(), words, lines: Vec::new(), checked: 0 };
        if !test {
            bench.copy = bench.copy_rate()?;
        }
        Ok(bench)
    }

    /// Whether the words of the command line are all in this work's names.
    pub fn wants(&self, family: &str, kernel: &str, shape: &str) -> bool {
        let line = format!("{family} {kernel} {shape}");
        self.words.iter().all(|w| line.contains(w.as_str()))
    }

    /// Copies of an operand of `bytes` that calls should take in turn, so that each finds it cold.
    pub fn copies(&self, bytes: usize) -> usize {
        if self.test { 1 } else { COLD_BYTES.div_ceil(bytes.max(1)).clamp(1, 64) + 1 }
    }

    /// Times `launch(i)`, the i-th call of many, whose answer the caller has checked.
    pub fn run(&mut self, work: Work<'_>, launch: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        let seconds = if self.test { 0.0 } else { self.seconds(64, launch)? };
        self.timed(work, seconds);
        Ok(())
    }

    /// Notes what the caller has timed, and checked.
    pub fn timed(&mut self, work: Work<'_>, seconds: f64) {
        self.checked += 1;
        if self.test {
            return println!("checked {} {} {}", work.family, work.kernel, work.shape);
        }
        let line = Line {
            family: work.family.into(),
            kernel: work.kernel,
            shape: work.shape,
            seconds,
            bytes: work.bytes,
            flops: work.flops,
            peak: work.peak.and_then(|p| self.matrix.get(p).copied()),
        };
        if self.lines.is_empty() {
            println!("| family | kernel | shape | µs | GB/s | of copy | TFLOP/s | of peak |");
            println!("|---|---|---|---:|---:|---:|---:|---:|");
        }
        println!("{}", line.row(self.copy));
        self.lines.push(line);
    }

    /// Seconds of one call, from `calls` of them recorded and replayed as one where the device can: short kernels
    /// would else wait for the host.
    pub fn seconds(&self, calls: usize, launch: &mut dyn FnMut(usize) -> Result<()>) -> Result<f64> {
        for i in 0..2 {
            launch(i)?;
        }
        self.rt.synchronize_all()?;
        let graph = self.rt.capture(&mut || (0..calls).try_for_each(&mut *launch))?;
        let mut batch = || match &graph {
            Some(graph) => self.rt.replay(graph),
            None => (0..calls).try_for_each(&mut *launch),
        };
        let mut timed = |batches: usize| -> Result<f64> {
            let start = Instant::now();
            for _ in 0..batches {
                batch()?;
            }
            self.rt.synchronize(&self.rt.record(Lane::Compute)?)?;
            Ok(start.elapsed().as_secs_f64())
        };
        let once = timed(1)?.max(1e-6);
        let batches = (SECONDS / once).ceil().clamp(1.0, 1e4) as usize;
        let mut times = (0..TIMES).map(|_| timed(batches)).collect::<Result<Vec<_>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[TIMES / 2] / (batches * calls) as f64)
    }

    fn copy_rate(&self) -> Result<f64> {
        let len = (self.rt.memory_free()? as usize / 4).min(1 << 30);
        let (from, to) = (Buffer::new(&self.rt, len)?, Buffer::new(&self.rt, len)?);
        self.rt.fill(Lane::Compute, from.ptr(), 1, len)?;
        // Enqueued one by one: as nodes of a graph, copies ran at two thirds of the rate on an H200.
        let mut copy = |_: usize| self.rt.copy(Lane::Compute, to.ptr(), from.ptr(), len);
        copy(0)?;
        let mut times = Vec::new();
        for _ in 0..TIMES {
            self.rt.synchronize_all()?;
            let start = Instant::now();
            (0..8).try_for_each(&mut copy)?;
            self.rt.synchronize(&self.rt.record(Lane::Compute)?)?;
            times.push(start.elapsed().as_secs_f64() / 8.0);
        }
        times.sort_by(f64::total_cmp);
        let recorded = self.seconds(4, &mut copy)?;
        println!("copies as nodes of a graph: {:.0} GB/s", 2e-9 * len as f64 / recorded);
        Ok(2.0 * len as f64 / times[TIMES / 2])
    }

    /// What a reader sees last; an error if nothing was measured.
    pub fn finish(&self) {
        if self.checked == 0 {
            println!("nothing matches {:?}", self.words);
        } else if self.test {
            println!("{} kernels and shapes gave right answers", self.checked);
        }
    }

    /// Everything measured.
    pub fn json(&self) -> Value {
        let info = self.rt.info();
        let lines: Vec<Value> = self
            .lines
            .iter()
            .map(|l| {
                json!({
                    "family": l.family, "kernel": l.kernel, "shape": l.shape, "us": l.seconds * 1e6,
                    "gb_s": l.bytes / l.seconds / 1e9, "of_copy": l.bytes / l.seconds / self.copy,
                    "tflop_s": l.flops / l.seconds / 1e12,
                    "of_peak": l.peak.map(|p| l.flops / l.seconds / p),
                })
            })
            .collect();
        json!({
            "device": info.name, "sm": info.sm, "multiprocessors": info.multiprocessors, "driver": info.driver,
            "copy_gb_s": self.copy / 1e9,
            "matrix_tflop_s": self.matrix.iter().map(|(k, v)| (k.clone(), v / 1e12)).collect::<BTreeMap<_, _>>(),
            "lines": lines,
        })
    }
}

impl Line {
    fn row(&self, copy: f64) -> String {
        let per_second = |v: f64| v / self.seconds;
        let part = self.peak.map_or("".into(), |p| format!("{:.0}%", 100.0 * per_second(self.flops) / p));
        format!(
            "| {} | {} | {} | {:.1} | {:.0} | {:.0}% | {:.1} | {part} |",
            self.family,
            self.kernel,
            self.shape,
            self.seconds * 1e6,
            per_second(self.bytes) / 1e9,
            100.0 * per_second(self.bytes) / copy,
            per_second(self.flops) / 1e12,
        )
    }
}
