"""Measure one row in a process of its own, and print its seconds, peak memory and package folder as JSON.

`benchmark.py` starts it; `PYTHONPATH` chooses the checkout of hf_linattn that is measured.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import hf_linattn
from measure import free_memory, limit_memory, peak_bytes, seconds
from rows import Shape, row_named
from subjects import SUBJECTS, prepare

#: The checkout that this file belongs to.
ROOT = Path(__file__).resolve().parents[2]


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Options of how and on what rows are measured."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda. Default: cpu.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--layers", type=int, help="Layers of the model. Default: 12, of --quick 2.")
    parser.add_argument(
        "--memory",
        type=float,
        default=free_memory(),
        help="GiB to take at most on a CPU: rows that need more say so. Default: 85%% of what is free.",
    )


def measure_in_new_process(
    name: str, subject: str, length: int, options: argparse.Namespace, repeats: int = 0, checkout: Path = ROOT
) -> dict[str, Any]:
    """Peak memory of a turn and the seconds of `repeats` more, with the package of a checkout.

    Returns:
        seconds (per token of decoding) and peak_bytes, or what failed.

    Raises:
        SystemExit: the folder is no checkout of the package.
    """
    call = [sys.executable, str(Path(__file__).with_name("measure_row.py")), name, subject, str(length)]
    call += ["--repeats", str(repeats), "--layers", str(options.layers), "--memory", str(options.memory)]
    call += ["--device", options.device, "--dtype", options.dtype]
    path = [str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:120]}
    cell = json.loads(done.stdout.splitlines()[-1])
    if Path(cell.pop("package")).parent != checkout.resolve():
        raise SystemExit(f"{checkout} has no folder hf_linattn; a checkout of the repository is needed.")
    return cell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", type=row_named, help="Name of a row, or the call of a config.")
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("length", type=int, help="Tokens.")
    parser.add_argument("--repeats", type=int, default=3, help="Turns that are timed. Default: 3.")
    add_machine_options(parser)
    parser.set_defaults(layers=12)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, subject = torch.device(options.device), SUBJECTS[options.subject]
    if device.type == "cpu":
        limit_memory(options.memory)
    shape = Shape(options.length, options.layers)
    work = prepare(options.row, subject, shape, device, getattr(torch, options.dtype))
    work.warm_up()
    peak = peak_bytes(work.turn, device)
    times = [seconds(work.turn, device) / subject.tokens for _ in range(options.repeats)]
    folder = str(Path(hf_linattn.__file__).resolve().parent)
    print(json.dumps({"seconds": times, "peak_bytes": peak, "package": folder}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
