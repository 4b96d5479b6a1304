"""Typed configuration: YAML parts plus dotted overrides, in Megatron-LM's argument names.

`load_config` is the only way in: it reads the file, applies overrides, checks every type, and ends by running
the cross-part rules of support.py. Whatever is wrong becomes one ConfigError.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megacp import support
from megacp.parts import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Part,
    RopeScaling,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RopeScaling",
    "TrainConfig",
    "load_config",
]


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line for the user."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    *,
    check_files: bool = True,
) -> Config:
    """Read `path`, apply `part.key=value` overrides (values are YAML) and check everything.

    With `world_size` the rules that need the number of ranks run too; `check_files=False` does not ask
    whether data and tokenizer are there. Raises ConfigError with one line.
    """
    tree = _read(path)
    for override in overrides:
        _override(tree, override)
    # A part whose every line is commented out reads as None.
    tree = {key: {} if value is None and key in Config.model_fields else value for key, value in tree.items()}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from None
    try:
        problem = support.first_problem(config, world_size, check_files)
    except OSError as error:  # a path that may not be looked at, or is too long
        raise ConfigError(f"{path}: {error}") from None
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return config


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        folders = {Path(path).parent, Path("configs")}
        near = sorted(str(p) for folder in folders for p in folder.glob("[!.]*.y*ml"))
        hint = f"; there are {', '.join(near)}" if near else ""
        raise ConfigError(f"config file {path} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    try:
        tree = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except _NOT_YAML as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        raise ConfigError(f"{path} is empty; it must hold the parts {', '.join(Config.model_fields)}")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold the parts {', '.join(Config.model_fields)}, not a {type(tree).__name__}")
    return tree


# What PyYAML raises for a file that is not YAML: also a date that does not exist, a wrong !!tag, endless nesting.
_NOT_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its traps: 3e-4 is a number (not only 3.0e-4), no key may stand twice, and numbers are decimal
    or 0x..: 0100 (octal 64 there), 0b11 and 1:30 (90 there) are text, which no number may be."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_INTEGER, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in (_INTEGER, _FLOAT)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INTEGER, re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"""^[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?
            |[0-9][0-9_]*[eE][-+]?[0-9]+
            |\.(inf|Inf|INF))$
            |^\.(nan|NaN|NAN)$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def _override(tree: dict[str, Any], override: str) -> None:
    name, sign, text = override.partition("=")
    keys, shown = name.split("."), _short(override)
    if not sign or len(keys) < 2 or not all(keys):
        raise ConfigError(f"override {shown} must read part.key=value, e.g. train.train_iters=100")
    try:
        value = yaml.load(text, Loader=_Loader)
    except _NOT_YAML:
        raise ConfigError(f"override {shown}: the value is not valid YAML") from None
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if child is None:
            child = tree[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {shown}: {key} is not a part")
        tree = child
    tree[keys[-1]] = value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first_problem(error: ValidationError) -> str:
    """One line for the first thing pydantic found, with its dotted name."""
    errors = error.errors(include_url=False)
    # A misspelt key is the cause of the required one that is missing.
    first = next((e for e in errors if e["type"] in ("extra_forbidden", "invalid_key")), errors[0])
    name, here = _dotted(first["loc"])
    same = [e for e in errors if _dotted(e["loc"])[0] == name]
    more = f" (and {len(errors) - len(same)} more)" if len(errors) > len(same) else ""
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key {name}{_suggestion(name, here)}{more}"
    if first["type"] == "missing":
        field = here.model_fields[name.rpartition(".")[2]]
        return f"{name} is required{f': {field.description}' if field.description else ''}{more}"
    wanted = " or ".join(dict.fromkeys(re.sub(r"^\w+ should ", "must ", e["msg"]) for e in same))
    return f"{name} = {_short(first['input'])}: {wanted}{more}"


def _dotted(location: tuple[int | str, ...]) -> tuple[str, type[Part]]:
    """`part.key` of a pydantic location, without list positions and members of unions; and its Part."""
    names: list[str] = []
    part: type[Part] = Config
    for key in location:
        names.append(str(key))
        field = part.model_fields.get(str(key))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, Part)):
            break
        if len(names) < len(location):
            part = field.annotation
    return ".".join(names), part


def _suggestion(name: str, here: type[Part]) -> str:
    """Where an unknown key belongs: its own name in another part, else a near name, else what there is."""
    parent, _, key = name.rpartition(".")
    known: dict[str, list[str]] = {}
    for other in _dotted_keys(Config, ""):
        known.setdefault(other.rpartition(".")[2], []).append(other)
    siblings = difflib.get_close_matches(key, here.model_fields, 1, cutoff=0.6)
    anywhere = difflib.get_close_matches(key, known, 1, cutoff=0.7)
    if key in known or (anywhere and not siblings):
        return f"; did you mean {' or '.join(known[key if key in known else anywhere[0]])}?"
    if siblings:
        return f"; did you mean {parent}{'.' if parent else ''}{siblings[0]}?"
    return f"; {'the parts are' if here is Config else 'there are'} {', '.join(here.model_fields)}"


def _dotted_keys(part: type[Part], prefix: str) -> Iterator[str]:
    for key, field in part.model_fields.items():
        yield prefix + key
        if isinstance(field.annotation, type) and issubclass(field.annotation, Part):
            yield from _dotted_keys(field.annotation, f"{prefix}{key}.")
