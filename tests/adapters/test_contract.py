"""The adapter contract over everything registered: a new adapter is tested with no new test."""

import pytest

from grove_adapters import testing
from grove_adapters.adapters import list_adapters


@pytest.mark.parametrize("check", [c for name in list_adapters() for c in testing.adapter_checks(name)], ids=str)
def test_contract(check):
    check()
