"""Where results are to go is looked at before anything is stored."""

from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.jobs.models import Submission
from tokenmill.jobs.output_checks import check_paths, check_unused

OWN = '{"id":"batch_req_0123456789abcdef_1","custom_id":"a"}\n'


def how(output: Path, errors: Path | None = None) -> Submission:
    return Submission("m", output=str(output), errors=None if errors is None else str(errors))


def test_a_new_file_an_empty_one_and_a_device_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "torn").write_bytes(b'{"id":"bat' + bytes(40))  # half a line and zeros: a power cut
    for name in ("new", "empty", "torn"):
        check_paths(how(tmp_path / name))
        check_unused(how(tmp_path / name))
    check_paths(how(Path("/dev/null"), Path("/dev/null")))
    check_paths(Submission("m"))
    assert not (tmp_path / "new").exists()  # nothing was created


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("none/out", {"no_output_folder"}),
        (".", {"output_is_folder"}),
        ("file/out", {"unwritable_output", "no_output_folder"}),
        ("thesis", {"foreign_output"}),
        ("x" * 300, {"unwritable_output"}),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, codes: set[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").write_text("my thesis\n")
    for submission in (how(tmp_path / name), how(tmp_path / "fine", tmp_path / name)):
        with pytest.raises(UsageError) as caught:
            check_paths(submission)
        assert caught.value.code in codes
        assert str(tmp_path / name) in caught.value.message
        assert caught.value.hint
    assert (tmp_path / "thesis").read_text() == "my thesis\n"


def test_results_and_errors_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "link").symlink_to("there")
    for one, other in (("new", "new"), ("there", "there"), ("there", "link")):
        with pytest.raises(UsageError) as caught:
            check_paths(how(tmp_path / one, tmp_path / other))
        assert caught.value.code == "same_output"


def test_another_batch_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(OWN)
    check_paths(how(tmp_path / "out"))  # it may be this one's
    with pytest.raises(UsageError, match="batch_0123456789abcdef"):
        check_unused(how(tmp_path / "out"))
    with pytest.raises(UsageError, match="batch_0123456789abcdef"):
        check_unused(how(tmp_path / "new", tmp_path / "out"))
