"""What can be checked of blocks without running them: options of commands, the connector's configuration, syntax."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from kvactors.cli.root import cli
from kvactors.vllm.settings import ConnectorSettings
from tests.docs.blocks import PAGES, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language in ("bash", "console", "indented")]
CONFIGURATIONS = [
    (block, text) for block in SHELL for text in re.findall(r"--kv-transfer-config '([^']*)'", block.text) if "…" not in text
]
COMMANDS = [
    (block, line.strip().removeprefix("$ ").partition("  #")[0])
    for block in SHELL
    for line in block.text.replace("\\\n", " ").split("\n")
    if re.match(r"(\$ )?(\.venv/bin/)?kvactors [a-z]", line.strip())
]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
WHERE = str


@pytest.mark.parametrize(("block", "text"), CONFIGURATIONS, ids=[f"{block}" for block, _ in CONFIGURATIONS])
def test_a_configuration_is_one_that_the_connector_takes(block: Block, text: str) -> None:  # noqa: ARG001 - names the test
    given = json.loads(text)
    assert given["kv_connector"] in ("KVActorsConnector", "AscendStoreConnector")
    assert given["kv_connector_module_path"] == "kvactors.vllm"
    assert given["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    assert given["kv_load_failure_policy"] == "recompute"
    ConnectorSettings.of(given.get("kv_connector_extra_config"))


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=[f"{block} {line.split()[1]}" for block, line in COMMANDS])
def test_a_command_has_the_options_that_a_page_gives_it(block: Block, line: str) -> None:  # noqa: ARG001 - names the test
    words = shlex.split(re.split(r" [|>&]| 2>", line.replace("[", " ").replace("]", " "))[0])[1:]
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, line
        command = found
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("block", [block for block in SHELL if block.language == "bash"], ids=WHERE)
def test_a_script_is_one_that_bash_can_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(block.text)
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", PROGRAMS, ids=WHERE)
def test_a_program_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")
