"""The assembler keeps the products of attention's form for Hopper in flight: no GPU is needed.

The bits are compared on a GPU, in test_attention_triton.py.
"""

import re
import subprocess
from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    TRITON = version("triton")
except PackageNotFoundError:
    TRITON = "none"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRITON.startswith("3.6."), reason="the form is for Triton 3.6"),
]
SWIZZLE = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)


def assembled(page: int, folder) -> str:
    """What ptxas says; `page` slots in a page, or 0 for packed sequences."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon._runtime import GluonASTSource

    from isomodels.kernels import attention_hopper_triton as hopper

    kernel = hopper._attention_tiles
    height = page or 64
    box = f"tensordesc<bf16[{height}, 64],{SWIZZLE}>"
    constants = {"GROUP": 4, "PAGE": page, "PAGED": page > 0, "HEIGHT": height}
    absent = ("lse_ptr",) if page else ("seq_lens", "block_table")
    constants |= dict.fromkeys(absent)
    types = {
        "q_desc": f"tensordesc<bf16[64, 128],{SWIZZLE}>",
        **dict.fromkeys(("k_desc", "v_desc"), box),
        "out_ptr": "*bf16",
        **dict.fromkeys(("lse_ptr", "parked_ptr"), "*fp32"),
        **dict.fromkeys(("cu_seqlens", "seq_lens", "block_table"), "*i32"),
        "scale_log2": "fp32",
    }
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n == "num_heads"]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    with hopper._registers_kept():
        made = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": hopper.NUM_WARPS}
        )
    assembly = folder / "kernel.ptx"
    assembly.write_text(made.asm["ptx"])
    assert "wgmma" in made.asm["ptx"]
    assert "setmaxnreg" not in made.asm["ptx"]
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", str(assembly)]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", [0, 16, 64])
def test_not_one_at_a_time(page, tmp_path):
    said = assembled(page, tmp_path)
    assert re.search(r"Used \d+ registers", said)
    assert "serialized" not in said
