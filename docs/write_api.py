"""Writes docs/api/: the API as plain Markdown, which can be read on a code host, where docs/api.md shows nothing.

docs/api.md says which names belong to a subject, and which members are public. Signatures and docstrings are read from
the sources of gradscale_ext, which is not imported.

python docs/write_api.py            # write
python docs/write_api.py --check    # fail if a page differs from the sources
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "gradscale_ext"
PAGES = DOCS / "api"
SECTIONS = {"Args": "Arguments", "Attributes": "Fields", "Returns": "Returns", "Raises": "Raises"}
RELATED = "Related names: "
Definition = ast.FunctionDef | ast.ClassDef


# ---- The sources -----------------------------------------------------------------------------------------------------


@functools.cache
def definitions(module: str) -> dict[str, Definition]:
    """The functions and classes of a module, such as "gradscale_ext.flow", by name."""
    tree = ast.parse(path_of(module).read_text())
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def path_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def modules() -> dict[str, str]:
    """The module of each name that gradscale_ext exports."""
    imports = [
        node for node in ast.parse(path_of("gradscale_ext").read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: f"gradscale_ext.{node.module}" for node in imports for alias in node.names}


def documentation(node: Definition) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"{node.name} has no docstring")
    return text


def decorators(node: Definition) -> set[str]:
    return {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}


def parameters(node: Definition) -> list[str]:
    """The parameters as they are written in a signature, without types."""
    if isinstance(node, ast.ClassDef):
        if "dataclass" in decorators(node):
            return of_dataclass(node)
        starts = [entry for entry in node.body if isinstance(entry, ast.FunctionDef) and entry.name == "__init__"]
        return without_self(parameters(starts[0])) if starts else []
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    written = [with_default(argument.arg, default) for argument, default in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        written.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg or arguments.kwonlyargs:
        written.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    written += [with_default(argument.arg, default) for argument, default in only]
    written += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    hidden = [re.search(r"without_parameter\('(\w+)'\)", ast.unparse(decorator)) for decorator in node.decorator_list]
    names = [found[1] for found in hidden if found]
    return [parameter for parameter in written if parameter.lstrip("*") not in names]


def with_default(name: str, default: ast.expr | None) -> str:
    if default is None:
        return name
    is_text = isinstance(default, ast.Constant) and isinstance(default.value, str)
    return f'{name}="{default.value}"' if is_text else f"{name}={ast.unparse(default).replace('e-0', 'e-')}"


def without_self(written: list[str]) -> list[str]:
    return written[2:] if written[1:2] == ["/"] else written[1:]


def of_dataclass(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass in the order of its constructor: positional fields, then keyword-only fields;
    the fields of its bases come first."""
    positional: list[str] = []
    keyword_only: list[str] = []

    def add(node: ast.ClassDef) -> None:
        for base in [base for base in node.bases if isinstance(base, ast.Name)]:
            files = [module for module in dict.fromkeys(modules().values()) if path_of(module).is_file()]
            found = [definitions(module)[base.id] for module in files if base.id in definitions(module)]
            if found:  # also a base that gradscale_ext does not export
                add(found[0])
        is_only = any("kw_only=True" in ast.unparse(decorator) for decorator in node.decorator_list)
        for entry in node.body:
            if isinstance(entry, ast.AnnAssign) and ast.unparse(entry.annotation) == "KW_ONLY":
                is_only = True
            elif isinstance(entry, ast.AnnAssign) and "ClassVar" not in ast.unparse(entry.annotation):
                (keyword_only if is_only else positional).append(with_default(entry.target.id, entry.value))

    add(node)
    return [*positional, "*", *keyword_only] if keyword_only else positional


# ---- docs/api.md -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """A function or class, as named by a directive."""

    name: str
    """With its module if gradscale_ext does not export it."""
    is_result: bool
    """True if users do not make objects of this class."""
    members: list[str] | None = None
    """Empty: all public members; None: none."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0] or modules()[self.name]

    @property
    def path(self) -> str:
        return self.name if self.name != self.short else f"gradscale_ext.{self.name}"

    @property
    def node(self) -> Definition:
        return definitions(self.module)[self.short]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass
class Subject:
    """A section of docs/api.md."""

    title: str
    parts: list[str | Entry] = field(default_factory=list)
    """Markdown, and entries."""

    @property
    def entries(self) -> list[Entry]:
        return [part for part in self.parts if isinstance(part, Entry)]

    @property
    def file(self) -> str:
        return re.sub(r"\W+", "_", self.title.lower()) + ".md"


def subjects() -> list[Subject]:
    found: list[Subject] = []
    for section in re.split(r"^## ", (DOCS / "api.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, rest = section.partition("\n")
        subject = Subject(title)
        for index, part in enumerate(re.split(r"```\{eval-rst\}\n(.*?)```", rest, flags=re.DOTALL)):
            if index % 2:
                subject.parts += directives(part)
            elif part.strip():
                subject.parts.append(re.sub(r"\]\((?!\w+:)", "](../", part.strip()))
        found.append(subject)
    return found


def directives(text: str) -> Iterator[Entry]:
    for name, call, options in re.findall(r"^\.\. auto\w+:: ([\w.]+)(\(\))?\n((?:   .*\n)*)", text, re.MULTILINE):
        members = re.search(r":members:(.*)", options)
        names = None if members is None else [name.strip() for name in members[1].split(",") if name.strip()]
        yield Entry(name, is_result=bool(call), members=names)


# ---- Docstrings as Markdown ------------------------------------------------------------------------------------------


def markdown(text: str, links: dict[str, str]) -> str:
    """A docstring, in the style of Google and with the marks of reStructuredText, as Markdown."""
    blocks: list[str] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith(">>> "):
            blocks.append(fenced("pycon", [line, *taken(lines, lambda line: line.strip() != "")]))
        elif line.endswith(":") and line[:-1] in SECTIONS:
            body = indented(lines)
            content = markdown(body, links) if line == "Returns:" else listed(body, links)
            blocks.append(f"**{SECTIONS[line[:-1]]}**\n\n{content}\n")
        elif line.endswith("::"):
            blocks.append(f"{inline(line[:-1], links)}\n\n{fenced('text', indented(lines).splitlines())}\n")
        elif re.fullmatch(r"=+  =+", line):
            rows = taken(lines, lambda line: not line.startswith("==="))
            del lines[0]
            width = line.index(" ")
            cells = [f"| {row[:width].strip()} | {inline(row[width:].strip(), links)} |" for row in rows]
            blocks.append("\n".join(["| | |", "| --- | --- |", *cells]))
        else:
            blocks.append(re.sub(r"^(\d+)\. ", r"\1\\. ", inline(line, links)))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(blocks)).strip("\n")


def indented(lines: list[str]) -> str:
    """Remove the first lines that are indented or empty."""
    found = taken(lines, lambda line: not line.strip() or line.startswith(" "))
    return textwrap.dedent("\n".join(found)).strip("\n")


def taken(lines: list[str], is_wanted: Callable[[str], bool]) -> list[str]:
    """Remove the first lines that are wanted."""
    found = []
    while lines and is_wanted(lines[0]):
        found.append(lines.pop(0))
    return found


def fenced(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def listed(text: str, links: dict[str, str]) -> str:
    """Entries such as "name: text", whose further lines are indented, as a list."""
    entries = re.split(r"\n(?=\S)", text)
    return "\n".join(item(*entry.split(": ", 1), links) for entry in entries)


def item(name: str, text: str, links: dict[str, str]) -> str:
    first, _, rest = text.partition("\n")
    return textwrap.indent(markdown(f"{first}\n{textwrap.dedent(rest)}", links), "  ").replace("  ", f"- `{name}`: ", 1)


def inline(line: str, links: dict[str, str]) -> str:
    """Names of the API become links, and double backticks single ones."""

    def linked(found: re.Match[str]) -> str:
        return f"[{found[0]}]({links[found[1]]})" if found[1] in links else found[0]

    parts = re.split(r"(``.+?``)", line)
    return "".join(
        part[1:-1] if index % 2 else re.sub(r"`([\w.]+)(?:\(\))?`", linked, part) for index, part in enumerate(parts)
    )


# ---- Pages -----------------------------------------------------------------------------------------------------------


def heading(node: Definition) -> str:
    """Classes are named as such, because code hosts give `vtrace` and `VTrace` the same anchor."""
    return f"class `{node.name}`" if isinstance(node, ast.ClassDef) else f"`{node.name}`"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def signature(name: str, written: list[str]) -> str:
    line = f"{name}({', '.join(written)})"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in written) + ")"
    return fenced("py", [line])


def members(entry: Entry) -> tuple[list[tuple[str, str]], list[ast.FunctionDef]]:
    """Fields and properties, with their docstrings, and methods."""
    node = entry.node
    assert isinstance(node, ast.ClassDef)
    fields: list[tuple[str, str]] = []
    methods: list[ast.FunctionDef] = []
    for index, part in enumerate(node.body):
        name = part.target.id if isinstance(part, ast.AnnAssign) else getattr(part, "name", "_")
        if entry.members is None or (name not in entry.members if entry.members else name.startswith("_")):
            continue
        if isinstance(part, ast.FunctionDef) and "property" not in decorators(part):
            methods.append(part)
        elif isinstance(part, ast.FunctionDef):
            fields.append((name, documentation(part)))
        else:
            following = node.body[index + 1]
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                raise SystemExit(f"{entry.name}: the field {name} has no docstring")
            fields.append((name, inspect.cleandoc(following.value.value)))
    return fields, methods


def written(entry: Entry, links: dict[str, str]) -> str:
    """The part of a page about one name."""
    source = path_of(entry.module).relative_to(DOCS.parent)
    name = f"gs.{entry.name}" if entry.name == entry.short else entry.name
    blocks = [f"## {heading(entry.node)}"]
    if not entry.is_result:
        blocks.append(signature(name, parameters(entry.node)))
    blocks.append(markdown(documentation(entry.node), links))
    fields, methods = members(entry) if isinstance(entry.node, ast.ClassDef) else ([], [])
    if fields:
        blocks.append("**Fields**\n\n" + "\n".join(item(name, text, links) for name, text in fields))
    for method in methods:
        called = f"{entry.short}.{method.name}"
        given = parameters(method)
        blocks += [
            f"### `{called}`",
            signature(called, given if "staticmethod" in decorators(method) else without_self(given)),
            markdown(documentation(method), links),
        ]
    return "\n\n".join([*blocks, f"[Source](../../{source})"])


def page(subject: Subject, links: dict[str, str]) -> str:
    here = {name: link.removeprefix(subject.file) for name, link in links.items()}
    parts = [part if isinstance(part, str) else written(part, here) for part in subject.parts]
    return "\n\n".join([f"# {subject.title}", "[All names](README.md)", *parts]) + "\n"


def index(found: list[Subject], links: dict[str, str]) -> str:
    blocks = [
        "# API",
        "Names are attributes of `gradscale_ext`, imported as `gs`. The examples run as tests.",
        "`docs/write_api.py` writes these pages from the docstrings; `make docs` builds a site with the same text.",
    ]
    for subject in found:
        if not subject.entries:
            blocks += [f"## {subject.title}", *subject.parts]
            continue
        named = {entry: f"[`{entry.short}`]({links[entry.short]})" for entry in subject.entries}
        blocks += [f"## [{subject.title}]({subject.file})", one_liners(named)]
    return "\n\n".join(blocks) + "\n"


def index_of_site() -> str:
    """The table of one-liners for docs/api.md, whose names link to their places on this page."""
    blocks = []
    for subject in [subject for subject in subjects() if subject.entries]:
        named = {entry: f"{{py:obj}}`{entry.short} <{entry.path}>`" for entry in subject.entries}
        blocks += [f"**[{subject.title}](#{anchor(subject.title)})**", one_liners(named)]
    return "\n\n".join(blocks)


def one_liners(named: dict[Entry, str]) -> str:
    """A table of entries: the link, then the first paragraph of the docstring and other words for the same."""
    rows = ["| name | |", "| --- | --- |"]
    for entry, link in named.items():
        paragraphs = [" ".join(paragraph.split()) for paragraph in documentation(entry.node).split("\n\n")]
        related = [paragraph for paragraph in paragraphs if paragraph.startswith(RELATED)]
        text = " ".join([paragraphs[0], *related]).replace(RELATED, "Related: ")
        escaped = inline(text, {}).replace("|", r"\|")
        rows.append(f"| {link} | {escaped} |")
    return "\n".join(rows)


def pages() -> dict[Path, str]:
    """The text of each page."""
    found = subjects()
    links: dict[str, str] = {}
    for subject in found:
        for entry in subject.entries:
            links[entry.short] = f"{subject.file}#{anchor(heading(entry.node))}"
            if isinstance(entry.node, ast.ClassDef):
                for method in members(entry)[1]:
                    name = f"{entry.short}.{method.name}"
                    links[name] = f"{subject.file}#{anchor(name)}"
    texts = {subject.file: page(subject, links) for subject in found if subject.entries}
    return {PAGES / name: text for name, text in {"README.md": index(found, links), **texts}.items()}


def main() -> int:
    texts = pages()
    existing = {path: path.read_text() for path in PAGES.glob("*")}
    if existing == texts:
        return 0
    if "--check" in sys.argv:
        print("docs/api/ differs from the docstrings; run `python docs/write_api.py`", file=sys.stderr)
        return 1
    PAGES.mkdir(exist_ok=True)
    for path in existing.keys() - texts.keys():
        path.unlink()
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
