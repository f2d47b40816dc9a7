"""A tiny model as a folder that `vllm serve` takes: its configuration, a tokenizer of 500 made-up words, seeded weights."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from importlib import metadata
from pathlib import Path

VLLM_CPU = Path(__file__).resolve().parent.parent / "vllm_cpu"
sys.path.append(str(VLLM_CPU))

import tiny  # noqa: E402 - it is in the folder named above

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ROLES = ("system", "user", "assistant")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}assistant"


def words() -> list[str]:
    """One for each id of the vocabulary: "baba", "babe" and so on, behind the special ones."""
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    made_up = ("".join(pair) for pair in itertools.product(syllables, syllables))
    return [*SPECIAL, *ROLES, *itertools.islice(made_up, tiny.BASE["vocab_size"] - len(SPECIAL) - len(ROLES))]


def prompt(tokens: int, seed: int = 1) -> str:
    """So many words, the same each time, for the same seed."""
    draw = random.Random(seed)
    return " ".join(draw.choices(words()[len(SPECIAL) + len(ROLES) :], k=tokens))


def make_folder(model: str, folder: Path) -> Path:
    """Writes the model's files into a folder of its own, and returns that."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    path = folder / f"tiny-{model}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny.BASE | tiny.MODELS[model]))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def environment(folder: Path) -> dict[str, str]:
    """For `vllm serve` on a CPU. In each of its processes vLLM finds the load format "seeded" by an entry point, put here.

    The wheel of vLLM for CPUs is not named "vllm", by which the command finds its version, and that it is for CPUs: that is put
    here, too.
    """
    try:
        name, version = "tiny-models", metadata.version("vllm") and "0"
    except metadata.PackageNotFoundError:
        name, version = "vllm", f"{metadata.version('vllm-cpu')}+cpu"
    plugin = folder / "plugins" / f"{name.replace('-', '_')}-{version}.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nseeded = tiny:register_seeded_weights\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "PYTHONPATH")}
    path = [str(plugin.parent), str(VLLM_CPU), *filter(None, [os.environ.get("PYTHONPATH")])]
    one_process = "VLLM_ENABLE_V1_MULTIPROCESSING"  # a server has an engine process of its own
    cpu = {name: value for name, value in tiny.ENVIRONMENT.items() if name != one_process}
    return inherited | {"GLOG_minloglevel": "2"} | cpu | {"PYTHONPATH": os.pathsep.join(path)}
