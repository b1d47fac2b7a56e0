//! One layer's pages: the view that appends write and attention reads.

use std::marker::PhantomData;

use super::PAGE_TOKENS;
use super::kv_type::{KvType, quantise_head};

/// Keys and values of one layer in all pages. Cheap to copy, shared by threads.
///
/// Within a layer: `[page][kv_head]`, then K and V of that head (layouts in [`crate::cache`]), so a query group reads
/// one contiguous part of each page.
///
/// A slot is one (page, token in page). The view has interior mutability: appends write through `&self`
/// so that rows can be stored in parallel. Writers promise (they are `unsafe`) that a slot has one writer
/// at a time, and that nothing attends over its page meanwhile: kernels read whole pages (and mask tokens that are not
/// stored). In a forward pass, a layer's appends end before its attention begins.
#[derive(Clone, Copy)]
pub struct LayerKv<'a> {
    base: *mut u8,
    n_pages: usize,
    n_kv_heads: usize,
    head_dim: usize,
    dtype: KvType,
    _pool: PhantomData<&'a [u8]>,
}

// SAFETY: a view of plain memory borrowed from the pool; all writes are `unsafe` and promise not to race.
unsafe impl Send for LayerKv<'_> {}
// SAFETY: as above.
unsafe impl Sync for LayerKv<'_> {}

impl<'a> LayerKv<'a> {
    /// # Safety
    /// `base` is 64-byte aligned and points to `n_pages · n_kv_heads · 2` parts of [`KvType::part_bytes`]
    /// initialised bytes that outlive `'a`, written only through such views.
    pub(super) unsafe fn from_raw(
        base: *mut u8,
        n_pages: usize,
        n_kv_heads: usize,
        head_dim: usize,
        dtype: KvType,
    ) -> LayerKv<'a> {
        LayerKv { base, n_pages, n_kv_heads, head_dim, dtype, _pool: PhantomData }
    }

    /// Pages in the pool.
    pub fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// KV heads.
    pub fn n_kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    /// Elements per head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Storage type.
    pub fn dtype(&self) -> KvType {
        self.dtype
    }

    /// Bytes of K, or of V, of one head in one page.
    pub const fn part_bytes(&self) -> usize {
        self.dtype.part_bytes(self.head_dim)
    }

    /// Offset of the scales of K, or of V, of one head in one page: f32 `[32 tokens]`, 64-byte aligned, if the type has scales.
    pub const fn scales_at(&self) -> usize {
        PAGE_TOKENS * self.dtype.element() * self.head_dim
    }

    /// K of (`page`, `head`): `[2][head_dim/2][16][2]`, 64-byte aligned, followed by its V.
    pub fn k_ptr(&self, page: u32, head: usize) -> *const u8 {
        self.ptr(page, head)
    }

    /// V of (`page`, `head`): `[16][head_dim][2]`, 64-byte aligned.
    pub fn v_ptr(&self, page: u32, head: usize) -> *const u8 {
        self.ptr(page, head).wrapping_add(self.part_bytes())
    }

    fn ptr(&self, page: u32, head: usize) -> *mut u8 {
        let page = page as usize;
        assert!(
            page < self.n_pages && head < self.n_kv_heads,
            "page {page} of {}, KV head {head} of {}",
            self.n_pages,
            self.n_kv_heads
        );
        // SAFETY: both indices were just checked, so the offset stays inside the layer (`from_raw`).
        unsafe { self.base.add((page * self.n_kv_heads + head) * 2 * self.part_bytes()) }
    }

    /// Index of an element in K.
    fn k_index(&self, slot: usize, d: usize) -> usize {
        ((slot / 16) * (self.head_dim / 2) + d / 2) * 32 + (slot % 16) * 2 + d % 2
    }

    /// Index of an element in V.
    fn v_index(&self, slot: usize, d: usize) -> usize {
        ((slot / 2) * self.head_dim + d) * 2 + slot % 2
    }

    /// Element `d` of the key in (`page`, `slot`) of `head`, for the oracle.
    pub fn key(&self, page: u32, head: usize, slot: usize, d: usize) -> f32 {
        assert!(slot < PAGE_TOKENS && d < self.head_dim, "slot {slot}, element {d} of {}", self.head_dim);
        // SAFETY: `ptr` checked page and head, the line above the rest, so the index is within K.
        unsafe { self.element(self.ptr(page, head), self.k_index(slot, d), slot) }
    }

    /// Element `d` of the value in (`page`, `slot`) of `head`.
    pub fn value(&self, page: u32, head: usize, slot: usize, d: usize) -> f32 {
        assert!(slot < PAGE_TOKENS && d < self.head_dim, "slot {slot}, element {d} of {}", self.head_dim);
        // SAFETY: as in `key`; V follows K.
        unsafe { self.element(self.ptr(page, head).add(self.part_bytes()), self.v_index(slot, d), slot) }
    }

    /// # Safety
    /// `part` is K or V of a head in a page, `i` an index of an element of the token in `slot`.
    unsafe fn element(&self, part: *const u8, i: usize, slot: usize) -> f32 {
        // SAFETY: the caller's promise; scales are aligned, since K and V are and the elements fill whole lines.
        unsafe {
            let x = self.dtype.decode(part.add(i * self.dtype.element()));
            match self.dtype.is_scaled() {
                true => x * part.add(self.scales_at()).cast::<f32>().add(slot).read(),
                false => x,
            }
        }
    }

    /// Stores the key and value of one head of the token at position `pos`: `k` (RoPE applied) and `v`
    /// of `head_dim` elements; f32 are rounded to nearest even.
    ///
    /// # Safety
    /// Meanwhile no other thread writes this head of this slot (`pages[pos / 32]`, `pos % 32`), and none
    /// attends over its page.
    /// Different slots, and different heads of one slot, may be written at the same time.
    pub unsafe fn append_head<T: KvElement>(&self, pages: &[u32], pos: usize, head: usize, k: &[T], v: &[T]) {
        let hd = self.head_dim;
        assert!(k.len() == hd && v.len() == hd, "k of {}, v of {}, head_dim {hd}", k.len(), v.len());
        let slot = pos % PAGE_TOKENS;
        let part = self.ptr(pages[pos / PAGE_TOKENS], head);
        // SAFETY: `slot` < 32, K and V of this (page, head) were checked by `ptr`, and the slices have head_dim elements.
        unsafe {
            let value = part.add(self.part_bytes());
            if self.dtype.is_scaled() {
                self.append_codes(part, slot, k, |slot, d| self.k_index(slot, d));
                self.append_codes(value, slot, v, |slot, d| self.v_index(slot, d));
            } else {
                self.append_bits(part.cast(), value.cast(), slot, k, v);
            }
        }
    }

    /// Quantises one head's key or value of the token in `slot`; `index` says where its elements go.
    ///
    /// # Safety
    /// `part` is K or V of a head in a page of a type with scales, whose indices `index` gives, and `x` has head_dim elements; the
    /// slot is this thread's.
    unsafe fn append_codes<T: KvElement>(
        &self,
        part: *mut u8,
        slot: usize,
        x: &[T],
        index: impl Fn(usize, usize) -> usize,
    ) {
        let (mut floats, mut codes) = ([0f32; LARGEST_HEAD], [0i8; LARGEST_HEAD]);
        let n = x.len();
        assert!(n <= LARGEST_HEAD, "a head of {n}");
        T::widen(self.dtype, x, &mut floats[..n]);
        let scale = quantise_head(&floats[..n], &mut codes[..n]);
        for (d, &code) in codes[..n].iter().enumerate() {
            // SAFETY: the caller's promise: one byte of this slot in each.
            unsafe { part.add(index(slot, d)).cast::<i8>().write(code) };
        }
        // SAFETY: as above; aligned as in `element`.
        unsafe { part.add(self.scales_at()).cast::<f32>().add(slot).write(scale) };
    }

    /// Stores a token's key and value of a head in 16 bits.
    ///
    /// # Safety
    /// `key` and `value` are K and V of a head in a page of 16-bit elements; `slot` is a slot of this thread's, `k` and `v` have
    /// head_dim elements.
    unsafe fn append_bits<T: KvElement>(
        &self,
        key: *mut u16,
        value: *mut u16,
        slot: usize,
        k: &[T],
        v: &[T],
    ) {
        // SAFETY: the loops run over d < head_dim, so both walks stay inside K and V. Only this slot's elements are written,
        // never the neighbours in its lines, and the caller promises that nothing else touches it.
        unsafe {
            let mut kp = key.add(self.k_index(slot, 0));
            let mut vp = value.add(self.v_index(slot, 0));
            let (mut key, mut value) = ([0u16; 64], [0u16; 64]);
            for (k, v) in k.chunks(64).zip(v.chunks(64)) {
                T::encode(self.dtype, k, &mut key[..k.len()]);
                T::encode(self.dtype, v, &mut value[..k.len()]);
                for (d, pair) in key[..k.len()].chunks_exact(2).enumerate() {
                    kp.add(d * 32).cast::<u32>().write(pair[0] as u32 | (pair[1] as u32) << 16);
                }
                for (d, &v) in value[..k.len()].iter().enumerate() {
                    vp.add(d * 2).write(v);
                }
                kp = kp.add(32 * 32);
                vp = vp.add(64 * 2);
            }
        }
    }

    /// Stores the keys and values of all heads of the token at position `pos` (`[n_kv_heads][head_dim]`).
    ///
    /// # Safety
    /// Meanwhile no other thread writes the slot (`pages[pos / 32]`, `pos % 32`), or attends over its page.
    pub unsafe fn append<T: KvElement>(&self, pages: &[u32], pos: usize, k: &[T], v: &[T]) {
        let (hd, n) = (self.head_dim, self.n_kv_heads);
        assert!(k.len() == n * hd && v.len() == n * hd, "k {}, v {}, {n} heads of {hd}", k.len(), v.len());
        for (h, (k, v)) in k.chunks_exact(hd).zip(v.chunks_exact(hd)).enumerate() {
            // SAFETY: the caller promises the whole slot, hence each of its heads.
            unsafe { self.append_head(pages, pos, h, k, v) };
        }
    }
}

/// Most elements of a head that can be quantised: a buffer on the stack holds one.
pub(super) const LARGEST_HEAD: usize = 1024;

/// An element of keys and values to be stored: f32, or 16 bits of [`KvType::half`].
pub trait KvElement: Copy + Sync {
    /// The bits of `x` in pages of a 16-bit `dtype`, at the front of `bits`.
    fn encode(dtype: KvType, x: &[Self], bits: &mut [u16]);
    /// The values of `x`, to be quantised to `dtype`.
    fn widen(dtype: KvType, x: &[Self], out: &mut [f32]);
}

impl KvElement for f32 {
    fn encode(dtype: KvType, x: &[f32], bits: &mut [u16]) {
        dtype.half().narrow(x, &mut bits[..x.len()]);
    }
    fn widen(_dtype: KvType, x: &[f32], out: &mut [f32]) {
        out.copy_from_slice(x);
    }
}

impl KvElement for u16 {
    fn encode(_dtype: KvType, x: &[u16], bits: &mut [u16]) {
        bits[..x.len()].copy_from_slice(x);
    }
    fn widen(dtype: KvType, x: &[u16], out: &mut [f32]) {
        dtype.half().widen(x, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{BlockTable, KvGeometry, PagePool};

    #[test]
    fn what_is_appended_is_read_back_and_nothing_else_changes() {
        for dtype in KvType::ALL {
            for head_dim in [16, 64, 80] {
                let g = KvGeometry { n_layers: 2, n_kv_heads: 3, head_dim, dtype };
                let mut pool = PagePool::new(g, 5).unwrap();
                let (mut a, mut b) = (BlockTable::new(), BlockTable::new());
                a.reserve(&mut pool, 33).unwrap();
                b.reserve(&mut pool, 40).unwrap();
                let width = 3 * head_dim;
                // Such integers are exact in all types: with a largest one of 127 the scale is 1.
                let x = |seed: usize, i: usize| match i % head_dim {
                    0 => 127.0,
                    _ => ((i * 7 + seed * 13) % 255) as f32 - 127.0,
                };
                let (rows_a, rows_b) = (33, 40);
                let k: Vec<f32> = (0..(rows_a + rows_b) * width).map(|i| x(1, i)).collect();
                let v: Vec<f32> = (0..(rows_a + rows_b) * width).map(|i| x(2, i)).collect();
                // Pages, rows, and the first of them in k and v.
                let seqs = [(b.pages(), rows_b, 0), (a.pages(), rows_a, rows_b)];
                let kv = pool.layer(1);
                for (pages, n_rows, row0) in seqs {
                    for t in 0..n_rows {
                        let row = (row0 + t) * width..(row0 + t + 1) * width;
                        // SAFETY: the two tables share no page, and nobody else uses the pool.
                        unsafe { kv.append(pages, t, &k[row.clone()], &v[row]) };
                    }
                }
                for (pages, n_rows, row0) in seqs {
                    for t in 0..pages.len() * PAGE_TOKENS {
                        for h in 0..3 {
                            for d in 0..head_dim {
                                let i = (row0 + t) * width + h * head_dim + d;
                                let stored = t < n_rows;
                                let (page, slot) = (pages[t / PAGE_TOKENS], t % PAGE_TOKENS);
                                assert_eq!(kv.key(page, h, slot, d), if stored { k[i] } else { 0.0 });
                                assert_eq!(kv.value(page, h, slot, d), if stored { v[i] } else { 0.0 });
                                assert_eq!(pool.layer(0).key(page, h, slot, d), 0.0, "another layer");
                            }
                        }
                    }
                }
            }
        }
    }
}
