"""The baseline: the same shape of model by Accelerate's device_map, under the same cap of the device's memory.

  python3 device_map.py synth:llama-3.1-8b,layers=8 CAP_BYTES TOKENS out.json

Random weights in bf16, a prompt of 64 tokens, greedy decoding: times, not texts. Layers that the cap leaves no room for lie in
host memory and are fetched for every step, as Accelerate does it.
"""

import json
import re
import sys
import time

try:
    import torch
    from accelerate import dispatch_model, infer_auto_device_map
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError as e:
    sys.exit(f"device_map.py: {e}; the baseline stays empty")


def config(name):
    layers = re.search(r"layers=(\d+)", name)
    if "llama-3.1-8b" not in name:
        sys.exit(f"device_map.py: no shape of {name} here")
    return LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
                       num_hidden_layers=int(layers.group(1)) if layers else 32, max_position_embeddings=8192)


def main():
    name, cap, tokens, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if not torch.cuda.is_available():
        sys.exit("device_map.py: torch sees no GPU")
    torch.manual_seed(0)
    # Made on the device, where random numbers take no time.
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16).eval()
    places = infer_auto_device_map(model, max_memory={0: cap, "cpu": 1 << 40}, no_split_module_classes=["LlamaDecoderLayer"])
    model = dispatch_model(model, places)
    prompt = torch.randint(0, 1000, (1, 64), device="cuda")

    def generate(n):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    generate(2)
    one, all_of_them = generate(1), generate(1 + tokens)
    on_gpu = sum(1 for place in places.values() if place == 0)
    with open(out, "w") as f:
        json.dump({"model": name, "cap": cap, "prefill_s": one, "tok_s": tokens / (all_of_them - one), "modules_on_gpu": on_gpu,
                   "modules": len(places)}, f)


if __name__ == "__main__":
    main()
