"""The kernels of latent attention, compiled for Hopper at the sizes of real models: they fit its
shared memory, and no product's instructions run one at a time. No GPU is needed.

See test_matrix_instructions.py for what makes the assembler do that.
"""

import os
import re
import subprocess
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles nothing"),
]
RANK, ROPE = 512, 64
SHARED_BYTES = 232_448  # of one program on Hopper
INTEGERS = (
    "num_tiles", "num_seqs", "num_heads", "num_tokens", "num_splits", "max_segments",
    "stride_qt", "stride_qh", "stride_page", "stride_row", "stride_rope", "stride_table",
)  # fmt: skip
FLOATS = ("lse_ptr", "parked_ptr", "part_m", "part_norm", "part_acc")


def said(kernel, constants, options, folder, *, mapped):
    """What ptxas says about a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    types = {
        "scale_log2": "fp32",
        **dict.fromkeys(INTEGERS, "i32"),
        **dict.fromkeys(FLOATS, "*fp32"),
        **dict.fromkeys(("cu_seqlens", "seq_lens", "block_table"), "*i32"),
        "latent_desc": f"tensordesc<bf16[64, {RANK}]>" if mapped else "constexpr",
        "k_rope_desc": f"tensordesc<bf16[64, {ROPE}]>" if mapped else "constexpr",
    }
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    fixed = {(i,): constants.get(n) for i, n in enumerate(names) if signature[n] == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in ("stride_qt", "stride_qh", "stride_row")
    }
    source = ASTSource(kernel, signature, fixed, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= SHARED_BYTES
    (folder / "kernel.ptx").write_text(made.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", str(folder / "kernel.ptx")]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    found = done.stdout + done.stderr
    assert re.search(r"Used \d+ registers", found)
    return found, made.asm["ptx"]


def sizes(page, **more):
    return {
        "PAGE": page, "SEGMENT": 2048, "N": 64, "R": RANK, "P": ROPE, "WIDTH": RANK, "ROPE": ROPE,
        **more,
    }  # fmt: skip


@pytest.mark.parametrize("page", [None, 16, 64])
def test_tiles(page, tmp_path):
    import torch

    from isomodels.kernels.mla_triton import _latent_tiles, tile_config

    mapped = page != 16
    config = tile_config(torch.bfloat16, RANK, mapped)
    constants = sizes(
        page or 1, PAGED=page is not None, TMA=mapped, BLOCK_M=config.pop("BLOCK_M"), ASM=True,
        LEAST=2,
    )  # fmt: skip
    if page is None:
        constants |= {"seq_lens": None, "block_table": None}
    found, ptx = said(_latent_tiles, constants, config, tmp_path, mapped=mapped)
    assert "wgmma" in ptx
    assert "serialized" not in found


@pytest.mark.parametrize(("heads", "page"), [(20, 16), (128, 16), (128, 64)])
def test_decode(heads, page, tmp_path):
    import torch

    from isomodels.kernels.mla_decode_triton import _decode, decode_config

    mapped = page == 64
    config = decode_config(torch.bfloat16, RANK, heads, mapped)
    constants = sizes(page, TMA=mapped, BLOCK_M=config.pop("BLOCK_M"))
    found, _ = said(_decode, constants, config, tmp_path, mapped=mapped)
    assert "serialized" not in found
