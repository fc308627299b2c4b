"""The contracts as check-suites, for our own tests and for other people's adapters.

```python
import pytest
from grove_adapters import testing

@pytest.mark.parametrize("check", testing.adapter_checks("my_adapter"), ids=str)
def test_contract(check):
    check()
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from grove_adapters.adapters import ADAPTERS, Adapter, create_adapter, load_adapter
from grove_adapters.adapters.checkpoint import Checkpoint
from grove_adapters.datasets import synthetic
from grove_adapters.embeddings import MODALITIES, Embeddings, Pairs, Projection, Source
from grove_adapters.errors import ConfigError, InputError, NotFittedError, SourceMismatchError
from grove_adapters.posterior import ProbabilisticEmbedding

WEAKEST_RANKING = 0.3
"""Spearman correlation with the known noise that every adapter must reach in both modalities of the synthetic world."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One clause of the adapter contract, applied to one registered adapter; call it to run it.

    Attributes:
        adapter: Registered name.
        clause: What is checked, in a few words.
    """

    adapter: str
    clause: str
    _run: Callable[[str], None] = dataclasses.field(repr=False)

    def __call__(self) -> None:
        """Raise AssertionError where the adapter breaks the clause."""
        self._run(self.adapter)

    def __str__(self) -> str:
        return f"{self.adapter}-{self.clause}"


def adapter_checks(name: str) -> list[Check]:
    """Every clause of the adapter contract, for one registered adapter.

    Raises:
        UnknownNameError: No such adapter.
    """
    ADAPTERS.get(name)
    return [Check(name, clause, run) for clause, run in _CLAUSES.items()]


def posterior_checks(posterior: ProbabilisticEmbedding) -> None:
    """Raise AssertionError where an object breaks the posterior contract.

    Checks shapes, positivity, ids, that draws have the stated moments, that rows can be taken, and that saving and
    loading gives the same distributions.
    """
    n, dim = posterior.mean.shape
    assert posterior.variance.shape == (n, dim), "variance has the shape of the mean"
    assert bool((posterior.variance > 0).all()), "variance is positive"
    assert posterior.uncertainty.shape == (n,), "one uncertainty an item"
    assert bool(torch.isfinite(posterior.uncertainty).all()), "uncertainties are finite"
    assert len(set(posterior.ids.tolist())) == n, "ids are unique"
    if posterior.aleatoric is not None and posterior.epistemic is not None:
        torch.testing.assert_close(posterior.aleatoric + posterior.epistemic, posterior.variance, rtol=1e-3, atol=1e-9)
    draws = posterior.sample(2000, seed=0)
    assert draws.shape == (n, 2000, dim), "draws are (N, n, D)"
    error = (draws.mean(1) - posterior.mean) / posterior.std
    assert float(error.square().mean()) < 2 / 2000, "draws have the stated mean"
    assert torch.equal(draws, posterior.sample(2000, seed=0)), "equal seeds draw equal samples"
    assert posterior.log_prob(posterior.mean[:1]).shape == (n, 1), "log_prob is (N, G)"
    rows = [n - 1, 0] if n > 1 else [0]
    assert posterior.take(rows).ids.tolist() == [posterior.ids[row] for row in rows], "take keeps ids with rows"
    with tempfile.TemporaryDirectory() as folder:
        path = posterior.save(Path(folder) / "posterior.safetensors")
        again = ProbabilisticEmbedding.load(path)
    assert type(again) is type(posterior), "load gives the class that was saved"
    assert again.ids.tolist() == posterior.ids.tolist(), "load keeps ids"
    for name in ("mean", "variance", "uncertainty"):
        assert torch.equal(getattr(again, name), getattr(posterior, name)), f"load keeps {name}"


@functools.cache
def _world() -> synthetic.SyntheticWorld:
    return synthetic.make_pairs(400, seed=0)


@functools.cache
def _wide(dim: int, *, n: int = 30, width: int = 8, views: int = 2) -> Pairs:
    """Linked embeddings of many dimensions that are a linear layer of few features, with views."""
    random = np.random.default_rng(0)
    concepts = random.normal(size=(n, 1, width))
    sides = []
    for modality in MODALITIES:
        features = concepts + 0.3 * random.normal(size=(n, 1 + views, width))
        projection = Projection(random.normal(size=(dim, width)), np.zeros(dim))
        values = features @ projection.weight.T
        values = (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)
        sides.append(
            Embeddings(
                values[:, 0],
                modality=modality,
                source=Source(model="wide", logit_scale=20.0),
                views=values[:, 1:],
                features=features[:, 0].astype(np.float32),
                projection=projection,
            )
        )
    return Pairs(sides[0], sides[1], np.repeat(np.arange(n)[:, None], 2, 1))


def _fresh(name: str) -> Adapter:
    return create_adapter(name, **ADAPTERS.get(name).small_settings())


@functools.cache
def _fitted(name: str) -> Adapter:
    """One fit for all clauses that only read."""
    return _fresh(name).fit(_world().pairs, seed=0)


def _part(modality: str) -> Embeddings:
    return _world().pairs.images if modality == "image" else _world().pairs.texts


def _few(n: int = 60) -> Pairs:
    return _world().pairs.take_images(np.arange(n))


def _equal(one: ProbabilisticEmbedding, other: ProbabilisticEmbedding, *, rtol: float = 0, atol: float = 0) -> None:
    for name in ("mean", "variance", "uncertainty"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=atol)


def _with_values(embeddings: Embeddings, values: Any, **others: Any) -> Embeddings:
    return dataclasses.replace(embeddings, values=values, **others, trusted=True)


def _with_arrays(pairs: Pairs, change: Callable[[Any], np.ndarray]) -> Pairs:
    images, texts = (
        _with_values(part, change(part.values), views=change(part.views), features=change(part.features))
        for part in (pairs.images, pairs.texts)
    )
    return Pairs(images, texts, pairs.links)


def _ids_and_order_kept(name: str) -> None:
    for modality in ("image", "text"):
        part = _part(modality).take(np.random.default_rng(0).permutation(50))
        posterior = _fitted(name).predict(part)
        assert posterior.ids.tolist() == part.ids.tolist()
        assert posterior.modality == modality
        assert posterior.source == part.source
        assert posterior.maker["adapter"] == name


def _posterior_is_sound(name: str) -> None:
    for modality in ("image", "text"):
        posterior = _fitted(name).predict(_part(modality).take(np.arange(20)))
        assert posterior.mean.shape == (20, _part(modality).dim)
        posterior_checks(posterior)


def _fit_returns_self(name: str) -> None:
    adapter = _fresh(name)
    assert adapter.fit(_few()) is adapter
    assert adapter.fit_report_.n_pairs == 60
    assert adapter.dim_ == _few().dim


def _unfitted_names_the_next_call(name: str) -> None:
    for call in (lambda: _fresh(name).predict(_part("image")), lambda: _fresh(name).save("never-written")):
        error = _raised(NotFittedError, call)
        assert "fit" in str(error)
    assert not Path("never-written").exists()


def _wrong_dimension_refused(name: str) -> None:
    part = _part("image")
    narrow = _with_values(part, part.values[:, :-1], views=None if part.views is None else part.views[..., :-1])
    error = _raised(InputError, lambda: _fitted(name).predict(narrow))
    assert str(part.dim) in str(error)
    assert str(part.dim - 1) in str(error)


def _other_source_refused(name: str) -> None:
    part = _part("text")
    changes: dict[str, Any] = {"model": "another", "normalised": False, "precision": "fp16", "preprocess": "other"}
    for attribute, value in changes.items():
        source = dataclasses.replace(part.source, **{attribute: value})
        other = dataclasses.replace(part, source=source, trusted=True)
        error = _raised(SourceMismatchError, functools.partial(_fitted(name).predict, other))
        assert attribute in str(error)
    mixed = dataclasses.replace(_few(), texts=dataclasses.replace(_few().texts, source=other.source, trusted=True))
    _raised(SourceMismatchError, lambda: _fresh(name).fit(mixed))


def _same_seed_same_result(name: str) -> None:
    one, two = (_fresh(name).fit(_few(), seed=3).predict(_few().texts, seed=4) for _ in range(2))
    _equal(one, two)


def _global_random_state_untouched(name: str) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    _fresh(name).fit(_few()).predict(_few().images)
    assert states() == before


def _independent_of_batches_and_order(name: str) -> None:
    part = _part("image").take(np.arange(101))
    whole = _fitted(name).predict(part)
    _equal(_fitted(name).predict(part, batch_size=7), whole, rtol=1e-3, atol=1e-5)
    order = np.random.default_rng(1).permutation(101)
    _equal(_fitted(name).predict(part.take(order)), whole.take(order), rtol=1e-3, atol=1e-5)


def _refit_forgets(name: str) -> None:
    twice = _fresh(name).fit(synthetic.make_pairs(80, dim=16, seed=5).pairs).fit(_few(), seed=1)
    once = _fresh(name).fit(_few(), seed=1)
    _equal(twice.predict(_few().images), once.predict(_few().images))


def _saved_and_loaded_equal(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        adapter = _fitted(name)
        saved = adapter.save(Path(folder) / "adapter")
        names = {path.name for path in saved.iterdir()}
        assert names == {"adapter.json", "weights.safetensors", "fit_report.json"}, names
        again = load_adapter(saved)
        adapter.save(saved)  # an adapter may be replaced
        assert sorted(path.name for path in Path(folder).iterdir()) == ["adapter"], "nothing partial is left behind"
    assert type(again) is type(adapter)
    assert again.config == adapter.config
    assert again.fit_report_.to_dict() == adapter.fit_report_.to_dict()
    for modality in ("image", "text"):
        _equal(again.predict(_part(modality)), adapter.predict(_part(modality)))


def _read_only_memmap_works(name: str) -> None:
    pairs = _few()
    with tempfile.TemporaryDirectory() as folder:

        def mapped(array: Any) -> np.ndarray:
            path = Path(folder) / f"{len(list(Path(folder).iterdir()))}.npy"
            np.save(path, np.asarray(array))
            return np.load(path, mmap_mode="r")

        on_disk = _with_arrays(pairs, mapped)
        _equal(_fresh(name).fit(on_disk).predict(on_disk.images), _fresh(name).fit(pairs).predict(pairs.images))


def _inputs_unchanged(name: str) -> None:
    pairs = _few()
    before = {part: np.array(getattr(pairs, part).values) for part in ("images", "texts")}
    _fresh(name).fit(pairs).predict(pairs.images)
    for part, values in before.items():
        assert np.array_equal(values, getattr(pairs, part).values)


def _float16_gives_float32(name: str) -> None:
    halved = _with_arrays(_few(), lambda array: array.astype(np.float16))
    posterior = _fresh(name).fit(halved).predict(halved.texts)
    assert posterior.mean.dtype == posterior.variance.dtype == posterior.uncertainty.dtype == torch.float32


def _config_round_trip(name: str) -> None:
    config = _fresh(name).config
    assert type(config).from_json(config.to_json()) == config
    error = _raised(ConfigError, lambda: create_adapter(name, no_such_setting=1))
    assert "no_such_setting" in str(error)


def _planted_nan_is_found(name: str) -> None:
    pairs = _few()
    values = np.array(pairs.texts.values)
    values[17, 3] = np.nan
    planted = _with_values(pairs.texts, values)
    for call in (
        lambda: _fresh(name).fit(dataclasses.replace(pairs, texts=planted)),
        lambda: _fresh(name).fit(pairs).predict(planted),
    ):
        error = _raised(InputError, call)
        assert str(pairs.texts.ids[17]) in str(error)


def _ranks_known_noise(name: str) -> None:
    from scipy.stats import spearmanr

    world = synthetic.make_pairs(400, seed=0)
    for part, noise in ((world.pairs.images, world.image_noise), (world.pairs.texts, world.text_noise)):
        correlation = spearmanr(_fitted(name).predict(part).uncertainty.numpy(), noise).statistic
        assert correlation > WEAKEST_RANKING, f"Spearman {correlation:.2f} with the noise of {part.modality}s"


def _resumed_fit_is_the_undisturbed_one(name: str) -> None:
    undisturbed = _fresh(name).fit(_few(), seed=3)
    write, written = Checkpoint.write, 0

    def write_and_die(self: Checkpoint, *state: Any) -> None:
        nonlocal written
        write(self, *state)
        written += 1
        if written == 3:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "fit"
        with mock.patch.object(Checkpoint, "write", write_and_die), contextlib.suppress(KeyboardInterrupt):
            _fresh(name).fit(_few(), seed=3, checkpoint=kept)
        assert kept.exists() == (written == 3), "a fit leaves its state behind where it was interrupted, and only there"
        resumed = _fresh(name).fit(_few(), seed=3, checkpoint=kept)
        assert not kept.exists(), "a fit that has ended leaves no state behind"
    for modality in ("image", "text"):
        _equal(resumed.predict(_part(modality)), undisturbed.predict(_part(modality)))
    assert resumed.fit_report_.history == undisturbed.fit_report_.history
    assert resumed.fit_report_.best_epoch == undisturbed.fit_report_.best_epoch


def _classes_are_true_matches(name: str) -> None:
    """Pairs of one class in a minibatch are what pairs known as further matches are: no negatives."""
    pairs = _few()
    classes = np.arange(len(pairs.images)) // 3
    other = np.stack(np.nonzero(classes[:, None] == classes), 1)
    by_class = dataclasses.replace(pairs, classes=classes)
    by_list = dataclasses.replace(pairs, positives=other[other[:, 0] != other[:, 1]])
    one, two = (_fresh(name).fit(x, seed=1) for x in (by_class, by_list))
    for part in (pairs.images, pairs.texts):
        _equal(one.predict(part), two.predict(part))


def _sound_or_refused(name: str, pairs: Pairs) -> None:
    """Finite results with variances above 0, or one sentence that says what to change."""
    adapter = _fresh(name)
    with contextlib.suppress(InputError):
        adapter.fit(pairs)
    if not hasattr(adapter, "module_"):  # refused
        return
    for part in (pairs.images, pairs.texts):
        posterior = adapter.predict(part)
        assert posterior.mean.shape == (len(part), part.dim)
        assert bool(torch.isfinite(posterior.mean).all()), "means are finite"
        assert bool(torch.isfinite(posterior.variance).all()), "variances are finite"
        assert bool((posterior.variance > 0).all()), "variances are above 0"
        assert bool(torch.isfinite(posterior.uncertainty).all()), "uncertainties are finite"


def _constant_embeddings(name: str) -> None:
    _sound_or_refused(name, _with_arrays(_few(40), lambda array: np.repeat(np.asarray(array)[:1], 40, 0)))


def _one_class(name: str) -> None:
    _sound_or_refused(name, dataclasses.replace(_few(40), classes=np.zeros(40, dtype=np.int64)))


def _one_pair(name: str) -> None:
    _sound_or_refused(name, _few(1))


def _one_dimension(name: str) -> None:
    _sound_or_refused(name, synthetic.make_pairs(40, dim=1, seed=0).pairs)


def _many_dimensions(name: str) -> None:
    layers = ADAPTERS.get(name).needs_features  # what is learned of a whole layer takes minutes at 4096
    pairs = _wide(1024 if layers else 4096)
    posterior = _fresh(name).fit(pairs).predict(pairs.texts)
    assert posterior.mean.shape == (len(pairs.texts), pairs.dim)
    assert bool((torch.isfinite(posterior.variance) & (posterior.variance > 0)).all())


def _raised(kind: type[Exception], call: Callable[[], Any]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got no error")


_CLAUSES: dict[str, Callable[[str], None]] = {
    clause.__name__.strip("_").replace("_", "-"): clause
    for clause in (
        _ids_and_order_kept,
        _posterior_is_sound,
        _fit_returns_self,
        _unfitted_names_the_next_call,
        _wrong_dimension_refused,
        _other_source_refused,
        _same_seed_same_result,
        _global_random_state_untouched,
        _independent_of_batches_and_order,
        _refit_forgets,
        _saved_and_loaded_equal,
        _read_only_memmap_works,
        _inputs_unchanged,
        _float16_gives_float32,
        _config_round_trip,
        _planted_nan_is_found,
        _resumed_fit_is_the_undisturbed_one,
        _classes_are_true_matches,
        _constant_embeddings,
        _one_class,
        _one_pair,
        _one_dimension,
        _many_dimensions,
        _ranks_known_noise,
    )
}
