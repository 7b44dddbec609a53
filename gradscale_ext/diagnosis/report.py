"""Findings of a diagnosis, their remedies, and how they are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .._table import fitted, html_table, table
from .lines import Location

Code = Literal[
    "disconnected", "detached", "no_grad", "integer_dtype", "zero_derivative", "all_zero", "vanishing", "nonfinite",
    "frozen", "not_in_optimizer", "non_leaf", "unused",
]  # fmt: skip

_REMEDIES: dict[Code, str] = {
    "disconnected": "add what the parameter computes to the loss, or leave the parameter out of the model",
    "detached": "leave the call out where a gradient is wanted; turn tensors into numbers only for logs",
    "no_grad": "call it where gradients are on; a reentrant checkpoint whose inputs need no gradient turns them off "
    "too: pass use_reentrant=False",
    "integer_dtype": "keep the path in floating point: soft targets or probabilities in place of indices, "
    "torch.where or a product in place of a mask alone, Gumbel-softmax for a choice",
    "zero_derivative": "pass the gradient straight through, x + (f(x) - x).detach(), or use a smooth function",
    "all_zero": "look at what the operation was given: dead ReLUs, a mask or weight that is all zeros, a clamp that is "
    "always at its bound, targets that are met exactly",
    "vanishing": "keep activations where the function is not flat (normalisation, initialisation, smaller learning "
    "rate, logits in place of probabilities), add skip connections, compute in a wider dtype",
    "nonfinite": "keep operands inside the domain (clamp before log, sqrt and division; add an eps; mask before the "
    "operation and not after it), lower the loss scale or the learning rate",
    "frozen": "requires_grad_(True) before the optimizer is made, if it is to be trained; else leave it out of the "
    "optimizer",
    "not_in_optimizer": "give it to the optimizer (add_param_group); a tensor has to be an nn.Parameter, and a list of "
    "them an nn.ParameterList or nn.ModuleList, to be among model.parameters()",
    "non_leaf": "make the nn.Parameter last, of the finished values: nn.Parameter(0.1 * torch.randn(3)), "
    "nn.Parameter(w.to(device))",
    "unused": "call the module that it belongs to, or remove it; nothing for an expert that gets no data in one batch",
}


@dataclass(frozen=True)
class Finding:
    """One parameter, and why it is not trained, or is trained only by a part of the loss."""

    code: Code
    """The kind of fault, such as "detached"; the page on gradients has a section for each."""
    parameter: str
    """Name in the model; "loss" for a finding about the loss as a whole."""
    cause: str
    """What happened, in a sentence."""
    remedy: str
    """What to write instead."""
    location: str | None = None
    """File and line of the user's code, such as "train.py:12", where known."""
    source: str | None = None
    """Text of that line."""
    is_note: bool = False
    """True if the finding may be intended."""


class Report:
    """Findings, and how they are shown.

    `str()` is a table for logs, `repr()` a report cut to fit a screen, and `rich.print` shows a table for terminals.
    """

    findings: Sequence[Any]

    def _summary(self) -> str:
        """The first line."""
        raise NotImplementedError

    def _groups(self) -> Iterator[tuple[list[str], Any]]:
        """Names that have the same finding, and the finding. Without names, reports have no column for them."""
        for finding in self.findings:
            yield [], finding

    def _headers(self, remedy: bool) -> list[str]:
        named = ["parameter"] if any(names for names, _ in self._groups()) else []
        return ["code", *named, "cause", *(["what to do"] if remedy else []), "location"]

    def __str__(self) -> str:
        rows: list[list[str]] = []
        for names, finding in self._groups():
            place = [*filter(None, (finding.location, fitted(finding.source or "", columns=60)))]
            named = [shortened(names)] if names else []
            columns = [[_title(finding)], *named, textwrap.wrap(finding.cause, 60), place]
            height = max(map(len, columns))
            rows += [list(line) for line in zip(*(c + [""] * (height - len(c)) for c in columns), strict=True)]
        if not rows:
            return self._summary()
        remedies = {f"{finding.code}: {finding.remedy}": None for finding in self.findings}
        listing = "\n".join(textwrap.fill(remedy, 118, subsequent_indent="  ") for remedy in remedies)
        return f"{self._summary()}\n\n{table(self._headers(remedy=False), rows)}\n\nWhat to do:\n{listing}"

    def __repr__(self) -> str:
        """Each group of findings on a line, with its remedy below."""
        lines = [self._summary()]
        for names, finding in self._groups():
            place = f" at {finding.location}" if finding.location else ""
            named = f": {', '.join(shortened(names, 3))}" if names else ""
            lines += textwrap.wrap(f"{_title(finding)}{named}{place}: {finding.cause}", 100)
            lines += textwrap.wrap(finding.remedy, 96, initial_indent="    ", subsequent_indent="    ")
        return fitted("\n".join(lines))

    def _cells(self) -> Iterator[list[list[str]]]:
        """For tables with a column of remedies: a row for each finding, of cells that are lists of lines."""
        for names, finding in self._groups():
            place = [*filter(None, (finding.location, finding.source))]
            named = [shortened(names)] if names else []
            yield [[_title(finding)], *named, [finding.cause], [finding.remedy], place]

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        rows = [[", ".join(lines) for lines in (*cells[:-1], cells[-1][:1])] for cells in self._cells()]
        return html_table(self._summary(), self._headers(remedy=True), rows)

    def __rich__(self) -> Any:
        """The report as a table of rich."""
        import rich.table
        import rich.text

        shown = rich.table.Table(title=self._summary(), show_lines=True, title_justify="left")
        for header in self._headers(remedy=True):
            shown.add_column(header, overflow="fold")
        for cells in self._cells():
            shown.add_row(*(rich.text.Text("\n".join(lines)) for lines in cells))
        return shown


@dataclass(frozen=True, repr=False)
class GradientDiagnosis(Report):
    """What `diagnose_gradients` found.

    `str()` is a table for logs, `repr()` a report cut to fit a screen, and `rich.print` shows a table for terminals.
    """

    findings: list[Finding]
    """A finding for each parameter and cause."""
    num_parameters: int
    """Number of the model's parameters."""

    @property
    def ok(self) -> bool:
        """True if all findings are notes."""
        return all(finding.is_note for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        findings = [asdict(finding) for finding in self.findings]
        return {"ok": self.ok, "num_parameters": self.num_parameters, "findings": findings}

    def _summary(self) -> str:
        if not self.findings:
            return f"No findings: all {self.num_parameters} parameters get their gradients as they should."
        named = len({finding.parameter for finding in self.findings})
        what, tensors = "Notes" if self.ok else "Findings", "1 tensor" if named == 1 else f"{named} tensors"
        return f"{what} on {tensors}; the model has {self.num_parameters} parameters."

    def _groups(self) -> Iterator[tuple[list[str], Finding]]:
        """Parameters with the same code, cause, location and remedy, and the first of their findings."""
        groups: dict[tuple[Any, ...], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.code, finding.cause, finding.location, finding.remedy), []).append(finding)
        for group in groups.values():
            yield [finding.parameter for finding in group], group[0]


def _title(finding: Any) -> str:
    return f"{finding.code} (note)" if getattr(finding, "is_note", False) else str(finding.code)


def shortened(names: list[str], limit: int = 8) -> list[str]:
    """At most `limit` entries: the first names, and the number of the others."""
    return names if len(names) <= limit else [*names[: limit - 1], f"... and {len(names) - limit + 1} more"]


def finding_of(
    code: Code,
    parameter: str,
    cause: str,
    location: Location | None = None,
    *,
    remedy: str | None = None,
    is_note: bool = False,
) -> Finding:
    """A finding with the text of its line, and the remedy of its code unless another is given."""
    line, source = (None, None) if location is None else (str(location), location.source or None)
    return Finding(code, parameter, cause, remedy or _REMEDIES[code], line, source, is_note)
