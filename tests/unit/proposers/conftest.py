"""A tiny target and the features of random answers to it."""

import pytest

from tests.doubles.trained import make_answers, make_features, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    pytest.importorskip("transformers")
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return make_features(target, make_answers(), tmp_path_factory.mktemp("features"))
