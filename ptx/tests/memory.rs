//! Spaces, vectors, generic addresses, atomics, asynchronous copies.

mod common;
use common::{Launch, lanes, module, run};
use tandem_ptx::{FaultKind, Landing, Options};

fn words(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn vectors_and_narrow_types() {
    let body = "mad.wide.u32 %q0, %lane, 16, %in; mad.wide.u32 %q1, %lane, 32, %out;\n\
                ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%q0]; st.global.v2.u32 [%q1], {%r3, %r2};\n\
                ld.global.u8 %r4, [%q0+1]; ld.global.s8 %r5, [%q0+1]; ld.global.s16 %h0, [%q0+2];\n\
                cvt.s32.s16 %r6, %h0; st.global.u8 [%q1+8], %r4; st.global.u16 [%q1+10], %h0;\n\
                st.global.v4.u32 [%q1+16], {%r4, %r5, %r6, 77};";
    let input: Vec<u32> = (0..128).map(|i: u32| i.wrapping_mul(0x9e37_79b9)).collect();
    let out = run(&module("", body), &input, 256, Launch::default()).unwrap();
    for (v, out) in input.chunks(4).zip(out.chunks(8)) {
        let byte = v[0] >> 8 & 0xff;
        let upper = v[0] >> 16;
        assert_eq!(out[..2], [v[3], v[2]]);
        assert_eq!(out[2], byte | upper << 16);
        let (byte_signed, upper_signed) = (i32::from(byte as u8 as i8), i32::from(upper as u16 as i16));
        assert_eq!(out[4..], [byte, byte_signed as u32, upper_signed as u32, 77]);
    }
}

/// Stores of some lanes, to places that lie in a row with those of the others.
#[test]
fn only_active_lanes_store() {
    let body = "mad.wide.u32 %q0, %lane, 4, %out; and.b32 %r0, %lane, 3; setp.eq.u32 %p0, %r0, 1;\n\
                @%p0 st.global.u32 [%q0], 9; @!%p0 ld.global.u32 %r1, [%q0+4096]; @%p0 mov.u32 %r1, 0;";
    let fault = run(&module("", body), &[0], 32, Launch::default()).unwrap_err();
    assert!(fault.instruction.contains("ld.global") && fault.thread == Some([0, 0, 0]), "{fault}");
    let body = &body[..body.find("@!").unwrap()];
    let out = run(&module("", body), &[0], 32, Launch::default()).unwrap();
    assert!(out.iter().enumerate().all(|(i, v)| *v == if i % 4 == 1 { 9 } else { 0 }), "{out:?}");
}

/// Each lane its own local memory; shared memory of the block, static, then dynamic; a constant array.
#[test]
fn spaces_are_apart() {
    let declarations = ".extern .shared .align 16 .b8 dynamic[];\n.const .align 4 .b32 table[4] = {10, -1, 0x20, 7};\n\
                        .shared .align 4 .b8 unused[64];";
    let body = ".local .align 8 .b8 depot[16];\n.shared .align 4 .b8 own[132];\n.reg .b64 %SPL;\nmov.u64 %SPL, depot;\n\
                shl.b32 %r0, %lane, 2; mov.u32 %r1, own; add.s32 %r1, %r1, %r0; mov.u32 %r2, dynamic;\n\
                add.s32 %r2, %r2, %r0; st.shared.u32 [%r1], %lane; not.b32 %r3, %lane; st.shared.u32 [%r2], %r3;\n\
                st.local.u32 [%SPL+8], %r0; ld.shared.u32 %r4, [%r1]; ld.shared.u32 %r5, [%r2];\n\
                ld.local.u32 %r6, [depot+8]; and.b32 %r7, %lane, 3; mul.wide.u32 %q0, %r7, 4; mov.u64 %q1, table;\n\
                add.s64 %q1, %q1, %q0; ld.const.u32 %r8, [%q1]; mov.u32 %r9, dynamic;\n\
                mad.wide.u32 %q2, %lane, 24, %out; st.global.u32 [%q2], %r4; st.global.u32 [%q2+4], %r5;\n\
                st.global.u32 [%q2+8], %r6; st.global.u32 [%q2+12], %r8; st.global.u32 [%q2+16], %r9;";
    let launch = Launch { shared: 128, ..Launch::default() };
    let out = run(&module(declarations, body), &[0], 32 * 6, launch).unwrap();
    for (lane, out) in out.chunks(6).enumerate() {
        let lane = lane as u32;
        // 132 bytes, to the next multiple of 16.
        assert_eq!(out[..5], [lane, !lane, 4 * lane, [10, u32::MAX, 0x20, 7][lane as usize % 4], 144]);
    }
}

#[test]
fn generic_addresses() {
    let body = ".shared .align 8 .b8 own[128];\n.local .align 4 .b8 depot[4];\n\
                mul.wide.u32 %q0, %lane, 4; mov.u64 %q1, own; add.s64 %q1, %q1, %q0; cvta.shared.u64 %q2, %q1;\n\
                st.u32 [%q2], %lane; ld.shared.u32 %r0, [%q1]; isspacep.shared %p0, %q2; isspacep.global %p1, %q2;\n\
                mov.u64 %q3, depot; cvta.local.u64 %q4, %q3; st.local.u32 [depot], 5; ld.u32 %r1, [%q4];\n\
                cvta.to.shared.u64 %q5, %q2; setp.eq.s64 %p2, %q5, %q1; add.s64 %q6, %in, %q0; ld.u32 %r2, [%q6];\n\
                selp.b32 %r3, 1, 0, %p0; selp.b32 %r4, 2, 0, %p1; selp.b32 %r5, 4, 0, %p2; or.b32 %r3, %r3, %r4;\n\
                or.b32 %r3, %r3, %r5; mad.wide.u32 %q7, %lane, 16, %out;\n\
                st.v4.u32 [%q7], {%r0, %r1, %r2, %r3};";
    let out = run(&module("", body), &words(100..132), 128, Launch::default()).unwrap();
    for (lane, out) in out.chunks(4).enumerate() {
        assert_eq!(out, [lane as u32, 5, 100 + lane as u32, 1 | 4]);
    }
}

#[test]
fn special_registers() {
    let body = "mov.u32 %r32, %laneid; mov.u32 %r33, %ntid.x; mov.u32 %r34, %lanemask_lt; mov.u32 %r35, %lanemask_ge;\n\
                mov.u32 %r36, %nctaid.x; mov.u32 %r37, %warpid; mov.u64 %q0, %clock64; mov.u64 %q1, %clock64;\n\
                setp.lt.u64 %p0, %q0, %q1; selp.u32 %r38, 1, 0, %p0;";
    for (lane, out) in lanes(body, 1, &[0; 32], 7).chunks(7).enumerate() {
        let below = (1u64 << lane) as u32 - 1;
        assert_eq!(out, [lane as u32, 32, below, !below, 1, 0, 1]);
    }
}

/// All lanes of two blocks on one word: the order is not said, the result is.
#[test]
fn atomics_of_global_memory() {
    let body = "mov.u32 %r0, %ctaid.x; mad.lo.u32 %r0, %r0, 32, %lane; add.s32 %r1, %r0, 1;\n\
                atom.global.add.u32 %r2, [%out], %r1; red.global.max.s32 [%out+4], %r0; atom.global.min.s32 %r3, [%out+8], -5;\n\
                red.global.or.b32 [%out+12], %r1; atom.global.inc.u32 %r4, [%out+16], 9;\n\
                atom.global.cas.b32 %r5, [%out+20], 0, %r1; atom.global.exch.b32 %r6, [%out+24], %r1;\n\
                mov.f32 %f0, 0f3F800000; atom.global.add.f32 %f1, [%out+28], %f0;\n\
                cvt.u64.u32 %q0, %r1; atom.global.add.u64 %q1, [%out+32], %q0; mul.wide.u32 %q2, %r0, 4;\n\
                add.s64 %q2, %q2, %out; st.global.u32 [%q2+64], %r2;";
    let launch = Launch { grid: 2, ..Launch::default() };
    let out = run(&module("", body), &[0], 16 + 64, launch).unwrap();
    let sum = 64 * 65 / 2;
    assert_eq!(out[..4], [sum, 63, -5i32 as u32, 127]);
    // 64 steps through 0..=9.
    assert_eq!(out[4], 4);
    assert_eq!(out[5], 1);
    assert_eq!((out[6], out[7]), (64, 64f32.to_bits()));
    assert_eq!((out[8], out[9]), (sum, 0));
    let mut old = out[16..].to_vec();
    old.sort_unstable();
    assert_eq!(old, (0..64).map(|i| i * (i + 1) / 2).collect::<Vec<u32>>(), "each saw another sum");
}

#[test]
fn atomics_of_shared_memory() {
    let body = ".shared .align 4 .b8 own[8];\nsetp.eq.u32 %p0, %lane, 0; @%p0 st.shared.u32 [own], 100; bar.sync 0;\n\
                atom.shared.add.u32 %r0, [own], 1; atom.shared.dec.u32 %r1, [own], 5000; bar.sync 0;\n\
                ld.shared.u32 %r2, [own]; mad.wide.u32 %q0, %lane, 4, %out; st.global.u32 [%q0], %r2;";
    assert_eq!(run(&module("", body), &[0], 32, Launch::default()).unwrap(), vec![100; 32]);
}

/// Two groups, the second of which has not landed when the first is read.
const COPIES: &str = ".shared .align 16 .b8 own[1024];\nmul.wide.u32 %q0, %lane, 16; add.s64 %q0, %q0, %in; shl.b32 %r0, %lane, 4;\n\
                      mov.u32 %r1, own; add.s32 %r0, %r0, %r1; and.b32 %r2, %lane, 1; shl.b32 %r2, %r2, 3;\n\
                      cp.async.cg.shared.global.L2::128B [%r0], [%q0], 16, %r2; cp.async.commit_group;\n\
                      cp.async.ca.shared.global [%r0+512], [%q0], 4; cp.async.commit_group;\n";

#[test]
fn copies_land_when_they_are_waited_for() {
    let body = COPIES.to_owned()
        + "cp.async.wait_group 1; ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r0]; cp.async.wait_group 0;\n\
           ld.shared.u32 %r8, [%r0+512]; mad.wide.u32 %q1, %lane, 32, %out; st.global.v4.u32 [%q1], {%r4, %r5, %r6, %r7};\n\
           st.global.u32 [%q1+16], %r8;";
    for copies in [Landing::AtWait, Landing::AtOnce] {
        let options = Options { copies, ..Options::default() };
        let launch = Launch { options, ..Launch::default() };
        let out = run(&module("", &body), &words(1..129), 256, launch).unwrap();
        for (lane, out) in out.chunks(8).enumerate() {
            let first = 4 * lane as u32 + 1;
            // 8 bytes of odd lanes are read, of even ones none: zeros fill.
            let half = if lane % 2 == 1 { [first, first + 1, 0, 0] } else { [0; 4] };
            assert_eq!((&out[..4], out[4]), (&half[..], first), "lane {lane}");
        }
    }
}

#[test]
fn bytes_in_flight_have_no_value() {
    let body = COPIES.to_owned() + "cp.async.wait_group 1; ld.shared.u32 %r8, [%r0+512];";
    let fault = run(&module("", &body), &words(1..129), 1, Launch::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised { address: 512, bytes: 4 });
    assert!(fault.instruction.contains("ld.shared.u32 %r8"), "{fault}");
    // Waiting for all does, closed into a group or not.
    let body = body.replace("wait_group 1", "wait_all");
    run(&module("", &body), &words(1..129), 1, Launch::default()).unwrap();
}

#[test]
fn the_read_only_path_is_for_memory_that_is_not_written() {
    let load = "mad.wide.u32 %q0, %lane, 4, %out; ld.global.nc.u32 %r0, [%q0];";
    run(&module("", load), &[0], 32, Launch::default()).unwrap();
    let store = "mad.wide.u32 %q1, %lane, 4, %out; st.global.u32 [%q1], 1;";
    for body in [format!("{load} {store}"), format!("{store} {load}")] {
        let fault = run(&module("", &body), &[0], 32, Launch::default()).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::NotConstant { .. }), "{fault}");
    }
    // Of other bytes, it may be.
    let apart = format!("{load} {}", store.replace("[%q1]", "[%q1+128]"));
    run(&module("", &apart), &[0], 64, Launch::default()).unwrap();
}
