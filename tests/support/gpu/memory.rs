//! Device memory of kernel tests: uploads, outputs with guards, 16-bit floats.
use std::sync::Arc;

use half::{bf16, f16};
use tandem::cache::{KvType, PAGE_TOKENS, quantise_head};
use tandem::device::{Buffer, DevPtr, Lane, Runtime};
use tandem::tensor::Half;

pub const LANE: Lane = Lane::Compute;
/// What outputs hold before a kernel writes them: a NaN as f32 and as two halves, an absurd index.
pub const CANARY: u8 = 0xff;
/// Bytes before and after an output that nobody may write; keeps 256-byte alignment.
const GUARD: usize = 256;

/// Types whose values are their bytes.
///
/// # Safety
/// No padding.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($t:ty)*) => {
        $(
            // SAFETY: a number.
            unsafe impl Plain for $t {}
        )*
    };
}

plain!(u8 i8 u16 u32 i32 u64 f32 f64 f16 bf16);

/// Plain data as bytes.
pub fn bytes<T: Plain>(x: &[T]) -> &[u8] {
    // SAFETY: `Plain` has no padding, and the slice covers exactly `x`.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

/// A copy of `data` in device memory. Nothing is uploaded (one unspecified byte) for an empty slice.
pub fn upload<T: Plain>(rt: &Arc<dyn Runtime>, data: &[T]) -> Buffer {
    let buffer = Buffer::new(rt, size_of_val(data)).expect("memory");
    if !data.is_empty() {
        rt.upload(LANE, buffer.ptr(), bytes(data)).expect("upload");
    }
    buffer
}

/// Where optional data lies, or NULL.
pub fn at(buffer: &Option<Buffer>) -> DevPtr {
    buffer.as_ref().map_or(DevPtr::NULL, Buffer::ptr)
}

/// An output between guards, all filled with [`CANARY`].
pub struct Output {
    rt: Arc<dyn Runtime>,
    buffer: Buffer,
    len: usize,
}

impl Output {
    /// Of `len` bytes.
    pub fn new(rt: &Arc<dyn Runtime>, len: usize) -> Output {
        let buffer = Buffer::new(rt, len + 2 * GUARD).expect("memory");
        rt.fill(LANE, buffer.ptr(), CANARY, buffer.len()).expect("fill");
        Output { rt: rt.clone(), buffer, len }
    }

    /// That holds `data`.
    pub fn of<T: Plain>(rt: &Arc<dyn Runtime>, data: &[T]) -> Output {
        let out = Output::new(rt, size_of_val(data));
        rt.upload(LANE, out.ptr(), bytes(data)).expect("upload");
        out
    }

    pub fn ptr(&self) -> DevPtr {
        self.buffer.ptr().add(GUARD)
    }

    /// What it holds now; the guards are untouched.
    #[track_caller]
    pub fn bytes(&self) -> Vec<u8> {
        let mut all = vec![0; self.buffer.len()];
        self.rt.download(LANE, self.buffer.ptr(), &mut all).expect("download");
        for (i, &b) in all.iter().enumerate() {
            let inside = (GUARD..GUARD + self.len).contains(&i);
            assert!(
                inside || b == CANARY,
                "byte {} of {} was written",
                i as isize - GUARD as isize,
                self.len
            );
        }
        all[GUARD..GUARD + self.len].to_vec()
    }

    #[track_caller]
    pub fn u16(&self) -> Vec<u16> {
        self.bytes().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    #[track_caller]
    pub fn u32(&self) -> Vec<u32> {
        self.bytes().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[track_caller]
    pub fn f32(&self) -> Vec<f32> {
        self.u32().into_iter().map(f32::from_bits).collect()
    }
}

/// Rounded to nearest even.
pub fn encode(t: Half, x: f32) -> u16 {
    match t {
        Half::F16 => f16::from_f32(x).to_bits(),
        Half::BF16 => bf16::from_f32(x).to_bits(),
    }
}

pub fn decode(t: Half, x: u16) -> f64 {
    match t {
        Half::F16 => f16::from_bits(x).to_f64(),
        Half::BF16 => bf16::from_bits(x).to_f64(),
    }
}

/// An element of a head's keys (or values) of a page as a device holds them: rows of tokens, and of q8 then their scales.
pub fn stored(kv: KvType, part: &[u8], head_dim: usize, token: usize, d: usize) -> f64 {
    let at = token * head_dim + d;
    match kv {
        KvType::Q8 => f64::from(part[at] as i8) * f64::from(scale_of(part, head_dim, token)),
        KvType::F16 | KvType::BF16 => decode(kv.half(), u16::from_le_bytes([part[2 * at], part[2 * at + 1]])),
    }
}

/// A token's scale of q8.
pub fn scale_of(part: &[u8], head_dim: usize, token: usize) -> f32 {
    let at = PAGE_TOKENS * head_dim + 4 * token;
    f32::from_le_bytes(part[at..at + 4].try_into().unwrap())
}

/// Stores a token's row there.
pub fn store(kv: KvType, part: &mut [u8], token: usize, row: &[f32]) {
    let at = token * row.len();
    match kv {
        KvType::Q8 => {
            let mut codes = vec![0; row.len()];
            let scale = quantise_head(row, &mut codes);
            part[at..at + row.len()].copy_from_slice(bytes(&codes));
            let scales = PAGE_TOKENS * row.len() + 4 * token;
            part[scales..scales + 4].copy_from_slice(&scale.to_le_bytes());
        }
        KvType::F16 | KvType::BF16 => {
            for (to, &x) in part[2 * at..].chunks_exact_mut(2).zip(row) {
                to.copy_from_slice(&encode(kv.half(), x).to_le_bytes());
            }
        }
    }
}

/// Half an ulp at 1.
pub fn epsilon(t: Half) -> f64 {
    match t {
        Half::F16 => 2f64.powi(-11),
        Half::BF16 => 2f64.powi(-8),
    }
}

/// How far rounding to `t` moves a value of magnitude `x` (f16 has an absolute floor below 2^-14).
pub fn rounding(t: Half, x: f64) -> f64 {
    let floor = if t == Half::F16 { 2f64.powi(-25) } else { 0.0 };
    x.abs() * epsilon(t) + floor
}

/// The 16-bit types whose kernels of the form `name(type)` the runtime has; says which it has not.
pub fn halves(rt: &Arc<dyn Runtime>, name: impl Fn(&str) -> String) -> Vec<Half> {
    let mut has = Vec::new();
    for t in [Half::F16, Half::BF16] {
        let kernel = name(t.name());
        if rt.has_kernel(&kernel) {
            has.push(t);
        } else {
            println!("skipped: {} has no {kernel}", rt.info().name);
        }
    }
    assert!(!has.is_empty(), "no kernel {}", name("f16"));
    has
}
