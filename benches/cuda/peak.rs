//! The peak of the matrix units: `cuda/peak.cu` and `cuda/peak_sm90a.cu`.

use tandem::Result;
use tandem::device::kernels::abi::PeakParams;
use tandem::device::{Buffer, Lane, Launch, Params};

use crate::measure::Bench;

/// As `peak_value` in cuda/include/peak_value.cuh.
fn operand(row: u32, k: u32) -> f64 {
    let h = (row.wrapping_mul(0x9e37_79b1) ^ k.wrapping_mul(0x85eb_ca77)).wrapping_mul(0xc2b2_ae3d);
    (((h >> 16) % 255) as f64 - 127.0) / 128.0
}

/// Σ over rows of a, columns of b, and k: what the threads' sums add up to after one iteration.
fn total(a_rows: std::ops::Range<u32>, b_rows: std::ops::Range<u32>, depth: u32) -> f64 {
    let column = |rows: &std::ops::Range<u32>, k| rows.clone().map(|r| operand(r, k)).sum::<f64>();
    (0..depth).map(|k| column(&a_rows, k) * column(&b_rows, k)).sum()
}

struct Peak {
    kernel: &'static str,
    /// Threads of a block share operands in groups of so many.
    group: usize,
    shared: u32,
    blocks_per_sm: usize,
    /// Multiply-adds of a block in one iteration.
    products: f64,
    /// The sums of one group after one iteration.
    want: fn(usize) -> f64,
}

const PEAKS: [Peak; 4] = [
    Peak { kernel: "peak_mma_f16", ..MMA },
    Peak { kernel: "peak_mma_bf16", ..MMA },
    Peak { kernel: "peak_wgmma_f16", ..WGMMA },
    Peak { kernel: "peak_wgmma_bf16", ..WGMMA },
];
const MMA: Peak = Peak {
    kernel: "",
    group: 32,
    shared: 0,
    blocks_per_sm: 2,
    products: 8.0 * 8.0 * 16.0 * 8.0 * 16.0,
    want: |_| total(0..16, 16..80, 16),
};
const WGMMA: Peak = Peak {
    kernel: "",
    group: 128,
    shared: (128 + 256) * 128,
    blocks_per_sm: 1,
    products: 128.0 * 256.0 * 64.0,
    want: |group| total(group as u32 % 2 * 64..group as u32 % 2 * 64 + 64, 128..384, 64),
};

pub fn run(bench: &mut Bench) -> Result<()> {
    for peak in PEAKS {
        if !bench.rt.has_kernel(peak.kernel) || (bench.rt.info().sm != 90 && peak.group == 128) {
            continue;
        }
        let sms = bench.rt.info().multiprocessors.max(1) as usize;
        let blocks = if bench.test { 1 } else { sms * peak.blocks_per_sm };
        let out = Buffer::new(&bench.rt, blocks * 256 * 4)?;
        let rt = bench.rt.clone();
        let launch = |iterations: u32| {
            let params = PeakParams { out: out.ptr(), iterations, ..Default::default() };
            let (grid, block) = ([blocks as u32, 1, 1], [256, 1, 1]);
            rt.launch(
                Lane::Compute,
                &Launch { kernel: peak.kernel, grid, block, shared: peak.shared, params: params.bytes() },
            )
        };
        // Operands have 7 bits after the point: sums of two iterations are exact in f32, whatever their order.
        launch(2)?;
        let mut bytes = vec![0; out.len()];
        rt.download(Lane::Compute, out.ptr(), &mut bytes)?;
        let sums: Vec<f64> =
            bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
        for (i, group) in sums.chunks(peak.group).enumerate() {
            let (got, want) = (group.iter().sum::<f64>(), 2.0 * (peak.want)(i));
            assert!(
                got == want,
                "{}: threads {}.. add up to {got}, wanted {want}",
                peak.kernel,
                i * peak.group
            );
        }
        if bench.test {
            assert!(serialised("NVIDIA H200", "peak_wgmma_f16", 590e12).is_some());
            assert!(serialised("NVIDIA H200", "peak_wgmma_f16", 610e12).is_none());
            assert!(serialised("NVIDIA A10", "peak_mma_f16", 60e12).is_none());
            println!("checked {}", peak.kernel);
            continue;
        }
        let iterations = 4096;
        let seconds = bench.seconds(4, &mut |_| launch(iterations))?;
        let rate = 2.0 * peak.products * f64::from(iterations) * blocks as f64 / seconds;
        println!("{}: {:.1} TFLOP/s", peak.kernel, rate / 1e12);
        if let Some(why) = serialised(&bench.rt.info().name, peak.kernel, rate) {
            println!("{why}");
        }
        bench.matrix.insert(peak.kernel.into(), rate);
    }
    Ok(())
}

/// Back to back, m64n256k16 reach some 790 TFLOP/s on an H200; each waited for before the next is issued, far less than
/// this.
const H200_SERIALISED: f64 = 600e12;

/// What a rate says about the way the products were issued, where it says something.
fn serialised(device: &str, kernel: &str, rate: f64) -> Option<String> {
    (device.contains("H200") && kernel.starts_with("peak_wgmma") && rate < H200_SERIALISED).then(|| {
        format!(
            "{kernel}: {:.0} TFLOP/s is below {:.0}: wgmma is serialised. The assembler puts a wait after every product \
             when accumulators are touched between wgmma.fence and wgmma.wait_group (C7510 to C7519 of ptxas); \
             every other number of a wgmma kernel is worth as little until this is mended",
            rate / 1e12,
            H200_SERIALISED / 1e12
        )
    })
}
