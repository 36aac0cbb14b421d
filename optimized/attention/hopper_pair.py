"""Sums over two programs on two multiprocessors that form a cluster, for Hopper.

x ← x + (x of the same thread of the other program)

Each thread writes its values straight into the shared memory of the other multiprocessor; a barrier there counts the
bytes, and who waits for it finds all of them. Nothing goes through the L2 cache, and copies that are under way are not
waited for, as a fence of the whole cluster would. Both programs add the same two numbers, and get the same bits.
Gluon of Triton 3.6 has no words for this: it is PTX. Source: PTX ISA, sections on st.async, mbarrier, barrier.cluster.

A buffer can be written again once its program has read it: between two exchanges both pass a barrier of the cluster.
They arrive there soon after the one exchange, behind a barrier of their own, and wait in front of the next: nobody
waits long. That barrier is what makes the reads be done; an arrival that releases (the default) would also wait for all
copies under way: 48 and 165 µs in place of 43 and 149 for the rings of 64 and 256 requests on an H200.
"""

from optimized.attention.hopper import WARPS, gl, gluon
from optimized.kernels.common import HAS_TRITON

THREADS = 32 * WARPS
VALUES = 16
# Tiles that the products read begin at multiples of this many bytes; they lie behind the buffer of the exchange.
ALIGNED_BYTES = 1024


def _exchange() -> str:
    """PTX: operands are the sums, the values in the same registers, and the round's number once for each value."""
    step, sent = THREADS * 16, THREADS * 4 * VALUES
    buffer_bytes = -(-(sent + 8) // ALIGNED_BYTES) * ALIGNED_BYTES
    round_number = f"${2 * VALUES}"
    send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"

    def four(name: str, first: int) -> str:
        return "{" + ", ".join(f"{name}{value}" for value in range(first, first + 4)) + "}"

    places = [(first, first // 4 * step) for first in range(0, VALUES, 4)]
    return "\n".join(
        [
            "{",
            f".shared .align 16 .b8 received[{buffer_bytes}];",
            ".reg .u32 thread, rank, parity, here, there, counter, their_counter;",
            ".reg .pred is_one, is_first, makes_counter, is_there;",
            f".reg .f32 other<{VALUES}>;",
            "mov.u32 thread, %tid.x;",
            "mov.u32 counter, received;",
            "mad.lo.u32 here, thread, 16, counter;",
            f"add.u32 counter, counter, {sent};",
            "mov.u32 rank, %cluster_ctarank;",
            "xor.b32 rank, rank, 1;",
            "mapa.shared::cluster.u32 there, here, rank;",
            "mapa.shared::cluster.u32 their_counter, counter, rank;",
            "setp.eq.u32 is_one, thread, 0;",
            f"setp.eq.u32 is_first, {round_number}, 0;",
            "and.pred makes_counter, is_first, is_one;",
            "@makes_counter mbarrier.init.shared::cta.b64 [counter], 1;",
            "@makes_counter fence.mbarrier_init.release.cluster;",
            "barrier.cluster.wait.acquire;",
            # In the first round, both counters must be there before anything is sent.
            "@is_first barrier.cluster.arrive.relaxed;",
            "@is_first barrier.cluster.wait.acquire;",
            f"@is_one mbarrier.arrive.expect_tx.shared::cta.b64 _, [counter], {sent};",
            *(f"{send} [there + {place}], {four('$', first)}, [their_counter];" for first, place in places),
            f"and.b32 parity, {round_number}, 1;",
            "WAITING: mbarrier.try_wait.parity.shared::cta.b64 is_there, [counter], parity;",
            "@!is_there bra WAITING;",
            *(f"ld.shared.v4.f32 {four('other', first)}, [here + {place}];" for first, place in places),
            *(f"add.f32 ${value}, ${value}, other{value};" for value in range(VALUES)),
            "}",
        ]
    )


if HAS_TRITON:
    ADD, PACKED = gl.constexpr(_exchange()), gl.constexpr(VALUES)
    OPERANDS = gl.constexpr(",".join(["=f"] * VALUES + [str(value) for value in range(VALUES)] + ["r"] * VALUES))
    ARRIVE = gl.constexpr("barrier.cluster.arrive.relaxed; mov.u32 $0, $1;")
    LEAVE = gl.constexpr("barrier.cluster.wait.acquire; mov.u32 $0, $1;")
    # One value for each thread of the two programs.
    ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0], [[1]]))
    OF_BOTH = gl.constexpr(2 * THREADS)


@gluon.jit
def arrive():
    """To be called before the first exchange, and after each: behind a barrier of the program, which ends all reads."""
    thread = gl.arange(0, OF_BOTH, layout=ONE_EACH)
    gl.inline_asm_elementwise(ARRIVE, "=r,r", [thread], gl.int32, False, 1)


@gluon.jit
def add_other_program(x, round):
    """A tensor of 16 float32 values a thread, plus that of the other program. `round` counts the calls, from 0."""
    return gl.inline_asm_elementwise(ADD, OPERANDS, [x, round], gl.float32, False, PACKED)


@gluon.jit
def leave():
    """To be called once, after the last exchange: a program ends once the other one has read what it sent."""
    thread = gl.arange(0, OF_BOTH, layout=ONE_EACH)
    gl.inline_asm_elementwise(LEAVE, "=r,r", [thread], gl.int32, False, 1)
