//! Tile instructions one by one against a plain model: every shape, random strides and bits, and errors
//! planted in configurations and operands. On AMX hardware the same tests run on the hardware.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use proptest::prelude::*;
use tandem::amx::{self, emulate, session::Session, session::Shapes};

/// Opens a session on hardware, or emulated.
fn session() -> Session {
    if amx::available().is_err() {
        emulate::install().expect("emulation installs");
    }
    Session::open().expect("tiles work now")
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Dot {
    Bf16,
    Ssd,
    Sud,
    Usd,
    Uud,
}

#[allow(clippy::too_many_arguments)]
/// c += a * b by instructions; `ld*` are byte strides.
fn by_instruction(dot: Dot, m: usize, k: usize, n: usize, a: &[u8], b: &[u8], c: &mut [u8], ld: [usize; 3]) {
    let mut s = session();
    let full = (16, 64);
    s.load(&Shapes::new([
        (m as u8, 4 * n as u8),
        (m as u8, 4 * k as u8),
        (k as u8, 4 * n as u8),
        full,
        full,
        full,
        full,
        full,
    ]));
    assert!(a.len() >= (m - 1) * ld[0] + 4 * k && b.len() >= (k - 1) * ld[1] + 4 * n);
    assert!(c.len() >= (m - 1) * ld[2] + 4 * n);
    macro_rules! block {
        ($op:literal) => {
            // SAFETY: tiles work (session), the shapes above are loaded, the slices hold them (asserted).
            unsafe {
                std::arch::asm!(
                    "tileloadd tmm0, [{c} + {lc}*1]",
                    "tileloadd tmm1, [{a} + {la}*1]",
                    "tileloaddt1 tmm2, [{b} + {lb}*1]",
                    $op,
                    "tilestored [{c} + {lc}*1], tmm0",
                    a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(),
                    la = in(reg) ld[0], lb = in(reg) ld[1], lc = in(reg) ld[2],
                    out("tmm0") _, out("tmm1") _, out("tmm2") _,
                    options(nostack),
                )
            }
        };
    }
    match dot {
        Dot::Bf16 => block!("tdpbf16ps tmm0, tmm1, tmm2"),
        Dot::Ssd => block!("tdpbssd tmm0, tmm1, tmm2"),
        Dot::Sud => block!("tdpbsud tmm0, tmm1, tmm2"),
        Dot::Usd => block!("tdpbusd tmm0, tmm1, tmm2"),
        Dot::Uud => block!("tdpbuud tmm0, tmm1, tmm2"),
    }
}

fn daz(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[allow(clippy::too_many_arguments)]
/// The SDM's definition, an element at a time.
fn by_model(dot: Dot, m: usize, k: usize, n: usize, a: &[u8], b: &[u8], c: &mut [u8], ld: [usize; 3]) {
    let bf16 =
        |x: &[u8], at: usize| daz(f32::from_bits(u32::from(u16::from_le_bytes([x[at], x[at + 1]])) << 16));
    for row in 0..m {
        for col in 0..n {
            let at = row * ld[2] + 4 * col;
            let old: [u8; 4] = c[at..at + 4].try_into().unwrap();
            let new = if dot == Dot::Bf16 {
                let mut sum = [0f32; 2];
                for step in 0..k {
                    for (odd, sum) in sum.iter_mut().enumerate() {
                        let x = bf16(a, row * ld[0] + 4 * step + 2 * odd);
                        let y = bf16(b, step * ld[1] + 4 * col + 2 * odd);
                        *sum = daz(x.mul_add(y, *sum));
                    }
                }
                daz(daz(f32::from_le_bytes(old)) + daz(sum[0] + sum[1])).to_le_bytes()
            } else {
                let signed = |x: u8, yes: bool| if yes { i64::from(x as i8) } else { i64::from(x) };
                let mut sum = i64::from(i32::from_le_bytes(old));
                for i in 0..4 * k {
                    let x = signed(a[row * ld[0] + i], matches!(dot, Dot::Ssd | Dot::Sud));
                    let y = signed(b[i / 4 * ld[1] + 4 * col + i % 4], matches!(dot, Dot::Ssd | Dot::Usd));
                    sum += x * y;
                }
                (sum as i32).to_le_bytes()
            };
            c[at..at + 4].copy_from_slice(&new);
        }
    }
}

/// All NaNs are one: their payload depends on operand order, which the SDM leaves open.
fn canonical(dot: Dot, c: &[u8]) -> Vec<u32> {
    c.chunks_exact(4)
        .map(|d| u32::from_le_bytes(d.try_into().unwrap()))
        .map(|d| if dot == Dot::Bf16 && f32::from_bits(d).is_nan() { 0x7fc0_0000 } else { d })
        .collect()
}

fn check(
    dot: Dot,
    m: usize,
    k: usize,
    n: usize,
    pad: [usize; 3],
    bytes: &mut dyn FnMut() -> u8,
) -> Result<(), String> {
    let ld = [4 * k + pad[0], 4 * n + pad[1], 4 * n + pad[2]];
    let mut fill = |len: usize| -> Vec<u8> { (0..len).map(|_| bytes()).collect() };
    let (a, b) = (fill((m - 1) * ld[0] + 4 * k), fill((k - 1) * ld[1] + 4 * n));
    // Whole rows of C with padding, so that bytes beside the tile are seen to survive.
    let mut got = fill(m * ld[2] / 4 * 4 + 4);
    let mut want = got.clone();
    by_instruction(dot, m, k, n, &a, &b, &mut got, ld);
    by_model(dot, m, k, n, &a, &b, &mut want, ld);
    if canonical(dot, &got) == canonical(dot, &want) {
        Ok(())
    } else {
        Err(format!("{dot:?} {m}x{k}x{n}, padding {pad:?}: got {got:02x?}, want {want:02x?}"))
    }
}

fn noise(seed: u64) -> impl FnMut() -> u8 {
    let mut x = seed | 1;
    move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    }
}

const DOTS: [Dot; 5] = [Dot::Bf16, Dot::Ssd, Dot::Sud, Dot::Usd, Dot::Uud];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Bits of any kind: denormals, infinities and NaNs among them.
    #[test]
    fn products_match_the_model(
        dot in prop::sample::select(&DOTS[..]), m in 1usize..=16, k in 1usize..=16, n in 1usize..=16,
        pad in prop::array::uniform3(0usize..3), seed: u64,
    ) {
        // C's stride stays a multiple of 4, so that the comparison by dwords lines up.
        check(dot, m, k, n, [pad[0], pad[1] * 7, pad[2] * 4], &mut noise(seed)).map_err(TestCaseError::fail)?;
    }

    /// bf16 values near one (no special values), so that rounding in the right order decides the bits.
    #[test]
    fn bf16_rounding_matches_the_model(m in 1usize..=16, k in 1usize..=16, n in 1usize..=16, seed: u64) {
        let mut next = noise(seed);
        let mut high = false;
        let mut bytes = || {
            high = !high;
            // Low byte: any; high byte: sign and an exponent near 127.
            if high { next() } else { 0x3c | next() & 0x83 }
        };
        check(Dot::Bf16, m, k, n, [0; 3], &mut bytes).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn every_shape_of_every_product() {
    let mut failures = Vec::new();
    for dot in DOTS {
        for m in [1, 2, 7, 15, 16] {
            for k in [1, 8, 15, 16] {
                for n in [1, 4, 15, 16] {
                    failures
                        .extend(check(dot, m, k, n, [0; 3], &mut noise((m * 289 + k * 17 + n) as u64)).err());
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// One element each, where a wrong order, a missing flush or a double rounding shows.
#[test]
fn hand_picked_bf16_sums() {
    let b = |x: f32| ((x.to_bits() >> 16) as u16).to_le_bytes();
    let product = |a: &[f32], y: &[f32], c: f32| {
        let k = a.len() / 2;
        let (x, y): (Vec<u8>, Vec<u8>) =
            (a.iter().flat_map(|&v| b(v)).collect(), y.iter().flat_map(|&v| b(v)).collect());
        let mut out = c.to_le_bytes().to_vec();
        by_instruction(Dot::Bf16, 1, k, 1, &x, &y, &mut out, [4 * k, 4, 4]);
        f32::from_le_bytes(out.try_into().unwrap())
    };
    let big = 2f32.powi(24);
    // Even and odd sums are separate: 2^24 + 1 - 2^24 keeps the 1, which one chain would lose.
    assert_eq!(product(&[big, 1.0, -big, 0.0], &[1.0; 4], 0.0), 1.0);
    // C is added last, not first: (2^24 - 2^24) + 1, with C = 1.
    assert_eq!(product(&[big, 0.0, -big, 0.0], &[1.0; 4], 1.0), 1.0);
    // Fused: 1.0078125^2 - 1.015625 = 2^-14, exactly what a rounded product would still hold...
    assert_eq!(product(&[1.015625, 0.0, 1.0078125, 0.0], &[-1.0, 1.0, 1.0078125, 1.0], 0.0), 2f32.powi(-14));
    // ...and where the product needs more than 24 bits beside its addend, only one rounding happens:
    // 2^24 + (1 + 2^-7)^2 = 16777217.0156, nearest f32 is 16777218, though 2^24 + 1 would tie to 2^24.
    assert_eq!(product(&[big, 0.0, 1.0078125, 0.0], &[1.0, 0.0, 1.0078125, 0.0], 0.0), big + 2.0);
    // Denormal inputs and outputs are zeros of their sign.
    let tiny = f32::from_bits(0x0040_0000);
    assert_eq!(product(&[tiny, 0.0], &[big, 0.0], 0.0), 0.0);
    assert_eq!(product(&[0.0, 0.0], &[0.0, 0.0], f32::from_bits(1)), 0.0);
    let small = f32::MIN_POSITIVE;
    assert_eq!(
        product(&[small, 0.0], &[1.0, 0.0], f32::from_bits(0x007f_ffff)),
        small,
        "C is flushed on the way in"
    );
    assert_eq!(product(&[small, 0.0], &[0.5, 0.0], 0.0), 0.0);
    assert_eq!(product(&[small, -small], &[1.5, 1.0], 0.0), 0.0, "the joined sum is flushed");
    assert_eq!(product(&[f32::INFINITY, 0.0], &[1.0, 0.0], 1.0), f32::INFINITY);
    assert!(product(&[f32::INFINITY, 0.0], &[0.0, 0.0], 1.0).is_nan());
}

/// What a tile does not use is zero: rows beyond its last, bytes beyond a row.
#[test]
fn loads_and_products_zero_the_rest_of_a_tile() {
    let mut s = session();
    let shapes = |rows, colsb| Shapes::new([(rows, colsb); 8]);
    s.load(&shapes(16, 64));
    let ones = [1u8; 1024];
    let mut out = [9u8; 1024];
    // SAFETY: tiles work and are 16 x 64; both arrays have 1024 bytes. A stride of zero (no index) repeats
    // the first row.
    unsafe {
        std::arch::asm!(
            "tileloadd tmm3, [{p}]",
            "tilestored [{o} + {s}*1], tmm3",
            p = in(reg) ones.as_ptr(), o = in(reg) out.as_mut_ptr(), s = in(reg) 64usize,
            out("tmm3") _, options(nostack),
        );
    }
    assert_eq!(out, ones);
    // SAFETY: as above; scaled index and displacement address the same bytes.
    unsafe {
        std::arch::asm!(
            "tilezero tmm3",
            "tilestored [{o} + {s}*8 + 64], tmm3",
            o = in(reg) out.as_mut_ptr().wrapping_sub(64), s = in(reg) 8usize,
            out("tmm3") _, options(nostack),
        );
    }
    assert_eq!(out, [0; 1024]);
}

/// Tiles belong to threads.
#[test]
fn threads_do_not_share_tiles() {
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            scope.spawn(move || {
                for i in 0..50 {
                    check(DOTS[(t % 5) as usize], 16, 16, 16, [0; 3], &mut noise(t * 1000 + i)).unwrap();
                }
            });
        }
    });
}

/// A test of this module as the binary's arguments name it.
fn path(test: &str) -> String {
    let (_room, module) = module_path!().split_once("::").expect("a module of a room");
    format!("{module}::{test}")
}

/// Runs this very test again in a process of its own, with a case planted, and says how that ended.
fn planted(test: &str, case: &str) -> (Option<i32>, Option<i32>, String) {
    let out = Command::new(std::env::current_exe().unwrap())
        .args([&path(test), "--exact", "--nocapture", "--test-threads=1"])
        .env("TANDEM_TEST_PLANTED", case)
        .output()
        .expect("the test binary runs again");
    (out.status.code(), out.status.signal(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
fn planted_errors_end_the_process_and_are_named() {
    if let Ok(case) = std::env::var("TANDEM_TEST_PLANTED") {
        let mut s = session();
        let full = (16, 64);
        match &case[..] {
            "unconfigured" => {
                // A thread may inherit a configuration; it is empty only after the last session.
                drop(s);
                // SAFETY: meant to fault, as in all cases: the process ends there.
                unsafe { std::arch::asm!("tilezero tmm2", out("tmm2") _) }
            }
            "palette" | "reserved" => {
                let mut config = Shapes::FULL.encode();
                config.0[if case == "palette" { 0 } else { 40 }] = 3;
                // SAFETY: as above.
                unsafe { std::arch::asm!("ldtilecfg [{c}]", c = in(reg) &config) };
            }
            "rows" => {
                s.load(&Shapes::new([full, (8, 64), full, full, full, full, full, full]));
                // SAFETY: as above.
                unsafe { std::arch::asm!("tdpbf16ps tmm0, tmm1, tmm2", out("tmm0") _) }
            }
            "absent" => {
                s.load(&Shapes::new([full, (0, 0), full, full, full, full, full, full]));
                // SAFETY: as above.
                unsafe { std::arch::asm!("tdpbusd tmm0, tmm1, tmm2", out("tmm0") _) }
            }
            other => panic!("no case {other}"),
        }
        return; // reached only if nothing faulted: the parent sees exit code 0
    }
    drop(session());
    for (case, message) in [
        ("unconfigured", "tilezero tmm2"),
        ("palette", "unknown palette"),
        ("reserved", "reserved bytes"),
        ("rows", "tdpbf16ps tmm0, tmm1, tmm2"),
        ("absent", "tdpbusd tmm0, tmm1, tmm2"),
    ] {
        let (_, signal, stderr) = planted("planted_errors_end_the_process_and_are_named", case);
        if emulate::installed() {
            assert_eq!(signal, Some(libc::SIGABRT), "{case}: {stderr}");
            assert!(stderr.contains("AMX emulation: ") && stderr.contains(message), "{case}: {stderr}");
        } else {
            assert!(matches!(signal, Some(libc::SIGILL | libc::SIGSEGV)), "{case}: {signal:?} {stderr}");
        }
    }
}

/// Emulation is a decision of the user (`TANDEM_AMX=emulate`) or the program (`install`), never a fallback.
#[test]
fn emulation_is_opt_in() {
    if std::env::var("TANDEM_TEST_PLANTED").is_ok() {
        println!("{:?}; installed: {}", amx::available(), emulate::installed());
        return;
    }
    let run = |emulate: Option<&str>| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([&path("emulation_is_opt_in"), "--exact", "--nocapture"]).env("TANDEM_TEST_PLANTED", "1");
        match emulate {
            Some(value) => child.env("TANDEM_AMX", value),
            None => child.env_remove("TANDEM_AMX"),
        };
        String::from_utf8(child.output().expect("the test binary runs again").stdout).unwrap()
    };
    if amx::hardware().is_ok() {
        assert!(run(Some("emulate")).contains("Ok(()); installed: false"), "hardware comes first");
        return;
    }
    assert!(run(Some("emulate")).contains("Ok(()); installed: true"));
    for other in [None, Some(""), Some("1")] {
        let said = run(other);
        assert!(said.contains("Err(") && said.contains("installed: false"), "{other:?}: {said}");
    }
}

extern "C" fn exit_42(_: libc::c_int) {
    // SAFETY: _exit is async-signal-safe and ends the process.
    unsafe { libc::_exit(42) }
}

/// An illegal instruction that is no tile instruction stays what it was before emulation.
#[test]
fn other_illegal_instructions_reach_their_old_handler() {
    if let Ok(case) = std::env::var("TANDEM_TEST_PLANTED") {
        if case == "handled" {
            // SAFETY: a zeroed action with a handler that only exits.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = exit_42 as *const () as usize;
                libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut());
            }
        }
        drop(session());
        // SAFETY: meant to fault.
        unsafe { std::arch::asm!("ud2") };
    }
    let test = "other_illegal_instructions_reach_their_old_handler";
    let (_, signal, stderr) = planted(test, "default");
    assert_eq!(signal, Some(libc::SIGILL), "{stderr}");
    let (code, _, stderr) = planted(test, "handled");
    assert_eq!(code, Some(42), "{stderr}");
}
