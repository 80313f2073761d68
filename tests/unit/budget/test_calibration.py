"""Online calibration finds the true weights, follows a change, and stays finite for any outcomes."""

import pickle

import numpy as np
import pytest

from vllm_specplug.budget.calibration import BATCH, FLOOR, OnlineLogistic, log_odds_of, sigmoid


def outcomes(rng, weights, count):
    """Random features and the outcomes of a logistic model."""
    features = np.concatenate([np.ones((count, 1)), rng.normal(size=(count, len(weights) - 1))], axis=1)
    return features, rng.random(count) < sigmoid(features @ weights)


def feed(model, which, features, accepted, chunk=7):
    for start in range(0, len(features), chunk):
        part = slice(start, start + chunk)
        model.learn(np.full(len(features[part]), which), features[part], accepted[part])


def test_log_odds_and_sigmoid_are_inverse_and_finite():
    with np.errstate(divide="ignore"):
        values = np.log([0.0, 0.2, 0.5, 0.99, 1.0])
    assert sigmoid(log_odds_of(values)) == pytest.approx([FLOOR, 0.2, 0.5, 0.99, 1 - FLOOR])
    assert np.isfinite(np.log(sigmoid(np.array([-np.inf, -1e9, 1e9, np.inf])))).all()


def test_it_finds_each_models_weights_and_leaves_the_others():
    rng = np.random.default_rng(0)
    model = OnlineLogistic(np.zeros((3, 3)), memory=20000.0)
    truths = [np.array([-1.0, 2.0, 0.5]), np.array([0.5, -1.0, 0.0])]
    for which, truth in enumerate(truths):
        feed(model, which, *outcomes(rng, truth, 6000))
        assert model.weights[which] == pytest.approx(truth, abs=0.2)
    assert (model.weights[2] == 0).all() and model.outcomes[2] == 0


def newton_steps(model, prior, batches):
    """``OnlineLogistic`` in array operations: weights and outcomes after batches of (models, features, accepted)."""
    weights, outcomes = model.weights.copy(), np.zeros(len(model.weights))
    curvature = np.zeros((len(weights), weights.shape[1], weights.shape[1]))
    for models, features, accepted in batches:
        for which in np.unique(models):
            mine = np.flatnonzero(models == which)
            for part in np.split(mine, range(BATCH, len(mine), BATCH)):
                x, y = features[part], accepted[part]
                p = sigmoid(x @ weights[which])
                curvature[which] *= np.exp(-len(part) / model.memory)
                curvature[which] += (x * np.maximum(p * (1 - p), 0.02)[:, None]).T @ x
                step = np.linalg.solve(curvature[which] + prior / 4 * np.eye(x.shape[1]), x.T @ (y - p))
                weights[which] += np.clip(step, -1.0, 1.0)
            outcomes[which] += len(mine)
    return weights, outcomes


@pytest.mark.parametrize("seed", range(8))
def test_it_takes_newton_steps(seed):
    """Batches of any size, models of any number of outcomes, large features, whose steps are cut."""
    rng = np.random.default_rng(seed)
    num_models, num_features = int(rng.integers(1, 9)), int(rng.integers(1, 11))
    model = OnlineLogistic(rng.normal(size=(num_models, num_features)), prior_strength=8.0, memory=300.0)
    batches = []
    for _ in range(12):
        count = int(rng.integers(BATCH, 5 * BATCH))
        features = rng.normal(size=(count, num_features)) * rng.choice([0.1, 1.0, 9.0])
        batches.append((rng.integers(0, num_models, count), features, rng.random(count) < rng.random()))
    weights, outcomes = newton_steps(model, 8.0, batches)
    for batch in batches:
        model.learn(*batch)
    assert model.weights == pytest.approx(weights, rel=1e-6, abs=1e-6) and model.outcomes.tolist() == outcomes.tolist()
    models, features = rng.integers(0, num_models, (3, 4)), rng.normal(size=(3, 4, num_features))
    assert model.log_odds(models, features) == pytest.approx((features * model.weights[models]).sum(axis=2))
    for wrong in (-1, num_models):
        with pytest.raises(IndexError):
            model.log_odds(np.full(2, wrong), np.ones((2, num_features)))


def test_outcomes_wait_for_a_batch():
    """However they come: in parts, from other dtypes and from layouts that are not contiguous."""
    rng = np.random.default_rng(5)
    features, accepted = outcomes(rng, np.array([-1.0, 2.0, 0.5]), BATCH)
    at_once, in_parts = OnlineLogistic(np.zeros((2, 3))), OnlineLogistic(np.zeros((2, 3)))
    at_once.learn(np.ones(BATCH, dtype=int), features, accepted)
    feed(in_parts, np.int32(1), np.asfortranarray(features), accepted, chunk=BATCH - 1)
    assert (in_parts.weights == at_once.weights).all() and at_once.weights[1].all() and not at_once.weights[0].any()
    waits = OnlineLogistic(np.zeros((2, 3)))
    waits.learn(np.ones(BATCH - 1, dtype=int), features[:-1], accepted[:-1])
    assert not waits.weights.any() and not waits.outcomes.any()


def test_it_follows_a_change():
    rng = np.random.default_rng(1)
    model = OnlineLogistic(np.zeros((1, 2)), memory=500.0)
    feed(model, 0, *outcomes(rng, np.array([2.0, 1.0]), 5000))
    feed(model, 0, *outcomes(rng, np.array([-2.0, 1.0]), 2000))
    assert model.weights[0] == pytest.approx([-2.0, 1.0], abs=0.4)


def test_a_few_outcomes_do_not_overturn_the_start():
    model = OnlineLogistic(np.array([[1.0]]))
    model.learn(np.zeros(64, dtype=int), np.ones((64, 1)), np.array([True, False] * 32))
    assert 0.1 < model.weights[0, 0] < 0.9


def test_hostile_outcomes_keep_it_finite():
    """Always wrong, always right, collinear features: predictions are calibrated, weights stay finite."""
    model = OnlineLogistic(np.zeros((1, 3)))
    features = np.tile([1.0, 1.0, 9.0], (6400, 1))
    feed(model, 0, features, np.zeros(6400, dtype=bool), chunk=640)
    assert np.isfinite(model.weights).all()
    assert sigmoid(model.log_odds(np.zeros(1, dtype=int), features[:1]))[0] < 0.05
    feed(model, 0, features, np.ones(6400, dtype=bool), chunk=640)
    assert sigmoid(model.log_odds(np.zeros(1, dtype=int), features[:1]))[0] > 0.95
    model.learn(np.zeros(0, dtype=int), np.zeros((0, 3)), np.zeros(0, dtype=bool))


def test_it_pickles():
    model = pickle.loads(pickle.dumps(OnlineLogistic(np.ones((2, 3)))))
    assert model.log_odds(np.array([1]), np.ones((1, 3))).tolist() == [3.0]
