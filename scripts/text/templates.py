"""Chat templates: the tokens of prompts that Tandem and `transformers` make of the same conversation."""

import json
import os

from common import folder_with, missing, version

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?\n"}],
    [
        {"role": "user", "content": "  1 + 1 = \"two\" ' & <b>\r\n"}, {"role": "assistant", "content": "2 – naïve 中文"},
        {"role": "user", "content": ""},
    ],
]

BODY = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"

# What templates do that engines differ in.
SMALL = {
    "ChatML": BODY + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "CR LF": "{% for m in messages %}\r\n{{ m.role }}:\r\n  {{ m.content }}\r\n{% endfor %}\r\nend\r\n",
    "CR": "{% for m in messages %}\r{{ m.role }}:\r{{ m.content }}\r{% endfor %}\rend",
    "CR LF in literals": "{{ 'a\r\nb' }}{% for m in messages %}{{ m.content + '\r\n' }}{% endfor %}",
    "raw": "{% raw %}\n{{ not }} {% this %}\n{% endraw %}\n{{ messages[0].content }}\n  {% raw %} a {% endraw %}  \nb",
    "trim and lstrip": "  {% if true %}\n  x\n  {% endif %}\n\t{# comment #}\n y {%- if true -%}  z  {%- endif +%}\n {%+ if true %} w{% endif %}",
    "final newline": "{{ messages[0].content }}\n",
    "two final newlines": "{{ messages[0].content }}\n\n",
    "tojson": "{{ messages | tojson }}",
    "tojson, indent": "{{ messages | tojson(indent=2) }}",
    "tojson, sorted": "{{ {'b': 1, 'a': [1.0, 2.5e-8, 1e16, true, none, 'é\"\\\\\\n中']} | tojson(sort_keys=True, ensure_ascii=True) }}",
    "tojson, separators": "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }}",
    "python methods": "{% for m in messages %}{{ m.content.strip().split(' ') | length }}{{ m.content.startswith('H') }}{{ m.role.upper().title() }}{{ m.get('x', 'd') }}{% endfor %}",
    "namespace and loop": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% set ns.n = ns.n + loop.index %}{{ loop.last }}{% endfor %}{{ ns.n }}",
    "macro": "{% macro turn(m, end='!') -%}\n  {{ m.role }}: {{ m.content | trim }}{{ end }}\n{%- endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "slices": "{{ messages[::-1] | map(attribute='role') | join(',') }}{{ 'abcdef'[1:-1] }}{{ 'abcdef'[::-1] }}",
    "tests": "{{ messages is iterable }}{{ none is none }}{{ x is defined }}{{ 1 is number }}{{ 'a' in 'abc' }}{{ messages[0] is mapping }}",
    "generation tags": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "numbers": "{{ 1.0 }} {{ 3 / 2 }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ 10 % 3 }} {{ 1e100 }} {{ true }} {{ none }}",
    "leading space before BOS": " {{ bos_token }}" + BODY,
    "BOS": "{{ bos_token }}" + BODY,
    "BOS and EOS": "{{ bos_token }}" + BODY + "{{ eos_token }}",
}

VARIABLES = {"enable_thinking": False, "custom": {"a": [1, "two"]}, "date_string": "26 Jul 2024"}


def run(tandem, report, folder, args):
    if lacking := missing("transformers", "jinja2", "tokenizers", "safetensors", "numpy"):
        report.skip("chat templates", f"no {', '.join(lacking)}")
        return
    with open(os.path.join(ROOT, "tests", "fixtures", "chat_templates.json")) as f:
        real = {t["name"]: t["source"] for t in json.load(f)["templates"]}
    for what, templates in (("small templates", SMALL), ("released templates", real)):
        report.compare(what, version("transformers"), pairs(tandem, os.path.join(folder, what.replace(" ", "-")), templates))
    with_variables = {"variables": "{{ enable_thinking }} {{ custom | tojson }} {{ date_string }} {{ absent is defined }}" + BODY}
    report.compare("template variables", version("transformers"), pairs(tandem, os.path.join(folder, "variables"), with_variables, VARIABLES))


def tokenizer():
    """A byte-level vocabulary whose post-processor adds a token on both sides, which no rendered chat may get."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")])
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 256), ("</s>", 257)])
    return t


def pairs(tandem, folder, templates, variables=None):
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer().to_str()
    for i, (name, source) in enumerate(templates.items()):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        path = folder_with(os.path.join(folder, str(i)), ours, config, source)
        theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token="<s>", eos_token="</s>")
        theirs.chat_template = source
        flags = [f"--template-arg={k}={json.dumps(v)}" for k, v in (variables or {}).items()]
        for conversation in CONVERSATIONS:
            messages = os.path.join(folder, "messages.json")
            with open(messages, "w") as f:
                json.dump(conversation, f)
            out, error = tandem.run("tokenize", "-m", path, "--json", "--messages", messages, *flags)
            got = json.loads(out)["ids"] if error is None else "an error"
            try:
                want = theirs.apply_chat_template(
                    conversation, tokenize=True, add_generation_prompt=True, return_dict=False, **(variables or {}))
            except Exception as e:  # a template's own refusal, or one of the engine
                want = "an error"
                error = error or str(e)
            text = theirs.decode
            yield (f"{name}, {len(conversation)} messages{': ' + error if error else ''}",
                   got if isinstance(got, str) else text(got), want if isinstance(want, str) else text(want))
