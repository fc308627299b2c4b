import pytest
import torch

from grove_adapters import objectives, seeding
from grove_adapters.adapters.pcmepp import PCMEPP, PCMEPPConfig, mixed
from grove_adapters.adapters.variance_heads import MatchingLogit
from grove_adapters.errors import ConfigError


def moments(seed):
    random = seeding.generator(seed)
    return torch.randn(5, 4, generator=random), torch.randn(5, 4, generator=random) - 2


def terms(**settings):
    adapter = PCMEPP(pseudo_weight=0.3, bottleneck_weight=0.2, **settings)
    result = adapter._terms(moments(0), moments(1), torch.eye(5), MatchingLogit(5.0, 5.0))
    return {name: float(value.detach()) for name, value in result.items()}


def test_both_weightings_are_made_of_the_same_terms():
    published, coded = terms(), terms(weighting="as_coded")
    match, pseudo, bottleneck = (published[name] for name in ("match", "pseudo_match", "bottleneck"))
    assert published["loss"] == pytest.approx(match + 0.3 * pseudo + 0.2 * bottleneck, rel=1e-5)
    assert coded["loss"] == pytest.approx(2 * match + 0.3 * 2 * pseudo + 0.2 * bottleneck, rel=1e-5)


def test_pseudo_positives_are_the_mean_of_both_directions():
    image, text = moments(0), moments(1)
    both = [
        objectives.csd_matching(*sides, scale=5.0, shift=5.0, labels=torch.eye(5), pseudo_positives=True)
        for sides in ((image, text), (text, image))
    ]
    assert terms()["pseudo_match"] == pytest.approx(float(sum(both)) / 2, rel=1e-5)


def test_smoothing_moves_every_label():
    image, text = moments(0), moments(1)
    labels = torch.eye(5) * 0.8 + 0.1
    expected = objectives.csd_matching(image, text, scale=5.0, shift=5.0, labels=labels)
    assert terms(smoothing=0.1)["match"] == pytest.approx(float(expected), rel=1e-5)


def test_mixing_blends_images_with_their_mirror_and_labels_alike():
    images = torch.nn.functional.normalize(torch.randn(200, 6, generator=seeding.generator(0)), dim=1)
    with seeding.local(0):
        blend, labels = mixed(images, torch.eye(200), 0.25)
    torch.testing.assert_close(labels.sum(1), torch.ones(200))
    weight = labels.diagonal()
    touched = weight < 1
    assert 0.1 < float(touched.float().mean()) < 0.4
    assert torch.equal(blend[~touched], images[~touched])
    torch.testing.assert_close(blend.norm(dim=1), torch.ones(200))
    straight = weight[:, None] * images + (1 - weight[:, None]) * images.flip(0)
    torch.testing.assert_close(blend, torch.nn.functional.normalize(straight, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(labels.flip(1).diagonal()[touched], 1 - weight[touched])


def test_nothing_is_mixed_on_request():
    images = torch.ones(4, 2)
    blend, labels = mixed(images, torch.eye(4), 0.0)
    assert torch.equal(blend, images)
    assert torch.equal(labels, torch.eye(4))


@pytest.mark.parametrize(
    "settings", [{"scale": 0.0}, {"pseudo_weight": -1.0}, {"mixed_share": 2.0}, {"smoothing": 0.5}]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PCMEPPConfig(**settings)
