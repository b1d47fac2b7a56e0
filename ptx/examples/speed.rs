//! How fast kernels run: lane instructions a second of one core, of loops of one instruction each and of a kernel's
//! mainloop. `cargo run --release --example speed [GEMM.ptx]`

use std::time::Instant;

use tandem_ptx::{Buffers, Module, Options, Stats};

/// A loop of 8 times the body, 10 000 times, in 8 warps.
fn looped(body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 data)\n{{\n.reg .pred %p;\n\
         .reg .b32 %r<16>, %n;\n.reg .f32 %f<16>;\n.reg .b64 %q<8>;\n.shared .align 16 .b8 own[4096];\n\
         ld.param.u64 %q0, [data];\nmov.u32 %r0, %tid.x;\nmad.wide.u32 %q1, %r0, 4, %q0;\nshl.b32 %r1, %r0, 4;\n\
         mov.u32 %n, 0;\nor.b32 %r8, %r0, 0x3c003c00;\nst.shared.v4.u32 [%r1], {{%r0, %r0, %r0, %r0}};\nbar.sync 0;\n\
         L:\n{}\nadd.s32 %n, %n, 1;\nsetp.lt.u32 %p, %n, 10000;\n@%p bra L;\nret;\n}}\n",
        body.repeat(8)
    )
}

fn report(name: &str, stats: Stats, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{name:44} {:8.1} M lane instructions/s  {:6.2} M mma/s",
        stats.lane_instructions as f64 / seconds / 1e6,
        stats.mma as f64 / seconds / 1e6
    );
}

fn main() {
    let bodies = [
        "add.s32 %r2, %r2, %r0;",
        "fma.rn.f32 %f0, %f1, %f2, %f0;",
        "lop3.b32 %r2, %r2, %r0, %r1, 234;",
        "fma.rn.f16x2 %r2, %r8, %r8, %r8;",
        "cvt.rn.bf16x2.f32 %r2, %f0, %f1;",
        "ex2.approx.ftz.f32 %f0, %f1;",
        "ld.global.f32 %f0, [%q1];",
        "ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%r1];",
        "shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f0, %f1, %f2, %f3};",
    ];
    for body in bodies {
        let module = Module::parse(&looped(body)).expect("a text that is known");
        let mut memory = Buffers::new();
        let data = memory.add(&[0; 1024]).to_le_bytes();
        let start = Instant::now();
        let done = module.launch("k", [1; 3], [256, 1, 1], 0, &data, &mut memory, &Options::default());
        report(body.split_once(' ').map_or(body, |b| b.0), done.expect("a loop"), start);
    }
    let Some(path) = std::env::args().nth(1) else { return };
    let text = std::fs::read_to_string(&path).expect("a file");
    let start = Instant::now();
    let module = Module::parse(&text).expect("a text that is known");
    println!("read in {:.3} s: {path}", start.elapsed().as_secs_f64());
    let (m, n, k) = (256u64, 256u64, 1024u64);
    let mut memory = Buffers::new();
    let mut add = |bytes: u64| memory.add(&vec![0; bytes as usize]);
    let (w, x, y) = (add(n * k * 2), add(m * k * 2), add(m * n * 4));
    let fields = [0, y, n, m | n << 32, 0, 0, 0, 1 | k << 32, w, x, k, k];
    let params: Vec<u8> = fields.iter().flat_map(|v| v.to_le_bytes()).collect();
    let start = Instant::now();
    let kernel = "gemm_f16_128x128";
    let done =
        module.launch(kernel, [4, 1, 1], [128, 1, 1], 49152, &params, &mut memory, &Options::default());
    report(kernel, done.unwrap_or_else(|e| panic!("{e}")), start);
}
