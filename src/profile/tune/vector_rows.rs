//! Attention of few rows, by vector kernels and by tiles, in turn on the same cold pages: `attention_vector_rows`.

use std::time::Instant;

use super::super::{Effort, Samples};
use super::{Finding, TimedValue};
use crate::cache::{KvGeometry, KvType, PAGE_TOKENS, PagePool};
use crate::host::Pool;
use crate::simd::Isa;
use crate::simd::attention::{AttnPlan, AttnShape, SeqRows};
use crate::tensor::Half;
use crate::{Error, Result};

/// Rows of a KV head that are tried: query heads that share one, for one token.
const ROWS: [usize; 6] = [1, 3, 4, 8, 16, 32];

/// KV heads, elements of a head, tokens of a sequence.
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 128;
const TOKENS: usize = 1024;

/// Rows up to which vector kernels take less time, and what was compared.
///
/// # Errors
/// [`Error::Run`]: the two disagree. No memory for the pages.
pub(super) fn measure(pool: &Pool, isa: Isa, effort: Effort) -> Result<(usize, Vec<Finding>)> {
    let (sequences, sets) = match effort {
        Effort::Quick => (2, 1),
        // 16 MiB a set, 128 MiB in all.
        Effort::Full => (8, 8),
    };
    let each = TOKENS / PAGE_TOKENS;
    let geometry = KvGeometry { n_layers: 1, n_kv_heads: KV_HEADS, head_dim: HEAD_DIM, dtype: KvType::BF16 };
    let cache = PagePool::new(geometry, sets * sequences * each)?;
    let kv = cache.layer(0);
    pool.run(sets * sequences * each, &|page, _| {
        for slot in 0..PAGE_TOKENS {
            let value = |i: usize| ((page * PAGE_TOKENS + slot) * 7 + i * 5) % 31;
            let row: Vec<f32> = (0..KV_HEADS * HEAD_DIM).map(|i| value(i) as f32 / 31.0 - 0.5).collect();
            // SAFETY: each chunk writes a page of its own, and nobody reads yet.
            unsafe { kv.append(&[page as u32], slot, &row, &row) };
        }
    });
    let pages: Vec<u32> = (0..(sets * sequences * each) as u32).collect();
    let (mut up_to, mut findings) = (0, Vec::new());
    for rows in ROWS {
        let n_heads = rows * KV_HEADS;
        let scale = 1.0 / (HEAD_DIM as f32).sqrt();
        let shape = AttnShape {
            n_heads,
            n_kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale,
            softcap: None,
            window: None,
        };
        let plans = |vector_rows: usize| -> Result<Vec<AttnPlan>> {
            let sets = pages.chunks_exact(sequences * each).map(|set| {
                let row = |(row0, pages)| SeqRows { pages, first_pos: TOKENS - 1, n_rows: 1, row0 };
                let seqs: Vec<SeqRows<'_>> = set.chunks_exact(each).enumerate().map(row).collect();
                Ok(AttnPlan::new(&shape, &seqs, pool.threads())?.with_vector_rows(vector_rows))
            });
            sets.collect()
        };
        let mut plans = [plans(0)?, plans(ROWS[ROWS.len() - 1])?];
        let q: Vec<f32> = (0..sequences * n_heads * HEAD_DIM).map(|i| (i % 29) as f32 / 29.0 - 0.5).collect();
        let mut out = vec![0f32; q.len()];
        let mut first = Vec::new();
        for plans in &mut plans {
            out.fill(f32::NAN);
            plans[0].run(pool, isa, &cache.layer(0), &q, &mut out);
            if first.is_empty() {
                first.clone_from(&out);
            }
            // Values are below a half, and each of the two rounds probabilities to bf16 at most.
            if first
                .iter()
                .zip(&out)
                .any(|(a, b)| (a - b).abs().partial_cmp(&0.005).is_none_or(|o| o.is_gt()))
            {
                return Err(Error::Run(format!(
                    "tune: attention of {rows} rows: tiles and vectors disagree"
                )));
            }
        }
        let (mut samples, mut next) = ([Samples::default(), Samples::default()], 0);
        let begun = Instant::now();
        while samples[0].len() < 3 || begun.elapsed() < effort.per_contest(2) {
            for (plans, samples) in plans.iter_mut().zip(&mut samples) {
                // Each call reads another set of pages, so none finds its own in a cache.
                let plan = &mut plans[next % sets];
                let start = Instant::now();
                plan.run(pool, isa, &cache.layer(0), &q, &mut out);
                samples.push(start.elapsed().as_secs_f64());
                next += 1;
            }
        }
        let seconds = samples.each_ref().map(Samples::typical);
        let chosen = usize::from(seconds[1] < seconds[0]);
        let candidates = ["tiles", "vectors"].map(String::from).into_iter().zip(seconds);
        findings.push(Finding {
            dtype: Half::BF16.name().into(),
            entry: "attention_vector_rows".into(),
            tokens: rows,
            chosen,
            candidates: candidates
                .map(|(value, seconds)| TimedValue { value, seconds, packed_per_s: None })
                .collect(),
        });
        if chosen == 0 {
            break;
        }
        up_to = rows;
    }
    Ok((up_to, findings))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On any tier: where there are no tiles the two are the same kernels, and either may win.
    #[test]
    fn rows_are_compared_until_tiles_win() {
        let isa = Isa::best();
        let (up_to, findings) = measure(&Pool::new(2), isa, Effort::Quick).unwrap();
        let won = findings.iter().filter(|f| f.chosen == 1).map(|f| f.tokens).max();
        assert_eq!(up_to, won.unwrap_or(0));
        assert!(findings[..findings.len() - 1].iter().all(|f| f.chosen == 1), "{findings:?}");
        assert!(findings.iter().flat_map(|f| &f.candidates).all(|c| c.seconds > 0.0));
    }
}
