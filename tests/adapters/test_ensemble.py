import json

import pytest
import torch

from grove_adapters.adapters import create_adapter, load_adapter
from grove_adapters.adapters.ensemble import Ensemble, EnsembleConfig
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import ConfigError, InputError, InputTypeError, UnknownNameError

PAIRS = make_pairs(60, dim=8).pairs
FEW = PAIRS.images.take(range(10))
SMALL = {"learning_rate": 1e-3, "hidden": 8, "epochs": 2, "batch_size": 32}


def member(name="pfe", **settings):
    return create_adapter(name, **({} if name in ("ttda", "deterministic") else SMALL), **settings)


def test_the_moments_are_those_of_the_mixture():
    ensemble = Ensemble([member("pfe"), member("pcmepp"), member("prolip", means="frozen")]).fit(PAIRS)
    posterior = ensemble.predict(FEW)
    parts = []
    for inner, module in zip(ensemble.members_, ensemble.module_.members, strict=True):
        inner.dim_, inner.source_, inner.fit_report_ = ensemble.dim_, ensemble.source_, ensemble.fit_report_
        inner.module_ = module
        parts.append(inner.predict(FEW))
    samples = torch.cat([part.sample(20_000, seed=k) for k, part in enumerate(parts)], 1)
    torch.testing.assert_close(posterior.mean, samples.mean(1), atol=0.02, rtol=0)
    torch.testing.assert_close(posterior.variance, samples.var(1), rtol=0.05, atol=0)
    torch.testing.assert_close(posterior.aleatoric, torch.stack([part.variance for part in parts]).mean(0))
    torch.testing.assert_close(posterior.uncertainty, posterior.variance.mean(1))


def test_equal_members_differ_by_their_seeds_only():
    ensemble = Ensemble([member(), member()]).fit(PAIRS, seed=3)
    one, two = ensemble.module_.members
    assert not torch.equal(one.image.mlp[0].weight, two.image.mlp[0].weight)
    again = Ensemble([member(), member()]).fit(PAIRS, seed=3)
    assert torch.equal(again.module_.members[1].image.mlp[0].weight, two.image.mlp[0].weight)


def test_uncertainties_of_their_own_are_averaged_in_deviations():
    pfe = create_adapter("pfe", **{**SMALL, "epochs": 20, "learning_rate": 0.01})
    ensemble = Ensemble([pfe, member("deterministic")]).fit(PAIRS)
    posterior = ensemble.predict(PAIRS.texts)
    alone = member("deterministic").fit(PAIRS, seed=ensemble.fit_report_.facts["parts"]["member-1"]["seed"])
    distance = alone.predict(PAIRS.texts).uncertainty
    distance = (distance - distance.mean()) / distance.std(correction=0)
    variance = 2 * posterior.uncertainty - distance
    assert float(posterior.uncertainty.mean()) == pytest.approx(0, abs=1e-4)
    assert float(variance.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_members_may_need_views():
    ensemble = Ensemble([member("ttda"), member("pfe")])
    assert ensemble.needs_views
    assert ensemble.fit(PAIRS).predict(PAIRS.images).variance.shape == (60, 8)
    with pytest.raises(InputError, match="views=10"):
        ensemble.fit(make_pairs(30, dim=8, views=0).pairs)


def test_an_ensemble_of_ensembles_is_saved_in_one_folder(tmp_path):
    ensemble = Ensemble([Ensemble([member(), member("deterministic")]), member("pcme")])
    folder = ensemble.fit(PAIRS).save(tmp_path / "nested")
    assert sorted(path.name for path in folder.iterdir()) == ["adapter.json", "fit_report.json", "weights.safetensors"]
    names = [m["adapter"] for m in json.loads((folder / "adapter.json").read_text())["config"]["members"]]
    assert names == ["ensemble", "pcme"]
    again = load_adapter(folder)
    assert torch.equal(again.predict(PAIRS.texts).uncertainty, ensemble.predict(PAIRS.texts).uncertainty)
    assert again.config == ensemble.config


def test_the_report_holds_the_reports_of_the_members():
    report = Ensemble([member("pcme"), member("prolip")]).fit(make_pairs(60, dim=8, views=0).pairs).fit_report_
    parts = report.facts["parts"]
    assert [part["adapter"] for part in parts.values()] == ["pcme", "prolip"]
    assert len(parts["member-0"]["history"]) == 2
    assert any("member-1 (prolip)" in warning for warning in report.warnings)
    assert json.dumps(report.to_dict())


def test_an_interrupted_ensemble_goes_on(tmp_path, monkeypatch):
    from grove_adapters.adapters.variance_heads import Links

    whole = Ensemble([member(), member()]).fit(PAIRS, seed=2).predict(PAIRS.images)
    read, calls = Links.batch, 0

    def dies(self, rows):
        nonlocal calls
        calls += 1
        if calls == 9:  # in the second member
            raise KeyboardInterrupt
        return read(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Links, "batch", dies)
        with pytest.raises(KeyboardInterrupt):
            Ensemble([member(), member()]).fit(PAIRS, seed=2, checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit" / "member-0").is_dir()
    resumed = Ensemble([member(), member()]).fit(PAIRS, seed=2, checkpoint=tmp_path / "fit")
    assert torch.equal(resumed.predict(PAIRS.images).variance, whole.variance)
    assert not (tmp_path / "fit").exists()


def test_the_default_is_five_seeds_of_pfe():
    assert [member["adapter"] for member in EnsembleConfig().members] == ["pfe"] * 5
    assert create_adapter("ensemble", members=[member(), member("pcme")]).members_[1].name == "pcme"


def test_what_is_no_ensemble_is_refused():
    with pytest.raises(ConfigError, match="at least two"):
        Ensemble([member()])
    with pytest.raises(InputTypeError, match="create_adapter"):
        Ensemble(["pfe", "pcme"])
    with pytest.raises(ConfigError, match="wrap adapters"):
        Ensemble(members=[{"name": "pfe"}, {"name": "pcme"}])
    with pytest.raises(UnknownNameError, match="did you mean 'pfe'"):
        Ensemble(members=[{"adapter": "pef"}, {"adapter": "pfe"}])
    with pytest.raises(ConfigError, match="hiden"):
        Ensemble(members=[{"adapter": "pfe", "config": {"hiden": 3}}, {"adapter": "pfe"}])
