"""Vocabularies of every kind: `tandem tokenize` beside the programs that made them."""

import glob
import json
import os

from common import folder_with, llama_config, llama_tensors, missing, texts, version

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def run(tandem, report, folder, args):
    cases = texts(args.texts)
    if lacking := missing("tokenizers", "safetensors", "numpy"):
        report.skip("tokenizer.json", f"no {', '.join(lacking)}")
    else:
        json_files(tandem, report, os.path.join(folder, "json"), cases)
    if lacking := missing("sentencepiece", "gguf", "numpy"):
        report.skip("SentencePiece in GGUF", f"no {', '.join(lacking)}")
    else:
        sentencepieces(tandem, report, os.path.join(folder, "spm"), cases)
    if lacking := missing("xllamacpp", "gguf", "tokenizers", "numpy"):
        report.skip("llama.cpp", f"no {', '.join(lacking)}")
    else:
        pre_tokenizers(tandem, report, os.path.join(folder, "pre"), cases)


def corpus():
    """The repository's own text, and what it lacks."""
    lines = []
    for path in sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")) + glob.glob(os.path.join(ROOT, "src", "*.rs"))):
        with open(path) as f:
            lines += f.read().splitlines()
    return lines + ["Привет, мир", "中文字符 日本語テキスト 한국어", "naïve café 123 4567 don't I'll"] * 30


# --- tokenizer.json -----------------------------------------------------------------------------

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def kinds():
    """A tokenizer of each structure that released models have, and whether decoding is compared."""
    from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                            trainers)

    lines = corpus()
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

    def trained(tokenizer, trainer):
        tokenizer.train_from_iterator(lines, trainer)
        return tokenizer

    def byte_level(pre, ignore_merges=False):
        t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        t.pre_tokenizer = pre
        t.decoder = decoders.ByteLevel()
        return trained(t, trainers.BpeTrainer(
            vocab_size=3000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))

    def split(pattern):
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    yield "GPT-2", byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    yield "SmolLM", byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    llama3 = byte_level(split(LLAMA3), ignore_merges=True)
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])])
    yield "Llama 3", llama3
    qwen = byte_level(split(QWEN2))
    qwen.normalizer = normalizers.NFC()
    yield "Qwen 2", qwen

    def fallback(normalizer, pre=None):
        t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        t.normalizer = normalizer
        if pre:
            t.pre_tokenizer = pre
        bytes_ = [f"<0x{b:02X}>" for b in range(256)]
        t = trained(t, trainers.BpeTrainer(vocab_size=3000, special_tokens=special + bytes_, show_progress=False))
        # The trainer makes bytes special tokens, which models do not.
        made = json.loads(t.to_str())
        made["added_tokens"] = [a for a in made["added_tokens"] if not a["content"].startswith("<0x")]
        t = Tokenizer.from_str(json.dumps(made))
        t.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        return t

    def around(t):
        t.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
        return t

    yield "Llama 2", around(fallback(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])))
    gemma = around(fallback(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")))
    gemma.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("  ", normalized=False)])
    yield "Gemma", gemma
    yield "Mistral, Metaspace", around(fallback(normalizers.Sequence([]), pre_tokenizers.Metaspace(prepend_scheme="first", split=False)))

    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram = trained(unigram, trainers.UnigramTrainer(
        vocab_size=2000, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False))
    unigram.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)])
    yield "T5, Unigram", unigram

    word = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    word.normalizer = normalizers.BertNormalizer(lowercase=True)
    word.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    word.decoder = decoders.WordPiece()
    word = trained(word, trainers.WordPieceTrainer(
        vocab_size=2000, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False))
    word.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    yield "BERT, WordPiece", word


def json_files(tandem, report, folder, cases):
    for name, tokenizer in kinds():
        path = folder_with(os.path.join(folder, name.replace(", ", "-").replace(" ", "-")), tokenizer.to_str())

        def pairs():
            for text in cases:
                yield repr(text), tandem.ids(path, text), tokenizer.encode(text).ids

        report.compare(f"tokenizer.json, {name}", version("tokenizers"), pairs())


# --- SentencePiece ------------------------------------------------------------------------------


def sentencepieces(tandem, report, folder, cases):
    import sentencepiece

    os.makedirs(folder, exist_ok=True)
    text = os.path.join(folder, "corpus.txt")
    with open(text, "w") as f:
        f.write("\n".join(corpus()))
    # A NUL ends what `sentencepiece` reads of a text.
    cases = [t for t in cases if "\0" not in t]
    for kind in ("bpe", "unigram"):
        for fallback in (True, False):
            prefix = os.path.join(folder, f"{kind}-{'bytes' if fallback else 'unknown'}")
            sentencepiece.SentencePieceTrainer.train(
                input=text, model_prefix=prefix, model_type=kind, vocab_size=1500, byte_fallback=fallback,
                character_coverage=0.9995, normalization_rule_name="identity", remove_extra_whitespaces=False,
                user_defined_symbols=["<|im_start|>"], minloglevel=2)
            oracle = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
            path = prefix + ".gguf"
            gguf_of_sentencepiece(path, oracle)

            def pairs():
                for case in cases:
                    yield repr(case), tandem.ids(path, case, "--no-special"), oracle.encode(case)

            what = f"GGUF of a {kind} SentencePiece model, {'bytes' if fallback else 'no bytes'}"
            report.compare(what, version("sentencepiece"), pairs())


def gguf_of_sentencepiece(path, model):
    n = model.vocab_size()
    kind = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else
            4 if model.id_to_piece(i) == "<|im_start|>" else 1 for i in range(n)]
    write_gguf(path, n, "llama", [model.id_to_piece(i) for i in range(n)], kind,
               scores=[model.get_score(i) for i in range(n)], remove_extra_whitespaces=False)


def write_gguf(path, n, model, tokens, kinds, scores=None, merges=None, pre=None, remove_extra_whitespaces=None, chat_template=None):
    """A tiny Llama with this vocabulary."""
    import gguf

    w = gguf.GGUFWriter(path, "llama")
    c = llama_config(n)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(1)
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_tokenizer_model(model)
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    if scores:
        w.add_token_scores(scores)
    if merges:
        w.add_token_merges(merges)
    if pre:
        w.add_tokenizer_pre(pre)
    if remove_extra_whitespaces is not None:
        w.add_remove_extra_whitespaces(remove_extra_whitespaces)
    if chat_template:
        w.add_chat_template(chat_template)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for hf, tensor in llama_tensors(n).items():
        short = hf.removesuffix(".weight").removeprefix("model.layers.0.")
        name = names[short] if short.startswith("model.") else "blk.0." + names[short]
        w.add_tensor(name + ".weight", tensor)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# --- llama.cpp ----------------------------------------------------------------------------------

# A name of each rule that Tandem has.
PRE = [
    "gpt-2", "smollm", "llama-bpe", "dbrx", "glm4", "qwen2", "qwen35", "gpt-4o", "tekken", "falcon", "default", "deepseek-llm",
    "deepseek-coder", "deepseek-v3", "bloom", "viking", "kimi-k2", "seed-coder", "superbpe", "bailingmoe", "chameleon", "afmoe",
    "exaone-moe", "jais-2", "minicpm5", "laguna", "ufakzeka", "granite-embed-multi-97m", "youtu", "tiny_aya", "spark2_5",
]


class LlamaCpp:
    """llama.cpp's server on the loopback interface."""

    def __init__(self, path):
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path = path
        p.n_ctx, p.n_parallel, p.warmup, p.verbosity, p.port = 256, 1, False, -1, 0
        self.server = xllamacpp.Server(p)

    def post(self, what, body):
        import urllib.request

        request = urllib.request.Request(
            f"{self.server.listening_address}/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ids(self, text, special):
        return self.post("tokenize", {"content": text, "add_special": special, "parse_special": special})["tokens"]


def pre_tokenizers(tandem, report, folder, cases):
    os.makedirs(folder, exist_ok=True)
    _, tokenizer = next(iter(kinds()))
    made = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(made["vocab"], key=made["vocab"].get)
    kind = [3 if t in ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>") else 1 for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in made["merges"]]
    for pre in PRE:
        path = os.path.join(folder, pre + ".gguf")
        write_gguf(path, len(tokens), "gpt2", tokens, kind, merges=merges, pre=pre)
        try:
            oracle = LlamaCpp(path)
        except Exception as e:  # whatever the binding raises
            report.skip(f"pre-tokenizer {pre}", f"llama.cpp does not open it: {e}")
            continue

        def pairs():
            for case in cases:
                yield repr(case), tandem.ids(path, case), oracle.ids(case, True)

        report.compare(f"GGUF, pre-tokenizer {pre}", f"llama.cpp of {version('xllamacpp')}", pairs())
        del oracle
