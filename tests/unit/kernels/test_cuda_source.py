from __future__ import annotations

import pytest

from hicache.kernels.cuda_source import FOLDER, source


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.cu")))
def test_included_files_are_in_the_text_once(file: str) -> None:
    text = source(file)
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("struct Cursor {") == 1 and text.count("struct Access;") == 1


def test_the_text_is_all_there_is_to_the_key_of_a_compiled_kernel() -> None:
    """A change of an included file is a change of the text."""
    body = (FOLDER / "pages.cuh").read_text().replace("#pragma once", "").strip()
    assert body in source("copy.cu") and body in source("quantise.cu")
