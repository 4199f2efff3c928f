"""No file of ours calls what could run code out of what came from the network or a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "thalweg"
MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"),
    *("multiprocessing", "concurrent.futures.process", "torch.multiprocessing", "yaml"),
}
NAMES = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle", "recv_pyobj", "send_pyobj", "load_pyobj", "recv_serialized"),
    *("ProcessPoolExecutor", "load_module", "exec_module"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
OF_MODULES = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}
ALLOWED = {
    ("workloads/lookup.py", "exec"),  # the user's own file, which the command line names
    ("workloads/lookup.py", "compile"),
}


def found(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inner = (f"{module}.{name.name}" for name in node.names)
            yield from (name for name in (module, *inner) if name in MODULES)
            yield from (name.name for name in node.names if name.name in NAMES)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in NAMES:
                yield called.id
            elif isinstance(called, ast.Attribute):
                owner = called.value.id if isinstance(called.value, ast.Name) else ""
                if (owner, called.attr) in OF_MODULES or called.attr in NAMES - {"compile", "eval"}:
                    yield called.attr
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "weights_only"):
                    yield keyword.arg


FILES = sorted(SOURCE.rglob("*.py"))


def test_no_file_does() -> None:
    assert len(FILES) > 200
    calls = {
        (str(path.relative_to(SOURCE)), name)
        for path in FILES
        for name in found(ast.parse(path.read_text()))
    }
    assert calls == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing",
        "from torch import multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x')",
        "f('x', allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(things)",
    ],
)
def test_one_that_did_would_be_seen(text: str) -> None:
    assert list(found(ast.parse(text)))
