"""Which blocks of the pages `test_blocks.py` does not run, and why. Everything that is not here runs, and prints what is shown.

A block is named by its page and how it begins; an entry that no block has is an error too.
"""

from __future__ import annotations

PICTURE = "a picture"
INSTALLS = "installs packages: CI does that itself, with the same commands, before any test runs"
SERVER = "needs a model and a server of the user's"
HARDWARE = "needs hardware that CI has not"
SYNTAX = "says how a command is written"
EXCERPT = "an excerpt of a larger program"

ELSEWHERE = {
    "tests/test_docs.py": {
        "docs/embedding.md": ["import asyncio", "two: layer 1", "import ctypes", "first: 0 tokens"],
        "docs/faults.md": ["seed: 7"],
    },
    "tests/traces/test_docs_page.py": {
        "docs/traces.md": ["time,tokens", '{"time": 0.25', "sample_trace.jsonl: mooncake"],
    },
    "tests/layouts/test_show.py": {"docs/layout-files.md": ["name: my-hybrid", "layer    entry"]},
    "tests/memory/test_page.py": {
        "docs/memory.md": ["import torch", "k    (8", "from types", "group 0, layer 0", "chunks equal"],
    },
    "tests/live/test_page.py": {"docs/live.md": ["import tempfile", "mine running"]},
    "tests/test_examples.py": {"examples/vllm_cpu/README.md": ["tiny gptoss"]},
}
"""Test, page, beginnings: blocks that another test runs or reads. The test has to name the page."""

NOT_RUN = {
    "README.md": {
        "python3 -m venv": INSTALLS,
        "make test": "is what CI runs",
        "vllm serve": SERVER,
        ".venv/bin/pip install": INSTALLS + "; tests/vllm run the example's parts",
        "llama-3.1-8b on the memory store": "takes a minute, and a trace that is not in the repository",
        "def forward": EXCERPT,
    },
    "docs/architecture.md": {"compute thread": PICTURE},
    "docs/ascend.md": {"# Not validated": HARDWARE, "export KVACTORS": HARDWARE, "class MyConnector": EXCERPT},
    "docs/disagg.md": {"client ": PICTURE, "# prefill": SERVER + "; tests/examples_disagg start the same"},
    "docs/live.md": {
        "kvactors replay": "runs until Ctrl-C; tests/live run each command",
        "replay  rank 0": "of one moment of a run on the clock",
        "r2, 100 events": "of one run on the clock",
        "kvactors top [PATH]": SYNTAX,
        "kvactors story REQUEST": SYNTAX,
        "curl --unix-socket": SERVER,
        "scrape_configs": "is for a Prometheus of the user's",
        'cp "$(python': "copies files into the folder it runs in; tests/live/test_dashboards.py reads them",
    },
    "docs/memory.md": {"raw = allocate": EXCERPT, "rows = gather": EXCERPT},
    "docs/mooncake.md": {
        "pip install": INSTALLS,
        "kvactors replay examples/sample_trace.jsonl --store": "needs Mooncake; tests/mooncake run it",
        "export MOONCAKE_CONFIG_PATH": SERVER,
        "kvactors store flush": SERVER + "; tests/mooncake run it",
        "64 blocks of 32 layers": "figures of one machine",
    },
    "docs/performance.md": {
        "kvactors bench": "takes half an hour; tests/bench run each benchmark on few bytes",
        '{"machine"': SYNTAX,
        "step = a": "a formula",
    },
    "docs/operating.md": {"kvactors top": SERVER, "kvactors store flush": SERVER + "; tests/mooncake run it"},
    "docs/quickstart.md": {"python3 -m venv": INSTALLS},
    "docs/troubleshooting.md": {"kvactors doctor": SERVER},
    "docs/design/store-contract.md": {
        "class CountingStore": "part of a program; tests/engine/test_stores_of_ones_own.py runs its like"
    },
    "docs/vllm.md": {"pip install '.[vllm]'": SERVER, "pip install '.[vllm,mooncake]'": SERVER},
    "examples/disagg/README.md": {
        "python3 -m venv": INSTALLS + "; tests/examples_disagg run the example",
        "prefill  http": "of one run, with its ports and folders; tests/examples_disagg check what it says",
        "$ curl": SERVER,
        "vllm serve": SERVER,
    },
    "examples/vllm_cpu/README.md": {
        "python3 -m venv": INSTALLS + "; tests/vllm run the example's parts",
        ".venv/bin/python": "takes minutes, vLLM and Mooncake",
    },
}
"""Page, beginning of the block: the reason."""

LINES_NOT_RUN = {
    "README.md": {
        "kvactors replay trace.jsonl --store mooncake": "needs Mooncake; tests/mooncake run it",
        "kvactors doctor": "starts a Mooncake where there is one; tests/test_cli_commands.py runs it",
    },
    "docs/simulation.md": {"make ": "takes hours; starts `kvactors simulate`"},
}
"""Page, beginning of a line in a block that runs without it: the reason."""

SHORTER = {
    "README.md": {"--layout gemma-3-27b --scale 4096     ": "--layout gemma-3-27b --scale 4096 --requests 8 "},
    "docs/cli.md": {"--seeds 0:1000": "--seeds 0:8", "replay examples/sample_trace.jsonl": "replay trace.jsonl"},
    "docs/simulation.md": {"--seeds 0:1000": "--seeds 0:8"},
}
"""Page, text of a command: what runs in its place, so that all of it together takes seconds."""
