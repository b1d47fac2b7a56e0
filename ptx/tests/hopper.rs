//! sm_90a: mbarriers, bulk copies and wgmma, and what must not be done with them. Layouts are the ISA's, 9.7.15.5.

mod common;
use common::{Launch, Random, module, run};
use tandem_ptx::{Buffers, Fault, FaultKind, Landing, Module, Options, TensorMap};

fn launch(threads: u32, copies: Landing) -> Launch {
    let options = Options { copies, budget: Some(100_000), ..Options::default() };
    Launch { threads, options, ..Launch::default() }
}

fn text(body: &str) -> String {
    module("", body).replace("sm_80", "sm_90a")
}

fn wait(parity: &str) -> String {
    // Each in a scope of its own, as inline assembly is.
    format!(
        "{{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], {parity}; @!p bra WAIT; }}\n"
    )
}

/// The second warp hands over five words, one a phase; the first warp's arrivals let it go on.
#[test]
fn mbarriers_hand_over() {
    let body = format!(
        ".shared .align 8 .b8 bar[16];\n.shared .align 4 .b8 own[4];\nsetp.eq.u32 %p0, %lane, 0;\n\
         @%p0 mbarrier.init.shared::cta.b64 [bar], 1; @%p0 mbarrier.init.shared::cta.b64 [bar+8], 32; bar.sync 0;\n\
         mov.u32 %r0, 0; mov.u32 %r1, 0; setp.ge.u32 %p1, %lane, 32; @%p1 bra FILL;\n\
         TAKE: {full} ld.shared.u32 %r2, [own]; mad.lo.u32 %r3, %r0, 32, %lane; mad.wide.u32 %q0, %r3, 4, %out;\n\
         st.global.u32 [%q0], %r2; mbarrier.arrive.shared::cta.b64 _, [bar+8]; xor.b32 %r1, %r1, 1; add.s32 %r0, %r0, 1;\n\
         setp.lt.u32 %p2, %r0, 5; @%p2 bra TAKE; bra OUT;\n\
         FILL: setp.ne.u32 %p3, %lane, 32; @%p3 bra OUT;\n\
         NEXT: xor.b32 %r4, %r1, 1; {empty} mad.lo.u32 %r5, %r0, 7, 100; st.shared.u32 [own], %r5;\n\
         mbarrier.arrive.shared::cta.b64 _, [bar]; xor.b32 %r1, %r1, 1; add.s32 %r0, %r0, 1; setp.lt.u32 %p4, %r0, 5;\n\
         @%p4 bra NEXT; OUT: mov.u32 %r6, 0;",
        full = wait("%r1"),
        empty = wait("%r4").replace("[bar]", "[bar+8]")
    );
    let out = run(&text(&body), &[0], 160, launch(64, Landing::AtWait)).unwrap();
    assert!(out.iter().enumerate().all(|(i, v)| *v == 100 + 7 * (i as u32 / 32)), "{out:?}");
}

#[test]
fn mbarriers_that_are_none_or_too_full() {
    let fault = |body: &str| {
        let body = format!(".shared .align 8 .b8 bar[8];\nsetp.eq.u32 %p0, %lane, 0;\n{body}");
        run(&text(&body), &[0], 1, launch(32, Landing::AtWait)).unwrap_err()
    };
    let found = fault("@%p0 st.shared.u64 [bar], 5; mbarrier.arrive.shared::cta.b64 _, [bar];");
    assert!(matches!(&found.kind, FaultKind::Operand(text) if text.contains("no mbarrier")), "{found}");
    assert!(matches!(
        fault("mbarrier.arrive.shared::cta.b64 _, [bar];").kind,
        FaultKind::Uninitialised { .. }
    ));
    let found = fault("mbarrier.init.shared::cta.b64 [bar], 0;");
    assert!(matches!(found.kind, FaultKind::Operand(_)), "{found}");
    // 32 arrivals are announced, and a second round has begun when bytes are missing.
    let body = "@%p0 mbarrier.init.shared::cta.b64 [bar], 32; bar.sync 0;\n\
                mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16; mbarrier.arrive.shared::cta.b64 _, [bar];";
    let found = fault(body);
    assert!(matches!(&found.kind, FaultKind::Operand(text) if text.contains("more arrivals")), "{found}");
    // Nobody comes.
    let found = fault(&format!("@%p0 mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; {}", wait("0")));
    assert!(matches!(found.kind, FaultKind::Budget(_)), "{found}");
}

/// One box of 8 rows of a matrix of 5 x 40, from (-8, 2) on; read after the wait, or before.
fn bulk(read_early: bool, copies: Landing) -> Result<Vec<u32>, Box<Fault>> {
    let read = "shl.b32 %r0, %lane, 5; mov.u32 %r1, box; add.s32 %r1, %r1, %r0; ld.shared.u32 %r2, [%r1];";
    let body = format!(
        ".shared .align 1024 .b8 box[1024];\n.shared .align 8 .b8 bar[8];\nsetp.eq.u32 %p0, %lane, 0;\n\
         shl.b32 %r0, %lane, 5; mov.u32 %r1, box; add.s32 %r1, %r1, %r0; st.shared.u32 [%r1], 7;\n\
         @%p0 mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; mov.u32 %r8, -8; mov.u32 %r9, 2;\n\
         @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n\
         @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [box], [%in, {{%r8, %r9}}], [bar];\n\
         {} {} shl.b32 %r0, %lane, 5; mov.u32 %r1, box; add.s32 %r1, %r1, %r0;\n\
         ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [%r1]; ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r1+16];\n\
         mad.wide.u32 %q0, %lane, 32, %out; st.global.v4.u32 [%q0], {{%r2, %r3, %r4, %r5}};\n\
         st.global.v4.u32 [%q0+16], {{%r10, %r11, %r12, %r13}};",
        if read_early { read } else { "" },
        wait("0")
    );
    let module = Module::parse(&text(&body)).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = Buffers::new();
    let matrix = memory.add(&(0..5 * 48u16).flat_map(|i| (i + 1).to_le_bytes()).collect::<Vec<_>>());
    let map = TensorMap { address: matrix, rows: 5, cols: 40, stride: 48, box_rows: 8, box_cols: 64 };
    assert_eq!(TensorMap::decode(&map.encode()), Some(map));
    assert_eq!(TensorMap::decode(&[0; 128]), None);
    let (at, out) = (memory.add(&map.encode()), memory.add_words(&[0; 256]));
    let params = [at, out].map(u64::to_le_bytes).concat();
    let options = Options { copies, budget: Some(100_000), ..Options::default() };
    module.launch("k", [1; 3], [32, 1, 1], 0, &params, &mut memory, &options)?;
    Ok(memory.words(out))
}

#[test]
fn bulk_copies_of_boxes() {
    for copies in [Landing::AtWait, Landing::AtOnce] {
        let bytes: Vec<u8> = bulk(false, copies).unwrap().iter().flat_map(|w| w.to_le_bytes()).collect();
        for r in 0..8i32 {
            for c in 0..64i32 {
                let (row, col) = (r + 2, c - 8);
                let inside = row < 5 && (0..40).contains(&col);
                let want = if inside { (row * 48 + col + 1) as u16 } else { 0 };
                let at = (r * 128 + (((c / 8) ^ r) * 16) + c % 8 * 2) as usize;
                assert_eq!(u16::from_le_bytes([bytes[at], bytes[at + 1]]), want, "({r}, {c})");
            }
        }
    }
    let found = bulk(true, Landing::AtWait).unwrap_err();
    assert!(matches!(found.kind, FaultKind::Uninitialised { .. }), "{found}");
    assert!(found.instruction.contains("ld.shared.u32 %r2"), "{found}");
}

/// d[64][8] = c + a[64][16] * b[8][16]^T, a and b at bytes 0 and 8192 of shared memory in rows of 128 bytes. `middle` runs
/// between the product and the wait.
fn wgmma(middle: &str, copies: Landing) -> (Vec<u32>, Result<Vec<u32>, Box<Fault>>) {
    let body = format!(
        ".shared .align 1024 .b8 own[9216];\nmov.u32 %r0, %lane;\n\
         COPY: mul.wide.u32 %q0, %r0, 4; add.s64 %q1, %q0, %in; ld.global.u32 %r1, [%q1]; mov.u64 %q2, own;\n\
         add.s64 %q2, %q2, %q0; st.shared.u32 [%q2], %r1; add.s32 %r0, %r0, 128; setp.lt.u32 %p0, %r0, 2304; @%p0 bra COPY;\n\
         fence.proxy.async.shared::cta; bar.sync 0; mov.f32 %f0, 0f40000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0;\n\
         mov.f32 %f3, %f0; mov.pred %p1, 1; mov.u64 %q3, 0x4000004000010000; mov.u64 %q4, 0x4000004000010200;\n\
         wgmma.fence.sync.aligned;\n\
         wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %q3, %q4, %p1, 1, 1, 0, 0;\n\
         wgmma.commit_group.sync.aligned; {middle} wgmma.wait_group.sync.aligned 0;\n\
         mad.wide.u32 %q5, %lane, 16, %out; st.global.v4.f32 [%q5], {{%f0, %f1, %f2, %f3}};"
    );
    let mut random = Random(4);
    // Small whole numbers in f16: 0x3c00 is 1, 0x4000 is 2, 0xbc00 is -1.
    let mut half = || [0u32, 0x3c00, 0x4000, 0xbc00][random.next() as usize % 4];
    let input: Vec<u32> = (0..2304).map(|_| half() | half() << 16).collect();
    let out = run(&text(&body), &input, 512, launch(128, copies));
    (input, out)
}

#[test]
fn products_of_a_warpgroup() {
    let number = |bits: u32| match bits & 0xffff {
        0x3c00 => 1,
        0x4000 => 2,
        0xbc00 => -1,
        _ => 0,
    };
    for copies in [Landing::AtWait, Landing::AtOnce] {
        let (input, out) = wgmma("", copies);
        let element = |base: usize, row: usize, k: usize| {
            let at = base + row * 128 + ((2 * k / 16) ^ (row % 8)) * 16 + 2 * k % 16;
            number(input[at / 4] >> (at % 4 * 8))
        };
        for (t, d) in out.unwrap().chunks(4).enumerate() {
            for (i, got) in d.iter().enumerate() {
                let (row, col) = (t / 32 * 16 + t % 32 / 4 + i / 2 * 8, t % 4 * 2 + i % 2);
                let dot: i32 = (0..16).map(|k| element(0, row, k) * element(8192, col, k)).sum();
                assert_eq!(f32::from_bits(*got), (2 + dot) as f32, "thread {t}, {i}");
            }
        }
    }
}

/// Two products on the same sums, in one group or in two.
#[test]
fn products_that_follow_each_other() {
    let again = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %q3, %q4, %p1, 1, 1, 0, 0;\n\
                 wgmma.commit_group.sync.aligned;";
    let once = wgmma("", Landing::AtWait).1.unwrap();
    for middle in [again.to_owned(), format!("{again} wgmma.wait_group.sync.aligned 1;")] {
        for copies in [Landing::AtWait, Landing::AtOnce] {
            let twice = wgmma(&middle, copies).1.unwrap();
            // 2 + dot and 2 + 2 dot.
            let right = |(x, y): (&u32, &u32)| f32::from_bits(*y) == 2.0 * f32::from_bits(*x) - 2.0;
            assert!(once.iter().zip(&twice).all(right), "{middle}");
        }
    }
}

#[test]
fn what_a_product_in_flight_has() {
    // Its sums are not there before the wait, and must not be written.
    let (_, out) = wgmma("mad.wide.u32 %q6, %lane, 16, %out; st.global.f32 [%q6], %f0;", Landing::AtWait);
    out.unwrap();
    let (_, out) = wgmma("mov.f32 %f1, 0f00000000;", Landing::AtWait);
    let found = out.unwrap_err();
    assert!(matches!(&found.kind, FaultKind::Operand(text) if text.contains("written")), "{found}");
    // Its operands must stay: what is written over them shows in a late product, and not in an early one.
    let over = "bar.sync 0; mov.u32 %r5, own; mov.u32 %r6, 0x7e007e00; mad.lo.u32 %r5, %lane, 72, %r5; st.shared.u32 [%r5], %r6; bar.sync 0;";
    let (early, late) = (wgmma(over, Landing::AtOnce).1.unwrap(), wgmma(over, Landing::AtWait).1.unwrap());
    assert!(early == wgmma("", Landing::AtWait).1.unwrap(), "at once, nothing shows");
    assert!(early != late, "late, it does");
    let (_, out) = wgmma(
        "mov.u64 %q3, 0x8000004000010000; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %q3, %q4, %p1, 1, 1, 0, 0;",
        Landing::AtWait,
    );
    let found = out.unwrap_err();
    assert!(matches!(&found.kind, FaultKind::Operand(text) if text.contains("swizzle")), "{found}");
}

/// a in registers, as that of mma m16n8k16 for the 16 rows of each warp; b by rows of k.
#[test]
fn products_of_registers_and_columns() {
    let body = ".shared .align 1024 .b8 own[2048];\nmad.wide.u32 %q0, %lane, 16, %in;\n\
                ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%q0]; ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%q0+2048];\n\
                shl.b32 %r8, %lane, 4; mov.u32 %r9, own; add.s32 %r9, %r9, %r8;\n\
                st.shared.v4.u32 [%r9], {%r0, %r1, %r2, %r3}; fence.proxy.async.shared::cta; bar.sync 0;\n\
                mov.pred %p1, 0; mov.u64 %q4, 0x4000004000010000; wgmma.fence.sync.aligned;\n\
                wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r4, %r5, %r6, %r7}, %q4, %p1, 1, 1, 1;\n\
                wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n\
                mad.wide.u32 %q5, %lane, 16, %out; st.global.v4.f32 [%q5], {%f0, %f1, %f2, %f3};";
    let mut random = Random(6);
    let mut element = || random.next() as usize % 4;
    let (bits, numbers) = ([0u32, 0x3c00, 0x4000, 0xbc00], [0i32, 1, 2, -1]);
    let a: Vec<usize> = (0..64 * 16).map(|_| element()).collect();
    let b: Vec<usize> = (0..16 * 8).map(|_| element()).collect();
    let mut input = vec![0u32; 1024];
    for k in 0..16 {
        for n in 0..8 {
            // Chunk 0 of line k of 128 bytes.
            let at = k * 128 + (k % 8) * 16 + 2 * n;
            input[at / 4] |= bits[b[k * 8 + n]] << (at % 4 * 8);
        }
    }
    for t in 0..128 {
        for i in 0..8 {
            let (group, thread) = (t % 32 / 4, t % 4);
            let row = t / 32 * 16 + if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
            let k = thread * 2 + (i & 1) + if i < 4 { 0 } else { 8 };
            input[512 + t * 4 + i / 2] |= bits[a[row * 16 + k]] << (16 * (i % 2));
        }
    }
    let out = run(&text(body), &input, 512, launch(128, Landing::AtWait)).unwrap();
    for (t, d) in out.chunks(4).enumerate() {
        for (i, got) in d.iter().enumerate() {
            let (row, col) = (t / 32 * 16 + t % 32 / 4 + i / 2 * 8, t % 4 * 2 + i % 2);
            let dot: i32 = (0..16).map(|k| numbers[a[row * 16 + k]] * numbers[b[k * 8 + col]]).sum();
            assert_eq!(f32::from_bits(*got), dot as f32, "thread {t}, {i}");
        }
    }
}
