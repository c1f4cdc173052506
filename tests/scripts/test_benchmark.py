"""The benchmark script: it measures what it says, keeps what it has, and goes on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROWS = [
    "softmax (SDPA)",
    "return v (the limit)",
    "Linformer, k=256",
    "causal softmax (SDPA)",
    "causal Performer, m=128",
]


ROOT = Path(__file__).parents[2]


def benchmark(output: Path, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "benchmark" / "benchmark.py"
    call = [sys.executable, str(script), "--output", str(output), "--lengths", "64", "--repeats", "2", "--layers", "1"]
    return subprocess.run([*call, "--rows", *ROWS, *more], capture_output=True, text=True, check=check)


@pytest.mark.slow
def test_a_run_keeps_every_cell_and_the_same_command_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "smoke"
    shown = benchmark(output, "--subjects", "attention", "--memory-lengths").stdout
    report = json.loads(output.with_suffix(".json").read_text())
    group = report["groups"]["attention/forward"]["64"]
    assert set(group) == set(ROWS)
    for name, cell in group.items():
        assert len(cell["seconds"]) == 2 and min(cell["seconds"]) > 0, name
    # two products of 64 x 64 x 64 for each of 12 heads, two operations for a multiply-add
    assert group["softmax (SDPA)"]["flops"] == 4 * 12 * 64**3
    assert group["return v (the limit)"]["flops"] == 0
    assert "times as fast as SDPA" in shown and shown.strip() == output.with_suffix(".md").read_text().strip()
    assert output.with_suffix(".png").stat().st_size > 0

    # what is measured stays, to the last digit, and what is new is added
    benchmark(output, "--subjects", "attention", "training", "--memory-lengths")
    again = json.loads(output.with_suffix(".json").read_text())
    assert again["groups"]["attention/forward"] == report["groups"]["attention/forward"]
    assert set(again["groups"]["attention/backward"]["64"]) == set(ROWS)

    # half as fast as SDPA at 64 tokens and twice as fast at 256: as fast at 128
    both = {"64": 2.0, "256": 0.5}
    again["groups"]["attention/forward"] = {
        length: {name: {"seconds": [ours if name == "Linformer, k=256" else 1.0], "flops": 1} for name in ROWS}
        for length, ours in both.items()
    }
    output.with_suffix(".json").write_text(json.dumps(again))
    shown = benchmark(output, "--subjects", "attention", "--memory-lengths").stdout
    assert "| attention alone, forward: faster than SDPA from | tokens |" in shown
    assert "| Linformer, k=256 | 128 |" in shown
    assert "| causal Performer, m=128 | 64 or less |" in shown


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "memory"
    benchmark(output, "--subjects", "attention", "--memory-lengths", "64")
    group = json.loads(output.with_suffix(".json").read_text())["groups"]["attention/forward"]["64"]
    assert all(cell["peak_bytes"] >= 0 for cell in group.values())
    refused = benchmark(output, "--layers", "2", check=False)
    assert refused.returncode != 0 and "other settings (layers)" in refused.stderr


def test_models_are_measured_beside_their_limit(tmp_path: Path) -> None:
    output = tmp_path / "model"
    shown = benchmark(output, "--subjects", "model", "--memory-lengths").stdout
    group = json.loads(output.with_suffix(".json").read_text())["groups"]["model/forward"]["64"]
    assert set(group) == {"softmax (SDPA)", "return v (the limit)", "Linformer, k=256"}
    assert "times the limit's time" in shown
    # the limit is the model without the attention's products
    difference = group["softmax (SDPA)"]["flops"] - group["return v (the limit)"]["flops"]
    assert difference == 4 * 12 * 64**3


def test_a_token_of_decoding_is_measured_beside_softmax(tmp_path: Path) -> None:
    output = tmp_path / "decoding"
    shown = benchmark(output, "--subjects", "decoding", "--memory-lengths").stdout
    groups = json.loads(output.with_suffix(".json").read_text())["groups"]["decoder/token"]
    assert set(groups) == {"64", "256"}
    assert all(set(group) == {"causal softmax (SDPA)", "causal Performer, m=128"} for group in groups.values())
    assert "one token of decoding, 1 layers, after so many: times as fast as SDPA" in shown


@pytest.mark.slow
def test_another_checkout_is_measured_in_turns_with_this_one(tmp_path: Path) -> None:
    """The other one is a copy of this, of which the folder name goes into no file."""
    other, output = tmp_path / "secret-name", tmp_path / "against"
    shutil.copytree(ROOT / "hf_linattn", other / "hf_linattn", ignore=shutil.ignore_patterns("__pycache__"))
    config = "PerformerConfig(num_features=16)"
    script = ROOT / "scripts" / "benchmark" / "benchmark.py"
    call = [sys.executable, str(script), "--output", str(output), "--lengths", "64", "--repeats", "1", "--layers", "1"]
    call += ["--against", str(other), "--subjects", "attention", "--rows", config]
    shown = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    text = output.with_suffix(".json").read_text()
    report = json.loads(text)
    cell = report["against"]["groups"]["attention/forward"]["64"][config]
    for side in ("this", "other"):
        assert len(cell[side]["seconds"]) == 3 and len(cell[side]["peak_bytes"]) == 1
    assert report["configs"] == {config: config}
    assert "now : then" in shown and "secret-name" not in text + shown

    # a folder without the package is no checkout
    (tmp_path / "empty").mkdir()
    refused = subprocess.run([*call, "--against", str(tmp_path / "empty")], capture_output=True, text=True)
    assert refused.returncode == 2 and "must be the folder of a checkout" in refused.stderr
