//! Seconds from a hardware description: the larger of arithmetic and memory time (HELM §4.1), or their sum (LIA §5.1).
//!
//! ```text
//! HELM   T = max(F / (P·η), bytes / (M·η))       LIA   T = (D_X + D_Y) / BW + C / TH       link  T = latency + bytes / BW
//! ```
//! P and M are separate measurements: HELM's print sets P = M in decode, which mixes FLOP/s and bytes/s. Keys and values
//! that stay in the last-level cache between two tokens are read faster than memory; the weights of a token evict them, so
//! the share that stays, α = min(1, C_L3 / (W + W_kv)), is close to 0 for real models and blends the two rates
//! ([`Roofline::blended_read`]).
//!
//! Each kernel of the GPU and each operation of the CPU takes some time beside its work ([`Launches`], `gpu_launch_s`, `hand_over_s`).
//!
//! Weights on the host may lie in slower memory than the rest ([`WeightsNodes`]): products on the CPU read them at its rate,
//! and the link takes them at most that fast.

use std::sync::OnceLock;

use super::cost::{Batch, Costs, Direction, Scan};
use super::hardware::{Gpu, Hardware, Link, WeightsNodes};
use super::sizes::{ELEMENT, Sizes, ffn_of_row};
use crate::program::{Launches, Side, Sublayer};

/// How arithmetic and memory time combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// They overlap: the larger (HELM).
    Larger,
    /// They do not: the sum (LIA).
    Sum,
}

/// Rate of the last-level cache over that of memory. Typical of current CPUs, not measured; with α close to 0 it hardly
/// matters.
const CACHE_OVER_MEMORY: f64 = 4.0;

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Roofline<'a> {
    hardware: &'a Hardware,
    sizes: &'a Sizes,
    form: Combine,
    /// Share of the CPU's rates that its attention reaches.
    cpu_attention: f64,
    /// Bytes of weights that the CPU reads per token, from which α follows; 0 leaves the cache out.
    cpu_weights: OnceLock<u64>,
}

/// FLOPs and bytes of one sublayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Multiplications and additions.
    pub flops: u64,
    /// Activations that come in: LIA's D_X.
    pub x: u64,
    /// Weights, or keys or values: LIA's D_Y.
    pub y: u64,
}

impl<'a> Roofline<'a> {
    /// HELM's: the larger of arithmetic and memory time.
    pub fn new(hardware: &'a Hardware, sizes: &'a Sizes) -> Roofline<'a> {
        let cpu_attention = hardware.efficiency.cpu_attention;
        Roofline { hardware, sizes, form: Combine::Larger, cpu_attention, cpu_weights: OnceLock::new() }
    }

    /// LIA's: their sum, no cache. As printed it has one rate for all that the CPU reads: attention is as fast as products.
    pub fn serial(hardware: &'a Hardware, sizes: &'a Sizes) -> Roofline<'a> {
        Roofline { cpu_attention: 1.0, ..Roofline::serial_measured(hardware, sizes) }
    }

    /// The same with the machine's own rate of attention.
    pub fn serial_measured(hardware: &'a Hardware, sizes: &'a Sizes) -> Roofline<'a> {
        Roofline { form: Combine::Sum, cpu_weights: OnceLock::from(0), ..Roofline::new(hardware, sizes) }
    }

    /// The same for many requests on the CPU's side of a model whose weights are on the GPU: between two tokens of a request the CPU
    /// reads the keys and values of all others, and finds none in its cache.
    pub fn uncached(self) -> Roofline<'a> {
        Roofline { cpu_weights: OnceLock::from(0), ..self }
    }

    fn accelerator(&self) -> &(Gpu, Link) {
        self.hardware.accelerator.as_ref().expect("nothing is placed on a GPU that is not there")
    }

    /// Seconds that an operation of so many kernels takes beside its work.
    fn beside_work(&self, side: Side, kernels: u32) -> f64 {
        let e = &self.hardware.efficiency;
        match side {
            Side::Host => e.hand_over_s,
            Side::Device => f64::from(kernels) * e.gpu_launch_s,
        }
    }

    /// FLOP/s and bytes/s that kernels reach.
    fn rates(&self, side: Side) -> (f64, f64) {
        let e = &self.hardware.efficiency;
        match side {
            Side::Host => {
                let cpu = &self.hardware.cpu;
                (cpu.flops_bf16 * e.cpu_compute, cpu.read_bw * e.cpu_memory)
            }
            Side::Device => {
                let (gpu, _) = self.accelerator();
                (gpu.flops_bf16 * e.gpu_compute, gpu.bw * e.gpu_memory)
            }
        }
    }

    /// Share of the rates above that attention reaches.
    fn attention_share(&self, side: Side) -> f64 {
        if side == Side::Host { self.cpu_attention } else { 1.0 }
    }

    fn time(&self, side: Side, flops: u64, bytes: u64) -> f64 {
        let (p, m) = self.rates(side);
        self.combine(flops as f64 / p, bytes as f64 / m)
    }

    /// Seconds of a product that reads `x` bytes of activations and `y` bytes of weights.
    fn product_time(&self, side: Side, flops: u64, x: u64, y: u64) -> f64 {
        let Some(weights) = self.weights_rate().filter(|_| side == Side::Host) else {
            return self.time(side, flops, x + y);
        };
        let (p, m) = self.rates(side);
        self.combine(flops as f64 / p, x as f64 / m + y as f64 / weights)
    }

    /// Bytes/s at which kernels read weights on the host, if not as fast as the rest.
    fn weights_rate(&self) -> Option<f64> {
        let on: &WeightsNodes = self.hardware.weights.as_ref()?;
        Some(on.read_bw * self.hardware.efficiency.cpu_memory)
    }

    /// Least seconds in which the CPU reads `bytes` bytes of weights, where they lie in memory of their own; 0 where not.
    pub fn weights_read(&self, side: Side, bytes: u64) -> f64 {
        match self.weights_rate() {
            Some(rate) if side == Side::Host => bytes as f64 / rate,
            _ => 0.0,
        }
    }

    /// Seconds of [`Costs::attend`] if a token's keys and values take so many bytes in a layer.
    pub fn attend_stored(&self, side: Side, scan: &Scan, kv_token: u64) -> f64 {
        if scan.rows == 0 {
            return 0.0;
        }
        let (p, memory) = self.rates(side);
        let (q, heads) = (self.sizes.spec.q_dim() as u64, self.sizes.spec.n_heads as u64);
        let kv = scan.kv_tokens * kv_token;
        let read = if side == Side::Host { self.blended_read(kv) } else { memory };
        let scores = if self.form == Combine::Sum { scan.pairs * heads * ELEMENT } else { 0 };
        let x = scan.rows * q * ELEMENT + scores;
        let seconds = self.combine((4 * scan.pairs * q) as f64 / p, x as f64 / memory + kv as f64 / read);
        seconds / self.attention_share(side) + self.beside_work(side, Launches::ATTEND)
    }

    fn combine(&self, arithmetic: f64, memory: f64) -> f64 {
        match self.form {
            Combine::Larger => arithmetic.max(memory),
            Combine::Sum => arithmetic + memory,
        }
    }

    /// Rate at which the CPU reads `kv` bytes of keys and values per token: a blend of cache and memory.
    pub fn blended_read(&self, kv: u64) -> f64 {
        let (_, memory) = self.rates(Side::Host);
        // Only who attends on the CPU pays for the sum over all blocks.
        let weights = *self.cpu_weights.get_or_init(|| self.sizes.model().host);
        if weights == 0 || kv == 0 {
            return memory;
        }
        let alpha = cache_share(self.hardware.cpu.llc_bytes, weights as f64, kv as f64);
        // Bytes add up, so times do: a harmonic blend.
        memory / (1.0 - alpha + alpha / CACHE_OVER_MEMORY)
    }

    /// FLOPs and bytes of a sublayer on `side`.
    ///
    /// With [`Combine::Sum`] attention is LIA's: each row multiplies all tokens of its sequence, and the scores are written
    /// and read. With [`Combine::Larger`] it is causal, and scores stay in registers.
    pub fn work(&self, side: Side, layer: usize, sublayer: Sublayer, batch: &Batch<'_>) -> Work {
        let (spec, block) = (&self.sizes.spec, &self.sizes.blocks[layer]);
        let (d, q, kv) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64);
        let rows = batch.rows();
        let y = self.sizes.read(layer, sublayer, rows).on(side);
        let linear = |inputs: u64, outputs: u64| Work {
            flops: 2 * rows * inputs * outputs,
            x: rows * inputs * ELEMENT,
            y,
        };
        let feed_forward = |part: usize| {
            let of_row = ffn_of_row(spec, layer)[part];
            Work { flops: 2 * rows * of_row.elements, x: rows * of_row.inputs * ELEMENT, y }
        };
        match sublayer {
            Sublayer::Qkv => linear(d, q + 2 * kv),
            Sublayer::Out => linear(q, d),
            Sublayer::Up => feed_forward(0),
            Sublayer::Down => feed_forward(1),
            Sublayer::Scores | Sublayer::Values => {
                let pairs = match self.form {
                    Combine::Larger => batch.pairs(block.window),
                    Combine::Sum => batch.groups.iter().map(|g| g.total_rows() * (g.past + g.rows)).sum(),
                };
                let y = batch.tokens_read(block.window) * self.sizes.kv_token() / 2;
                let x = match (sublayer, self.form) {
                    (Sublayer::Values, Combine::Sum) => pairs * spec.n_heads as u64 * ELEMENT,
                    (Sublayer::Values, Combine::Larger) => 0,
                    _ => rows * q * ELEMENT,
                };
                Work { flops: 2 * pairs * q, x, y }
            }
        }
    }
}

/// α: the share of `kv` and `weights` bytes that a cache keeps from one token to the next.
pub fn cache_share(cache: f64, weights: f64, kv: f64) -> f64 {
    (cache / (weights + kv)).min(1.0)
}

impl Costs for Roofline<'_> {
    fn embed(&self, side: Side, rows: u64) -> f64 {
        self.time(side, 0, self.sizes.hidden(rows)) + self.beside_work(side, Launches::EMBED)
    }

    fn sublayer(&self, side: Side, layer: usize, sublayer: Sublayer, batch: &Batch<'_>) -> f64 {
        let w = self.work(side, layer, sublayer, batch);
        if batch.rows() == 0 {
            return 0.0;
        }
        let work = match sublayer {
            Sublayer::Scores | Sublayer::Values => {
                self.time(side, w.flops, w.x + w.y) / self.attention_share(side)
            }
            _ => self.product_time(side, w.flops, w.x, w.y),
        };
        let beside = match sublayer {
            Sublayer::Qkv => self.beside_work(side, Launches::PROJECT),
            Sublayer::Scores => self.beside_work(side, Launches::ATTEND),
            // One operation with the scores.
            Sublayer::Values => 0.0,
            Sublayer::Out => self.beside_work(side, Launches::OUT),
            Sublayer::Up => self.beside_work(side, Launches::up(self.sizes.spec.experts_of(layer).is_some())),
            Sublayer::Down => {
                self.beside_work(side, Launches::down(self.sizes.spec.experts_of(layer).is_some()))
            }
        };
        work + beside
    }

    fn attention(&self, side: Side, layer: usize, batch: &Batch<'_>) -> f64 {
        match self.form {
            Combine::Larger => self.attend(side, layer, &Scan::of(batch, self.sizes.blocks[layer].window)),
            Combine::Sum => [Sublayer::Scores, Sublayer::Values]
                .map(|s| self.sublayer(side, layer, s, batch))
                .iter()
                .sum(),
        }
    }

    fn attend(&self, side: Side, _: usize, scan: &Scan) -> f64 {
        self.attend_stored(side, scan, self.sizes.kv_token())
    }

    fn head(&self, side: Side, rows: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let spec = &self.sizes.spec;
        let flops = 2 * rows * spec.d_model as u64 * spec.vocab as u64;
        self.product_time(side, flops, self.sizes.hidden(rows), self.sizes.head.on(side))
            + self.beside_work(side, Launches::HEAD)
    }

    fn copy(&self, side: Side, bytes: u64) -> f64 {
        2.0 * bytes as f64 / self.rates(side).1
    }

    fn append(&self, side: Side, _: usize, _: u64, bytes: u64) -> f64 {
        self.copy(side, bytes) + self.beside_work(side, Launches::APPEND)
    }

    fn pick(&self, side: Side, _: u64, bytes: u64) -> f64 {
        self.copy(side, bytes) + self.beside_work(side, Launches::PICK)
    }

    fn top(&self, _: u64, bytes: u64) -> f64 {
        self.copy(Side::Device, bytes) + self.beside_work(Side::Device, Launches::TOP)
    }

    fn launches(&self, kernels: u32) -> f64 {
        self.beside_work(Side::Device, kernels)
    }

    fn hand_over(&self) -> f64 {
        self.hardware.efficiency.hand_over_s
    }

    fn beside_copies(&self) -> f64 {
        self.hardware.efficiency.cpu_beside_copies
    }

    fn transfer(&self, direction: Direction, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        let (_, link) = self.accelerator();
        let rate = match direction {
            Direction::ToDevice => link.h2d_bw,
            Direction::ToHost => link.d2h_bw,
        };
        link.latency_s + bytes as f64 / (rate * self.hardware.efficiency.link)
    }

    fn stream(&self, bytes: u64) -> f64 {
        // The copy reads while it sends.
        let rate = self.weights_rate().unwrap_or(f64::INFINITY);
        match bytes {
            0 => 0.0,
            _ => self
                .transfer(Direction::ToDevice, bytes)
                .max(self.accelerator().1.latency_s + bytes as f64 / rate),
        }
    }

    fn stream_pageable(&self, bytes: u64) -> f64 {
        match bytes {
            0 => 0.0,
            _ => {
                let link = &self.accelerator().1;
                let rate = link.pageable_bw * self.hardware.efficiency.link;
                self.stream(bytes).max(link.latency_s + bytes as f64 / rate)
            }
        }
    }

    fn issue(&self, side: Side) -> f64 {
        match side {
            Side::Host => self.hardware.efficiency.cpu_issue_s,
            Side::Device => self.hardware.efficiency.gpu_issue_s,
        }
    }
}
