"""The settings: what they accept, how they are written, and what they say when refused."""

import dataclasses
import json

import pytest

from hf_linattn import AttentionConfig, LinformerConfig, PerformerConfig
from hf_linattn.modeling.architectures import ARCHITECTURES
from hf_linattn.modeling.configuration_linattn import CONFIG_CLASSES, FORMAT_VERSION, method_configs
from hf_linattn.modeling.feature_maps import FEATURE_MAPS
from hf_linattn.modeling.methods import METHODS

from ..helpers import METHODS as CONFIGS
from ..helpers import choices, config_id

pytestmark = pytest.mark.core

CONFIGS_BY_METHOD = [method.config for method in METHODS.values()]

BAD_FIELDS = [
    (LinformerConfig, "projection_length", 0),
    (LinformerConfig, "projection_length", 8.0),
    (LinformerConfig, "projection_length", True),
    (LinformerConfig, "projection", "median"),
    (LinformerConfig, "sharing", "tokens"),
    (PerformerConfig, "num_features", -1),
    (PerformerConfig, "num_features", "256"),
    (PerformerConfig, "feature_map", "cosine"),
    (PerformerConfig, "orthogonal", 1),
    (PerformerConfig, "redraw_interval", 0),
    *(
        (cls, field, value)
        for cls in CONFIGS_BY_METHOD
        for field, value in [
            ("window_size", -1),
            ("window_size", None),
            ("global_tokens", -2),
            ("global_tokens", 1.5),
            ("seed", -1),
            ("seed", None),
            ("max_length", 0),
            ("layers", []),
            ("layers", [1, 1]),
            ("layers", [-1]),
            ("layers", [0.5]),
            ("near", 1),
            ("far", "no"),
        ]
    ),
]


@pytest.mark.parametrize(("cls", "field", "value"), BAD_FIELDS)
def test_a_bad_value_is_refused_by_name(cls: type[AttentionConfig], field: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        cls(**{field: value})
    assert cls.__name__ in str(error.value)
    shown = value[0] if field == "layers" and value and len(value) == 1 else value
    assert f"{field}={shown!r}" in str(error.value)


@pytest.mark.parametrize(("cls", "field"), [(cls, field) for cls in CONFIGS_BY_METHOD for field in choices(cls)])
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(cls: type[AttentionConfig], field: str) -> None:
    names = choices(cls)[field]
    assert names
    # clusters share nothing
    others = {"projection": "learned"} if field == "sharing" else {}
    for choice in names:
        cls(**others, **{field: choice})
    with pytest.raises(ValueError) as error:
        cls(**{field: "other"})
    assert all(repr(choice) in str(error.value) for choice in names)


@pytest.mark.parametrize(
    "feature_map", [name for name, kind in FEATURE_MAPS.items() if kind.features_per_direction == 2]
)
def test_an_odd_number_of_features_is_refused_where_directions_give_two(feature_map: str) -> None:
    PerformerConfig(num_features=7)
    with pytest.raises(ValueError, match=f"num_features=7 must be a multiple of 2.*{feature_map}"):
        PerformerConfig(num_features=7, feature_map=feature_map)


@pytest.mark.parametrize("settings", [{}, {"near": False, "window_size": 4}])
@pytest.mark.parametrize("cls", CONFIGS_BY_METHOD)
def test_settings_that_leave_nothing_to_attend_to_are_refused(cls: type[AttentionConfig], settings: dict) -> None:
    with pytest.raises(ValueError, match="far=False leaves nothing"):
        cls(far=False, **settings)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_settings_go_through_json_and_back(config: AttentionConfig) -> None:
    written = json.loads(json.dumps(config.to_dict()))
    assert written["format_version"] == FORMAT_VERSION
    assert AttentionConfig.from_dict(written) == config


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format_version": FORMAT_VERSION + 1}, [f"format_version={FORMAT_VERSION + 1}", "pip install -U hf-linattn"]),
        ({"method": "reformer"}, ["method='reformer'", "'linformer'", "'performer'"]),
        ({"method": None}, ["method=None", "'linformer'"]),
        ({"num_buckets": 3, "rounds": 2}, ["PerformerConfig has no field num_buckets, rounds", "num_features"]),
        ({"window_size": -1}, ["window_size=-1"]),
    ],
)
def test_written_settings_that_cannot_be_read_are_refused(change: dict, told: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        AttentionConfig.from_dict({**PerformerConfig().to_dict(), **change})
    assert all(text in str(error.value) for text in told)


def test_every_field_says_what_it_is() -> None:
    for cls in CONFIGS_BY_METHOD:
        for field in dataclasses.fields(cls):
            assert field.metadata["help"].endswith((".", ")")), field.name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_model_config_without_settings_says_how_to_make_one(family: str) -> None:
    config = CONFIG_CLASSES[family]()
    assert config.model_type == "linattn_" + family.replace("-", "_")
    assert config.to_dict()["model_type"] == config.model_type
    with pytest.raises(ValueError, match=r"linattn=None.*hf_linattn\.convert"):
        _ = config.attention


def test_the_table_of_methods_has_every_config_under_its_name() -> None:
    assert {name: method.config for name, method in METHODS.items()} == method_configs()
    assert all(name == method.config.method for name, method in METHODS.items())
