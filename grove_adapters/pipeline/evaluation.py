"""What an evaluation found out, in one object: it becomes a table, a page, figures and one JSON file."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from grove_adapters import _checks, _io, html
from grove_adapters.errors import UnreadableError
from grove_adapters.html import TITLE, Example, Gallery, KnownTruth
from grove_adapters.pipeline.tables import markdown_table, text_table

if TYPE_CHECKING:
    from grove_adapters.calibration import CalibrationReport, Score

SCHEMA = 1

TABLE = {
    "recall": "R@1",
    "spearman": "S",
    "r2": "R²",
    "neg_s_r2": "−S·R²",
    "auroc": "AUROC",
    "ece": "ECE",
    "known": "ρ known",
}
"""Columns of the text table: score → heading."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """Calibration reports with what belongs beside them; everything a table or a page shows, and one JSON file.

    Attributes:
        reports: One for each adapter and direction.
        labels: A name for each report, default its adapter; equal for the directions of one adapter.
        known: Known ambiguities beside the predicted uncertainties, under the same labels.
        galleries: Examples to look at.
        facts: Further provenance for the heading, by name.
    """

    reports: Sequence[CalibrationReport]
    labels: Sequence[str] = ()
    known: Sequence[KnownTruth] = ()
    galleries: Sequence[Gallery] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels = tuple(self.labels) or tuple(report.adapter or "report" for report in self.reports)
        _checks.same_rows(len(self.reports), len(labels), what="labels of an evaluation")
        object.__setattr__(self, "labels", labels)

    @classmethod
    def join(cls, parts: Iterable[Evaluation], *, names: Sequence[str] = ()) -> Self:
        """Several evaluations as one; labels that collide are told apart by the names of their parts.

        Args:
            parts: The evaluations, in the order of rows.
            names: One for each part; default their numbers from 1.
        """
        parts = list(parts)
        names = list(names) or [str(number) for number in range(1, len(parts) + 1)]
        owners: dict[str, set[str]] = {}
        for part, name in zip(parts, names, strict=True):
            for label in part.labels:
                owners.setdefault(label, set()).add(name)
        distinct = [
            {label: label if len(owners[label]) == 1 else f"{label} ({name})" for label in part.labels}
            for part, name in zip(parts, names, strict=True)
        ]
        joined = list(zip(parts, distinct, strict=True))
        return cls(
            reports=[report for part in parts for report in part.reports],
            labels=[new[label] for part, new in joined for label in part.labels],
            known=[
                dataclasses.replace(item, adapter=new.get(item.adapter, item.adapter))
                for part, new in joined
                for item in part.known
            ],
            galleries=[gallery for part in parts for gallery in part.galleries],
            facts={name: fact for part in parts for name, fact in part.facts.items()},
        )

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a report: `CalibrationReport.row` with the label, and ``known`` where it is known."""
        rows = []
        for label, report in zip(self.labels, self.reports, strict=True):
            row = {**report.row(), "adapter": label}
            truth = self._known(label, report.direction)
            if truth is not None:
                row |= {"known": truth.value, "known_low": truth.low, "known_high": truth.high}
            rows.append(row)
        return rows

    def table(self, *, markdown: bool = False) -> str:
        """The comparison as text: one block a direction, one row an adapter, each value with its interval.

        Scores that are undefined for every adapter have no column.
        """
        draw = markdown_table if markdown else text_table
        blocks = []
        for direction in dict.fromkeys(report.direction for report in self.reports):
            rows = [
                (label, self._scores(label, report))
                for label, report in zip(self.labels, self.reports, strict=True)
                if report.direction == direction
            ]
            defined = {name for _, scores in rows for name, score in scores.items() if not math.isnan(score.value)}
            columns = {name: heading for name, heading in TABLE.items() if name in defined}
            cells = [(label, [scores.get(name) for name in columns]) for label, scores in rows]
            blocks.append(draw(self._title(direction), ["adapter", *columns.values()], cells))
        return "\n\n".join(blocks)

    def page(self, *, title: str = TITLE) -> str:
        """The self-contained HTML page."""
        return html.report_page(
            self.reports,
            labels=self.labels,
            title=title,
            known=self.known,
            galleries=self.galleries,
            facts=self.facts,
        )

    def write_page(self, path: str | Path, *, title: str = TITLE) -> Path:
        """Write `page` to a file.

        Raises:
            StoreError: The file cannot be written.
        """
        _io.write_text(path, self.page(title=title))
        return Path(path)

    def write_plots(self, folder: str | Path) -> list[Path]:
        """Write every figure as a PNG fit for print.

        Raises:
            StoreError: A file cannot be written.
        """
        paths = []
        for figure in html.draw(self.reports, self.labels, self.known):
            path = Path(folder) / f"{figure.name}.png"
            with _io.written_whole(path) as partial:
                figure.canvas.savefig(partial, format="png", dpi=200)
            paths.append(path)
        return paths

    def save(self, path: str | Path) -> Path:
        """Write one JSON file that `load` reads back.

        Raises:
            StoreError: The file cannot be written.
        """
        content = {
            "schema": SCHEMA,
            "facts": self.facts,
            "labels": self.labels,
            "reports": [json.loads(report.to_json()) for report in self.reports],
            "known": [dataclasses.asdict(item) for item in self.known],
            "galleries": [_gallery_to_json(gallery) for gallery in self.galleries],
        }
        _io.write_json(path, content)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` or `CalibrationReport.save` wrote.

        Raises:
            UnreadableError: The file is missing or neither of the two.
        """
        from grove_adapters.calibration import CalibrationReport, Score

        content = _io.read_json(path)
        if "levels" in content:  # a single report
            return cls(reports=[CalibrationReport.load(path)])
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']!r}")
            return cls(
                reports=[CalibrationReport.from_json(json.dumps(report)) for report in content["reports"]],
                labels=content["labels"],
                known=[_known_from_json(item, Score) for item in content["known"]],
                galleries=[_gallery_from_json(gallery) for gallery in content["galleries"]],
                facts=content["facts"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableError(
                f"expected calibration reports of schema {SCHEMA} in {path}, got something else ({error}); "
                "write the file with grove-adapters evaluate or demo"
            ) from error

    def _known(self, label: str, direction: str) -> Score | None:
        found = [item.score for item in self.known if (item.adapter, item.direction) == (label, direction)]
        return found[0] if found else None

    def _title(self, direction: str) -> str:
        report = next(report for report in self.reports if report.direction == direction)
        gallery = report.provenance.get("n_gallery")
        return f"{html.direction_title(report)}: {report.n_queries:,} queries" + (
            f", gallery of {gallery:,}" if gallery else ""
        )

    def _scores(self, label: str, report: CalibrationReport) -> dict[str, Score]:
        truth = self._known(label, report.direction)
        return {**report.scores, **({} if truth is None else {"known": truth})}


def _gallery_to_json(gallery: Gallery) -> dict[str, Any]:
    content = dataclasses.asdict(gallery)
    for example in content["examples"]:
        example["image"] = None if example["image"] is None else base64.b64encode(example["image"]).decode()
    return content


def _gallery_from_json(content: Mapping[str, Any]) -> Gallery:
    examples = [
        Example(**{**example, "image": None if example["image"] is None else base64.b64decode(example["image"])})
        for example in content["examples"]
    ]
    return Gallery(**{**content, "examples": examples})


def _known_from_json(content: Mapping[str, Any], score: type[Score]) -> KnownTruth:
    numbers = {name: math.nan if value is None else value for name, value in content["score"].items()}
    arrays = {name: np.array(content[name], dtype=float) for name in ("truth", "uncertainty")}
    return KnownTruth(**{**content, **arrays, "score": score(**numbers)})
