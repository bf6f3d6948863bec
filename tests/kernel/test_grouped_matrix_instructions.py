"""As test_matrix_instructions.py, for the grouped products: every tile of their tables."""

import os
import re
import subprocess
from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles nothing"),
]
FORMS = ("rows", "input gradient", "weight gradient")


def tiles(form):
    """The table's tiles of one form of product."""
    if find_spec("triton") is None:
        return []
    from isomodels.kernels import grouped_linear_triton as backend

    tables = {"input gradient": "_INPUT_GRADIENT", "weight gradient": "_WEIGHT_GRADIENT"}
    table = getattr(backend, tables.get(form, "_FORWARD"))
    return sorted(set(table.values()))


def launch(form, config):
    """What launches a tile, and the types of its arguments."""
    from isomodels.kernels import grouped_gemm_triton as gemm

    def desc(*shape):
        return f"tensordesc<bf16[{', '.join(map(str, shape))}]>"

    block_m, block_n, block_k = config[:3]
    columns = block_n // config.subtiles
    if form == "weight gradient":
        launcher = gemm._gradient_launcher(config, torch.bfloat16, 64)
        return launcher, {
            "a_desc": desc(1, 1, block_k, block_m),
            "b_desc": desc(1, 1, block_k, block_n),
            "c_desc": desc(1, block_m, columns),
            "offsets_ptr": "*i32",
            **dict.fromkeys("NK", "i32"),
        }
    transposed = form == "input gradient"
    return gemm._launcher(config, torch.bfloat16, transposed), {
        "a_desc": desc(block_m, block_k),
        "b_desc": desc(1, block_k, block_n) if transposed else desc(1, block_n, block_k),
        "c_desc": desc(1, 1, block_m, columns),
        "tiles_ptr": "*i32",
        **dict.fromkeys(("limit", "N", "steps"), "i32"),
    }


@pytest.mark.parametrize(
    ("form", "config"), [(form, config) for form in FORMS for config in tiles(form)]
)
def test_not_one_at_a_time(form, config, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    launcher, types = launch(form, config)
    kernel, constants = launcher.kernel, launcher.constants
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name) or "constexpr" for name in names},
        constexprs={(i,): constants.get(n) for i, n in enumerate(names) if not types.get(n)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if types.get(n, "").startswith("*")
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launcher.options)
    assembly = tmp_path / "kernel.ptx"
    assembly.write_text(made.asm["ptx"])
    assert "wgmma" in made.asm["ptx"]
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", str(assembly)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    assert re.search(r"\b0 bytes spill stores", said)
    assert "serialized" not in said
