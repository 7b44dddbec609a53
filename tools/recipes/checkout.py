"""Another project's source: imported from its folder, with stubs for missing imports, and with replaced lines."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


class UnusableError(Exception):
    """A checkout that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Lines:
    """Lines of a function: the first that contains `start`, up to but excluding the next with `stop`.

    The function "__main__" is the block of a script that `if __name__ == "__main__":` begins.
    """

    file: str
    function: str
    start: str
    stop: str

    def found(self, source: Sequence[str]) -> tuple[int, int]:
        """Indices of the first of these lines and of the first line after them."""
        opening = "if __name__ ==" if self.function == "__main__" else f"def {self.function}("
        first = self._line_with(opening, source, 0)
        first = self._line_with(self.start, source, first)
        return first, self._line_with(self.stop, source, first)

    def _line_with(self, text: str, source: Sequence[str], first: int) -> int:
        for number in range(first, len(source)):
            if text in source[number]:
                return number
        raise UnusableError(
            f"{self.file}: no line of {self.function} has {text!r}; the recipe does not fit this commit"
        )


@dataclass(frozen=True)
class Edit(Lines):
    """Lines of a function to replace."""

    lines: str = ""

    def applied(self, source: Sequence[str]) -> list[str]:
        first, stop = self.found(source)
        indent = source[first][: len(source[first]) - len(source[first].lstrip())]
        ours = textwrap.indent(textwrap.dedent(self.lines).strip("\n"), indent).splitlines()
        return [*source[:first], *ours, *source[stop:]]


class Settings(dict[str, Any]):
    """Nested settings: a dict on every level, whose entries are attributes too."""

    def __init__(self, found: Mapping[str, Any]):
        super().__init__({name: Settings(value) if isinstance(value, dict) else value for name, value in found.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def updated(self, changes: Mapping[str, Any]) -> Settings:
        """A copy with these changes, on every level."""
        found = Settings({**self, **changes})
        for name, change in changes.items():
            if isinstance(self.get(name), Settings):
                found[name] = self[name].updated(change)
        return found


def fetch(repository: str, commit: str, folder: Path) -> None:
    """Check out one commit of a repository on GitHub into a new folder."""
    folder.mkdir(parents=True)
    for arguments in (
        ["init"],
        ["fetch", "--depth=1", f"https://github.com/{repository}", commit],
        ["checkout", commit],
    ):
        command, *rest = arguments
        done = subprocess.run(["git", "-C", str(folder), command, "--quiet", *rest], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder)
            raise UnusableError(f"{repository} was not fetched: {done.stderr.strip()}")


class _Changed(SourceFileLoader):
    """Compiles a changed source without reading or writing bytecode files."""

    def __init__(self, name: str, path: str, change: Callable[[str], str]):
        super().__init__(name, path)
        self.change = change

    def get_code(self, fullname: str) -> Any:
        return compile(self.change(Path(self.path).read_text()), self.path, "exec", dont_inherit=True)


class _StandIn(Loader):
    """A module with the given names, and an empty class for every other name."""

    def __init__(self, names: Mapping[str, Any]):
        self.names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(self.names)
        return module

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = missing  # type: ignore[method-assign]


class Checkout(MetaPathFinder):
    """The folder of a project, from which its modules are imported.

    Args:
        folder: the path of the checkout.
        roots: folders in it from which its own scripts run.
        stand_ins: modules to replace with stubs, each with the names that the project needs from it.
        texts: replacements of text in every source file.
    """

    def __init__(
        self,
        folder: Path,
        roots: Sequence[str] = (".",),
        stand_ins: Mapping[str, Mapping[str, Any]] | None = None,
        texts: Mapping[str, str] | None = None,
    ):
        self.folder = folder.resolve()
        self.roots = [str(self.folder / root) for root in roots]
        self.stand_ins = stand_ins or {}
        self.texts = texts or {}

    def commit(self) -> str | None:
        """The commit that is checked out; None if the folder is not the root of a git repository."""
        command = ["git", "-C", str(self.folder), "rev-parse", "--show-toplevel", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        return found[1] if found[0] and Path(found[0]).resolve() == self.folder else None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parts = name.split(".")
        if any(".".join(parts[:count]) in self.stand_ins for count in range(1, len(parts) + 1)):
            return ModuleSpec(name, _StandIn(self.stand_ins.get(name, {})), is_package=True)
        spec = PathFinder.find_spec(name, self.roots if path is None else path)
        places = [] if spec is None else [spec.origin] if spec.has_location else spec.submodule_search_locations or []
        if spec is None or not any(Path(str(place)).is_relative_to(self.folder) for place in places):
            return None
        if not spec.has_location and path is None and PathFinder.find_spec(name) is not None:
            return None  # a folder without __init__.py, named like an installed package
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Changed(name, str(spec.origin), self._with_texts)
        return spec

    def _with_texts(self, source: str) -> str:
        for old, new in self.texts.items():
            source = source.replace(old, new)
        return source

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Make the project's modules importable within the context."""
        before = set(sys.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            for name in set(sys.modules) - before:
                found = getattr(sys.modules[name], "__spec__", None)
                if isinstance(getattr(found, "loader", None), _Changed | _StandIn):
                    del sys.modules[name]

    def settings(self, file: str) -> Settings:
        """Settings in a YAML file."""
        import yaml

        return Settings(_with_numbers(yaml.safe_load((self.folder / file).read_text())))

    def edited(self, file: str, edits: Sequence[Edit], names: Mapping[str, Any]) -> ModuleType:
        """A second copy of the module in `file`, with replaced lines that use `names`."""
        path = self.folder / file
        change = functools.partial(self._changed, edits)
        parts = [part for part in Path(file).with_suffix("").parts if str(self.folder / part) not in self.roots]
        spec = importlib.util.spec_from_loader(".".join(parts), _Changed(".".join(parts), str(path), change))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__.update(names)
        spec.loader.exec_module(module)
        return module

    def inner_function(
        self, file: str, name: str, edits: Sequence[Edit], names: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """A function of `file` that is defined inside another function, with `names` for the variables of the other."""
        path = self.folder / file
        tree = ast.parse(self._changed(edits, path.read_text()))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        scope = dict(names)
        exec(compile(ast.Module(found, []), str(path), "exec", dont_inherit=True), scope)
        return scope[name]

    def part(
        self, part: Lines, edits: Sequence[Edit], names: Mapping[str, Any]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """A function that runs these lines of a file with `names` and given variables, and returns all variables."""
        path = self.folder / part.file
        source = self._changed(edits, path.read_text()).splitlines()
        first, stop = part.found(source)
        lines = "\n" * first + textwrap.dedent("\n".join(source[first:stop]))  # with their numbers in the file
        code = compile(lines, str(path), "exec", dont_inherit=True)

        def run(variables: Mapping[str, Any]) -> dict[str, Any]:
            scope = {**names, **variables}
            exec(code, scope)
            return scope

        return run

    def _changed(self, edits: Sequence[Edit], source: str) -> str:
        lines = source.splitlines()
        for edit in edits:
            lines = edit.applied(lines)
        return self._with_texts("\n".join(lines) + "\n")

    def lines_of(self, edit: Lines) -> tuple[int, int]:
        """First and last of the lines, counted from 1."""
        first, stop = edit.found((self.folder / edit.file).read_text().splitlines())
        return first + 1, stop


def _with_numbers(value: Any) -> Any:
    """Convert strings that are numbers, because YAML 1.1 reads 3e-4 as a string."""
    if isinstance(value, dict):
        return {name: _with_numbers(entry) for name, entry in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
