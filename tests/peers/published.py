"""Published tokenizers that packages ship, as folders with a tokenizer.json: Mistral's SentencePiece and Tekken files, from mistral-common;
cl100k, from litellm if it is installed.

    from published import tokenizers; tokenizers(FOLDER)    a list of (name, family, folder, texts in which llama.cpp agrees)
"""
import glob, importlib.util, json, os, random

TEXTS = ["Hello, world!", "  two  spaces", " one", "tabs\tand\nlines\n\n\nmore\n", "\n", "", " ", "   ", "Ünïcödé 你好 😀 \u200d", "日本語のテキスト。한국어",
         "def f(x):\n    return x ** 2\n", "12345 3.14 1e-9", "I'LL don't CAMELCase", "\u00a0nbsp \u3000wide", "aé\u0301", "trailing  ", "aaaaaaaaaaaaaaaa",
         "\u2581mark \u2581\u2581", "🤗🏽\U0001F468\u200d\U0001F469\u200d\U0001F467", "\x00\x07\x7f", "ỳ́ ǅ ß ﬁ", "URL https://a.b/c?d=e#f_%20"]
SPECIAL = ["<s>Hi</s>", "<s>[INST] Hi [/INST] Ho</s>", "<s>[INST]Hi[/INST]  two", "a<s> b </s>\nc", "</s>\n\n<s>"]
START = "<s>"
# no letter with a combining mark that has no form of its own: llama.cpp splits those in Tekken
PIECES = [" ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "▁", "▁▁", "a", "A", "the", "The", "ing", " of", "é", "É", "ß", "ǅ", "你好", "世", "日本", "한",
          "😀", "0", "7", "12", "345", ".", ",", "--", "==", "//", "_", "'s", "'LL", "n't", '"', "(", "{}", "\\", "\u00a0", "\u200d", "\u3000", "aaaa",
          "https://", "عر", "xX", "camelCase", "#", "\x07", "İ", "ﬁ", "Ⅷ", "²", "½"]
# Phi-3's, which take the spaces behind them, in the order of its ids
PHI3 = ["<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|placeholder2|>", "<|placeholder3|>", "<|placeholder4|>", "<|system|>",
        "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>"]
CL100K = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def drawn(special=(), count=300):
    """Texts of pieces, the same each time."""
    draw = random.Random(1)
    return ["".join(draw.choice([*PIECES, *special]) for _ in range(draw.randint(1, 14))) for _ in range(count)]


def of_sentencepiece(path, folder, normalizer, pre_tokenizer, template=None, phi3=False):
    """tokenizer.json of a SentencePiece file, as transformers makes it."""
    from sentencepiece import sentencepiece_model_pb2 as pb
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers.convert_slow_tokenizer import generate_merges
    proto = pb.ModelProto()
    proto.ParseFromString(open(path, "rb").read())
    vocab = {p.piece: i for i, p in enumerate(proto.pieces)}
    merges = generate_merges(vocab, {p.piece: p.score for p in proto.pieces})
    out = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    own = [p.piece for p in proto.pieces if p.type in (2, 3)] + PHI3 * phi3
    strips = lambda t: phi3 and t not in ("<unk>", "<s>", "<|endoftext|>")
    out.add_special_tokens([AddedToken(t, normalized=False, special=True, rstrip=strips(t)) for t in own])
    if normalizer:
        out.normalizer = normalizer
    if pre_tokenizer:
        out.pre_tokenizer = pre_tokenizer
    out.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    save(out, folder, template)


def save(tokenizer, folder, template=None):
    os.makedirs(folder)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    json.dump({**config, **({"chat_template": template} if template else {})}, open(os.path.join(folder, "tokenizer_config.json"), "w"))


def of_tiktoken(path, folder):
    """tokenizer.json of OpenAI's cl100k as Phi-4 has it: parts are what a split by their inverse removes not."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    out = TikTokenConverter(path, pattern=PATTERN, extra_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"]).converted()
    out.model.ignore_merges = False
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True)
    out.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    save(out, folder)


def tokenizers(work):
    import mistral_common
    from tokenizers import normalizers, pre_tokenizers
    data = os.path.join(os.path.dirname(mistral_common.__file__), "data")
    both = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space = lambda scheme: pre_tokenizers.Metaspace("▁", scheme, split=False)
    bare = [t for t in TEXTS if not t.startswith((" ", "▁"))]
    kinds = {
        "prepend": ((both, None), TEXTS + SPECIAL + drawn(["<s>", "</s>"])),
        "never": ((None, space("never")), TEXTS + SPECIAL),
        # where no part begins with a space
        "always": ((None, space("always")), bare + ["<s>Hi</s>", "</s>\n\n<s>"]),
        "first": ((None, space("first")), bare),
        "first, chats": ((None, space("first"), "{{ bos_token }}{{ messages[0].content }}"), [START + t for t in TEXTS + SPECIAL]),
    }
    out = []
    for path in sorted(glob.glob(os.path.join(data, "*.model.*"))):
        for kind, (parts, texts) in kinds.items():
            name = f"{os.path.basename(path)} {kind}"
            folder = os.path.join(work, name.replace(" ", "-").replace(",", ""))
            of_sentencepiece(path, folder, *parts)
            out.append((name, "mistral", folder, texts))
    folder = os.path.join(work, "phi3")
    of_sentencepiece(os.path.join(data, "tokenizer.model.v1"), folder, both, None, phi3=True)
    chats = ["<|user|>\nHi <|end|>\n<|assistant|>\n", "<s><|system|>  a\n\n b<|end|> \n</s> c <s> d<|endoftext|> e", " <|end|>"]
    out.append(("tokenizer.model.v1, Phi-3's tokens", "phi3", folder, TEXTS + SPECIAL + chats))
    from transformers.integrations.mistral import convert_tekken_tokenizer
    for path in sorted(glob.glob(os.path.join(data, "tekken_*.json"))):
        folder = os.path.join(work, os.path.basename(path) + ".d")
        save(convert_tekken_tokenizer(path).backend_tokenizer, folder)
        out.append((os.path.basename(path), "mistral", folder, TEXTS + SPECIAL + drawn(["<s>", "</s>"])))
    if litellm := importlib.util.find_spec("litellm"):
        folder, (home,) = os.path.join(work, "cl100k"), litellm.submodule_search_locations
        of_tiktoken(os.path.join(home, "litellm_core_utils/tokenizers", CL100K), folder)
        out.append(("cl100k", "phi3", folder, TEXTS + drawn(["<|im_end|>"]) + ["<|im_start|>user<|im_sep|> Hi<|im_end|><|im_start|>assistant<|im_sep|>"]))
    return out
