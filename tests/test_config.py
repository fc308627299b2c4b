import dataclasses
import json
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters.config import Config, nearest
from grove_adapters.errors import ConfigError, InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Config):
    epochs: int = 3
    rate: float = 0.1
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1, 2)
    span: tuple[float, float] = (0.0, 1.0)
    name: str | None = None
    limit: float | None = None
    anything: Any = None

    def check(self) -> None:
        self.require(self.epochs >= 1, "epochs", "a whole number ≥ 1")


@given(
    st.builds(
        Sample,
        epochs=st.integers(1, 99),
        rate=st.floats(allow_nan=False, allow_infinity=False),
        kind=st.sampled_from(["a", "b"]),
        sizes=st.lists(st.integers()).map(tuple),
        name=st.none() | st.text(),
        limit=st.none() | st.floats(0, 1),
    )
)
@settings(deadline=None)
def test_json_round_trip(config):
    assert Sample.from_json(config.to_json()) == config


def test_whole_numbers_are_accepted_where_floats_are_meant():
    assert isinstance(Sample(rate=1).rate, float)
    assert isinstance(Sample(limit=2).limit, float)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 1.5}, ["epochs", "int", "1.5"]),
        ({"epochs": True}, ["epochs", "True"]),
        ({"rate": "fast"}, ["rate", "float", "'fast'"]),
        ({"kind": "c"}, ["kind", "'a' or 'b'", "'c'"]),
        ({"sizes": (1, "x")}, ["sizes"]),
        ({"span": (1.0,)}, ["span"]),
        ({"name": 3}, ["name", "str or None"]),
        ({"epochs": 0}, ["epochs", "≥ 1", "got 0"]),
        ({"epoch": 1}, ["epoch", "did you mean 'epochs'"]),
    ],
)
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(ConfigError) as caught:
        Sample.from_dict(settings)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"nope": 1})])
def test_wrong_json_is_refused(text):
    with pytest.raises(ConfigError):
        Sample.from_json(text)


def test_replace_checks_again():
    assert Sample().replace(epochs=9).epochs == 9
    with pytest.raises(ConfigError):
        Sample().replace(epochs=-1)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample().epochs = 4


def test_nearest_lists_names_when_nothing_is_close():
    assert "did you mean" not in nearest("zzzz", ["alpha"])
    assert "alpha" in nearest("zzzz", ["alpha"])


def test_presets_are_what_settings_start_from():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Published(Sample):
        presets: ClassVar = {"paper": {"epochs": 200, "rate": 1e-8}}

    paper = Published.from_dict({"preset": "paper", "rate": 1.0})
    assert (paper.epochs, paper.rate) == (200, 1.0)
    assert Published.from_dict({"preset": "default"}) == Published()
    assert "preset" not in paper.to_dict()
    with pytest.raises(InputError, match="preset has no option 'papr'; did you mean 'paper'"):
        Published.from_dict({"preset": "papr"})
    with pytest.raises(InputError, match="preset has no option 'paper'"):
        Sample.from_dict({"preset": "paper"})
