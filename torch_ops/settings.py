"""The library's settings: one object, read once from the environment, changed only through it."""

import contextlib
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from csrc_free_ops.configs.rows import TunedConfig, read_rows

PATHS = ("auto", "hopper", "portable")
# No compiled artefact holds what these packages compute.
UNHASHED = ("bench", "testing")


def _check_path(name: str, path: object) -> None:
    if path not in PATHS:
        raise ValueError(f"{name} is {path!r}, expected one of {', '.join(PATHS)}")


def _check_rows(name: str, rows: object) -> None:
    if not isinstance(rows, str | os.PathLike) or (rows and not Path(rows).is_file()):
        raise ValueError(f"{name} is {rows!r}, expected a JSON file of launch rows")


@dataclass(frozen=True)
class _Values:
    path: str = "auto"
    checked: bool = False
    rows: str = ""
    hand_over: bool = True

    def __post_init__(self) -> None:
        _check_path("settings: path", self.path)
        for name in ("checked", "hand_over"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"settings: {name} is {getattr(self, name)!r}, expected True or False")
        _check_rows("settings: rows", self.rows)


def user_folder() -> Path:
    """Return the folder of files that the library keeps from one process to the next."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "vk"


def default_rows() -> Path:
    """The user's own launch rows: what `vk bench tune` writes and settings read, unless told otherwise."""
    return user_folder() / "rows.json"


def _found_rows() -> str:
    try:
        return str(default_rows()) if default_rows().is_file() else ""
    except (OSError, RuntimeError):
        # There is no home folder, or none that may be looked into.
        return ""


def _from_environment() -> _Values:
    switches = {"VK_CHECKED": os.environ.get("VK_CHECKED", "0"), "VK_HAND_OVER": os.environ.get("VK_HAND_OVER", "1")}
    for variable, value in switches.items():
        if value not in ("0", "1"):
            raise ValueError(f"{variable} is {value!r}, expected 0 or 1")
    path = os.environ.get("VK_PATH", "auto")
    _check_path("VK_PATH", path)
    for variable in ("VK_DISABLE_WARP_SPECIALIZE", "AIKF_DISABLE_WARP_SPECIALIZE"):
        disabled = os.environ.get(variable, "0")
        if disabled not in ("0", "1"):
            raise ValueError(f"{variable} is {disabled!r}, expected 0 or 1")
        path = "portable" if disabled == "1" else path
    if "VK_ROWS" in os.environ:
        rows = os.environ["VK_ROWS"]
        _check_rows("VK_ROWS", rows)
    else:
        rows = _found_rows()
    checked, hand_over = (value == "1" for value in switches.values())
    return _Values(path=path, checked=checked, rows=rows, hand_over=hand_over)


@dataclass(frozen=True)
class _Rows:
    """A file of rows as it was when it was read: a change of it counts from the next process or setting on."""

    rows: tuple[TunedConfig, ...] = ()
    digest: str = "-"

    @staticmethod
    def of(path: str) -> "_Rows":
        if not path:
            return _Rows()
        rows = read_rows(Path(path))
        return _Rows(rows, hashlib.sha256(repr(rows).encode()).hexdigest()[:16])


def hash_sources(root: Path) -> str:
    """Hash every file below `root` that decides what an op computes: kernels, rows, launchers, bodies, gradients."""
    package, kernels = root / "torch_ops", root / "csrc_free_ops"
    packages = [folder for folder in package.iterdir() if folder.is_dir() and folder.name not in UNHASHED]
    ours = [*package.glob("*.py"), *(path for folder in packages for path in folder.rglob("*.py"))]
    digest = hashlib.sha256()
    for path in sorted((*ours, *kernels.rglob("*.py"), *kernels.rglob("*.json")), key=str):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def source_hash() -> str:
    return hash_sources(Path(__file__).parent.parent)


class Settings:
    """Settings in force: `path`, `checked`, `rows`, `hand_over`.

        torch_ops.settings.path                          the value in force
        torch_ops.settings(path="portable")              for the rest of the process, as settings.update(...)
        with torch_ops.settings(checked=True): ...       for a block

    Environment variables set the defaults:

    - VK_PATH: auto, hopper or portable.
    - VK_CHECKED: 0 or 1.
    - VK_HAND_OVER: 0 or 1.
    - VK_ROWS: a JSON file of launch rows, or empty for none. Without it, vk/rows.json in XDG_CACHE_HOME or ~/.cache,
      where `vk bench tune` writes.
    - VK_DISABLE_WARP_SPECIALIZE=1 or AIKF_DISABLE_WARP_SPECIALIZE=1: VK_PATH=portable, whatever VK_PATH says.

    A change of path, rows or hand_over changes the kernels in graphs. It drops compiled graphs in memory and enters the
    key of compiled artefacts on disk.
    """

    __slots__ = ("_rows", "_self_test", "_user_tag", "_values", "generation")

    def __init__(self) -> None:
        self._values = _from_environment()
        try:
            self._rows = _Rows.of(self._values.rows)
        except ValueError as error:
            if "VK_ROWS" in os.environ:
                raise ValueError(f"VK_ROWS: {error}") from error
            # Nobody asked for this file by name.
            warnings.warn(f"these launch rows are not used: {error}", stacklevel=2)
            self._values = replace(self._values, rows="")
            self._rows = _Rows()
        self.generation = 0
        # Empty where kernels need none, or have had none.
        self._self_test = ""
        self._user_tag = torch.compiler.config.cache_key_tag
        self._key_artefacts()

    @property
    def path(self) -> str:
        """ "auto" takes the faster path, "portable" stock Triton, "hopper" Gluon wherever it can run."""
        return self._values.path

    @property
    def checked(self) -> bool:
        """Whether eager calls verify values on the device, such as those in `cu_seqlens`; costs a synchronisation."""
        return self._values.checked

    @property
    def rows(self) -> tuple[TunedConfig, ...]:
        """The user's own launch rows, which precede the shipped ones, as they were when they were set.

        Set by the name of their file; "" is none.
        """
        return self._rows.rows

    @property
    def hand_over(self) -> bool:
        """Whether `torch_ops.compat` gives a call to PyTorch's own kernel where that was measured to be faster.

        Calls go over on path "auto" alone.
        """
        return self._values.hand_over

    def __repr__(self) -> str:
        values = self._values
        return (
            f"settings(path={values.path!r}, checked={values.checked}, rows={values.rows!r}, "
            f"hand_over={values.hand_over})"
        )

    def update(self, **changes: Any) -> None:
        """Change settings by name. An unknown name or value is refused, and nothing changes."""
        unknown = set(changes) - set(_Values.__dataclass_fields__)
        if unknown:
            names = ", ".join(_Values.__dataclass_fields__)
            raise ValueError(f"settings: {', '.join(sorted(unknown))} is not a setting; there are {names}")
        after = replace(self._values, **changes)
        self._take(after, _Rows.of(after.rows) if "rows" in changes else self._rows)

    def _take(self, values: _Values, rows: _Rows) -> None:
        changed = (values.path, values.hand_over, rows) != (self._values.path, self._values.hand_over, self._rows)
        self._values, self._rows = values, rows
        if changed:
            self.generation += 1
            self._key_artefacts()
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()

    def take_self_test(self, holds: bool, is_eager: bool) -> None:
        """Let calls plan anew and artefacts have another key, once a self-test of kernels says what they choose."""
        token = ":holds" if holds else ":fails"
        if token != self._self_test:
            self._self_test = token
            self.generation += 1
            self._key_artefacts()
            if is_eager and "torch._dynamo" in sys.modules:
                torch.compiler.reset()

    def __call__(self, **changes: Any) -> contextlib.AbstractContextManager["Settings"]:
        """Change settings at once, as `update` does; as a context manager, for its block only."""
        values, rows = self._values, self._rows
        self.update(**changes)
        return self._until_exit({name: getattr(values, name) for name in changes}, rows)

    @contextlib.contextmanager
    def _until_exit(self, before: dict[str, Any], rows: _Rows) -> Iterator["Settings"]:
        """At the end what the block changed is as it was `before`; what was set for good within it stays."""
        try:
            yield self
        finally:
            self._take(replace(self._values, **before), rows if "rows" in before else self._rows)

    def _key_artefacts(self) -> None:
        kept = "" if self._values.hand_over else ":kept"
        tag = f"vk:{source_hash()}:{self._values.path}{kept}:{self._rows.digest}{self._self_test}"
        torch.compiler.config.cache_key_tag = f"{self._user_tag}|{tag}" if self._user_tag else tag


settings = Settings()
