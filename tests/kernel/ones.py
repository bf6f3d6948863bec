"""Compiles the Triton kernels for Hopper as far as their own IR, with each integer argument 1.

Triton makes a constant of an integer argument that is 1, and a constant has no methods: `.to(...)`
does not compile on it. Neither the interpreter nor a model of many heads shows that. No GPU is
needed and no kernel runs; Triton reads TRITON_INTERPRET when it is imported, and a launch here
leaves its mark in Triton, so this is a program of its own. It prints what failed, a line each, and
the names of the kernels that it compiled.
"""

import json
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from isomodels.kernels.gated_delta import state_layout
from isomodels.kernels.rope import rope_table
from isomodels.validate.battery import operators

TARGET = GPUTarget("cuda", 90, 32)
compiled: set[str] = set()
failed: dict[str, str] = {}


class Driver:
    """As much of a driver as a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Nothing:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...

    def __getitem__(self, grid: Any) -> Any:
        return self.run


def compile_ones(
    kernel: Any, key: Any, signature: dict, device: int, constants: dict, options: Any, attrs: dict,
    *_: Any,
) -> Nothing:  # fmt: skip
    """Instead of `JITFunction._do_compile`: with 1 for every integer that may become a constant."""
    params = kernel.params
    free = {p.name for p in params if p.do_not_specialize}
    whole = [n for n, kind in signature.items() if kind in ("i32", "i64") and n not in free]
    ones = dict.fromkeys(whole, "constexpr")
    values = {(i,): 1 for i, p in enumerate(params) if p.name in ones}
    kept = {at: value for at, value in attrs.items() if at not in values}
    source = kernel.ASTSource(kernel, signature | ones, constants | values, kept)
    name = f"{kernel.module.rpartition('.')[2]}.{kernel.fn.__name__}"
    try:
        to_ir(kernel, source, options)
    except Exception as error:  # any says that this form does not compile
        last = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
        failed[f"{name}({', '.join(whole)})"] = last
    compiled.add(name)
    kernel.device_caches[device][0][key] = Nothing()
    return kernel.device_caches[device][0][key]


def to_ir(kernel: Any, source: Any, options: Any) -> None:
    """Triton's IR of a kernel, or whatever error there is."""
    backend = kernel.device_caches[0][3]
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(TARGET, options, functions, backend.get_module_map(), context)


T, H, D = 20, 4, 64  # tokens, heads of a row, their size
BF16 = torch.bfloat16


def b(*shape: int) -> Tensor:
    """Numbers in bf16."""
    return torch.randn(*shape).to(BF16)


def f(*shape: int) -> Tensor:
    """Numbers in fp32."""
    return torch.randn(*shape)


def i32(*values: int) -> Tensor:
    """Indices."""
    return torch.tensor(values, dtype=torch.int32)


def calls() -> dict[str, list[tuple]]:
    """Arguments of every operator; several where it has several forms."""
    ids, bounds, table = torch.arange(T), i32(0, T), torch.tensor([[1, 0]], dtype=torch.int32)
    lengths = bounds[1:]
    q, k, v, x, w, n = b(T, H, D), b(T, 2, D), b(T, 2, D), b(T, 256), b(96, 256), b(256)
    cache, lse = b(2, 2, 16, 2 * D), f(T, H)
    paged = (table, bounds, lengths, 0.25, T, 2 * T)
    decode = (table, i32(0, 1), lengths, 0.25, 1, 3000)  # of two segments
    # of 2 heads: nope 32, rope 16, v 32, rank 64
    mla = (b(T, 2, 32), b(T, 2, 16), b(T, 64), b(T, 16), b(128, 64))
    latents = b(2, 1, 16, 80)
    qn, qr, latent, k_rope, kv_b = mla
    turned = rope_table(D, 1e6, 64)
    delta = (b(T, 2, D), b(T, 2, D), b(T, H, D), -f(T, H).abs(), f(T, H).sigmoid())
    wide_rows = torch.zeros(1, 12288, dtype=BF16)  # a shape whose leaves are programs of their own
    wide = (b(T, 2, 128), b(T, 2, 128), b(T, H, 128), *delta[3:])
    pages = [torch.zeros(2, *s, dtype=t) for s, t in state_layout(2, H, D, D, BF16, "cuda")]
    expert_ids = torch.stack([(ids * s + s) % 5 for s in (1, 2, 3)], 1).sort(1).values.int()
    order = torch.arange(3 * T, dtype=torch.int32)
    places, offsets, experts = order.view(T, 3), i32(0, 10, 20, 30, 40, 60), b(5, 96, 256)
    slots, weights = b(3 * T, 256), f(T, 3)
    logits, window, slot = f(T, 96), torch.zeros(2, 3, 256, dtype=BF16), i32(1)
    qkv = b(T, 2 * H, D)
    ropes = (turned, b(D), b(D))
    return {
        "attention": [(q, k, v, bounds, 0.25)],
        "paged_attention": [(q, cache, *paged), (q[:1], cache, *decode)],
        "write_kv_cache": [(k, v, cache, ids)],
        "attention_backward": [(q, q, k, v, bounds, q, lse, 0.25)],
        "causal_conv": [(x, b(256, 4), bounds)],
        "paged_causal_conv": [(x, b(256, 4), window, slot, bounds, lengths)],
        "causal_conv_backward": [(x, x, b(256, 4), bounds)],
        "delta_gates": [(b(T, H), b(T, H), f(H), f(H))],
        "delta_gates_backward": [
            (f(T, H), f(T, H), b(T, H), b(T, H), f(H), f(H), f(T, H), f(T, H))
        ],
        "embedding": [(ids, w)],
        "embedding_backward": [(x, ids, 96)],
        "gated_delta_rule": [(*delta, bounds)],
        "paged_gated_delta_rule": [
            (*delta, *pages, slot, bounds, lengths, T),
            (*(z[:1] for z in delta), *pages, slot, i32(0, 1), lengths, 1),
        ],
        "gated_delta_rule_backward": [(b(T, H, 128), *wide, bounds)],
        "gated_rms_norm": [(q, q, b(D), 1e-6)],
        "gated_rms_norm_backward": [(q, q, q, b(D), 1e-6)],
        "grouped_linear": [(x, experts, offsets, order, places), (slots, experts, offsets)],
        "grouped_linear_backward": [(b(3 * T, 96), x, experts, offsets, order, places, True, True)],
        "linear": [(x, w), (x, w, b(96))],
        "linear_input_gradient": [(b(T, 96), w)],
        "linear_weight_gradient": [(b(T, 96), x)],
        "lm_head": [(x, w)],
        "log_normalize": [(logits, 0.7)],
        "logprobs": [(x, w, 0.7)],
        "token_logprobs": [(x, w, ids, 0.7)],
        "logits_backward": [(logits, x, w)],
        "token_logprobs_backward": [
            (f(T), x, w, ids, f(T, 2), 0.7),
            (f(T), x, w, ids, f(T, 2), 0.7, torch.zeros(T, 96, dtype=BF16), f(T, 1)),
        ],
        "token_logprobs_kept": [(x, w, ids, 0.7, 96)],
        "mla_attention": [(*mla, bounds, 0.25)],
        "paged_mla_attention": [
            (qn, qr, latents, kv_b, *paged),
            (qn[:1], qr[:1], latents, kv_b, *decode),
        ],
        "write_latent_cache": [(latent, k_rope, latents, ids)],
        "mla_attention_backward": [(b(T, 2, 32), *mla, bounds, b(T, 2, 32), f(T, 2), 0.25)],
        "moe_combine": [(slots, weights, places), (slots, weights, places, x, f(T, 1))],
        "moe_combine_backward": [(x, slots, weights, places, x, f(T, 1))],
        "moe_sort": [(expert_ids, 5), (expert_ids.repeat(40, 1), 5)],
        "one_plus": [(n,)],
        "partial_rope": [(q, ids, rope_table(16, 1e6, 64), b(D), 1e-6)],
        "partial_rope_backward": [(q, q, ids, rope_table(16, 1e6, 64), b(D), 1e-6)],
        "rms_norm": [(x, n, 1e-6)],
        "add_rms_norm": [(x, x, n, 1e-6)],
        "rms_norm_backward": [(x, None, x, n, 1e-6), (x, x, x, n, 1e-6)],
        "rope": [(q, ids, turned, b(D), 1e-6), (q, ids, turned, None, 1e-6)],
        "rope_backward": [(q, q, ids, turned, b(D), 1e-6)],
        "rope_qkv": [(qkv, ids, *ropes, H, 1e-6)],
        "rope_qkv_to_cache": [(qkv, ids, *ropes, H, 1e-6, cache, ids)],
        "rope_qkv_backward": [(q, k, v, qkv, ids, *ropes, 1e-6)],
        "router_logits": [(x, w)],
        "route": [
            (logits, 6, "softmax", False),
            (logits, 6, "sigmoid", True, 2.5, f(96), 8, 4),
        ],
        "route_backward": [(f(T, 3), logits, expert_ids, "softmax", True, 1.0)],
        "router_logits_backward": [(logits, x, w, True, True)],
        "row_linear": [
            (x, w),
            (wide_rows.expand(200, -1).contiguous(), wide_rows.expand(4096, -1)),
        ],
        "sigmoid_gate": [(q, q)],
        "sigmoid_gate_backward": [(q, q, q)],
        "swiglu": [(x,)],
        "swiglu_backward": [(b(T, 128), x)],
    }


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction._do_compile = compile_ones  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.manual_seed(0)
    known, given = operators(), calls()
    for name in known.keys() - given.keys():
        failed[name] = "no arguments of this operator are stated"
    for name, variants in given.items():
        for arguments in variants:
            try:
                known[name]._backend_fns["cuda"](*arguments)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
                if "-v" in sys.argv:
                    traceback.print_exc()
    print(json.dumps({"failed": failed, "compiled": sorted(compiled)}))


if __name__ == "__main__":
    main()
