"""Which settings to give which layer, from an analysis, under a budget or for a wanted fidelity."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..modeling.configuration_linattn import LayerwiseConfig
from ..modeling.validation import check_number
from .analysis import Analysis, settings_by_layer
from .retrieval import heads_for

#: What a budget can be about.
BUDGETS = ("time", "memory", "operations")
# Partial choices that are kept, of those that no other one beats in both cost and loss.
_KEPT = 2000
# Choices, and single settings among them, that are measured in the whole model.
_MEASURED, _UNIFORM = 12, 2


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Settings for each layer, and what is to be expected of them.

    Attributes:
        names: the candidate of each layer; None where softmax stays.
        config: what `convert` takes.
        expected_loss: as the analysis measures it, without training, on documents like those that it read.
        measured: whether that was measured with these settings in the whole model, or follows from single layers.
        time, operations: of the whole model, and memory: of the attention layer that takes most, each relative to
            softmax at the length of the analysis.
    """

    names: tuple[str | None, ...]
    config: LayerwiseConfig
    expected_loss: float
    measured: bool
    time: float
    memory: float
    operations: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; its `config` is what `hf-linattn convert --config` reads."""
        return {
            "config": self.config.to_dict(),
            "names": list(self.names),
            "expected_loss": self.expected_loss,
            "measured": self.measured,
            **{name: getattr(self, name) for name in BUDGETS},
        }


def suggest(
    analysis: Analysis,
    *,
    time: float | None = None,
    memory: float | None = None,
    operations: float | None = None,
    fidelity: float | None = None,
    retrieval: float | None = None,
    check: Callable[..., float] | None = None,
) -> Suggestion:
    """The choice of settings by layer that loses least within a budget, or costs least at a wanted fidelity.

    A loss in one layer is what the whole model lost there alone, times what all layers together lose more or less than
    the sum of them, as measured with the same settings in all layers. Losses of layers are added up, which holds as
    far as they are small. Heads that stay softmax lower a loss, which shows where `check` measures it.

    Args:
        analysis: of `analyze`.
        time, memory, operations: at most this much of what softmax takes at the length of the analysis; the first
            and the last of the whole model, memory of its largest attention layer.
        fidelity: for encoders at least this cosine, for decoders at most this KL divergence in nats, for the least
            time, or operations if `operations` is given as well.
        retrieval: the heads with the largest retrieval scores, which together have this share of all scores, stay
            softmax: in `softmax_heads`, or in layers that are not converted. They count in the budget.
        check: measures names of candidates, and heads that stay softmax, in the whole model, as `Check` does.

    Raises:
        ValueError: nothing is wanted, no choice reaches it (the message tells what can be reached), or softmax in all
            layers is the best choice.
    """
    budgets = {"time": time, "memory": memory, "operations": operations}
    check_wanted({**budgets, "fidelity": fidelity}, retrieval)
    heads = _retrieval_heads(analysis, retrieval)
    given = {name: value for name, value in budgets.items() if value is not None}
    unit = "operations" if operations is not None else "time"
    choices = [
        name for name in _costs(analysis, "memory") if memory is None or relative(analysis, [name], "memory") <= memory
    ]
    if not any(name is not None for name in choices):
        least = min(relative(analysis, [c.name], "memory") for c in analysis.candidates)
        raise ValueError(f"memory={memory}: the least that a candidate takes is {least:.3g} times softmax's.")
    front = _front(analysis, choices, unit, heads)
    wanted = None if fidelity is None else _allowed_loss(analysis, fidelity)
    limit = given.get(unit)
    within = [
        (cost, loss, names)
        for cost, loss, names in front
        if (limit is None or relative(analysis, names, unit, heads) <= limit) and (wanted is None or loss <= wanted)
    ]
    if not within:
        cheapest, nearest = front[0], front[-1]
        asked = {**given, "fidelity": fidelity, "retrieval": retrieval}
        asked = {name: value for name, value in asked.items() if value is not None}
        if not any(cheapest[2]):
            raise ValueError(f"No setting costs less {unit} than softmax at {analysis.length:,} tokens.")
        raise ValueError(
            f"No choice has {', '.join(f'{name}={value}' for name, value in asked.items())}. The cheapest takes "
            f"{relative(analysis, cheapest[2], unit, heads):.3f} of softmax's {unit} with an expected loss of "
            f"{cheapest[1]:.3g}; the nearest to the original {relative(analysis, nearest[2], unit, heads):.3f} with "
            f"{nearest[1]:.3g} ({analysis.measure})."
        )
    best = min(within, key=lambda choice: (choice[1], choice[0]) if wanted is None else (choice[0], choice[1]))
    if not any(best[2]):
        raise ValueError(
            f"Softmax in all layers is within what is wanted, and the best choice at {analysis.length:,} tokens: "
            "convert nothing, or give a budget below 1."
        )
    if check is None:
        return described(analysis, best[2], heads)

    def allowed(names: tuple[str | None, ...]) -> bool:
        whole = all(names[layer] is None for layer in _whole(analysis, heads))
        return whole and all(relative(analysis, names, name, heads) <= value for name, value in given.items())

    promising = _promising(analysis, best[2], choices, allowed)
    measured = {names: check(names, heads) if heads else check(names) for names in promising}
    if wanted is None:
        names = min(measured, key=lambda names: measured[names])
    else:
        reached = [names for names in measured if measured[names] <= wanted]
        if not reached:
            raise ValueError(
                f"fidelity={fidelity} was expected of {', '.join(str(name) for name in best[2])}, and the whole model "
                f"has a loss of {measured[best[2]]:.3g} with it ({analysis.measure}); ask for a little more."
            )
        names = min(reached, key=lambda names: relative(analysis, names, unit, heads))
    return dataclasses.replace(described(analysis, names, heads), expected_loss=measured[names], measured=True)


def _retrieval_heads(analysis: Analysis, share: float | None) -> dict[int, list[int]]:
    """The heads that stay softmax, by layer."""
    if share is None:
        return {}
    if not analysis.retrieval:
        raise ValueError(
            f"retrieval={share}: the analysis has no retrieval scores; make it with retrieval_texts of at least 1."
        )
    return heads_for(analysis.retrieval, share)


def _whole(analysis: Analysis, heads: Mapping[int, list[int]]) -> list[int]:
    """Layers all heads of which stay softmax."""
    return [layer for layer, chosen in heads.items() if len(chosen) == analysis.heads]


def check_wanted(wanted: Mapping[str, float | None], retrieval: float | None = None) -> None:
    """Whether `suggest` takes these budgets and this fidelity, as far as that can be told without an analysis.

    Raises:
        ValueError: nothing is wanted, two things that exclude each other, or no number above 0.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    if not given:
        raise ValueError("Give a budget (time, memory or operations) or a wanted fidelity.")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{name}={value!r} must be a number above 0.")
    if retrieval is not None:
        check_number("suggest", "retrieval", retrieval, 0, above=True)
        if retrieval > 1:
            raise ValueError(f"retrieval={retrieval} must be a share, at most 1.")
    if "time" in given and "operations" in given:
        raise ValueError(f"time={given['time']} and operations={given['operations']}: give one of them.")


def _promising(
    analysis: Analysis,
    best: tuple[str | None, ...],
    choices: list[str | None],
    allowed: Callable[[tuple[str | None, ...]], bool],
) -> list[tuple[str | None, ...]]:
    """The best choice by expectation, the best single settings, and what differs from one of them in two layers."""
    losses = _losses(analysis)

    def expected(names: tuple[str | None, ...]) -> float:
        return sum(losses[layer][name] for layer, name in enumerate(names))

    uniform = [(name,) * analysis.layers for name in choices if name is not None]
    uniform = sorted((names for names in uniform if allowed(names)), key=expected)[:_UNIFORM]
    found = set()
    for start in (best, *uniform):
        for first, second in itertools.combinations(range(analysis.layers), 2):
            for names in itertools.product(choices, repeat=2):
                changed = list(start)
                changed[first], changed[second] = names
                found.add(tuple(changed))
    # by expectation first: whether one is allowed takes longer to tell
    ranked = (names for names in sorted(found, key=expected) if any(names) and allowed(names))
    return list(dict.fromkeys([best, *uniform, *itertools.islice(ranked, _MEASURED)]))


def described(
    analysis: Analysis, names: tuple[str | None, ...], heads: Mapping[int, list[int]] | None = None
) -> Suggestion:
    """What is to be expected of the candidates of these names in the layers, first layer first.

    heads: by layer, those that stay softmax.
    """
    losses = _losses(analysis)
    return Suggestion(
        names=names,
        config=settings_by_layer(analysis, names, heads),
        expected_loss=sum(losses[layer][name] for layer, name in enumerate(names)),
        measured=False,
        **{unit: relative(analysis, names, unit, heads) for unit in BUDGETS},
    )


def relative(analysis: Analysis, names: Any, unit: str, heads: Mapping[int, list[int]] | None = None) -> float:
    """Cost of the model with these candidates in its layers, softmax in all of them being 1.

    Each head of a layer is taken to cost the same, those that stay softmax what a head of softmax costs.
    """
    costs = _costs(analysis, unit)
    of_layers = [_with_heads(analysis, costs, name, layer, heads) for layer, name in enumerate(names)]
    if unit == "memory":
        return max(of_layers) / costs[None]
    rest = getattr(analysis.rest, unit)
    return (rest + sum(of_layers)) / (rest + analysis.layers * costs[None])


def _with_heads(
    analysis: Analysis,
    costs: Mapping[str | None, float],
    name: str | None,
    layer: int,
    heads: Mapping[int, list[int]] | None,
) -> float:
    """Cost of one layer, some heads of which stay softmax."""
    share = len((heads or {}).get(layer, ())) / analysis.heads
    return costs[name] + share * (costs[None] - costs[name])


def _costs(analysis: Analysis, unit: str) -> dict[str | None, float]:
    """Name -> cost of one layer; None is softmax."""
    costs: dict[str | None, float] = {None: getattr(analysis.softmax, unit)}
    return costs | {candidate.name: getattr(candidate.cost, unit) for candidate in analysis.candidates}


def _losses(analysis: Analysis) -> list[dict[str | None, float]]:
    """By layer, name -> its part of the loss of the whole."""
    losses: list[dict[str | None, float]] = [{None: 0.0} for _ in range(analysis.layers)]
    for candidate in analysis.candidates:
        # rounding can make a loss that is next to nothing negative
        alone = [max(loss, 0.0) for loss in candidate.loss]
        together = candidate.uniform_loss / max(sum(alone), 1e-12)
        for layer, loss in enumerate(alone):
            losses[layer][candidate.name] = loss * together
    return losses


def _allowed_loss(analysis: Analysis, fidelity: float) -> float:
    if analysis.measure.startswith("1 - cosine"):
        if fidelity > 1:
            raise ValueError(f"fidelity={fidelity} must be a cosine, at most 1.")
        return 1 - fidelity
    return fidelity


_Choice = tuple[float, float, tuple[str | None, ...]]


def _front(analysis: Analysis, names: list[str | None], unit: str, heads: Mapping[int, list[int]]) -> list[_Choice]:
    """Choices for all layers that no other one beats in both cost and loss, cheapest first."""
    costs, losses, whole = _costs(analysis, unit), _losses(analysis), _whole(analysis, heads)
    front: list[_Choice] = [(0.0, 0.0, ())]
    for layer in range(analysis.layers):
        more: list[_Choice] = [
            (cost + _with_heads(analysis, costs, name, layer, heads), loss + losses[layer][name], (*chosen, name))
            for cost, loss, chosen in front
            for name in (names if layer not in whole else [None])
        ]
        more.sort(key=lambda choice: choice[:2])
        front = []
        for choice in more:
            if not front or choice[1] < front[-1][1]:
                front.append(choice)
        if len(front) > _KEPT:
            step = (len(front) - 1) / (_KEPT - 1)
            front = [front[round(index * step)] for index in range(_KEPT)]
    return front
