"""Waiting sums of a tree over leaves of K, parked in memory (the L2) between leaves.

A tree over 4 leaves has 2 sums waiting, one over 8 has 3; the registers hold two accumulators of a
large tile at most. The others are written and read a few times a tile, element by element by the
thread that owns it: as inline assembly, since Triton's own loads and stores would first move a tile
through shared memory, and a variable that lives across the loop can be copied in every step of it.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools

import triton
import triton.language as tl


@triton.jit
def parking_places(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where each element of a tile [BLOCK_M, BLOCK_N] lies in its parking space.

    Any bijection is right. This one puts the 8 rows by 4 pairs of columns that a warp's lanes hold
    of a matrix unit's result side by side.
    """
    r, c = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    lane = (r % 8) * 4 + (c % 8) // 2
    return (((r // 8) * (BLOCK_N // 8) + c // 8) * 2 + c % 2) * 32 + lane


@triton.jit
def settled(acc, POP: tl.constexpr):
    """The accumulators in registers of their own, once the matrix units are done.

    Triton waits at the first use in a block: without this one it could lie in a branch that is not
    taken. And a sum that waits in the accumulators' own registers would make the compiler run the
    matrix instructions one at a time.
    """
    if POP != "":
        acc = tl.inline_asm_elementwise(
            "mov.f32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1
        )
    return acc


@triton.jit
def unpark_all(
    total, level, leaf, SPACE: tl.constexpr, POP: tl.constexpr, CONSTRAINTS: tl.constexpr,
    PACK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add the sums parked for this leaf: of one leaf before it, then of two, then of four."""
    if POP != "":
        # A barrier that the pipeliner of the loop does not see, should the layouts of writing and
        # reading ever differ.
        leaf = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [leaf], dtype=tl.int32, is_pure=False, pack=1
        )
    if FIRST == 0 and leaf % 2 == 1:
        total = _pop(total, level, POP, CONSTRAINTS, PACK)
    if leaf % 4 == 3:
        total = _pop(total, level + SPACE, POP, CONSTRAINTS, PACK)
        if leaf % 8 == 7:
            total = _pop(total, level + 2 * SPACE, POP, CONSTRAINTS, PACK)
    return total


@triton.jit
def _pop(x, place, POP: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    """What is parked, plus x."""
    if POP == "":
        x = tl.load(place) + x
    else:
        x = tl.inline_asm_elementwise(
            POP, CONSTRAINTS, [place.to(tl.int64), x], dtype=tl.float32, is_pure=False, pack=PACK
        )
    return x


@triton.jit
def park(total, level, leaf, SPACE: tl.constexpr, POP: tl.constexpr):
    """Park a sum of 1, 2 or 4 leaves, as the number of this leaf says."""
    depth = tl.where(leaf % 2 == 0, 0, tl.where(leaf % 4 == 1, 1, 2))
    place = level + depth * SPACE
    if POP == "":
        tl.store(place, total)
    else:
        tl.inline_asm_elementwise(
            "st.global.f32 [$1], $2; mov.b32 $0, 0;",
            "=r,l,f",
            [place.to(tl.int64), total],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def pop_asm(count: int) -> tuple[str, str]:
    """Assembly and constraints that load `count` values and then add each to another."""
    temporaries = f".reg .f32 t<{count}>;"
    loads = "".join(f" ld.global.f32 t{i}, [${count + i}];" for i in range(count))
    adds = "".join(f" add.rn.f32 ${i}, t{i}, ${2 * count + i};" for i in range(count))
    constraints = ["=&f"] * count + ["l"] * count + ["f"] * count
    return f"{{ {temporaries}{loads}{adds} }}", ",".join(constraints)
