"""`tokenmill models synth`: writes a small model with random weights."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.cli.options import TokenCount
from tokenmill.cli.output import Common, byte_progress, facts, show, show_json
from tokenmill.model.synthetic import generate as making
from tokenmill.units import format_bytes, format_count


def synth(
    *,
    output: Annotated[Path, Parameter(alias="-o", metavar="FILE")],
    kind: making.SyntheticKind = "moe",
    layers: int | None = None,
    embed: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    experts: int | None = None,
    used: int | None = None,
    expert_ff: int | None = None,
    dense_ff: int | None = None,
    vocab: int | None = None,
    context: Annotated[TokenCount | None, Parameter(alias="-c")] = None,
    type: str = "Q4_0",
    seed: int = 0,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write a small model with random weights, for tests and benchmarks.

    It runs in llama.cpp, tokenizes any text and generates nonsense words. The same options and seed give the same
    bytes. With the default sizes it takes some tens of megabytes.

        tokenmill models synth -o tiny.gguf --kind dense

    Parameters
    ----------
    output
        Write to FILE.
    kind
        Architecture: moe-mla has latent attention, as DeepSeek and Kimi; moe is like Qwen3, dense like Llama.
    layers
        Number of layers; the first layer of moe-mla is dense. [default: 4]
    embed
        Embedding width. [default: 512]
    heads
        Number of attention heads. [default: 8]
    kv_heads
        Number of KV heads, except for moe-mla. [default: 2]
    head_dim
        Head dimension. [default: 64; for moe-mla 128, which gives the real cache width of 576]
    experts
        Number of experts per layer. [default: 16]
    used
        Number of experts used per token. [default: 4]
    expert_ff
        Hidden width of an expert. [default: 256]
    dense_ff
        Hidden width of a dense layer. [default: 1536; for moe-mla 1024]
    vocab
        Vocabulary size. [default: 2048]
    context
        Training context recorded in the file. [default: 4096]
    type
        Data type of the weights, such as Q4_0, Q8_0, Q4_K or F16.
    seed
        Seed of the random weights.
    force
        Overwrite an existing file.
    """
    chosen = making.sizes(
        kind,
        {
            "layers": layers,
            "embed": embed,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "experts": experts,
            "used": used,
            "expert_ff": expert_ff,
            "dense_ff": dense_ff,
            "vocab": vocab,
            "context": context,
        },
    )
    with byte_progress() as progress:
        task = progress.add_task(output.name, total=None)
        made = making.write(
            kind,
            chosen,
            output,
            type=type.upper(),
            seed=seed,
            force=force,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if common.json:
        show_json(made)
        return
    show(
        facts(
            {
                "model": made.path,
                "kind": f"{made.kind} ({made.architecture}), seed {made.seed}",
                "tensors": f"{made.tensors}, {format_count(made.parameters)} parameters in {made.type}",
                "size": format_bytes(made.bytes),
            }
        )
    )
