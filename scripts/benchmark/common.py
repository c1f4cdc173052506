"""What the scripts of this folder share: how a report is written."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from hf_linattn.utils.files import replacing, write_text

# pictures are written, not shown: no screen is needed
matplotlib.use("Agg")


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report whole or not at all, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=1) + "\n")


def write_report(output: Path, report: dict[str, Any], text: str, figure: Any | None) -> None:
    """Write OUTPUT.json, OUTPUT.md and, of a figure, OUTPUT.png, and print the text."""
    write_json(output.with_suffix(".json"), report)
    write_text(output.with_suffix(".md"), text + "\n")
    if figure is not None:
        figure.tight_layout()
        with replacing(output.with_suffix(".png")) as unfinished:
            figure.savefig(unfinished, dpi=120, bbox_inches="tight")
        plt.close(figure)
    print(text)
