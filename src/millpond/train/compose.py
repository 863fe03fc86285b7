"""From words on a command line, or a saved run, to checked settings. The only module that knows Hydra.

Hydra is used as a library: it composes, and neither changes the working directory nor writes a folder of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from millpond.core.errors import InvalidArgument
from millpond.core.extras import extra
from millpond.train.run_state import write_text
from millpond.train.settings import Settings

with extra("train"):
    from hydra import compose, initialize_config_module
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

_GROUPS = ("algorithm", "execution", "logger", "profile")
# What a resumed run cannot change: its checkpoint would mean something else.
_FIXED = (
    *(
        "algorithm.name",
        "algorithm.hidden",
        "algorithm.initial_alpha",
        "env",
        "execution.name",
        "execution.mode",
        "seed",
    ),
    *("normalize_observations", "run_dir", "replay.capacity", "replay.layout"),
)
_NOT_COMPARED = ("resume", "run_dir", "dry_run")


def settings_from_overrides(overrides: Sequence[str]) -> Settings:
    """Settings from words such as ``algorithm=dqn env=CartPole-v1 replay.batch_size=64``; the rest are defaults.

    ``resume=DIR`` starts from that run's settings instead; the other words change them. What its checkpoints depend on
    cannot be changed: the environment, the algorithm and the sizes of its networks, the seed, how the run is executed,
    ``normalize_observations``, ``replay.capacity`` and ``replay.layout``.

    Raises:
        InvalidArgument: an unknown setting (with the closest known one), a value that does not fit, or a word that is
            no ``name=value``. Always one line.
    """
    words = [_rewrite(word) for word in overrides]
    parsed = [_parse(word) for word in words]
    resume = next((str(o.value()) for o in parsed if o.key_or_group == "resume" and o.value() is not None), None)
    config = _defaults(words) if resume is None else _saved(Path(resume), parsed)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InvalidArgument(_first_line(error)) from None
    assert isinstance(values, dict)
    return Settings.from_dict({str(name): value for name, value in values.items()})


def settings_from_file(path: Path) -> Settings:
    """The settings of a saved run (its ``config.yaml``).

    Raises:
        InvalidArgument: there is no such file, or it does not hold settings.
    """
    return settings_from_overrides([f"resume={_quote(str(path.parent))}"])


def save_settings(settings: Settings, path: Path) -> None:
    """Write them as YAML that ``resume=`` reads back, every value spelled out."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(settings.to_dict())))


def describe_settings() -> str:
    """A table of every setting with its default and its meaning, read from the configuration files themselves."""
    root = resources.files("millpond.conf")
    lines = _describe(root.joinpath("train.yaml").read_text(encoding="utf-8"), "")
    for group in ("execution", "logger"):
        lines += _describe(root.joinpath(group, "local.yaml").read_text(encoding="utf-8"), f"{group}.")
    ray = root.joinpath("execution", "ray.yaml").read_text(encoding="utf-8")
    lines += [line for line in _describe(ray, "execution.", "ray") if line[0] != "execution.mode"]
    for group in _GROUPS:
        if len(options := choices(group)) > 1:
            lines.append((group, "|".join(options), "a group of settings, chosen by name"))
    for name in choices("algorithm"):
        lines += _describe(root.joinpath("algorithm", f"{name}.yaml").read_text(encoding="utf-8"), "algorithm.", name)
    width = max(len(name) for name, _, _ in lines)
    return "\n".join(f"  {name:<{width}}  {default:<22} {text}".rstrip() for name, default, text in lines)


def _describe(text: str, prefix: str, only: str | None = None) -> list[tuple[str, str, str]]:
    """The settings of one YAML file of ours: at most one level of nesting, one setting per line, comment behind it."""
    found: list[tuple[str, str, str]] = []
    group = ""
    for line in text.splitlines():
        match = re.fullmatch(r"( *)([a-z_]+):(?: +([^#]*?))?(?: +# (.*))?", line)
        if match is None or match[2] == "defaults" or (only is not None and match[2] == "name"):
            continue
        group = group if match[1] else ""
        if not match[3] and match[4] is None:
            group = f"{match[2]}."
            continue
        comment = match[4] or ""
        found.append((prefix + group + match[2], match[3] or "", f"{only}: {comment}" if only else comment))
    return found


def _rewrite(word: str) -> str:
    """``env=ID`` means ``env.id=ID``; arguments of an environment, and resources that nodes offer, may be new keys."""
    if word.startswith("env="):
        return "env.id=" + word.removeprefix("env=")
    if re.match(r"(env\.kwargs|execution\.(collector|replay|learner)\.resources)[.=]", word):
        return "++" + word
    return word


def _parse(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        raise InvalidArgument(
            f"{word!r} is no setting: write name=value (a value with '=', ',' or brackets needs quotes of its own)"
        ) from None
    if override.is_sweep_override():
        raise InvalidArgument(f"{word!r}: one run takes one value (quote it where the comma belongs to it)")
    return override


def _defaults(words: list[str]) -> DictConfig:
    try:
        with initialize_config_module("millpond.conf", version_base="1.3"):
            return compose("train", overrides=words)
    except Exception as error:  # noqa: BLE001  # Hydra answers some mistakes with its own errors, others with whatever came up
        raise InvalidArgument(_explain(error, words)) from None


def _saved(run: Path, overrides: Sequence[Override]) -> DictConfig:
    path = run / "config.yaml"
    try:
        config = OmegaConf.load(path)
    except OSError as error:
        raise InvalidArgument(f"resume={run}: cannot read {path}: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001  # YAML has an error of its own for every way of being broken
        raise InvalidArgument(f"resume={run}: {path} holds no settings: {_first_line(error)}") from None
    if not isinstance(config, DictConfig):
        raise InvalidArgument(f"resume={run}: {path} holds no settings")
    OmegaConf.set_struct(config, True)
    for override in overrides:
        name, value = override.key_or_group, override.value()
        name = f"{name}.name" if name in ("algorithm", "execution") and isinstance(value, str) else name
        fixed = name in _GROUPS or any(name == one or name.startswith(f"{one}.") for one in _FIXED)
        if fixed and (name in _GROUPS or OmegaConf.select(config, name) != value):
            raise InvalidArgument(f"{name} cannot change when a run is resumed: start a new run instead")
        try:
            OmegaConf.update(config, name, value, force_add=override.is_force_add())
        except OmegaConfBaseException:
            raise InvalidArgument(_unknown(name, config)) from None
    return config


def changed_settings(path: Path, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """What differs from the saved settings at ``path``: the saved value and the new one, by name.

    Raises:
        InvalidArgument: there is no such file, or it does not hold settings.
    """
    before, now = (_flat(each.to_dict(), "") for each in (settings_from_file(path), settings))
    return {
        name: (before.get(name), now.get(name))
        for name in sorted({*before, *now} - set(_NOT_COMPARED))
        if before.get(name) != now.get(name)
    }


def _flat(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _explain(error: Exception, words: list[str]) -> str:
    """One line for an error of Hydra's, which has several and says how to repair a configuration file instead."""
    text = str(error)
    if isinstance(error, MissingConfigException):
        match = re.search(r"'(\w+)/([^']*)'", text)
        if match and match[1] in _GROUPS:
            return f"{match[1]}={match[2]} is unknown; there are: {', '.join(choices(match[1]))}"
    match = re.search(r"Could not (?:override|append to config\. An item is already at) '([^']*)'", text)
    if match:
        return _unknown(match[1], _defaults([w for w in words if w.split("=")[0] in _GROUPS]))
    return _first_line(error)


def _unknown(name: str, config: DictConfig) -> str:
    close = _nearest(name, _names(OmegaConf.to_container(config, resolve=False), ""))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"unknown setting {name}{hint} (`millpond train --help` lists them all)"


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The settings that are meant, most likely: of the same group first, by whole words of it or by its letters."""
    group, _, last = name.rpartition(".")
    parts = {one: one.rpartition(".") for one in known}
    inside = {part: one for one, (parent, _, part) in parts.items() if parent == group}
    words, close = set(last.split("_")), difflib.get_close_matches(last, {part for _, _, part in parts.values()}, n=1)
    return (
        [one for part, one in inside.items() if words <= set(part.split("_"))]
        or [inside[part] for part in difflib.get_close_matches(last, inside, n=1)]
        or [one for one, (_, _, part) in parts.items() if part in close]
        or [one for one, (_, _, part) in parts.items() if words <= set(part.split("_"))]
        or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    )[:3]


def _names(values: Any, prefix: str) -> list[str]:
    if not isinstance(values, dict):
        return []
    names: list[str] = []
    for name, value in values.items():
        names += [f"{prefix}{name}", *_names(value, f"{prefix}{name}.")]
    return names


def choices(group: str) -> list[str]:
    """The names that a group of settings (algorithm, execution, logger, profile) can be chosen by."""
    folder = resources.files("millpond.conf").joinpath(group)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
