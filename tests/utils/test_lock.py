"""One process to a folder."""

from pathlib import Path

import pytest

from hf_linattn.utils.lock import only_one


def test_a_folder_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        with only_one(tmp_path / "new"), pytest.raises(FileExistsError, match=r"Another process.*new.*wait for it"):  # noqa: SIM117
            with only_one(tmp_path / "new"):
                pass
    with pytest.raises(ZeroDivisionError), only_one(tmp_path / "new"):
        raise ZeroDivisionError
    with only_one(tmp_path / "new"):
        pass
