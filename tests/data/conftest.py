"""Fixtures of the tests of data/: a cache of its own, and a Hub that has only what a test puts
there.
"""

import datasets
import pytest
from datasets import Dataset


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch):
    """A hub of our own: `hub.rows[path]` is what a repository holds, everything else fails.

    Records the calls.
    """

    class Hub:
        def __init__(self):
            self.rows = {}
            self.calls = []

        def load_dataset(self, path, config=None, **options):
            self.calls.append((path, config, options))
            if path not in self.rows:
                raise ConnectionError(f"cannot reach {path}\nsecond line")
            return Dataset.from_list(self.rows[path])

    fake = Hub()
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    return fake
