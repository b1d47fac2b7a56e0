"""How large everything is: on a GPU, and in a rehearsal on the stand-in for the driver, where kernels run a thousand times slower.

A rehearsal has the same parts, commands and readers; nothing but these numbers and filters differs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    # The model whose tokens are compared, its blocks, its longest context, and bytes of keys and values for a token of it.
    small: str
    small_blocks: int
    small_context: int
    small_kv_bytes: int
    # Another one that has the proportions of a large model, whole and with few blocks.
    large: str
    few: str
    # A mixture of experts whose tokens are compared (few experts: the choice among many near equals is a matter of rounding), its
    # blocks, and one that has the proportions of a large one.
    mixture: str
    mixture_blocks: int
    large_mixture: str
    # How often the prompt is repeated, so that it is some hundred tokens; tokens to make of it.
    repeat: int
    tokens: int
    # Room for both: models of random weights have a token for each byte, a hundred for each repetition.
    context: int
    # The name of a machine in hardware/ by whose figures strategies decide before this one is measured.
    hardware: str
    # Caps of the device's memory in per cent of what the whole model takes.
    caps: tuple
    # Lengths of prompts and batches of the large model, tokens a measurement, repeats.
    prompts: str
    batches: str
    generated: int
    repeats: int
    # A trace of requests: synthetic:IN,OUT,N,RATE.
    trace: str
    # Flags of the kernels' bench, and words that its lines have to contain; shapes are tiny with `--tiny`.
    bench: tuple
    # Tests: of the runtime, of engines, then by module (None: all of a module).
    runtime: tuple
    tests: dict
    rounds: tuple
    # Seconds for a driver that compiles a file of kernels when its first kernel is launched (the largest take a minute).
    compile: int
    # Parts that the stand-in cannot run, and why.
    skip: dict = dataclasses.field(default_factory=dict)


GPU = Sizes(
    small="synth:smollm2-135m", small_blocks=30, small_context=8192, small_kv_bytes=30 * 2 * 3 * 64 * 2,
    large="synth:llama-3.1-8b", few="synth:llama-3.1-8b,layers=8",
    mixture="synth:tiny-mixtral,layers=2,dtype=q4_k,seed=2", mixture_blocks=2, large_mixture="synth:qwen3-30b-a3b,layers=16,dtype=q4_k", repeat=6, tokens=48, context=1024, hardware="h100-spr", caps=(100, 60, 30),
    prompts="512,2048", batches="1,16,64", generated=64, repeats=3, trace="synthetic:200..600,64..128,64,0",
    bench=(), runtime=(), tests={}, compile=120,
    rounds=(("gemm", "results_repeat_bit_for_bit"), ("linear", "results_repeat_bit_for_bit"),
            ("quant", "sums_of_splits_repeat_bit_for_bit"),
            ("exchange", "rounds::every_round_of_publish_and_collect_carries_its_own_rows")),
)

REHEARSAL = dataclasses.replace(
    GPU,
    small="synth:tiny-llama,layers=6", small_blocks=6, small_context=512, small_kv_bytes=6 * 2 * 2 * 64 * 2,
    large="synth:tiny-llama,layers=3,seed=2", few="synth:tiny-llama,layers=6,seed=2",
    large_mixture="synth:tiny-qwen3-moe,layers=2,dtype=q4_k", repeat=2, tokens=6, context=512, caps=(100, 80, 60),
    prompts="40", batches="1,3", generated=2, repeats=1, trace="synthetic:8..12,3..4,3,0",
    runtime=("events",), tests={
        "conformance": ("ldmatrix", "mma"), "engine": ("engine::the_likeliest",), "elementwise": ("activation",),
        "exchange": ("moves",), "logits": None, "pages": ("pages_that_left",),
    },
    rounds=(("exchange", "rounds::every_round_of_publish_and_collect_carries_its_own_rows"),),
    bench=("--tiny",),
    skip={"peak": "the stand-in keeps no time", "numbers torch": "it compares with the kernels' numbers"},
)
