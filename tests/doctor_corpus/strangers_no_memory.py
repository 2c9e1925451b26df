"""Painted logs of servers that run out of memory."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    CAP,
    CHUNK,
    CONS,
    DECODE_WRONG,
    DOWN,
    GRAPH,
    MEM,
    UP,
    Painter,
    Written,
    done,
)
from strangers_paper import (
    A10G,
    A100_40,
    A100_80,
    A100_TP2,
    H100_8B,
    H100_70B,
    L4,
    L4_7B,
    RTX_4090,
    Machine,
    paper,
)
from strangers_state import load
from strangers_traces import BEGIN, LOOP, killed, no_memory, trace


def init_weights(r: Random) -> Written:
    sheet = paper(r, A100_80, RTX_4090, A10G, H100_70B)
    sheet.fraction = round(sheet.machine.weights / sheet.machine.gb - 0.01, 2)
    sheet.start("weights", mem_fraction_static=sheet.fraction)
    sheet.say(
        f"Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem={sheet.machine.gb - 0.4 - sheet.machine.weights:.2f} GB"
    )
    trace(
        sheet,
        (*BEGIN, ("model_executor/model_runner.py", 841, "init_memory_pool")),
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    )
    killed(sheet)
    return done(
        sheet,
        "oom-init",
        "static-share",
        "The weights fill the static share, nothing is left of it for the pool: raise the share.",
        ((MEM, UP),),
        ((MEM, DOWN),),
    )


def init_graphs(r: Random) -> Written:
    sheet = paper(
        r, H100_8B, H100_70B, A100_TP2, A100_40, RTX_4090, era=r.choice(("2025", "0.5.23"))
    )
    sheet.fraction = 0.97
    sheet.start("graphs")
    trace(
        sheet,
        (*BEGIN, ("model_executor/cuda_graph_runner.py", 331, "capture")),
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 258.00 MiB. GPU 0 has a total capacity of "
        f"{sheet.machine.gb:.2f} GiB of which 102.44 MiB is free.",
    )
    sheet.bare("Possible solutions:")
    sheet.bare("1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)")
    sheet.bare("2. set --cuda-graph-max-bs to a smaller value (e.g., 16)")
    sheet.bare("3. disable torch compile by not using --enable-torch-compile")
    killed(sheet)
    return done(
        sheet,
        "oom-init",
        "graphs",
        "Graph capture finds no memory: a smaller static share or fewer graphs.",
        ((MEM, DOWN), (GRAPH, DOWN)),
        ((MEM, UP), (GRAPH, UP)),
    )


def init_too_large(r: Random) -> Written:
    sheet = paper(r, RTX_4090, A10G, L4_7B)
    sheet.machine = Machine(
        sheet.machine.device, sheet.machine.gb, "meta-llama/Llama-3.3-70B-Instruct", 40.0, 163840
    )
    sheet.start("weights")
    trace(
        sheet,
        (
            *BEGIN,
            ("model_executor/model_runner.py", 610, "load_model"),
            ("models/llama.py", 380, "__init__"),
        ),
        no_memory(sheet, "448.00 MiB", "190.69 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-init",
        "too-large",
        "The weights themselves do not fit on the device.",
        (),
        ((MEM, UP),),
    )


def oom_prefill(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_80, H100_70B)
    chunk = r.choice((8192, 16384))
    sheet.start(chunked_prefill_size=chunk, free=r.uniform(2, 4))
    load(sheet, r.randint(15, 50), running=(20, 60), usage=(0.5, 0.9), queue=(0, 25))
    sheet.prefill(3, chunk, 0, 0.8, 40, 12)
    trace(
        sheet,
        (
            *LOOP,
            ("model_executor/model_runner.py", 1060, "forward_extend"),
            ("models/llama.py", 93, "forward"),
            ("layers/activation.py", 44, "forward_native"),
        ),
        no_memory(sheet, f"{chunk * 0.00010681:.2f} GiB", "411.50 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-prefill",
        "forward-extend",
        f"CUDA runs out of memory in forward_extend of a batch of {chunk} tokens.",
        ((CHUNK, DOWN), (MEM, DOWN)),
        ((CHUNK, UP), (MEM, UP), (CAP, UP)),
    )


def oom_prefill_by_line(r: Random) -> Written:
    sheet = paper(r, A100_40, H100_8B, RTX_4090)
    sheet.start(free=1.4)
    load(sheet, r.randint(10, 30), running=(10, 30), usage=(0.4, 0.7), queue=(0, 5))
    sheet.prefill(2, sheet.machine.chunk, 0, 0.6, 20, 9)
    trace(
        sheet,
        (
            *LOOP[:3],
            ("models/qwen2.py", 88, "forward"),
            ("layers/logits_processor.py", 190, "forward"),
        ),
        no_memory(sheet, "2.32 GiB", "1.02 GiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-prefill",
        "last-line",
        "The last batch before the memory error is a prefill batch as large as the chunk size.",
        ((CHUNK, DOWN), (MEM, DOWN)),
        ((CHUNK, UP), (MEM, UP), (CAP, UP)),
    )


def oom_prefill_headroom(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.95
    sheet.start(free=0.9)
    load(sheet, r.randint(30, 60), running=(80, 140), usage=(0.9, 0.97), queue=(40, 140))
    trace(
        sheet,
        (
            *LOOP,
            ("model_executor/model_runner.py", 1060, "forward_extend"),
            ("models/llama.py", 290, "forward"),
        ),
        no_memory(sheet, "1.75 GiB", "602.00 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-prefill",
        "after-low-headroom",
        "Little was free at the ready line, and then a prefill batch ran out of memory: that is what happened.",
        ((CHUNK, DOWN), (MEM, DOWN)),
        ((CHUNK, UP), (MEM, UP), (CAP, UP)),
    )


def oom_decode(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, L4)
    sheet.start(free=r.uniform(1.5, 3))
    load(sheet, r.randint(20, 60), running=(150, 320), usage=(0.7, 0.95), queue=(0, 40))
    sheet.decode(r.randint(280, 330), 0.94, 5100.2, 3)
    trace(
        sheet,
        (
            *LOOP,
            ("model_executor/model_runner.py", 1015, "forward_decode"),
            ("models/llama.py", 400, "forward"),
        ),
        no_memory(sheet, "1.18 GiB", "822.00 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-decode",
        "forward-decode",
        "CUDA runs out of memory in forward_decode under a large batch.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


def oom_decode_sampler(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B)
    load(sheet, r.randint(20, 40), running=(180, 280), usage=(0.8, 0.95), queue=(0, 10))
    for _ in range(3):
        sheet.at += 1
        sheet.decode(r.randint(270, 290), 0.95, 4800.1, 2)
    trace(
        sheet,
        (*LOOP[:3], ("layers/sampler.py", 91, "forward")),
        no_memory(sheet, "288.00 MiB", "120.88 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-decode",
        "sampler",
        "The sampler of a large decode batch finds no memory; only decode batches ran before.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


def oom_decode_pool(r: Random) -> Written:
    sheet = paper(r, A10G, L4_7B, RTX_4090, era=r.choice(("2024", "2025")))
    sheet.start(free=1.4)
    load(sheet, r.randint(12, 30), running=(20, 30), usage=(0.95, 1.0), queue=(0, 10))
    sheet.decode(27, 1.0, 611.4, 6)
    trace(
        sheet,
        (
            LOOP[0],
            LOOP[1],
            ("managers/schedule_batch.py", 1301, "prepare_for_decode"),
            ("managers/schedule_batch.py", 702, "alloc_token_slots"),
        ),
        "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 27 tokens.\nAvailable tokens: 11\nself.tree_cache.evictable_size()=0",
    )
    killed(sheet)
    return done(
        sheet,
        "oom-decode",
        "slots",
        "The pool cannot give the next tokens of the running batch and the server stops.",
        ((CAP, DOWN), (MEM, DOWN), (CONS, UP), (MEM, UP)),
        ((CAP, UP), (CONS, DOWN)),
    )


def oom_decode_short(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, era="2025")
    sheet.stamp = "full"
    for _ in range(r.randint(8, 12)):
        sheet.at += 2
        sheet.decode(
            r.randint(330, 360), r.uniform(0.8, 0.9), r.uniform(5000, 6000), r.randint(0, 3)
        )
    trace(
        sheet,
        (
            *LOOP[:2],
            ("model_executor/cuda_graph_runner.py", 540, "replay"),
            ("model_executor/model_runner.py", 1015, "forward_decode"),
        ),
        no_memory(sheet, "640.00 MiB", "210.12 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-decode",
        "short",
        "A short end of a log: decode batches only, then CUDA out of memory.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


def init_pool(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, RTX_4090)
    sheet.fraction = 0.98
    sheet.start("weights")
    sheet.say(
        f"Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem={sheet.machine.gb - 0.4 - sheet.machine.weights:.2f} GB"
    )
    trace(
        sheet,
        (*BEGIN, ("mem_cache/memory_pool.py", 204, "_create_buffers")),
        no_memory(sheet, "1.96 GiB", "1.31 GiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-init",
        "pool",
        "The pool of the wanted share cannot be allocated: too large a share.",
        ((MEM, DOWN),),
        ((MEM, UP),),
    )


def decode_oom_2024(r: Random) -> Written:
    sheet = paper(r, A100_40, A10G, era="2024")
    sheet.start(free=1.1)
    load(sheet, r.randint(15, 40), running=(120, 200), usage=(0.85, 0.97), queue=(0, 10))
    sheet.decode(196, 0.97, 2211.7, 2)
    trace(
        sheet,
        (
            *LOOP[:2],
            ("model_executor/model_runner.py", 433, "forward_decode"),
            ("models/llama.py", 310, "forward"),
        ),
        no_memory(sheet, "244.00 MiB", "88.00 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-decode",
        "2024",
        "CUDA out of memory while 196 requests are decoded.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    init_weights,
    init_graphs,
    init_too_large,
    oom_prefill,
    oom_prefill_by_line,
    oom_prefill_headroom,
    oom_decode,
    oom_decode_sampler,
    oom_decode_pool,
    oom_decode_short,
    init_pool,
    decode_oom_2024,
)
