"""Heavy imports pause garbage collection, and only for their own time."""

import gc
import sys

import pytest

from rolecall.heavy import import_heavy


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("end", ["", "raise OSError('no')"])
def test_collection_is_paused_for_the_import_and_then_as_before(tmp_path, monkeypatch, before, end):
    (tmp_path / "found_heavy.py").write_text(f"import gc\nseen = gc.isenabled()\nimport sys; sys.seen = seen\n{end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "seen", None, raising=False)
    monkeypatch.delitem(sys.modules, "found_heavy", raising=False)
    if not before:
        gc.disable()
    try:
        if end:
            with pytest.raises(OSError, match="no"):
                import_heavy("found_heavy")
        else:
            assert import_heavy("found_heavy").seen is False
        assert sys.seen is False
        assert gc.isenabled() == before
    finally:
        gc.enable()
        sys.modules.pop("found_heavy", None)
