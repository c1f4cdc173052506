"""What reports call a checkpoint and its attention settings."""

from pathlib import Path
from typing import Any


def checkpoint_name(name_or_path: str | None) -> str:
    """What a report calls a checkpoint: its Hub id, or of a folder its name, not where it lies."""
    name = name_or_path or ""
    return Path(name).absolute().name if name and Path(name).is_dir() else name


def attention_text(settings: dict[str, Any]) -> str:
    """The settings of converted attention in a few words."""
    if settings["method"] == "layerwise":
        return "; ".join(f"layer {index}: {attention_text(its)}" for index, its in settings["by_layer"].items())
    parts = []
    if settings["window_size"]:
        parts.append(f"window {settings['window_size']}")
    if settings["global_tokens"]:
        parts.append(f"first {settings['global_tokens']} exact")
    if not settings["far"]:
        parts.append("nothing far")
    elif settings["method"] == "linformer":
        names = {"learned": "trainable, starts as segment means", "cluster": "clusters of keys"}
        start = names.get(settings["projection"], settings["projection"])
        parts.append(f"Linformer k={settings['projection_length']} ({start})")
        if settings.get("tokens_per_slot"):
            parts.append(f"a slot for every {settings['tokens_per_slot']} tokens")
        if settings.get("selected_tokens"):
            parts.append(f"{settings['selected_tokens']} tokens selected")
    else:
        start = {"learned": "trainable, starts as FAVOR+"}.get(settings["feature_map"], settings["feature_map"])
        matched = {"moments": ", matched to moments", "row_moments": ", matched to each document"}
        start += matched.get(settings.get("init", "random"), "")
        parts.append(f"Performer m={settings['num_features']} ({start})")
    if heads := settings.get("softmax_heads"):
        parts.append("softmax in " + ", ".join(f"{layer}:{head}" for layer, its in heads.items() for head in its))
    if settings["layers"] is not None:
        parts.append(f"layers {', '.join(map(str, settings['layers']))}")
    return ", ".join(parts)
