"""What the user wants of every selection: environment variables and a configuration file, read when a choice is made.

The nearest wins: an argument of the call, then the environment, then the file. The file is `config.toml` in the folder `kivi` of the user's
configuration, or the one that `KIVI_CONFIG` names:

    backend = "triton"       # KIVI_BACKEND
    mode = "device"          # KIVI_MODE
    strict = true            # KIVI_STRICT: raise where selection would pass over a better backend that is installed here
    self_check = true        # KIVI_SELF_CHECK: run a few conformance cases on a device before it is first used
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import Struct

from kivi.backend import Mode
from kivi.errors import ConfigError

#: Every variable that changes what is chosen. Backends name further ones in their manifests.
VARIABLES = ("KIVI_BACKEND", "KIVI_MODE", "KIVI_STRICT", "KIVI_SELF_CHECK", "KIVI_CONFIG", "KIVI_CACHE_DIR")
_SWITCHES: Mapping[str, bool] = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration file."""

    backend: str | None = None
    mode: Mode | None = None
    strict: bool | None = None
    self_check: bool | None = None


@dataclass(frozen=True)
class Wish:
    """What one selection is asked for, and by whom.

    backend  a name, or None for the best one; source: who named it, "argument", "environment" or "config"; backend_from: in words
    mode     None if nobody named one; mode_from: who did, in words
    """

    backend: str | None
    source: str
    backend_from: str
    mode: str | None
    mode_from: str
    strict: bool
    self_check: bool


def config_path() -> Path | None:
    """The configuration file, whether or not it is there; None for a user without a home, who has none."""
    named = os.environ.get("KIVI_CONFIG")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".config") / "kivi" / "config.toml"
    except RuntimeError:
        return None


def read_config() -> Config:
    """The configuration file; all empty without one. Raises `ConfigError` for a bad one, and where `KIVI_CONFIG` names none."""
    path = config_path()
    if path is None:
        return Config()
    try:
        text = path.read_bytes()
    except OSError as error:
        if os.environ.get("KIVI_CONFIG"):
            raise ConfigError(
                f"KIVI_CONFIG = {str(path)!r} cannot be read: {error.strerror or error}; unset it or write the file"
            ) from None
        return Config()
    try:
        return msgspec.toml.decode(text, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid configuration: {error}; it may hold {', '.join(Config.__struct_fields__)}") from None


def wish(backend: str | None = None, mode: str | None = None, strict: bool | None = None) -> Wish:
    """What the arguments of a call, the environment and the file ask for together. Raises `ConfigError` naming variable or file."""
    file, where = read_config(), config_path()

    def text(argument: str | None, variable: str, name: str, entry: str | None) -> tuple[str | None, str, str]:
        given = os.environ.get(variable)
        options = (
            (argument, "argument", f"{name} = {argument!r}"),
            (given, "environment", f"{variable} = {given!r}"),
            (entry, "config", f"{where} says {name} = {entry!r}"),
        )
        return next((option for option in options if option[0]), (None, "", ""))

    def switch(argument: bool | None, variable: str, entry: bool | None, default: bool) -> bool:
        given = os.environ.get(variable)
        if argument is not None:
            return argument
        if given:
            if given.lower() not in _SWITCHES:
                raise ConfigError(f"{variable} = {given!r} is neither on nor off; use 1 or 0")
            return _SWITCHES[given.lower()]
        return default if entry is None else entry

    name, source, name_from = text(backend, "KIVI_BACKEND", "backend", file.backend)
    if name == "auto":  # the nearest word is that there is no word
        name, source, name_from = None, "", ""
    chosen, mode_source, mode_from = text(mode, "KIVI_MODE", "mode", file.mode)
    if mode_source == "environment" and chosen not in get_args(Mode):
        raise ConfigError(f"{mode_from} is not a mode; the modes are {', '.join(get_args(Mode))}")
    strictly = switch(strict, "KIVI_STRICT", file.strict, False)
    return Wish(name, source, name_from, chosen, mode_from, strictly, switch(None, "KIVI_SELF_CHECK", file.self_check, True))
