"""Adaptation in the precision that was asked for, and not in that of something else in the process."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_linattn.adapt import AdaptConfig, adapt
from hf_linattn.data.documents import DataConfig

from .runs import SHORT, lines, losses, same_weights

DISTIL = {**SHORT, "transfer_steps": 0}


def test_a_scaler_of_float16_is_taken_out_once(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    accelerator = Accelerator(cpu=True)
    try:
        # as Accelerate has it on a GPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        adapt(folder, tmp_path / "scaled", AdaptConfig(**DISTIL), data=data, accelerator=accelerator)
    finally:
        AcceleratorState._reset_state()
    adapt(folder, tmp_path / "plain", AdaptConfig(**DISTIL), data=data)
    for found, expected in zip(lines(tmp_path / "scaled"), lines(tmp_path / "plain"), strict=True):
        names = [name for name in expected if name == "loss" or name.startswith("gradient_norm/")]
        # Adam's first steps are of one size however small a gradient is, and so some rounding shows
        assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=2e-3)


def test_each_call_has_its_own_precision(folder: Path, tmp_path: Path, data: DataConfig) -> None:
    for name, precision in (("plain", None), ("half", "bf16"), ("again", None)):
        adapt(folder, tmp_path / name, AdaptConfig(**DISTIL, mixed_precision=precision), data=data)
    assert same_weights(tmp_path / "again", tmp_path / "plain")
    assert losses(tmp_path / "half") != losses(tmp_path / "plain")


def test_what_accelerate_does_not_do_is_refused(
    folder: Path, tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="mixed_precision='fp16' is not supported on a CPU"):
        adapt(folder, tmp_path / "a", AdaptConfig(**DISTIL, mixed_precision="fp16"), data=data)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="mixed_precision='bf16', and the Accelerator has 'no'"):
        adapt(folder, tmp_path / "b", AdaptConfig(**DISTIL, mixed_precision="bf16"), data=data, accelerator=accelerator)
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 of Accelerate must be 1"):
        adapt(folder, tmp_path / "c", AdaptConfig(**DISTIL), data=data)
    assert not any((tmp_path / name).exists() for name in "abc")
