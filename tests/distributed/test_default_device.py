"""torch.set_default_device moves what a script makes, and nothing of ours: every tensor of ours says its device."""

import ast

from torch.utils._device import _device_constructors

from shardwright.common import package

MAKERS = {function.__name__ for function in _device_constructors()}
# Models are the script's: they are made on the device that it sets.
MODELS = ("training/zoo/models/", "ocr/networks/")


def undecided(source: str) -> list[str]:
    """The calls that make a tensor wherever the default device is."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_of_ours_says_its_device():
    assert undecided("torch.zeros(3); torch.zeros(3, device=d); torch.zeros_like(x)") == ["torch.zeros(3)"]
    files = [
        path for path in package.FOLDER.rglob("*.py") if not str(path.relative_to(package.FOLDER)).startswith(MODELS)
    ]
    assert len(files) > 300
    found = {str(path.relative_to(package.FOLDER)): undecided(path.read_text()) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == {}
