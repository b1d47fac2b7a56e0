"""What the comparisons share: running tandem, telling differences, files of tiny models."""

import json
import os
import random
import subprocess

# Texts at which tokenizers differ: white space, line ends, digits, scripts, marks, emoji, contractions, control tokens.
TEXTS = [
    "Hello world",
    " leading and trailing ",
    "two  spaces, three   spaces\tand a tab",
    "line\nline\r\nline\r\rline\n\n\n  indented",
    "I'll we'VE don't it's O'Neil 'S",
    "0 12 345 6789 1234567 3.14159 1,000,000 ½ ² ١٢٣",
    "naïve café Ångström e\u0301 ﬁ ﬀ Ⅷ",
    "中文字符，日本語テキスト。한국어 문장",
    "Привет, мир! Ελληνικά שלום العربية हिन्दी ไทย",
    "👩\u200d🚀 🏳️\u200d🌈 👍🏽 \U0001f1e9\U0001f1ea",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero",
    "camelCase HTTPServer snake_case kebab-case CONST_VALUE x86_64",
    "def f(x):\n    return x**2  # comment\n\n\tif not x: pass",
    "https://example.com/a?b=c&d=%20#frag user@example.org",
    "!!!??? ... --- ___ === <<>> {}[]() \\ / | ~ ` ^",
    "<s>text</s> <|im_start|>user <unk> <pad> <bos>",
    "\u0000\u0001\u007f control \ufeff bom",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "a1 a12  123   1234 12345x 123456_ 1234567é 12½345 \u0661\u0662\u0663\u0664 1,234.5678  9\n  10",
    "to  be   or    not     to\n\n \n be" + 7 * " " + "that" + 700 * " " + "is" + 1030 * " " + "\n" + 13 * " ",
    "<sentinel:12> IMGIMGABCZ IMGIMGZ they're Ankara'nın 人々〇 ｶﾅ ไทย မြန်မာ ខ្មែរ ᄀᄁ ㄅㄆ «…» “q” ！：",
    "▁already▁escaped Ġbyte Ċlevel <0x41> <0xE2>",
    "",
    " ",
    "\n",
]

ALPHABET = [
    " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "a", "the", "Zé", "'s", "'LL", "12", "3", "4567", "!?", "...", "中", "文字", "の",
    "\u0301", "👩\u200d🚀", "Ж", "мир", "ß", "İ", "_", "-", "/", "(", "\"", "<s>", "x1", "HTTP", "\u0915\u094d\u0937", "한", "$", "€",
]


def texts(n):
    """The fixed texts and `n` random ones, the same in every run."""
    draw = random.Random(1)
    made = ["".join(draw.choice(ALPHABET) for _ in range(draw.randint(1, 24))) for _ in range(n)]
    return TEXTS + made


class Report:
    """Counts comparisons and prints the first difference of each."""

    def __init__(self):
        self.rows = []

    def compare(self, what, oracle, pairs):
        """`pairs` yields (case, ours, theirs)."""
        n = differing = 0
        first = None
        for case, ours, theirs in pairs:
            n += 1
            if ours != theirs:
                differing += 1
                first = first or (case, ours, theirs)
        self.rows.append((what, oracle, n, differing))
        print(f"{'differs' if differing else 'same   '}  {what} beside {oracle}: {n - differing} of {n}", flush=True)
        if first:
            case, ours, theirs = first
            print(f"    {case}\n    tandem: {clip(ours)}\n    {oracle.split()[0]}: {clip(theirs)}", flush=True)

    def skip(self, what, why):
        print(f"skipped: {what}: {why}", flush=True)

    def end(self):
        differing = [row for row in self.rows if row[3]]
        cases = sum(row[2] for row in self.rows)
        print(f"\n{len(self.rows)} comparisons of {cases} cases, {len(differing)} with a difference")
        return 1 if differing else 0


def clip(value):
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + "..."


def version(package):
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def missing(*packages):
    """The packages that are not there."""
    return [p for p in packages if version(p) is None]


class Tandem:
    def __init__(self, program):
        self.program = program

    def run(self, *args, stdin=None, env=()):
        env = {**os.environ, **dict(env)}
        done = subprocess.run([self.program, *args], input=stdin, capture_output=True, timeout=120, env=env)
        if done.returncode:
            return None, done.stderr.decode(errors="replace").strip()
        return done.stdout.decode(), None

    def ids(self, model, text, *flags):
        """Token ids of a text, or the error."""
        path = os.path.join("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp", f"tandem-text-{os.getpid()}")
        with open(path, "wb") as f:
            f.write(text.encode())
        out, error = self.run("tokenize", "-m", model, "--json", "-f", path, *flags)
        os.remove(path)
        return json.loads(out)["ids"] if error is None else error


# The smallest Llama whose folder or file Tandem and llama.cpp open.
def llama_config(vocab):
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64, "vocab_size": vocab,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }


def llama_tensors(vocab):
    """Tensors of `llama_config` by Hugging Face's names."""
    import numpy

    draw = numpy.random.default_rng(0)

    def of(*shape):
        return (draw.standard_normal(shape) * 0.05).astype(numpy.float32)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": of(vocab, 64), "model.norm.weight": of(64),
        layer + "input_layernorm.weight": of(64), layer + "post_attention_layernorm.weight": of(64),
        layer + "self_attn.q_proj.weight": of(64, 64), layer + "self_attn.k_proj.weight": of(32, 64),
        layer + "self_attn.v_proj.weight": of(32, 64), layer + "self_attn.o_proj.weight": of(64, 64),
        layer + "mlp.gate_proj.weight": of(64, 64), layer + "mlp.up_proj.weight": of(64, 64),
        layer + "mlp.down_proj.weight": of(64, 64),
    }


def folder_with(path, tokenizer_json, tokenizer_config=None, chat_template=None):
    """A model folder with this tokenizer."""
    from safetensors.numpy import save_file

    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "tokenizer.json"), "w") as f:
        f.write(tokenizer_json)
    tokens = json.loads(tokenizer_json)
    vocab = tokens["model"]["vocab"]
    n = max([len(vocab)] + [t["id"] + 1 for t in tokens.get("added_tokens", [])])
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(llama_config(n), f)
    if tokenizer_config is not None:
        with open(os.path.join(path, "tokenizer_config.json"), "w") as f:
            json.dump(tokenizer_config, f)
    if chat_template is not None:
        with open(os.path.join(path, "chat_template.jinja"), "w", newline="") as f:
            f.write(chat_template)
    save_file(llama_tensors(n), os.path.join(path, "model.safetensors"))
    return path
