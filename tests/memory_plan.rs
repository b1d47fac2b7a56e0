//! What the CPU's dry run says against what is allocated: activations of the widest steps, to the byte nearly.
//!
//! A binary of its own: it counts what the whole process allocates.

#[path = "support/models.rs"]
mod models;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tandem::engine::{NewTokens, Options};
use tandem::model::load;
use tandem::program::{RequestId, Wants};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;

/// The system's allocator, and how much of it is in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of a step, whatever its size: the lists of inputs, tables and the like, and what a test keeps.
const FIXED: usize = 64 << 10;

/// Numbers of rows of other steps, whose programs are remembered, and bytes of such a program of these models.
const OTHERS: [usize; 3] = [15, 31, 64];
const PROGRAM: usize = 8 << 10;

#[test]
fn activations_take_what_the_dry_run_says() {
    // Many equal ones, which choose the same experts: so a step has experts of many rows, and others of few, whose inputs have other forms.
    let tokens: Vec<u32> = (0..256).map(|i| if i < 126 { 7 } else { (i * 7 + 3) % 500 }).collect();
    for name in [
        "tiny-llama,dtype=q4_k",
        "tiny-gemma3,dtype=bf16",
        "tiny-opt,dtype=f32",
        "tiny-qwen3,dtype=q8_0",
        "tiny-qwen3-moe,dtype=q8_0",
        // Of two layers the first is dense, and the last computes no more rows than want logits.
        "tiny-qwen2-moe,dtype=bf16,layers=3",
        "tiny-gpt-oss,dtype=bf16,experts=mxfp4",
    ] {
        let m = load(&format!("synth:{name},seed=3")).unwrap();
        for isa in models::tiers().into_iter().filter(|&i| i > Isa::Reference) {
            for (mode, chunk, logits, sequences) in
                [(Mode::Fast, 128, 1, 1), (Mode::Deterministic, 128, 128, 1), (Mode::Fast, 16, 1, 20)]
            {
                let mut o = Options::new(isa, 256);
                (o.mode, o.threads, o.sequences) = (mode, Some(2), sequences);
                (o.chunk, o.logits) = (chunk, logits);
                let mut e = models::engine(&m, &o);
                let before = IN_USE.load(Relaxed);
                MOST.store(before, Relaxed);
                let wants = if logits > 1 { Wants::All } else { Wants::Last };
                let seqs: Vec<RequestId> = (0..sequences).map(|_| e.add()).collect();
                for &seq in &seqs {
                    for tokens in tokens[..255].chunks(chunk) {
                        e.forward(&[NewTokens { id: seq, tokens, wants }]).unwrap();
                    }
                }
                let input =
                    |&seq: &RequestId| NewTokens { id: seq, tokens: &tokens[..1], wants: Wants::Last };
                e.forward(&seqs.iter().map(input).collect::<Vec<_>>()).unwrap();
                let (took, said) = (MOST.load(Relaxed) - before, e.memory().activations as usize);
                assert!(took <= said + FIXED, "{name} {isa} {mode:?}: {took} bytes, {said} planned");
                // Kernels differ by the number of rows, and a plan has room for what each of them reads.
                seqs.into_iter().for_each(|seq| e.remove(seq));
                for n in OTHERS.into_iter().filter(|&n| n < chunk) {
                    let seq = e.add();
                    e.forward(&[NewTokens { id: seq, tokens: &tokens[..n], wants }]).unwrap();
                    e.remove(seq);
                }
                let took = MOST.load(Relaxed) - before;
                println!("{name} {isa} {mode:?}, chunk {chunk}: {took} bytes, {said} planned");
                assert!(
                    took <= said + FIXED + OTHERS.len() * PROGRAM,
                    "{name} {isa} {mode:?}: {took} bytes, {said} planned"
                );
                assert!(
                    said <= took + took / 8 + FIXED,
                    "{name} {isa} {mode:?}: {took} bytes, {said} planned"
                );
            }
        }
    }
}
