"""Choices from an analysis whose numbers are known."""

import dataclasses
import itertools
import math

import pytest

from hf_linattn import LinformerConfig, PerformerConfig
from hf_linattn.analyze import Analysis, AnalyzeConfig, suggest
from hf_linattn.analyze.analysis import Candidate
from hf_linattn.analyze.cost import Cost
from hf_linattn.analyze.spectra import LayerStatistics
from hf_linattn.analyze.suggest import described

LOSSES = {"cheap": (0.01, 0.09, 0.04), "middle": (0.008, 0.01, 0.03), "good": (0.001, 0.002, 0.003)}
TIMES = {"cheap": 1.0, "middle": 2.0, "good": 4.0}
SETTINGS = {
    "cheap": LinformerConfig(projection="learned", projection_length=4),
    "middle": PerformerConfig(num_features=8),
    "good": LinformerConfig(projection="learned", projection_length=8, window_size=8),
}


def _cost(value: float) -> Cost:
    return Cost(time=value, memory=10 * value, operations=100 * value)


def _analysis(measure: str = "1 - cosine of the pooled embedding", together: float = 1.0) -> Analysis:
    empty = {f"{name}_{kind}": () for name in ("logit", "attention") for kind in ("spectrum", "energy")}
    return Analysis(
        model="tiny",
        model_type="bert",
        heads=2,
        head_dim=4,
        measure=measure,
        length=64,
        documents=1,
        config=AnalyzeConfig(length=64),
        statistics=tuple(LayerStatistics(layer=layer, heads=(), **empty) for layer in range(3)),
        candidates=tuple(
            Candidate(
                name=name,
                settings=SETTINGS[name],
                cost=_cost(TIMES[name]),
                errors=((0.1, 0.2),) * 3,
                loss=LOSSES[name],
                uniform_loss=together * sum(LOSSES[name]),
            )
            for name in LOSSES
        ),
        softmax=_cost(8.0),
        rest=_cost(6.0),
    )


@pytest.mark.parametrize("budget", [0.31, 0.4, 0.45, 0.5, 0.6, 0.8, 0.99])
def test_the_choice_is_the_best_of_all_within_the_budget(budget: float) -> None:
    names: list[str | None] = [*LOSSES, None]
    best = min(
        (sum(LOSSES[name][layer] for layer, name in enumerate(chosen) if name is not None), chosen)
        for chosen in itertools.product(names, repeat=3)
        if (6 + sum(TIMES.get(name, 8.0) for name in chosen)) / 30 <= budget
    )
    found = suggest(_analysis(), time=budget)
    assert found.expected_loss == pytest.approx(best[0])
    assert found.names == best[1] and found.time <= budget
    assert suggest(_analysis(), operations=budget).names == found.names


def test_the_cheapest_choice_of_a_wanted_fidelity() -> None:
    found = suggest(_analysis(), fidelity=0.97)
    assert found.names == ("cheap", "middle", "good")
    assert found.expected_loss == pytest.approx(0.023) and found.time == pytest.approx(13 / 30)
    divergence = suggest(_analysis("KL divergence of the next token in nats"), fidelity=0.03)
    assert divergence.names == found.names


def test_what_all_layers_lose_together_is_in_the_expectation() -> None:
    found = suggest(_analysis(together=1.5), time=0.3)
    assert found.names == ("cheap",) * 3 and found.expected_loss == pytest.approx(1.5 * 0.14)


def test_a_check_in_the_whole_model_decides_among_the_promising() -> None:
    best = suggest(_analysis(), time=0.45)
    asked = []

    def check(names) -> float:
        asked.append(tuple(names))
        return 0.5 if tuple(names) == best.names else 0.02 + 0.001 * len(asked)

    found = suggest(_analysis(), time=0.45, check=check)
    assert asked[0] == best.names and asked[1] == ("middle",) * 3 and len(asked) == len(set(asked)) > 5
    assert found.names == ("middle",) * 3 and found.expected_loss == pytest.approx(0.022)
    assert found.measured and not best.measured
    assert all(described(_analysis(), names).time <= 0.45 for names in asked)
    # what the numbers of the analysis say is right is kept
    same = suggest(_analysis(), time=0.45, check=lambda names: described(_analysis(), tuple(names)).expected_loss)
    assert same.names == best.names
    with pytest.raises(ValueError, match=r"fidelity=0\.97 was expected"):
        suggest(_analysis(), fidelity=0.97, check=lambda names: 0.5)


def test_memory_is_that_of_the_largest_layer() -> None:
    found = suggest(_analysis(), memory=0.3)
    assert set(found.names) <= {"cheap", "middle"} and found.memory == pytest.approx(0.25)
    assert suggest(_analysis(), memory=0.3, time=0.34).time <= 0.34


def test_the_config_is_what_convert_takes() -> None:
    config = suggest(_analysis(), time=0.45).config
    found = described(_analysis(), ("good", None, "middle"))
    assert config.of_layer(0) is not None
    assert found.config.layers == [0, 2]
    assert found.config.of_layer(0) == dataclasses.replace(SETTINGS["good"])
    assert found.config.of_layer(1) is None and found.memory == 1.0


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "Give a budget"),
        ({"time": 0.1}, r"cheapest takes 0.300 of softmax's time"),
        ({"memory": 0.01}, "least that a candidate takes is 0.125"),
        ({"fidelity": 1.5}, "at most 1"),
        ({"time": 1.0}, "Softmax in all layers is within what is wanted"),
        ({"fidelity": 1.0}, "Softmax in all layers is within what is wanted"),
        ({"time": -1}, "time=-1 must be a number above 0"),
        ({"fidelity": math.nan}, "fidelity=nan must be a number above 0"),
        ({"time": 0.5, "operations": 0.5}, "give one of them"),
        ({"time": 0.31, "fidelity": 0.99}, "time=0.31, fidelity=0.99"),
    ],
)
def test_what_cannot_be_had_is_told(wanted: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suggest(_analysis(), **wanted)


def test_heads_that_stay_softmax_count_in_the_budget() -> None:
    """Of two heads, one of layer 0 and both of layer 2: half of the cost there is softmax's, and all of it here."""
    scores = ((0.4, 0.0), (0.0, 0.0), (0.3, 0.3))
    analysis = dataclasses.replace(_analysis(), retrieval=scores)
    found = suggest(analysis, time=0.75, retrieval=1.0)
    assert found.names == ("good", "middle", None)
    assert found.config.softmax_heads == {0: [0]}
    # the rest, and the layers
    assert found.time == pytest.approx((6 + (4 + 8) / 2 + 2 + 8) / 30)
    asked = []

    def check(names, heads) -> float:
        asked.append((tuple(names), heads))
        return 0.01

    suggest(analysis, time=0.8, retrieval=1.0, check=check)
    assert all(names[2] is None and heads == {0: [0], 2: [0, 1]} for names, heads in asked) and len(asked) > 2
    with pytest.raises(ValueError, match=r"No choice has time=0\.5, retrieval=1\.0\. The cheapest takes 0\.650"):
        suggest(analysis, time=0.5, retrieval=1.0)
