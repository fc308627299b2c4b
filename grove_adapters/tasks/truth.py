"""Who truly matches whom, seen from the side that asks."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from grove_adapters.embeddings import link_rows

Direction = Literal["i2t", "t2i"]


class Truth(NamedTuple):
    """The true matches between Q queries and G gallery items.

    Attributes:
        matches: (R, 2) distinct rows (query, gallery item), sorted.
        n_matches: (Q,) true matches of each query.
        partner: (Q,) first gallery row linked to each query, or the first of its further positives, or −1.
    """

    matches: np.ndarray
    n_matches: np.ndarray
    partner: np.ndarray

    @classmethod
    def of(
        cls, links: np.ndarray, positives: np.ndarray | None, direction: Direction, n_images: int, n_texts: int
    ) -> Truth:
        """From (P, 2) links and (R, 2) further positives, both rows (image, text).

        Raises:
            InputError: Rows out of range.
        """
        columns = [0, 1] if direction == "i2t" else [1, 0]
        n_queries = n_images if direction == "i2t" else n_texts
        given = np.unique(link_rows(links, n_images, n_texts, what="links")[:, columns], axis=0)
        matches = given
        if positives is not None:
            further = link_rows(positives, n_images, n_texts, what="positives")[:, columns]
            matches = np.unique(np.concatenate([given, further]), axis=0)
        partner = np.full(n_queries, -1)
        for rows in (matches, given):  # a link overrules a further positive
            partner[rows[::-1, 0]] = rows[::-1, 1]  # of several writes the last one stays, which is the lowest row
        return cls(matches, np.bincount(matches[:, 0], minlength=n_queries), partner)
