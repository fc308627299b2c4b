import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from grove_adapters.adapters.grove.gp import SparseGP
from grove_adapters.adapters.grove.mismatch import RIDGES, Mismatch, ridge


@pytest.fixture
def gp():
    gp = SparseGP(12, 2, 3, "image")
    with torch.no_grad():
        gp.inducing.copy_(torch.randn(12, 2, generator=torch.Generator().manual_seed(0)))
    return gp


def test_ridge_is_the_one_of_scikit_learn_with_the_smallest_leave_one_out_error():
    random = np.random.default_rng(0)
    features = random.normal(size=(40, 6))
    target = features[:, 0] - 2 * features[:, 1] + random.normal(size=40)
    found = ridge(torch.as_tensor(features), torch.as_tensor(target))
    unit = np.linalg.eigvalsh(np.cov(features.T, bias=True) * len(features)).mean()
    errors = {}
    for strength in RIDGES:
        # the centre of all rows stays when one is left out, as the shortcut has it up to 1 / R
        left = cross_val_predict(Ridge(alpha=strength * unit), features, target, cv=LeaveOneOut())
        errors[strength] = np.mean((left - target) ** 2)
    best = min(errors, key=errors.get)
    expected = Ridge(alpha=best * unit).fit(features, target)
    np.testing.assert_allclose(found.weights, expected.coef_, rtol=1e-6)
    assert found.error == pytest.approx(errors[best], rel=1e-6)


def test_a_known_surface_is_found_and_noise_is_not(gp):
    random = torch.Generator().manual_seed(1)
    latents = torch.randn(400, 2, generator=random, dtype=torch.float64)
    surface = torch.sin(latents[:, 0])
    noisy = (surface + 0.3 * torch.randn(400, generator=random, dtype=torch.float64)).exp()
    mismatch = Mismatch(12)
    mismatch.learn(gp, latents[:300], noisy[:300])
    found = mismatch(gp, latents[300:])
    assert float(torch.corrcoef(torch.stack([found, surface[300:]]))[0, 1]) > 0.9
    assert float((found - surface[300:]).abs().mean()) < 0.2
    standard = mismatch.standardised(mismatch(gp, latents[:300]))
    assert abs(float(standard.mean())) < 0.05
    assert float(standard.std()) == pytest.approx(1, abs=0.05)
    mismatch.learn(gp, latents[:300], torch.randn(300, generator=random, dtype=torch.float64).exp())
    assert float(mismatch.spread) < 0.2


def test_equal_distances_and_single_items_leave_a_level(gp):
    mismatch = Mismatch(12)
    for latents in (torch.zeros(1, 2), torch.randn(5, 2)):
        mismatch.learn(gp, latents.double(), torch.full((len(latents),), 0.5))
        found = mismatch(gp, torch.randn(3, 2, dtype=torch.float64))
        torch.testing.assert_close(found, torch.full_like(found, np.log(0.5)))
        assert mismatch.standardised(found).abs().max() < 1e-6
    mismatch.learn(gp, torch.randn(4, 2, dtype=torch.float64), torch.zeros(4))
    assert bool(torch.isfinite(mismatch(gp, torch.zeros(1, 2, dtype=torch.float64))).all())


def test_no_row_depends_on_the_others(gp):
    latents = torch.randn(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mismatch = Mismatch(12)
    mismatch.learn(gp, latents, latents.square().sum(1) + 0.1)
    whole = mismatch(gp, latents)
    assert torch.equal(mismatch(gp, latents[7:9]), whole[7:9])
