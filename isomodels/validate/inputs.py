"""Inputs that are hard on a kernel: values, and the ways in which the same values can be stored."""

from typing import Any

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]

# How each kind is hard: sums that cancel over 40 binades, subnormal terms and results, zeros of
# both signs, exact ties of the last rounding, exponents near both ends of the range.
KINDS = ("normal", "wide", "subnormal", "zeros", "ties", "huge", "tiny")


def hard(
    *shape: int,
    kind: str = "wide",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Random values of one of `KINDS`, from a generator of the device."""
    generator = torch.Generator(device).manual_seed(seed)
    # Hosts change the default dtype and device.
    plain: dict[str, Any] = {"dtype": torch.float32, "device": device, "generator": generator}

    def uniform() -> Tensor:
        return torch.rand(shape, **plain)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).float()

    x = torch.randn(shape, **plain)
    if kind == "wide":
        x = x * torch.exp2(integers(-20, 21))
    elif kind == "subnormal":
        x = torch.where(uniform() < 0.7, x * 2.0**-130, x)
    elif kind == "zeros":
        chance = uniform()
        x = torch.where(chance < 0.4, 0.0, torch.where(chance < 0.8, -0.0, x))
    elif kind == "ties":
        x = integers(-8, 9) / 8 + 256.0 * (x > 0)
    elif kind == "huge":
        x = x * 2.0**55
    elif kind == "tiny":
        x = x * 2.0**-62
    elif kind != "normal":
        raise ValueError(f"no kind of input is named {kind}")
    return x.to(dtype)


def numbers(
    *shape: int, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Fixed values with exponents from -20 to 20, made of integers: the same on every machine.

    A library's normal distribution is not: its logarithm differs between processors.
    """
    count = torch.Size(shape).numel()
    state = torch.arange(count, dtype=torch.int64, device=device) + seed
    state = state * 6364136223846793005 + 1442695040888963
    mantissa = ((state >> 33) % 65536 - 32768).float() / 32768
    exponent = ((state >> 17) % 41 - 20).float()
    return torch.ldexp(mantissa, exponent).view(shape).to(dtype)


def odd_storage(x: Tensor, offset: int = 1) -> Tensor:
    """The same values at an odd offset of a flat buffer, as in a DDP bucket or a mapped file."""
    flat = x.new_full((x.numel() + offset + 3,), torch.nan)
    view = flat[offset : offset + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def layouts(x: Tensor, brief: bool = False) -> dict[str, Tensor]:
    """The same values [T, ...] in storages that a library would treat differently; or in two."""
    if x.dim() == 1:
        spread = x.new_full((2 * len(x),), torch.nan)
        spread[1::2] = x
        return {"odd offset": odd_storage(x), "every second": spread[1::2]}
    flat = x.flatten(1)  # [T, columns]
    rows, columns = flat.shape
    wide = x.new_full((rows, columns + 5), torch.nan)
    wide[:, 2 : 2 + columns] = flat
    sparse = x.new_full((2 * rows, columns), torch.nan)
    sparse[::2] = flat
    spread = x.new_full((rows, 2 * columns), torch.nan)
    spread[:, 1::2] = flat
    same = {
        "odd offset": odd_storage(flat),
        "offset of 3": odd_storage(flat, 3),
        "columns of a wider matrix": wide[:, 2 : 2 + columns],
        "every second row": sparse[::2],
        "every second column": spread[:, 1::2],
        "transposed storage": flat.t().contiguous().t(),
    }
    names = ("odd offset", "columns of a wider matrix") if brief else tuple(same)
    return {name: same[name].unflatten(1, x.shape[1:]) for name in names}
