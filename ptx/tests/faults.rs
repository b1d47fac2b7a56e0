//! What a kernel must not do, and what a text must not say.

mod common;
use common::{Launch, module, run};
use tandem_ptx::{Buffers, Fault, FaultKind, Module, Options, Space};

/// The fault of a body, in a launch of this many threads.
fn fault(body: &str, threads: u32) -> Box<Fault> {
    let options = Options { budget: Some(10_000), ..Options::default() };
    let launch = Launch { threads, options, shared: 64, ..Launch::default() };
    run(&module(".extern .shared .align 16 .b8 dynamic[];", body), &[0; 32], 32, launch).unwrap_err()
}

#[test]
fn addresses_outside_name_the_thread() {
    let found = fault("mad.wide.u32 %q0, %lane, 8, %in; ld.global.u32 %r0, [%q0];", 32);
    assert!(matches!(found.kind, FaultKind::Memory(_)), "{found}");
    assert_eq!((found.thread, found.block), (Some([16, 0, 0]), Some([0, 0, 0])));
    assert!(found.instruction.contains("ld.global.u32 %r0, [%q0]") && found.line > 10, "{found}");
    let found = fault("shl.b32 %r0, %lane, 2; st.shared.u32 [%r0], %r0;", 32);
    let kind = FaultKind::Outside { space: Space::Shared, address: 64, bytes: 4, size: 64 };
    assert_eq!((found.kind, found.thread), (kind, Some([16, 0, 0])));
    let found = fault(".local .align 4 .b8 depot[8];\nst.local.u32 [depot+8], 1;", 32);
    assert!(matches!(found.kind, FaultKind::Outside { space: Space::Local, size: 8, .. }), "{found}");
    let found = fault("ld.param.u64 %q0, [k_in+16];", 32);
    assert!(matches!(found.kind, FaultKind::Outside { space: Space::Param, size: 16, .. }), "{found}");
    // An address of shared memory is none of global memory.
    let found = fault("mov.u64 %q0, dynamic; cvta.shared.u64 %q0, %q0; ld.global.u32 %r0, [%q0];", 32);
    assert!(matches!(found.kind, FaultKind::Operand(_)), "{found}");
    let found = fault(
        "cp.async.cg.shared.global [dynamic], [%in+112], 16; cp.async.cg.shared.global [dynamic], [%in+128], 16;",
        1,
    );
    assert!(matches!(found.kind, FaultKind::Memory(_)), "{found}");
}

#[test]
fn misaligned_addresses() {
    for body in [
        "ld.global.u32 %r0, [%in+2];",
        "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%in+8];",
        "st.shared.u64 [dynamic+4], %in;",
        "cp.async.cg.shared.global [dynamic+8], [%in], 16;",
        "atom.global.add.u32 %r0, [%out+1], 1;",
        "mov.u32 %r1, dynamic; add.s32 %r1, %r1, 8; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1];",
    ] {
        let found = fault(body, 32);
        assert!(matches!(found.kind, FaultKind::Misaligned { .. }), "{body}: {found}");
    }
}

#[test]
fn shared_memory_is_read_before_it_is_written() {
    let body = "st.shared.u16 [dynamic], %h0; ld.shared.u32 %r0, [dynamic];";
    assert_eq!(fault(body, 32).kind, FaultKind::Uninitialised { address: 0, bytes: 4 });
    let options = Options { watch_shared: false, ..Options::default() };
    let launch = Launch { shared: 64, options, ..Launch::default() };
    run(&module(".extern .shared .align 16 .b8 dynamic[];", body), &[0], 1, launch).unwrap();
}

#[test]
fn barriers_that_not_all_reach() {
    // One warp waits at another barrier.
    let body = "setp.lt.u32 %p0, %lane, 32; @%p0 bra A; bar.sync 0; bra E; A: bar.sync 1; E: mov.u32 %r0, 0;";
    let found = fault(body, 64);
    assert!(matches!(&found.kind, FaultKind::Deadlock(text) if text.contains("barrier 1")), "{found}");
    assert!(found.instruction.contains("bar.sync"), "{found}");
    // Half of a warp.
    let body = "setp.lt.u32 %p0, %lane, 16; @%p0 bra A; bar.sync 0; A: mov.u32 %r0, 0; bar.sync 0;";
    let found = fault(body, 32);
    assert!(matches!(found.kind, FaultKind::Diverged { .. }), "{found}");
    let found = fault("setp.lt.u32 %p0, %lane, 16; @%p0 bar.sync 0;", 32);
    assert_eq!(found.kind, FaultKind::Diverged { active: 0xffff, wanted: u32::MAX });
    // Counts that do not agree, or are none.
    let body = "setp.lt.u32 %p0, %lane, 32; selp.u32 %r0, 64, 96, %p0; bar.sync 1, %r0;";
    assert!(matches!(fault(body, 96).kind, FaultKind::Barrier { id: 1, .. }));
    assert!(matches!(fault("bar.sync 1, 40;", 64).kind, FaultKind::Barrier { id: 1, .. }));
    assert!(matches!(fault("bar.sync 16;", 64).kind, FaultKind::Barrier { id: 16, .. }));
    // Fewer come than are waited for.
    assert!(matches!(
        fault(
            "bar.sync 1, 64; bar.sync 2, 64; bar.arrive 3, 64; bar.sync 4, 32;
        setp.lt.u32 %p0, %lane, 32; @%p0 bra E; bar.sync 5, 64; E: mov.u32 %r0, 0;",
            64
        )
        .kind,
        FaultKind::Deadlock(_)
    ));
}

/// A warp, and a part of one; devices would go on without them.
#[test]
fn threads_that_have_exited_are_missed() {
    let body = "setp.ge.u32 %p0, %lane, 48; @%p0 exit; bar.sync 0; mad.wide.u32 %q0, %lane, 4, %out;\n\
                st.global.u32 [%q0], 1;";
    let found = fault(body, 96);
    assert_eq!(found.kind, FaultKind::Diverged { active: 0xffff, wanted: u32::MAX });
    let whole = body.replace("48", "64");
    assert!(matches!(fault(&whole, 96).kind, FaultKind::Deadlock(_)));
    let options = Options { excuse_exited: true, ..Options::default() };
    let launch = Launch { threads: 96, options, ..Launch::default() };
    assert_eq!(run(&module("", body), &[0], 48, launch).unwrap(), [1; 48]);
}

#[test]
fn lanes_that_must_come_together() {
    let found = fault("setp.lt.u32 %p0, %lane, 16; @%p0 shfl.sync.bfly.b32 %r0, %r1, 1, 31, -1;", 32);
    assert_eq!(found.kind, FaultKind::Diverged { active: 0xffff, wanted: u32::MAX });
    // The others have gone on to another shuffle.
    let body = "setp.lt.u32 %p0, %lane, 16; @%p0 bra A; shfl.sync.bfly.b32 %r0, %r1, 1, 31, -1; bra E;\n\
                A: shfl.sync.bfly.b32 %r0, %r1, 2, 31, -1; E: mov.u32 %r2, 0;";
    assert!(matches!(fault(body, 32).kind, FaultKind::Diverged { .. }));
    assert!(matches!(fault("vote.sync.ballot.b32 %r0, %p0, 0xfffffffe;", 32).kind, FaultKind::Operand(_)));
    // Half a warp has no matrices.
    let body = "mov.u32 %r1, dynamic; movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r2;";
    assert!(matches!(fault(body, 16).kind, FaultKind::Diverged { active: 0xffff, .. }));
}

#[test]
fn nothing_is_left_in_flight() {
    let body = "cp.async.cg.shared.global [dynamic], [%in], 16; cp.async.commit_group;";
    let found = fault(body, 1);
    assert!(matches!(&found.kind, FaultKind::Operand(text) if text.contains("nobody waited")), "{found}");
}

#[test]
fn loops_without_end_and_traps() {
    assert_eq!(fault("L: bra L;", 32).kind, FaultKind::Budget(10_000));
    let found = fault("setp.eq.u32 %p0, %lane, 5; @%p0 trap;", 32);
    assert_eq!((found.kind, found.thread), (FaultKind::Trap, Some([5, 0, 0])));
    assert!(matches!(fault("st.global.u32 [k_in], 1;", 32).kind, FaultKind::Memory(_)));
    assert_eq!(
        fault("mov.u64 %q0, k_in; cvta.param.u64 %q0, %q0; st.u32 [%q0], 1;", 32).kind,
        FaultKind::ReadOnly(Space::Param)
    );
}

#[test]
fn launches_that_are_refused() {
    let text = module("", "").replace("\n{\n", "\n.maxntid 64, 1, 1\n{\n");
    let module = Module::parse(&text).unwrap();
    let kernel = module.kernels().next().unwrap();
    assert_eq!((kernel.name, kernel.param_bytes, kernel.param_align), ("k", 16, 8));
    assert_eq!(kernel.most_threads, Some([64, 1, 1]));
    let launch = |name: &str, grid: u32, threads: u32, params: usize| {
        let mut memory = Buffers::new();
        let params = vec![0; params];
        let options = Options::default();
        module.launch(name, [grid, 1, 1], [threads, 1, 1], 0, &params, &mut memory, &options)
    };
    launch("k", 1, 64, 16).unwrap();
    for (name, grid, threads, params) in [
        ("j", 1, 32, 16),
        ("k", 0, 32, 16),
        ("k", 1, 96, 16),
        ("k", 1, 0, 16),
        ("k", 1, 32, 24),
        ("k", 1, 32, 8),
    ] {
        let found = launch(name, grid, threads, params).unwrap_err();
        assert!(matches!(found.kind, FaultKind::Launch(_)), "{found}");
    }
}

/// Each with the line: nothing is guessed.
#[test]
fn texts_that_are_refused() {
    for (body, problem) in [
        ("frobnicate.u32 %r0, %r1;", "unknown instruction"),
        ("add.wrong.u32 %r0, %r1, %r2;", "modifier"),
        ("add.sat.s32 %r0, %r1, %r2;", "modifier"),
        ("add.s32 %r0, %r1;", "operands"),
        ("add.s32 %r0, %r1, %q0;", "64"),
        ("add.s64 %q0, %q1, %r0;", "32"),
        ("add.s32 %r0, %r1, %r64;", "not declared"),
        ("bra NOWHERE;", "label"),
        ("ld.global.acquire.u32 %r0, [%in];", "order"),
        ("ld.shared.nc.u32 %r0, [%in];", "order"),
        ("cvt.f32.s32 %f0, %r0;", "rounding"),
        ("cvt.rn.s32.f32 %r0, %f0;", "rounding"),
        ("cvt.rn.f32.f16 %f0, %h0;", "rounding"),
        ("cvt.rn.f16.f32 %r0, %f0;", "register"),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%r4, %r5}, {%r0, %r1, %r2, %r3};",
            "registers",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%r0, %r1, %r2, %r3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r0, %r1, %r2, %r3};",
            "fragments",
        ),
        ("cp.async.cg.shared.global [%r0], [%in], 8;", "16 bytes"),
        ("mov.u32 %r0, 0x123456789;", "32 bits"),
        ("shfl.sync.bfly.b32 %r0, %r1, 1, 31;", "operands"),
        ("L: mov.u32 %r0, 0; L: mov.u32 %r0, 1;", "twice"),
        ("ex2.f32 %f0, %f1;", "approx"),
        ("mov.u32 %r0 %r1;", "`,`"),
        ("@%r0 mov.u32 %r0, 1;", "predicate"),
    ] {
        let text = module("", body);
        let error = Module::parse(&text).expect_err(body);
        assert!(error.to_string().contains(problem), "{body}: {error}");
        let line = text.lines().position(|l| l.starts_with(body)).unwrap() + 1;
        assert_eq!((error.line as usize, error.text.as_str()), (line, body));
    }
    assert!(Module::parse(".version 9.0\n.func f() { ret; }").is_err());
    assert!(Module::parse(".address_size 32").is_err());
}
