//! What the build makes of PTX and of the assembler's log (`build/`), on texts of a few lines, and what it embedded.

use crate::isa;
use crate::promises::Promises;
use crate::usage::{self, Usage};
use tandem::device::built::{self, MODULES};

/// PTX of nvcc 13 with these lines in its body.
fn ptx(body: &str) -> String {
    format!(
        "//\n.version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(\n\t.param .align 8 .b8 k_param_0[8]\n)\n{{\n\
         \t.reg .b32 \t%r<3>;\n\t.loc\t1 5 0\n{body}\n\tret;\n}}\n\t.file\t1 \"k.cu\"\n\t.section\t.debug_str\n\t{{\n\
         $L__info:\n.b8 95\n\t}}\n"
    )
}

fn version(body: &str, sm: u32, exact: bool) -> String {
    let lowered = isa::lower(&ptx(body), sm, exact, false);
    assert!(lowered.unknown.is_empty(), "{:?}", lowered.unknown);
    let line = lowered.text.lines().find_map(|l| l.strip_prefix(".version "));
    line.expect("a version").to_owned()
}

#[test]
fn the_version_is_the_least_that_the_instructions_need() {
    let none = "\tadd.s32 \t%r1, %r2, %r2;";
    for (sm, exact, least) in [(75, false, "6.3"), (80, false, "7.0"), (90, false, "7.8"), (90, true, "8.0")]
    {
        assert_eq!(version(none, sm, exact), least, "sm_{sm}");
    }
    // Introduced by: <https://docs.nvidia.com/cuda/parallel-thread-execution/>, notes of each instruction.
    for (line, least) in [
        ("\tldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2}, [%r2];", "7.0"),
        ("\tld.global.L1::no_allocate.v4.u32 \t{%r1, %r2}, [%rd1];", "7.4"),
        ("\tcp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;", "7.4"),
        ("\tcvta.param.u64 \t%rd1, %rd2;", "7.7"),
        ("\t@%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;", "7.8"),
        ("\t{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2; }", "7.8"),
        ("\tmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;", "8.0"),
        ("\twgmma.fence.sync.aligned;", "8.0"),
        ("\tsetmaxnreg.dec.sync.aligned.u32 40;", "8.0"),
        ("\tmov.u32 \t%r1, %cluster_ctarank;", "7.8"),
    ] {
        assert_eq!(version(line, 80, false), least, "{line}");
    }
}

#[test]
fn an_unknown_instruction_keeps_the_compilers_version() {
    let lowered = isa::lower(&ptx("\ttcgen05.alloc.b32 [%r1], 5;"), 80, false, false);
    assert_eq!(lowered.unknown.into_iter().collect::<Vec<_>>(), ["tcgen05.alloc.b32"]);
    assert!(lowered.text.contains(".version 9.0\n"));
}

#[test]
fn advice_that_the_version_lacks_and_source_lines_are_left_out() {
    let body = "\t.pragma \"used_bytes_mask 15\";\n\t.pragma \"nounroll\";\n\tld.local.u32 %r1, [%rd1];";
    let text = isa::lower(&ptx(body), 80, false, false).text;
    assert!(
        text.contains("nounroll") && text.contains("ld.local") && text.trim_end().ends_with('}'),
        "{text}"
    );
    for gone in ["used_bytes_mask", ".loc\t", ".file", ".section", "info"] {
        assert!(!text.contains(gone), "{gone}: {text}");
    }
    let text = isa::lower(&ptx(body), 80, false, true).text;
    assert!(text.contains(".loc\t") && text.contains(".section"), "asked for lines: {text}");
}

const LOG: &str = "\
ptxas info    : Compiling entry function 'fine_a' for 'sm_80'
ptxas info    : Function properties for fine_a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'poor_b' for 'sm_80'
ptxas info    : Function properties for poor_b
    48 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, 384 bytes cmem[0]
ptxas info    : Compile time = 1731.718 ms
ptxas info    : Compiling entry function 'array_c' for 'sm_80'
ptxas info    : Function properties for array_c
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 384 bytes cmem[0]
";

#[test]
fn the_assemblers_log_is_read() {
    let usage = usage::parse(LOG);
    let expected = |kernel: &str, registers, stack, spilled, shared| Usage {
        kernel: kernel.to_owned(),
        registers,
        stack,
        spilled,
        shared,
        milliseconds: if kernel == "poor_b" { 1731 } else { 0 },
    };
    let all = [
        expected("fine_a", 168, 0, 0, 1024),
        expected("poor_b", 255, 48, 28, 0),
        expected("array_c", 40, 32, 0, 0),
    ];
    assert_eq!(usage, all);
    assert!(usage::advisories(LOG).is_empty());
    for line in [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements.",
    ] {
        assert_eq!(usage::advisories(&format!("{LOG}{line}\n")), [line]);
    }
}

#[test]
fn broken_promises_are_told() {
    let broken = |header: &str| -> Vec<String> {
        let promises = Promises::of(header).expect("a header");
        usage::parse(LOG).iter().flat_map(|u| promises.broken(u, "80")).collect()
    };
    assert_eq!(
        broken("// k.cu\n// no-spill all\n// no-stack all\n"),
        ["poor_b spills (28 bytes, 255 registers)", "array_c has 32 bytes of local memory"]
    );
    let excused = "// no-spill all\n// may-spill 80 poor_b: 255 registers are all\n// no-stack all\n// may-stack 80 array_c\n";
    assert_eq!(broken(excused), [""; 0]);
    assert_eq!(broken(&excused.replace("80", "75")).len(), 2, "another target's exception");
    let entry = broken(&format!("{excused}// entry-registers 168 fine_a poor_b\n"));
    assert_eq!(entry, ["poor_b has 255 registers at entry, its setmaxnreg needs 168"]);
    assert_eq!(broken("// k.cu\n\n// no-spill all\n"), [""; 0], "only the comment that opens a file");
    Promises::of("// entry-registers all\n").err().expect("no number");

    let promises = Promises::of("// no-spill fine_a fine_d\n// no-stack fine_a\n").expect("a header");
    assert_eq!(promises.unknown(&["fine_a", "poor_b"]), Some("fine_d"));
    assert_eq!(promises.silent(&["fine_a", "poor_b"]).as_deref(), Some("no-spill poor_b"));
}

/// Drivers from 525 on read PTX 8.0.
#[test]
fn what_is_embedded_is_for_old_drivers() {
    if let Err(why) = built::NVCC {
        println!("skipped: no kernels in this build: {why}");
        return;
    }
    for module in MODULES {
        let text = String::from_utf8(module.ptx()).expect("PTX is text");
        let name = format!("{} for {}", module.name, module.target());
        let line = format!("\n.version {}.{}\n", module.version.0, module.version.1);
        assert!(text.contains(&line), "{name}");
        assert!(module.version <= (8, 0), "{name}: PTX {:?}", module.version);
        let lowered = isa::lower(
            &text,
            module.sm.min(if text.contains(".target sm_80") { 80 } else { 90 }),
            module.exact,
            false,
        );
        assert!(lowered.text.contains(&line), "{name}: not the least version");
        let code: Vec<u32> = module.code.iter().map(|c| c.sm).collect();
        let wanted: &[u32] = match module.sm {
            75 => &[75],
            80 => &[80, 86, 89],
            _ => &[90],
        };
        assert_eq!(code, wanted, "{name}");
        for code in module.code {
            assert!(code.image().starts_with(b"\x7fELF"), "{name}");
        }
    }
}
