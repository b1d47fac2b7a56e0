//! Pages of keys and values between the device's layout and the host's.

use super::*;

/// A layer of the host's cache with `lens` tokens in sequences of their own, and what it looks like on a device.
struct Pages {
    pool: PagePool,
    /// Page ids with how many tokens they hold, in the order of sequences.
    ids: Vec<(u32, usize)>,
    /// Keys and values of all heads of each of these tokens.
    rows: Vec<Vec<f32>>,
    heads: usize,
    hd: usize,
    kv: KvType,
}

impl Pages {
    fn new(kv: KvType, heads: usize, hd: usize, lens: &[usize], rng: &mut Rng) -> Pages {
        let g = KvGeometry { n_layers: 1, n_kv_heads: heads, head_dim: hd, dtype: kv };
        let n: usize = lens.iter().map(|l| l.div_ceil(PAGE_TOKENS)).sum();
        let mut pool = PagePool::new(g, n + 1).expect("a pool");
        // A page of nobody: ids are not places.
        let _ = pool.alloc();
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        for &len in lens {
            let mut table = BlockTable::new();
            table.reserve(&mut pool, len).expect("room");
            for pos in 0..len {
                let row: Vec<f32> = (0..2 * heads * hd).map(|_| rng.normal()).collect();
                let (k, v) = row.split_at(heads * hd);
                // SAFETY: the pool is this thread's alone.
                unsafe { pool.layer(0).append(table.pages(), pos, k, v) };
                rows.push(row);
            }
            for (i, &page) in table.pages().iter().enumerate() {
                ids.push((page, (len - i * PAGE_TOKENS).min(PAGE_TOKENS)));
            }
        }
        Pages { pool, ids, rows, heads, hd, kv }
    }

    /// All (page, head)s of `page` in the host's layout.
    fn host(&self, page: u32) -> Vec<u8> {
        let kv: LayerKv<'_> = self.pool.layer(0);
        let len = self.heads * 2 * self.kv.part_bytes(self.hd);
        // SAFETY: heads of a page are contiguous, K before V (see `LayerKv`), and nobody writes.
        unsafe { std::slice::from_raw_parts(kv.k_ptr(page, 0), len) }.to_vec()
    }

    /// The same of the i-th page in the device's layout, with `rest` wherever there is no token; the oracle's accessors say the same.
    fn device(&self, i: usize, rest: u8) -> Vec<u8> {
        let (page, tokens) = self.ids[i];
        let before: usize = self.ids[..i].iter().map(|(_, tokens)| tokens).sum();
        let (kv, part) = (self.pool.layer(0), self.kv.part_bytes(self.hd));
        let mut out = vec![rest; self.heads * 2 * part];
        for token in 0..tokens {
            for (h, row) in self.rows[before + token].chunks_exact(self.hd).enumerate() {
                let (head, is_v) = (h % self.heads, h >= self.heads);
                let to = &mut out[(head * 2 + usize::from(is_v)) * part..][..part];
                store(self.kv, to, token, row);
                for d in 0..self.hd {
                    let x = if is_v { kv.value(page, head, token, d) } else { kv.key(page, head, token, d) };
                    assert_eq!(stored(self.kv, to, self.hd, token, d) as f32, x);
                }
            }
        }
        out
    }
}

/// Makes what a page has behind `tokens` tokens zero.
fn cut(kv: KvType, hd: usize, page: &mut [u8], tokens: usize) {
    for part in page.chunks_exact_mut(kv.part_bytes(hd)) {
        let (elements, scales) = part.split_at_mut(PAGE_TOKENS * hd * kv.element());
        elements[tokens * hd * kv.element()..].fill(0);
        if kv.is_scaled() {
            scales[4 * tokens..].fill(0);
        }
    }
}

/// Pages to the host and back, through staging buffers or mapped memory.
pub fn check(
    rt: &Arc<dyn Runtime>,
    kv: KvType,
    heads: usize,
    hd: usize,
    lens: &[usize],
    mapped_memory: bool,
    seed: u64,
) {
    let mut rng = Rng::new(seed);
    let pages = Pages::new(kv, heads, hd, lens, &mut rng);
    let (n, page_len) = (pages.ids.len(), heads * 2 * kv.part_bytes(hd));
    let what = format!("{kv:?}, {heads} heads of {hd}, {lens:?}, mapped {mapped_memory}");

    // On the device: other ids, and NaN wherever there is no token.
    let device_ids = shuffled(&mut rng, n + 2);
    let mut device = vec![0xffu8; (n + 2) * page_len];
    for i in 0..n {
        device[device_ids[i] as usize * page_len..][..page_len].copy_from_slice(&pages.device(i, 0xff));
    }
    let host_ids = shuffled(&mut rng, n + 2);
    let device_kv = upload(rt, &device);
    // All but the first.
    let moves = |tokens: &dyn Fn(usize) -> usize| -> Vec<PageMove> {
        let page = |i: usize| PageMove {
            device: device_ids[i],
            host: host_ids[i],
            tokens: tokens(pages.ids[i].1) as u32,
        };
        (1..n).map(page).collect()
    };
    let (held, whole) = (moves(&|t| t), moves(&|_| PAGE_TOKENS));
    let staging = Output::new(rt, (n + 2) * page_len);
    let memory = rt.pinned((n + 2) * page_len).expect("pinned memory");
    // SAFETY: nothing is in flight that touches it.
    unsafe { memory.host().write_bytes(CANARY, memory.len()) };
    let host = if mapped_memory { memory.device() } else { staging.ptr() };
    let args = PageMoves {
        layers: &[LayerPages { device: device_kv.ptr(), host }],
        pages: &held,
        n_kv_heads: heads,
        head_dim: hd,
        kv,
    };
    pages_to_host(&**rt, LANE, &args).expect("launch");
    rt.synchronize_all().expect("done");
    let there: Vec<u8> = if mapped_memory {
        // SAFETY: the device is done.
        unsafe { mapped(&*memory, 0, memory.len()) }.to_vec()
    } else {
        staging.bytes()
    };
    let mut want = vec![0xffu8; (n + 2) * page_len];
    for (i, (page, _)) in pages.ids.iter().enumerate().skip(1) {
        want[host_ids[i] as usize * page_len..][..page_len].copy_from_slice(&pages.host(*page));
    }
    assert!(there == want, "{what}: to the host");

    // Back to other memory, all places of a page: zeros were stored for what is not there.
    let back = Output::new(rt, (n + 2) * page_len);
    let args = PageMoves { layers: &[LayerPages { device: back.ptr(), host }], pages: &whole, ..args };
    pages_from_host(&**rt, LANE, &args).expect("launch");
    let mut want = vec![0xffu8; (n + 2) * page_len];
    for (i, &id) in device_ids.iter().enumerate().take(n).skip(1) {
        want[id as usize * page_len..][..page_len].copy_from_slice(&pages.device(i, 0));
    }
    assert!(back.bytes() == want, "{what}: from the host");

    // And with counts, of pages whose rest is not zero: what is behind a count becomes zero.
    let few = moves(&|t| t.div_ceil(2));
    pages_from_host(&**rt, LANE, &PageMoves { pages: &few, ..args }).expect("launch");
    for page in &few {
        let at = page.device as usize * page_len;
        cut(kv, hd, &mut want[at..at + page_len], page.tokens as usize);
    }
    assert!(back.bytes() == want, "{what}: from the host, fewer tokens");
}

#[test]
fn pages_change_their_layout_and_nothing_else() {
    for rt in gpu::runtimes() {
        for t in KvType::ALL {
            for hd in [16, 64, 80, 96, 128, 256] {
                check(&rt, t, 2, hd, &[33, 64], hd == 80, hd as u64);
            }
            check(&rt, t, 1, 48, &[1, 31, 70], true, 1);
        }
    }
}

#[test]
fn more_pages_than_a_launch_lists_move_in_several() {
    for rt in gpu::runtimes() {
        let (n, hd) = (300usize, 16);
        let page_len = 2 * PAGE_TOKENS * hd;
        let mut rng = Rng::new(8);
        let device: Vec<u16> = (0..n * page_len).map(|_| rng.next_u64() as u16).collect();
        let (from, to) = (shuffled(&mut rng, n), shuffled(&mut rng, n));
        let pages: Vec<PageMove> = from
            .iter()
            .zip(&to)
            .map(|(&device, &host)| PageMove { device, host, tokens: PAGE_TOKENS as u32 })
            .collect();
        let device_kv = upload(&rt, &device);
        let (out, back) = (Output::new(&rt, n * page_len * 2), Output::new(&rt, n * page_len * 2));
        let there = |device: DevPtr| [LayerPages { device, host: out.ptr() }];
        let args = PageMoves {
            layers: &there(device_kv.ptr()),
            pages: &pages,
            n_kv_heads: 1,
            head_dim: hd,
            kv: KvType::F16,
        };
        pages_to_host(&*rt, LANE, &args).expect("launch");
        pages_from_host(&*rt, LANE, &PageMoves { layers: &there(back.ptr()), ..args }).expect("launch");
        assert!(back.u16() == device, "pages came back otherwise");
        // Each where it was sent: its first key is where the layouts agree.
        let out = out.u16();
        for p in &pages {
            let (there, here) = (p.host as usize * page_len, p.device as usize * page_len);
            assert_eq!(out[there], device[here], "page {}", p.device);
        }
    }
}

/// A launch takes so many layers; blocks walk over layers, pages and heads.
#[test]
fn pages_of_more_layers_than_a_launch_takes() {
    for rt in gpu::runtimes() {
        let (n, hd, heads, held) = (70usize, 32, 3, 3);
        let page_len = heads * 2 * PAGE_TOKENS * hd;
        let mut rng = Rng::new(9);
        let device: Vec<u16> = (0..n * held * page_len).map(|_| rng.next_u64() as u16).collect();
        let pages = [0, 2].map(|device| PageMove { device, host: 2 - device, tokens: PAGE_TOKENS as u32 });
        let (from, back) = (upload(&rt, &device), Output::new(&rt, device.len() * 2));
        let out = Output::new(&rt, device.len() * 2);
        let order = shuffled(&mut rng, n);
        let layers = |device: DevPtr| -> Vec<LayerPages> {
            let at = |base: DevPtr, layer: usize| base.add(layer * held * page_len * 2);
            (0..n)
                .map(|l| LayerPages { device: at(device, l), host: at(out.ptr(), order[l] as usize) })
                .collect()
        };
        let (there, here) = (layers(from.ptr()), layers(back.ptr()));
        let args =
            PageMoves { layers: &there, pages: &pages, n_kv_heads: heads, head_dim: hd, kv: KvType::F16 };
        pages_to_host(&*rt, LANE, &args).expect("launch");
        pages_from_host(&*rt, LANE, &PageMoves { layers: &here, ..args }).expect("launch");
        let (out, back) = (out.u16(), back.u16());
        for l in 0..n {
            for (page, wanted) in [(0, true), (1, false), (2, true)] {
                let at = (l * held + page) * page_len;
                let same = back[at..at + page_len] == device[at..at + page_len];
                let untouched = back[at..at + page_len].iter().all(|&x| x == 0xffff);
                assert!(if wanted { same } else { untouched }, "layer {l}, page {page}");
                // Its first key is where the layouts agree.
                let there = (order[l] as usize * held + 2 - page) * page_len;
                assert_eq!(out[there], if wanted { device[at] } else { 0xffff }, "layer {l}, page {page}");
            }
        }
    }
}
