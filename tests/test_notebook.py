"""docs/quickstart.ipynb, as it is and as it runs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.programs import ROOT, load

PATH = ROOT / "docs/quickstart.ipynb"


def text_of(cell):
    return "".join(cell["source"])


def test_the_notebook_is_small_was_run_and_names_no_machine():
    text = PATH.read_text()
    assert len(text) < 300_000
    cells = [x for x in json.loads(text)["cells"] if x["cell_type"] == "code"]
    assert [x["execution_count"] for x in cells] == list(range(1, len(cells) + 1))
    kinds = [key for x in cells for out in x["outputs"] for key in out.get("data", ())]
    assert {"image/png", "image/gif"} <= set(kinds)
    assert "/tmp/" not in text and "Error" not in text


@pytest.mark.long
def test_the_notebook_clones_trains_plots_and_plays(repository, tmp_path, monkeypatch):
    """It clones a copy of the working tree."""
    import nbclient
    import nbformat

    for words in (["add", "-A"], ["commit", "-qm", "x"]):
        author = ["-c", "user.name=x", "-c", "user.email=x@x.x"]
        subprocess.run(["git", *author, *words], cwd=repository, check=True)
    monkeypatch.setenv("REPOSITORY", f"file://{repository}")
    monkeypatch.setenv("HOME", str(tmp_path))
    bin = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", bin)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # All is there: pip must add nothing.
    (tmp_path / "work").mkdir()
    notebook = nbformat.read(PATH, as_version=4)
    [train] = (x for x in notebook.cells if "--total_steps 300000" in text_of(x))
    train.source = train.source.replace("300000", "4000")
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "work")}},
    )  # fmt: skip
    client.execute()
    assert load(tmp_path / "logs/torchbeast", "cartpole")["step"] >= 4000
    work = tmp_path / "work/torchbeast"
    assert (work / "cartpole.png").exists() and (work / "game.gif").exists()
    printed = "".join(
        out.get("text", "") for x in notebook.cells for out in x.get("outputs", ())
    )
    assert "5 episodes: mean return" in printed and "Error" not in printed
