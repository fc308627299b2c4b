import re
import subprocess
import sys
from pathlib import Path

import pytest

import grove_adapters

ROOT = Path(grove_adapters.__file__).parent


@pytest.mark.parametrize("name", grove_adapters.__all__)
def test_public_names_exist_and_are_documented(name):
    assert getattr(grove_adapters, name).__doc__


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no_such"):
        _ = grove_adapters.no_such
    assert "EmbeddingStore" in dir(grove_adapters)


def test_the_version_is_the_packages():
    text = (ROOT.parent / "pyproject.toml").read_text()
    assert f'version = "{grove_adapters.__version__}"' in text


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, grove_adapters; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "open_clip", "transformers", "sklearn", "pandas", "matplotlib", "gpytorch", "scipy"):
        assert f"'{heavy}'" not in loaded, heavy


def test_nothing_is_ever_unpickled():
    """Every way of reading Python objects back, searched for in the source."""
    forbidden = re.compile(
        r"\bpickle\.load|\bpickle\.loads|allow_pickle=True|torch\.load\(|joblib|read_pickle|\beval\("
    )
    for path in ROOT.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found = forbidden.search(line)
            allowed = "weights_only=True" in line or "module.eval(" in line or ".eval()" in line
            assert not found or allowed, f"{path.name}:{number}: {line.strip()}"
