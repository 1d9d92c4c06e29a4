"""Files of a repository chosen by the name of a quantization."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import MissingSplit, UnknownModel, UsageError
from tokenmill.model.pull.quants import FileSet, RemoteFile, choose, file_sets
from tokenmill.model.pull.store import split_of

REPO = "owner/model-GGUF"


def sets_of(*paths: str) -> tuple[FileSet, ...]:
    return file_sets([RemoteFile(path, 10) for path in paths])


KIMI = sets_of(
    *(f"Q4_K_S/Kimi-K2.5-Q4_K_S-{i:05}-of-00003.gguf" for i in (3, 1, 2)),
    *(f"UD-Q4_K_XL/Kimi-K2.5-UD-Q4_K_XL-{i:05}-of-00002.gguf" for i in (1, 2)),
    "Kimi-K2.5-IQ1_S.gguf",
    "kimi-k2.5.q8_0.gguf",
    "BF16/kimi-00001-of-00001.gguf",
    "mmproj-BF16.gguf",
    "imatrix_unsloth.gguf",
    "README.md",
)


@pytest.mark.parametrize(
    ("wanted", "first", "files"),
    [
        ("Q4_K_S", "Q4_K_S/Kimi-K2.5-Q4_K_S-00001-of-00003.gguf", 3),
        ("q4_k_s", "Q4_K_S/Kimi-K2.5-Q4_K_S-00001-of-00003.gguf", 3),
        ("UD-Q4_K_XL", "UD-Q4_K_XL/Kimi-K2.5-UD-Q4_K_XL-00001-of-00002.gguf", 2),
        ("Q4_K_XL", "UD-Q4_K_XL/Kimi-K2.5-UD-Q4_K_XL-00001-of-00002.gguf", 2),
        ("IQ1_S", "Kimi-K2.5-IQ1_S.gguf", 1),
        ("Q8_0", "kimi-k2.5.q8_0.gguf", 1),
        ("bf16", "BF16/kimi-00001-of-00001.gguf", 1),
        ("Q4_K_S/Kimi-K2.5-Q4_K_S-00002-of-00003.gguf", "Q4_K_S/Kimi-K2.5-Q4_K_S-00001-of-00003.gguf", 3),
        ("Kimi-K2.5-IQ1_S.gguf", "Kimi-K2.5-IQ1_S.gguf", 1),
    ],
)
def test_a_quant_or_a_file_selects_one_whole_set(wanted: str, first: str, files: int) -> None:
    chosen = choose(REPO, KIMI, wanted)
    assert (chosen.files[0].path, len(chosen.files)) == (first, files)


@pytest.mark.parametrize("wanted", ["Q4_K", "Q4", "K_S", "Q2_K", "S", "mmproj-BF16.gguf", "other.gguf"])
def test_errors_of_unknown_quants_list_the_known_ones(wanted: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        choose(REPO, KIMI, wanted)
    assert caught.value.hint is not None
    for label in ("BF16", "IQ1_S", "Q4_K_S", "UD-Q4_K_XL", "q8_0"):
        assert label in caught.value.hint


def test_an_exact_quant_beats_one_that_contains_it() -> None:
    sets = sets_of("m-UD-Q4_K_S.gguf", "m-Q4_K_S.gguf")
    assert choose(REPO, sets, "Q4_K_S").files[0].path == "m-Q4_K_S.gguf"
    assert choose(REPO, sets, "UD-Q4_K_S").files[0].path == "m-UD-Q4_K_S.gguf"


def test_several_sets_are_named_so_that_one_can_be_chosen() -> None:
    sets = sets_of("a-Q4_0.gguf", "b-Q4_0.gguf")
    with pytest.raises(UsageError) as caught:
        choose(REPO, sets, "Q4_0")
    assert "hf:owner/model-GGUF:a-Q4_0.gguf" in str(caught.value.hint)
    assert "hf:owner/model-GGUF:b-Q4_0.gguf" in str(caught.value.hint)


def test_no_quant_is_enough_where_there_is_only_one_model() -> None:
    assert choose(REPO, sets_of("a-Q4_0.gguf"), None).label == "Q4_0"
    with pytest.raises(UsageError) as caught:
        choose(REPO, KIMI, None)
    assert "Q4_K_S" in str(caught.value.hint)


def test_a_repository_without_ggufs_is_an_error() -> None:
    with pytest.raises(UnknownModel, match="no GGUF"):
        choose(REPO, sets_of("model.safetensors", "mmproj-F16.gguf"), "Q4_0")


def test_an_incomplete_set_is_refused() -> None:
    sets = sets_of("m-Q4_0-00001-of-00003.gguf", "m-Q4_0-00003-of-00003.gguf")
    with pytest.raises(MissingSplit, match="lacks 1 of the 3"):
        choose(REPO, sets, "Q4_0")


@given(stem=st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,20}", fullmatch=True), count=st.integers(1, 99999), data=st.data())
def test_split_names_read_back(stem: str, count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(1, count))
    assert split_of(f"{stem}-{index:05}-of-{count:05}.gguf") == (stem, index, count)


@given(st.lists(st.from_regex(r"[a-z/]{1,8}-(Q4_0|Q8_0)(-0000[12]-of-00002)?\.gguf", fullmatch=True), unique=True))
def test_grouping_loses_no_file(paths: list[str]) -> None:
    grouped = [file.path for item in sets_of(*paths) for file in item.files]
    assert sorted(grouped) == sorted(paths)
