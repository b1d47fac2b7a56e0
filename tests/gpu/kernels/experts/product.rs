//! Grouped products: every kernel, at the edges of its tiles and groups.

use super::*;
use crate::kernels::quant;
use crate::support::gpu;
use crate::support::gpu::linear::{Case, Operands};
use proptest::prelude::*;
use tandem::device::kernels::product::{DecodePlan, Epilogue, Matrix};
use tandem::device::kernels::quant::PackedLayout;
use tandem::tensor::{DType, Half};

/// Rows of a group of every kernel.
const TOKENS: [usize; 5] = [4, 8, 16, 32, 64];

/// Experts by as many rows each, of matrices of this case's shape.
#[derive(Debug, Clone)]
struct Experts {
    of: Case,
    counts: Vec<usize>,
    tokens: usize,
}

impl Experts {
    fn new(weights: DType, act: Half, (n, k): (usize, usize), counts: &[usize], tokens: usize) -> Experts {
        let of = Case { weights, pad_x: 8, pad_y: (0, 3), ..Case::plain(act, 1, n, k) };
        Experts { of, counts: counts.to_vec(), tokens }
    }

    /// Expert e's rows.
    fn case(&self, e: usize) -> Case {
        Case { m: self.counts[e], seed: self.of.seed ^ (e as u64 + 1) << 32, ..self.of }
    }

    fn is_dense(&self) -> bool {
        matches!(self.of.matrix(), Matrix::Dense { .. })
    }

    fn operands(&self, e: usize) -> Operands {
        let c = self.case(e);
        if self.is_dense() { Operands::dense(&c) } else { quant::operands(&c) }
    }

    fn places(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The launch, for matrices and lists anywhere.
    fn args(&self) -> ExpertProductArgs {
        let c = &self.of;
        ExpertProductArgs {
            w: ExpertMatrices { ptr: DevPtr::NULL, bias: DevPtr::NULL, stride: 0, matrix: c.matrix() },
            act: c.act,
            x: DevPtr::NULL,
            ldx: c.ldx(),
            y: DevPtr::NULL,
            ldy: c.ldy(),
            groups: DevPtr::NULL,
            rows: self.places(),
            used: 1,
            experts: self.counts.len(),
            tokens: self.tokens,
            epilogue: c.epilogue,
        }
    }

    fn plan(&self, rt: &dyn Runtime) -> DecodePlan {
        self.args().plan(rt.info())
    }

    /// The bytes of y of each expert. Matrices lie in descending order, with their biases behind them and a gap between them.
    fn run(&self, rt: &Arc<dyn Runtime>, operands: &[Operands]) -> Vec<Vec<u8>> {
        let c = &self.of;
        let bias_at = operands[0].packed.len().next_multiple_of(16);
        let stride = (bias_at + 4 * c.n).next_multiple_of(16) + 48;
        let count = self.counts.len();
        let mut matrices = vec![0xff; stride * count];
        let slots: Vec<u32> = (0..count as u32).rev().collect();
        for (o, &slot) in operands.iter().zip(&slots) {
            let to = &mut matrices[slot as usize * stride..][..stride];
            to[..o.packed.len()].copy_from_slice(&o.packed);
            to[bias_at..bias_at + 4 * c.n].copy_from_slice(bytes(&o.bias));
        }
        let x: Vec<u16> = operands.iter().flat_map(|o| o.x.iter().copied()).collect();
        let ids: Vec<u32> = (0..count).flat_map(|e| vec![e as u32; self.counts[e]]).collect();
        let groups = sorted(&ids, Some(&slots), 1, count, self.tokens).groups;
        let groups = list(&groups, group_capacity(self.places(), count, self.tokens));
        let (w, x, groups) = (upload(rt, &matrices), upload(rt, &x), upload(rt, &groups));
        let y = Output::new(rt, self.places() * c.ldy() * c.size());
        let args = ExpertProductArgs {
            w: ExpertMatrices {
                ptr: w.ptr(),
                bias: if c.bias { w.ptr().add(bias_at) } else { DevPtr::NULL },
                stride,
                matrix: c.matrix(),
            },
            x: x.ptr(),
            y: y.ptr().add(c.pad_y.0 * c.size()),
            groups: groups.ptr(),
            ..self.args()
        };
        experts_product(&**rt, LANE, &args).unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let (bytes, mut first) = (y.bytes(), 0);
        let of_expert = |&count: &usize| {
            let at = first * c.ldy() * c.size();
            first += count;
            bytes[at..first * c.ldy() * c.size()].to_vec()
        };
        self.counts.iter().map(of_expert).collect()
    }

    /// Runs it and compares every element of every expert's rows.
    fn check(&self, rt: &Arc<dyn Runtime>) -> Vec<Vec<u8>> {
        let operands: Vec<Operands> = (0..self.counts.len()).map(|e| self.operands(e)).collect();
        let y = self.run(rt, &operands);
        let roundings = if self.is_dense() { self.of.k + 64 } else { quant::roundings(self.of.k, 1) };
        for (e, y) in y.iter().enumerate() {
            let how = format!("expert {e} of {:?} by {}", self.counts, self.plan(&**rt).kernel);
            self.case(e).check(&operands[e], roundings, y, &how);
        }
        y
    }
}

/// Every type of weights, type of activations and size of groups that this runtime has a kernel of just that size for.
fn each_kernel(mut f: impl FnMut(&Arc<dyn Runtime>, DType, Half, usize)) {
    for rt in gpu::runtimes() {
        let mut found = 0;
        let acts: &[Half] = if rt.info().sm >= 80 { &[Half::F16, Half::BF16] } else { &[Half::F16] };
        for &act in acts {
            let dense = if act == Half::F16 { DType::F16 } else { DType::BF16 };
            for dtype in PackedLayout::dtypes().chain([dense]) {
                for tokens in TOKENS {
                    if tokens > most_tokens(rt.info(), &Matrix::of(dtype, 16, 256)) {
                        continue;
                    }
                    let plan = Experts::new(dtype, act, (16, 256), &[1], tokens).plan(&*rt);
                    assert!(rt.has_kernel(&plan.kernel), "{}: no {}", rt.info().name, plan.kernel);
                    f(&rt, dtype, act, tokens);
                    found += 1;
                }
            }
        }
        assert!(found >= acts.len() * 9 * 4, "{}: {found} kernels", rt.info().name);
    }
}

fn columns(dtype: DType) -> usize {
    match dtype {
        DType::F16 | DType::BF16 => 264,
        dtype if dtype.block_len() == 256 => 256,
        _ => 224,
    }
}

#[test]
fn every_kernel_is_right_at_the_edges_of_its_groups() {
    each_kernel(|rt, dtype, act, tokens| {
        // A group that is not full, an expert of nobody, one of two groups.
        let counts = [tokens - 1, 0, tokens + 1];
        let e = Experts::new(dtype, act, (33, columns(dtype)), &counts, tokens);
        Experts { of: Case { bias: tokens.is_multiple_of(8), ..e.of }, ..e }.check(rt);
    });
}

#[test]
fn every_activation_of_every_kernel() {
    each_kernel(|rt, dtype, act, tokens| {
        for (epilogue, n) in [(Epilogue::SwiGlu, 32), (Epilogue::GeGlu, 48), (Epilogue::ClampedSwiGlu, 48)] {
            if epilogue != Epilogue::SwiGlu && ![DType::Q4_K, DType::Q8_0, DType::F16].contains(&dtype) {
                continue; // what becomes of a sum does not know where it came from
            }
            let e = Experts::new(dtype, act, (n, columns(dtype)), &[2, 0, 3], tokens);
            let bias = epilogue == Epilogue::ClampedSwiGlu;
            Experts { of: Case { epilogue, bias, ..e.of }, ..e }.check(rt);
        }
    });
}

/// More rows of matrices than a block has, and long ones.
#[test]
fn several_blocks_of_rows() {
    each_kernel(|rt, dtype, act, tokens| {
        let few = [DType::Q4_0, DType::Q6_K, DType::F16, DType::BF16].contains(&dtype);
        if few && (act == Half::F16) == (tokens <= 8) {
            Experts::new(dtype, act, (275, 1024), &[1, 2], tokens).check(rt);
        }
    });
}

#[test]
fn a_row_does_not_depend_on_the_others_of_its_group() {
    each_kernel(|rt, dtype, act, tokens| {
        if ![DType::Q4_1, DType::Q6_K, DType::F16, DType::BF16].contains(&dtype) {
            return;
        }
        let whole = Experts::new(dtype, act, (40, columns(dtype)), &[tokens, 2], tokens);
        let all = whole.check(rt);
        let row = whole.of.ldy() * whole.of.size();
        for count in [1, 3] {
            // The first rows of an expert are the same whatever their number; of the next, one is not even finite.
            let few = Experts { counts: vec![count, 1], ..whole.clone() };
            let mut operands = [few.operands(0), few.operands(1)];
            if count > 1 {
                operands[0].x[(count - 1) * few.of.ldx() + 5] = 0x7fff;
            }
            let same = count.max(2) - 1;
            let y = few.run(rt, &operands);
            assert_eq!(y[0][..same * row], all[0][..same * row], "{dtype} {act:?}: {count} of {tokens} rows");
            assert_eq!(y[1][..row], all[1][..row], "{dtype} {act:?}: another expert's row");
        }
    });
}

/// Every order of threads and every time of copies: the same bits, no race and no stray access.
#[test]
fn in_every_schedule() {
    for (dtype, tokens, n) in [
        (DType::F16, 4, 6),
        (DType::Q4_K, 4, 20),
        (DType::BF16, 8, 20),
        (DType::Q6_K, 8, 33),
        (DType::Q4_0, 16, 70),
    ] {
        let act = if dtype == DType::BF16 { Half::BF16 } else { Half::F16 };
        let mut first = None;
        gpu::for_schedules(|rt, schedule| {
            let y = Experts::new(dtype, act, (n, 256), &[2, 0, tokens + 1], tokens).check(rt);
            assert!(*first.get_or_insert_with(|| y.clone()) == y, "{dtype} by {tokens}, {schedule}");
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn any_groups(
        counts in prop::collection::vec(0usize..12, 1..6),
        tokens in prop::sample::select(TOKENS.to_vec()),
        dtype in prop::sample::select(PackedLayout::dtypes().chain([DType::F16]).collect::<Vec<_>>()),
        n in 1usize..90,
        k in 1usize..12,
        epilogue in prop::sample::select(vec![Epilogue::F32, Epilogue::SwiGlu, Epilogue::GeGlu, Epilogue::ClampedSwiGlu]),
        bias: bool,
        pad_y in (0usize..3, 0usize..3),
        act in 0usize..2,
        seed: u64,
    ) {
        for rt in gpu::runtimes() {
            let act = if act == 0 || rt.info().sm < 80 { Half::F16 } else { Half::BF16 };
            let dtype = if dtype == DType::F16 && act == Half::BF16 { DType::BF16 } else { dtype };
            let n = if epilogue.is_gated() { n.next_multiple_of(16) } else { n };
            let k = match dtype {
                DType::F16 | DType::BF16 => 8 * k,
                dtype => dtype.block_len() * k.div_ceil(dtype.block_len() / 32),
            };
            let tokens = tokens.min(most_tokens(rt.info(), &Matrix::of(dtype, n, k)));
            let e = Experts::new(dtype, act, (n, k), &counts, tokens);
            Experts { of: Case { epilogue, bias, pad_y, seed, ..e.of }, ..e }.check(&rt);
        }
    }
}
