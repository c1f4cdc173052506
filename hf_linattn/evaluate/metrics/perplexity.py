"""Perplexity: the exponential of the mean negative log-likelihood per token, all documents' tokens together."""

from typing import Any

import datasets
import evaluate
import numpy as np

from .inputs import numbers, same_length

HIGHER_IS_BETTER = False


def function(predictions: Any, references: Any) -> float:
    """exp(sum of negative log-likelihoods / number of tokens).

    Args:
        predictions: negative log-likelihood of each document in nats, summed over its predicted tokens.
        references: how many tokens were predicted in each document.

    Raises:
        ValueError: a likelihood is above 1, or a document has no predicted token.
    """
    same_length(predictions, references)
    nats, tokens = numbers("predictions", predictions), numbers("references", references)
    if (nats < 0).any():
        raise ValueError(f"predictions holds {nats.min():g}; a negative log-likelihood is at least 0.")
    if (tokens < 1).any():
        raise ValueError(f"references holds {tokens.min():g}; each document must have at least 1 predicted token.")
    with np.errstate(over="ignore"):
        return float(np.exp(nats.sum() / tokens.sum()))


class Perplexity(evaluate.Metric):
    """The same for `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: negative log-likelihood of each document in nats, summed over its "
            "predicted tokens; references: how many those are.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"perplexity": function(predictions, references)}
