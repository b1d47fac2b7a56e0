//! The device: copy bandwidth in its memory, matrix rate, what launches and hand-overs cost.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::device_time::device_time;
use super::link::{self, LinkLimits};
use crate::Result;
use crate::device::{
    Accelerator, Attend, AttnTables, Buffer, DevPtr, Event, FeedForward, FfnWeights, Lane, LayerWeights,
    Limits, LinearSource, LinearWeight, NormWeight, RowOp, Runtime, Shape, StepContext, StepDesc, StepSeq,
    SubBatches, UpWeight,
};
use crate::host::Pool;
use crate::model::{Ffn, Norm, RopePairing};
use crate::profile::sample::{Effort, sample};
use crate::tensor::{Bytes, DType, Half, Tensor};

/// What a device and its link can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLimits {
    /// As its driver names it.
    pub name: String,
    /// Bytes of its memory, in all.
    pub memory_bytes: u64,
    /// Bytes per second of a copy within its memory; a byte copied is read and written, and counts two.
    pub copy_bw: f64,
    /// FLOP/s of a 16-bit matrix product, by the accelerator's own output projection.
    pub matrix_flops: f64,
    /// Host time to enqueue one small operation, s.
    pub launch_s: f64,
    /// Device time from one small operation of a lane to the next, s.
    pub step_s: f64,
    /// From enqueueing a small operation to the host's seeing its event while it spins, s.
    pub round_trip_s: f64,
    /// The same with a host thread that sleeps, s.
    pub wake_s: f64,
    /// One lane's wait for an event of another, both ways, s.
    pub lane_wait_s: f64,
    /// Host to device.
    pub to_device: LinkLimits,
    /// Device to host.
    pub to_host: LinkLimits,
}

impl DeviceLimits {
    /// Measures; the threads of `pool` read memory where the link is measured beside a busy CPU. `progress` is called
    /// twice.
    ///
    /// # Errors
    /// No memory on the device for the probes; a device that failed.
    pub fn measure(
        accelerator: &Arc<dyn Accelerator>,
        pool: &Pool,
        effort: Effort,
        progress: &dyn Fn(),
    ) -> Result<DeviceLimits> {
        let runtime = accelerator.runtime();
        let info = runtime.info();
        let copy_bw = copy_bandwidth(runtime, effort)?;
        let matrix_flops = matrix_rate(accelerator, effort)?;
        let (launch_s, step_s) = launches(runtime, effort)?;
        let round_trip_s = hand_over(runtime, effort, |r, event| r.spin_until_done(event))?;
        let wake_s = hand_over(runtime, effort, |r, event| r.synchronize(event))?;
        let lane_wait_s = lane_wait(runtime, effort)?;
        progress();
        let [to_device, to_host] = link::measure(runtime, pool, effort)?;
        progress();
        Ok(DeviceLimits {
            name: info.name.clone(),
            memory_bytes: info.memory_total,
            copy_bw,
            matrix_flops,
            launch_s,
            step_s,
            round_trip_s,
            wake_s,
            lane_wait_s,
            to_device,
            to_host,
        })
    }
}

/// Bytes of a probe in the device's memory: several times its caches, within a quarter of what is free.
fn probe_bytes(runtime: &Arc<dyn Runtime>, effort: Effort) -> Result<usize> {
    // Also of the quick probe: 8 MiB measured an H200's cache and launches, 2.1 TB/s of 4.0.
    let caches = 8 * u64::from(runtime.info().l2_bytes);
    let wanted = match effort {
        Effort::Quick => caches.max(16 << 20),
        Effort::Full => caches.max(256 << 20),
    };
    Ok(wanted.min(runtime.memory_free()? / 4).max(1 << 16) as usize)
}

fn copy_bandwidth(runtime: &Arc<dyn Runtime>, effort: Effort) -> Result<f64> {
    let bytes = probe_bytes(runtime, effort)? / 2;
    let (a, b) = (Buffer::new(runtime, bytes)?, Buffer::new(runtime, bytes)?);
    runtime.fill(Lane::Compute, a.ptr(), 1, bytes)?;
    let copy =
        || device_time(runtime, Lane::Compute, || runtime.copy(Lane::Compute, b.ptr(), a.ptr(), bytes));
    Ok(2.0 * bytes as f64 / sample(effort, copy)?.typical().max(1e-9))
}

/// Small operations one after the other: (host seconds to enqueue one, device seconds of one).
fn launches(runtime: &Arc<dyn Runtime>, effort: Effort) -> Result<(f64, f64)> {
    const TIMES: usize = 64;
    let word = Buffer::new(runtime, 256)?;
    let mut enqueueing = Vec::new();
    let run = || {
        device_time(runtime, Lane::Compute, || {
            let begun = Instant::now();
            for _ in 0..TIMES {
                runtime.fill(Lane::Compute, word.ptr(), 0, 4)?;
            }
            enqueueing.push(begun.elapsed().as_secs_f64() / TIMES as f64);
            Ok(())
        })
    };
    let device = sample(effort, run)?.typical() / TIMES as f64;
    let host = super::super::sample::Samples::new(enqueueing).typical();
    Ok((host.max(1e-9), device.max(1e-9)))
}

/// A small operation, its event, and the host's noticing it by `wait`.
fn hand_over(
    runtime: &Arc<dyn Runtime>,
    effort: Effort,
    wait: impl Fn(&dyn Runtime, &Event) -> Result<()>,
) -> Result<f64> {
    let word = Buffer::new(runtime, 256)?;
    let run = || {
        let begun = Instant::now();
        runtime.fill(Lane::Compute, word.ptr(), 0, 4)?;
        wait(&**runtime, &runtime.record(Lane::Compute)?)?;
        Ok::<_, crate::Error>(begun.elapsed().as_secs_f64())
    };
    Ok(sample(effort, run)?.typical().max(1e-9))
}

/// Two lanes that wait for each other in turns: seconds of one wait there and back, by the device's clock.
fn lane_wait(runtime: &Arc<dyn Runtime>, effort: Effort) -> Result<f64> {
    const TIMES: usize = 16;
    let word = Buffer::new(runtime, 256)?;
    let run = || {
        device_time(runtime, Lane::Compute, || {
            for _ in 0..TIMES {
                for (to, from) in [(Lane::HostToDevice, Lane::Compute), (Lane::Compute, Lane::HostToDevice)] {
                    runtime.fill(from, word.ptr(), 0, 4)?;
                    runtime.wait(to, &runtime.record(from)?)?;
                }
            }
            Ok(())
        })
    };
    Ok((sample(effort, run)?.typical() / TIMES as f64).max(1e-9))
}

/// (width, rows) of the products, from small to large: the first that takes long enough counts.
const PRODUCTS: [(usize, usize); 3] = [(256, 32), (1024, 256), (4096, 2048)];

/// What takes long enough to be timed.
const LONG_ENOUGH: f64 = 500e-6;

fn matrix_rate(accelerator: &Arc<dyn Accelerator>, effort: Effort) -> Result<f64> {
    let mut rate = 0.0;
    for (d, rows) in PRODUCTS {
        let seconds = out_proj(accelerator, effort, d, rows)?.max(1e-9);
        rate = 2.0 * (rows * d * d) as f64 / seconds;
        if seconds > LONG_ENOUGH {
            break;
        }
    }
    Ok(rate)
}

/// Seconds of an output projection of `rows` rows by a matrix of `d` x `d`.
fn out_proj(accelerator: &Arc<dyn Accelerator>, effort: Effort, d: usize, rows: usize) -> Result<f64> {
    let runtime = accelerator.runtime();
    let (act, dtype) = match accelerator.activations_for(DType::BF16) {
        Some(Half::BF16) => (Half::BF16, DType::BF16),
        _ => (Half::F16, DType::F16),
    };
    let shape = Shape {
        d_model: d,
        n_heads: d / 64,
        n_kv_heads: d / 64,
        head_dim: 64,
        d_ff: d,
        vocab: 64,
        norm: Norm::Rms { eps: 1e-5 },
        qk_norm: None,
        ffn: Ffn::SwiGlu,
        experts: None,
        attn_scale: 0.125,
        attn_softcap: None,
        embed_scale: 1.0,
        rope_dim: 0,
        pairing: RopePairing::Half,
        window: None,
        logit_softcap: None,
        act,
        kv: act.into(),
        exact: None,
    };
    accelerator.check(&shape)?;
    let limits = Limits { rows, logit_rows: 1, sequences: 1, pages_per_sequence: 1 };
    let tensor = Tensor::new(dtype, vec![d, d], Bytes::from_words(vec![0; d * d / 4], 2 * d * d))?;
    let parts = [&tensor];
    let source = LinearSource::Rows(&parts);
    let zeroed = |bytes: usize| -> Result<Buffer> {
        let buffer = Buffer::new(runtime, bytes)?;
        runtime.fill(Lane::Compute, buffer.ptr(), 0, buffer.len())?;
        Ok(buffer)
    };
    let matrix = zeroed(accelerator.packed_bytes(&source, act)?)?;
    let o = LinearWeight { ptr: matrix.ptr(), dtype, n: d, k: d, bias: DevPtr::NULL };
    let plan = SubBatches::plan(&**accelerator, &shape, &[limits], &[o], false, false);
    let memory = zeroed(plan.bytes())?;
    let sub = plan.at(memory.ptr())[0];
    // Attended elsewhere, so that no pages are needed: nothing is attended at all.
    let seqs = [StepSeq { pages: &[], first_pos: 0, row0: 0, n_rows: rows, attend: Attend::Elsewhere }];
    let tokens = vec![0; rows];
    let desc =
        StepDesc { seqs: &seqs, tokens: &tokens, logit_rows: &[], cuts: &[], epoch: 0, launch_rows: rows };
    let step = accelerator.prepare(Lane::Compute, &shape, &limits, &desc, sub.lists)?;
    let cx = StepContext { lane: Lane::Compute, shape: &shape, ws: &sub.ws, step: &step };
    // Only the output projection of it is ever used.
    let layer = LayerWeights {
        attn_norm: NormWeight::default(),
        qkv: vec![o],
        qkv_bias: DevPtr::NULL,
        q_norm: DevPtr::NULL,
        k_norm: DevPtr::NULL,
        o,
        post_attn: DevPtr::NULL,
        ffn_norm: NormWeight::default(),
        ffn: FeedForward::Dense(FfnWeights { up: UpWeight::Plain(o), down: o }),
        post_ffn: DevPtr::NULL,
        windowed: false,
        tables: AttnTables::default(),
    };
    let run =
        || device_time(runtime, Lane::Compute, || accelerator.enqueue(&cx, RowOp::OutProj(&layer), 0..rows));
    Ok(sample(effort, run)?.typical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Emulation, Kind, open};

    #[test]
    fn the_emulated_device_has_every_figure() {
        let device = open(&Kind::Emulated(Emulation::Functions), Some(256 << 20)).unwrap();
        let pool = Pool::new(2);
        let steps = std::cell::Cell::new(0);
        let d = DeviceLimits::measure(&device, &pool, Effort::Quick, &|| steps.set(steps.get() + 1)).unwrap();
        assert_eq!((steps.get(), d.memory_bytes), (2, 256 << 20));
        assert!(d.copy_bw > 1e7 && d.matrix_flops > 1e6, "{d:?}");
        for s in [d.launch_s, d.step_s, d.round_trip_s, d.wake_s, d.lane_wait_s] {
            assert!(s > 0.0 && s < 1.0, "{d:?}");
        }
        for link in [&d.to_device, &d.to_host] {
            assert!(link.pinned_bw > 1e6 && link.pageable_bw > 1e6 && link.busy_bw > 1e6, "{d:?}");
            assert!(link.latency_s > 0.0 && link.latency_s < 1.0, "{d:?}");
        }
    }
}
