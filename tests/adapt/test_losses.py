"""Losses of known numbers."""

import torch

from hf_linattn.adapt.losses import divergence, mean_cosine, pooled, relative_error


def test_losses_of_known_numbers() -> None:
    wanted = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [5.0, 5.0]]])
    found = torch.tensor([[[3.0, 0.0], [1.0, 1.0]], [[2.0, 0.0], [9.0, 9.0]]])
    real = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(relative_error(found, wanted, real), torch.tensor([17 / 26, 8 / 4]))
    torch.testing.assert_close(mean_cosine(found, wanted, real), torch.tensor([(0.6 + 0.5**0.5) / 2, 0.0]))
    torch.testing.assert_close(pooled(found, real, "mean"), torch.tensor([[2.0, 0.5], [2.0, 0.0]]))
    torch.testing.assert_close(pooled(found, real, "cls"), torch.tensor([[3.0, 0.0], [2.0, 0.0]]))


def test_divergence_is_that_of_the_distributions() -> None:
    found, wanted = torch.randn(2, 1, 3, 7)
    expected = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=x / 2) for x in (wanted, found))
    )
    torch.testing.assert_close(divergence(found, wanted, torch.ones(1, 3), 2.0), 4 * expected.mean(-1))
