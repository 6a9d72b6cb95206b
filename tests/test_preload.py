"""Loading torch's libraries ahead is harmless, whatever becomes of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tui3090 import preload


@pytest.mark.parametrize("library", ["none", "not a library"])
def test_a_library_that_can_not_be_loaded_leaves_the_import_as_it_is(tmp_path: Path, library: str) -> None:
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("import torch._C\n")
    (folder / "_C.py").write_text("here = True\n")
    if library != "none":
        (folder / "lib" / "libtorch.so").write_text(library)
    script = "from tui3090.preload import libraries_first\nwith libraries_first(): import torch\nprint(torch._C.here)"
    root = Path(__file__).parent.parent
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(tmp_path), str(root)]}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_an_error_inside_is_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(library: Path) -> None:
        asked.append(library)
        raise OSError("no dlopen here")

    asked: list[Path] = []
    monkeypatch.setattr(preload, "_open", fail)
    before = list(sys.meta_path)
    with preload.libraries_first():
        assert sys.meta_path[0].find_spec("torch._C", ["/nowhere"], None) is None
        assert importlib.util.find_spec("json") is not None
    assert asked == [Path("/nowhere/lib/libtorch.so")]
    assert sys.meta_path == before
