"""YAML and JSON files that people write, read strictly: nothing is dropped, and nothing is read as something else.

YAML 1.1 takes `01000` for 512, `8:32` for 512 too, `1_000` for 1000 and `no` for false, and both formats keep the last of two
equal keys. In a file of sizes each of these is a mistake that nobody would see, so they are refused with their line.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FRACTION = re.compile(r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?|[-+]?\.[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean X?` with the known name that is most like this one; nothing where none is like it."""
    close = difflib.get_close_matches(str(name)[:100].lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


class BadFileError(ValueError):
    """The file cannot be read; one line that says why, without its name."""


def read_data(path: str | Path) -> Any:
    """What a YAML file holds, or a JSON file if its name ends with `.json`; a byte order mark is skipped.

    Raises:
        BadFileError: unreadable, not UTF-8, not valid, nested too deeply, or something that would be misread.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFileError(f"is not UTF-8 text: {error.reason}") from None
    except (OSError, ValueError) as error:
        raise BadFileError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    is_json = str(path).endswith(".json")
    try:
        return json.loads(text, object_pairs_hook=_unique_pairs) if is_json else yaml.load(text, Loader=_Loader)
    except BadFileError:
        raise
    except RecursionError:
        raise BadFileError("is nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        raise BadFileError(f"is not valid {'JSON' if is_json else 'YAML'}: {' '.join(str(error).split())}") from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise BadFileError(f"{key!r} is given twice")
        out[key] = value
    return out


class _Loader(yaml.SafeLoader):
    """Safe YAML without the surprises of its version 1.1."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, str | int):
            if key in seen:
                raise BadFileError(f"{_line(key_node)}: {key!r} is given twice")
            seen.add(key)
    out: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return out


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    if _DECIMAL.fullmatch(node.value) is None:
        raise _surprise(node, loader.construct_yaml_int(node), "a plain decimal number")
    return int(loader.construct_yaml_int(node))


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    if _FRACTION.fullmatch(node.value) is None:
        raise _surprise(node, loader.construct_yaml_float(node), "a plain decimal number")
    return float(loader.construct_yaml_float(node))


def _bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    if node.value.lower() not in ("true", "false"):
        raise _surprise(node, str(loader.construct_yaml_bool(node)).lower(), "true or false")
    return bool(loader.construct_yaml_bool(node))


def _date(_: _Loader, node: yaml.ScalarNode) -> Any:
    raise _surprise(node, "a date", "something else")


def _surprise(node: yaml.ScalarNode, read_as: object, write: str) -> BadFileError:
    return BadFileError(f"{_line(node)}: {node.value!r} would be read as {read_as}; write {write}, or quote it if it is a text")


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:bool", _bool)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _date)
