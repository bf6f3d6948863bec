"""Launches that skip Triton's search: which kernel is kept."""

import pytest

pytest.importorskip("triton")

from triton.runtime import JITFunction

from isomodels.kernels.launch_triton import Launcher


class Compiled:
    """A compiled kernel: notes what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Promise:
    """What Triton 3.7 gives while it compiles in the background; it has no grid of its own."""

    def __init__(self, kernel):
        self.result = lambda: kernel


@pytest.mark.parametrize("given", [lambda kernel: kernel, Promise], ids=["kernel", "promise"])
def test_the_compiled_kernel_is_kept_whatever_the_first_launch_gives(given, monkeypatch):
    compiled, first = Compiled(), []

    class Kernel(JITFunction):
        def __init__(self):
            pass

        def __getitem__(self, grid):
            return lambda *arguments, **named: (
                first.append((grid, arguments, named)) or given(compiled)
            )

    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    launch = Launcher(Kernel(), {"BLOCK": 64}, num_warps=4)
    for number in range(3):
        launch((number, 1, 1), "x", key="bf16")
    assert first == [((0, 1, 1), ("x",), {"BLOCK": 64, "num_warps": 4})]
    assert compiled.launches == [((1, 1, 1), ("x", 64)), ((2, 1, 1), ("x", 64))]
