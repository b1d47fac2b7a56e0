//! The hand-over between device and host: the round trip of published rows, and pages that move.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use tandem::Result;
use tandem::cache::{KvType, PAGE_TOKENS};
use tandem::device::kernels::exchange::{
    MoveRows, PageMoves, PublishArgs, PublishSource, copy_rows, pages_from_host, pages_to_host, publish_rows,
};
use tandem::device::{Buffer, DevPtr, Lane, LayerPages, PageMove};
use tandem::tensor::Half;

use crate::data;
use crate::measure::{Bench, Work};

/// q|k|v of a Llama-3-8B layer, and attention's output.
const QKV: usize = 6144;
const OUT: usize = 4096;
/// Round trips measured; the middle one counts.
const TRIPS: usize = 300;

/// Rows go to mapped host memory; the host sees the epoch, answers, and waits until the answer is on the device.
pub fn round_trip(bench: &mut Bench) -> Result<()> {
    let all: &[usize] = if bench.test { &[2] } else { &[1, 16] };
    for &rows in all {
        let name = format!("publish, host sees, collect: rows={rows}");
        if !bench.wants("exchange", "publish_rows_f16", &name) || !bench.rt.has_kernel("publish_rows_f16") {
            continue;
        }
        let rt = bench.rt.clone();
        let values: Vec<f32> = (0..rows * QKV).map(|i| data::noise(9, i)).collect();
        let qkv = Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&values))?;
        let attn = Buffer::new(&rt, rows * OUT * 2)?;
        let (epoch, arrived) = (Buffer::new(&rt, 4)?, Buffer::new(&rt, 4)?);
        rt.fill(Lane::Compute, epoch.ptr(), 0, 4)?;
        rt.fill(Lane::Compute, arrived.ptr(), 0, 4)?;
        let mailbox = rt.pinned(64 + rows * 2 * (QKV + OUT))?;
        // SAFETY: the mailbox's first word, which outlives this; both sides store whole words to it.
        let flag = unsafe { AtomicU32::from_ptr(mailbox.host().cast()) };
        let out_at = 64 + rows * 2 * QKV;
        let none = PublishSource { at: DevPtr::NULL, stride: 0, bytes: 0 };
        let trip = |number: u32| -> Result<f64> {
            let began = Instant::now();
            let publish = PublishArgs {
                sources: [PublishSource { at: qkv.ptr(), stride: 4 * QKV, bytes: 4 * QKV }, none, none],
                half: Half::F16,
                to: mailbox.device().add(64),
                stride: 2 * QKV,
                list: DevPtr::NULL,
                n_rows: DevPtr::NULL,
                max_rows: rows,
                epoch: epoch.ptr(),
                epoch_add: number,
                epoch_flag: mailbox.device(),
                arrived: arrived.ptr(),
            };
            publish_rows(&*rt, Lane::Compute, &publish)?;
            while flag.load(Ordering::Acquire) != number {
                if began.elapsed().as_secs() > 10 {
                    rt.synchronize_all()?; // tells what went wrong
                    panic!("the epoch stays at {}", flag.load(Ordering::Acquire));
                }
                std::hint::spin_loop();
            }
            // The answer: the last published value of each row.
            for row in 0..rows {
                let from = mailbox.host().wrapping_add(64 + 2 * (row * QKV + QKV - 1)).cast::<u16>();
                let to = mailbox.host().wrapping_add(out_at + 2 * (row * OUT + OUT - 1)).cast::<u16>();
                // SAFETY: both inside the mailbox; the epoch was acquired after the device's stores, and the
                // device reads the answer only in the launch below.
                unsafe { to.write(from.read()) };
            }
            let collect = MoveRows {
                from: mailbox.device().add(out_at),
                from_stride: 2 * OUT,
                to: attn.ptr(),
                to_stride: 2 * OUT,
                from_list: DevPtr::NULL,
                to_list: DevPtr::NULL,
                n_rows: DevPtr::NULL,
                gate: DevPtr::NULL,
                max_rows: rows,
            };
            copy_rows(&*rt, Lane::Compute, &collect, 2 * OUT)?;
            // Host and device alternate, so neither sleeps.
            rt.spin_until_done(&rt.record(Lane::Compute)?)?;
            Ok(began.elapsed().as_secs_f64())
        };
        trip(1)?;
        let mut bytes = vec![0; rows * OUT * 2];
        rt.download(Lane::Compute, attn.ptr(), &mut bytes)?;
        for row in 0..rows {
            let at = 2 * (row * OUT + OUT - 1);
            let (got, want) = (u16::from_le_bytes([bytes[at], bytes[at + 1]]), values[row * QKV + QKV - 1]);
            assert_eq!(got, data::to_bits(Half::F16, want), "row {row} came back otherwise");
        }
        let work = Work {
            family: "exchange",
            kernel: "publish_rows_f16".into(),
            shape: name,
            bytes: (rows * 2 * (QKV + OUT)) as f64,
            flops: 0.0,
            peak: None,
        };
        let mut times = Vec::new();
        for number in 0..if bench.test { 1 } else { TRIPS } {
            times.push(trip(number as u32 + 2)?);
        }
        times.sort_by(f64::total_cmp);
        bench.timed(work, times[times.len() / 2]);
    }
    Ok(())
}

/// Pages of a Llama-3-8B layer to mapped host memory, in the host's layout, and from there.
pub fn pages(bench: &mut Bench) -> Result<()> {
    let (n, heads, head_dim) = if bench.test { (2usize, 2usize, 64usize) } else { (64, 8, 128) };
    let name = format!("{n} pages of {heads} heads of {head_dim}");
    let kernels = ["pages_to_host", "pages_from_host"];
    let wanted = kernels.map(|kernel| bench.wants("exchange", kernel, &name) && bench.rt.has_kernel(kernel));
    if wanted == [false; 2] {
        return Ok(());
    }
    let rt = bench.rt.clone();
    let page = heads * 2 * PAGE_TOKENS * head_dim;
    let values = data::halves(Half::BF16, n * page, 4, 1.0);
    let device = Buffer::from_bytes(&rt, Lane::Compute, data::bytes_of(&values))?;
    let back = Buffer::new(&rt, n * page * 2)?;
    let pages: Vec<PageMove> = (0..n as u32)
        .map(|i| PageMove { device: n as u32 - 1 - i, host: i, tokens: PAGE_TOKENS as u32 })
        .collect();
    let host = rt.pinned(n * page * 2)?;
    let both = [device.ptr(), back.ptr()].map(|device| [LayerPages { device, host: host.device() }]);
    let args = |side: usize| PageMoves {
        layers: &both[side],
        pages: &pages,
        n_kv_heads: heads,
        head_dim,
        kv: KvType::BF16,
    };
    pages_to_host(&*rt, Lane::Compute, &args(0))?;
    pages_from_host(&*rt, Lane::Compute, &args(1))?;
    let mut bytes = vec![0; n * page * 2];
    rt.download(Lane::Compute, back.ptr(), &mut bytes)?;
    assert_eq!(bytes, data::bytes_of(&values), "pages came back otherwise");
    for (kernel, _) in kernels.into_iter().zip(wanted).filter(|(_, wanted)| *wanted) {
        let work = Work {
            family: "exchange",
            kernel: kernel.into(),
            shape: name.clone(),
            bytes: (n * page * 2) as f64, // over the bus
            flops: 0.0,
            peak: None,
        };
        bench.run(work, &mut |_| match kernel {
            "pages_to_host" => pages_to_host(&*rt, Lane::Compute, &args(0)),
            _ => pages_from_host(&*rt, Lane::Compute, &args(1)),
        })?;
    }
    Ok(())
}
