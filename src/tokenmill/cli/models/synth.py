"""`tokenmill models synth`: a small model with random weights that llama.cpp runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.cli.output import Common, byte_progress, facts, show, show_json
from tokenmill.model.synthetic import generate as making
from tokenmill.units import format_bytes, format_count


def synth(
    *,
    output: Annotated[Path, Parameter(alias="-o")],
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
    context: int | None = None,
    type: str = "Q4_0",
    seed: int = 0,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write a small model with random weights, for tests and benchmarks.

    It loads and decodes in llama.cpp, tokenises any text and answers in
    nonsense words. The same options and seed give the same bytes. Without
    sizes it is some tens of megabytes.

    Parameters
    ----------
    output
        The file to write.
    kind
        moe-mla: latent attention, as DeepSeek and Kimi; moe: ordinary attention, as Qwen3; dense: as Llama.
    layers
        Layers; 4. The first of moe-mla is dense.
    embed
        Width of the embedding; 512.
    heads
        Attention heads; 8.
    kv_heads
        Heads of the KV cache; 2. moe-mla has none.
    head_dim
        Elements in a head; 64, for moe-mla 128, which gives the real cache width of 576.
    experts
        Experts in a layer; 16.
    used
        Experts that answer one token; 4.
    expert_ff
        Hidden width of an expert; 256.
    dense_ff
        Hidden width of a dense layer; 1536, for moe-mla 1024.
    vocab
        Tokens in the vocabulary; 2048.
    context
        Context length it claims to be trained for; 4096.
    type
        Type of the weights, such as Q4_0, Q8_0, Q4_K or F16.
    seed
        Another seed gives another model.
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
