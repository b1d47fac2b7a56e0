//! What lanes and warps do together: branches, shuffles, votes, barriers.

mod common;
use common::{Launch, Random, lanes, module, run};
use tandem_ptx::{Options, Order};

/// The ISA's pseudo-code, with the clamp and mask that CUDA's intrinsics pass.
fn source(mode: &str, lane: u32, by: u32, width: u32) -> (u32, bool) {
    let first = lane / width * width;
    let last = first + width - 1;
    let (from, within) = match mode {
        "up" => (lane.wrapping_sub(by), lane >= first + by),
        "down" => (lane + by, lane + by <= last),
        "bfly" => (lane ^ by, (lane ^ by) <= last),
        _ => (first + by % width, true),
    };
    if within { (from, true) } else { (lane, false) }
}

#[test]
fn shuffles() {
    for width in [32u32, 8] {
        for by in [0, 1, 3, 7, 8, 15, 31] {
            for mode in ["up", "down", "bfly", "idx"] {
                let c = (32 - width) << 8 | if mode == "up" { 0 } else { 31 };
                let body =
                    format!("shfl.sync.{mode}.b32 %r32|%p0, %r0, {by}, {c}, -1; selp.u32 %r33, 1, 0, %p0;");
                let input: Vec<u32> = (100..132).collect();
                for (lane, out) in lanes(&body, 1, &input, 2).chunks(2).enumerate() {
                    let (from, valid) = source(mode, lane as u32, by, width);
                    assert_eq!(out, [100 + from, u32::from(valid)], "{mode} {by} of {width}, lane {lane}");
                }
            }
        }
    }
}

#[test]
fn votes_and_reductions() {
    let body = "setp.gt.s32 %p0, %r0, 0; vote.sync.ballot.b32 %r32, %p0, -1; vote.sync.any.pred %p1, %p0, -1;\n\
                vote.sync.all.pred %p2, %p0, -1; selp.u32 %r33, 1, 0, %p1; selp.u32 %r34, 1, 0, %p2;\n\
                vote.sync.ballot.b32 %r35, !%p0, -1; redux.sync.add.s32 %r36, %r0, -1; redux.sync.min.s32 %r37, %r0, -1;\n\
                redux.sync.max.u32 %r38, %r0, -1; redux.sync.xor.b32 %r39, %r0, -1; activemask.b32 %r40;";
    let mut random = Random(3);
    let input: Vec<u32> = (0..32).map(|_| random.word()).collect();
    let ballot = (0..32).fold(0u32, |b, i| b | u32::from(input[i] as i32 > 0) << i);
    let want = [
        ballot,
        u32::from(ballot != 0),
        u32::from(ballot == u32::MAX),
        !ballot,
        input.iter().fold(0, |a: u32, b| a.wrapping_add(*b)),
        input.iter().map(|x| *x as i32).min().unwrap() as u32,
        input.iter().copied().max().unwrap(),
        input.iter().fold(0, |a, b| a ^ b),
        u32::MAX,
    ];
    for out in lanes(body, 1, &input, 9).chunks(9) {
        assert_eq!(out, want);
    }
}

/// Each lane loops another number of times, and they are together again behind the loop.
#[test]
fn lanes_that_leave_a_loop_wait_for_the_others() {
    let body = "mov.u32 %r32, 0; mov.u32 %r1, 0;\n\
                LOOP: setp.gt.u32 %p0, %r1, %r0; @%p0 bra DONE; add.s32 %r32, %r32, %r1; add.s32 %r1, %r1, 1; bra.uni LOOP;\n\
                DONE: activemask.b32 %r33; and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;\n\
                activemask.b32 %r34; bra JOIN; EVEN: activemask.b32 %r34; JOIN: activemask.b32 %r35;";
    let input: Vec<u32> = (0..32).map(|i| i * 7 % 32).collect();
    for (n, out) in input.iter().zip(lanes(body, 1, &input, 4).chunks(4)) {
        let side = input.iter().enumerate().filter(|(_, m)| *m % 2 == n % 2).fold(0, |b, (i, _)| b | 1 << i);
        assert_eq!(out, [n * (n + 1) / 2, u32::MAX, side, u32::MAX]);
    }
}

/// A shuffle among half of a warp while the others are elsewhere.
#[test]
fn groups_of_lanes_shuffle_apart() {
    let body = "setp.lt.u32 %p0, %lane, 16; @%p0 bra LOW;\n\
                shfl.sync.bfly.b32 %r32, %r0, 1, 31, 0xffff0000; bra END;\n\
                LOW: shfl.sync.bfly.b32 %r32, %r0, 2, 31, 0x0000ffff; END: mov.u32 %r33, 0;";
    let input: Vec<u32> = (0..32).collect();
    for (lane, out) in lanes(body, 1, &input, 2).chunks(2).enumerate() {
        assert_eq!(out[0], lane as u32 ^ if lane < 16 { 2 } else { 1 });
    }
}

/// Lanes that wait for others go on when those exit, if such are excused.
#[test]
fn lanes_that_exit_are_not_waited_for() {
    let body = "mad.wide.u32 %q0, %lane, 4, %out; setp.ge.u32 %p0, %lane, 16; @%p0 bra OUT;\n\
                vote.sync.ballot.b32 %r0, 1, -1; st.global.u32 [%q0], %r0; ret;\n\
                OUT: st.global.u32 [%q0], 5; exit;";
    let fault = run(&module("", body), &[0], 32, Launch::default()).unwrap_err();
    assert_eq!(fault.kind, tandem_ptx::FaultKind::Diverged { active: 0xffff, wanted: u32::MAX });
    let options = Options { excuse_exited: true, ..Options::default() };
    let out = run(&module("", body), &[0], 32, Launch { options, ..Launch::default() }).unwrap();
    assert_eq!((&out[..16], &out[16..]), (&[0xffff; 16][..], &[5; 16][..]));
}

/// Inline assembly opens scopes with registers and labels of its own.
#[test]
fn scopes_hide_names() {
    let body = "mov.u32 %r32, 1; { .reg .b32 %r32; .reg .pred p; mov.u32 %r32, 5; setp.eq.u32 p, %r0, 0; @p bra L;\n\
                mov.u32 %r33, %r32; L: mov.u32 %r34, %r32; } { bra L; L: mov.u32 %r35, 9; }\n\
                mov.u32 %r36, 3; { .reg .b32 x; { bra AFTER; } } mov.u32 %r36, 4; AFTER: mov.u32 %r0, 0;";
    let input: Vec<u32> = (1..33).collect();
    for out in lanes(body, 1, &input, 5).chunks(5) {
        assert_eq!(out, [1, 5, 5, 9, 3]);
    }
}

/// Whatever order warps and blocks run in: sums over the block by shared memory.
#[test]
fn barriers_of_the_block() {
    let body = ".shared .align 4 .b8 own[1024];\nshl.b32 %r0, %lane, 2; mov.u32 %r1, own; add.s32 %r2, %r1, %r0;\n\
                mul.lo.u32 %r3, %lane, %lane; st.shared.u32 [%r2], %r3; bar.sync 0; xor.b32 %r4, %r0, 0x3fc;\n\
                add.s32 %r5, %r1, %r4; ld.shared.u32 %r6, [%r5]; mov.u32 %r7, %ctaid.x; mad.lo.u32 %r8, %r7, 256, %lane;\n\
                mad.wide.u32 %q0, %r8, 4, %out; add.s32 %r6, %r6, %r7; st.global.u32 [%q0], %r6;";
    for order in [Order::Ascending, Order::Descending, Order::Shuffled(1), Order::Shuffled(2)] {
        let options = Options { order, ..Options::default() };
        let launch = Launch { grid: 3, threads: 256, options, ..Launch::default() };
        let out = run(&module("", body), &[0], 768, launch).unwrap();
        for (i, got) in out.iter().enumerate() {
            let (block, other) = (i as u32 / 256, 255 - i as u32 % 256);
            assert_eq!(*got, other * other + block);
        }
    }
}

/// Two warps fill, two wait for them; the fifth is not part of it.
#[test]
fn barriers_of_a_part_of_the_block() {
    let body = ".shared .align 4 .b8 own[256];\nshr.u32 %r0, %lane, 5; setp.ge.u32 %p0, %r0, 4; @%p0 bra OUT;\n\
                setp.ge.u32 %p1, %r0, 2; @%p1 bra FILL; bar.sync 1, 128; shl.b32 %r1, %lane, 2; mov.u32 %r2, own;\n\
                add.s32 %r2, %r2, %r1; ld.shared.u32 %r3, [%r2]; mad.wide.u32 %q0, %lane, 4, %out;\n\
                st.global.u32 [%q0], %r3; bra OUT;\n\
                FILL: sub.s32 %r4, %lane, 64; shl.b32 %r5, %r4, 2; mov.u32 %r6, own; add.s32 %r6, %r6, %r5;\n\
                add.s32 %r7, %r4, 1000; st.shared.u32 [%r6], %r7; bar.arrive 1, 128; OUT: mov.u32 %r8, 0;";
    let launch = Launch { threads: 160, ..Launch::default() };
    assert_eq!(run(&module("", body), &[0], 64, launch).unwrap(), (1000..1064).collect::<Vec<u32>>());
}

/// A warp that waits in a loop for another lets it run.
#[test]
fn a_warp_waits_for_another_in_a_loop() {
    let body = ".shared .align 4 .b8 own[4];\nsetp.eq.u32 %p0, %lane, 0; @%p0 st.shared.u32 [own], 0; bar.sync 0;\n\
                setp.ge.u32 %p1, %lane, 32; @%p1 bra SECOND;\n\
                SPIN: ld.volatile.shared.u32 %r0, [own]; setp.eq.u32 %p2, %r0, 0; @%p2 bra SPIN; bra END;\n\
                SECOND: st.volatile.shared.u32 [own], 42; END: ld.shared.u32 %r1, [own];\n\
                mad.wide.u32 %q0, %lane, 4, %out; st.global.u32 [%q0], %r1;";
    let launch = Launch { threads: 64, ..Launch::default() };
    assert_eq!(run(&module("", body), &[0], 64, launch).unwrap(), vec![42; 64]);
}

/// Without a barrier, what a warp reads depends on the turns; with it, it does not.
#[test]
fn short_turns_show_a_missing_barrier() {
    let body = |barrier: &str| {
        format!(
            ".shared .align 4 .b8 own[256];\nshl.b32 %r0, %lane, 2; mov.u32 %r1, own; add.s32 %r2, %r1, %r0;\n\
             st.shared.u32 [%r2], 7; bar.sync 0; ld.shared.u32 %r3, [%r2]; {barrier} st.shared.u32 [%r2], %lane;\n\
             {barrier} xor.b32 %r4, %r0, 0x80; add.s32 %r4, %r1, %r4; ld.shared.u32 %r5, [%r4];\n\
             mad.wide.u32 %q0, %lane, 4, %out; st.global.u32 [%q0], %r5;"
        )
    };
    let run_in = |barrier: &str, turn: u32| {
        let options = Options { turn, ..Options::default() };
        run(&module("", &body(barrier)), &[0], 64, Launch { threads: 64, options, ..Launch::default() })
            .unwrap()
    };
    let want: Vec<u32> = (0..64).map(|i| i ^ 32).collect();
    for turn in [1, 3, 1 << 14] {
        assert_eq!(run_in("bar.sync 0;", turn), want, "turns of {turn}");
    }
    assert_ne!(run_in("", 1 << 14), want);
    assert_ne!(run_in("", 1 << 14), run_in("", 1));
}
