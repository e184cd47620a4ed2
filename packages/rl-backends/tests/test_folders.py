"""Claims about folders that ranks write to: complete or absent, and the same one for all."""

import pytest

from rl_backends.checkpoints.folders import atomic_folder, probe_file, require_shared, sees


def test_a_folder_that_failed_while_it_was_written_does_not_appear(tmp_path):
    def fail():
        with atomic_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_rank_does_not_see_is_refused_by_its_name(tmp_path):
    other = tmp_path / "other disk"
    other.mkdir()
    folder = tmp_path / "checkpoints"
    with probe_file(folder) as (path, token):
        require_shared(folder, {"rank 0": sees(path, token)})
        same_name = other / path.rpartition("/")[2]
        same_name.write_text("of another run")
        blind = {"rank 0": True, "rank 1 on b": sees(str(same_name), token), "rank 2": sees("none", "x")}
        with pytest.raises(ValueError, match=r"not the same folder for rank 1 on b, rank 2: .* every node mounts"):
            require_shared(folder, blind)
    assert not folder.exists()
