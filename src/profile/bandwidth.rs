//! Read bandwidth of memory.

use std::hint::black_box;
use std::time::Instant;

use crate::Result;
use crate::host::{NumaBinding, Pool};

/// A buffer to be read. Take at least four times the last-level cache, or the cache is what is measured.
pub struct ReadProbe {
    map: memmap2::MmapMut,
}

impl ReadProbe {
    /// `bytes` of memory, every page of it written once: otherwise all would be the same zero page.
    ///
    /// # Panics
    /// If the system refuses that much memory.
    pub fn new(bytes: usize) -> ReadProbe {
        ReadProbe::on(bytes, None).expect("nothing is bound")
    }

    /// [`ReadProbe::new`] on memory nodes, if any.
    ///
    /// # Errors
    /// The system refuses to put memory there.
    ///
    /// # Panics
    /// If the system refuses that much memory.
    pub fn on(bytes: usize, nodes: Option<&NumaBinding>) -> Result<ReadProbe> {
        let words = bytes / 8 / 4096 * 4096;
        let mut map =
            memmap2::MmapMut::map_anon((words * 8).max(4096)).expect("memory for the bandwidth probe");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        if let Some(nodes) = nodes {
            nodes.bind(map.as_mut_ptr(), map.len())?;
        }
        map.chunks_exact_mut(4096).for_each(|p| p[0] = 1);
        Ok(ReadProbe { map })
    }

    /// Bytes that a pass reads.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Reads everything once, with all threads of `pool` and several streams each. Returns the seconds.
    pub fn pass(&self, pool: &Pool) -> f64 {
        let data = &self.map[..];
        const CHUNK: usize = 1 << 20;
        let start = Instant::now();
        pool.run((data.len() / CHUNK).max(1), &|c, _| {
            black_box(sum(&data[(c * CHUNK).min(data.len())..((c + 1) * CHUNK).min(data.len())]));
        });
        start.elapsed().as_secs_f64()
    }
}

/// Bytes per second at which all threads of `pool` together read `bytes` of memory (several streams per
/// thread, one pass, best of `repeat`). See [`ReadProbe`] for how many bytes to take.
pub fn read_bandwidth(pool: &Pool, bytes: usize, repeat: usize) -> f64 {
    let probe = ReadProbe::new(bytes);
    let best = (0..repeat.max(1)).map(|_| probe.pass(pool)).fold(f64::INFINITY, f64::min);
    probe.bytes() as f64 / best
}

/// Reads everything, four streams at a time.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::Caps::get().avx2 {
        // SAFETY: AVX2 was detected.
        return unsafe { sum_avx2(bytes) };
    }
    bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes"))).fold(0, |a, w| a ^ w)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(bytes: &[u8]) -> u64 {
    use std::arch::x86_64::*;
    let quarter = bytes.len() / 4 / 64 * 64;
    let mut s = [_mm256_setzero_si256(); 8];
    for i in (0..quarter).step_by(64) {
        for stream in 0..4 {
            // SAFETY: stream·quarter + i + 64 <= bytes.len().
            unsafe {
                let p = bytes.as_ptr().add(stream * quarter + i);
                s[stream] = _mm256_xor_si256(s[stream], _mm256_loadu_si256(p.cast()));
                s[stream + 4] = _mm256_xor_si256(s[stream + 4], _mm256_loadu_si256(p.add(32).cast()));
            }
        }
    }
    let s = s.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b));
    _mm256_extract_epi64::<0>(s) as u64
}
