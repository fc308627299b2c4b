"""Files that say which captions truly match which images, beyond the pairs a data set was made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from grove_adapters import _checks, _io
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.tasks.reading import rows_by_id
from grove_adapters.tasks.truth import Direction


def read_matches(
    path: str | Path,
    *,
    images: Sequence[str] | np.ndarray,
    texts: Sequence[str] | np.ndarray,
    direction: Direction,
    missing: Literal["raise", "drop"] = "raise",
) -> np.ndarray:
    """True matches from a file of ECCV Caption, Crisscrossed Captions (CxC) or one in their form.

    Such a file is made for one direction: ECCV Caption's judges looked at other pairs for captions than for images.
    Give what is read as the ``links`` of `tasks.retrieve` in that direction, with ``unmatched="drop"`` because only
    some queries were judged, and ``ranking=True`` for mAP@R and R-Precision::

        links = read_matches("eccv_caption_to_image.json", images=images.ids, texts=texts.ids, direction="t2i")
        retrieve(images, texts, links=links, direction="t2i", unmatched="drop", ranking=True)

    Args:
        path: JSON, query id → list of the ids of its true matches.
        images: (N,) ids of the images; of COCO's files, its own image ids as text.
        texts: (T,) ids of the texts; of COCO's files, its own caption ids as text.
        direction: ``"i2t"`` for a file whose queries are images, ``"t2i"`` for one whose queries are captions.
        missing: Ids of the file that are not among the given ones: ``"raise"``, or ``"drop"`` their matches, as for
            a part of the data. ECCV Caption's file for images names two captions outside the 25,000 of the test split.

    Returns:
        (M, 2) distinct int64 rows (image, text), sorted.

    Raises:
        UnreadableError: The file is missing or has another structure.
        InputError: Unknown ids, or no match left without them.

    Source: the published files of ECCV Caption (Chun et al. 2022), which come with those of CxC (Parekh et al. 2021).
    """
    _checks.choice(direction, ("i2t", "t2i"), what="direction")
    _checks.choice(missing, ("raise", "drop"), what="missing")
    content = _io.read_json(path)
    if not all(isinstance(found, list) for found in content.values()):
        raise UnreadableError(
            f"expected a JSON object of query id → list of ids in {path}, got another structure; check the file"
        )
    asked = np.repeat(np.array(list(content), dtype=np.str_), [len(found) for found in content.values()])
    found = np.array([str(item) for items in content.values() for item in items], dtype=np.str_)
    sides = (asked, found) if direction == "i2t" else (found, asked)
    columns, known = [], np.ones(len(asked), dtype=bool)
    for name, ids, given in (("images", sides[0], images), ("texts", sides[1], texts)):
        rows, there = rows_by_id(np.asarray(given), ids)
        if missing == "raise" and not there.all():
            raise InputError(
                f"{path} expected {name} of its ids, got none for {len(np.unique(ids[~there]))} of "
                f"{len(np.unique(ids))} (first: {str(ids[~there][0])!r}); pass missing='drop' if yours are a part"
            )
        columns.append(rows)
        known &= there
    if not known.any():
        raise InputError(
            f"{path} expected ids such as {str(sides[0][0]) if len(asked) else 'none'!r} among the images, got none "
            "that match; check the direction and which ids the store was made with"
        )
    return np.unique(np.stack(columns, 1)[known], axis=0)
