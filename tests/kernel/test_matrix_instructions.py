"""No tile of the tables makes the assembler run matrix instructions one at a time.

It does so, and says so, where it cannot prove that nothing touches accumulators in flight: the
result is right, at half the speed. Compiled for Hopper; no GPU is needed.
"""

import os
import re
import subprocess
from importlib.util import find_spec

import pytest
import torch

from tests.kernel.test_gemm_tuning import TILES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles nothing"),
]
LEAVES = 4


def assembled(tile: tuple[int, ...], leaves: int, result: str, folder) -> str:
    """What ptxas says about the kernel of a tile, for `result` "bf16" or "fp32"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from isomodels.kernels.gemm_triton import Config, _launcher

    config = Config(*tile)
    parts = min(config.parts, leaves)
    result = "fp32" if parts > 1 else result
    dtype = torch.float32 if result == "fp32" else torch.bfloat16
    launcher, _ = _launcher(config, dtype, leaves, parts, False, False, False, False, True)
    leaf = "1, " * (leaves > 1)

    def operand(rows: int) -> str:
        return f"tensordesc<bf16[{leaf}{rows}, {config.block_k}]>" if rows else ""

    def target(columns: int) -> str:
        return f"tensordesc<{result}[{config.block_m}, {columns}]>" if columns else ""

    types = {
        "a_desc": operand(config.block_m),
        "b_desc": operand(config.block_n),
        "b2_desc": operand(config.beside),
        "c_desc": target(config.block_n // config.subtiles),
        "c2_desc": target(config.beside),
        "parked_ptr": "*fp32",
        **dict.fromkeys(("M", "N", "leaf_steps"), "i32"),
    }
    kernel, constants = launcher.kernel, launcher.constants
    names = kernel.arg_names
    signature = {name: types.get(name) or "constexpr" for name in names}
    constexprs = {(i,): constants.get(name) for i, name in enumerate(names) if not types.get(name)}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs),
        target=GPUTarget("cuda", 90, 32),
        options=launcher.options,
    )
    assembly = folder / "kernel.ptx"
    assembly.write_text(made.asm["ptx"])
    assert "wgmma" in made.asm["ptx"]
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", str(assembly)]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_not_one_at_a_time(kind, tile, tmp_path):
    leaves = LEAVES if kind == "tree" else 1
    said = assembled(tile, leaves, "fp32" if kind == "head" else "bf16", tmp_path)
    assert re.search(r"Used \d+ registers", said)
    assert "serialized" not in said
