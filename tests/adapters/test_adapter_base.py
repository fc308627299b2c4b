import dataclasses
import json

import numpy as np
import pytest
import torch

from grove_adapters import _io
from grove_adapters.adapters import ADAPTERS, create_adapter, list_adapters, load_adapter
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.deterministic import Deterministic, DeterministicConfig
from grove_adapters.adapters.ttda import TTDA
from grove_adapters.datasets import synthetic
from grove_adapters.errors import (
    ConfigError,
    InputError,
    InputTypeError,
    NumericalError,
    SourceMismatchError,
    StoreError,
    UnknownNameError,
    UnreadableError,
)

PAIRS = synthetic.make_pairs(60, dim=8).pairs


@pytest.fixture
def saved(tmp_path):
    return create_adapter("deterministic").fit(PAIRS).save(tmp_path / "adapter")


def test_settings_and_config_exclude_each_other():
    assert Deterministic(DeterministicConfig(reference_size=3)).config.reference_size == 3
    assert repr(Deterministic(reference_size=3)) == "Deterministic(reference_size=3)"
    with pytest.raises(ConfigError, match="both"):
        Deterministic(DeterministicConfig(), reference_size=3)
    with pytest.raises(ConfigError, match="DeterministicConfig"):
        Deterministic(TTDA().config)


def test_unknown_adapters_and_settings_offer_the_nearest():
    assert {"deterministic", "grove", "ttda"} <= set(list_adapters())
    with pytest.raises(UnknownNameError, match="did you mean 'deterministic'"):
        create_adapter("determinstic")
    with pytest.raises(ConfigError, match="did you mean 'reference_size'"):
        create_adapter("deterministic", reference_sise=3)


def test_fit_and_predict_refuse_what_is_no_pairs_or_embeddings():
    with pytest.raises(InputTypeError, match="Pairs"):
        Deterministic().fit(PAIRS.images)
    with pytest.raises(InputTypeError, match="wrap arrays"):
        Deterministic().fit(PAIRS).predict(PAIRS.images.values)
    with pytest.raises(InputTypeError, match="validation"):
        Deterministic().fit(PAIRS, validation=3)
    with pytest.raises(InputError, match="batch_size"):
        Deterministic().fit(PAIRS).predict(PAIRS.images, batch_size=0)


def test_validation_must_come_from_the_same_model():
    with pytest.raises(SourceMismatchError, match="pretrained"):
        Deterministic().fit(PAIRS, validation=synthetic.make_pairs(20, dim=8, seed=1).pairs)
    with pytest.raises(InputError, match="8-d"):
        Deterministic().fit(PAIRS, validation=synthetic.make_pairs(20, dim=9).pairs)


def test_ttda_needs_views_and_says_how_to_get_them():
    plain = synthetic.make_pairs(20, dim=8, views=0).pairs
    with pytest.raises(InputError, match="views=10"):
        TTDA().fit(plain)
    with pytest.raises(InputError, match="views=10"):
        TTDA().fit(PAIRS).predict(plain.images)


def test_ttda_is_the_unbiased_variance_over_views():
    posterior = TTDA().fit(PAIRS).predict(PAIRS.texts)
    expected = np.var(PAIRS.texts.views, axis=1, ddof=1)
    np.testing.assert_allclose(posterior.variance, expected, rtol=1e-5)
    np.testing.assert_allclose(posterior.uncertainty, expected.mean(1), rtol=1e-5)


def test_deterministic_is_the_distance_to_the_nearest_of_the_other_modality():
    posterior = Deterministic().fit(PAIRS).predict(PAIRS.images)
    nearest = (PAIRS.images.values @ PAIRS.texts.values.T).max(1)
    np.testing.assert_allclose(posterior.uncertainty, 1 - nearest, atol=1e-5)
    np.testing.assert_allclose(posterior.variance.sum(1), 2 * (1 - nearest), atol=1e-5)
    assert posterior.gallery_aware
    small = Deterministic(reference_size=5).fit(PAIRS)
    assert small.module_.get_buffer("text").shape == (5, 8)


def test_a_failed_fit_keeps_the_first(saved):
    class Diverges(Deterministic):  # only here: adapters are final
        def _fit(self, pairs, validation, run: FitRun):
            module = super()._fit(pairs, validation, run)
            if run.seed == 1:
                module.get_buffer("text")[0, 0] = torch.nan
            return module

    adapter = Diverges().fit(PAIRS)
    before = adapter.predict(PAIRS.images).uncertainty
    with pytest.raises(NumericalError, match="'text'"):
        adapter.fit(PAIRS, seed=1)
    assert torch.equal(adapter.predict(PAIRS.images).uncertainty, before)


def test_an_author_needs_two_methods_only():
    @ADAPTERS.register("norms")
    class Norms(Adapter):
        name = "norms"

        def _fit(self, pairs, validation, run):
            return torch.nn.Module()

        def _predict(self, batch: Batch):
            return {"mean": batch.values, "variance": batch.values.square().sum(1, keepdim=True)}

    try:
        posterior = create_adapter("norms").fit(PAIRS).predict(PAIRS.texts)
        assert posterior.maker["adapter"] == "norms"
        torch.testing.assert_close(posterior.uncertainty, torch.ones(60))
    finally:
        ADAPTERS._registered.pop("norms")


def test_saving_replaces_an_adapter_but_nothing_else(saved, tmp_path):
    Deterministic(reference_size=2).fit(PAIRS).save(saved)
    assert load_adapter(saved).config.reference_size == 2
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(StoreError, match="choose another"):
        Deterministic().fit(PAIRS).save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "thesis"]


def test_a_failed_save_keeps_the_saved_one(saved, monkeypatch):
    def full(*_):
        raise StoreError("No space left")

    monkeypatch.setattr(_io, "write_json", full)
    with pytest.raises(StoreError):
        Deterministic(reference_size=2).fit(PAIRS).save(saved)
    assert load_adapter(saved).config.reference_size == 2048
    assert [path.name for path in saved.parent.iterdir()] == ["adapter"]


@pytest.mark.parametrize("name", ["adapter.json", "weights.safetensors", "fit_report.json"])
def test_missing_and_truncated_files_are_named(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UnreadableError, match=name):
        load_adapter(saved)
    (saved / name).unlink()
    with pytest.raises(UnreadableError, match=name):
        load_adapter(saved)


def test_edited_adapters_are_refused(saved):
    facts = json.loads((saved / "adapter.json").read_text())

    def edited(**change):
        (saved / "adapter.json").write_text(json.dumps({**facts, **change}))
        return saved

    with pytest.raises(UnreadableError, match="schema"):
        load_adapter(edited(schema=99))
    with pytest.raises(UnreadableError, match="name of an adapter"):
        load_adapter(edited(adapter=None))
    with pytest.raises(UnknownNameError, match="gone"):
        load_adapter(edited(adapter="gone"))
    with pytest.raises(UnreadableError, match="'ttda'"):
        TTDA.load(edited())
    with pytest.raises(UnreadableError, match="weights"):
        load_adapter(edited(facts={"image": 3, "text": 3}))
    with pytest.raises(ConfigError, match="no_such"):
        load_adapter(edited(config={"no_such": 1}))
    other = create_adapter("deterministic").fit(PAIRS, seed=3).save(saved.parent / "other")
    (edited() / "weights.safetensors").write_bytes((other / "weights.safetensors").read_bytes())
    if _io.sha256(other / "weights.safetensors") != facts["weights_sha256"]:
        with pytest.raises(UnreadableError, match="expected the weights"):
            load_adapter(saved)


def test_float64_and_read_only_values_are_left_alone():
    values = np.array(PAIRS.images.values, dtype=np.float64)
    values.flags.writeable = False
    images = dataclasses.replace(PAIRS.images, values=values)
    Deterministic().fit(dataclasses.replace(PAIRS, images=images)).predict(images)
