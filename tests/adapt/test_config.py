"""Settings of an adaptation whose default depends on the model."""

import pytest

from hf_linattn.adapt import AdaptConfig


def test_defaults_follow_the_model() -> None:
    pure, joined = (AdaptConfig().for_model(window=window) for window in (False, True))
    assert [name for name, _ in pure.stages()] == ["transfer", "distil"]
    assert [name for name, _ in joined.stages()] == ["distil"]
    assert (pure.query_key_lr, pure.learning_rate) == (2e-4, 2e-5)
    assert (joined.query_key_lr, joined.learning_rate) == (1e-4, 1e-5)
    task = AdaptConfig(task="masked-lm", task_steps=1).for_model(window=True)
    assert task.learning_rate == 2e-5
    given = AdaptConfig(transfer_steps=3, learning_rate=0.0, query_key_lr=1.0).for_model(window=True)
    assert (given.transfer_steps, given.learning_rate, given.query_key_lr) == (3, 0.0, 1.0)
    with pytest.raises(ValueError, match="nothing to train"):
        AdaptConfig(distil_steps=0).for_model(window=True)
