"""Frozen embeddings with what must travel with them: ids, modality, and the model they came from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from grove_adapters import _checks
from grove_adapters.errors import InputError, InputTypeError

if TYPE_CHECKING:
    import scipy.sparse

Modality = Literal["image", "text"]
MODALITIES: tuple[Modality, Modality] = ("image", "text")
FEATURES_TOLERANCE = 0.05  # between unit vectors; half precision rounds to about .01, a wrong layer is off by about 1


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which frozen model, precision and preprocessing made a set of embeddings.

    Two sources are the same when their `fingerprint` is; everything that changes the numbers belongs here.

    Attributes:
        model: Architecture or repository name, e.g. ``"ViT-B-32"``.
        pretrained: Weights tag, checkpoint digest or ``"random"``; ``""`` where unknown.
        library: Who ran it: ``"open_clip"``, ``"transformers"`` or ``"arrays"`` for imported ones.
        preprocess: Image preprocessing and tokenizer, as text that changes whenever they do.
        precision: Arithmetic of the encoder, e.g. ``"fp32"`` or ``"amp_bf16"``.
        normalised: Whether vectors were L2-normalised.
        logit_scale: The model's multiplier of cosines (already exponentiated), or None where unknown.
        logit_bias: The model's added bias (SigLIP), or None where it has none.
    """

    model: str
    pretrained: str = ""
    library: str = "arrays"
    preprocess: str = ""
    precision: str = "fp32"
    normalised: bool = True
    logit_scale: float | None = None
    logit_bias: float | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every attribute, as 16 hexadecimal digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Every attribute and the fingerprint, as JSON types."""
        return {**dataclasses.asdict(self), "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Source:
        """Rebuild from `to_dict`; a stored fingerprint is recomputed, not believed."""
        names = {item.name for item in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in names})

    def difference(self, other: Source) -> str:
        """The attributes in which two sources differ, for error messages."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return ", ".join(f"{key} {mine[key]!r} ≠ {theirs[key]!r}" for key in mine if mine[key] != theirs[key])

    def __str__(self) -> str:
        return f"{self.model}/{self.pretrained}" if self.pretrained else self.model


class Rows:
    """Chosen rows of a larger array, read when asked for, so that a split of a memory map costs no memory."""

    def __init__(self, base: Any, index: np.ndarray) -> None:
        self._base = base
        self._index = index

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of chosen rows."""
        return (len(self._index), *self._base.shape[1:])

    @property
    def dtype(self) -> Any:
        """Element type of the underlying array."""
        return self._base.dtype

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self._base[self._index[rows]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._base[self._index], dtype=dtype)


def take_rows(array: Any, rows: np.ndarray) -> Any:
    """Rows of an array: a slice where they are consecutive, read lazily from a memory map, else copied."""
    if isinstance(array, Rows):
        return Rows(array._base, array._index[rows])
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return array[int(rows[0]) : int(rows[0]) + len(rows)]
    if isinstance(array, np.memmap):
        return Rows(array, rows)
    return array[torch.as_tensor(rows)] if isinstance(array, torch.Tensor) else array[rows]


def as_float32(block: Any, device: str | torch.device = "cpu") -> torch.Tensor:
    """A block of rows as a float32 tensor on `device`; never a view of the caller's memory."""
    if isinstance(block, torch.Tensor):
        return block.detach().to(device=device, dtype=torch.float32, copy=True)
    return torch.from_numpy(np.array(block, dtype=np.float32)).to(device)


@dataclass(frozen=True, eq=False)
class Projection:
    """The last linear layer of an encoder, g = W φ + b, which makes embeddings g of features φ.

    Attributes:
        weight: (D, F) float32 array W.
        bias: (D,) float32 array b, or None.

    Raises:
        InputError: Wrong shapes, NaN or infinity.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __post_init__(self) -> None:
        weight = as_float32(self.weight).numpy()
        if weight.ndim != 2 or 0 in weight.shape:
            raise InputError(f"projection expected a weight of shape (D, F), got {weight.shape}")
        _checks.finite(weight, what="weight of the projection")
        object.__setattr__(self, "weight", weight)
        if self.bias is not None:
            bias = as_float32(self.bias).numpy()
            if bias.shape != weight.shape[:1]:
                raise InputError(f"projection expected a bias of shape {weight.shape[:1]}, got {bias.shape}")
            _checks.finite(bias, what="bias of the projection")
            object.__setattr__(self, "bias", bias)

    @property
    def dim(self) -> int:
        """D, the width of the embeddings."""
        return int(self.weight.shape[0])

    @property
    def width(self) -> int:
        """F, the number of features that the layer reads."""
        return int(self.weight.shape[1])

    def apply(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D) embeddings W φ + b, not normalised, in the type and on the device of the features.

        Args:
            features: (B, F) φ; or (B, F + D), where the encoder adds something to the layer's output that goes past
                the layer (a residual connection), with what it adds in the last D columns.
        """
        bias = None if self.bias is None else torch.as_tensor(self.bias).to(features)
        return project(features, torch.as_tensor(self.weight).to(features), bias)


def project(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`Projection.apply` with a (D, F) weight and a (D,) bias as tensors."""
    width = weight.shape[1]
    output = features[:, :width] @ weight.T
    if bias is not None:
        output = output + bias
    return output + features[:, width:] if features.shape[1] > width else output


@dataclass(frozen=True, eq=False)
class Embeddings:
    """N frozen embeddings of one modality.

    Attributes:
        values: (N, D) array, memory map or tensor of any float type; never changed in place.
        ids: (N,) unique strings; results are joined by them.
        modality: ``"image"`` or ``"text"``.
        source: The model that made them.
        views: (N, K, D) embeddings of K seeded augmentations of each item, or None.
        features: (N, F) inputs φ of the encoder's last linear layer for the item itself (not for its views), or
            (N, F + D) as `Projection.apply` takes them, or None.
        projection: That layer; goes with `features`.

    Raises:
        InputError: Wrong shapes, NaN or infinite or all-zero rows, duplicate ids, or features that the projection
            does not map to the embeddings.
        InputTypeError: `values` is no floating-point array.
    """

    values: Any
    ids: np.ndarray = None  # type: ignore[assignment]
    modality: Modality = field(kw_only=True)
    source: Source = field(kw_only=True, default_factory=lambda: Source(model="unknown"))
    views: Any = field(kw_only=True, default=None)
    features: Any = field(kw_only=True, default=None)
    projection: Projection | None = field(kw_only=True, default=None)
    trusted: dataclasses.InitVar[bool] = field(kw_only=True, default=False)

    def __post_init__(self, trusted: bool) -> None:
        if trusted:  # an opened store or a subset was checked when it was made; reading it all again is not O(1)
            return
        what = f"{self.modality} embeddings"
        _checks.choice(self.modality, MODALITIES, what="modality")
        object.__setattr__(self, "values", _float_array(self.values, ndim=2, what=what))
        object.__setattr__(self, "ids", _checks.as_ids(self.ids, len(self.values), what=what))
        _checks.finite(self.values, what=what, ids=self.ids)
        _checks.nonzero_rows(self.values, what=what, ids=self.ids)
        if self.views is not None:
            views = _float_array(self.views, ndim=3, what=f"views of {what}")
            object.__setattr__(self, "views", views)
            _checks.same_rows(len(self.values), len(views), what=f"views of {what}")
            _checks.same_dim(self.dim, int(views.shape[-1]), what=f"views of {what}")
            _checks.finite(views, what=f"views of {what}", ids=self.ids)
        if self.features is not None or self.projection is not None:
            self._check_features(f"features of {what}")

    def _check_features(self, what: str) -> None:
        if self.features is None or self.projection is None:
            raise InputError(f"{what} expected features= and projection= together, got one of them; give both")
        features = _float_array(self.features, ndim=2, what=what)
        object.__setattr__(self, "features", features)
        _checks.same_rows(len(self.values), len(features), what=what)
        _checks.finite(features, what=what, ids=self.ids)
        projection = self.projection
        _checks.same_dim(self.dim, projection.dim, what=what, got_from=" from the projection")
        if features.shape[1] not in (projection.width, projection.width + projection.dim):
            raise InputError(
                f"{what} expected {projection.width} columns as the projection reads, or {projection.dim} more for "
                f"what is added to its output, got {features.shape[1]}; give the inputs of that very layer"
            )
        few = slice(0, min(len(self), 256))
        made, found = (
            torch.nn.functional.normalize(vectors, dim=1)
            for vectors in (projection.apply(as_float32(features[few])), as_float32(self.values[few]))
        )
        error = float((made - found).norm(dim=1).max())
        if error > FEATURES_TOLERANCE:
            raise InputError(
                f"{what} expected the projection to map them to the embeddings, got directions that differ by up to "
                f"{error:.2g}; check that weight is (D, F), that the bias is given, and that rows are in one order"
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dim(self) -> int:
        """D, the width of one embedding."""
        return int(self.values.shape[-1])

    @property
    def n_views(self) -> int:
        """K, the number of stored views of each item; 0 where there are none."""
        return 0 if self.views is None else int(self.views.shape[1])

    @property
    def n_features(self) -> int:
        """Columns of the stored features; 0 where there are none."""
        return 0 if self.features is None else int(self.features.shape[1])

    def rows(self, ids: Sequence[str] | np.ndarray) -> np.ndarray:
        """(n,) row numbers of the given ids, in their order.

        Raises:
            InputError: An id is not among these embeddings.
        """
        order = np.argsort(self.ids)
        wanted = np.asarray(ids)
        place = np.searchsorted(self.ids, wanted, sorter=order).clip(max=len(self) - 1)
        found = order[place]
        missing = np.asarray(self.ids)[found] != wanted
        if missing.any():
            raise InputError(
                f"{self.modality} embeddings have no id {str(wanted[missing.argmax()])!r}; "
                f"they hold {len(self)} ids such as {str(self.ids[0])!r}"
            )
        return found

    def take(self, rows: Sequence[int] | np.ndarray) -> Embeddings:
        """The given rows as embeddings of their own; rows of a memory map stay on disk."""
        rows = np.asarray(rows, dtype=np.int64)
        _checks.rows_in_range(rows, len(self), what=f"{self.modality} embeddings")
        return Embeddings(
            take_rows(self.values, rows),
            np.asarray(self.ids)[rows],
            modality=self.modality,
            source=self.source,
            views=None if self.views is None else take_rows(self.views, rows),
            features=None if self.features is None else take_rows(self.features, rows),
            projection=self.projection,
            trusted=True,
        )

    def batches(self, size: int, device: str | torch.device = "cpu") -> Iterator[torch.Tensor]:
        """Consecutive (≤ size, D) float32 tensors on `device`."""
        for start in range(0, len(self), _checks.count(size, what="batch size")):
            yield as_float32(self.values[start : start + size], device)

    def mean_over_views(self) -> Embeddings:
        """(N, D) means of the K views, L2-normalised where the source is; features are not taken along.

        Raises:
            InputError: There are no views.
        """
        if self.views is None:
            raise InputError(
                f"{self.modality} embeddings expected stored views, got none; extract them with views=K first"
            )
        means = np.concatenate(
            [as_float32(self.views[start : start + 4096]).mean(1).numpy() for start in range(0, len(self), 4096)]
        )
        if self.source.normalised:
            means /= np.linalg.norm(means, axis=-1, keepdims=True)
        return Embeddings(means, self.ids, modality=self.modality, source=self.source)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Images, texts, and which of them belong together.

    Attributes:
        images: The image embeddings, N rows.
        texts: The text embeddings, T rows.
        links: (P, 2) int rows (image row, text row) of the given pairs.
        classes: (N,) class labels of the images, or None.
        positives: (R, 2) int rows of further true matches beyond the links (many-to-many truth), or None.

    Raises:
        InputError: Links out of range, no links at all, classes of another length, swapped modalities, or images and
            texts of different width.
    """

    images: Embeddings
    texts: Embeddings
    links: np.ndarray
    classes: np.ndarray | None = None
    positives: np.ndarray | None = None

    def __post_init__(self) -> None:
        for part, modality in ((self.images, "image"), (self.texts, "text")):
            if part.modality != modality:
                raise InputError(f"pairs expected {modality} embeddings, got {part.modality} ones; swap the two")
        _checks.same_dim(self.images.dim, self.texts.dim, what="texts of pairs")
        object.__setattr__(self, "links", link_rows(self.links, len(self.images), len(self.texts), what="links"))
        if not len(self.links):
            raise InputError(
                "pairs expected at least one link, got none; check the split's name and that ids of images and "
                "captions agree"
            )
        if self.positives is not None:
            positives = link_rows(self.positives, len(self.images), len(self.texts), what="positives")
            object.__setattr__(self, "positives", positives)
        if self.classes is not None:
            object.__setattr__(self, "classes", np.asarray(self.classes))
            _checks.same_rows(len(self.images), len(self.classes), what="classes of pairs")

    def __len__(self) -> int:
        return len(self.links)

    @property
    def dim(self) -> int:
        """D, the width of the embeddings."""
        return self.images.dim

    @property
    def source(self) -> Source:
        """The source of the images; texts of a joint model share it."""
        return self.images.source

    def truth(self) -> scipy.sparse.csr_matrix:
        """(N, T) sparse boolean matrix of every true match: links and positives together."""
        return match_matrix(len(self.images), len(self.texts), self.links, self.positives)

    def read(
        self, rows: Sequence[int] | np.ndarray, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The image and text embeddings of the given links: two (B, D) float32 tensors on `device`."""
        links = self.links[np.asarray(rows, dtype=np.int64)]
        image, text = self.images.values[links[:, 0]], self.texts.values[links[:, 1]]
        return as_float32(image, device), as_float32(text, device)

    def take_images(self, rows: Sequence[int] | np.ndarray) -> Pairs:
        """The pairs of the given image rows, with their texts; the texts keep their order."""
        rows = np.asarray(rows, dtype=np.int64)
        links = self.links[np.isin(self.links[:, 0], rows)]
        if not len(links):
            raise InputError(f"expected images with captions, got {len(rows)} images without a link; choose others")
        text_rows = np.unique(links[:, 1])
        return Pairs(
            self.images.take(rows),
            self.texts.take(text_rows),
            _renumber(links, rows, text_rows, (len(self.images), len(self.texts))),
            None if self.classes is None else self.classes[rows],
            None
            if self.positives is None
            else _renumber(self.positives, rows, text_rows, (len(self.images), len(self.texts))),
        )

    def split(self, fraction: float, *, seed: int = 0, by: Literal["image", "class"] = "image") -> tuple[Pairs, Pairs]:
        """Two disjoint parts; all captions of an image, or all images of a class, stay on one side.

        Args:
            fraction: Share of the images (or classes) in the first part, strictly between 0 and 1.
            seed: Address of the shuffle.
            by: What must not be torn apart.

        Raises:
            InputError: A part would be empty, or classes are asked for and absent.
        """
        if not 0 < fraction < 1:
            raise InputError(f"split fraction expected between 0 and 1, got {fraction}")
        groups = self._groups(by)
        distinct = np.unique(groups)
        cut = round(fraction * len(distinct))
        if not 0 < cut < len(distinct):
            raise InputError(
                f"split of {len(distinct)} {by} groups at {fraction} expected two parts, got an empty one; "
                "use more data or another fraction"
            )
        order = np.random.default_rng(seed).permutation(distinct)
        first = np.isin(groups, order[:cut])
        return self.take_images(np.flatnonzero(first)), self.take_images(np.flatnonzero(~first))

    def folds(self, n: int, *, seed: int = 0, by: Literal["image", "class"] = "image") -> Iterator[tuple[Pairs, Pairs]]:
        """`n` (train, test) parts whose test sides are disjoint and together hold every image.

        Raises:
            InputError: There are fewer than `n` groups.
        """
        groups = self._groups(by)
        distinct = np.unique(groups)
        if len(distinct) < _checks.count(n, what="number of folds", at_least=2):
            raise InputError(f"{n} folds expected at least {n} {by} groups, got {len(distinct)}; use fewer folds")
        order = np.random.default_rng(seed).permutation(distinct)
        for part in np.array_split(order, n):
            held_out = np.isin(groups, part)
            yield self.take_images(np.flatnonzero(~held_out)), self.take_images(np.flatnonzero(held_out))

    def _groups(self, by: str) -> np.ndarray:
        _checks.choice(by, ("image", "class"), what="by")
        if by == "image":
            return np.arange(len(self.images))
        if self.classes is None:
            raise InputError("splitting by class expected classes, got pairs without; give classes or use by='image'")
        return self.classes


def link_rows(rows: Any, n_images: int, n_texts: int, *, what: str) -> np.ndarray:
    """`rows` as (P, 2) int64 (image row, text row).

    Raises:
        InputError: Another shape or type, or rows out of range.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] != 2 or (rows.size and rows.dtype.kind not in "iu"):
        raise InputError(
            f"{what} expected (P, 2) whole numbers (image row, text row), got shape {rows.shape} of {rows.dtype}"
        )
    rows = rows.astype(np.int64, copy=False)
    _checks.rows_in_range(rows[:, 0], n_images, what=f"image column of {what}")
    _checks.rows_in_range(rows[:, 1], n_texts, what=f"text column of {what}")
    return rows


def match_matrix(
    n_images: int, n_texts: int, links: np.ndarray, positives: np.ndarray | None = None
) -> scipy.sparse.csr_matrix:
    """(n_images, n_texts) sparse boolean matrix that is True where a row of `links` or `positives` says so."""
    import scipy.sparse

    rows = links if positives is None else np.concatenate([links, positives])
    matrix = scipy.sparse.coo_matrix((np.ones(len(rows), dtype=bool), (rows[:, 0], rows[:, 1])), (n_images, n_texts))
    return matrix.tocsr()


def _renumber(rows: np.ndarray, images: np.ndarray, texts: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    new_image, new_text = np.full(shape[0], -1), np.full(shape[1], -1)
    new_image[images], new_text[texts] = np.arange(len(images)), np.arange(len(texts))
    renumbered = np.stack([new_image[rows[:, 0]], new_text[rows[:, 1]]], 1)
    return renumbered[(renumbered >= 0).all(1)]


def _float_array(values: Any, *, ndim: int, what: str) -> Any:
    if not isinstance(values, np.ndarray | torch.Tensor | Rows):
        values = np.asarray(values)
    kind = values.dtype.is_floating_point if isinstance(values, torch.Tensor) else values.dtype.kind == "f"
    if not kind:
        raise InputTypeError(f"{what} expected floating-point numbers, got {values.dtype}; convert them first")
    if len(values.shape) != ndim or 0 in values.shape:
        shape = {2: "(N, D)", 3: "(N, K, D)"}[ndim]
        raise InputError(f"{what} expected a non-empty array of shape {shape}, got {tuple(values.shape)}")
    return values
