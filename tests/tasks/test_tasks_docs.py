"""The snippets of docs/data.md run as they stand."""

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 3
    namespace = {"__name__": "__main__"}
    for snippet in snippets:
        exec(compile(snippet, str(DOC), "exec"), namespace)
