"""Tiny random models of every family and RoPE scaling: log-probabilities beside `transformers`."""

import json
import math
import os

from common import missing, version

VOCAB = 320
COMMON = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": VOCAB, "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 319,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 20 for i in range(8)], "long_factor": [1.5 + i / 4 for i in range(8)],
}

# model_type and what differs from COMMON; `rope` goes where the installed `transformers` wants it.
MODELS = {
    "Llama": ("llama", {}),
    "Llama, linear": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "Llama, llama3": ("llama", {"rope": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    "Llama, yarn": ("llama", {"rope": YARN}),
    "Llama, yarn with its own factors": ("llama", {"rope": dict(YARN, beta_fast=16, beta_slow=2, attention_factor=1.1)}),
    "Llama, yarn with mscale": ("llama", {"rope": dict(YARN, mscale=0.7, mscale_all_dim=1.2)}),
    "Llama, yarn, not truncated": ("llama", {"rope": dict(YARN, truncate=False)}),
    "Llama, dynamic": ("llama", {"rope": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}),
    "Llama, tied": ("llama", {"tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": 32}),
    "Qwen 2": ("qwen2", {}),
    "Qwen 2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "Qwen 3": ("qwen3", {"head_dim": 16}),
    "Qwen 3, yarn": ("qwen3", {"head_dim": 16, "rope": YARN}),
    "Gemma 2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "attn_logit_softcapping": 5.0}),
    "Gemma 3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32}),
    "Gemma 3, both scaled": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "rope": {
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}}}),
    "Phi-3": ("phi3", {}),
    "Phi-3, three quarters rotated": ("phi3", {"partial_rotary_factor": 0.75}),
    "Granite": ("granite", {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.5}),
    "OLMo 2": ("olmo2", {}),
    "Phi-3, longrope": ("phi3", {"rope": dict(LONG, partial_rotary_factor=1.0), "original_max_position_embeddings": 64}),
    "Mistral 3 text": ("ministral3", {"head_dim": 16, "rope": dict(YARN, llama_4_scaling_beta=0.1)}),
    "OPT": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    # Its experts are MXFP4 in the GGUF file, and what these are worth in the folder. A ramp of YaRN between whole pairs.
    "gpt-oss": ("gpt_oss", {
        "head_dim": 16, "sliding_window": 32, "num_local_experts": 8, "num_experts_per_tok": 3,
        "rope": dict(YARN, beta_fast=4.0, beta_slow=1.0, truncate=False)}),
}

# Shorter and longer than the first context of the scalings.
PROMPTS = ["The quick brown fox", "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"]
TOKENS = 6
# Keys and values have 16 bits here and 32 there.
CLOSE = 0.06


def run(tandem, report, folder, args):
    if lacking := missing("transformers", "torch", "tokenizers", "numpy", "safetensors"):
        report.skip("models", f"no {', '.join(lacking)}")
        return
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, (kind, own) in MODELS.items():
        try:
            path, model, tokenizer = make(os.path.join(folder, name.replace(", ", "-").replace(" ", "-")), kind, own)
        except (KeyError, ValueError) as e:
            report.skip(name, f"{version('transformers')} does not make it: {e}")
            continue
        report.compare(name, version("transformers"), pairs(tandem, path, model, tokenizer))
        if kind in GGUF and name not in NO_GGUF:
            if missing("gguf"):
                report.skip(f"{name}, GGUF", "no gguf")
                continue
            to_gguf(path + ".gguf", path, model, kind)
            report.compare(f"{name}, GGUF", version("transformers"), pairs(tandem, path + ".gguf", model, tokenizer, kind == "gpt_oss"))


def make(path, kind, own):
    import numpy
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, **own}
    rope = settings.pop("rope", None)
    if rope is not None:
        settings["rope_parameters"] = rope if "full_attention" in rope else {"rope_theta": 10000.0, **rope}
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    draw = numpy.random.default_rng(2)
    with torch.no_grad():
        # Norms and biases begin as ones and zeros, which hides mistakes.
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.tensor(draw.standard_normal(p.shape) * 0.1, dtype=p.dtype))
            if ".experts." in name and name.endswith("_bias"):
                p.add_(torch.tensor(draw.standard_normal(p.shape) * 0.1, dtype=p.dtype))
            elif kind == "gpt_oss" and ".experts." in name:
                p.copy_(torch.tensor(mxfp4(p)[1]).transpose(1, 2))
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.save(os.path.join(path, "tokenizer.json"))
    return path, model, t


def mxfp4(stack):
    """A stack of experts as transformers has it, [E, columns, rows]: the blocks of its rows, and what they are worth."""
    import gguf

    kind = gguf.GGMLQuantizationType.MXFP4
    blocks = gguf.quants.quantize(stack.detach().numpy().transpose(0, 2, 1).copy(), kind)
    return blocks, gguf.quants.dequantize(blocks, kind)


def pairs(tandem, path, model, tokenizer, quantised=False):
    import torch

    # Other tiers round the inputs of quantised matrices to int8, which may choose another expert.
    tier = {"TANDEM_ISA": "reference"} if quantised else {}

    for prompt in PROMPTS:
        out, error = tandem.run(
            "generate", "-m", path, "--raw", "--json", "--temp", "0", "--logprobs", "1000", "-n", str(TOKENS), prompt,
            env=tier)
        if error:
            yield prompt, error, "an answer"
            continue
        got = json.loads(out)
        ids = tokenizer.encode(prompt).ids
        # What Tandem chose is given to both, so that one near tie does not end the comparison.
        with torch.no_grad():
            logits = model(torch.tensor([ids + got["tokens"]])).logits[0].log_softmax(-1)
        worst, at = 0.0, None
        for i, step in enumerate(got["logprobs"]):
            want = logits[len(ids) - 1 + i]
            for token, p in step["top"]:
                q = float(want[token])
                # Unlikely tokens carry no weight in a choice.
                d = abs(p - q) if max(p, q) > math.log(1e-4) else 0.0
                if d > worst:
                    worst, at = d, (i, token, p, q)
        ok = worst <= CLOSE and got["prompt_tokens"] == len(ids)
        yield f"{len(ids)} tokens and {TOKENS}", "close" if ok else f"{worst:.3f} apart (step, token, ours, theirs: {at})", "close"


# --- the same weights as a GGUF file ------------------------------------------------------------

# Families with a GGUF form: gguf's name of the architecture, whether rows of Q and K are permuted, whether norms are 1 + w.
GGUF = {
    "llama": ("LLAMA", True, False), "mistral": ("LLAMA", True, False), "qwen2": ("QWEN2", False, False), "qwen3": ("QWEN3", False, False),
    "gemma2": ("GEMMA2", False, True), "gemma3_text": ("GEMMA3", False, True), "phi3": ("PHI3", False, False),
    "granite": ("GRANITE", True, False), "olmo2": ("OLMO2", False, False), "ministral3": ("MISTRAL3", True, False),
    "gpt_oss": ("GPT_OSS", False, False),
}
# A GGUF file of these cannot say what they need, or llama.cpp's converter has no key for it.
NO_GGUF = {"Mistral", "Qwen 2, windows", "Llama, dynamic", "Gemma 3, both scaled", "Llama, yarn, not truncated", "Llama, yarn with mscale"}


def to_gguf(path, folder, model, kind):
    """Writes `model` as llama.cpp's converter does."""
    import gguf
    import numpy

    arch, permuted, offsets = GGUF[kind]
    arch = gguf.MODEL_ARCH[arch]
    c = model.config
    w = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    heads, kv, layers = c.num_attention_heads, c.num_key_value_heads, c.num_hidden_layers
    head = getattr(c, "head_dim", None) or c.hidden_size // heads
    rope = c.rope_parameters or {}
    partial = rope.get("partial_rotary_factor") or getattr(c, "partial_rotary_factor", None) or 1.0
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_dimension_count(int(head * partial))
    full = rope.get("full_attention", rope)
    w.add_rope_freq_base(full["rope_theta"])
    if kind in ("gemma2", "gemma3_text", "gpt_oss"):
        w.add_sliding_window(c.sliding_window)
    if kind == "gpt_oss":
        w.add_expert_feed_forward_length(c.intermediate_size)
        w.add_expert_count(c.num_local_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
    if kind == "gemma2":
        w.add_attn_logit_softcapping(c.attn_logit_softcapping)
        w.add_final_logit_softcapping(c.final_logit_softcapping)
    if kind == "granite":
        w.add_attention_scale(c.attention_multiplier)
        w.add_embedding_scale(c.embedding_multiplier)
        w.add_residual_scale(c.residual_multiplier)
        w.add_logit_scale(c.logits_scaling)
    how = full.get("rope_type", "default")
    if how in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(how))
        w.add_rope_scaling_factor(full["factor"])
    if how == "yarn":
        w.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if "beta_fast" in full:
            w.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
            w.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
        if "attention_factor" in full:
            # llama.cpp multiplies this by YaRN's own factor.
            w.add_rope_scaling_attn_factors(full["attention_factor"] / (0.1 * math.log(full["factor"]) + 1.0))
    if full.get("llama_4_scaling_beta"):
        w.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if how == "longrope":
        w.add_rope_scaling_orig_ctx_len(c.original_max_position_embeddings)
        factor = c.max_position_embeddings / c.original_max_position_embeddings
        w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(c.original_max_position_embeddings)))
        w.add_tensor("rope_factors_long.weight", numpy.array(full["long_factor"], dtype=numpy.float32))
        w.add_tensor("rope_factors_short.weight", numpy.array(full["short_factor"], dtype=numpy.float32))
    if how == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(full, head))
    with open(os.path.join(folder, "tokenizer.json")) as f:
        tokens = json.load(f)["model"]["vocab"]
    tokens = sorted(tokens, key=tokens.get) + ["qz"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens + [f"[unused{i}]" for i in range(len(tokens), VOCAB)])
    w.add_token_types([1] * len(tokens) + [5] * (VOCAB - len(tokens)))
    w.add_token_merges(["q z"])
    w.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(arch, layers)
    for hf, tensor in model.state_dict().items():
        data = tensor.detach().numpy()
        if hf == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if kind == "gpt_oss" and (hf.endswith(".sinks") or ".experts." in hf):
            for own, data, dtype in of_gpt_oss(hf, tensor):
                w.add_tensor(names.get_name(own, try_suffixes=(".weight", ".bias")), data, raw_dtype=dtype)
            continue
        to = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        if permuted and (".q_proj." in hf or ".k_proj." in hf):
            n = heads if ".q_proj." in hf else kv
            data = data.reshape(n, 2, data.shape[0] // n // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if offsets and hf.endswith("norm.weight"):
            data = data + 1
        w.add_tensor(to, numpy.ascontiguousarray(data))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def of_gpt_oss(hf, tensor):
    """The tensors of a sink, or of a stack in which gates and first matrices alternate: a name, values, and their type."""
    import gguf
    import numpy

    if hf.endswith(".sinks"):
        yield hf + ".weight", tensor.detach().numpy(), None
        return
    stem, bias = hf.removesuffix("_bias"), hf.endswith("_bias")
    data, dtype = (tensor.detach().numpy(), None) if bias else (mxfp4(tensor)[0], gguf.GGMLQuantizationType.MXFP4)
    for part, rows in ((("gate", slice(0, None, 2)), ("up", slice(1, None, 2))) if "gate_up" in stem else (("down", slice(None)),)):
        name = stem.replace("gate_up_proj", f"{part}_proj")
        yield name + (".bias" if bias else ".weight"), numpy.ascontiguousarray(data[:, rows]), dtype


def llama3_factors(rope, head):
    import numpy

    factors = []
    for i in range(head // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / head)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / (keep + (1 - keep) / rope["factor"]))
    return numpy.array(factors, dtype=numpy.float32)
