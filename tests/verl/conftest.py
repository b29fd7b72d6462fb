"""Tests of the verl adapter: `make test-verl`, in an environment of its own."""

import importlib.util

import pytest

if importlib.util.find_spec("verl") is None:  # tests/conftest.py says so
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder with the toy model and its data."""
    from tests.verl.support.task import make_data, make_model

    folder = tmp_path_factory.mktemp("verl")
    make_model(folder / "model")
    make_data(folder)
    return folder
